"""The tiny vision-language model: its architecture, and the training that it starts from."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from adora_vl.builtin import DEFAULT_FAMILY, HEAD_SIZE, SHIPPED_SIZE, ModelSize, WarmStart
from adora_vl.builtin.processor import END_OF_TURN, build_processor, processor_around
from adora_vl.builtin.small_model import (
    TrainingStage,
    UntrainedModel,
    init_random_model,
    train_and_save,
)
from adora_vl.data.dataset import Row
from adora_vl.data.prompts import SYSTEM_PROMPT, conversation_with_images
from adora_vl.models.families import FAMILIES
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.synthetic.generate import generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin


@dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """The entries of a family's config that other families do not have."""

    config: type[PreTrainedConfig]
    text: Mapping[str, object]  # entries of the language model's config
    rotary: Mapping[str, object]  # entries of its rotary parameters
    vision: Mapping[str, object]  # entries of the vision tower's config


def _qwen2_5_vl(size: ModelSize) -> FamilyConfig:
    """Return what is special about Qwen2.5-VL: here every vision block attends to all patches."""
    return FamilyConfig(
        config=transformers.Qwen2_5_VLConfig,
        text={"layer_types": ["full_attention"] * size.layers},
        rotary={"mrope_section": [4, 6, 6]},
        vision={"fullatt_block_indexes": list(range(size.layers)), "window_size": 112},
    )


def _qwen3_vl(size: ModelSize) -> FamilyConfig:
    """Return what is special about Qwen3-VL.

    The axes of its positions interleave, and vision features are added after two early layers.
    """
    return FamilyConfig(
        config=transformers.Qwen3VLConfig,
        text={},
        # vLLM reads from the config that positions interleave; in Transformers they always do.
        rotary={"mrope_section": [6, 5, 5], "mrope_interleaved": True},
        vision={
            # After two layers of three, so that a mix-up with the number of layers is noticed.
            "deepstack_visual_indexes": list(range(min(2, size.layers))),
            "num_position_embeddings": 64,  # a grid of 8 x 8
        },
    )


def _qwen3_5(size: ModelSize) -> FamilyConfig:
    """Return what is special about Qwen3.5: linear attention in all layers but the last.

    The last one rotates a quarter of each head, as published.
    """
    linear = {
        "layer_types": ["linear_attention"] * (size.layers - 1) + ["full_attention"],
        "linear_key_head_dim": HEAD_SIZE,
        "linear_value_head_dim": HEAD_SIZE,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": size.heads,
    }
    return FamilyConfig(
        config=transformers.Qwen3_5Config,
        text=linear,
        rotary={
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
        vision={"num_position_embeddings": 64},
    )


_FAMILY_CONFIGS: Mapping[str, Callable[[ModelSize], FamilyConfig]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
}


def language_settings(
    tokenizer: PreTrainedTokenizerBase, size: ModelSize = SHIPPED_SIZE
) -> dict[str, Any]:
    """Return the language model's part of the config of a small model.

    Its embeddings are not tied, because the CPU engine refreshes only one use of a tied embedding
    when weights are synced.
    """
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": 1,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 2048,
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }


def build_config(
    tokenizer: PreTrainedTokenizerBase, family: str, size: ModelSize = SHIPPED_SIZE
) -> Any:
    """Return the Transformers config of a small model.

    Its vision tower has the width and depth of its language model.

    Args:
        tokenizer: its vocabulary is the model's.
        family: the `model_type`, one of `TINY_FAMILIES`.
        size: width, layers and dtype of the model.
    """
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    family_vision = FAMILIES[family].vision
    assert family_vision is not None
    # the entries that other families do not have
    family_config = _FAMILY_CONFIGS[family](size)
    rotary = {"rope_type": "default", "rope_theta": 1e4, **family_config.rotary}
    text = {
        **language_settings(tokenizer, size),
        "rope_parameters": rotary,
        **family_config.text,
    }
    vision = {
        "depth": size.layers,
        "hidden_size": size.width,
        "num_heads": size.heads,
        "intermediate_size": 2 * size.width,
        "out_hidden_size": size.width,
        "patch_size": family_vision.token_side // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **family_config.vision,
    }
    return family_config.config(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 0,
    family: str = DEFAULT_FAMILY,
    size: ModelSize = SHIPPED_SIZE,
) -> Any:
    """Return a small model with random float32 weights, the same for the same seed.

    `size`: its dtype is not used here, since it is that of the weights as they are saved later.
    """
    config = build_config(tokenizer, family, size)
    make = partial(AutoModelForImageTextToText.from_config, config, dtype=torch.float32)
    return init_random_model(make, tokenizer, seed)


