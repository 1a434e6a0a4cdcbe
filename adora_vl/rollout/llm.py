"""vLLM's `LLM` as the policy's engine.

The rollouts of a prompt are sampled by one request. Images come with digests, so vLLM need not hash
them. Weights come with the first sync, and are not read from a checkpoint.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

from adora_vl.data.shared_images import ImageWithDigest
from adora_vl.models.four_bit import FrozenBase
from adora_vl.rollout.prompt_tokens import collapse_image_runs
from adora_vl.rollout.rollouts import (
    FinishReason,
    SamplingRequest,
    SamplingResult,
    logp_or_minus_infinity,
    merge_requests,
)
from adora_vl.utils import compat
from adora_vl.utils.convert import convert
from adora_vl.utils.errors import UserError, describe_error

LOAD_WITH_FIRST_SYNC = "adora_later"  # a value of vLLM's `load_format`
_SHARED_MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108  # where Linux shows the names of shm_open


@register_model_loader(LOAD_WITH_FIRST_SYNC)
class FirstSyncLoader(DummyModelLoader):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Model loader for `load_format: adora_later`, which reads no checkpoint.

    The first weight sync sends every parameter. Stock vLLM's `dummy` also gives random values to
    buffers that no checkpoint has and no sync sends: those with which the vision tower normalises
    pixels (`visual.input_norm`). Ours leaves all buffers as the model has computed them.
    """

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Give the parameters dummy values, and leave the buffers as the model has computed them.

        Stock vLLM gives the buffers dummy values too.
        """
        computed_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        super().load_weights(model, model_config)
        for name, buffer in model.named_buffers():
            buffer.copy_(computed_buffers[name])


def options_without_checkpoint(model: PreTrainedModel, revision: str | None) -> dict[str, Any]:
    """Return the argument of `LLM` with which an engine with sleep mode reads no checkpoint.

    TRL puts the engine to sleep at once, which discards its weights, so reading them would be in
    vain. The first weight sync sends all of them.

    A checkpoint with a copy of a tied head is the exception. For it vLLM gives the head a parameter
    of its own until it has read both tensors and found them equal, so it has to read them.

    Args:
        model: the policy.
        revision: the revision of its checkpoint on the hub; None: the newest.
    """
    if getattr(model.config, "tie_word_embeddings", False):
        has_copied_head = checkpoint_has_lm_head(model.name_or_path, revision=revision)
        if has_copied_head:
            return {}
    return {"load_format": LOAD_WITH_FIRST_SYNC}


def loop_detection_params(options: Mapping[str, Any]) -> RepetitionDetectionParams:
    """Convert the mapping `repetition_detection` of a config to vLLM's own class.

    vLLM accepts a mapping too, but fails when it uses it. Raises `UserError` for options that vLLM
    does not take.
    """
    key = "generation_kwargs: repetition_detection"
    try:
        params: RepetitionDetectionParams = convert(key, options, RepetitionDetectionParams)
    except VLLMValidationError as error:
        raise UserError(
            f"{key}: {dict(options)} is not taken by vLLM ({describe_error(error)}); give "
            'max_pattern_size and min_count, such as {"max_pattern_size": 32, "min_count": 8}'
        ) from error
    return params


def _structured_outputs(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameter `structured_outputs` as vLLM's own class; empty if it is no mapping.

    `parameters`: parameters of sampling, with or without it.
    """
    options = parameters.get("structured_outputs")
    if not isinstance(options, Mapping):
        return {}
    return {"structured_outputs": StructuredOutputsParams(**options)}


def try_sampling_parameters(parameters: Mapping[str, Any]) -> None:
    """Build vLLM's sampling parameters. Raises `UserError` for those that vLLM refuses.

    `parameters`: arguments of vLLM's `SamplingParams`.
    """
    try:
        SamplingParams(**{**parameters, **_structured_outputs(parameters)})
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise UserError(f"generation_kwargs: refused by vLLM ({describe_error(error)})") from error


