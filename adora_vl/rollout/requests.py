"""Sends the rollouts of a prompt to vLLM as one request, with a seed for each rollout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """One request, and the neighbouring rows that it is for."""

    first: int
    count: int


def plan_requests(prompts: Sequence[Any], groups: Sequence[int], together: bool) -> list[Request]:
    """Rows of one group with the same token ids and the same image objects become one request.

    `groups`: the group of each row.
    """
    requests: list[Request] = []
    for row in range(len(prompts)):
        last = requests[-1] if requests else None
        if together and last and groups[last.first] == groups[row] and _equal(prompts[last.first], prompts[row]):
            requests[-1] = Request(last.first, last.count + 1)
        else:
            requests.append(Request(row, 1))
    return requests


def _equal(one: Any, other: Any) -> bool:
    return one["prompt_token_ids"] == other["prompt_token_ids"] and _images(one) == _images(other)


def _images(prompt: Any) -> list[int]:
    data = prompt.get("multi_modal_data", {}).get("image", [])
    return [id(image) for image in (data if isinstance(data, list) else [data])]


def asking_once(
    generate: Callable[..., Any], groups: Sequence[int], seeds: Sequence[int] | None, together: bool
) -> Callable[..., Any]:
    """As `LLM.generate`, but rows of one prompt are sent as one request. Returns one output per row.

    `seeds`: the seed of each row, or None. vLLM's `ParentRequest` gives the rollouts of one request its seed, the
    seed + 1, and so on, so the seeds of a group have to be consecutive.
    """

    def generate_rows(prompts: Sequence[Any], sampling_params: Any, **kwargs: Any) -> list[Any]:
        assert len(prompts) == len(groups), f"{len(prompts)} prompts and {len(groups)} group numbers"
        requests = plan_requests(prompts, groups, together)
        each = [sampling_params.clone() for _ in requests]
        for parameters, request in zip(each, requests, strict=True):
            parameters.n = request.count
            if seeds is not None:
                parameters.seed = seeds[request.first]
        outputs = generate([prompts[request.first] for request in requests], sampling_params=each, **kwargs)
        return [single for output in outputs for single in _singles(output)]

    return generate_rows


def _singles(output: Any) -> list[Any]:
    """A copy of a request's output for each of its rollouts."""
    singles = []
    for rollout in sorted(output.outputs, key=lambda one: one.index):
        single = copy.copy(output)
        single.outputs = [rollout]
        singles.append(single)
    return singles
