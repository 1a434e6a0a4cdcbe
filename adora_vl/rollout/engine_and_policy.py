"""An engine and the policy that it samples for, which read the same prompts."""

from collections.abc import Sequence
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
from adora_vl.rollout.rollouts import SamplingRequest, SamplingResult
from adora_vl.rollout.samplers import AsyncServerSampler, PendingSamples, Sampler, VLLMSampler
from adora_vl.types import Batch, StepContext
from adora_vl.utils.seeding import keeping_random_state, rollout_seed


@dataclass(frozen=True)
class NamedPrompts(PromptBatch):
    """The prompts of some rows, with names for messages."""

    row_names: Sequence[str] = ()  # the `id` of each row


@dataclass(frozen=True)
class SampledRollouts:
    """A rollout of the engine for each of B prompts, padded to C tokens."""

    completion_ids: list[list[int]]
    batch: Batch  # prompts and completions in padded columns, as the loss reads them

    @property
    def logps_BC(self) -> Tensor:
        """The engine's log-probabilities of the sampled tokens, (B, C)."""
        return self.batch["sampling_per_token_logps"]

    @property
    def mask_BC(self) -> Tensor:
        """1 at sampled tokens and 0 at padding, (B, C)."""
        return self.batch["completion_mask"]


class Collate(Protocol):
    """A function that puts prompts and completions into a padded batch: `BatchBuilder.collate`."""

    def __call__(
        self,
        prompts: PromptBatch,
        completions: Sequence[list[int]],
        logps: Sequence[list[float | None]] | None,
        counts_in_loss: Sequence[bool],
    ) -> Batch:
        """Return a batch with a row for each prompt and its completion.

        `logps` are the engine's. `counts_in_loss` says which rows the loss counts.
        """


@dataclass(frozen=True, kw_only=True)
class EngineAndPolicy:
    """The engine that samples rollouts, and the policy in training, for checks that compare them.

    A check samples short rollouts with the engine, computes the policy's log-probabilities of the
    same tokens, and compares the two. Every rank has such a pair, and samples B rollouts of at most
    C tokens. Methods that are collective say so.
    """

    context: StepContext
    policy: PreTrainedModel
    dataset: Dataset  # the training data
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
        """Return `count` rows from the beginning of the training data, different ones on each rank.

        A data set with fewer rows is read again from its start.
        """
        first_row = self.accelerator.process_index * count
        row_count = len(self.dataset)
        return [self.dataset[(first_row + number) % row_count] for number in range(count)]

    def read_prompts(self, rows: Sequence[Any]) -> NamedPrompts:
        """Return the prompts of data set rows, processed as the trainer processes them."""
        row_names = [str(row.get("id", f"#{number}")) for number, row in enumerate(rows)]
        return NamedPrompts(**vars(self.images.read(rows)), row_names=row_names)

    def sync_weights(self) -> None:
        """Send the policy's weights to the engine even if it has those of this step. Collective."""
        cast("VLLMSampler", self.sampler).sync_weights(force=True)

    def sample(
        self, prompts: NamedPrompts, *, max_tokens: int, check_name: str, **overrides: Any
    ) -> SampledRollouts:
        """Sample a rollout for each prompt, without changing the run's random state.

        Args:
            prompts: the prompts of this rank.
            max_tokens: the largest number of tokens of a rollout.
            check_name: the name of the check that needs the rollouts. Their seeds depend on it.
            overrides: vLLM's sampling parameters that differ from the run's.

        Raises `PromptMismatchError` where the engine reads another prompt.
        """
        assert self.engine is not None
        with keeping_random_state():
            settings = {**self.engine.sampling_settings, **overrides}
            requests = self._requests(prompts, max_tokens=max_tokens, check_name=check_name)
            results = self.sampler.sample(requests, settings=settings)
            return self._sampled_rollouts(prompts, results)

    def begin_sampling(
        self, prompts: NamedPrompts, *, max_tokens: int, check_name: str
    ) -> PendingSamples:
        """Request a rollout for each prompt from servers, and do not wait for them.

        The arguments are those of `sample`. The servers use the run's sampling parameters.
        """
        servers = cast("AsyncServerSampler", self.sampler)
        return servers.submit(self._requests(prompts, max_tokens=max_tokens, check_name=check_name))

    def join_sampling(self, prompts: NamedPrompts, pending: PendingSamples) -> SampledRollouts:
        """Wait for the rollouts of `prompts` that `begin_sampling` has requested."""
        return self._sampled_rollouts(prompts, pending.join())

    def _requests(
        self, prompts: NamedPrompts, *, max_tokens: int, check_name: str
    ) -> list[SamplingRequest]:
        """Return a sampling request for each prompt.

        Each gets a seed of its own, from the name of the check and the prompt's number over all
        ranks. Every rank has equally many prompts.
        """
        first_number = self.accelerator.process_index * len(prompts.ids)
        images_of_rows = prompts.images or [None] * len(prompts.ids)
        requests = []
        for row, (ids, images) in enumerate(zip(prompts.ids, images_of_rows, strict=True)):
            prompt_number = first_number + row
            seed = rollout_seed(
                self.config.seed,
                draw_name=f"check/{check_name}",
                group=prompt_number,
                rollout_index=0,
            )
            requests.append(
                SamplingRequest(
                    prompt_ids=ids,
                    images=list(images or ()),
                    merge_key=prompt_number,
                    seed=seed,
                    max_tokens=max_tokens,
                )
            )
        return requests

    def _sampled_rollouts(
        self, prompts: NamedPrompts, results: Sequence[SamplingResult]
    ) -> SampledRollouts:
        """Put the engine's results for `prompts` into a batch, in which every rollout counts."""
        completions = [result.tokens for result in results]
        batch = self.collate(
            prompts,
            completions=completions,
            logps=[result.logps for result in results],
            counts_in_loss=[True] * len(completions),
        )
        return SampledRollouts(completions, batch)

    def policy_logps(self, rollouts: SampledRollouts) -> Tensor:
        """Return the policy's log-probabilities of the sampled tokens, (B, C).

        The forward pass is that of the loss. Collective where the weights are sharded.
        """
        no_checkpointing = disable_gradient_checkpointing(
            self.policy, self.config.gradient_checkpointing_kwargs
        )
        with keeping_random_state(), no_checkpointing:
            return self.context.policy_logps(rollouts.batch)