@contextmanager
def private_shared_memory() -> Iterator[None]:
    """Let the ranks of a CPU engine that is built in the block use shared memory of their own.

    Stock vLLM gives the memory the same name in every run on a machine, and leaves the name behind
    when a process is killed. Ours puts the launcher's process id into the name, since all ranks of
    a run have the same launcher. After the block the name is removed. All ranks have mapped the
    memory by then, and the system frees it when the last of them ends.
    """
    prefix = f"adora-{os.getppid()}"
    communicator_class = cpu_communicator._CPUSHMDistributed
    make_stock_name = communicator_class.make_group_name

    def make_group_name(communicator: Any) -> str:
        stock_name = make_stock_name(communicator).replace("/", "")
        return f"/{prefix}-{stock_name}"

    try:
        with compat.SHARED_MEMORY.replaced_by(staticmethod(make_group_name), on=communicator_class):
            yield
    finally:
        for file in _SHARED_MEMORY_FOLDER.glob(f"{prefix}-*"):
            file.unlink(missing_ok=True)


def with_image_digests(prompt: dict[str, Any]) -> dict[str, Any]:
    """Return a prompt for vLLM whose images vLLM neither copies nor hashes.

    An `ImageWithDigest` never changes, and has a digest of its pixels. vLLM gets the digest as the
    image's identity (`multi_modal_uuids`), and the image in `MediaWithBytes`, which it does not
    copy. A prompt with any other image stays as it is, since such an image may still be changed.

    `prompt`: vLLM's dict, with the images at `["multi_modal_data"]["image"]`.
    """
    images = prompt.get("multi_modal_data", {}).get("image", [])
    images = images if isinstance(images, list) else [images]
    if not images or not all(isinstance(image, ImageWithDigest) for image in images):
        return prompt
    return {
        **prompt,
        "multi_modal_data": {"image": [MediaWithBytes(image, b"") for image in images]},
        "multi_modal_uuids": {"image": [image.digest for image in images]},
    }


def logps_of_tokens(logprobs: SampleLogprobs, tokens: list[int]) -> list[float | None]:
    """Select the log-probability of each sampled token of a rollout from vLLM's candidates.

    Args:
        logprobs: the candidates of each position: in flat lists, or one dict by token id for each
            position.
        tokens: the sampled token of each position.
    """
    if isinstance(logprobs, FlatLogprobs) and logprobs.token_ids == tokens:
        # The only candidate of each position is the sampled token.
        if np.isfinite(logprobs.logprobs).all():
            return list(logprobs.logprobs)
        return [logp_or_minus_infinity(value) for value in logprobs.logprobs]
    # The first of several candidates is the likeliest one, and need not be the sampled token. For
    # example, the token 7 with the candidates {5: -0.1, 7: -2.3} has the log-probability -2.3.
    positions = zip(logprobs, tokens, strict=True)
    return [logp_or_minus_infinity(candidates[token].logprob) for candidates, token in positions]


def sampling_result_of(
    rollout: CompletionOutput, prompt_ids: Sequence[int], max_length: int
) -> SamplingResult:
    """Convert a rollout that vLLM has sampled to the trainer's own class.

    Args:
        rollout: vLLM's output.
        prompt_ids: the prompt as vLLM has read it.
        max_length: the largest number of tokens that vLLM takes, prompt and completion together.
    """
    tokens = list(rollout.token_ids)
    logps: list[float | None] = [None] * len(tokens)
    if rollout.logprobs is not None:
        logps = logps_of_tokens(rollout.logprobs, tokens)
    reason = FinishReason.STOP
    if rollout.finish_reason == "length":
        # vLLM gives one reason for two limits: its context is full, or `max_tokens` are sampled.
        # For example, 60 + 40 tokens fill a context of 100.
        is_context_full = len(prompt_ids) + len(tokens) >= max_length
        reason = FinishReason.CONTEXT if is_context_full else FinishReason.LENGTH
    return SamplingResult(
        tokens=tokens, logps=logps, finish_reason=reason, prompt_ids_read=list(prompt_ids)
    )


