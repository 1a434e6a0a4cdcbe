"""Models of every family with two layers and random weights, in float64 throughout."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

# Bounds of relative differences. float64 rounds at 2e-16, so no processor comes near the first one.
# The vision tower computes rotations in float32, and so rounds the gradient of each copy of an
# image.
FLOAT64_BOUND = 1e-9
VISION_BOUND = 1e-6
IMAGE_TOKEN = 7  # the id of the token that stands for a part of an image
SMALL_VOCABULARY = 40  # tests draw token ids from 10 on; lower ones are control tokens
# What the text models, and the vision towers, of all families have in common.
TEXT_CONFIG = {
    "vocab_size": SMALL_VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION_CONFIG = {
    "depth": 1,
    "num_heads": 2,
    "patch_size": 4,
    "in_channels": 1,
    "temporal_patch_size": 1,
}
ROPE_PARAMETERS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


class Rotary(nn.Module):
    """A rotary embedding with the frequencies of `rotary`, the model's own, computed in float64."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.inv_freq = rotary.inv_freq.double()
        self.angles_of_all_values = getattr(
            rotary, "recomposition_frequencies", lambda angles: torch.cat([angles, angles], dim=-1)
        )

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles_of_all_values(positions[..., None].double() * self.inv_freq)
        return angles.cos(), angles.sin()


def compute_in_float64(model: Any) -> Any:
    """Convert a model to float64, and return it.

    Its norms and rotary embedding are replaced, since Transformers computes them in float32
    whatever the model's dtype is.
    """
    model = model.double().train()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(
                    len(child.weight), eps=child.variance_epsilon, dtype=torch.float64
                )
                norm.weight = child.weight
                setattr(module, name, norm)
    decoder = model.get_decoder()
    decoder.rotary_emb = Rotary(decoder.rotary_emb)
    return model


def small_model(model_type: str, attention: str = "sdpa") -> Any:
    """Return a model of a family with two layers and random weights, in float64.

    Args:
        model_type: that of the family, such as "qwen2_5_vl".
        attention: the implementation of attention, such as "sdpa".
    """
    torch.manual_seed(0)
    if model_type == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**TEXT_CONFIG))
    else:
        families: dict[str, tuple[Any, Any, dict[str, Any]]] = {
            "qwen2_vl": (
                Qwen2VLConfig,
                Qwen2VLForConditionalGeneration,
                {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
            ),
            "qwen2_5_vl": (
                Qwen2_5_VLConfig,
                Qwen2_5_VLForConditionalGeneration,
                {
                    "hidden_size": 16,
                    "out_hidden_size": 32,
                    "intermediate_size": 24,
                    "fullatt_block_indexes": [0],
                },
            ),
            "qwen3_vl": (
                Qwen3VLConfig,
                Qwen3VLForConditionalGeneration,
                {
                    "hidden_size": 16,
                    "out_hidden_size": 32,
                    "intermediate_size": 24,
                    "num_position_embeddings": 16,
                    "deepstack_visual_indexes": [0],
                },
            ),
        }
        config_class, model_class, vision = families[model_type]
        config = config_class(
            text_config={**TEXT_CONFIG, "rope_parameters": ROPE_PARAMETERS},
            vision_config={**VISION_CONFIG, **vision},
            image_token_id=IMAGE_TOKEN,
            vision_start_token_id=8,
            vision_end_token_id=9,
            video_token_id=6,
        )
        model = model_class(config)
    for parameter in model.parameters():  # large enough that attention is far from uniform
        nn.init.normal_(parameter, std=0.3)
    model.set_attn_implementation(attention)
    return compute_in_float64(model)
