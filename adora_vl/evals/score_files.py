"""Score files as comparisons read them, with how often each problem was answered right."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adora_vl.evals.inference.predictions import SCORE_FILE
from adora_vl.evals.records import BENCHMARK_BY_ALIAS, CORRECT, Score
from adora_vl.evals.scoring.score import find_benchmark_metrics
from adora_vl.utils.errors import UserError

# The keys that a score file has to have.
_REQUIRED_KEYS = ("benchmark", "accuracy", "total", "interval_95", "groups", "items", "rules")


@dataclass(frozen=True)
class ScoreFile:
    """The score of a run as it was read from a file, and the accuracy on each of its problems."""

    name: str
    """The name in tables: the path, or what the caller calls the run."""
    score: Score
    """The content of the file."""
    accuracy_by_version_id: dict[str, float]
    """The share of right answers to each version of a problem, by its id (`pid` in the files). Most
    benchmarks ask each problem in one version alone."""
    problem_id_by_version_id: dict[str, str]
    """The id of the problem that each version belongs to."""

    @classmethod
    def from_score(cls, name: str, score: Score) -> ScoreFile:
        """Compute the accuracy on each version of a problem from the items of a score.

        Each item is the grade of one answer. Its `pid` is the id of the version that was asked, and
        its `problem` the id of the problem, if that is another. Two items with the pid `15`, one
        `correct` and one `wrong`, give the accuracy 0.5.
        """
        are_correct_by_version_id: dict[str, list[bool]] = {}
        problem_id_by_version_id: dict[str, str] = {}
        for item in score["items"]:
            version_id = item["pid"]
            problem_id_by_version_id[version_id] = item.get("problem", version_id)
            is_correct = item["verdict"] == CORRECT
            are_correct_by_version_id.setdefault(version_id, []).append(is_correct)
        accuracy_by_version_id = {
            version_id: sum(are_correct) / len(are_correct)
            for version_id, are_correct in are_correct_by_version_id.items()
        }
        return cls(
            name=name,
            score=score,
            accuracy_by_version_id=accuracy_by_version_id,
            problem_id_by_version_id=problem_id_by_version_id,
        )

    def accuracies_of(self, version_ids: Sequence[str]) -> list[float]:
        """Return the share of right answers to each of these versions."""
        return [self.accuracy_by_version_id[version_id] for version_id in version_ids]

    def problem_ids_of(self, version_ids: Sequence[str]) -> list[str]:
        """Return the id of the problem that each of these versions belongs to."""
        return [self.problem_id_by_version_id[version_id] for version_id in version_ids]

    @property
    def benchmark(self) -> str:
        """The name of the benchmark itself, whatever name of it the score has."""
        name = str(self.score["benchmark"])
        return BENCHMARK_BY_ALIAS.get(name, name)

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics that get a column in a comparison, each an `AccuracyMetric`, by name.

        They are the accuracy over all answers (`all`), the benchmark's own metrics, and avg@k and
        pass@k, where k is the number of answers to a problem.
        """
        # A score has all keys of an `AccuracyMetric`, and is one too.
        metric_by_name: dict[str, Any] = {"all": self.score}
        for metrics in find_benchmark_metrics(self.score).values():
            metric_by_name |= metrics
        samples = self.score.get("samples") or {}
        k = samples.get("k")
        for name in (f"avg@{k}", f"pass@{k}"):
            if name in samples:
                metric_by_name[name] = {
                    "accuracy": samples[name]["value"],
                    "interval_95": samples[name]["interval_95"],
                }
        return metric_by_name


def read_run(path: str, name: str | None = None) -> ScoreFile:
    """Read the score file of a run, and check that it has what comparisons need.

    Args:
        path: The file, or the folder of the run that has it (`--output`).
        name: The name of the run in tables, instead of the path.

    Raises `UserError` if it is no score file.
    """
    file = Path(path) / SCORE_FILE if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise UserError(
            f"run: {str(file)!r} is not there; name the --output of an evaluation, or its score.json"
        )
    try:
        score = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"run: {str(file)!r} is not a readable score file ({error})") from None
    missing_keys = [
        key for key in _REQUIRED_KEYS if not isinstance(score, dict) or key not in score
    ]
    if missing_keys:
        raise UserError(
            f"run: {str(file)!r} has no {missing_keys[0]!r}; make it with the `score` verb of a "
            "benchmark"
        )
    items = score["items"] if isinstance(score["items"], list) else []
    are_scored_items = all(
        isinstance(item, dict) and {"pid", "verdict"} <= item.keys() for item in items
    )
    if not items or not are_scored_items:
        raise UserError(
            f"run: {str(file)!r} has no list of items with pid and verdict; score the predictions "
            "again"
        )
    return ScoreFile.from_score(name or path, score)


def check_one_benchmark(runs: Sequence[ScoreFile]) -> None:
    """Raise `UserError` if the runs are of different benchmarks."""
    first = runs[0]
    for run in runs:
        if run.benchmark != first.benchmark:
            raise UserError(
                f"run: {run.name!r} is of {run.score['benchmark']} and {first.name!r} of "
                f"{first.score['benchmark']}; compare runs of one benchmark"
            )


def fingerprint_part(score: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a part of a score's fingerprint, such as `fields`; empty where it has none."""
    part = (score.get("fingerprint") or {}).get(name)
    return part if isinstance(part, dict) else {}
