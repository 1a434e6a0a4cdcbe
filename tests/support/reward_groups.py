"""Small `Groups` for the tests of methods, which make advantages from the rewards of groups."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from adora_vl.advantage import (
    METHODS,
    Adora,
    AdvantagePipeline,
    Groups,
    group_advantages,
    weigh_groups,
)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Make float64 the default dtype, so that no bound of rounding depends on the processor."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def groups_of_rewards(rewards, lengths=None, surprisal=None, **facts) -> Groups:
    """Return the `Groups` with these rewards, a list for each group.

    Args:
        rewards: the rewards of each group's rollouts, [[1.0, 0.0], [0.1, 0.0]].
        lengths: their tokens, by default 10 each. Rollouts of 100 tokens or more are truncated.
        surprisal: their mean surprisal, by default a tenth of the length.
        facts: other fields of `Groups`.
    """
    rewards = torch.tensor(rewards)
    lengths = torch.tensor(lengths) if lengths is not None else torch.full(rewards.shape, 10)
    surprisal = torch.tensor(surprisal) if surprisal is not None else lengths / 10
    return Groups(
        rewards_PG=rewards,
        lengths_PG=lengths,
        truncated_PG=lengths >= 100,
        surprisal_PG=surprisal,
        **facts,
    )


def random_groups(prompts=40, generations=8, seed=0, step=0) -> Groups:
    """Return `Groups` with random rewards of 0, 0.1 and 1, lengths and surprisal.

    The first two groups have equal rewards, so they have no signal.

    Args:
        prompts: the number of groups.
        generations: rollouts of a group.
        seed: draws the values.
        step: the optimizer step that they count as.
    """
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.tensor([0.0, 0.1, 1.0])[
        torch.randint(0, 3, (prompts, generations), generator=generator)
    ]
    rewards[0] = 0.1
    rewards[1] = 1.0
    lengths = torch.randint(1, 110, (prompts, generations), generator=generator)
    surprisal = torch.rand(prompts, generations, generator=generator)
    return Groups(
        rewards_PG=rewards,
        lengths_PG=lengths,
        truncated_PG=lengths >= 100,
        surprisal_PG=surprisal,
        step=step,
    )


def method_advantages(name, groups, method=None, scale="group"):
    """Return the advantages that a method makes of those of GRPO, as in the trainer.

    They are (P, G), for P groups of G rollouts.

    Args:
        name: the name of the method.
        groups: the groups.
        method: the method; by default that of `METHODS` with this name and its default options.
        scale: GRPO's `scale_rewards`.
    """
    pipeline = AdvantagePipeline({name: METHODS[name]() if method is None else method}, scale=scale)
    return final_advantages(pipeline, groups, group_advantages(groups.rewards_PG, scale=scale))


def final_advantages(
    pipeline: AdvantagePipeline, groups: Groups, trl_advantages_PG: torch.Tensor
) -> torch.Tensor:
    """Return the advantages that a pipeline makes of TRL's, with ADORA's weights of the groups."""
    return pipeline.compute_advantages(groups, trl_advantages_PG, pipeline.weigh(groups))


def adora_weights(
    rewards, lengths, *, truncated_at: float = math.inf, correct_above: float = 0.5, **options: Any
) -> torch.Tensor:
    """Return ADORA's weight of each group, (P,): 1 is GRPO's.

    Args:
        rewards: the rewards of each group.
        lengths: the tokens of each rollout.
        truncated_at: rollouts of this many tokens or more are truncated.
        correct_above: rollouts with a larger reward are right.
        options: the options of ADORA.
    """
    groups = Groups(rewards, lengths, lengths >= truncated_at, correct_above=correct_above)
    return weigh_groups(groups, Adora(**options)).weights_P
