"""The reference's Parquet files of knights and knaves: read by logic, refused by row where they do not hold."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adora_vl.rewards.knights import knights_verdict
from data_prep.cli import main
from data_prep.knights_table import fitting, holds
from data_prep.storage import load_split, read_manifest

REAL = Path(__file__).parents[3] / "shared" / "data" / "kk"
KNIGHT, LIAR = ("telling-truth", 0), ("lying", 1)


@pytest.mark.parametrize(
    ("claim", "true_for"),
    [
        (KNIGHT, {(True, False), (True, True)}),
        (LIAR, {(True, False), (False, False)}),
        (("not", KNIGHT), {(False, False), (False, True)}),
        (("and", KNIGHT, LIAR), {(True, False)}),
        (("or", KNIGHT, LIAR), {(True, False), (True, True), (False, False)}),
        (("->", KNIGHT, LIAR), {(True, False), (False, False), (False, True)}),
        (("<=>", KNIGHT, LIAR), {(True, False), (False, True)}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_claim_is_true_of_exactly_these(claim, true_for):
    assert {kinds for kinds in product((True, False), repeat=2) if holds(claim, kinds)} == true_for


@pytest.mark.parametrize("claim", [("xor", KNIGHT, LIAR), ("telling-truth", 2), ("and",), "lying", 3])
def test_another_claim_is_refused(claim):
    with pytest.raises(ValueError, match="is no claim"):
        holds(claim, (True, False))


def test_people_who_vouch_for_each_other_fit_twice():
    assert fitting((("telling-truth", 1), ("telling-truth", 0))) == [(True, True), (False, False)]


def record(**changed: Any) -> dict[str, Any]:
    """Ada: Ben lies. Ben: Ada and I are both knights."""
    return {
        "quiz": "You meet 2 inhabitants: Ada, and Ben. Ada says that Ben lies. So who is who?",
        "names": ["Ada", "Ben"],
        "solution": [True, False],
        "statements": "(('lying', 1), ('and', ('telling-truth', 0), ('telling-truth', 1)))",
        "extra_info": {"split": "train", "index": 0},
        **changed,
    }


def prepare(tmp_path: Path, *records: dict[str, Any], words: tuple[str, ...] = ()) -> int:
    pq.write_table(pa.Table.from_pylist(list(records)), tmp_path / "kk.parquet")
    source = ["--source", "parquet", "--input", str(tmp_path / "kk.parquet")]
    return main(["knights", *source, "--output", str(tmp_path / "out"), *words])


def test_rows_become_problems_that_ask_for_a_box_or_for_nothing(tmp_path):
    assert prepare(tmp_path, record()) == 0
    (row,) = load_split(str(tmp_path / "out"), "train")
    assert row["answer"] == "Ada is a knight, Ben is a knave" and row["images"] == []
    assert row["problem"] == record()["quiz"] + " Put the answer in a box, like \\boxed{Ada is a knight, ...}."
    assert prepare(tmp_path, record(), words=("--question", "plain", "--overwrite")) == 0
    assert load_split(str(tmp_path / "out"), "train")[0]["problem"] == record()["quiz"]
    assert read_manifest(tmp_path / "out")["source"] == "knights", "which evaluation belongs to it"


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "another solution": ({"solution": [False, False]}, "is not the only one that fits"),
    "no claim": ({"statements": "(('lying', 1), ('maybe', 0))"}, "is no claim about"),
    "code": ({"statements": "__import__('os').getcwd()"}, "ValueError: malformed node"),
    "no Python": ({"statements": "((("}, "SyntaxError"),
    "too few people": ({"names": ["Ada"]}, "2 to 8 words"),
    "names alike": ({"names": ["Ada", "Ada"]}, "for 1 people"),
    "another split": ({"extra_info": {"split": "dev", "index": 0}}, "split is 'dev'"),
    "no split": ({"extra_info": None}, "TypeError"),
}


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_a_row_that_does_not_hold_is_named_and_nothing_is_written(case, tmp_path, capsys):
    changed, words = BROKEN[case]
    assert prepare(tmp_path, record(), record(quiz="Another?", **changed)) == 2
    said = capsys.readouterr().err
    assert said.strip().count("\n") == 0 and "row 1 of" in said and words in said
    assert not (tmp_path / "out").exists()


def test_the_same_puzzle_twice_and_other_files_are_refused(tmp_path, capsys):
    assert prepare(tmp_path, record(), record()) == 2
    assert "row 1 of" in (said := capsys.readouterr().err) and "the same puzzle as row 0" in said
    assert prepare(tmp_path, {"problem": "1 + 1", "answer": "2"}) == 2
    assert "has no column 'quiz'" in capsys.readouterr().err
    (tmp_path / "kk.parquet").write_bytes(b"no Parquet")
    words = ["knights", "--source", "parquet", "--output", str(tmp_path / "out")]
    assert main([*words, "--input", str(tmp_path / "kk.parquet")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main([*words, "--input", str(tmp_path / "empty")]) == 2
    assert "has no Parquet file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--source", "parquet"], "input: --source parquet needs it"),
        (["--source", "parquet", "--input", "x", "--rows", "5"], "rows: 5 does not go with --source parquet"),
        (["--source", "parquet", "--input", "x", "--seed", "0"], "seed: 0 does not go with --source parquet"),
        ([], "rows: --source drawn needs it"),
        (["--rows", "5", "--question", "plain"], "question: plain does not go with --source drawn"),
    ],
)
def test_options_of_the_other_source_are_refused(words, said, tmp_path, capsys):
    assert main(["knights", "--output", str(tmp_path / "out"), *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(not REAL.is_dir(), reason="ADORA's own puzzles are not beside this checkout (kk in ../shared/data)")
def test_the_references_own_puzzles(tmp_path):
    words = ["knights", "--source", "parquet", "--input", str(REAL), "--output", str(tmp_path / "out")]
    assert main(words) == 0
    rows = load_split(str(tmp_path / "out"), "test")
    assert [row["meta"]["family"] for row in rows] == ["3 people"] * 100 + ["7 people"] * 100
    assert all(knights_verdict(row["meta"]["solution"], row["answer"])[0] == "correct" for row in rows)
