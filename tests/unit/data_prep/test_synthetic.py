"""Drawn problems: equal bytes for equal arguments, and no diagram in two splits."""

import hashlib
import io
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adora_vl.data.dataset import Row, read_manifest, stored_rows
from adora_vl.data.images import pixel_hash
from adora_vl.rewards import canonical_gold, grade, verify_gold
from adora_vl.synthetic import generated as generated_module
from adora_vl.synthetic import knights
from adora_vl.synthetic.drawing import STYLES
from adora_vl.synthetic.families import PLAIN_FAMILY_BY_NAME
from adora_vl.synthetic.generate import FAMILY_BY_NAME, LEVELS, generate, split_of
from adora_vl.synthetic.generated import describe_synthetic, ensure_drawn, prepare_drawn
from adora_vl.synthetic.lettered import LETTERED_FAMILY_BY_NAME
from adora_vl.utils.errors import UserError
from data_prep.cli import main
from tests.support.cases import CaseFolder
from tests.support.disk import file_contents

ROW_COUNT = 100
TEST_ROW_COUNT = 40


@pytest.fixture(scope="module")
def prepared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare `ROW_COUNT` training rows and `TEST_ROW_COUNT` test rows; return their folder."""
    output = tmp_path_factory.mktemp("synthetic") / "data"
    prepare_drawn(output, describe_synthetic(rows=ROW_COUNT, test_rows=TEST_ROW_COUNT))
    return output


def rows_of_folder(folder: Path) -> list[Row]:
    """Return the rows of both splits of a prepared folder."""
    return [*stored_rows(folder, "train"), *stored_rows(folder, "test")]


def pixel_hashes(folder: Path, split: str) -> set[str]:
    """Return the hashes of a split's diagrams."""
    images = (row["images"][0]["bytes"] for row in stored_rows(folder, split))
    return {pixel_hash(Image.open(io.BytesIO(encoded))) for encoded in images}


def test_the_same_arguments_give_the_same_files(prepared_folder: Path, tmp_path: Path) -> None:
    """Two preparations with equal arguments have equal bytes in every file."""
    prepare_drawn(tmp_path / "again", describe_synthetic(rows=ROW_COUNT, test_rows=TEST_ROW_COUNT))
    assert file_contents(prepared_folder) == file_contents(tmp_path / "again")


def test_no_diagram_stands_in_both_splits_even_across_seeds_and_arguments(
    prepared_folder: Path, tmp_path: Path
) -> None:
    """No diagram is in both splits, even over three seeds and three sizes of the test split."""
    train = pixel_hashes(prepared_folder, "train")
    held_out = pixel_hashes(prepared_folder, "test")
    for seed in (1, 2):
        output = tmp_path / str(seed)
        prepare_drawn(
            output, describe_synthetic(rows=ROW_COUNT, test_rows=TEST_ROW_COUNT + seed, seed=seed)
        )
        train |= pixel_hashes(output, "train")
        held_out |= pixel_hashes(output, "test")
    assert len(train) == 3 * ROW_COUNT, "another seed gives other diagrams"
    assert train.isdisjoint(held_out)


def test_every_row_is_sound(prepared_folder: Path) -> None:
    """Every drawn row has a canonical gold, a correct solution, and a picture of its own split.

    The picture decides its split, and is 56 pixels wide.
    """
    rows = rows_of_folder(prepared_folder)
    assert len({row["id"] for row in rows}) == ROW_COUNT + TEST_ROW_COUNT
    assert {row["meta"]["family"] for row in rows} == set(PLAIN_FAMILY_BY_NAME)
    for row in rows:
        assert verify_gold(row["answer"]) is None, row["id"]
        assert row["answer"] == canonical_gold(row["answer_raw"]), row["id"]
        assert grade(row["meta"]["solution"], row["answer"]).verdict == "correct", row["id"]
        image = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        assert image.mode == "RGB"
        assert image.size == (56, 56)
        assert "<image>" not in row["problem"]
        assert split_of(image) == row["split"], (
            "no seed or size can put a held-out diagram into training"
        )


def test_workings_of_one_answer_differ_in_length_by_wording() -> None:
    """Solutions and slips of one kind have several wordings of different length.

    Otherwise their length would only count the digits, and ADORA's criterion would attenuate by
    that.
    """
    word_counts: dict[tuple[str, str, str], set[int]] = {}
    for row in generate(600):
        meta = row["meta"]
        for name in ("solution", "slip"):
            digits_alike = re.sub(r"\d+", "0", meta[name])
            word_counts.setdefault((meta["family"], meta["kind"], name), set()).add(
                len(digits_alike.split())
            )
    assert len(word_counts) == 14, word_counts  # kinds of workings and slips, of all families
    assert all(len(lengths) >= 2 for lengths in word_counts.values()), word_counts


