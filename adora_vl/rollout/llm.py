"""vLLM's `LLM`, extended so that it can be told which rows are rollouts of one prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm import LLM

from adora_vl.rollout.requests import asking_once


class GroupingLLM(LLM):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Like `vllm.LLM`, except inside `asking`."""

    _asking: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None

    @contextmanager
    def asking(self, groups: Sequence[int], seeds: Sequence[int] | None, together: bool) -> Iterator[None]:
        """Inside, `generate` takes rows of these groups, sends them by `asking_once`, and returns an output per row."""
        self._asking = partial(asking_once, groups=groups, seeds=seeds, together=together)
        try:
            yield
        finally:
            self._asking = None

    def generate(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Stock vLLM makes a request for each prompt in the list, with the sampling parameters that it is given."""
        generate = super().generate
        outputs: list[Any] = (self._asking(generate) if self._asking is not None else generate)(*args, **kwargs)
        return outputs
