"""From sampled rollouts to the columns of a batch, as TRL 1.16 makes them in `_generate_and_score_completions`.

On the same rollouts every column is TRL's to the bit (`tests/parity/test_own_generation.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from trl.chat_template_utils import parse_response
from trl.trainer.utils import pad

from adora_vl.dedup.prompts import PromptBatch
from adora_vl.types import Batch

_BY_TOKEN = ("token_type_ids", "mm_token_type_ids")  # fields of prompts with a value for each token


def said(processor: Any, prompts: PromptBatch, completions: Sequence[list[int]]) -> list[Any]:
    """What was answered, (B,): as messages where the prompts are messages, else as texts."""
    tokenizer, conversational = getattr(processor, "tokenizer", processor), not isinstance(prompts.messages[0], str)
    if conversational and any(getattr(tokenizer, f"response_{of}", None) is not None for of in ("template", "schema")):
        pairs = zip(completions, prompts.ids, strict=True)
        return [[parse_response(tokenizer, ids, prefix=prompt)] for ids, prompt in pairs]
    texts: list[str] = processor.batch_decode(completions, skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in texts] if conversational else texts


def collated(
    prompts: PromptBatch, completions: Sequence[list[int]], logps: Sequence[list[float | None]] | None,
    counted: Sequence[bool], own: Sequence[list[bool]] | None = None, *, pad_id: int, image_id: int | None,
    multiple: int | None, to_device: Callable[[Any], Any],
) -> Batch:  # fmt: skip
    """The rollouts of this rank, B rows. `prompts`: with the images of the completions behind their own.

    `logps`: the engine's; None for a token that it could not score, which becomes NaN. `counted`: whether the loss
    counts a rollout. `own`: which tokens the policy has sampled, where tools may have said others. `image_id`: the
    token of an image. `multiple`: of which widths are multiples. `to_device`: Transformers' way, which may round
    pixels.
    """

    def wide(values: Sequence[Any], fill: float, side: str, dtype: torch.dtype = torch.long) -> Tensor:
        rows = [torch.tensor(row, dtype=dtype) for row in values]
        padded: Tensor = pad(rows, padding_value=fill, padding_side=side, pad_to_multiple_of=multiple)
        return padded

    # Positions are counted by the mask, so what it leaves out shows no image.
    completions = [ids if one else _blind(ids, image_id, pad_id) for ids, one in zip(completions, counted, strict=True)]
    ones = [[int(one)] * len(ids) for ids, one in zip(completions, counted, strict=True)]
    batch: dict[str, Any] = {
        "prompt_ids": wide(prompts.ids, pad_id, "left"),
        "prompt_mask": wide([[1] * len(ids) for ids in prompts.ids], 0, "left"),
        "completion_ids": wide(completions, pad_id, "right"),
        "completion_mask": wide(ones, 0, "right"),
    }
    fields = prompts.fields if prompts.images is not None else {}
    for name, values in fields.items():
        batch[name] = values
        if name in _BY_TOKEN:
            shows = name == "mm_token_type_ids" and image_id is not None
            behind = batch["completion_ids"] == image_id if shows else torch.zeros_like(batch["completion_ids"])
            batch[name] = torch.cat([wide(values, 0, "left"), behind.long()], dim=1)
    if own is not None:
        batch["tool_mask"] = wide(own, 1, "right")
    moved: Batch = to_device(batch)
    if logps is not None:
        scored = [[torch.nan if logp is None else logp for logp in row] for row in logps]
        seen = wide(scored, 0.0, "right", torch.float32)
        moved["sampling_per_token_logps"] = seen.to(moved["prompt_ids"].device, non_blocking=True)
    if prompts.images is not None:
        moved["num_images"] = prompts.num_images
    return moved


def _blind(ids: list[int], image_id: int | None, pad_id: int) -> list[int]:
    return [pad_id if token == image_id else token for token in ids]
