"""The whole model of a LoRA run, adapter merged in: what engines and evaluators load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import is_peft_model
from trl.distributed import DistributedBackend

from adora_vl.files import replacing_folder


def save_merged(model: Any, processing_class: Any, folder: Path, accelerator: Accelerator) -> bool:
    """Write a PEFT model with its adapter merged in, and the processor, into `folder`. All ranks call this together.

    Returns whether anything was written: a model without LoRA is whole already, and under ZeRO-3 and FSDP the weights
    are in pieces, where merging them is left to the user (`python -m adora_vl.export`). The evaluators look for
    `folder`, so it is there whole or not at all. The model itself is used up: its adapter is gone afterwards.
    """
    backend = DistributedBackend(accelerator)
    if not is_peft_model(model) or backend.is_zero3 or backend.is_fsdp:
        return False
    if accelerator.is_main_process:
        with replacing_folder(folder) as staged:
            model.merge_and_unload().save_pretrained(staged)
            processing_class.save_pretrained(staged)
    accelerator.wait_for_everyone()
    return True
