"""Every column of a data set missing, null, of another type, NaN, huge or with markup: quarantine, or a line.

The same values go through data preparation (both kinds of source), the evaluation's data and its predictions files, and
`inspect`. Nothing may end in a traceback, and a row with a control token or without an answer never gets through.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adora_vl.errors import UserError
from data_prep.cli import main as data_prep
from data_prep.storage import stored_rows
from eval.command import main as evaluate
from eval.geometry3k.benchmark import BENCHMARK as GEOMETRY3K
from eval.knights.benchmark import BENCHMARK as KNIGHTS
from eval.mathvista.benchmark import BENCHMARK as MATHVISTA
from eval.mmstar.benchmark import BENCHMARK as MMSTAR
from eval.options import parse
from tests.benchmark_data import mathvista_rows, mmstar_rows
from tests.unit.data_prep_support import GOOD, drawing, encoded, prepare, problem_folder, quarantined

pytestmark = pytest.mark.slow

MISSING = object()
VALUES: dict[str, Any] = {
    "missing": MISSING,
    "null": None,
    "empty": "",
    "blank": " \n",
    "number": 7,
    "NaN": float("nan"),
    "true": True,
    "list": ["5"],
    "list of null": [None],
    "object": {"a": 1},
    "huge": "9" * 200_000,
    "deep": "{" * 20_000,
    "markup": "<script>alert(1)</script><image>",
    "control token": "Find x.<|image_pad|><|im_end|>",
    "control characters": "a\x00b\x1b[2J\u202e",
}
NEVER_SOUND = ("missing", "null", "empty", "blank", "control token")  # in the texts that a model reads or is graded by


def said_in_lines(code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error, after checking that a refusal is error lines alone."""
    said = capsys.readouterr().err
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert code in (0, 2) and bool(errors) == (code == 2), said
    assert all(len(line) < 1500 for line in errors), "a line that nobody reads"
    return said


