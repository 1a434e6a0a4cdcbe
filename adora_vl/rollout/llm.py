"""vLLM's `LLM` as the policy's engine.

A prompt and its whole group are one request, images come with digests that are known already, and
weights are not read from a checkpoint but come with the first sync.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel
from vllm import LLM, SamplingParams
from vllm.config import ModelConfig
from vllm.distributed.device_communicators import cpu_communicator
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs, SampleLogprobs
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.multimodal.media import MediaWithBytes
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from vllm.transformers_utils.config import checkpoint_has_lm_head

from adora_vl.data.shared_images import KeptImage
from adora_vl.models.four_bit import FrozenBase
from adora_vl.rollout.engine_logps import engine_logp
from adora_vl.rollout.prompt_tokens import collapse_image_runs
from adora_vl.rollout.rollouts import (
    FinishReason,
    SamplingRequest,
    SamplingResult,
    merge_requests,
)
from adora_vl.utils import compat
from adora_vl.utils.errors import UserError, in_one_line

LATER = "adora_later"


@register_model_loader(LATER)
class LoadLater(DummyModelLoader):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Model loader for `load_format: adora_later`, which reads no checkpoint.

    The first weight sync sends every parameter. Stock vLLM's `dummy` also gives random values to
    buffers that no checkpoint has and no sync sends: those with which the vision tower normalises
    pixels (`visual.input_norm`). Ours leaves all buffers as the model has computed them.
    """

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Give the parameters dummy values, and leave the buffers as they are."""
        computed = {name: buffer.clone() for name, buffer in model.named_buffers()}
        super().load_weights(model, model_config)
        for name, buffer in model.named_buffers():
            buffer.copy_(computed[name])


def has_copied_head(model: PreTrainedModel, revision: str | None) -> bool:
    """Return whether the checkpoint of a model with tied embeddings has a tensor for its head too.

    Some tools write such checkpoints.
    """
    if not getattr(model.config, "tie_word_embeddings", False):
        return False
    return bool(checkpoint_has_lm_head(model.name_or_path, revision=revision))


_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where Linux shows the names of shm_open


def stopping_of_loops(options: Mapping[str, Any]) -> RepetitionDetectionParams:
    """Return vLLM's `repetition_detection` from the mapping in a config.

    vLLM accepts a mapping too, but fails when it uses it. Raises `UserError` for options that vLLM
    does not take.
    """
    names = [field.name for field in fields(RepetitionDetectionParams)]
    try:
        unknown = {*options} - {*names}
        if unknown:
            raise ValueError(f"it has no {min(unknown)}, but {', '.join(names)}")
        return RepetitionDetectionParams(**options)
    except (ValueError, VLLMValidationError) as error:
        raise UserError(
            f"generation_kwargs: repetition_detection: {dict(options)} is not taken by vLLM "
            f"({in_one_line(error)}); give "
            'max_pattern_size and min_count, such as {"max_pattern_size": 32, "min_count": 8}'
        ) from error


@contextmanager
def own_shared_memory() -> Iterator[None]:
    """Let the processes of a CPU engine give their shared memory a unique name in the block.

    The name has the number of the launcher's process, so it is the same on all ranks. After the
    block all of them have mapped the memory, and the name is removed. Mapped memory stays until the
    last process ends, however it ends.
    """
    ours = f"adora-{os.getppid()}"
    shared = cpu_communicator._CPUSHMDistributed
    stock = shared.make_group_name

    def make_group_name(communicator: Any) -> str:
        return f"/{ours}-{stock(communicator).replace('/', '')}"

    try:
        with compat.SHARED_MEMORY.replaced_by(staticmethod(make_group_name), on=shared):
            yield
    finally:
        for file in _SHARED_MEMORY.glob(f"{ours}-*"):
            file.unlink(missing_ok=True)


def with_known_images(prompt: dict[str, Any]) -> dict[str, Any]:
    """Return the prompt in a form in which vLLM neither copies nor hashes its images.

    Each image is put into vLLM's own wrapper, which its parser passes on as it is, and its digest,
    which is known already, becomes its identity (`multi_modal_uuids`). This holds for images that
    are kept (`adora_vl.data.dataloader`). A prompt with any other image stays as it is, since
    somebody may yet draw on that image.
    """
    images = prompt.get("multi_modal_data", {}).get("image", [])
    images = images if isinstance(images, list) else [images]
    if not images or not all(isinstance(image, KeptImage) for image in images):
        return prompt
    return {
        **prompt,
        "multi_modal_data": {"image": [MediaWithBytes(image, b"") for image in images]},
        "multi_modal_uuids": {"image": [image.digest for image in images]},
    }


def logps_of_tokens(logprobs: SampleLogprobs, tokens: list[int]) -> list[float | None]:
    """The log-probabilities of the sampled tokens, out of what vLLM returns for each position.

    Args:
        logprobs: the candidates of each position, flat or as one mapping a position.
        tokens: the sampled token of each position.
    """
    if isinstance(logprobs, FlatLogprobs) and logprobs.token_ids == tokens:
        # One candidate a position, the sampled one: the numbers are there already.
        if np.isfinite(logprobs.logprobs).all():
            return list(logprobs.logprobs)
        return [engine_logp(value) for value in logprobs.logprobs]
    # With several, the first one is the likeliest and not the sampled one, so its id decides.
    positions = zip(logprobs, tokens, strict=True)
    return [engine_logp(candidates[token].logprob) for candidates, token in positions]


def answer_of(
    rollout: CompletionOutput, prompt_ids: Sequence[int], max_length: int
) -> SamplingResult:
    """Return the result of one rollout that vLLM has sampled.

    `prompt_ids`: the prompt as vLLM has read it. `max_length`: the most tokens of a sequence,
    prompt and completion together.
    """
    tokens = list(rollout.token_ids)
    logps: list[float | None] = [None] * len(tokens)
    if rollout.logprobs is not None:
        logps = logps_of_tokens(rollout.logprobs, tokens)
    reason = FinishReason.STOP
    if rollout.finish_reason == "length":
        context_full = len(prompt_ids) + len(tokens) >= max_length
        reason = FinishReason.CONTEXT if context_full else FinishReason.LENGTH
    return SamplingResult(
        tokens=tokens, logps=logps, finish_reason=reason, prompt_ids_read=list(prompt_ids)
    )


class PolicyLLM(LLM):  # type: ignore[misc]  # vLLM is untyped to mypy
    """A `vllm.LLM` that samples requests of the trainer.

    Its sleeping and waking are timed, and it can be kept awake. `adapter` is the policy's, where
    the engine gets nothing but the adapter. `base` are the trainer's frozen weights, which leave
    the GPU while the engine is awake.
    """

    stays_awake = False
    adapter: LoRARequest | None = None
    base: FrozenBase | None = None
    timed: Callable[[str], AbstractContextManager[Any]] = nullcontext

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let `sleep` do nothing inside the block."""
        self.stays_awake = True
        try:
            yield
        finally:
            self.stays_awake = False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Sample with the policy's adapter; stock vLLM uses one only where a request names it."""
        adapter = {} if self.adapter is None else {"lora_request": self.adapter}
        return super().generate(*args, **{**adapter, **kwargs})

    def sleep(self, level: int = 1, **kwargs: Any) -> None:
        """Free the engine's memory, and count the seconds that it takes.

        Stock vLLM does not say how long it takes. With an adapter the weights stay on the host
        (level 1), since no sync brings the base back that level 2 discards.
        """
        if self.stays_awake:
            return
        with self.timed("sleep"):
            super().sleep(level=level if self.adapter is None else 1, **kwargs)
            if self.base is not None:
                self.base.move_to_device()

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """Take the engine's memory back, and count the seconds."""
        with self.timed("wake"):
            if self.base is not None:
                self.base.move_to_host()
            super().wake_up(*args, **kwargs)

    def sample(
        self,
        asks: Sequence[SamplingRequest],
        settings: Mapping[str, Any],
        image_token_id: int | None,
    ) -> list[SamplingResult]:
        """Sample a rollout for each of `asks`.

        Neighbours that ask for the same are one request, whose rollouts get its seed, the seed + 1,
        and so on.

        `settings`: arguments of `SamplingParams`. `image_token_id`: the id that stands once per
        image in a prompt for vLLM, which repeats it for the image's patches; None for a text model.
        """
        # Numbers in flat lists: one object for each token takes the host longer than a card takes
        # to sample it, and fills the garbage collector.
        options = {**settings, "flat_logprobs": True}
        requests = [[ask] for ask in asks]
        if options["temperature"]:  # else sampling is greedy, where a request has one rollout
            requests = merge_requests(asks)
        if isinstance(options.get("structured_outputs"), dict):
            options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
        prompts: list[dict[str, Any]] = []
        parameters: list[SamplingParams] = []
        for request in requests:
            ask = request[0]
            prompt: dict[str, Any] = {"prompt_token_ids": ask.prompt_ids}
            if image_token_id is not None:
                prompt["prompt_token_ids"] = collapse_image_runs(ask.prompt_ids, image_token_id)
            if ask.images:
                prompt["multi_modal_data"] = {"image": ask.images}
            prompts.append(with_known_images(prompt))
            limits = {"seed": ask.seed, "max_tokens": ask.max_tokens}
            limits = {name: value for name, value in limits.items() if value is not None}
            parameters.append(SamplingParams(**{**options, **limits, "n": len(request)}))
        outputs = []
        if prompts:
            outputs = self.generate(prompts, sampling_params=parameters, use_tqdm=False)
        max_length = self.model_config.max_model_len
        results = []
        for output, request in zip(outputs, requests, strict=True):
            rollouts = sorted(output.outputs, key=lambda rollout: rollout.index)
            assert len(rollouts) == len(request)
            results += [
                answer_of(rollout, output.prompt_token_ids, max_length) for rollout in rollouts
            ]
        return results
