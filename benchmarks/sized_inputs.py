"""Problems and model configs of chosen sizes, for benchmarks of the policy step."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from PIL import Image
from transformers import PreTrainedTokenizerBase

from adora_vl.data.dataset import schema
from adora_vl.data.prompts import conversation
from adora_vl.synthetic.generate import generate

_VISION_TOKEN_BY_KEY = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def image_size(tokens: int, token_side: int) -> tuple[int, int]:
    """Return width and height in pixels of a nearly square image of about `tokens` tokens.

    For example, 12 tokens of 28 pixels a side are 3 columns of 4 rows: 84 by 112 pixels.
    """
    columns = max(1, round(tokens**0.5))
    rows = max(1, round(tokens / columns))
    return columns * token_side, rows * token_side


def sized_problems(count: int, size: tuple[int, int] | None, further_words: int = 0) -> Dataset:
    """Return drawn problems with their prompts.

    Args:
        count: how many problems.
        size: width and height of their images in pixels; None for problems without images.
        further_words: how many words, of one token each, make the text of each problem longer.
    """
    rows = list(generate(count, seed=5))
    for row in rows:
        row["images"] = _resized(row["images"], size) if size is not None else []
        row["problem"] += " ab" * further_words
    data = Dataset.from_list(rows, features=schema())
    data = data.add_column("prompt", [conversation(row["problem"]) for row in rows])
    return data if size is not None else data.remove_columns("images")


def _resized(images: Sequence[Image.Image], size: tuple[int, int]) -> list[Image.Image]:
    """Return the images in another size, in pixels."""
    return [image.resize(size, Image.Resampling.BICUBIC) for image in images]


def set_special_tokens(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the ids of a tokenizer's special tokens into the config of a model, in place.

    `config`: the content of its `config.json`. A model without images has no `vision_config` in it.
    """
    ids_of_ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config.update(ids_of_ends)
    config.get("text_config", config).update(ids_of_ends)
    if "vision_config" in config:
        for key, token in _VISION_TOKEN_BY_KEY.items():
            config[key] = tokenizer.convert_tokens_to_ids(token)
