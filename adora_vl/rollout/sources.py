"""Who samples a generation: vLLM, in the trainer's own processes or on servers, or else the policy itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from adora_vl.dedup.images import DistinctImages
from adora_vl.dedup.prompts import PromptBatch
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.prompt_tokens import mismatch_named
from adora_vl.rollout.rollouts import RolloutAnswer, RolloutAsk, SamplingRequest, Segment, asks_of
from adora_vl.rollout.servers import GroupRequest
from adora_vl.types import Row, StepContext

Rollouts = tuple[list[list[int]], list[list[float | None]] | None]  # tokens, and their log-probabilities if known


class Sampler(Protocol):
    """All ranks call every method together."""

    def sample(self, rows: list[Row], prompts: PromptBatch, request: SamplingRequest, generations: int) -> Rollouts:
        """A rollout for each of this rank's rows, sampled by the present weights. `prompts`: of the rows.
        `generations`: rollouts of a prompt, whose rows are neighbours.
        """


class PolicyNow:
    """The policy samples by Transformers, in TRL's way. What it thinks of its tokens a pass has to say."""

    def __init__(self, turn: Callable[[PromptBatch, int], list[list[int]]]) -> None:
        """`turn`: samples, of so many rollouts of each prompt."""
        self._turn = turn

    def sample(self, rows: list[Row], prompts: PromptBatch, request: SamplingRequest, generations: int) -> Rollouts:
        return self._turn(prompts, generations), None


class EngineNow:
    """vLLM samples, after it has got the policy's weights."""

    def __init__(self, context: StepContext, images: DistinctImages, engine: AdoraVLLMGeneration) -> None:
        self.engine, self.images = engine, images
        self.accelerator, self.config, self.state = context.accelerator, context.config, context.state
        self.synced = -1  # optimizer steps of the weights that the engine has
        engine.take_images_from(images.cache)

    def give_weights(self) -> None:
        """The policy's weights to the engine, unless it has them."""
        if self.state().global_step != self.synced:
            self.engine.sync_weights()
            self.synced = self.state().global_step

    def sample(self, rows: list[Row], prompts: PromptBatch, request: SamplingRequest, generations: int) -> Rollouts:
        """As `Sampler` says. Rollouts that an extension has sampled already are handed on."""
        if request.answers is not None:
            return request.answers.tokens, request.answers.logps
        images, altered = prompts.images, [False] * len(rows)
        if request.alter_images is not None and images is not None:
            first = self.accelerator.process_index * len(rows)
            images, altered = request.alter_images(images, first, generations, self.images.image_processor)
        request.altered = altered
        answers = self._answers(rows, self._asks(replace(prompts, images=images), request.seed, generations))
        # What an engine says of a rollout on another image does not belong to the trainer's: it becomes NaN.
        pairs = zip(answers, altered, strict=True)
        logps: Any = [[None] * len(answer.tokens) if other else answer.logps for answer, other in pairs]
        return [answer.tokens for answer in answers], logps

    def go_on(self, rows: list[Row], segments: list[Segment]) -> list[RolloutAnswer]:
        """What is sampled behind what the rollouts of these rows have. A rank without rows takes part."""
        asks = []
        if rows:
            prompts = self.images.prompts(rows, "train", further=False)
            shown = prompts.images or [None] * len(rows)
            for ids, images, own in zip(prompts.ids, shown, segments, strict=True):
                asks.append(RolloutAsk([*ids, *own.begun], list(images or ()), own.together, own.seed, own.limit))
        return self._answers(rows, asks)

    def requests(self, rows: list[Row], where: str) -> list[GroupRequest]:
        """What servers are asked for the rows of the training generation of this name, on the first rank."""
        seed = (self.config.seed, where) if self.config.own("seeded_rollouts") else None
        prompts = self.images.prompts(rows, "train", further=False)
        return self.engine.requests(self._asks(prompts, seed, self.config.num_generations))

    def _asks(self, prompts: PromptBatch, seed: tuple[int, str] | None, generations: int) -> list[RolloutAsk]:
        first, grouped = self.accelerator.process_index * len(prompts.ids), self.config.own("group_requests")
        return asks_of(prompts.ids, prompts.images, seed=seed, first=first, generations=generations, grouped=grouped)

    def _answers(self, rows: list[Row], asks: list[RolloutAsk]) -> list[RolloutAnswer]:
        self.give_weights()
        with mismatch_named(rows):
            return self.engine.sample(asks)
