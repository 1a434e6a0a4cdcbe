"""What a rank asks its engine for, in tests of engines and servers."""

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
    """Return a request for each row of a rank.

    Rows are numbered over all ranks, and divided into groups by their numbers: with four
    generations, for example, row 6 is the third member of group 1.

    Args:
        ids: the token ids of each row's prompt.
        images: the images of each row; None: no row has any.
        generations: rollouts of a group.
        first: the number of the first row.
        grouped: whether the rows of a group may become one request of vLLM.
        limit: the most tokens of each rollout.
    """
    requests = []
    for number, (prompt_ids, prompt_images) in enumerate(
        zip(ids, images or [None] * len(ids), strict=True), first
    ):
        group, member = divmod(number, generations)
        seed = rollout_seed(3, "train/0", group, member)
        requests.append(
            SamplingRequest(
                prompt_ids=prompt_ids,
                images=list(prompt_images or ()),
                merge_key=group if grouped else number,
                seed=seed,
                max_tokens=limit,
            )
        )
    return requests
