"""The tiny model's shape and its initial weights."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

WIDTH, LAYERS, HEAD_SIZE = 96, 3, 32


def build_config(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLConfig:
    """Three layers for the eye, three for the language, untied embeddings.

    Untied, because the CPU engine refreshes only one use of a tied embedding when weights are synced.
    """
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "layer_types": ["full_attention"] * LAYERS,
        "num_attention_heads": WIDTH // HEAD_SIZE,
        "num_key_value_heads": 1,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    vision = {
        "depth": LAYERS,
        "hidden_size": WIDTH,
        "num_heads": WIDTH // HEAD_SIZE,
        "intermediate_size": 2 * WIDTH,
        "out_hidden_size": WIDTH,
        "fullatt_block_indexes": list(range(LAYERS)),
        "window_size": 112,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """A model with fresh float32 weights, the same for the same seed. The caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(build_config(tokenizer))
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or "norm" in name:
                continue
            # Wider than the default 0.02, which at this width leaves the first hundreds of steps without a gradient.
            fan_in = parameter[0].numel()
            std = 0.05 if "embed_tokens" in name else 0.03 if "patch_embed" in name else 0.5 / fan_in**0.5
            torch.nn.init.normal_(parameter, std=std)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
