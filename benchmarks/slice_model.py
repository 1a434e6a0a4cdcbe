"""A model folder with the widths of a published Qwen2.5-VL and few layers: random weights, bfloat16.

Neither weights nor tokenizer of the real model are needed. The tokenizer knows the tiny model's vocabulary and Qwen's
special tokens at their published ids; every id between them is a filler that a random model samples and that decodes to
a short text. One filler in 64 is a box around the answer of a drawn problem, so that chance solves some of the problems
and a reward has something to tell apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from adora_vl.memory.model import SHAPES
from adora_vl.models.tiny.processor import CHAT_TEMPLATE, END_OF_TEXT, END_OF_TURN, SPECIAL_TOKENS, build_tokenizer
from adora_vl.prompts import SYSTEM_PROMPT
from data_prep.output import complete_or_absent
from data_prep.schema import Row
from data_prep.storage import Manifest, write_manifest, write_split
from data_prep.synthetic.generate import generate

PUBLISHED = "Qwen2.5-VL-7B-Instruct"
FIRST_SPECIAL = 151643  # the published id of <|endoftext|>; the others follow in the order of the tiny model's
FILLERS_A_BOX = 64
FULL_ATTENTION_EVERY = 8  # of the published tower's blocks: the last of each eight sees the whole image
SIDES = (504, 868)  # pixels: 324 and 961 image tokens
MIN_PIXELS, MAX_PIXELS = 56 * 56, 1280 * 28 * 28


def slice_config(layers: int, blocks: int, **widths: Any) -> Qwen2_5_VLConfig:
    """The published config with `layers` decoder layers and `blocks` vision blocks, the last of which sees the whole
    image, as the last of every eight does in the published tower.

    `widths`: other values, `vision_config` among them, for a test that has no memory for the real ones.
    """
    published = json.loads((SHAPES / PUBLISHED / "config.json").read_text(encoding="utf-8"))
    vision = published.pop("vision_config") | widths.pop("vision_config", {})
    full = [*range(FULL_ATTENTION_EVERY - 1, blocks, FULL_ATTENTION_EVERY), blocks - 1]
    vision |= {"depth": blocks, "fullatt_block_indexes": sorted(set(full))}
    text = published | widths | {"num_hidden_layers": layers, "max_window_layers": layers}
    return Qwen2_5_VLConfig(**text, vision_config=vision, pad_token_id=FIRST_SPECIAL)


def slice_tokenizer(answers: Sequence[str], texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """`answers`: what the boxes among the fillers hold. `texts`: what the vocabulary of prompts is learnt from."""
    learnt = json.loads(build_tokenizer(texts).backend_tokenizer.to_str())
    words = sorted(learnt["model"]["vocab"], key=learnt["model"]["vocab"].get)
    words = [word for word in words if word not in SPECIAL_TOKENS]
    vocabulary = {word: number for number, word in enumerate(words)}
    for number in range(len(words), FIRST_SPECIAL):
        box, place = divmod(number, FILLERS_A_BOX)
        vocabulary[_box(answers[box % len(answers)], box) if place == 0 else f"Ġw{number:x}"] = number
    vocabulary |= {token: FIRST_SPECIAL + place for place, token in enumerate(SPECIAL_TOKENS)}
    whole = Tokenizer.from_str(json.dumps({**learnt, "added_tokens": []}))
    merges = [tuple(merge) for merge in learnt["model"]["merges"]]
    whole.model = models.BPE(vocab=vocabulary, merges=merges)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=whole,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIAL_TOKENS),
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _box(answer: str, number: int) -> str:
    """A vocabulary has every text once, so each box has a number before it. `Ġ` is the space of byte-level BPE."""
    return f"Ġ({number:x})Ġ\\boxed{{{answer}}}"


def build_model(folder: Path, config: Qwen2_5_VLConfig, rows: Sequence[Row], seed: int = 0) -> int:
    """Write model, tokenizer and processor into `folder`. Returns the number of parameters.

    The weights are drawn in bfloat16 with the published standard deviation, the same for the same seed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    model.generation_config.update(
        eos_token_id=[config.get_text_config().eos_token_id, FIRST_SPECIAL], pad_token_id=FIRST_SPECIAL
    )
    model.save_pretrained(folder)
    texts = [f"system user assistant {SYSTEM_PROMPT}\n", *(row["problem"] for row in rows)]
    tokenizer = slice_tokenizer([row["answer"] for row in rows], texts)
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def draw_rows(rows: int, seed: int = 0) -> list[Row]:
    """Drawn problems, their pictures by turns as large as `SIDES` say."""
    drawn = [generate(-(-rows // len(SIDES)), seed=seed + place, size=side) for place, side in enumerate(SIDES)]
    return [row for rows_of_sides in zip(*drawn, strict=True) for row in rows_of_sides][:rows]


def write_data(folder: Path, rows: Sequence[Row]) -> Manifest:
    """A prepared dataset of these rows, complete or absent."""
    arguments = {"rows": len(rows), "sides": list(SIDES)}
    description = {"source": "synthetic", "input": None, "revision": None, "arguments": arguments}
    with complete_or_absent(folder, description) as partial:
        return write_manifest(partial, description, {"train": write_split(rows, partial, "train")})
