"""The whole model of a LoRA run, adapter merged in: what engines and evaluators load."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_merged(model: Any, processing_class: Any, folder: Path) -> None:
    """Write a copy of a PEFT model with its adapter merged, and the processor, into `folder`. One process calls this.

    The model itself is used up: its adapter is gone afterwards.
    """
    model.merge_and_unload().save_pretrained(folder)
    processing_class.save_pretrained(folder)