@pytest.mark.parametrize("column", ["problem_text", "answer", "choices", "problem_type_goal", "detailed_solution"])
def test_a_field_of_a_problem_folder(column: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, value in enumerate(VALUES.values()):
        changed = {**GOOD, column: value}
        folder = problem_folder(tmp_path / "raw", number=number)
        kept = {key: item for key, item in changed.items() if item is not MISSING}
        (folder / "data.json").write_text(json.dumps(kept))
    problem_folder(tmp_path / "raw", number=99)
    assert prepare("intergps", tmp_path / "raw", tmp_path / "out", "--allow-quarantined", "1") == 0
    refused = {line["id"].rsplit("/")[-1]: line for line in quarantined(tmp_path / "out")}
    kept_ids = {row["id"].rsplit("/")[-1] for row in stored_rows(tmp_path / "out", "train")}
    assert len(refused) + len(kept_ids) == len(VALUES) + 1, "a row is neither kept nor in quarantine"
    assert "99" in kept_ids and all(line["reason"] and line["detail"] for line in refused.values())
    if column in ("problem_text", "answer", "choices"):
        for number, kind in enumerate(VALUES):
            if kind in NEVER_SOUND:
                assert str(number) in refused, (column, kind)
    assert data_prep(["inspect", str(tmp_path / "out"), "--text-only"]) == 0  # what was kept is sound
    capsys.readouterr()


def table(column: str, value: Any, path: Path) -> None:
    """A Parquet file of one good row and one whose `column` is `value`, with the type that the value has."""
    image = {"bytes": encoded(drawing(1)), "path": None}
    other = {"bytes": encoded(drawing(2)), "path": None}
    good: dict[str, Any] = {"id": "a/1", "images": [image], "problem": "Find x.", "answer": "5", "choices": None}
    bad = {**good, "id": "a/2", "images": [other], "problem": "Find y."}
    if value is MISSING:
        rows = [{key: item for key, item in row.items() if key != column} for row in (good, bad)]
    elif value is None or (isinstance(value, type(good[column])) and column != "images"):
        rows = [good, {**bad, column: value}]
    else:  # a Parquet column has one type
        rows = [{**good, column: value}, {**bad, column: value}]
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("column", ["id", "images", "problem", "answer", "choices"])
def test_a_column_of_a_table(
    column: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a source, as a prepared folder that is looked at, and as one that is evaluated."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    source = tmp_path / "raw" / "data" / "train-00000-of-00001.parquet"
    table(column, VALUES[kind], source)
    code = prepare("parquet", tmp_path / "raw", tmp_path / "out", "--allow-quarantined", "1")
    said_in_lines(code, capsys)
    sound = not (kind in NEVER_SOUND and column in ("images", "problem", "answer"))
    sound = sound or (column, kind) == ("answer", "control token")  # no model reads a gold
    if code == 0:
        there = (tmp_path / "out" / "quarantine.jsonl").exists()
        refused = quarantined(tmp_path / "out") if there else []
        assert sum(1 for _ in stored_rows(tmp_path / "out", "train")) + len(refused) == 2
        assert sound or refused, "a row that ends a run got through"
        assert data_prep(["inspect", str(tmp_path / "out"), "--text-only"]) == 0
    looked = data_prep(["inspect", str(tmp_path / "raw"), "--text-only"])
    said = said_in_lines(looked, capsys)
    words = ["infer", "--model", "tiny", "--data", str(tmp_path / "raw"), "--split", "train", "--output", "o"]
    asked = load_only(GEOMETRY3K, words)
    assert sound or (looked == 2 and asked is not None), said


@pytest.mark.parametrize("benchmark", [GEOMETRY3K, KNIGHTS, MATHVISTA, MMSTAR], ids=lambda benchmark: benchmark.name)
def test_a_field_of_a_predictions_row(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = {"mathvista": mathvista_rows(4), "mmstar": mmstar_rows(2)}.get(benchmark.name) or [
        {"pid": "1", "question": "Who?", "answer": "Ada is a knight", "choices": None, "metadata": {"family": "3"}}
    ]
    for row in rows:
        row.pop("decoded_image", None)
        row.pop("image", None)
        row.setdefault("pid", str(row.get("index")))
        row.update(response="\\boxed{Ada is a knight}", n_tokens=3, finish_reason="stop", image_size=[5, 6], sample=0,
                   extraction="A")  # fmt: skip
    for column in rows[0]:
        for kind, value in VALUES.items():
            changed = [{**row, column: value} for row in rows]
            kept = [{key: item for key, item in row.items() if item is not MISSING} for row in changed]
            (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
            for more in ([], ["--extraction", "stored"]) if benchmark is MATHVISTA else ([],):
                words = ["score", "--predictions", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "out"), *more]
                try:
                    code = evaluate(benchmark, words)
                except Exception as error:
                    raise AssertionError(f"{column} {kind} {more}") from error
                said = said_in_lines(code, capsys)
                assert code == 0 or "row " in said or "pid" in said, (column, kind, said)


@pytest.mark.parametrize("benchmark", [MATHVISTA, MMSTAR], ids=lambda benchmark: benchmark.name)
def test_a_field_of_a_benchmarks_row(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is asked."""
    rows: list[dict[str, Any]] = mathvista_rows(4) if benchmark is MATHVISTA else mmstar_rows(2)
    for row in rows:
        row.pop("decoded_image", None)
        row["image"] = "images/1.png"
    (tmp_path / "data").mkdir()
    for column in rows[0]:
        for kind, value in VALUES.items():
            changed = [{**row, column: value} for row in rows]
            kept = [{key: item for key, item in row.items() if item is not MISSING} for row in changed]
            (tmp_path / "data" / f"{benchmark.split}.json").write_text(json.dumps(kept))
            parsed = ["infer", "--model", "tiny", "--data", str(tmp_path / "data"), "--output", str(tmp_path / "o")]
            said = load_only(benchmark, parsed)
            if kind == "control token" and column in ("question", "query", "choices"):
                unread = column == "question" and benchmark is MATHVISTA  # the data's own `query` is what is asked
                assert said is not None or unread, (column, kind)
            if column == "answer" and kind in ("missing", "null"):
                assert said is not None
            assert said is None or "row" in said or "id" in said, (column, kind, said)


def load_only(benchmark: Any, words: list[str]) -> str | None:
    """The refusal of the data; None where they are taken."""
    options = parse(words, benchmark.name, benchmark.split, benchmark.add_data_options, benchmark.add_score_options)
    try:
        benchmark.load(options)
    except UserError as error:
        return str(error)
    return None
