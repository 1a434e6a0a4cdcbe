"""How much memory colocated vLLM takes, and how many rollouts its cache of keys and values holds at once."""

from __future__ import annotations

from dataclasses import dataclass

from adora_vl.memory.model import ModelShape

WORKSPACE = (
    2 * 2**30
)  # assumed: activations of a prefill step, CUDA graphs, the encoder cache. vLLM measures it itself.
CPU_WORKSPACE = 2**29  # assumed likewise for vLLM's CPU build
ASLEEP = 3 * 2**29  # assumed: what sleep level 2 leaves behind (CUDA graphs, buffers)


@dataclass(frozen=True)
class Engine:
    """Settings of a colocated engine."""

    utilization: float  # share of the GPU's memory
    dtype_bytes: int
    max_length: int
    max_sequences: int
    tensor_parallel: int = 1
    sleep: bool = False
    cpu_cache: int | None = None  # bytes of keys and values on a CPU (VLLM_CPU_KVCACHE_SPACE); None on a GPU


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one card, awake."""

    weights: int
    workspace: int
    cache: int  # keys and values; negative where the weights alone exceed the engine's share
    concurrent: int  # rollouts of full length that fit into the cache together, at most `max_sequences`


def cache_bytes_per_token(shape: ModelShape, dtype_bytes: int, tensor_parallel: int = 1) -> int:
    """Keys and values of all layers for one token."""
    text = shape.text
    heads = max(1, text.kv_heads // tensor_parallel)
    return 2 * text.layers * heads * text.head_size * dtype_bytes


def engine_memory(shape: ModelShape, engine: Engine, card: int) -> EngineMemory:
    """How vLLM divides its share of a card of `card` bytes."""
    weights = (shape.total - (shape.trained if shape.adapters else 0)) * engine.dtype_bytes // engine.tensor_parallel
    workspace = WORKSPACE if engine.cpu_cache is None else CPU_WORKSPACE
    cache = int(engine.utilization * card) - weights - workspace if engine.cpu_cache is None else engine.cpu_cache
    tokens = max(cache, 0) // cache_bytes_per_token(shape, engine.dtype_bytes, engine.tensor_parallel)
    return EngineMemory(weights, workspace, cache, min(tokens // max(engine.max_length, 1), engine.max_sequences))
