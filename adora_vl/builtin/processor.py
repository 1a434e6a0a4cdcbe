"""The tiny models' processors: the families' own classes around a small tokenizer with Qwen's
special tokens.
"""

from collections.abc import Iterable
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2_5_VLProcessor

from adora_vl.models.families import FAMILIES
from adora_vl.models.load import PRETRAINED_FOLDER

VOCABULARY_SIZE = 600
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MAX_PIXELS = 448 * 448

# The behaviour of Qwen2.5-VL's template for text and images, in our own words (no tools, no videos,
# no image ids).
CHAT_TEMPLATE = (PRETRAINED_FOLDER / "chat_template.jinja").read_text(encoding="utf-8")


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `VOCABULARY_SIZE` tokens, Qwen's special ones too, on texts."""
    bpe = Tokenizer(models.BPE())
    # Single digits: a model this small adds and halves numbers only if their digits are its tokens.
    digits = pre_tokenizers.Digits(individual_digits=True)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIAL_TOKENS),
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_processor(texts: Iterable[str]) -> Qwen2_5_VLProcessor:
    """Return Qwen2.5-VL's processor around a tokenizer trained on `texts`."""
    return processor_around(build_tokenizer(texts), "qwen2_5_vl")


def processor_around(tokenizer: PreTrainedTokenizerBase, family: str) -> Any:
    """Return a processor of the family's own class around this tokenizer.

    It takes images from one token up to 448 x 448 pixels. `family`: a `model_type`, such as
    `qwen3_vl`.
    """
    vision = FAMILIES[family].vision
    assert vision is not None
    # A token has 2 x 2 patches.
    image_settings: dict[str, Any] = {"patch_size": vision.token_side // 2}
    processor_class: Any = Qwen2_5_VLProcessor
    video_class: Any = transformers.Qwen2VLVideoProcessor
    if family in ("qwen3_vl", "qwen3_5"):
        image_settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # as published
        processor_class = transformers.Qwen3VLProcessor
        video_class = transformers.Qwen3VLVideoProcessor
    return processor_class(
        image_processor=transformers.Qwen2VLImageProcessor(
            min_pixels=vision.token_side**2, max_pixels=MAX_PIXELS, **image_settings
        ),
        tokenizer=tokenizer,
        video_processor=video_class(),
        chat_template=CHAT_TEMPLATE,
    )
