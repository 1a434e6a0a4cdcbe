"""Computing a group's prompt once or G times, by length: `python -m benchmarks.prefix [--generations 8]`.

Forward and backward of one group on a language model of 8 layers in float32, by turns packed
(`adora_vl.dedup.prefix`) and as separate rows; medians. "rule" is what `packing_pays` says for these lengths.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from adora_vl.dedup.prefix import pack, packing_pays


def build(width: int) -> Any:
    config = Qwen2Config(
        vocab_size=600, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=8,
        num_attention_heads=width // 32, num_key_value_heads=width // 64, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).train()
    add_fused_lm_head(model)
    return model


def separate(model: Any, ids: Tensor, completion: int) -> Tensor:
    labels = ids.clone()
    labels[:, :-completion] = -100
    logps: Tensor = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    return logps[:, -completion:]


def packed(model: Any, ids: Tensor, completion: int) -> Tensor:
    prompt = ids.size(1) - completion
    positions = torch.arange(prompt)[None]
    group = pack(ids, torch.ones_like(ids), completion, [list(range(len(ids)))], positions)
    given = {"input_ids": group.ids_NS, "attention_mask": group.mask_N1SS, "position_ids": group.positions}
    return group.unpacked(model(**given, shift_labels=group.labels_NS, fused_lm_head=True).log_probs)


def seconds(way: Callable[..., Tensor], model: Any, ids: Tensor, completion: int) -> float:
    start = time.perf_counter()
    way(model, ids, completion).sum().backward()
    model.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    model = build(options.width)
    lengths = [(prompt, completion) for prompt in (64, 256, 512) for completion in (16, 64, 256, 512)]
    print(f"{'prompt':>7}{'completion':>12}{'separate s':>12}{'packed s':>10}{'ratio':>7}  rule")
    for prompt, completion in tqdm(lengths, file=sys.stderr, leave=False):
        ids = torch.randint(0, 600, (options.generations, prompt + completion))
        ids[:, :prompt] = ids[0, :prompt]
        with torch.no_grad():
            gap = (separate(model, ids, completion) - packed(model, ids, completion)).abs().max()
        assert gap < 1e-4, f"the two ways differ by {gap}"
        times: dict[str, list[float]] = {"separate": [], "packed": []}
        for _ in range(options.repeats):
            times["separate"].append(seconds(separate, model, ids, completion))
            times["packed"].append(seconds(packed, model, ids, completion))
        one, other = (statistics.median(times[way]) for way in ("separate", "packed"))
        pays = packing_pays([prompt], [[completion] * options.generations], options.width, 4 * options.width)
        tqdm.write(
            f"{prompt:>7}{completion:>12}{one:>12.3f}{other:>10.3f}{other / one:>7.2f}"
            f"  {'packed' if pays else 'separate'}"
        )


if __name__ == "__main__":
    main()
