"""The tiny models' shapes and their initial weights, for each family that can be built."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
)

from adora_vl.families import FAMILIES

WIDTH, LAYERS, HEAD_SIZE = 96, 3, 32
DEFAULT_FAMILY = "qwen2_5_vl"
# What the families' configs differ in. Qwen3-VL interleaves the three kinds of positions, which vLLM reads from the
# config and Transformers always does. Deepstack features enter behind the first two of three layers, so that their
# number is not that of the layers, and the position embeddings are a grid of 8 x 8. Qwen3.5 has linear attention in all
# layers but the last, and rotates a quarter of each head there as published.
_OWN: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # config, text, rotary, vision
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        {"layer_types": ["full_attention"] * LAYERS},
        {"mrope_section": [4, 6, 6]},
        {"fullatt_block_indexes": list(range(LAYERS)), "window_size": 112},
    ),
    "qwen3_vl": (
        Qwen3VLConfig,
        {},
        {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
        {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
    ),
    "qwen3_5": (
        Qwen3_5Config,
        {
            "layer_types": ["linear_attention"] * (LAYERS - 1) + ["full_attention"],
            "linear_key_head_dim": HEAD_SIZE,
            "linear_value_head_dim": HEAD_SIZE,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": WIDTH // HEAD_SIZE,
        },
        {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
        {"num_position_embeddings": 64},
    ),
}
TINY_FAMILIES = tuple(_OWN)


def build_config(tokenizer: PreTrainedTokenizerBase, family: str = DEFAULT_FAMILY) -> Any:
    """Three layers for the eye, three for the language, untied embeddings.

    Untied, because the CPU engine refreshes only one use of a tied embedding when weights are synced.
    """
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    known = FAMILIES[family].vision
    assert known is not None
    config, own_text, own_rotary, own_vision = _OWN[family]
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": WIDTH // HEAD_SIZE,
        "num_key_value_heads": 1,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **own_rotary},
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
        **own_text,
    }
    vision = {
        "depth": LAYERS,
        "hidden_size": WIDTH,
        "num_heads": WIDTH // HEAD_SIZE,
        "intermediate_size": 2 * WIDTH,
        "out_hidden_size": WIDTH,
        "patch_size": known.unit // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **own_vision,
    }
    return config(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int = 0, family: str = DEFAULT_FAMILY) -> Any:
    """A model with fresh float32 weights, the same for the same seed. The caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(build_config(tokenizer, family), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or "norm" in name:
                continue
            # Wider than the default 0.02, which at this width leaves the first hundreds of steps without a gradient.
            fan_in = parameter[0].numel()
            std = (
                0.05
                if "embed_tokens" in name or "pos_embed" in name
                else 0.03
                if "patch_embed" in name
                else 0.5 / fan_in**0.5
            )
            torch.nn.init.normal_(parameter, std=std)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
