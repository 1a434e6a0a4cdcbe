"""`python -m eval.geometry3k`: Geometry3K, graded as in training."""

from collections.abc import Mapping
from typing import Any

from adora_vl.data.prompts import NAMES_OF_CHOICES
from adora_vl.evals.prepared_benchmark import prepared_benchmark
from adora_vl.evals.records import PublishedFigures


def _describe_incomparability(score: Mapping[str, Any]) -> str | None:
    """Say why a score cannot be compared with the published figures; None where it can.

    The published figures are of open questions. A prompt whose template has a placeholder for the
    choices shows them to the model.
    """
    fingerprint = score.get("fingerprint") or {}
    prompt = (fingerprint.get("fields") or {}).get("prompt") or ""
    shows_choices = any(f"{{{name}}}" in prompt for name in NAMES_OF_CHOICES)
    if not shows_choices:
        return None
    return (
        "the quoted rows are of open questions, and here choices were shown; --prompt none asks so"
    )


_TEST_PROBLEM_COUNT = 601  # in Geometry3K's test split
# A score over this share of them counts as one of the whole split. Preparing the data leaves out
# problems whose reference answers cannot be read.
_WHOLE_SPLIT_SHARE = 0.95


def _is_the_test_split(score: Mapping[str, Any]) -> bool:
    """Return whether a score is of Geometry3K's whole test split, asked with its pictures.

    Only such a score is shown beside the published figures. `view` is what the model was shown: the
    picture, its facts in words, both, or a grey picture.
    """
    data_set = score.get("data_set") or {}
    fingerprint = score.get("fingerprint") or {}
    view = (fingerprint.get("fields") or {}).get("view", "image")
    return (
        data_set.get("sources") == ["geometry3k"]
        and data_set.get("splits") == ["test"]
        and data_set.get("problems", 0) >= _WHOLE_SPLIT_SHARE * _TEST_PROBLEM_COUNT
        and view == "image"
    )


_PUBLISHED = PublishedFigures(
    source="EasyR1's reports, Geometry3K test",
    rows={
        "7B before GRPO": {"all": 37.0},
        "7B GRPO": {"all": 48.0},
        "7B DAPO": {"all": 50.0},
        "7B SAPO": {"all": 54.0},
        "3B before GRPO": {"all": 24.0},
        "3B GRPO": {"all": 38.0},
    },
    caution=_describe_incomparability,
    applies=_is_the_test_split,
)
BENCHMARK = prepared_benchmark("geometry3k", published=_PUBLISHED)
if __name__ == "__main__":
    from eval.command import main

    raise SystemExit(main(BENCHMARK))
