"""vLLM's `LLM`, extended so that it can be told which rows are rollouts of one prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm import LLM
from vllm.multimodal.media import MediaWithBytes

from adora_vl.rollout.distinct_rows import KeptImage
from adora_vl.rollout.requests import asking_once


def with_known_images(prompt: dict[str, Any]) -> dict[str, Any]:
    """The prompt as vLLM takes it without copying and hashing its images: each inside vLLM's own wrapper, which its
    parser hands on as it is, with the digest that is known already as its identity (`multi_modal_uuids`).

    For images that are kept (`adora_vl.rollout.distinct_rows`). Others stay as they are: they may yet be drawn on.
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

        def known(prompts: Sequence[Any], **further: Any) -> Any:
            return generate([with_known_images(prompt) for prompt in prompts], **further)

        outputs: list[Any] = (generate if self._asking is None else self._asking(known))(*args, **kwargs)
        return outputs
