"""Around the weights of a generation: what grading hands over, and what TRL's completions table shows afterwards."""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch

from adora_vl.advantage import Groups
from adora_vl.advantage.adora import weigh_groups
from adora_vl.rollout_log.completions_table import add_weighed
from adora_vl.rollout_log.figures import weighed_figures
from adora_vl.weighing import Scores, Weighed

END, PAD = 2, 0


def test_a_completion_has_ended_where_its_last_token_ends_a_turn():
    calls = []

    def gather(tensor):
        calls.append(tensor)
        return tensor

    accelerator = SimpleNamespace(device="cpu", gather=gather)
    completions, texts = [[5, 6, END], [5, 6], [], [END, 5]], ["Wait, wait.", "no", "", "I verify"]
    scores = Scores.gathered(torch.zeros(4, 1), completions, texts, {END, PAD}, accelerator)
    assert scores.lengths_B.tolist() == [3, 2, 0, 2]
    assert scores.unended_B.tolist() == [False, True, False, True]
    assert scores.reflective_B.tolist() == [2, 0, 0, 1]
    assert scores.reflective_per_1000_tokens == pytest.approx(1000 * 3 / 7)
    assert len(calls) == 1, "lengths, ends and words are gathered together"


def weighed() -> Weighed:
    """Two groups of two: one with a right and a wrong answer, one that is wrong throughout."""
    groups = Groups(
        torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
        torch.tensor([[10.0, 20.0], [30.0, 40.0]]),
        truncated_PG=torch.zeros(2, 2, dtype=torch.bool),
        tokens_PG=torch.tensor([[10.0, 20.0], [30.0, 40.0]]),
        surprisal_PG=None,
        correct_above=0.5,
        step=0,
    )
    weighting = weigh_groups(groups.rewards_PG, groups.lengths_PG)
    raw_PG = torch.tensor([[0.7, -0.7], [0.0, 0.0]])
    return Weighed(groups, weighting, raw_PG, raw_PG * weighting.weights_P[:, None], {"own": 3.0})


def table(advantages: list[float], size: int) -> dict:
    shown = {"prompt": deque(maxlen=size), "advantages": deque(advantages, maxlen=size)}
    return {**shown, "extra": defaultdict(lambda: deque(maxlen=size))}


def test_the_table_shows_the_advantages_of_the_loss_beside_trls():
    of_the_loss, shown = weighed(), table([0.7, -0.7, 0.0, 0.0], 4)
    add_weighed(shown, of_the_loss)
    assert list(shown["advantages"]) == of_the_loss.advantages_PG.flatten().tolist()
    assert torch.allclose(torch.tensor(shown["extra"]["advantage_raw"]), of_the_loss.raw_PG.flatten())
    assert list(shown["extra"]["adora_length"]) == [10, 20, 30, 40]
    assert list(shown["extra"]["adora_weight"]) == of_the_loss.weighting.weights_P.repeat_interleave(2).tolist()


def test_a_smaller_table_keeps_the_newest_rows():
    shown = table([0.7, -0.7, 0.0, 0.0], 3)
    add_weighed(shown, weighed())
    assert list(shown["extra"]["adora_length"]) == [20, 30, 40]
    assert torch.allclose(torch.tensor(shown["extra"]["advantage_raw"]), torch.tensor([-0.7, 0.0, 0.0]))


def test_the_log_has_the_figures_of_adora_and_of_the_method():
    lengths_B = torch.tensor([10.0, 20.0, 30.0, 40.0])
    scores = Scores(torch.zeros(4, 1), lengths_B, torch.zeros(4, dtype=torch.bool), torch.tensor([0.0, 1.0, 0.0, 1.0]))
    figures = weighed_figures(weighed(), scores)
    assert figures["adora/reflective_per_1000_tokens"] == 20.0
    assert figures["adora/own"] == 3.0
    assert figures["adora/pass_rate"] == 0.25
    assert all(name.startswith("adora/") for name in figures)
