"""What the supervised starts of all small models share: fresh weights, and the loop that trains them."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


def fresh_text_model(config: Qwen2Config, tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    """A language model whose matrices are drawn from the seed, wide enough for its few and narrow layers to learn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen2ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                std = 0.05 if "embed_tokens" in name else 0.5 / parameter.shape[1] ** 0.5
                torch.nn.init.normal_(parameter, std=std)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def fit(model: Any, loss_of: Callable[[int], Tensor], steps: int, learning_rate: float) -> float:
    """Train in place on `loss_of(step)`, a scalar, with AdamW and one cycle of the rate; then evaluation mode.

    Returns the mean loss of the last 50 steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    model.train()
    losses: list[float] = []
    for step in tqdm(range(steps), desc="warm start", disable=not sys.stderr.isatty()):
        loss = loss_of(step)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return statistics.fmean(losses[-50:])
