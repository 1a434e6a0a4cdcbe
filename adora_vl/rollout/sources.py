"""Who samples a generation: vLLM, in the trainer's own processes or on servers, or else the policy itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from adora_vl.dedup.images import DistinctImages
from adora_vl.dedup.prompts import PromptBatch
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.rollouts import RolloutAnswer, RolloutAsk
from adora_vl.types import StepContext


class Sampler(Protocol):
    """All ranks call every method together, also with nothing to ask."""

    scores: bool  # whether its answers have log-probabilities

    def sample(self, asks: Sequence[RolloutAsk], prompts: PromptBatch | None) -> list[RolloutAnswer]:
        """Sampled now, by the policy's present weights. `prompts`: of the asks, None where there are none."""

    def awake(self) -> AbstractContextManager[None]:
        """Inside, an engine does not sleep between two calls."""


class PolicyNow:
    """The policy samples by Transformers, in TRL's way. What it thinks of its tokens a pass has to say."""

    scores = False

    def __init__(self, turn: Callable[[PromptBatch], list[list[int]]]) -> None:
        """`turn`: samples a rollout of each prompt."""
        self._turn = turn

    def sample(self, asks: Sequence[RolloutAsk], prompts: PromptBatch | None) -> list[RolloutAnswer]:
        assert prompts is not None
        return [RolloutAnswer(tokens, [None] * len(tokens), "stop") for tokens in self._turn(prompts)]

    def awake(self) -> AbstractContextManager[None]:
        return nullcontext()


class EngineNow:
    """vLLM samples, after it has got the policy's weights."""

    scores = True

    def __init__(self, context: StepContext, images: DistinctImages, engine: AdoraVLLMGeneration) -> None:
        self.engine, self.state = engine, context.state
        self.synced = -1  # optimizer steps of the weights that the engine has
        engine.take_images_from(images.cache)

    def give_weights(self) -> None:
        """The policy's weights to the engine, unless it has them."""
        if self.state().global_step != self.synced:
            self.engine.sync_weights()
            self.synced = self.state().global_step

    def sample(self, asks: Sequence[RolloutAsk], prompts: PromptBatch | None = None) -> list[RolloutAnswer]:
        self.give_weights()
        return self.engine.sample(asks)

    def awake(self) -> AbstractContextManager[None]:
        return self.engine.staying_awake()
