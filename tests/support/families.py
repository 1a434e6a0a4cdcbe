"""Models of every known family (`model_type`), with few layers and without weights."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from adora_vl.models.families import FAMILIES

FAMILIES_WITH_VISION = [model_type for model_type, family in FAMILIES.items() if family.vision]


def family_config(model_type: str) -> Any:
    """Return Transformers' own defaults for the family, with fewer layers in the vision tower."""
    config = AutoConfig.for_model(model_type)
    if model_type in FAMILIES_WITH_VISION:
        config.vision_config.depth = 1
        config.vision_config.deepstack_visual_indexes = [0, 0, 0]
        config.vision_config.fullatt_block_indexes = [0]
    return config


def build_on_meta(config: Any) -> Any:
    """Build the model of a config whose tensors have shapes and no memory."""
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)
