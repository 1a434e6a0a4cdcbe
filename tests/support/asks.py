"""Asks of the rows of a rank, for tests of what samples."""

from collections.abc import Sequence
from typing import Any

from adora_vl.rollout.rollouts import SamplingRequest
from adora_vl.utils.seeding import rollout_seed


def sampling_requests(
    ids: Sequence[list[int]],
    images: Sequence[list[Any] | None] | None = None,
    *,
    generations: int,
    first: int = 0,
    grouped: bool = True,
    limit: int | None = None,
) -> list[SamplingRequest]:
    """`ids`: of their prompts.

    `first`: the number of the first row. `grouped`: those of a group may be one request.
    """
    asks = []
    for number, (prompt_ids, prompt_images) in enumerate(
        zip(ids, images or [None] * len(ids), strict=True), first
    ):
        group, member = divmod(number, generations)
        seed = rollout_seed(3, "train/0", group, member)
        asks.append(
            SamplingRequest(
                prompt_ids=prompt_ids,
                images=list(prompt_images or ()),
                group=group if grouped else number,
                seed=seed,
                max_tokens=limit,
            )
        )
    return asks
