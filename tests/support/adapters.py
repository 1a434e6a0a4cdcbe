"""LoRA adapters of the tiny model: a saved one, and the options of every kind that PEFT has."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from adora_vl.builtin.processor import build_processor
from adora_vl.builtin.tiny_vl import build_model
from adora_vl.models.load import PRETRAINED_FOLDER

TEXT_MODULES_PATTERN = r".*language_model\..*(q_proj|up_proj)"


def sft_adapter(folder: Path, base: str = str(PRETRAINED_FOLDER), **options: Any) -> Path:
    """Save an adapter of the tiny model, as supervised fine-tuning leaves one; return its folder.

    Its weights are random, and so large that the policy's outputs change visibly.

    Args:
        folder: where it is saved.
        base: the model that the adapter names as its base.
        options: options of PEFT's `LoraConfig`.
    """
    config = LoraConfig(
        **{
            "r": 4,
            "lora_alpha": 8,
            "target_modules": TEXT_MODULES_PATTERN,
            "modules_to_save": ["lm_head"],
            **options,
        }
    )
    model = get_peft_model(AutoModelForImageTextToText.from_pretrained(PRETRAINED_FOLDER), config)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter += 0.02 * torch.randn(parameter.shape, generator=draw)
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(folder)
    return folder


LORA_OPTIONS_BY_KIND: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "rank_pattern": {"up_proj": 2}},
    "dora": {"use_dora": True},
    "lora_bias": {"target_modules": ["q_proj"], "lora_bias": True},
    "biases of the base": {"bias": "all"},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["lm_head"]},
    "convolution": {"target_modules": ["patch_embed.proj"]},
    "modules_to_save": {"modules_to_save": ["lm_head", "embed_tokens", "merger"]},
    "tokens": {"trainable_token_indices": [5, 6]},
    "parameter": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
}


def float64_model() -> Any:
    """Return the tiny model with random weights, in float64."""
    return build_model(build_processor(["Find x."]).tokenizer).double()


def policy_with_adapter(base, config, second_adapter: str | None = None):
    """Return a copy of a model with an adapter, to whose trained weights noise is added.

    Args:
        base: the model.
        config: the `LoraConfig`.
        second_adapter: the name of another adapter with the same config. It is not active, unless
            its name is "active".
    """
    torch.manual_seed(0)
    model = get_peft_model(deepcopy(base), config, autocast_adapter_dtype=False)
    if second_adapter is not None:
        model.add_adapter(second_adapter, config)
        is_active = second_adapter == "active"
        model.base_model.set_adapter(["default", second_adapter] if is_active else "default")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * 0.05
    return model.eval()
