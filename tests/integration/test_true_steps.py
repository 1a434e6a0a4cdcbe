"""A run with the reward `steps`, which checks an answer's steps, goes on to the bit after a kill.

It also compares right and wrong rollouts by their work. In half of its answers the fake server
makes claims about the figure.
"""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from adora_vl.geometry.figure import figure_as_json
from adora_vl.geometry.solve_form import solve_form
from adora_vl.geometry.text import read_form_from_text
from adora_vl.models.load import resolve_model_name
from adora_vl.train import main
from benchmarks.stand_in_server import FakeVLLMServer
from tests.support.async_servers import (
    assert_equal_end_after_kill,
    read_step_metrics,
    server_run_arguments,
)
from tests.support.pictures import draw_figure

pytestmark = pytest.mark.slow
TRIANGLE_FACTS = (
    "triangle ABC\nAB = BC, AB = 13, AC = 10\nD on AC\nBD perpendicular AC\nfind area ABC"
)
SERVER_ANSWERS = (
    r"AD = 5. \boxed{60}<|im_end|>",  # right by working
    r"AD = 5. BD = 12. \boxed{60}<|im_end|>",
    r"AD = 6. \boxed{60}<|im_end|>",  # right by luck
    r"\boxed{60}<|im_end|>",
    r"AD = 5. \boxed{7}<|im_end|>",  # wrong, and works
    r"AD = 5. BD = 12. \boxed{65}<|im_end|>",
)
TRUE_STEPS_KEYS = {
    "adora_reward": "[accuracy, steps]",
    "adora_method": "{adora: {criteria: [working]}}",
    # Groups that are kept for a later step keep their measure of work.
    "adora_rollouts": "{refill: 1, budget: 30, ahead: 1}",
    "vllm_importance_sampling_mode": "token_truncate",
    "max_completion_length": 48,
    "adora_prompt": "{problem}",
}


@pytest.fixture
def server() -> Iterator[FakeVLLMServer]:
    """Start a fake vLLM server that says one of `SERVER_ANSWERS` in half of its rollouts."""
    fake_server = FakeVLLMServer(vocabulary=200, tokens=14, shortest=2)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_name("tiny"))
    fake_server.turns = [tokenizer(answer)["input_ids"] for answer in SERVER_ANSWERS]
    yield fake_server
    fake_server.close()


def write_triangle_rows(folder: Path) -> Path:
    """Write twelve rows, of which every fourth one has no figure."""
    figure = solve_form(read_form_from_text(TRIANGLE_FACTS)).figure
    assert figure is not None
    rows = [
        {
            "id": f"triangles/{number}",
            "problem": f"Triangle {number}: find the area of ABC.",
            "answer": "60",
            "images": [draw_figure(number)],
            "figure": None if number % 4 == 3 else figure_as_json(figure),
        }
        for number in range(12)
    ]
    (folder / "data").mkdir(parents=True)
    Dataset.from_list(rows).to_parquet(folder / "data" / "train-00000.parquet")
    return folder


def test_a_run_that_is_rewarded_for_true_steps_goes_on_to_the_bit(
    tmp_path: Path, server: FakeVLLMServer
) -> None:
    """A killed run that goes on counts the same claims of its answers as one without a kill.

    Counted are new true claims, false ones, and answers that are right by luck.
    """
    keys = {**TRUE_STEPS_KEYS, "dataset_name": write_triangle_rows(tmp_path / "triangles")}
    uninterrupted = tmp_path / "whole"
    killed = tmp_path / "killed"
    assert main(server_run_arguments(uninterrupted, server, **keys)) == 0

    metrics = read_step_metrics(uninterrupted)
    assert any(step["steps/new"] > 0 for step in metrics)
    assert any(step["steps/false"] > 0 for step in metrics)
    assert any(0 < step.get("steps/lucky", 0) < 1 for step in metrics)
    assert any(0 < step["steps/figures"] < 1 for step in metrics)
    rows = pq.read_table(uninterrupted / "rollouts").to_pandas()
    assert set(rows["new"].dropna()) >= {0, 1, 2}
    # these rows have no figure, so nothing can be counted
    assert rows[rows["id"].isin(["triangles/3", "triangles/7"])]["new"].isna().all()

    assert_equal_end_after_kill(
        uninterrupted,
        killed,
        server,
        killed_after_step=2,
        **keys,
    )

    columns = [
        "step",
        "id",
        "completion",
        "new",
        "false",
        "steps",
        "reward/steps_reward",
        "advantage",
    ]
    rows_of_killed = pq.read_table(killed / "rollouts").to_pandas()
    pd.testing.assert_frame_equal(rows_of_killed[columns], rows[columns])
    for step, step_of_killed in zip(metrics, read_step_metrics(killed), strict=True):
        names = {name for name in step if name.startswith("steps/") and name != "steps/ms"}
        assert {name: step_of_killed[name] for name in names} == {
            name: step[name] for name in names
        }
