"""Rows of a batch on their own: copied to the CPU with their images, to be taken up by another batch."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import recursively_apply, send_to_device
from trl.trainer.utils import unsplit_pixel_values_by_grid

from adora_vl.dedup.image_bank import ImageBanks, first_patches

Parcel = dict[str, Any]  # the columns of the rows; `images` are the distinct ones, by the number of their first patch


def packed_up(rows: dict[str, Any], banks: ImageBanks) -> Parcel:
    """The rows, copied to the CPU as separate tensors. Each image is included once, in place of references to it.

    `rows` are of a batch that `split_pixel_values_by_grid` has split.
    """
    parcel: Parcel = apart({name: value for name, value in rows.items() if name != "pixel_values"})
    references = rows.get("pixel_values")
    if isinstance(references, list):
        starts = [first_patches(own, grid) for own, grid in zip(references, rows["image_grid_thw"], strict=True)]
        parcel["pixel_values"] = starts
        parcel["images"] = {start: apart(banks.of(start).image(start)) for start in {s for row in starts for s in row}}
    return parcel


def unpacked(parcel: Parcel, banks: ImageBanks, device: torch.device) -> dict[str, Any]:
    """The rows as a batch, whose images are then in the bank of the training batch."""
    rows: dict[str, Any] = send_to_device({k: v for k, v in parcel.items() if k != "images"}, device)
    bank = banks.more()
    if "images" in parcel and bank is not None:
        held = {
            start: bank.hold(key, patches.to(device), grid).to(device)
            for start, (key, patches, grid) in parcel["images"].items()
        }
        none = torch.zeros(0, 1, dtype=torch.long, device=device)
        rows["pixel_values"] = [torch.cat([none, *(held[start] for start in row)]) for row in parcel["pixel_values"]]
    whole: dict[str, Any] = unsplit_pixel_values_by_grid(rows)
    return whole


def apart(values: Any) -> Any:
    """A copy whose tensors are on the CPU, each with storage of its own."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().clone(), values)