def test_wrong_arguments_end_with_code_2_one_line_and_no_output(
    capsys: pytest.CaptureFixture[str], case_folder: CaseFolder
) -> None:
    """A wrong option is refused in one line with what would be right, before a file is written."""
    cases = [
        ({"--families": "circel"}, "did you mean 'circle'?"),
        (
            {"--families": "triangle_angle"},
            "size: 56 is too small for the letters of 'triangle_angle'",
        ),
        ({"--level": "2"}, "size: 56 is too small for the numbers of level 2"),
        ({"--level": "4"}, "--level: '4' is not a whole number from 1 to 3"),
        ({"--styles": "blod"}, "unknown style 'blod'; did you mean 'bold'?"),
        ({"--choices": "1"}, "--choices: '1' is not a whole number from 2 to 8"),
    ]
    for options_of_case, expected in cases:
        with case_folder(f"{options_of_case!r:.80}") as folder:
            options = {"--output": str(folder / "out"), "--rows": "4", **options_of_case}
            assert (
                main(["synthetic", *[word for option in options.items() for word in option]]) == 2
            )
            error = capsys.readouterr().err
            assert error.startswith("error: ")
            assert error.count("\n") == 1
            assert expected in error
            assert not list(folder.iterdir())


def test_what_is_drawn_is_made_only_where_something_is_missing_or_another(tmp_path, monkeypatch):
    """A folder is kept while it is whole and has the rows that are asked for.

    A lost file, another number of rows or older drawing code makes it anew.
    """
    folder = tmp_path / "parent" / "data"

    def ensure_and_read_time(rows: int = 4) -> int:
        """Ensure the folder, and return when it was made."""
        assert ensure_drawn(folder, describe_synthetic(rows=rows, test_rows=2)) == folder
        return (folder / "manifest.json").stat().st_mtime_ns

    time_of_first = ensure_and_read_time()
    assert ensure_and_read_time() == time_of_first
    (lost_file,) = folder.glob("data/test-*")
    lost_file.unlink()
    assert ensure_and_read_time() != time_of_first
    assert lost_file.is_file()
    ensure_and_read_time(rows=5)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest["counts"] == {"train": 5, "test": 2}
    time_of_older = ensure_and_read_time(rows=5)
    monkeypatch.setattr("adora_vl.synthetic.generated.SYNTHETIC_REVISION", "another")
    assert ensure_and_read_time(rows=5) != time_of_older, "of older drawing code"


# What the revisions stand for. Where this test fails, equal arguments give other rows than before.
# If so intended, the revision in adora_vl/synthetic/generated.py has to change too, so that no run
# resumes on data that changed under it.
DIGEST_BY_REVISION = {
    generated_module.SYNTHETIC_REVISION: "02b6374e669f8045b791dbca52d34f0204cd0a220b642bc1436b3c7495f32235",
    generated_module.KNIGHTS_REVISION: "9577b2e7929d3d0b5131ddfa636eaa6dd0d44b594e340ac1a3bda7828f089798",
}


def test_a_revision_stands_for_the_same_rows() -> None:
    """Drawn rows have the digests of their revision in `DIGEST_BY_REVISION`.

    They are of both splits, with a level and choices, and of the puzzles of knights.
    """
    drawn_rows = [
        *generate(200, split="train", seed=1, size=56),
        *generate(50, split="test", size=112, level=2, choices=4),
    ]
    digests = {
        generated_module.SYNTHETIC_REVISION: digest_of_rows(drawn_rows),
        generated_module.KNIGHTS_REVISION: digest_of_rows(
            knights.generate(100, split="test", seed=1)
        ),
    }
    assert digests == DIGEST_BY_REVISION


