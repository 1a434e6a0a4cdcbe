"""vLLM's `LLM`: one request per prompt for its whole group, images processed already, weights that
come later.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn
from vllm import LLM, SamplingParams
from vllm.config import ModelConfig
from vllm.distributed.device_communicators import cpu_communicator
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.multimodal.media import MediaWithBytes
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from vllm.transformers_utils.config import checkpoint_has_lm_head

from adora_vl.data.images import KeptImage
from adora_vl.models.four_bit import FrozenBase
from adora_vl.rollout.engine_logps import engine_logp
from adora_vl.rollout.prompt_tokens import collapse_image_runs
from adora_vl.rollout.rollouts import SamplingRequest, SamplingResult, merge_requests
from adora_vl.utils import compat
from adora_vl.utils.errors import UserError, in_one_line

LATER = "adora_later"


@register_model_loader(LATER)
class LoadLater(DummyModelLoader):  # type: ignore[misc]  # vLLM is untyped to mypy
    """`load_format: adora_later`: no checkpoint is read, since the first weight sync sends every
    parameter.

    Stock vLLM's `dummy` also gives random values to buffers that no checkpoint has and no sync
    sends: those with which the vision tower normalises pixels (`visual.input_norm`). Ours leaves
    all buffers as the model has computed them.
    """

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        computed = {name: buffer.clone() for name, buffer in model.named_buffers()}
        super().load_weights(model, model_config)
        for name, buffer in model.named_buffers():
            buffer.copy_(computed[name])


def has_copied_head(model: Any, revision: str | None) -> bool:
    """Whether the checkpoint of a model with tied embeddings has a tensor for its head too, as some
    tools leave it.
    """
    if not getattr(model.config, "tie_word_embeddings", False):
        return False
    return bool(checkpoint_has_lm_head(model.name_or_path, revision=revision))


_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where Linux shows names that shm_open was given


def stopping_of_loops(asked: Mapping[str, Any]) -> RepetitionDetectionParams:
    """vLLM's `repetition_detection` from what a config says of it: vLLM takes a mapping too, and
    fails when it uses it.

    Raises `UserError`.
    """
    known = [field.name for field in fields(RepetitionDetectionParams)]
    try:
        if unknown := {*asked} - {*known}:
            raise ValueError(f"it has no {min(unknown)}, but {', '.join(known)}")
        return RepetitionDetectionParams(**asked)
    except (ValueError, VLLMValidationError) as error:
        raise UserError(
            f"generation_kwargs: repetition_detection: {dict(asked)} is not taken by vLLM ({in_one_line(error)}); give "
            'max_pattern_size and min_count, such as {"max_pattern_size": 32, "min_count": 8}'
        ) from error


@contextmanager
def own_shared_memory() -> Iterator[None]:
    """Inside, the processes that share a CPU engine give their shared memory a name that no other
    run has.

    The number of the launcher's process is in it, so all ranks make the same. After the block all
    of them have mapped the memory, and the name is removed: what is mapped stays until the last
    process ends, however it ends.
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
    """The prompt as vLLM takes it without copying and hashing its images: each inside vLLM's own
    wrapper, which its parser hands on as it is, with the digest that is known already as its
    identity (`multi_modal_uuids`).

    For images that are kept (`adora_vl.data.dataloader`). Others stay as they are: they may yet be
    drawn on.
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


def answer_of(rollout: Any, ask: SamplingRequest, read: Sequence[int], room: int) -> SamplingResult:
    """What vLLM has sampled for `ask`.

    `read`: the prompt's ids as it has read them. `room`: tokens of a sequence.
    """
    tokens = list(rollout.token_ids)
    given = rollout.logprobs
    logps: list[float | None] = [None] * len(tokens)
    if given is not None:  # by the token's id: the first of several is the likeliest
        scored = zip(given, tokens, strict=True)
        logps = [engine_logp(by_token[token].logprob) for by_token, token in scored]
    full = len(read) + len(tokens) >= room
    reason = "stop" if rollout.finish_reason != "length" else "room" if full else "length"
    return SamplingResult(
        tokens=tokens,
        logps=logps,
        finish_reason=reason,  # type: ignore[arg-type]
        prompt_ids_read=list(read),
    )


class PolicyLLM(LLM):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Like `vllm.LLM`.

    It also takes asks; sleeping and waking are timed, and it can be kept awake.
    """

    stays_awake = False
    adapter: LoRARequest | None = None  # the policy's, where the engine gets its adapter alone
    # of the trainer, which leaves the card while the engine is awake
    base: FrozenBase | None = None
    timed: Callable[[str], AbstractContextManager[Any]] = nullcontext

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, `sleep` does nothing."""
        self.stays_awake = True
        try:
            yield
        finally:
            self.stays_awake = False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Stock vLLM answers without an adapter unless a request names it."""
        adapter = {} if self.adapter is None else {"lora_request": self.adapter}
        return super().generate(*args, **{**adapter, **kwargs})

    def sleep(self, level: int = 1, **kwargs: Any) -> None:
        """Stock vLLM is not timed.

        With an adapter weights stay on the host: no sync brings the base back.
        """
        if self.stays_awake:
            return
        with self.timed("sleep"):
            super().sleep(level=level if self.adapter is None else 1, **kwargs)
            if self.base is not None:
                self.base.come_back()

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """Stock vLLM does not say how long it takes."""
        with self.timed("wake"):
            if self.base is not None:
                self.base.leave()
            super().wake_up(*args, **kwargs)

    def sample(
        self,
        asks: Sequence[SamplingRequest],
        settings: Mapping[str, Any],
        image_token_id: int | None,
    ) -> list[SamplingResult]:
        """Neighbours that ask for the same are one request, whose rollouts get its seed, the seed +
        1, and so on.

        `settings`: of `SamplingParams`. `image_token_id`: vLLM makes as many of one as the image
        has patches.
        """
        given = dict(settings)
        # vLLM's greedy ones are alone
        requests = merge_requests(asks) if given["temperature"] else [[ask] for ask in asks]
        if isinstance(given.get("structured_outputs"), dict):
            given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
        prompts, parameters = [], []
        for ask, *more in requests:
            ids = (
                ask.prompt_ids
                if image_token_id is None
                else collapse_image_runs(ask.prompt_ids, image_token_id)
            )
            shown = {"multi_modal_data": {"image": ask.images}} if ask.images else {}
            prompts.append(with_known_images({"prompt_token_ids": ids, **shown}))
            own = {"seed": ask.seed, "max_tokens": ask.max_tokens}
            own = {name: value for name, value in own.items() if value is not None}
            parameters.append(SamplingParams(**{**given, **own, "n": 1 + len(more)}))
        room = self.model_config.max_model_len
        outputs = (
            self.generate(prompts, sampling_params=parameters, use_tqdm=False) if prompts else []
        )
        return [
            answer_of(rollout, ask, output.prompt_token_ids, room)
            for output, request in zip(outputs, requests, strict=True)
            for rollout, ask in zip(
                sorted(output.outputs, key=lambda one: one.index), request, strict=True
            )
        ]
