"""`python -m data_prep convert`: the same problems come out of every format, and the columns are the user's."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from datasets import IterableDatasetDict, load_dataset

from adora_vl.prompts import PLACEHOLDER, conversation_with_images, conversations
from adora_vl.rows import PLACEHOLDER as PLACEHOLDER_OF_ROWS
from adora_vl.rows import problem_with_row
from data_prep.cli import main
from data_prep.own.places import HeldOutShare
from data_prep.storage import read_manifest, stored_rows
from tests.unit.data_prep_support import drawing, encoded, quarantined, stored_image
from tests.unit.own_data_support import (
    COLUMNS,
    EXPECTED,
    FORMATS,
    PICTURES,
    convert,
    found,
    jsonl,
    parquet_hub,
    with_images,
)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_problems(form: str, tmp_path: Path) -> None:
    source = FORMATS[form](tmp_path / "in")
    assert convert(source, tmp_path / "out") == 0
    assert found(tmp_path / "out") == EXPECTED
    rows = list(stored_rows(tmp_path / "out", "train"))
    assert [stored_image(row).tobytes() for row in rows] == [drawing(n, 60).tobytes() for n in (0, 1, 3)]
    assert all(problem_with_row(row) is None for row in rows)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None and manifest["counts"] == {"train": 3} and manifest["source"].startswith("own/")
    assert manifest["arguments"]["columns"]["problem"] == "question"


def test_it_has_a_page_on_which_markup_is_text(tmp_path: Path) -> None:
    assert (
        convert(
            jsonl(tmp_path / "in", [{**with_images([""] * 4)[2], "image": [], "question": "Is <b>&?"}]),
            tmp_path / "out",
        )
        == 0
    )
    assert main(["inspect", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out.html").read_text()
    assert "Is &lt;b&gt;&amp;?" in page and "<b>&" not in page


def test_a_hub_id_is_streamed_at_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = str(parquet_hub(tmp_path) / "data" / "*.parquet")
    asked: list[tuple[Any, ...]] = []

    def load(name: str, subset: str | None, *, revision: str, streaming: bool) -> IterableDatasetDict:
        asked.append((name, subset, revision, streaming))
        stream = load_dataset("parquet", data_files={"train": files, "testmini": files}, streaming=True)
        assert isinstance(stream, IterableDatasetDict)
        return stream

    class Api:
        def dataset_info(self, name: str, revision: str | None = None) -> Any:
            return type("Info", (), {"sha": {"v1": "1" * 40}.get(revision or "", "2" * 40)})

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    options = ("--name", "mine", "--subset", "all", "--revision", "v1", "--splits", "train=train")
    assert convert("someone/theirs", tmp_path / "out", *options) == 0
    assert asked == [("someone/theirs", "all", "1" * 40, True)]
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None and manifest["revision"] == "1" * 40 and found(tmp_path / "out") == EXPECTED
    assert convert("someone/theirs@v1", tmp_path / "few", "--limit", "2", "--name", "mine") == 0
    assert len(found(tmp_path / "few")) == 2 and asked[-1][2] == "1" * 40
    assert convert("someone/theirs", tmp_path / "no", "--splits", "test=test") == 2


def test_files_named_after_splits_are_these_splits_and_a_leak_between_them_is_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    rows = with_images([f"../pics/{n}.png" for n in range(4)])
    for name, part in (
        ("train-0", rows),
        ("train-1", [{**rows[0], "key": None, "question": "New?"}]),
        ("test", rows[:1]),
    ):
        jsonl(folder / "tables", part).rename(folder / "tables" / f"{name}.jsonl")
    (folder / "tables" / "pics").rename(folder / "pics")
    (folder / "tables").rename(folder / "data")
    assert convert(folder, tmp_path / "out", "--name", "mine") == 0
    assert found(tmp_path / "out", "test").keys() == {"mine/test/a"}
    assert found(tmp_path / "out").keys() == {"mine/train/b", "mine/train/c", "mine/train/3"}
    assert [line["reason"] for line in quarantined(tmp_path / "out")] == ["leak"]


@pytest.mark.parametrize("share", [0.1, 0.2, 0.33, 0.5])
def test_a_test_share_is_one_row_of_each_block(share: float) -> None:
    held = [index for index in range(1000) if index in HeldOutShare(share, seed=3)]
    assert len(held) == pytest.approx(1000 * share, abs=1)
    assert max(after - before for before, after in pairwise(held)) <= 2 / share
    assert held != [index for index in range(1000) if index in HeldOutShare(share, seed=4)]


def test_train_and_test_share_out_every_row_once(tmp_path: Path) -> None:
    rows = [{"q": f"What is {n}?", "a": n} for n in range(20)]
    source = jsonl(tmp_path / "in", rows)
    assert convert(source, tmp_path / "out", "--test-share", "0.25", columns=("problem=q", "answer=a")) == 0
    golds = {split: [row["answer"] for row in stored_rows(tmp_path / "out", split)] for split in ("train", "test")}
    assert len(golds["test"]) == 5 and sorted(map(int, golds["train"] + golds["test"])) == list(range(20))


@pytest.mark.parametrize(
    ("answer", "choices", "gold"),
    [
        ("(B)", ["red", "blue"], "blue"),
        ("blue", ["red", "blue"], "blue"),
        (7, [5, 7.0], "7"),
        ("B", ["Rome, Italy", "Oslo, Norway"], "B"),  # a list is no gold, so the letter is
        (3.0, None, "3"),
        (-0.25, None, "-0.25"),
        (10**30, None, str(10**30)),
        ("Paris", None, "Paris"),
    ],
)
def test_texts_numbers_and_options_are_golds(answer: Any, choices: Any, gold: str, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in", [{"q": "What?", "a": answer, "c": choices}])
    assert convert(source, tmp_path / "out", columns=("problem=q", "answer=a", "choices=c")) == 0
    (row,) = stored_rows(tmp_path / "out", "train")
    assert row["answer"] == gold


def test_options_and_images_may_have_a_column_each(tmp_path: Path) -> None:
    rows = [
        {"q": "1?", "a": "B", "A": "x y", "B": "z", "C": None, "i1": "pics/0.png", "i2": "pics/1.png"},
        {"q": "2?", "a": "A", "A": "u", "B": "v", "C": "w", "i1": "pics/2.png", "i2": None},
    ]
    source = jsonl(tmp_path / "in", rows)
    assert convert(source, tmp_path / "out", columns=("problem=q", "answer=a", "choices=A,B,C", "images=i1,i2")) == 0
    kept = list(stored_rows(tmp_path / "out", "train"))
    assert [(row["choices"], len(row["images"])) for row in kept] == [(["x y", "z"], 2), (["u", "v", "w"], 1)]


def test_the_place_of_each_image_is_where_the_problem_has_it() -> None:
    assert PLACEHOLDER == PLACEHOLDER_OF_ROWS
    user = conversation_with_images("Add <image> to <image>.", 2)[-1]["content"]
    text, image = (lambda words: {"type": "text", "text": words}), {"type": "image"}
    assert user == [text("Add "), image, text(" to "), image, text(".")]
    assert conversation_with_images("Add.", 2)[-1]["content"] == [image, image, text("Add.")]
    plain, placed = conversations(["a", "b"], [1, 0], "s"), conversations(["a", "<image>b"], [1, 1], "s")
    assert [messages[-1]["content"] for messages in plain] == ["a", "b"]  # as it was before
    assert [messages[-1]["content"] for messages in placed] == [[image, text("a")], [image, text("b")]]
    sound = {"id": "1", "answer": "1", "images": [b"p"], "problem": "See <image>?", "choices": None}
    assert problem_with_row(sound) is None and "2 <image> with 1 image" in str(
        problem_with_row({**sound, "problem": "<image><image>"})
    )


def test_the_same_command_again_takes_what_is_in_the_file_now(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in")
    assert convert(source, tmp_path / "out") == 0
    first = json.dumps(found(tmp_path / "out"))
    jsonl(tmp_path / "in", with_images([f"pics/{n}.png" for n in range(4)])[:2])
    assert convert(source, tmp_path / "out") == 0
    assert len(found(tmp_path / "out")) == 2 and json.dumps(found(tmp_path / "out")) != first
    assert convert(source, tmp_path / "out", columns=COLUMNS[:3]) == 2  # another data set: only with --overwrite


def test_a_picture_may_be_bytes_or_base64_without_a_head(tmp_path: Path) -> None:
    import base64

    import pyarrow as pa
    import pyarrow.parquet as pq

    long = encoded(drawing(7, 400))
    assert len(base64.b64encode(long)) > 1024
    rows = [{"q": "?a", "a": "1", "i": [PICTURES[0], PICTURES[1]]}, {"q": "?b", "a": "2", "i": [long]}]
    (tmp_path / "in").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in" / "b.parquet")
    columns = ("problem=q", "answer=a", "images=i")
    assert convert(tmp_path / "in" / "b.parquet", tmp_path / "out", columns=columns) == 0
    source = jsonl(tmp_path / "in", [{"q": "?", "a": "1", "i": base64.b64encode(long).decode()}])
    assert convert(source, tmp_path / "out2", columns=columns) == 0
    assert [len(row["images"]) for row in stored_rows(tmp_path / "out", "train")] == [2, 1]


def test_a_column_of_the_users_own_is_still_there_after_a_filter(tmp_path: Path) -> None:
    assert convert(jsonl(tmp_path / "in"), tmp_path / "all") == 0
    rows = list(stored_rows(tmp_path / "all", "train"))
    responses = [rf"\boxed{{{row['answer']}}}" if row["hint"] else r"\boxed{0}" for row in rows]
    lines = [
        {"pid": row["id"], "question": row["problem"], "answer": row["answer"], "choices": row["choices"],
         "metadata": {}, "response": response}
        for row, response in zip(rows, responses, strict=True)
    ]  # fmt: skip
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--predictions", str(tmp_path / "answers.jsonl"), "--keep", "0.5:1"]
    assert main(["filter", "--input", str(tmp_path / "all"), "--output", str(tmp_path / "some"), *words]) == 0
    assert found(tmp_path / "some") == {name: row for name, row in EXPECTED.items() if row[3]}
