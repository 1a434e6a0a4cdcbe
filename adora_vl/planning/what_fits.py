"""What fits into a GPU: a setup, and the largest batch, image and engine that would.

Each answer is found by predicting the memory of changed setups (`adora_vl.planning.memory`).
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from adora_vl.planning.memory import MAX_IMAGE_TOKENS, MemorySetup, predict_memory


def fits_into_gpu(setup: MemorySetup, gpu_bytes: int) -> bool:
    """Return whether a run fits into a GPU with `gpu_bytes` of memory."""
    return predict_memory(setup, gpu_bytes).fits_into(gpu_bytes)


# Share of the GPU's memory that a proposed utilization leaves free, since no GPU has confirmed the
# prediction.
HEADROOM_SHARE = 0.05


def best_vllm_utilization(setup: MemorySetup, gpu_bytes: int) -> float | None:
    """Return the share of the GPU for vLLM (`vllm_gpu_memory_utilization`) that is best for a run.

    Every hundredth is tried. The best share leaves `HEADROOM_SHARE` of the memory free in every
    phase of a step, and lets most rollouts be sampled at once. Among equal shares it is the
    smallest. None without an engine that shares a GPU with the trainer, and if no share leaves
    enough memory free.
    """
    engine = setup.engine
    if engine is None or not setup.on_gpu:
        return None
    best_utilization: float | None = None
    most_concurrent = 0
    for hundredths in range(1, 100):
        utilization = hundredths / 100
        candidate = replace(setup, engine=replace(engine, utilization=utilization))
        prediction = predict_memory(candidate, gpu_bytes)
        leaves_headroom = prediction.peak_bytes <= (1 - HEADROOM_SHARE) * gpu_bytes
        concurrent = prediction.engine.concurrent_rollouts if prediction.engine else 0
        if leaves_headroom and concurrent > most_concurrent:
            most_concurrent = concurrent
            best_utilization = utilization
    return best_utilization


# More sequences than any GPU takes at once; a typing error may make the generation far larger.
_MAX_MICRO_BATCH = 100_000


def batch_sizes(setup: MemorySetup) -> list[int]:
    """Return the values of `per_device_train_batch_size` that suit a run, in ascending order.

    They divide the rollouts of a generation, and keep groups whole or split them evenly. For
    example, 24 rollouts in groups of 8 give 1, 2, 4, 8 and 24. A size of 3, 6 or 12 would split a
    group unevenly.
    """
    group_size = setup.group_size
    sequences = setup.sequences_per_generation
    largest = min(sequences, _MAX_MICRO_BATCH)
    divisors = [size for size in range(1, largest + 1) if sequences % size == 0]
    return [size for size in divisors if size % group_size == 0 or group_size % size == 0]


def largest_batch(setup: MemorySetup, gpu_bytes: int) -> int:
    """Return the largest of `batch_sizes` with which a run fits into a GPU; 0 if none does.

    The number of rollouts per generation stays the same.
    """
    sizes = batch_sizes(setup)

    def batch_fits(number: int) -> bool:
        """Return whether the `number`-th smallest size fits."""
        batch = replace(setup.batch, sequences=sizes[number - 1])
        return fits_into_gpu(replace(setup, batch=batch), gpu_bytes)

    largest_number = _largest_fitting_number(batch_fits, limit=len(sizes))
    return sizes[largest_number - 1] if largest_number > 0 else 0


def largest_image_tokens(
    setup: MemorySetup, gpu_bytes: int, max_tokens: int = MAX_IMAGE_TOKENS
) -> int:
    """Return the largest number of image tokens per prompt with which a run fits into a GPU.

    The text of the prompts stays the same. The number is 0 if no image fits. `max_tokens`: the most
    image tokens that the context has room for; below 1 there is room for none.
    """
    text_tokens = setup.batch.prompt_tokens - setup.batch.image_tokens
    limit = min(max_tokens, MAX_IMAGE_TOKENS)
    if setup.engine is not None:
        # A prompt has to leave the engine room for its completion.
        limit = min(limit, setup.engine.max_length - setup.batch.completion_tokens - text_tokens)

    def image_fits(image_tokens: int) -> bool:
        """Return whether the run fits with this many image tokens in every prompt."""
        prompt_tokens = text_tokens + image_tokens
        batch = replace(setup.batch, image_tokens=image_tokens, prompt_tokens=prompt_tokens)
        return fits_into_gpu(replace(setup, batch=batch), gpu_bytes)

    return _largest_fitting_number(image_fits, limit=max(limit, 0))


def _largest_fitting_number(number_fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 1 to `limit` that fits, or 0 if none does.

    If a number fits, all smaller numbers fit too, so it is found by bisection. For example, if 1, 2
    and 3 fit and 4 does not, the result is 3.
    """

    def is_too_large(number: int) -> bool:
        return not number_fits(number)

    # The number at index i is i + 1. So the index of the first number that is too large is the
    # largest number that fits.
    return bisect_left(range(1, limit + 1), True, key=is_too_large)
