"""Each distinct image of a generation: processed once, held once, and seen by the vision tower once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from adora_vl.batch import Batch, Row
from adora_vl.config.speed import SpeedOptions
from adora_vl.dedup.blackened import half_black
from adora_vl.dedup.image_bank import ImageBanks
from adora_vl.dedup.processor import FlatProcessor, StepProcessor
from adora_vl.dedup.shared_vision import SharedVision
from adora_vl.dedup.without_images import has_images, with_image_columns
from adora_vl.rollout.image_cache import ImageCache, can_cache, effective_settings


class DistinctImages:
    """Owns the distinct images of the present generation."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        processor: Any,
        device: torch.device,
        switches: SpeedOptions,
        dataset: Any = (),
    ) -> None:
        """`models`: the policy, and the reference model if there is one. `dataset`: the rows that are trained on."""
        self.banks = ImageBanks()
        self.vision = SharedVision(self.banks)
        self._device, self._switches = device, switches
        takes_references = [self.vision.install(model) for model in models]  # a list, so that every model is tried
        self.shown = all(takes_references) and has_images(dataset)  # whether rows of the run have images
        self._image_processor: Any = getattr(processor, "image_processor", None)
        able = all(takes_references) and can_cache(self._image_processor)
        self._cache = ImageCache(switches.adora_image_cache_mb * 2**20) if able else None

    @property
    def cache(self) -> ImageCache | None:
        """The cache of processed images, which the engine uses too. None if sharing is impossible or switched off."""
        return self._cache if self._switches.adora_cache_images else None

    @property
    def knows_patches(self) -> bool:
        """Whether the processor cuts images into patches in the way that is known here."""
        return can_cache(self._image_processor)

    def process(self, row: Row) -> int:
        """Put the images of a row into the cache, for a generation to come. Returns the bytes that they take there."""
        cache, processor = self.cache, self._image_processor
        assert cache is not None
        settings = effective_settings(processor, {})
        entries = [cache.get(processor, image, settings) for image in row.get("images") or []]
        return sum(entry.patches_RD.nbytes for entry in entries)

    def completed(self, batch: Batch) -> Batch:
        """The batch, with empty image columns if other rows have images but its own have none
        (`adora_vl.dedup.without_images`).
        """
        if not self.shown:
            return batch
        tokens_BT = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        return cast("Batch", with_image_columns(dict(batch), tokens_BT))

    def half_black(self, batch: Batch, place: str) -> AbstractContextManager[Tensor | None]:
        """Yields the `pixel_values` of the batch with half of every image black (`adora_vl.dedup.blackened`)."""
        return half_black(self.banks, self._image_processor, batch, place)

    @contextmanager
    def generation(self, rows: Sequence[Row], mode: str, *, further: bool, processor: Any) -> Iterator[Any]:
        """Yields the processor for these rows.

        `mode` is `train` or `eval`. With `further` the rows are added to the present batch. Otherwise a new batch
        begins, and the images of the previous one are released.
        """
        # Without a cache there are no references, and every pass takes the tower's way, also on a rank without images.
        self.vision.share = self._switches.adora_share_vision and self.cache is not None
        self.vision.batch_windows(self._switches.adora_batch_windows)
        bank = self.banks.more() if further else None
        if bank is None:
            bank = self.banks.new(mode)
        cache = self.cache
        if cache is None or not any(row.get("images") for row in rows):
            yield FlatProcessor(processor) if self.shown else processor
        else:
            yield StepProcessor(processor, cache, bank, self._device)
