"""Rollouts that are asked for a generation ahead: what is refused where the next generation cannot be known."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from adora_vl.config.blocks import RolloutOptions
from adora_vl.data.dataloader import ROW_NUMBER
from adora_vl.rollout.rollouts import groups_of
from adora_vl.training.ahead import Pending, RolloutsAhead
from adora_vl.training.generation import Generation
from adora_vl.utils.errors import UserError
from tests.support.step_context import step_context


def rollouts_ahead(sync: Callable[[], None]) -> RolloutsAhead:
    """One whose engine is never reached: `sync` raises."""
    keys: dict[str, Any] = {
        "use_vllm": True, "vllm_mode": "server", "adora_weight_transfer": "file",
        "adora_rollouts": RolloutOptions(ahead=1),
    }  # fmt: skip
    unused: Any = None
    sampler: Any = SimpleNamespace(give_weights=sync)
    return RolloutsAhead(step_context(**keys), sampler, unused, unused, unused, unused)


def begin(ahead: RolloutsAhead, **column: int) -> None:
    rows: list[Any] = [{"problem": "Find x.", **column}]
    generation = Generation(rows, "train", 0, "0/0", 0, 1)
    ahead(generation, groups_of(rows, generation.where, 0, 0, 1))


def test_rows_without_numbers_are_refused_in_training_and_in_place_of_working_in_sequence():
    """A streamed data set has none. Without them nothing would ever be asked for ahead, and nobody would hear of it."""
    synced: list[bool] = []

    def sync() -> None:
        synced.append(True)
        raise InterruptedError

    ahead = rollouts_ahead(sync)
    with pytest.raises(UserError, match=r"^adora_rollouts.ahead: 1: these rows do not say .*streamed.*ahead: 0$"):
        begin(ahead)
    assert not synced, "nothing was begun"
    with pytest.raises(InterruptedError):
        begin(ahead, **{ROW_NUMBER: 0})


def test_servers_that_sample_what_nobody_wants_any_more_are_waited_for_before_they_get_weights():
    """They would refuse to empty their caches, and be left out."""

    class Asked(Future[Any]):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            self.set_result(([], 0.0))  # whoever waits is answered
            return super().exception(timeout)

    found, done = Asked(), list[bool]()

    def sync() -> None:
        done.append(found.done())
        raise InterruptedError

    ahead = rollouts_ahead(sync)
    ahead.pending = Pending("train/0/0", [5], 0, found)
    with pytest.raises(InterruptedError):
        begin(ahead, **{ROW_NUMBER: 6})
    assert done == [True]