def digest_of_rows(rows: Iterable[Any]) -> str:
    """Return a hash of the texts and pixels of rows.

    Pillow draws alike on every processor; another version of it may not, so the pinned one decides.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(
            repr([row[key] for key in ("id", "problem", "answer", "choices", "meta")]).encode()
        )
        for image in row["images"]:
            digest.update(image.tobytes())
    return digest.hexdigest()


# A digest for each family and level, of the code that drew each family by itself.
DIGESTS_OF_PROBLEMS = json.loads(Path(__file__).with_name("drawn_problems.json").read_text())
PINNED_TEXTS = ("question", "answer", "solution", "slip", "goal", "shapes", "kind")


def digest_of_problems(family: str, level: int) -> str:
    """Return a hash of a family's problems, and of how far they moved the random generator.

    One draw more or less would change each row that follows.
    """
    digest = hashlib.sha256()
    for seed, style in enumerate(("plain", "plain", "board")):
        rng = random.Random(seed)
        problem = FAMILY_BY_NAME[family](rng, 224, level, STYLES[style])
        texts = [getattr(problem, name) for name in PINNED_TEXTS]
        digest.update(repr(texts).encode())
        digest.update(problem.image.tobytes())
        # One draw more or less would change each row that follows.
        digest.update(repr(rng.random()).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("family", FAMILY_BY_NAME)
def test_every_family_draws_the_same_problems_as_ever(family: str) -> None:
    """Where this fails on purpose, `SYNTHETIC_REVISION` has to change with the digests."""
    digests = {str(level): digest_of_problems(family, level) for level in LEVELS}
    assert digests == DIGESTS_OF_PROBLEMS[family]


def test_what_is_drawn_never_replaces_another_dataset(tmp_path: Path) -> None:
    """A folder with data of Geometry3K is refused; drawn problems do not replace them."""
    prepare_drawn(tmp_path / "data", describe_synthetic(rows=2, test_rows=0))
    manifest = tmp_path / "data" / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace('"source": "synthetic"', '"source": "geometry3k/hub"')
    )
    with pytest.raises(UserError, match="holds 'geometry3k/hub', not synthetic data"):
        ensure_drawn(tmp_path / "data", describe_synthetic(rows=2, test_rows=0))


def test_the_rows_that_the_shipped_tiny_model_learned_from_never_change() -> None:
    """A change here means `make tiny-model`."""
    assert (
        digest_of_rows(generate(10, seed=1000))
        == "7aa6d9d3d9289cc165e85378fc043423056cb59e5cae9faee469e7848b2fbad7"
    )


def test_lettered_problems_have_golds_that_verify_and_choices_of_which_one_is_right(
    subtests: pytest.Subtests,
) -> None:
    """Problems with letters have a gold that verifies, and four choices of which one is right.

    There are 25 of each level, in which each letter of A to D is right at least once.
    """
    for level in LEVELS:
        with subtests.test(f"{level}"):
            rows = list(
                generate(
                    25,
                    size=168,
                    families=tuple(LETTERED_FAMILY_BY_NAME),
                    level=level,
                    choices=4,
                    styles=tuple(STYLES),
                )
            )
            letters = set()
            for row in rows:
                assert verify_gold(row["answer"], row["choices"]) is None, row
                assert grade(row["meta"]["solution"], row["answer"]).verdict == "correct", row
                assert len(row["choices"]) == 4
                boxes = [f"\\boxed{{{choice}}}" for choice in row["choices"]]
                is_correct = [grade(box, row["answer"]).verdict == "correct" for box in boxes]
                assert is_correct.count(True) == 1
                assert is_correct.index(True) == "ABCD".index(row["answer_raw"])
                letters.add(row["answer_raw"])
                assert split_of(row["images"][0]) == "train", "no diagram of the test split"
            assert letters == set("ABCD")
            assert {row["meta"]["family"] for row in rows} == set(LETTERED_FAMILY_BY_NAME)


def test_styles_change_the_picture_and_nothing_else() -> None:
    """One problem in each style has another diagram, and the same question and answer."""
    pictures = {}
    for style in STYLES:
        problem = FAMILY_BY_NAME["triangle_angle"](random.Random(1), 168, 2, STYLES[style])
        pictures[pixel_hash(problem.image)] = (problem.question, problem.answer)
    assert len(pictures) == len(STYLES)
    assert len(set(pictures.values())) == 1


def test_families_levels_styles_and_choices_from_the_command_line(tmp_path: Path) -> None:
    """Rows take turns among `--families` and follow the other options, which the manifest has."""
    command = [
        "synthetic",
        "--output",
        str(tmp_path / "out"),
        "--rows",
        "4",
        "--test-rows",
        "2",
        "--size",
        "224",
    ]
    command += [
        "--families",
        "triangle_angle, circle",
        "--level",
        "3",
        "--styles",
        "board,pencil",
        "--choices",
        "4",
    ]
    assert main([*command, "--seed", "3"]) == 0
    rows = rows_of_folder(tmp_path / "out")
    assert [row["meta"]["family"] for row in rows[:3]] == [
        "triangle_angle",
        "circle",
        "triangle_angle",
    ]
    assert Image.open(io.BytesIO(rows[0]["images"][0]["bytes"])).size == (224, 224)
    assert all(len(row["choices"]) == 4 and row["answer_raw"] in "ABCD" for row in rows)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest["arguments"]["level"] == 3
    assert manifest["arguments"]["styles"] == ["board", "pencil"]
