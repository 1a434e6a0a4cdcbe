"""TRL's table of completions outlives a stop."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest

from adora_vl.rollout_log.completions_table import from_json, in_one_form, to_json


def logs(size: int = 2) -> dict[str, Any]:
    """As TRL makes them."""
    column: Callable[[], deque[Any]] = partial(deque, maxlen=size)
    return {
        "images": column(),
        "prompt": column(),
        "completion": column(),
        "rewards": defaultdict(column),
        "advantages": column(),
        "extra": defaultdict(column),
    }


def test_what_was_kept_comes_back():
    full = logs()
    full["prompt"].extend([[{"role": "user", "content": [{"type": "image"}]}], "text"])
    full["completion"].extend(["a", "b"])
    full["rewards"]["accuracy"].extend([1.0, float("nan")])
    full["advantages"].extend([0.1 + 0.2, -1.0])
    full["extra"]["mine"].extend([np.float32(0.5), {1, 2}])
    stale = logs()
    stale["completion"].extend(["of another", "generation"])
    from_json(to_json(full), stale)
    assert stale["prompt"] == full["prompt"] and stale["completion"] == full["completion"]
    assert stale["advantages"] == full["advantages"] and stale["advantages"].maxlen == 2
    assert stale["rewards"]["accuracy"][0] == 1.0 and stale["rewards"]["accuracy"][1] != stale["rewards"]["accuracy"][1]
    assert list(stale["extra"]["mine"]) == [0.5, "{1, 2}"]


def test_a_checkpoint_without_a_table_changes_nothing():
    before = logs()
    before["completion"].append("a")
    from_json("", before)
    assert list(before["completion"]) == ["a"]


def test_prompts_of_a_rank_with_images_and_of_one_without_make_one_column(tmp_path):
    """pandas cannot write texts and lists into one column, and two ranks send just that."""
    prompts: deque[Any] = deque(
        [
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is x?"}]}],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}],
        ]
    )
    before = [list(prompt) for prompt in prompts]
    with pytest.raises(ValueError, match="cannot mix list and non-list"):
        pd.DataFrame({"prompt": prompts}).to_parquet(tmp_path / "table.parquet")
    in_one_form(prompts)
    pd.DataFrame({"prompt": prompts}).to_parquet(tmp_path / "table.parquet")
    assert prompts[0] == before[0]
    assert [message["content"][0]["text"] for message in prompts[1]] == ["Be brief.", "What is 2 + 2?"]
    plain: list[Any] = [before[1], "text", ["a", "b"]]
    alone: deque[Any] = deque(plain)
    in_one_form(alone)
    assert list(alone) == plain, "without an image all are texts already"
