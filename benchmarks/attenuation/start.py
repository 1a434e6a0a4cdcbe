"""The start of a seed: a small language model that copies the teacher, the same for all arms and regimes."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen2Config

from adora_vl.models.tiny.fit import fit, fresh_text_model
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


def _config(tokenizer: PreTrainedTokenizerFast, layers: int) -> Qwen2Config:
    config = build_text_config(tokenizer)
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:1] * layers
    return config


def build_start(folder: Path, start: Teaching, seed: int) -> None:
    """Build and train it in `folder`, which appears complete or not at all. A start that is there stays."""
    if (folder / "model.safetensors").is_file():
        return
    tokenizer, rng = _tokenizer(), random.Random(f"start/{seed}")
    model = fresh_text_model(_config(tokenizer, start.layers), tokenizer, seed)

    def loss_of(step: int) -> Tensor:
        examples = [_example(rng, start) for _ in range(start.batch_size)]
        asked = tokenizer([problem.prompt for problem, _ in examples])["input_ids"]
        told = tokenizer([answer + END_OF_TURN for _, answer in examples])["input_ids"]
        pairs = list(zip(asked, told, strict=True))
        ids_BT = pad_sequence([torch.tensor(a + t) for a, t in pairs], True, tokenizer.pad_token_id)
        labels_BT = pad_sequence([torch.tensor([-100] * len(a) + t) for a, t in pairs], True, -100)
        mask_BT = pad_sequence([torch.ones(len(a + t), dtype=torch.long) for a, t in pairs], True)
        loss: Tensor = model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT).loss
        return loss

    loss = fit(model, loss_of, start.steps, start.learning_rate)
    facts = {"seed": seed, "loss": loss, "plan": asdict(start)}
    save_built(folder, model, tokenizer, {**facts, "parameters": sum(p.numel() for p in model.parameters())})
