"""Rows without images in a run that has images: they get the columns of the others, with nothing in them.

A rank whose rows happen to have no images would leave out the vision tower while the others run it. Where parameters
are sharded, or gradients are reduced, its peers would then wait for it for ever. So such a rank has columns of no
images, and `adora_vl.dedup.shared_vision` sends an empty picture through the tower instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def has_images(dataset: Any) -> bool:
    """Whether any row of a training data set may show an image; True where that cannot be told."""
    table = getattr(getattr(dataset, "data", None), "table", None)
    if table is None:
        return True
    if "images" not in table.column_names:
        return "image" in table.column_names
    import pyarrow.compute as pc  # pyarrow ships no types

    return bool(pc.any(pc.greater(pc.list_value_length(table["images"]), 0)).as_py())


def with_image_columns(columns: dict[str, Any], tokens_BT: Tensor) -> dict[str, Any]:
    """The columns of a batch, or of a pass, with those of images added where they are missing.

    `tokens_BT`: any tensor of the shape of prompts with their completions.
    """
    if columns.get("pixel_values") is not None:
        return columns
    device = tokens_BT.device
    none: dict[str, Any] = {
        "pixel_values": torch.zeros(0, 1, dtype=torch.long, device=device),
        "image_grid_thw": torch.zeros(0, 3, dtype=torch.long, device=device),
        "num_images": [0] * len(tokens_BT),
        "mm_token_type_ids": torch.zeros_like(tokens_BT),
    }
    return {**columns, **none}
