"""The demo's reward: a guess is right by its digit, and a working only if every number in it is
right.

Judged by the answer alone, the model learns to write any sum that ends in one of the two usual
digits: a long guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def every_step(
    completions: Sequence[Any],
    answer: Sequence[str],
    meta: Sequence[Mapping[str, Any]],
    **columns: Any,
) -> list[float]:
    """1.0 or 0.0 for each completion.

    The wording of a working is free: its numbers are compared.
    """
    texts = (completion[-1]["content"] for completion in completions)
    return [
        float(_numbers(text) == (_numbers(row["solution"]) if "=" in text else [right]))
        for text, right, row in zip(texts, answer, meta, strict=True)
    ]


def _numbers(text: str) -> list[str]:
    return re.findall(r"\d+", text)