# The share of wrong answers, which have a typical slip, among those that the tiny model is taught,
# by the family of the problem. Where it is above one half, greedy decoding is wrong at first.
SLIP_SHARE_BY_FAMILY = {
    "isosceles": 0.7,
    "polygon": 0.35,
    "right_triangle": 0.7,
    "crossing": 0.35,
    "circle": 0.7,
}


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts of dataset rows as tensors, with the pixels of their images."""

    prompts: list[Tensor]  # each (T,), int64
    pixels: Tensor | None = None  # (rows, patches, values), half precision; None without images
    grids: Tensor | None = None  # (rows, 3): each image's (temporal, height, width) in patches


def encode(processor: "ProcessorMixin", rows: list[Row], system_prompt: str) -> EncodedPrompts:
    """Return the prompts of rows as tensors, with the processed pixels of their pictures.

    `rows`: each has one picture, all of one size. `system_prompt`: begins every prompt.
    """
    conversations = [
        conversation_with_images(row["problem"], n_images=1, system_prompt=system_prompt)
        for row in rows
    ]
    texts = [
        processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for messages in conversations
    ]
    batch = processor(
        text=texts, images=[row["images"] for row in rows], padding=True, return_tensors="pt"
    )
    prompts = []  # without padding
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        prompts.append(ids[mask.bool()])
    # All pictures have one size, so all rows have the same number of patches.
    patch_values = batch["pixel_values"].shape[-1]
    pixels = batch["pixel_values"].view(len(rows), -1, patch_values)
    return EncodedPrompts(prompts=prompts, pixels=pixels.half(), grids=batch["image_grid_thw"])


# The token ids of answers, each (T,), by the number of their row.
Answers = Sequence[Tensor] | Mapping[int, Tensor]


def answer_loss(
    model: "PreTrainedModel",
    encoded_prompts: EncodedPrompts,
    answers: Answers,
    row_numbers: list[int],
) -> Tensor:
    """Return the mean cross-entropy of the answers' tokens over a batch of problems.

    Args:
        model: computes the loss.
        encoded_prompts: the prompts of all problems.
        answers: token ids of the answers, each (T,), by the number of the problem.
        row_numbers: the numbers of the problems in the batch.
    """
    sequences = []
    labels = []
    for number in row_numbers:
        prompt = encoded_prompts.prompts[number]
        answer = answers[number]
        sequences.append(torch.cat([prompt, answer]))
        labels.append(torch.cat([torch.full_like(prompt, -100), answer]))  # -100: not in the loss
    if encoded_prompts.pixels is None or encoded_prompts.grids is None:
        return token_loss(model, sequences, labels)
    pixels = encoded_prompts.pixels[row_numbers].flatten(0, 1).float()
    return token_loss(
        model,
        sequences=sequences,
        labels=labels,
        pixel_values=pixels,
        image_grid_thw=encoded_prompts.grids[row_numbers],
    )


def token_loss(
    model: "PreTrainedModel", sequences: list[Tensor], labels: list[Tensor], **image_inputs: Tensor
) -> Tensor:
    """Return the mean cross-entropy of the tokens whose label is not -100.

    Args:
        model: computes the loss.
        sequences: B sequences of token ids, each (T,) with a length T of its own.
        labels: for each sequence its token ids again, with -100 at tokens that are not learned.
        image_inputs: the pixels and grids of images by their names in the model's forward.
    """
    pad_id = model.config.get_text_config().pad_token_id
    ids_BT = pad_sequence(sequences, batch_first=True, padding_value=pad_id)
    if image_inputs:
        image_inputs["mm_token_type_ids"] = (ids_BT == model.config.image_token_id).int()
    mask_BT = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    labels_BT = pad_sequence(labels, batch_first=True, padding_value=-100)
    inputs = {
        "input_ids": ids_BT,
        "attention_mask": mask_BT,
        "labels": labels_BT,
        **image_inputs,
    }
    on_device = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    loss: Tensor = model(**on_device).loss
    return loss


def warm_start(
    model: "PreTrainedModel", processor: "ProcessorMixin", rows: list[Row], plan: WarmStart
) -> TrainingStage:
    """Return the training stage in which the tiny model learns to answer the problems of `rows`.

    It learns the right worked solution of a row, or the wrong one (`slip`), which has a typical
    mistake. `SLIP_SHARE_BY_FAMILY` has the share of wrong ones for each family of problems.

    Args:
        model: the model.
        processor: its processor.
        rows: synthetic problems of one image each.
        plan: the numbers of the training.
    """
    rng = random.Random(plan.seed)
    with_short_prompt = encode(processor, rows, "Answer.")
    with_full_prompt = encode(processor, rows, SYSTEM_PROMPT)
    # A row has the same answer in all steps, the right or the wrong one.
    answers = []
    for row in rows:
        meta = row["meta"]
        is_wrong = rng.random() < SLIP_SHARE_BY_FAMILY[meta["family"]]
        solution = meta["slip"] if is_wrong else meta["solution"]
        answers.append(torch.tensor(processor.tokenizer(solution + END_OF_TURN)["input_ids"]))

    def loss_of(step: int) -> Tensor:
        """Return the loss of a random batch, with the short prompt in the first steps."""
        is_early = step < plan.short_prompt_steps
        prompts = with_short_prompt if is_early else with_full_prompt
        return answer_loss(
            model,
            encoded_prompts=prompts,
            answers=answers,
            row_numbers=rng.sample(range(len(rows)), plan.batch_size),
        )

    return TrainingStage(steps=plan.steps, learning_rate=plan.learning_rate, loss_of=loss_of)


_VOCABULARY_ROWS = 2000  # problems that the tokenizer is trained on
_DATA_SEED = 1000  # other problems than any training run draws by default


def prepare_tiny(
    plan: WarmStart, family: str = DEFAULT_FAMILY, size: ModelSize = SHIPPED_SIZE
) -> UntrainedModel:
    """Return the tiny model with random weights, and the stage of its training.

    A plan of 0 steps has no stage. The default family's tokenizer is trained on the problems; other
    families have the tokenizer of the shipped model.

    Args:
        plan: the numbers of the training.
        family: the `model_type`, one of `TINY_FAMILIES`.
        size: width, layers and dtype of the model.
    """
    rows = []
    if plan.steps or family == DEFAULT_FAMILY:
        rows = list(generate(plan.rows, seed=_DATA_SEED))
    if family == DEFAULT_FAMILY:
        texts = [f"system user assistant {SYSTEM_PROMPT}\n"] * 50
        for row in rows[:_VOCABULARY_ROWS]:
            meta = row["meta"]
            texts.append(f"{row['problem']}\n{meta['solution']}\n{meta['slip']}")
        processor = build_processor(texts)
    else:
        processor = processor_around(AutoTokenizer.from_pretrained(PRETRAINED_FOLDER), family)
    model = build_model(processor.tokenizer, seed=plan.seed, family=family, size=size)
    stages = []
    if plan.steps:
        stages.append(warm_start(model, processor=processor, rows=rows, plan=plan))
    facts = {
        "slips": SLIP_SHARE_BY_FAMILY,
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "size": asdict(size),
    }
    return UntrainedModel(
        model=model, processor=processor, stages=stages, facts=facts, dtype=size.dtype
    )


def build_tiny_model(
    folder: Path,
    plan: WarmStart,
    family: str = DEFAULT_FAMILY,
    size: ModelSize = SHIPPED_SIZE,
) -> dict[str, object]:
    """Build a tiny model of a family and size, train it, and save it in a folder.

    Returns the content of `build.json` in that folder: the plan, final losses and versions.
    """
    prepare = partial(prepare_tiny, family=family, size=size)
    return train_and_save(folder, plan, prepare)
