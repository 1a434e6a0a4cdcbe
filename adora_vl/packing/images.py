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
from adora_vl.data.loading import only_decodes_rows
from adora_vl.data.rows import has_images
from adora_vl.packing.image_store import (
    ImageBanks,
    ImageCache,
    PatchNormalizer,
    can_cache,
    effective_settings,
)
from adora_vl.packing.prompts import (
    PromptBatch,
    append_completions,
    read_prompts,
    returning_patch_numbers,
    select_prompts,
    with_pictures_of_tools,
)
from adora_vl.packing.vision import SharedVision
from adora_vl.types import Batch, Row

# What each process keeps of processed images over steps and epochs. 1,780 images of 448 x 448
# pixels fit into it.
CACHE_BYTES = 2**30

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import ProcessorMixin
    from transformers.image_utils import ImageInput


def may_have_images(dataset: "Dataset") -> bool:
    """Return whether any row of a training data set may have an image.

    The table of a `datasets.Dataset` tells it. Any other data set has no table, and its rows are
    not read here, so the result is True.
    """
    table = getattr(getattr(dataset, "data", None), "table", None)
    if table is None:
        return True
    if "images" in table.column_names:
        return has_images(table)
    return "image" in table.column_names


def with_image_columns(columns: dict[str, Any], tokens_BT: Tensor) -> dict[str, Any]:
    """Return the columns of a batch or a pass, with empty image columns where they are missing.

    So a batch without images has the same columns as the batches of other ranks. For example, two
    rows without images get `pixel_values` (0, 1), `image_grid_thw` (0, 3) and `num_images` [0, 0].

    Args:
        columns: the columns by name.
        tokens_BT: any tensor with the shape of prompts and completions together, (B, T): B rows of
            T tokens.
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


def processes_images_ahead(device: torch.device) -> bool:
    """Return whether images are processed while the policy learns, which is so only beside a GPU.

    Where the policy learns on the CPU, the CPU has no time to spare for it.
    """
    return device.type != "cpu"


class DistinctImages:
    """Owns the distinct images of the present generation.

    Each is processed once (`ImageCache`), stored once (`ImageBanks`), and goes through the vision
    tower once (`SharedVision`). An image bank stores the patches of one batch's images under
    numbers. Batches have these numbers in place of pixels. A batch has B rows of T tokens.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        processor: "ProcessorMixin",
        device: torch.device,
        config: AdoraGRPOConfig,
        dataset: "Dataset",
        *,
        tools_show_images: bool = False,
    ) -> None:
        """Make the models accept the numbers of patches, and create cache and image banks.

        Args:
            models: the policy, and the reference model if there is one.
            processor: that of the models, or a tokenizer.
            device: where patches are stored.
            config: the run's settings.
            dataset: the rows that are trained on.
            tools_show_images: whether a tool may put an image into a rollout whose row has none.
        """
        self.image_processor: Any = getattr(processor, "image_processor", None)
        self.banks = ImageBanks()
        # The bytes of patches can be stored and normalised later only for Qwen's image processors.
        if can_cache(self.image_processor):
            settings = effective_settings(self.image_processor)
            self.banks = ImageBanks(PatchNormalizer(self.image_processor, settings))
        self.vision = SharedVision(self.banks)
        self._processor = processor
        self._device = device
        self._config = config
        # `install` returns False for a model without a vision tower of a known kind. It changes a
        # model, so it is called for each of them, even if an earlier one refuses.
        is_installed_by_model = [self.vision.install(model) for model in models]
        accepts_patch_numbers = all(is_installed_by_model)
        # whether a batch may have images, of a row or of a tool
        self.may_be_shown = accepts_patch_numbers and (
            tools_show_images or may_have_images(dataset)
        )
        can_have_cache = accepts_patch_numbers and can_cache(self.image_processor)
        # The cache of processed images, which the engine uses too. None where images cannot be
        # cached, or `cache_images` is switched off.
        self.cache: ImageCache | None = None
        if can_have_cache and config.uses("cache_images"):
            self.cache = ImageCache(CACHE_BYTES)
        # Without a cache there are no patch numbers to share features by. Every pass then runs the
        # vision tower, also on a rank without images.
        self.vision.shares_images = config.uses("share_vision") and self.cache is not None
        self.vision.switch_batched_windows(on=config.uses("batch_windows"))

    def cache_images(self, row: Mapping[str, Any]) -> int:
        """Process the images of a row, and put them into the cache for a later generation.

        Returns the number of bytes that they take there.
        """
        cache = self.cache
        processor = self.image_processor
        assert cache is not None, "without a cache no row is read ahead"
        settings = effective_settings(processor)
        byte_count = 0
        for image in row.get("images") or []:
            # `get` processes an image that is not in the cache yet, and puts it there.
            processed = cache.get(processor, image, settings)
            byte_count += processed.frames_RF.nbytes
        return byte_count

    def prefetch(
        self, rows: DistinctRows, order: EpochRepeatSampler, dataset: "Dataset"
    ) -> NoPrefetch:
        """Return an object that processes the next generation's images in the background.

        Args:
            rows: the rows of the loader.
            order: the sampler, which tells which rows come next.
            dataset: the data set that `rows` reads.

        Returns:
            A `NoPrefetch`, which does nothing, where images are not cached, or where rows must not
            be read early.
        """
        # Where the policy learns on the CPU, the CPU has no time to spare. Without a cache the
        # results could not be kept. Without images there is nothing to process.
        if not processes_images_ahead(self._device) or self.cache is None or not self.may_be_shown:
            return NoPrefetch()
        # A worker of the loader reads ahead already.
        has_workers = self._config.dataloader_num_workers > 0
        # Reading a row may draw a random number, which would change the run if it came earlier.
        may_draw = not only_decodes_rows(dataset)
        if has_workers or may_draw:
            return NoPrefetch()
        return ImagePrefetch(
            rows=rows,
            sampler=order,
            process_images=self.cache_images,
            limit_bytes=self.cache.limit_bytes,
        )

    def fill_image_columns(self, batch: Batch) -> Batch:
        """Return the batch with empty image columns if other batches may have images."""
        if not self.may_be_shown:
            return batch
        tokens_BT = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        return cast("Batch", with_image_columns(dict(batch), tokens_BT))

    def prompts(self, rows: Sequence[Row], mode: str, *, refill: bool) -> PromptBatch:
        """Return the prompts of a batch's rows, tokenized and with their images processed.

        Where images are cached, `pixel_values` has the numbers of their patches in an image bank.

        Args:
            rows: rows of the data set.
            mode: `train` or `eval`. The images are stored until the next batch of this mode.
            refill: whether the rows are added to the present batch. Otherwise a new batch begins,
                and the images of the present one are released.
        """
        # An image bank stores the images of one batch.
        bank = self.banks.bank_to_extend() if refill else None
        if bank is None:
            bank = self.banks.new(mode)
        have_images = any(row.get("images") for row in rows)
        if self.cache is None or not have_images:
            return self.read(rows)
        processor_context = returning_patch_numbers(
            self.image_processor, cache=self.cache, bank=bank, device=self._device
        )
        return self.read(rows, processor_context)

    def with_tool_images(
        self, prompts: PromptBatch, pictures: Sequence[Sequence[Any]], mode: str
    ) -> PromptBatch:
        """Return the prompts with the images that tools have shown, after those of the rows.

        Collective: ranks whose tools have shown no image call it too (see `bank_to_extend`).

        Args:
            prompts: of B rows.
            pictures: the images that tools have shown in each row, (B,). They are stored as long as
                those of the batch.
            mode: `train` or `eval`.
        """
        # The call also marks the bank as one with new images, which all ranks have to do alike. So
        # it comes before the return below.
        bank = self.banks.bank_to_extend(mode)
        cache = self.cache
        if not any(pictures):
            return prompts
        processor_context: AbstractContextManager[None] = nullcontext()
        if cache is not None and bank is not None:
            processor_context = returning_patch_numbers(
                self.image_processor, cache=cache, bank=bank, device=self._device
            )
        process = partial(self.image_processor, return_tensors="pt")
        with processor_context:
            return with_pictures_of_tools(prompts, pictures, process)

    def continued_prompts(
        self,
        prompts: PromptBatch,
        *,
        rows: Sequence[int],
        completions: Sequence[Sequence[int]],
        pictures: Sequence[Sequence[Any]],
        mode: str,
    ) -> PromptBatch:
        """Return some of the prompts with what their rollouts have so far. Collective.

        Args:
            prompts: of a generation.
            rows: the indices of N of them.
            completions: the tokens behind each of them, those of tools included, (N,).
            pictures: the images that tools have shown in these completions, (N,).
            mode: `train` or `eval`.
        """
        chosen_prompts = self.with_tool_images(select_prompts(prompts, rows), pictures, mode)
        image_token_id = getattr(self._processor, "image_token_id", None)
        return append_completions(chosen_prompts, completions, image_token_id)

    def count_image_tokens(self, image: "ImageInput") -> int:
        """Return into how many image tokens the processor turns an image that a tool shows."""
        processor = self.image_processor
        settings = effective_settings(processor)
        cache = self.cache or ImageCache(limit_bytes=0)
        patch_count = int(cache.get(processor, image, settings).grid_thw.prod())
        patches_per_token = int(processor.merge_size) ** 2
        return patch_count // patches_per_token

    def read(
        self, rows: Sequence[Row], processor_context: AbstractContextManager[Any] | None = None
    ) -> PromptBatch:
        """Return the prompts of these rows, tokenized and with their images processed.

        Args:
            rows: rows of the data set.
            processor_context: a context manager around the processor's work. With
                `returning_patch_numbers` the images become patch numbers. None: they are pixels.
        """
        chat_template_kwargs = self._config.chat_template_kwargs or {}
        return read_prompts(
            rows,
            self._processor,
            chat_template_kwargs=chat_template_kwargs,
            processor_context=processor_context,
        )
