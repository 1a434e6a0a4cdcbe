"""An engine and the policy that it samples for, which read the same prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.models.utils import disable_gradient_checkpointing

from adora_vl.config import AdoraGRPOConfig
from adora_vl.packing.images import DistinctImages
from adora_vl.packing.prompts import PromptBatch
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.importance import Drift, drift_sums, merge_drift
from adora_vl.rollout.rollouts import SamplingRequest, SamplingResult
from adora_vl.rollout.samplers import AsyncServerSampler, PendingSamples, Sampler, VLLMSampler
from adora_vl.types import Batch, StepContext
from adora_vl.utils.seeding import kept_random_state, rollout_seed


@dataclass(frozen=True)
class Prompts(PromptBatch):
    """Some rows as the trainer sends them to the engine and reads them itself."""

    names: Sequence[str] = ()


@dataclass(frozen=True)
class Rollouts:
    """What the engine has sampled for some prompts."""

    completion_ids: list[list[int]]
    batch: Batch

    @property
    def logps_BC(self) -> Tensor:
        """The engine's log-probabilities of the sampled tokens, (B, C)."""
        return self.batch["sampling_per_token_logps"]

    @property
    def mask_BC(self) -> Tensor:
        """1 at sampled tokens, (B, C)."""
        return self.batch["completion_mask"]


class Collate(Protocol):
    """Makes completions into padded columns, as `BatchBuilder.collated` does."""

    def __call__(
        self,
        prompts: PromptBatch,
        completions: Sequence[list[int]],
        logps: Sequence[list[float | None]] | None,
        counts_in_loss: Sequence[bool],
    ) -> Batch:
        """Return the rows of a batch, one for each completion."""


@dataclass(frozen=True, kw_only=True)
class EnginePair:
    """The two sides that a check compares: the engine of the rollouts, and the policy in training.

    Every rank has one. Methods that are collective say so.
    """

    context: StepContext
    # A function, since FSDP puts another object into the trainer when the training begins.
    policy: Callable[[], PreTrainedModel]
    dataset: Dataset  # of the training
    images: DistinctImages
    processor: Any
    tokenizer: PreTrainedTokenizerBase
    sampler: Sampler
    engine: AdoraVLLMGeneration | None  # None: the policy samples by itself, with Transformers
    collate: Collate

    @property
    def config(self) -> AdoraGRPOConfig:
        """The config of the run."""
        return self.context.config

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator of this rank."""
        return self.context.accelerator

    def first_rows(self, count: int) -> list[Any]:
        """Return `count` of the first rows of the dataset, different ones on each rank.

        A dataset with fewer rows than that is begun again.
        """
        first = self.accelerator.process_index * count
        return [self.dataset[(first + number) % len(self.dataset)] for number in range(count)]

    def read(self, rows: Sequence[Any]) -> Prompts:
        """Return prompts of dataset rows, as the trainer reads them."""
        names = [str(row.get("id", f"#{number}")) for number, row in enumerate(rows)]
        return Prompts(**vars(self.images.read(rows)), names=names)

    def give_weights(self) -> None:
        """Give the engine the policy's weights, even where it has those of this step. Collective."""
        cast("VLLMSampler", self.sampler).give_weights(anew=True)

    def sample(self, prompts: Prompts, *, tokens: int, where: str, **overrides: Any) -> Rollouts:
        """Sample a rollout of at most `tokens` tokens for each prompt, each with its own seed.

        `where`: the name of the check, which the seeds depend on. `overrides`: vLLM's parameters
        that differ from the run's. Raises `PromptMismatchError` where the engine reads another
        prompt. The random state of the run does not change.
        """
        assert self.engine is not None
        with kept_random_state():
            settings = {**self.engine.sampling, **overrides}
            requests = self._requests(prompts, where=where, tokens=tokens)
            results = self.sampler.sample(requests, settings=settings)
            return self._rollouts(prompts, results)

    def begin(self, prompts: Prompts, *, tokens: int, where: str) -> PendingSamples:
        """Request rollouts from servers, with the run's settings, and do not wait for them."""
        servers = cast("AsyncServerSampler", self.sampler)
        return servers.begin(self._requests(prompts, where=where, tokens=tokens))

    def join(self, prompts: Prompts, pending: PendingSamples) -> Rollouts:
        """Return the rollouts that `begin` has requested."""
        return self._rollouts(prompts, pending.join())

    def _requests(self, prompts: Prompts, *, where: str, tokens: int) -> list[SamplingRequest]:
        """Return a request for each prompt, whose number over all ranks seeds its rollout.

        `where`: the name of the check. `tokens`: the largest number of tokens of a rollout.
        """
        first = self.accelerator.process_index * len(prompts.ids)
        images_of_rows = prompts.images or [None] * len(prompts.ids)
        requests = []
        for row, (ids, images) in enumerate(zip(prompts.ids, images_of_rows, strict=True)):
            group = first + row
            requests.append(
                SamplingRequest(
                    prompt_ids=ids,
                    images=list(images or ()),
                    group=group,
                    seed=rollout_seed(self.config.seed, f"check/{where}", group, 0),
                    max_tokens=tokens,
                )
            )
        return requests

    def _rollouts(self, prompts: Prompts, results: Sequence[SamplingResult]) -> Rollouts:
        """Return the engine's results as a batch, in which every rollout counts."""
        completions = [result.tokens for result in results]
        batch = self.collate(
            prompts,
            completions=completions,
            logps=[result.logps for result in results],
            counts_in_loss=[True] * len(completions),
        )
        return Rollouts(completions, batch)

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the policy's log-probabilities of the sampled tokens, (B, C).

        They are from the loss's own pass. Collective where the weights are sharded.
        """
        checkpointing = disable_gradient_checkpointing(
            self.policy(), self.config.gradient_checkpointing_kwargs
        )
        with kept_random_state(), checkpointing:
            return self.context.policy_logps(rollouts.batch)

    def difference(self, logps_BC: Tensor, engine_logps_BC: Tensor, mask_BC: Tensor) -> Drift:
        """Return the difference of two tensors of log-probabilities, over all ranks. Collective."""
        sums_3 = drift_sums(logps_BC, engine_logps_BC, mask_BC)
        return merge_drift(self.accelerator.gather(sums_3[None]))
