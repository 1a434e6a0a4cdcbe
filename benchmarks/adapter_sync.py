"""A weight sync with LoRA, the adapter alone (as for a base in 4 bits) against merged tensors, into a real engine.

    python -m benchmarks.adapter_sync

A random Qwen2.5-VL of --width and --layers in bfloat16 on this machine's CPU; medians of --turns. Both syncs are by the
code of a run: `push_adapter`, and `push_weights` of `merged_parameters`, with the caches emptied after each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2_5_VLConfig  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

from adora_vl.models.families import LANGUAGE_MODEL, component_of  # noqa: E402
from adora_vl.models.load import PRETRAINED  # noqa: E402
from adora_vl.rollout.llm import PolicyLLM  # noqa: E402
from adora_vl.rollout.weight_sync import (  # noqa: E402
    adapter_tensors,
    merged_parameters,
    push_adapter,
    push_weights,
    reset_caches,
)


def write_model(folder: str, width: int, layers: int) -> None:
    """The tiny model with a larger language model of random weights."""
    config = Qwen2_5_VLConfig.from_pretrained(PRETRAINED)
    text = config.text_config
    text.hidden_size = config.vision_config.out_hidden_size = width
    text.intermediate_size, text.num_hidden_layers = 4 * width, layers
    text.num_attention_heads, text.layer_types = width // text.head_dim, ["full_attention"] * layers
    AutoModelForImageTextToText.from_config(config).bfloat16().save_pretrained(folder)
    AutoProcessor.from_pretrained(PRETRAINED).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("width", 512), ("layers", 12), ("rank", 16), ("turns", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, options.width, options.layers)
        base = AutoModelForImageTextToText.from_pretrained(folder, dtype="bfloat16")
        lora = LoraConfig(r=options.rank, target_modules=r".*language_model.*_proj")
        policy: Any = get_peft_model(base, lora)
        llm = PolicyLLM(
            model=folder, dtype="bfloat16", enforce_eager=True, gpu_memory_utilization=0.3, max_model_len=256,
            limit_mm_per_prompt={"video": 0}, enable_lora=True, max_loras=1, max_lora_rank=options.rank,
        )  # fmt: skip
    llm.adapter = LoRARequest("policy", 1, "in memory")
    sent = 0

    def counted(way: str) -> Iterator[tuple[str, Any]]:
        """What a run on a CPU sends: the adapter, or every tensor of the part that is trained."""
        nonlocal sent
        wanted = lambda name: component_of(name) == LANGUAGE_MODEL  # noqa: E731
        whole = lambda parameters: nullcontext()  # noqa: E731
        alone = way == "adapter"
        for name, tensor in adapter_tensors(policy, whole) if alone else merged_parameters(policy, whole, wanted):
            sent += tensor.nbytes
            yield name, tensor

    found = {}
    for way in ("adapter", "merged"):
        times = []
        for _ in range(options.turns):
            sent, began = 0, time.perf_counter()
            (push_adapter if way == "adapter" else push_weights)(llm, counted(way))
            reset_caches(llm)
            times.append(time.perf_counter() - began)
        found[way] = sent, statistics.median(times)
        print(f"{way:8} {sent / 1e6:9.2f} MB {found[way][1]:8.3f} s")
    (small, quick), (large, slow) = found["adapter"], found["merged"]
    print(f"merged / adapter: {large / small:.0f} times the bytes, {slow / quick:.0f} times the seconds")


if __name__ == "__main__":
    main()
