"""The distinct images of a generation.

Each is processed once, stored once and passed through the vision tower once.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from adora_vl.config import AdoraGRPOConfig
from adora_vl.data.dataloader import DistinctRows, EpochRepeatSampler, ImagePrefetch, NoPrefetch
from adora_vl.data.loading import only_decodes
from adora_vl.data.rows import has_images
from adora_vl.packing.image_store import (
    ImageBanks,
    ImageCache,
    PatchNormalizer,
    can_cache,
    effective_settings,
)
from adora_vl.packing.prompts import PromptBatch, read_prompts, returning_references, with_pictures
from adora_vl.packing.vision import SharedVision
from adora_vl.types import Batch, Row

# The processed images that each process keeps over steps and epochs: those of 1,780 images of
# 448 x 448 pixels.
CACHE_BYTES = 2**30

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import ProcessorMixin
    from transformers.image_utils import ImageInput


def may_have_images(dataset: "Dataset") -> bool:
    """Return whether any row of a training data set may have an image; True where that is unknown.

    A `datasets.Dataset` is asked by its table; rows of another kind tell nothing before they are
    read.
    """
    table = getattr(getattr(dataset, "data", None), "table", None)
    if table is None:
        return True
    return has_images(table) if "images" in table.column_names else "image" in table.column_names


def with_image_columns(columns: dict[str, Any], tokens_BT: Tensor) -> dict[str, Any]:
    """Return the columns of a batch or a pass, with empty image columns where they are missing.

    `tokens_BT`: any tensor with the shape of prompts and completions, (B, P + C).
    """
    if columns.get("pixel_values") is not None:
        return columns
    device = tokens_BT.device
    empty: dict[str, Any] = {
        "pixel_values": torch.zeros(0, 1, dtype=torch.long, device=device),
        "image_grid_thw": torch.zeros(0, 3, dtype=torch.long, device=device),
        "num_images": [0] * len(tokens_BT),
        "mm_token_type_ids": torch.zeros_like(tokens_BT),
    }
    return {**columns, **empty}


def reads_ahead(device: torch.device) -> bool:
    """Return whether images are processed while the policy learns.

    A CPU has no time to spare for it.
    """
    return device.type != "cpu"


class DistinctImages:
    """Owns the distinct images of the present generation.

    `shown`: whether rows may have images. `vision`: the vision towers, which accept references.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        processor: "ProcessorMixin",
        device: torch.device,
        config: AdoraGRPOConfig,
        dataset: "Dataset | tuple[()]" = (),
        *,
        draws: bool = False,
    ) -> None:
        """Make the models accept references, and create the cache.

        Args:
            models: the policy, and the reference model if there is one.
            processor: that of the models, or a tokenizer.
            device: where patches are stored.
            config: the run's settings.
            dataset: the rows that are trained on.
            draws: whether a rollout may be shown an image (by a tool) where its row has none.
        """
        self.image_processor: Any = getattr(processor, "image_processor", None)
        self.banks = ImageBanks()
        if can_cache(self.image_processor):
            settings = effective_settings(self.image_processor, {})
            self.banks = ImageBanks(PatchNormalizer(self.image_processor, settings))
        self.vision = SharedVision(self.banks)
        self._processor = processor
        self._device = device
        self._config = config
        # a list, so that every model is tried
        accepts_by_model = [self.vision.install(model) for model in models]
        accepts_references = all(accepts_by_model)
        self.shown = accepts_references and (draws or may_have_images(dataset))
        has_cache = accepts_references and can_cache(self.image_processor)
        self._cache = ImageCache(CACHE_BYTES) if has_cache else None

    @property
    def cache(self) -> ImageCache | None:
        """The cache of processed images, which the engine uses too.

        None where images cannot be cached, or `cache_images` is switched off.
        """
        return self._cache if self._config.uses("cache_images") else None

    def process(self, row: Mapping[str, Any]) -> int:
        """Put the images of a row into the cache, for a later generation.

        Returns the number of bytes that they take in the cache.
        """
        cache = self.cache
        processor = self.image_processor
        assert cache is not None
        settings = effective_settings(processor, {})
        entries = [cache.get(processor, image, settings) for image in row.get("images") or []]
        return sum(entry.frames_RF.nbytes for entry in entries)

    def prefetch(
        self, rows: DistinctRows, order: EpochRepeatSampler, dataset: "Dataset"
    ) -> NoPrefetch:
        """Return the object that processes the next generation's images in the background.

        `dataset`: the data set that `rows` reads. The object does nothing where a worker of the
        loader reads ahead already, or where reading a row may draw a random number: drawn earlier,
        it would change the run.
        """
        if not reads_ahead(self._device) or self.cache is None or not self.shown:
            return NoPrefetch()
        has_workers = self._config.dataloader_num_workers > 0
        if has_workers or not only_decodes(dataset):
            return NoPrefetch()
        return ImagePrefetch(
            rows=rows, order=order, process=self.process, limit_bytes=self.cache.limit_bytes
        )

    def completed(self, batch: Batch) -> Batch:
        """Return the batch with empty image columns if other batches may have images."""
        if not self.shown:
            return batch
        tokens_BT = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        return cast("Batch", with_image_columns(dict(batch), tokens_BT))

    def prompts(self, rows: Sequence[Row], mode: str, *, refill: bool) -> PromptBatch:
        """Return the prompts of these rows.

        Their images are stored until the next batch of this mode. `mode` is `train` or `eval`. With
        `refill` the rows join the present batch; otherwise the images of the present batch are
        released.
        """
        # Without a cache there are no references, and every pass runs the tower, also on a rank
        # without images.
        self.vision.share = self._config.uses("share_vision") and self.cache is not None
        self.vision.batch_windows(self._config.uses("batch_windows"))
        bank = self.banks.extend() if refill else None
        if bank is None:
            bank = self.banks.new(mode)
        have_images = any(row.get("images") for row in rows)
        if self.cache is None or not have_images:
            return self.read(rows)
        storing = returning_references(
            self.image_processor, cache=self.cache, bank=bank, device=self._device
        )
        return self.read(rows, storing)

    def with_tool_images(
        self, prompts: PromptBatch, pictures: Sequence[Sequence[Any]], mode: str
    ) -> PromptBatch:
        """Return the prompts with the images that tools have shown, after the row's own.

        `pictures`: the shown images of each row, (B,). They are stored as long as those of the
        batch. All ranks call it together, since the bank's features become due on all of them.
        """
        bank = self.banks.extend(mode)
        cache = self.cache
        if not any(pictures):
            return prompts
        storing: AbstractContextManager[None] = nullcontext()
        if cache is not None and bank is not None:
            storing = returning_references(
                self.image_processor, cache=cache, bank=bank, device=self._device
            )
        process = partial(self.image_processor, return_tensors="pt")
        with storing:
            return with_pictures(prompts, pictures, process)

    def tokens_of(self, image: "ImageInput") -> int:
        """Return the number of image tokens of an image that a tool shows."""
        processor = self.image_processor
        settings = effective_settings(self.image_processor, {})
        cache = self._cache or ImageCache(0)
        patch_count = int(cache.get(processor, image, settings).grid_3.prod())
        patches_per_token = int(processor.merge_size) ** 2
        return patch_count // patches_per_token

    def read(
        self, rows: Sequence[Row], processing: AbstractContextManager[Any] | None = None
    ) -> PromptBatch:
        """Return the prompts of these rows, with pixels instead of references to them.

        `processing`: a context in which the processor is called.
        """
        return read_prompts(
            rows, self._processor, self._config.chat_template_kwargs or {}, processing
        )
