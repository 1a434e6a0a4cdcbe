"""A weight sync with LoRA, the adapter alone (as for a base in 4 bits) against merged tensors, into
a real engine.

    python -m benchmarks.adapter_sync [--server]

A random Qwen2.5-VL of --width and --layers in bfloat16 on this machine's CPU; medians of --turns.
Both syncs are by the code of a run: `push_adapter`, and `push_weights` of `merged_parameters`, with
the caches emptied after each; with --server by files, which a vLLM server on loopback reads.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2_5_VLConfig  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

from adora_vl.models.families import LANGUAGE_MODEL, component_of  # noqa: E402
from adora_vl.models.load import PRETRAINED_FOLDER  # noqa: E402
from adora_vl.rollout.llm import PolicyLLM  # noqa: E402
from adora_vl.rollout.server import Server  # noqa: E402
from adora_vl.rollout.server_client import connect  # noqa: E402
from adora_vl.rollout.weight_files import WeightFiles  # noqa: E402
from adora_vl.rollout.weight_sync import (  # noqa: E402
    adapter_tensors,
    merged_parameters,
    push_adapter,
    push_weights,
    reset_caches,
)
from adora_vl.utils.launch import free_port  # noqa: E402

Tensors = Iterator[tuple[str, Any]]
Push = Callable[[str, Tensors], None]


def write_model(folder: str, width: int, layers: int) -> None:
    """Write the tiny model with a larger language model of random weights."""
    config = Qwen2_5_VLConfig.from_pretrained(PRETRAINED_FOLDER)
    text = config.text_config
    text.hidden_size = config.vision_config.out_hidden_size = width
    text.intermediate_size = 4 * width
    text.num_hidden_layers = layers
    text.num_attention_heads = width // text.head_dim
    text.layer_types = ["full_attention"] * layers
    AutoModelForImageTextToText.from_config(config).bfloat16().save_pretrained(folder)
    AutoProcessor.from_pretrained(PRETRAINED_FOLDER).save_pretrained(folder)


def main() -> None:
    """Build the model, and time both ways into an engine or a server."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("width", 512), ("layers", 12), ("rank", 16), ("turns", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--server", action="store_true", help="into a vLLM server, by files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as until:
        write_model(folder, options.width, options.layers)
        base = AutoModelForImageTextToText.from_pretrained(folder, dtype="bfloat16")
        lora = LoraConfig(r=options.rank, target_modules=r".*language_model.*_proj")
        policy: Any = get_peft_model(base, lora)
        push = (
            by_files(folder, options.rank, until)
            if options.server
            else into_engine(folder, options.rank)
        )
        compare(policy, push, options.turns)


def into_engine(folder: str, rank: int) -> Push:
    """Start an engine, and return what pushes tensors into it.

    The way `adapter` pushes an adapter alone, and any other one merged weights.
    """
    llm = PolicyLLM(
        model=folder,
        dtype="bfloat16",
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        max_model_len=256,
        limit_mm_per_prompt={"video": 0},
        enable_lora=True,
        max_loras=1,
        max_lora_rank=rank,
    )
    llm.adapter = LoRARequest("policy", 1, "in memory")

    def push(way: str, tensors: Tensors) -> None:
        (push_adapter if way == "adapter" else push_weights)(llm, tensors)
        reset_caches(llm)

    return push


def by_files(folder: str, rank: int, until: ExitStack) -> Push:
    """Start a server, and return what pushes tensors into it by files.

    `until` ends the server.
    """
    port = free_port()
    words = [
        "--model",
        folder,
        "--dtype",
        "bfloat16",
        "--enforce-eager",
        "--gpu-memory-utilization",
        "0.3",
    ]
    words += ["--max-model-len", "256", "--port", str(port), "--host", "127.0.0.1"]
    words += ["--enable-lora", "--max-lora-rank", str(rank)]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until.callback(server.wait)
    until.callback(server.terminate)
    (client,) = connect([f"http://127.0.0.1:{port}"], 0, 300.0)
    reader = Server(
        client, answer_timeout_s=300.0, vocabulary_size=0
    )  # it is asked for no rollouts
    reader.read_info()
    ways = {"adapter": Server.read_adapter, "merged": Server.read_weights}
    files = {way: WeightFiles(Path(folder, way), Path(folder)) for way in ways}
    files["adapter"].adapter_rank = rank

    def push(way: str, tensors: Tensors) -> None:
        with files[way].written(tensors) as written:
            ways[way](reader, written)

    return push


def compare(policy: Any, push: Push, turns: int) -> None:
    """Time both ways by turns, and print bytes and seconds of a sync."""
    sent_bytes = 0

    def tensors_and_count_bytes(way: str) -> Iterator[tuple[str, Any]]:
        """Yield what a run on a CPU sends: the adapter, or every tensor that is trained."""
        nonlocal sent_bytes

        def is_trained(name: str) -> bool:
            return component_of(name) == LANGUAGE_MODEL

        def gather_nothing(parameters: object) -> AbstractContextManager[None]:
            return nullcontext()

        if way == "adapter":
            tensors = adapter_tensors(policy, gather_nothing)
        else:
            tensors = merged_parameters(policy, gather_nothing, is_trained)
        for name, tensor in tensors:
            sent_bytes += tensor.nbytes
            yield name, tensor

    results = {}
    for way in ("adapter", "merged"):
        times = []
        for _ in range(turns):
            sent_bytes = 0
            began = time.perf_counter()
            push(way, tensors_and_count_bytes(way))
            times.append(time.perf_counter() - began)
        results[way] = sent_bytes, statistics.median(times)
        print(f"{way:8} {sent_bytes / 1e6:9.2f} MB {results[way][1]:8.3f} s")
    (small, quick) = results["adapter"]
    (large, slow) = results["merged"]
    print(
        f"merged / adapter: {large / small:.0f} times the bytes, {slow / quick:.0f} times the "
        "seconds"
    )


if __name__ == "__main__":
    main()
