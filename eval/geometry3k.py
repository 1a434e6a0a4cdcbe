"""`python -m eval.geometry3k`: Geometry3K, graded as in training."""

from collections.abc import Mapping
from typing import Any

from adora_vl.utils.cli import imports

with imports():
    from adora_vl.data.prompts import NAMES_OF_CHOICES
    from adora_vl.evals.prepared_benchmark import prepared_benchmark
    from adora_vl.evals.records import Published


def _caution(score: Mapping[str, Any]) -> str | None:
    """Return why a score is not comparable with the published rows: its prompts showed the choices.

    None where they did not.
    """
    prompt = ((score.get("fingerprint") or {}).get("fields") or {}).get("prompt")
    if not any(f"{{{name}}}" in (prompt or "") for name in NAMES_OF_CHOICES):
        return None
    return (
        "the quoted rows are of open questions, and here choices were shown; --prompt none asks so"
    )


_TEST_PROBLEMS = 601  # the problems of Geometry3K's test split
# The share of them that makes a whole split: preparing it may leave out some whose answers nobody
# can meet.
_WHOLE_SPLIT = 0.95


def _is_the_test_split(score: Mapping[str, Any]) -> bool:
    """Return whether a score is of the whole test split of Geometry3K, with its own pictures."""
    data_set = score.get("data_set") or {}
    view = ((score.get("fingerprint") or {}).get("fields") or {}).get("view", "image")
    return (
        data_set.get("sources") == ["geometry3k"]
        and data_set.get("splits") == ["test"]
        and data_set.get("problems", 0) >= _WHOLE_SPLIT * _TEST_PROBLEMS
        and view == "image"
    )


_PUBLISHED = Published(
    source="EasyR1's reports, Geometry3K test",
    rows={
        "7B before GRPO": {"all": 37.0},
        "7B GRPO": {"all": 48.0},
        "7B DAPO": {"all": 50.0},
        "7B SAPO": {"all": 54.0},
        "3B before GRPO": {"all": 24.0},
        "3B GRPO": {"all": 38.0},
    },
    caution=_caution,
    applies=_is_the_test_split,
)
BENCHMARK = prepared_benchmark("geometry3k", published=_PUBLISHED)
if __name__ == "__main__":
    with imports():
        from eval.command import main
    raise SystemExit(main(BENCHMARK))
