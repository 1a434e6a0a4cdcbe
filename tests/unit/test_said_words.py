"""What the commands print: one thing is singular, and a range written the wrong way round is put right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adora_vl.commands import amount
from adora_vl.config.arithmetic import plan_batches
from adora_vl.report.difference import between_problems
from adora_vl.report.summary import summary_lines
from data_prep.cli import main as data_prep
from data_prep.cli import parser
from data_prep.knights import PEOPLE
from eval.__main__ import main as evaluate
from eval.compare import ScoreFile
from tests.tiny_run import arguments

ONE_OF_MANY = re.compile(r"(?<![\d.,])1 (rows|problems|answers|prompts|steps|optimizer steps|rollouts|images|lines)\b")


@given(st.integers(0, 10**9))
@settings(deadline=None)
def test_an_amount_is_singular_for_one_alone(count: int) -> None:
    assert amount(count, "row") == (f"{count} row" if count == 1 else f"{count} rows")


def test_one_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A data set of one row, prepared, looked at and scored; one prompt a generation; one step; one problem."""
    data = tmp_path / "one"
    assert data_prep(["synthetic", "--output", str(data), "--rows", "1", "--test-rows", "1"]) == 0
    assert data_prep(["inspect", str(data), "--text-only"]) == 0
    (tmp_path / "p.jsonl").write_text('{"pid": "a", "answer": "5", "response": "so 5"}\n')
    words = ["score", "--predictions", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "s.json")]
    assert evaluate(["geometry3k", *words]) == 0
    said = "".join(capsys.readouterr())
    assert "train 1 row, test 1 row" in said
    plan = plan_batches(per_device_train_batch_size=4, num_processes=1, num_generations=4)
    score = ScoreFile("a", {}, {"p": 1.0}, 1)
    said += plan.describe() + between_problems([score], [score]).over
    assert ONE_OF_MANY.search(said) is None, said


def test_one_step(tmp_path: Path) -> None:
    from adora_vl.config.command_line import parse

    config = parse(arguments(tmp_path / "run"))[1]
    lines = summary_lines([{"step": 1, "reward": 0.5}], config, tmp_path, 60)
    assert "Trained 1 step in 1.0 min." in lines


@given(st.integers(*PEOPLE), st.integers(*PEOPLE))
@settings(deadline=None)
def test_people_are_a_range_that_is_turned_round_in_the_message(first: int, last: int) -> None:
    words = ["knights", "--output", "o", "--rows", "1", "--people", f"{first}-{last}"]
    if first <= last:
        assert parser().parse_args(words).people == (first, last)
        return
    with pytest.raises(
        ValueError, match=f"--people: '{first}-{last}' has the larger number first; write {last}-{first}"
    ):
        parser().parse_args(words)
