"""vLLM's `LLM`: one request per prompt for its whole group, images processed already, weights that come later."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from vllm import LLM
from vllm.config import ModelConfig
from vllm.distributed.device_communicators import cpu_communicator
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.multimodal.media import MediaWithBytes
from vllm.sampling_params import RepetitionDetectionParams
from vllm.transformers_utils.config import checkpoint_has_lm_head

from adora_vl.data.dataloader import KeptImage
from adora_vl.utils import compat
from adora_vl.utils.errors import UserError, in_one_line

LATER = "adora_later"


@register_model_loader(LATER)
class LoadLater(DummyModelLoader):  # type: ignore[misc]  # vLLM is untyped to mypy
    """`load_format: adora_later`: no checkpoint is read, since the first weight sync sends every parameter.

    Stock vLLM's `dummy` also gives random values to buffers that no checkpoint has and no sync sends: those with which
    the vision tower normalises pixels (`visual.input_norm`). Ours leaves all buffers as the model has computed them.
    """

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        computed = {name: buffer.clone() for name, buffer in model.named_buffers()}
        super().load_weights(model, model_config)
        for name, buffer in model.named_buffers():
            buffer.copy_(computed[name])


def has_copied_head(model: Any, revision: str | None) -> bool:
    """Whether the checkpoint of a model with tied embeddings has a tensor for its head too, as tools for training and
    merging may leave it there.
    """
    if not getattr(model.config, "tie_word_embeddings", False):
        return False
    return bool(checkpoint_has_lm_head(model.name_or_path, revision=revision))


_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where Linux shows names that shm_open was given


def stopping_of_loops(asked: Mapping[str, Any]) -> RepetitionDetectionParams:
    """vLLM's `repetition_detection` from what a config says of it: vLLM takes a mapping too, and fails when it uses it.

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
    """Inside, the processes that share a CPU engine give their shared memory a name that no other run has.

    The number of the launcher's process is in it, so all ranks make the same. After the block all of them have mapped
    the memory, and the name is removed: what is mapped stays until the last process ends, however it ends.
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


@dataclass(frozen=True)
class Request:
    """One request, and the neighbouring rows that it is for."""

    first: int
    count: int


def plan_requests(prompts: Sequence[Any], groups: Sequence[int], together: bool) -> list[Request]:
    """Rows of one group with the same token ids and the same image objects become one request.

    `groups`: the group of each row.
    """
    requests: list[Request] = []
    for row in range(len(prompts)):
        last = requests[-1] if requests else None
        if together and last and groups[last.first] == groups[row] and _equal(prompts[last.first], prompts[row]):
            requests[-1] = Request(last.first, last.count + 1)
        else:
            requests.append(Request(row, 1))
    return requests


def _equal(one: Any, other: Any) -> bool:
    return one["prompt_token_ids"] == other["prompt_token_ids"] and _images(one) == _images(other)


def _images(prompt: Any) -> list[int]:
    data = prompt.get("multi_modal_data", {}).get("image", [])
    return [id(image) for image in (data if isinstance(data, list) else [data])]


def asking_once(
    generate: Callable[..., Any],
    groups: Sequence[int],
    seeds: Sequence[int] | None,
    together: bool,
    limits: Sequence[int] | None = None,
    reasons: list[str] | None = None,
) -> Callable[..., Any]:
    """As `LLM.generate`, but rows of one prompt are sent as one request. Returns one output per row.

    `seeds`: the seed of each row, or None. vLLM's `ParentRequest` gives the rollouts of one request its seed, the
    seed + 1, and so on, so the seeds of a group have to be consecutive. `limits`: how many tokens each row may get, the
    same for the rows of a group; None: as many as the parameters say. `reasons`: gets vLLM's `finish_reason` per row.
    """

    def generate_rows(prompts: Sequence[Any], sampling_params: Any, **kwargs: Any) -> list[Any]:
        assert len(prompts) == len(groups), f"{len(prompts)} prompts and {len(groups)} group numbers"
        requests = plan_requests(prompts, groups, together)
        each = [sampling_params.clone() for _ in requests]
        for parameters, request in zip(each, requests, strict=True):
            parameters.n = request.count
            if seeds is not None:
                parameters.seed = seeds[request.first]
            if limits is not None:
                parameters.max_tokens = limits[request.first]
        outputs = generate([prompts[request.first] for request in requests], sampling_params=each, **kwargs)
        singles = [single for output in outputs for single in _singles(output)]
        if reasons is not None:
            reasons[:] = [single.outputs[0].finish_reason for single in singles]
        return singles

    return generate_rows


def _singles(output: Any) -> list[Any]:
    """A copy of a request's output for each of its rollouts."""
    singles = []
    for rollout in sorted(output.outputs, key=lambda one: one.index):
        single = copy.copy(output)
        single.outputs = [rollout]
        singles.append(single)
    return singles


def with_known_images(prompt: dict[str, Any]) -> dict[str, Any]:
    """The prompt as vLLM takes it without copying and hashing its images: each inside vLLM's own wrapper, which its
    parser hands on as it is, with the digest that is known already as its identity (`multi_modal_uuids`).

    For images that are kept (`adora_vl.data.dataloader`). Others stay as they are: they may yet be drawn on.
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


class GroupingLLM(LLM):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Like `vllm.LLM`, except inside `grouped` and while it stays awake. Sleeping and waking are timed."""

    stays_awake = False
    timed: Callable[[str], AbstractContextManager[Any]] = nullcontext
    _grouping: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, `sleep` does nothing."""
        self.stays_awake = True
        try:
            yield
        finally:
            self.stays_awake = False

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Stock TRL puts the engine to sleep after every call of `generate`."""
        if not self.stays_awake:
            with self.timed("sleep"):
                super().sleep(*args, **kwargs)

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """Stock TRL wakes it in two parts, for the weights and for the caches."""
        with self.timed("wake"):
            super().wake_up(*args, **kwargs)

    @contextmanager
    def grouped(
        self, groups: Sequence[int], seeds: Sequence[int] | None, together: bool, **further: Any
    ) -> Iterator[None]:
        """Inside, `generate` takes rows of these groups, sends them by `asking_once`, which also gets `further`, and
        returns an output per row.
        """
        self._grouping = partial(asking_once, groups=groups, seeds=seeds, together=together, **further)
        try:
            yield
        finally:
            self._grouping = None

    def generate(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Stock vLLM makes a request for each prompt in the list, with the sampling parameters that it is given."""
        generate = super().generate

        def known(prompts: Sequence[Any], **further: Any) -> Any:
            return generate([with_known_images(prompt) for prompt in prompts], **further)

        outputs: list[Any] = (generate if self._grouping is None else self._grouping(known))(*args, **kwargs)
        return outputs
