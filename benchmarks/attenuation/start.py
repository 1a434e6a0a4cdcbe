"""The start of a seed: a small language model that copies the teacher, the same for all arms and regimes."""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from adora_vl.models.tiny.place import save_built
from adora_vl.models.tiny.processor import END_OF_TURN, build_tokenizer
from adora_vl.models.tiny.text import build_text_config
from benchmarks.attenuation.settings import Teaching
from benchmarks.attenuation.task import ChainProblem, Regime, draw, teacher


def _example(rng: random.Random, start: Teaching) -> tuple[ChainProblem, str]:
    labelled = rng.random() < 0.5
    problem = draw(rng, Regime(rng.choice(start.operations), 0.0, labelled=labelled))
    return problem, teacher(rng, problem)


def _tokenizer() -> PreTrainedTokenizerFast:
    """The words are tokens, and so is every digit and sign: then a step is as long in the form as in the chain."""
    return build_tokenizer(["any\n", "two\n", "ten\n", "guess\n"])


def _fresh(tokenizer: PreTrainedTokenizerFast, layers: int, seed: int) -> Any:
    config = build_text_config(tokenizer)
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:1] * layers
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


def build_start(folder: Path, start: Teaching, seed: int) -> None:
    """Build and train it in `folder`, which appears complete or not at all. A start that is there stays."""
    if (folder / "model.safetensors").is_file():
        return
    tokenizer, rng = _tokenizer(), random.Random(f"start/{seed}")
    model = _fresh(tokenizer, start.layers, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=start.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, start.learning_rate, total_steps=start.steps, pct_start=0.1
    )
    losses: list[float] = []
    model.train()
    for _ in range(start.steps):
        examples = [_example(rng, start) for _ in range(start.batch_size)]
        asked = tokenizer([problem.prompt for problem, _ in examples])["input_ids"]
        told = tokenizer([answer + END_OF_TURN for _, answer in examples])["input_ids"]
        pairs = list(zip(asked, told, strict=True))
        ids_BT = pad_sequence([torch.tensor(a + t) for a, t in pairs], True, tokenizer.pad_token_id)
        labels_BT = pad_sequence([torch.tensor([-100] * len(a) + t) for a, t in pairs], True, -100)
        mask_BT = pad_sequence([torch.ones(len(a + t), dtype=torch.long) for a, t in pairs], True)
        loss = model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    facts = {"seed": seed, "loss": statistics.fmean(losses[-50:]), "plan": asdict(start)}
    save_built(folder, model, tokenizer, {**facts, "parameters": sum(p.numel() for p in model.parameters())})
