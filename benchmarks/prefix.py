"""A group's prompt computed once against G times, by length: `python -m benchmarks.prefix [--width 2048 --layers 2]`.

Forward and backward of one group on a language model, by turns in one process, medians: its rollouts as separate padded
rows; as one sequence with a dense mask; and as one sequence with split attention, which is what the trainer does. On a
CPU the seconds are the processor's, so that what else runs there disturbs less. Peak memory is what the pass takes
beside the model. "tokens" is the share of tokens that are left, "agree" the largest distance of log-probabilities from
the separate rows'.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from adora_vl.dedup.shared_prompt import Packed, pack
from adora_vl.dedup.split_attention import ARGUMENT, install

VOCABULARY = 600
DENSE_LIMIT = 6000  # tokens beyond which a dense mask is not tried


def build(width: int, layers: int, dtype: torch.dtype, device: str) -> Any:
    wide = width >= 1024  # heads and MLP as Qwen2.5-VL-3B's
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=11008 * width // 2048 if wide else 4 * width,
        num_hidden_layers=layers, num_attention_heads=width // 128 if wide else width // 32,
        num_key_value_heads=2 if wide else width // 64, max_position_embeddings=32768,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(device, dtype).train()
    add_fused_lm_head(model)
    return model


def group(prompt: int, completion: int, generations: int, long_tailed: bool, device: str) -> tuple[Tensor, Tensor]:
    """Token ids and mask of a group. Long-tailed: `completion` is the median, four times as much the limit."""
    generator = torch.Generator().manual_seed(prompt + completion)
    lengths = torch.full((generations,), completion)
    if long_tailed:
        drawn = torch.empty(generations).log_normal_(0, 0.8, generator=generator)
        lengths = (drawn / drawn.median() * completion).clamp(1, 4 * completion).long()
    ids = torch.randint(0, VOCABULARY, (generations, prompt + int(lengths.max())), generator=generator)
    ids[:, :prompt] = ids[0, :prompt]
    mask = (torch.arange(ids.size(1)) < prompt + lengths[:, None]).long()
    return ids.to(device), mask.to(device)


def separate(model: Any, ids: Tensor, mask: Tensor, prompt: int) -> Tensor:
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :prompt] = -100
    logps: Tensor = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
    return logps[:, prompt - 1 :]


def packed(ids: Tensor, mask: Tensor, prompt: int) -> Packed:
    positions = torch.arange(prompt, device=ids.device)[None]
    return pack(ids, mask, ids.size(1) - prompt, [list(range(len(ids)))], positions)


def split(model: Any, ids: Tensor, mask: Tensor, prompt: int) -> Tensor:
    one = packed(ids, mask, prompt)
    given = {"attention_mask": {"full_attention": None}, "position_ids": one.positions, ARGUMENT: one.shared}
    return one.unpacked(model(input_ids=one.ids_NS, **given, shift_labels=one.labels, fused_lm_head=True).log_probs)


def dense(model: Any, ids: Tensor, mask: Tensor, prompt: int) -> Tensor:
    """The same sequence with a mask of its square; the prompt's last token once a rollout, as there is a label each."""
    lengths = mask[:, prompt:].sum(dim=1).tolist()
    parts = [ids[0, : prompt - 1], *(ids[row, prompt - 1 : prompt - 1 + length] for row, length in enumerate(lengths))]
    spans = torch.tensor([len(part) for part in parts], device=ids.device)
    span_S = torch.arange(len(parts), device=ids.device).repeat_interleave(spans)
    allowed_SS = (span_S[:, None] == span_S) | (span_S == 0)
    given = {"attention_mask": allowed_SS.tril_()[None, None]}
    starts = [0, *[prompt - 1] * len(lengths)]
    places = [torch.arange(at, at + len(part), device=ids.device) for at, part in zip(starts, parts, strict=True)]
    labels = torch.cat([ids.new_full((prompt - 1,), -100), ids[:, prompt:][mask[:, prompt:] > 0]])
    logps: Tensor = model(
        input_ids=torch.cat(parts)[None],
        position_ids=torch.cat(places)[None],
        shift_labels=labels[None],
        **given,
        fused_lm_head=True,
    ).log_probs
    return logps.new_zeros(len(ids), ids.size(1) - prompt).masked_scatter(mask[:, prompt:] > 0, logps[0, prompt - 1 :])


WAYS: dict[str, Callable[[Any, Tensor, Tensor, int], Tensor]] = {
    "separate": separate,
    "dense": dense,
    "split": split,
}


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def measured(way: str, model: Any, batch: tuple[Tensor, Tensor, int]) -> tuple[float, float]:
    """Seconds, and the peak of memory in MiB above what there was before."""
    card = batch[0].is_cuda
    if card:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() // 1024
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's record of the peak begins anew
        before = kilobytes("VmRSS")
    clock = time.perf_counter if card else time.process_time
    start = clock()
    WAYS[way](model, *batch).sum().backward()
    if card:
        torch.cuda.synchronize()
    took = clock() - start
    peak = torch.cuda.max_memory_allocated() // 1024 if card else kilobytes("VmHWM")
    model.zero_grad(set_to_none=False)
    return took, (peak - before) / 1024


def compare(model: Any, batch: tuple[Tensor, Tensor, int], repeats: int) -> str:
    ids, mask, prompt = batch
    with torch.no_grad():
        gap = ((separate(model, *batch) - split(model, *batch)) * mask[:, prompt:]).abs().max()
    tokens = packed(*batch).ids_NS.numel()
    ways = [way for way in WAYS if way != "dense" or tokens <= DENSE_LIMIT]
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            found[way].append(measured(way, model, batch))
    seconds, memory = ({way: statistics.median(run[i] for run in found[way]) for way in ways} for i in (0, 1))
    ratios = [
        f"{figures[way] / figures['separate']:>8.2f}" if way in ways else f"{'-':>8}"
        for figures in (seconds, memory)
        for way in ("dense", "split")
    ]
    return (
        f"{prompt:>7}{ids.size(1) - prompt:>9}{len(ids):>4}{seconds['separate']:>10.2f}{ratios[0]}{ratios[1]}"
        f"{tokens / ids.numel():>8.2f}{memory['separate']:>9.0f}{ratios[2]}{ratios[3]}{gap:>10.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256, 700])
    parser.add_argument("--completions", type=int, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument("--generations", type=int, nargs="+", default=[8])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--long-tailed", action="store_true", help="rollouts of many lengths, C the median")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: freed tensors go back to the system, so memory can be read
    model = build(options.width, options.layers, getattr(torch, options.dtype), options.device)
    install(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    print(f"width {options.width}, {options.layers} layers, {options.dtype}, {options.device}")
    print(f"{'':>20}{'seconds':>10}{'ratio':>16}{'':>8}{'peak MiB':>9}{'ratio':>16}")
    print(f"{'prompt':>7}{'longest':>9}{'G':>4}{'separate':>10}{'dense':>8}{'split':>8}{'tokens':>8}{'separate':>9}"
          f"{'dense':>8}{'split':>8}{'agree':>10}")  # fmt: skip
    cases = list(product(options.prompts, options.completions, options.generations))
    for prompt, completion, generations in tqdm(cases, file=sys.stderr, leave=False):
        ids, mask = group(prompt, completion, generations, options.long_tailed, options.device)
        tqdm.write(compare(model, (ids, mask, prompt), options.repeats))


if __name__ == "__main__":
    main()
