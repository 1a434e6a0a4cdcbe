"""Times a weight sync with LoRA into a real engine: the adapter alone, and merged tensors.

    python -m benchmarks.adapter_sync [--server]

A base in 4 bits gets the adapter alone. The policy is a random Qwen2.5-VL in bfloat16 on this
machine's CPU. Both syncs run the code of a training: `push_adapter`, and `push_weights` of
`merged_parameters`, with the caches emptied after each. With --server they go by files, which a
vLLM server on loopback reads. It prints medians.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal, NamedTuple

from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from torch import Tensor  # noqa: E402
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

Tensors = Iterator[tuple[str, Tensor]]
Way = Literal["adapter", "merged"]
# Sends tensors into an engine or to a server, in one of the ways.
Push = Callable[[Way, Tensors], None]


def write_model(folder: str, width: int, layers: int) -> None:
    """Write the tiny model with a larger language model of random weights."""
    config = Qwen2_5_VLConfig.from_pretrained(PRETRAINED_FOLDER)
    text = config.text_config
    text.hidden_size = width
    config.vision_config.out_hidden_size = width
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
    for name, default, help_text in (
        ("width", 512, "of the language model"),
        ("layers", 12, "of the language model"),
        ("rank", 16, "of the adapter"),
        ("turns", 5, "syncs in each way"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=help_text)
    parser.add_argument("--server", action="store_true", help="into a vLLM server, by files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, options.width, options.layers)
        base = AutoModelForImageTextToText.from_pretrained(folder, dtype="bfloat16")
        lora = LoraConfig(r=options.rank, target_modules=r".*language_model.*_proj")
        policy = get_peft_model(base, lora)
        if options.server:
            with running_server(folder, options.rank) as server:
                compare(policy, push_to_server(server, folder, options.rank), options.turns)
        else:
            compare(policy, push_into_engine(folder, options.rank), options.turns)


def push_into_engine(folder: str, rank: int) -> Push:
    """Start an engine, and return the function that sends tensors into it."""
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

    def push(way: Way, tensors: Tensors) -> None:
        if way == "adapter":
            push_adapter(llm, tensors)
        else:
            push_weights(llm, tensors)
        reset_caches(llm)

    return push


@contextmanager
def running_server(folder: str, rank: int) -> Iterator[Server]:
    """Run a vLLM server of the model inside the block, and yield a connection to it."""
    port = free_port()
    options = {
        "--model": folder,
        "--dtype": "bfloat16",
        "--gpu-memory-utilization": "0.3",
        "--max-model-len": "256",
        "--port": str(port),
        "--host": "127.0.0.1",
        "--max-lora-rank": str(rank),
    }
    words = ["--enforce-eager", "--enable-lora"]
    for name, value in options.items():
        words += [name, value]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        (client,) = connect([f"http://127.0.0.1:{port}"], 0, 300.0)
        # No rollouts are requested, so nothing is compared with the vocabulary.
        server = Server(client, answer_timeout_s=300.0, vocabulary_size=0)
        server.read_info()
        yield server
    finally:
        process.terminate()
        process.wait()


def push_to_server(server: Server, folder: str, rank: int) -> Push:
    """Return the function that writes tensors to files and lets the server read them."""
    adapter_files = WeightFiles(Path(folder, "adapter"), Path(folder))
    adapter_files.adapter_rank = rank
    merged_files = WeightFiles(Path(folder, "merged"), Path(folder))

    def push(way: Way, tensors: Tensors) -> None:
        if way == "adapter":
            with adapter_files.write(tensors) as files:
                server.read_adapter(files)
        else:
            with merged_files.write(tensors) as files:
                server.read_weights(files)

    return push


def tensors_of(policy: PeftModel, way: Way) -> Tensors:
    """Yield the tensors that a run on a CPU sends: the adapter, or every tensor that is trained."""

    def is_trained(name: str) -> bool:
        return component_of(name) == LANGUAGE_MODEL

    def gather_nothing(parameters: object) -> AbstractContextManager[None]:
        return nullcontext()

    if way == "adapter":
        yield from adapter_tensors(policy, gather_nothing)
    else:
        yield from merged_parameters(policy, gather_nothing, is_trained)


class SyncCost(NamedTuple):
    """What a weight sync takes."""

    sent_bytes: int
    seconds: float  # the median of the turns


def measure(policy: PeftModel, push: Push, way: Way, turns: int) -> SyncCost:
    """Sync the weights `turns` times in one way, and return what a sync takes."""
    sent_bytes = 0

    def counted_tensors() -> Tensors:
        nonlocal sent_bytes
        for name, tensor in tensors_of(policy, way):
            sent_bytes += tensor.nbytes
            yield name, tensor

    seconds = []
    for _ in range(turns):
        start = time.perf_counter()
        push(way, counted_tensors())
        seconds.append(time.perf_counter() - start)
    return SyncCost(sent_bytes // turns, statistics.median(seconds))


def compare(policy: PeftModel, push: Push, turns: int) -> None:
    """Measure both ways one after the other, and print bytes and seconds of a sync."""
    adapter = measure(policy, push, "adapter", turns)
    print(f"adapter  {adapter.sent_bytes / 1e6:9.2f} MB {adapter.seconds:8.3f} s")
    merged = measure(policy, push, "merged", turns)
    print(f"merged   {merged.sent_bytes / 1e6:9.2f} MB {merged.seconds:8.3f} s")
    print(
        f"merged / adapter: {merged.sent_bytes / adapter.sent_bytes:.0f} times the bytes, "
        f"{merged.seconds / adapter.seconds:.0f} times the seconds"
    )


if __name__ == "__main__":
    main()
