"""The memory of a colocated vLLM engine, computed from shapes alone, in bytes."""

from dataclasses import dataclass

from adora_vl.models.shape import ModelShape
from adora_vl.utils.files import GIB

# assumed: activations of a prefill step, CUDA graphs, the encoder cache; vLLM measures it itself
ENGINE_WORKSPACE_BYTES = 2 * GIB
CPU_ENGINE_WORKSPACE_BYTES = 2**29  # assumed likewise for vLLM's CPU build
# assumed: what sleep level 2 leaves behind (CUDA graphs, buffers)
SLEEPING_ENGINE_BYTES = 3 * 2**29


@dataclass(frozen=True)
class EngineMemorySettings:
    """Settings of a colocated vLLM engine that its memory depends on."""

    utilization: float  # share of the GPU's memory: vllm_gpu_memory_utilization
    dtype_bytes: int  # bytes per number
    max_length: int  # tokens of prompt and completion: vllm_max_model_length
    max_sequences: int  # rollouts that it samples at once at most
    tensor_parallel: int = 1  # GPUs over which one engine is divided
    sleeps: bool = False  # whether it frees its memory while the policy learns
    # Bytes of keys and values on a CPU (VLLM_CPU_KVCACHE_SPACE); None on a GPU.
    cpu_cache_bytes: int | None = None


@dataclass(frozen=True)
class EngineMemory:
    """How an engine that is awake divides its share of one GPU's memory, in bytes."""

    weight_bytes: int
    workspace_bytes: int
    cache_bytes: int  # keys and values; negative where the weights alone exceed the engine's share
    # rollouts of full length that fit into the cache together, at most `max_sequences`
    concurrent_rollouts: int


def cache_bytes_per_token(shape: ModelShape, dtype_bytes: int, tensor_parallel: int = 1) -> int:
    """Return the bytes of one token's keys and values in all layers, on one GPU.

    The heads are divided over the GPUs of a tensor-parallel engine, but each GPU has at least one.
    For example, 36 layers with 2 heads of size 128 take 36 x 2 x 2 x 128 numbers, which are 36,864
    bytes in bf16.

    `dtype_bytes`: bytes per number in the engine.
    """
    text = shape.text
    kv_heads_per_gpu = max(1, text.kv_heads // tensor_parallel)
    values_per_layer = 2 * kv_heads_per_gpu * text.head_size  # a key and a value
    return text.layers * values_per_layer * dtype_bytes


def engine_memory(shape: ModelShape, engine: EngineMemorySettings, gpu_bytes: int) -> EngineMemory:
    """Predict how vLLM divides its share of a GPU with `gpu_bytes` of memory."""
    weight_bytes = shape.base_bytes(engine.dtype_bytes) // engine.tensor_parallel
    if shape.four_bit_parameters:
        # An adapter cannot be merged into a base in 4 bits, so the engine holds it separately.
        weight_bytes += shape.trained_parameters * engine.dtype_bytes
    if engine.cpu_cache_bytes is None:
        # On a GPU the cache gets the rest of the engine's share.
        workspace_bytes = ENGINE_WORKSPACE_BYTES
        cache_bytes = int(engine.utilization * gpu_bytes) - weight_bytes - workspace_bytes
    else:
        workspace_bytes = CPU_ENGINE_WORKSPACE_BYTES
        cache_bytes = engine.cpu_cache_bytes
    bytes_per_token = cache_bytes_per_token(shape, engine.dtype_bytes, engine.tensor_parallel)
    # A share of the GPU that is too small for the weights leaves a cache below 0.
    cached_tokens = max(cache_bytes, 0) // bytes_per_token
    cached_rollouts = cached_tokens // max(engine.max_length, 1)
    return EngineMemory(
        weight_bytes=weight_bytes,
        workspace_bytes=workspace_bytes,
        cache_bytes=cache_bytes,
        concurrent_rollouts=min(cached_rollouts, engine.max_sequences),
    )
