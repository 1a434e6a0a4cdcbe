"""What the commands print: one thing is singular, and a range written the wrong way round is put right."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.batch_plan import batch_plan
from adora_vl.record.summary import summary_lines
from adora_vl.utils.cli import amount, quantile, shown
from data_prep.cli import main as data_prep
from eval.__main__ import main as evaluate
from eval.compare import ScoreFile, between_problems
from tests.support.tiny_run import arguments

ONE_OF_MANY = re.compile(r"(?<![\d.,])1 (rows|problems|answers|prompts|steps|optimizer steps|rollouts|images|lines)\b")


@given(st.integers(0, 10**9))
def test_an_amount_is_singular_for_one_alone(count: int) -> None:
    assert amount(count, "row") == (f"{count} row" if count == 1 else f"{count} rows")


def test_a_quantile_is_one_of_the_values() -> None:
    assert [quantile([5, 1, 4, 2, 3], share) for share in (0.01, 0.5, 0.95, 1.0)] == [1, 3, 5, 5]
    assert quantile(range(1, 101), 0.95) == 95 and quantile([7], 0.95) == 7


def test_a_value_is_shown_in_one_line_and_cut() -> None:
    class Long:
        def __repr__(self) -> str:
            return "a\n" * 50

    assert [shown(None), shown("5"), shown(5)] == ["null", "'5'", "5"]
    assert shown("x" * 100) == "'" + "x" * 59 + "..." and shown(Long()).startswith("a a a") and len(shown(Long())) == 63


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
    config = AdoraGRPOConfig(use_cpu=True, bf16=False, output_dir="x", per_device_train_batch_size=4, num_generations=4)
    plan = batch_plan(config, 1)
    score = ScoreFile("a", {}, {"p": 1.0})
    said += plan.describe() + between_problems([score], [score]).over
    assert ONE_OF_MANY.search(said) is None, said


def test_one_step(tmp_path: Path) -> None:
    from adora_vl.config.schema import parse

    config = parse(arguments(tmp_path / "run"))[1]
    lines = summary_lines([{"step": 1, "reward": 0.5}], config, tmp_path, 60)
    assert "Trained 1 step in 1.0 min." in lines
