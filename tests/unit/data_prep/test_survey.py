"""What `inspect` tells a person: the right numbers as text, and a page on which nothing of the data
can run.
"""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from adora_vl.data.dataset import stored_rows, write_manifest, write_split
from adora_vl.synthetic.generate import generate
from data_prep.cli import main
from data_prep.survey import survey_dataset
from tests.support.browser import Browser, TagsOfPage, assert_attack_runs_unescaped
from tests.support.geometry3k import run_prepare_geometry3k, write_problem_folder
from tests.support.pictures import encode_picture

pytestmark = pytest.mark.slow

ATTACK = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</p></article><iframe src='javascript:parent.document.title=`owned`'></iframe>'\">"
    "<svg onload='document.title=`owned`'>"
)


def split_lines_into_words(text: str) -> list[list[str]]:
    """Return the words of each line."""
    return [line.split() for line in text.splitlines()]


def write_prepared_rows(
    folder: Path, problem: str = "Find x.", rows: int = 6, **changed: Any
) -> Path:
    """Write drawn rows as prepared data with this problem text, and return the folder."""
    problems = [
        {**row, "problem": problem, **changed} for row in generate(rows, size=112, choices=2)
    ]
    write_split(problems, folder, "train")
    write_manifest(
        folder,
        {"source": "synthetic", "input": problem, "revision": None, "arguments": {}},
        {"train": rows},
    )
    return folder


