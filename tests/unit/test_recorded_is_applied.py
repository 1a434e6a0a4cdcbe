"""The record says what the loss was computed from: a weight or an advantage in it is the one that was applied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from adora_vl.trainer import AdoraGRPOTrainer
from tests.tiny_run import STEPS, train

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Recorded:
    rollouts: pd.DataFrame  # in the order in which they were sampled
    of_the_loss: dict[tuple[int, int], float]  # advantage by step and number of the rollout in it


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """The real training command, which notes the advantage of every row that the loss gets."""
    of_the_loss: dict[tuple[int, int], float] = {}
    stock = AdoraGRPOTrainer._compute_loss

    def noted(self: AdoraGRPOTrainer, model: Any, inputs: Any) -> Any:
        numbers, advantages = inputs["rollout_number"].tolist(), inputs["advantages"].tolist()
        step = self.state.global_step + 1
        of_the_loss.update({(step, number): advantage for number, advantage in zip(numbers, advantages, strict=True)})
        return stock(self, model, inputs)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(AdoraGRPOTrainer, "_compute_loss", noted)
        # so that groups with right and wrong answers are attenuated too
        criteria = {"adora_criteria": "difficulty", "adora_tau": 0.25}
        folder: Path = train(tmp_path_factory.mktemp("recorded") / "run", save_strategy="no", **criteria)
    parts = sorted((folder / "rollouts").glob("*.parquet"))
    rollouts = pd.concat([pd.read_parquet(part) for part in parts]).sort_values(["step", "group", "rollout"])
    yield Recorded(rollouts.reset_index(drop=True), of_the_loss)


def test_a_recorded_advantage_is_the_raw_one_times_the_recorded_weight(run):
    rollouts = run.rollouts
    mixed = rollouts.groupby(["step", "group"])["reward"].transform("nunique") > 1
    product = rollouts["weight"].astype(float) * rollouts["advantage_raw"].astype(float)
    gap = (rollouts["advantage"].astype(float) - product).abs()
    assert (gap <= 1e-6 * product.abs())[mixed].all()  # one product in float32 is right to 6e-8 of itself
    assert (rollouts["advantage"][~mixed] == 0).all(), "a group of equal rewards teaches nothing"
    assert set(rollouts["weight"].astype(float).round(4)) == {0.1, 1.0}, "the run has to have weights of both kinds"


def test_a_recorded_advantage_is_the_one_that_the_loss_got(run):
    rollouts = run.rollouts
    assert set(rollouts["step"]) == set(range(1, STEPS + 1))
    numbers = rollouts.groupby("step").cumcount()
    recorded = {
        (step, number): advantage
        for step, number, advantage in zip(rollouts["step"], numbers, rollouts["advantage"], strict=True)
    }
    assert run.of_the_loss and run.of_the_loss.keys() <= recorded.keys()
    assert {place: recorded[place] for place in run.of_the_loss} == run.of_the_loss
    assert all(recorded[place] == 0 for place in recorded.keys() - run.of_the_loss.keys())
