"""A random LLaVA of two layers: a model with images whose family is not among the known ones."""

from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2Config,
)

from adora_vl.models.load import PRETRAINED_FOLDER

_IMAGE_PLACEHOLDER = "<image>"
_PIXELS = 28  # of an image's side
_PATCH = 14  # pixels of a patch's side, so an image becomes four tokens
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def tiny_llava_processor() -> LlavaProcessor:
    """Return a processor with the tokenizer of the built-in model, and an image token of its own.

    It makes each image 28 x 28 pixels large, and returns no grids.
    """
    tokenizer = AutoTokenizer.from_pretrained(PRETRAINED_FOLDER)
    tokenizer.add_special_tokens({"additional_special_tokens": [_IMAGE_PLACEHOLDER]})
    tokenizer.chat_template = _CHAT_TEMPLATE
    return LlavaProcessor(
        CLIPImageProcessor(
            size={"shortest_edge": _PIXELS}, crop_size={"height": _PIXELS, "width": _PIXELS}
        ),
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        chat_template=_CHAT_TEMPLATE,
        num_additional_image_tokens=1,
    )


def save_tiny_llava(folder: Path) -> None:
    """Write a random model, with the tokens of `tiny_llava_processor`, into a folder."""
    tokenizer = tiny_llava_processor().tokenizer
    special_tokens = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    text_config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        **special_tokens,
    )
    vision_config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_PIXELS,
        patch_size=_PATCH,
        projection_dim=16,
    )
    config = LlavaConfig(
        vision_config=vision_config.to_dict(),
        text_config=text_config.to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids(_IMAGE_PLACEHOLDER),
        image_seq_length=(_PIXELS // _PATCH) ** 2,
        **special_tokens,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    tiny_llava_processor().save_pretrained(folder)