def test_the_real_rows_are_counted_and_measured(geometry3k_raw, tmp_path, capsys):
    """`inspect` counts the real rows' shapes and answer forms, and measures their image tokens.

    Tokens by hand: 250 x 251 -> 9 x 9, 336 x 257 -> 12 x 9, 282 x 150 -> 10 x 5, 628 x 453 -> 22 x
    16, ...
    """
    assert run_prepare_geometry3k("intergps", geometry3k_raw, tmp_path / "out") == 0
    assert main(["inspect", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    for line in (
        ["Circle", "2"],
        ["Parallelogram", "1"],
        ["integer", "5"],
        ["radical", "1"],
        ["min", "50"],
        ["median", "98"],
        ["p95", "352"],
        ["max", "352"],
    ):
        assert line in split_lines_into_words(output), line
    tokens = [9 * 9, 12 * 9, 10 * 5, 22 * 16, 8 * 11, 20 * 14]
    assert list(survey_dataset(tmp_path / "out").splits["train"].image_tokens) == tokens
    assert "79  geometry3k/train/11: In \\odot X" in output
    assert (tmp_path / "out.html").is_file()


def test_longest_problems_in_tokens_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a model the longest problems are counted in its tokens, and otherwise in characters.

    A model that cannot be loaded is one error line.
    """
    from adora_vl.models.load import PRETRAINED_FOLDER

    write_prepared_rows(tmp_path / "data", "Find the measure of a base angle.")
    assert (
        main(["inspect", str(tmp_path / "data"), "--text-only", "--model", str(PRETRAINED_FOLDER)])
        == 0
    )
    output = capsys.readouterr().out
    assert f"tokens of {PRETRAINED_FOLDER}" in output
    assert not (tmp_path / "data.html").exists()
    longest = (
        survey_dataset(tmp_path / "data", model=str(PRETRAINED_FOLDER))
        .splits["train"]
        .longest_problems
    )
    assert len(longest) == 5
    assert 3 < longest[0][0] < len("Find the measure of a base angle.")
    assert main(["inspect", str(tmp_path / "data"), "--model", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: model: ")
    assert error.count("\n") == 1


def test_a_row_cannot_command_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters of a row are not printed.

    Escape codes of a terminal could set its title, or turn the direction of text.
    """
    write_prepared_rows(tmp_path / "data", "Find \x1b[31mx\x1b]0;owned\x07\u202e.")
    assert main(["inspect", str(tmp_path / "data"), "--text-only"]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "\x07" not in output
    assert "\u202e" not in output
    assert "Find  [31mx" in output


@pytest.fixture
def attacked_page(tmp_path: Path) -> Path:
    """Return a page of `inspect` whose rows have `ATTACK`, HTML that runs code, in every text."""
    row: dict[str, Any] = {
        "answer": ATTACK,
        "answer_raw": ATTACK,
        "choices": [ATTACK, "5"],
        "id": ATTACK,
        "source": ATTACK,
    }
    meta = dict.fromkeys(("kind", "solution", "slip"), "") | {
        "goal": ATTACK,
        "shapes": [ATTACK],
        "family": ATTACK,
    }
    write_prepared_rows(tmp_path / "data", ATTACK, **row, meta=meta)
    assert main(["inspect", str(tmp_path / "data"), "--html", str(tmp_path / "page.html")]) == 0
    return tmp_path / "page.html"


def test_the_page_is_self_contained_and_holds_texts_as_text(attacked_page: Path) -> None:
    """The page of hostile rows has no tag, attribute or address that the rows bring."""
    page = TagsOfPage(attacked_page.read_text())
    allowed_tags = (
        "html head meta title style body h1 h2 h3 nav a div figure figcaption img article p ol "
        "li dl dt dd pre"
    )
    assert {tag for tag, _ in page.tags} <= set(allowed_tags.split())
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("src") or "data:image/").startswith("data:image/")
        assert (attributes.get("href") or "#").startswith("#")
    assert sum(tag == "article" for tag, _ in page.tags) == 6
    assert not re.search(r"https?://(?!www\.w3\.org)", attacked_page.read_text())


def test_nothing_runs_in_a_real_browser(
    attacked_page: Path, browser: Browser, tmp_path: Path
) -> None:
    """HTML in the rows does not run when a browser opens their page.

    It would show in the page's title; without escaping and policy the same rows do exactly that.
    """
    assert_attack_runs_unescaped(ATTACK, browser, tmp_path)
    browser.open(attacked_page)
    rendered = browser.page.content()
    assert browser.evaluate("document.title") == "data: 6 rows"
    assert "owned</title>" not in rendered
    assert rendered.count("<article>") == 6
    assert "<script" not in rendered
    assert "<iframe" not in rendered
    assert browser.errors == []
    assert [
        url for url in browser.requests if not url.startswith(("data:", "file:", "about:"))
    ] == []


def test_the_policy_alone_stops_what_would_not_be_escaped(
    attacked_page: Path, browser: Browser
) -> None:
    """Here the attack stands in the page unescaped, and its Content Security Policy refuses it."""
    unescaped_page = attacked_page.with_name("forgotten.html")
    unescaped_page.write_text(attacked_page.read_text().replace("</h1>", f"</h1>{ATTACK}"))
    browser.open(unescaped_page)
    browser.wait_for_error("Content Security Policy")
    assert browser.evaluate("document.title") == "data: 6 rows"


def test_the_page_is_the_same_again_and_of_bounded_size(tmp_path: Path) -> None:
    """The page is equal at a second call, and has at most 48 rows and 10 MB.

    The data are 60 rows with pictures of 400 kB and long texts.
    """
    noise = {
        "bytes": encode_picture(Image.effect_noise((700, 700), 100).convert("RGB")),
        "path": None,
    }
    assert len(noise["bytes"]) > 400_000
    rows = [{**row, "images": [noise], "problem": "x" * 100_000} for row in generate(60)]
    write_split(rows, tmp_path / "data", "train")
    pages = []
    for _ in range(2):
        assert main(["inspect", str(tmp_path / "data")]) == 0
        pages.append((tmp_path / "data.html").read_bytes())
    assert pages[0] == pages[1]
    assert pages[0].count(b"<article>") == 48
    assert len(pages[0]) < 10_000_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "data.html"]


def test_a_strangers_page_is_not_overwritten(tmp_path, capsys, monkeypatch):
    """`inspect` refuses to overwrite an HTML file that is not its own, before it reads any row."""
    write_prepared_rows(tmp_path / "data")
    (tmp_path / "data.html").write_text("<h1>my thesis</h1>")
    assert main(["inspect", str(tmp_path / "data")]) == 2
    error = capsys.readouterr().err
    assert "data.html' is not a page of ours" in error
    assert error.count("\n") == 1
    assert (tmp_path / "data.html").read_text() == "<h1>my thesis</h1>"
    # no row is read before the page's place is known
    monkeypatch.setattr("data_prep.cli.survey_dataset", None)
    assert main(["inspect", str(tmp_path / "data")]) == 2
    code = main(
        [
            "inspect",
            str(tmp_path / "data"),
            "--html",
            str(tmp_path / "data.html" / "below.html"),
        ]
    )
    assert code == 2
    assert (
        main(["inspect", str(tmp_path / "data"), "--html", str(tmp_path / "no" / "folder.html")])
        == 2
    )


def test_the_page_tells_what_was_left_out(tmp_path: Path) -> None:
    """The page of `inspect` says how many rows were refused, and why.

    One of four problems has the answer Z, which is the letter of no choice.
    """
    for number in range(3):
        write_problem_folder(tmp_path / "raw", number=number)
    write_problem_folder(tmp_path / "raw", number=3, answer="Z")
    assert (
        run_prepare_geometry3k(
            "intergps", tmp_path / "raw", tmp_path / "out", "--allow-quarantined", "0.5"
        )
        == 0
    )
    assert main(["inspect", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out.html").read_text()
    assert "quarantined: 1 row (letter_without_choice 1)" in page
    assert (
        page.count("<li class=right>5 \\sqrt { 3 }</li>")
        == 3
        == len(list(stored_rows(tmp_path / "out", "train")))
    )


def test_inspect_leaves_out_what_no_row_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`inspect` has no table of pictures, goals or shapes if no row has them."""
    assert main(["inspect", str(write_prepared_rows(tmp_path / "drawn"))]) == 0
    assert {"goal", "shape", "image size (longest side)"} <= set(
        capsys.readouterr().out.splitlines()
    )
    nothing = dict.fromkeys(next(iter(generate(1, size=112, choices=2)))["meta"])
    assert (
        main(["inspect", str(write_prepared_rows(tmp_path / "text", images=[], meta=nothing))]) == 0
    )
    output = capsys.readouterr().out
    assert "answer form" in output.splitlines()
    assert "longest problems" in output
    for title in ("unknown", "goal", "shape", "image size", "image tokens"):
        assert title not in output, title
    drawn_page = (tmp_path / "drawn.html").read_text()
    assert "<figcaption>Goals</figcaption>" in drawn_page
    assert drawn_page.index("<article>") < drawn_page.index("<figcaption>"), "pictures come first"
    text_page = (tmp_path / "text.html").read_text()
    assert "<figcaption>Answer forms</figcaption>" in text_page
    assert "Goals" not in text_page
    assert "Shapes" not in text_page


def test_inspect_of_something_else_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without a data set, or no folder, is refused."""
    for folder in (tmp_path, tmp_path / "none"):
        assert main(["inspect", str(folder)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: dataset: ")
        assert error.count("\n") == 1


def test_inspect_counts_every_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`inspect` prints a column for each split, and a line for each source, goal, form and size."""
    command = ["synthetic", "--output", str(tmp_path / "out"), "--rows", "5", "--test-rows", "3"]
    command += ["--families", "polygon"]
    assert main(command) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out")]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in (
        ["train", "test"],
        ["rows", "5", "3"],
        ["synthetic", "5", "3"],
        ["Angle", "5", "3"],
        ["integer", "5", "3"],
        ["up", "to", "56", "px", "5", "3"],
    ):
        assert line in table


def test_what_is_wrong_beyond_a_row_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`inspect` says where rows and manifest differ, and which ids come twice.

    Repeated ids are what a training would refuse.
    """
    folder = write_prepared_rows(tmp_path / "out", id="a/1", rows=3)
    manifest_file = folder / "manifest.json"
    manifest = json.loads(manifest_file.read_text())
    manifest["counts"] = {"train": 5, "test": 2}
    manifest_file.write_text(json.dumps(manifest))
    assert main(["inspect", str(folder), "--text-only"]) == 0
    faults = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrong: ")]
    assert [fault.split(",")[0] for fault in faults] == [
        "wrong: the manifest counts 5 rows of train",
        "wrong: 2 rows of train with the id of an earlier row",
        "wrong: the manifest has a split 'test'",
    ]
    sound = write_prepared_rows(tmp_path / "sound")
    assert main(["inspect", str(sound), "--text-only"]) == 0
    assert "wrong: " not in capsys.readouterr().out


def test_rows_of_another_program_are_shown_too(tmp_path: Path) -> None:
    """Rows of another program are shown, whatever their `meta`; the answer marks the right choice.

    They lack the column `answer_raw`, which has the letter otherwise.
    """
    row = {
        "id": "a/1",
        "images": [{"bytes": encode_picture(Image.new("RGB", (60, 60))), "path": None}],
        "problem": "Find x.",
        "answer": "4",
        "choices": ["3", "4"],
    }
    for name, meta in (("text", "none"), ("numbers", {"goal": 7, "shapes": "a", "family": 3})):
        folder = tmp_path / name
        (folder / "data").mkdir(parents=True)
        table = pa.Table.from_pylist([{**row, "meta": meta}])
        pq.write_table(table, folder / "data" / "train-00000-of-00001.parquet")
        assert main(["inspect", str(folder)]) == 0
        page = (tmp_path / f"{name}.html").read_text()
        assert "<li>3</li><li class=right>4</li>" in page
