"""The adapter of a supervised fine-tuning, as users have one: of the tiny model, with a head of its
own.
"""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from adora_vl.models.load import PRETRAINED

TEXT = r".*language_model\..*(q_proj|up_proj)"


def sft_adapter(folder: Path, base: str = str(PRETRAINED), **options: Any) -> Path:
    """Write it into `folder`, moved by as much as can be seen.

    `options`: of PEFT's `LoraConfig`.
    """
    config = LoraConfig(
        **{
            "r": 4,
            "lora_alpha": 8,
            "target_modules": TEXT,
            "modules_to_save": ["lm_head"],
            **options,
        }
    )
    model = get_peft_model(AutoModelForImageTextToText.from_pretrained(PRETRAINED), config)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter += 0.02 * torch.randn(parameter.shape, generator=draw)
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(folder)
    return folder