class PolicyLLM(LLM):  # type: ignore[misc]  # vLLM is untyped to mypy
    """A `vllm.LLM` that samples the trainer's requests.

    In vLLM's sleep mode it frees the GPU's memory while the policy learns. Sleeping and waking are
    timed, and it can be kept awake.
    """

    is_kept_awake = False  # True inside `awake()`
    # Whoever builds the engine sets the following.
    adapter: LoRARequest | None = None  # the policy's; None: syncs send weights
    # The policy's 4-bit weights, which are on the host while the engine is awake.
    frozen_base: FrozenBase | None = None
    count_seconds: Callable[[str], AbstractContextManager[Any]] = (
        nullcontext  # counts an action's seconds
    )

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Make `sleep` do nothing inside the block."""
        self.is_kept_awake = True
        try:
            yield
        finally:
            self.is_kept_awake = False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Sample with the policy's adapter, which stock vLLM uses only where a request names it."""
        adapter = {} if self.adapter is None else {"lora_request": self.adapter}
        return super().generate(*args, **{**adapter, **kwargs})

    def sleep(self, level: int = 1, **kwargs: Any) -> None:
        """Free the engine's memory, and count the seconds that it takes.

        Stock vLLM does not count them. At level 2 it discards the weights, at level 1 it moves them
        to the host. An engine with an adapter always sleeps at level 1, since a weight sync sends
        only the adapter and would not bring the base back.
        """
        if self.is_kept_awake:
            return
        with self.count_seconds("sleep"):
            super().sleep(level=level if self.adapter is None else 1, **kwargs)
            if self.frozen_base is not None:
                self.frozen_base.move_to_device()  # for the policy's passes

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """Take the engine's memory back, and count the seconds; stock vLLM does not count them."""
        with self.count_seconds("wake"):
            if self.frozen_base is not None:
                self.frozen_base.move_to_host()  # since the engine needs the GPU
            super().wake_up(*args, **kwargs)

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        settings: Mapping[str, Any],
        image_token_id: int | None,
    ) -> list[SamplingResult]:
        """Sample a rollout for each request, and return them in the order of the requests.

        Neighbouring requests for the same prompt become one request of vLLM, which samples several
        rollouts. vLLM seeds them with the first one's seed, this seed + 1, and so on.

        Args:
            requests: the prompts.
            settings: arguments of vLLM's `SamplingParams`.
            image_token_id: the id of the token that stands for a part of an image; None for a text
                model.
        """
        options = dict(settings)
        # Flat lists, since the host would take longer to make an object for a token than a GPU
        # takes to sample the token.
        options["flat_logprobs"] = True
        options |= _structured_outputs(options)
        # vLLM refuses a greedy request for several rollouts, which would all be equal.
        is_greedy = options["temperature"] == 0
        # Each group of requests becomes one request of vLLM.
        groups = [[request] for request in requests] if is_greedy else merge_requests(requests)
        prompts: list[dict[str, Any]] = []
        parameters: list[SamplingParams] = []
        for group in groups:
            first = group[0]
            prompts.append(_vllm_prompt(first, image_token_id))
            parameters_of_group = {**first.sampling_parameters(options), "n": len(group)}
            parameters.append(SamplingParams(**parameters_of_group))
        outputs = []
        if prompts:  # a rank may have no requests
            outputs = self.generate(prompts, sampling_params=parameters, use_tqdm=False)
        max_length = self.model_config.max_model_len
        results = []
        for output, group in zip(outputs, groups, strict=True):
            rollouts = sorted(output.outputs, key=lambda rollout: rollout.index)
            assert len(rollouts) == len(group)
            for rollout in rollouts:
                results.append(sampling_result_of(rollout, output.prompt_token_ids, max_length))
        return results


def _vllm_prompt(request: SamplingRequest, image_token_id: int | None) -> dict[str, Any]:
    """Return the prompt of a request as vLLM takes it.

    `image_token_id`: the id of the image token, which vLLM takes once for each image and repeats
    itself; None for a text model.
    """
    prompt_ids = request.prompt_ids
    if image_token_id is not None:
        prompt_ids = collapse_image_runs(prompt_ids, image_token_id)
    prompt: dict[str, Any] = {"prompt_token_ids": prompt_ids}
    if request.images:
        prompt["multi_modal_data"] = {"image": request.images}
    return with_image_digests(prompt)
