"""What fits into a card: a setup, and the largest batch, image and engine that would.

Each answer is found by predicting the memory of changed setups (`adora_vl.planning.memory`).
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from adora_vl.planning.memory import MOST_IMAGE_TOKENS, Setup, predict


def fits(setup: Setup, card: int) -> bool:
    """Return whether every phase fits into the card.

    The engine must also have room for at least one rollout of full length.
    """
    prediction = predict(setup, card)
    engine_has_room = prediction.engine is None or prediction.engine.concurrent >= 1
    return prediction.peak <= card and engine_has_room


# Share of the card that a proposed utilization leaves free, since no GPU has confirmed the
# prediction.
HEADROOM = 0.05


def proposed_utilization(setup: Setup, card: int) -> float | None:
    """Return the smallest `vllm_gpu_memory_utilization` that runs most rollouts at once.

    It is in hundredths. Every phase has to leave `HEADROOM` of the card free. None without a
    colocated engine on a GPU, or if there is no such share.
    """
    engine = setup.engine
    if engine is None or not setup.accelerator:
        return None
    best_utilization: float | None = None
    most_concurrent = 0
    for hundredths in range(1, 100):
        utilization = hundredths / 100
        candidate = replace(setup, engine=replace(engine, utilization=utilization))
        prediction = predict(candidate, card)
        concurrent = prediction.engine.concurrent if prediction.engine else 0
        if prediction.peak <= (1 - HEADROOM) * card and concurrent > most_concurrent:
            most_concurrent = concurrent
            best_utilization = utilization
    return best_utilization


def batch_sizes(setup: Setup) -> list[int]:
    """Return values of per_device_train_batch_size that divide a generation.

    They keep groups whole or split them evenly.
    """
    group_size = setup.generations
    generation = setup.generation
    divisors = [size for size in range(1, generation + 1) if generation % size == 0]
    return [size for size in divisors if size % group_size == 0 or group_size % size == 0]


def largest_batch(setup: Setup, card: int) -> int:
    """Return the largest of `batch_sizes` that fits, 0 if none does.

    The number of rollouts per generation stays the same.
    """
    sizes = batch_sizes(setup)

    def batch_fits(number: int) -> bool:
        """Return whether the `number`-th smallest size fits."""
        batch = replace(setup.batch, sequences=sizes[number - 1])
        return fits(replace(setup, batch=batch), card)

    largest_number = _largest_number(batch_fits, len(sizes))
    return sizes[largest_number - 1] if largest_number else 0


def largest_image_tokens(setup: Setup, card: int, room: int = MOST_IMAGE_TOKENS) -> int:
    """Return the largest number of image tokens per prompt that fits beside the same text.

    It is at most `room`, and 0 if none fits.
    """
    limit = min(room, MOST_IMAGE_TOKENS)
    text_tokens = setup.batch.prompt_tokens - setup.batch.image_tokens

    def image_fits(image_tokens: int) -> bool:
        """Return whether the run fits with so many image tokens in every prompt."""
        prompt_tokens = text_tokens + image_tokens
        batch = replace(setup.batch, image_tokens=image_tokens, prompt_tokens=prompt_tokens)
        return fits(replace(setup, batch=batch), card)

    if setup.engine is not None:  # a prompt has to leave the engine room for its completion
        limit = min(limit, setup.engine.max_length - setup.batch.completion_tokens - text_tokens)
    return _largest_number(image_fits, max(limit, 0))


def _largest_number(number_fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 1 to `limit` that fits, or 0.

    If a number fits, all smaller ones do, so that it is found by bisection.
    """
    return bisect_left(range(1, limit + 1), True, key=lambda number: not number_fits(number))
