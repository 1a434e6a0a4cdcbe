"""A few real prompts through the trainer's own engine and its own forward pass, and nothing of the run is changed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl.data_utils import apply_chat_template, prepare_multimodal_messages
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad

from adora_vl.rollout.drift import Drift, drift_sums, merge_drift


@contextmanager
def kept_random_state() -> Iterator[None]:
    """What is drawn inside is not missing outside: Python's, NumPy's and torch's states are put back."""
    python, numpy = random.getstate(), np.random.get_state()  # what Transformers keeps
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@dataclass(frozen=True)
class Prompts:
    """Some rows as the trainer sends and reads them."""

    names: list[str]
    ids: list[list[int]]  # what goes to the engine
    images: list[list[Any] | None] | None
    fields: dict[str, Tensor]  # what goes into the forward pass beside the ids
    num_images: list[int] | None


@dataclass(frozen=True)
class Rollouts:
    """What the engine made of them."""

    prompt_ids: list[list[int]]  # as the engine read them
    completion_ids: list[list[int]]
    logps_BC: Tensor
    mask_BC: Tensor


def read_prompts(trainer: Any, rows: Sequence[dict[str, Any]]) -> Prompts:
    """Prompts of dataset rows, made by the trainer's own tokenizing and processor."""
    images = [row.get("images") or [] for row in rows]
    messages = [row["prompt"] for row in rows]
    if any(images):
        messages = [
            prepare_multimodal_messages(message, images=list(row))
            for message, row in zip(messages, images, strict=True)
        ]
    ids, sent_images, _ = trainer._tokenize_prompts(messages)
    names = [str(row.get("id", f"#{number}")) for number, row in enumerate(rows)]
    if not any(images):
        return Prompts(names, [list(row) for row in ids], None, {}, None)
    kwargs = trainer.chat_template_kwargs
    texts = [apply_chat_template({"prompt": m}, trainer.processing_class, **kwargs)["prompt"] for m in messages]
    read = trainer.processing_class(images=images, text=texts, padding=True, return_tensors="pt")
    fields = {
        name: value.to(trainer.accelerator.device)
        for name, value in read.items()
        if name not in ("input_ids", "attention_mask")
    }
    return Prompts(names, [list(row) for row in ids], sent_images, fields, [len(row) for row in images])


def sample(trainer: Any, prompts: Prompts, *, tokens: int, where: str) -> Rollouts:
    """Rollouts of at most `tokens` tokens from the engine as it is, each with a seed of its own.

    Raises `PromptMismatchError` where the engine reads another prompt.
    """
    generation = trainer.vllm_generation
    position = (trainer.args.seed, f"check/{where}")
    with kept_random_state(), generation.sampling(position=position, max_tokens=tokens):
        read, completions, logps, _ = generation.generate(prompts=prompts.ids, images=prompts.images, num_generations=1)
    rows = [torch.tensor([value[0] if value[0] is not None else torch.nan for value in row]) for row in logps]
    mask = [torch.ones(len(row), dtype=torch.long) for row in completions]
    device = trainer.accelerator.device
    return Rollouts(
        prompt_ids=[list(row) for row in read],
        completion_ids=[list(row) for row in completions],
        logps_BC=pad(rows, padding_value=0, padding_side="right").to(device),
        mask_BC=pad(mask, padding_value=0, padding_side="right").to(device),
    )


def score(trainer: Any, prompts: Prompts, rollouts: Rollouts) -> Tensor:
    """The policy's log-probabilities of the sampled tokens, (B, C), by the pass that the loss uses."""
    device, padding = trainer.accelerator.device, trainer._tokenizer.pad_token_id
    prompt_BP = pad([torch.tensor(row) for row in prompts.ids], padding_value=padding, padding_side="left").to(device)
    ones = [torch.ones(len(row), dtype=torch.long) for row in prompts.ids]
    prompt_mask_BP = pad(ones, padding_value=0, padding_side="left").to(device)
    completions = [torch.tensor(row) for row in rollouts.completion_ids]
    completion_BC = pad(completions, padding_value=padding, padding_side="right").to(device)
    fields: dict[str, Any] = dict(prompts.fields)
    if "mm_token_type_ids" in fields:
        kinds = fields["mm_token_type_ids"]
        fields["mm_token_type_ids"] = torch.cat([kinds, kinds.new_zeros(completion_BC.shape)], dim=1)
    checkpointing = disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs)
    with torch.no_grad(), kept_random_state(), checkpointing:
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([prompt_BP, completion_BC], dim=1),
            torch.cat([prompt_mask_BP, rollouts.mask_BC], dim=1),
            completion_BC.size(1),
            batch_size=trainer.args.per_device_train_batch_size,
            num_images=prompts.num_images,
            **fields,
        )
    assert isinstance(logps, Tensor)
    return logps


def difference(trainer: Any, one_BC: Tensor, other_BC: Tensor, mask_BC: Tensor) -> Drift:
    """How far apart two scorings are, over all ranks."""
    return merge_drift(trainer.accelerator.gather(drift_sums(one_BC, other_BC, mask_BC)[None]))


# Nats a token on average. float32 was measured at 1e-6 here; bfloat16 is said to give 0.01 to 0.05 (adora_max_drift).
BOUNDS = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.3}


def agreement_bound(trainer: Any) -> float:
    """What engine and trainer may differ by: the coarser one's rounding decides, never more than adora_max_drift."""
    engine = trainer.vllm_generation.settings.dtype or str(trainer.model.dtype).removeprefix("torch.")
    args = trainer.args
    policy = "bfloat16" if args.bf16 else "float16" if args.fp16 else str(trainer.model.dtype).removeprefix("torch.")
    rounding = max(BOUNDS.get(name, max(BOUNDS.values())) for name in (engine, policy))
    if args.adora_max_drift is None:
        return rounding
    filtered = (
        args.temperature != 1.0 or args.top_p != 1.0 or args.top_k or args.min_p or args.repetition_penalty != 1.0
    )
    return float(args.adora_max_drift) if filtered else min(rounding, float(args.adora_max_drift))


def distant_bound(trainer: Any) -> float:
    """The same at some 2,000 tokens. Rounded rotary frequencies moved the tiny model's answers by 0.01 there, where two
    float32 passes agree to 1e-6; in bfloat16 that is within the noise of two right ones, so there the bound stays.
    """
    bound = agreement_bound(trainer)
    return bound / 10 if bound <= BOUNDS["float32"] else bound
