"""Score files as comparisons read them, with how often each problem was answered right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adora_vl.evals.inference.predictions import SCORE_FILE
from adora_vl.evals.records import BENCHMARK_BY_ALIAS, Score
from adora_vl.evals.scoring.score import find_benchmark_cells
from adora_vl.utils.errors import UserError

# The keys that a score file has to have.
_NEEDED_KEYS = ("benchmark", "accuracy", "total", "wilson_95", "groups", "items", "rules")


@dataclass(frozen=True)
class ScoreFile:
    """The content of a score file, and how often each problem was answered right."""

    name: str
    """The name in tables: the path, or what the caller calls the run."""
    score: Score
    """The content of the file."""
    shares: dict[str, float]
    """The share of right answers to each problem, from 0 to 1, by its id. Where one problem is asked
    in several versions, each has an id and a share."""
    problem_by_pid: dict[str, str]
    """The problem of each id; versions of one problem have the same."""

    @classmethod
    def of(cls, name: str, score: Score) -> ScoreFile:
        """Build a score file from its content, and compute the shares from its items.

        Two items with the pid `15`, one `correct` and one `wrong`, give the share 0.5.
        """
        verdicts_by_pid: dict[str, list[bool]] = {}
        problem_by_pid: dict[str, str] = {}
        for item in score["items"]:
            problem_by_pid[item["pid"]] = item.get("problem", item["pid"])
            is_right = item["verdict"] == "correct"
            verdicts_by_pid.setdefault(item["pid"], []).append(is_right)
        shares = {
            pid: sum(are_right) / len(are_right) for pid, are_right in verdicts_by_pid.items()
        }
        return cls(name=name, score=score, shares=shares, problem_by_pid=problem_by_pid)

    def problems_of(self, pids: Sequence[str]) -> list[str]:
        """Return the problem of each id."""
        return [self.problem_by_pid[pid] for pid in pids]

    @property
    def benchmark(self) -> str:
        """The name of the benchmark itself, whatever name of it the score has."""
        name = str(self.score["benchmark"])
        return BENCHMARK_BY_ALIAS.get(name, name)

    @property
    def cells(self) -> dict[str, Any]:
        """The accuracies that get a column in a comparison, by name.

        They are the accuracy over all answers (`all`), the benchmark's own figures, and avg@k and
        pass@k, where k is the number of answers to a problem.
        """
        cell_by_name: dict[str, Any] = {"all": self.score}
        for cells in find_benchmark_cells(self.score).values():
            cell_by_name |= cells
        samples = self.score.get("samples") or {}
        k = samples.get("k")
        for name in (f"avg@{k}", f"pass@{k}"):
            if name in samples:
                metric = samples[name]
                cell_by_name[name] = {
                    "accuracy": metric["value"],
                    "interval_95": metric["interval_95"],
                }
        return cell_by_name


def read_run(path: str, name: str | None = None) -> ScoreFile:
    """Read a score file, and check that it has what comparisons need.

    Args:
        path: The file, or the output folder of `run` that has it.
        name: The name in tables, instead of the path.

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
    missing = [key for key in _NEEDED_KEYS if not isinstance(score, dict) or key not in score]
    if missing:
        raise UserError(
            f"run: {str(file)!r} has no {missing[0]!r}; make it with the `score` verb of a "
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
    return ScoreFile.of(name or path, score)


def check_one_benchmark(runs: Sequence[ScoreFile]) -> None:
    """Raise `UserError` if the runs are of different benchmarks."""
    first = runs[0]
    for run in runs:
        if run.benchmark != first.benchmark:
            raise UserError(
                f"run: {run.name!r} is of {run.score['benchmark']} and {first.name!r} of "
                f"{first.score['benchmark']}; compare runs of one benchmark"
            )


def fingerprint_part(score: Score, name: str) -> dict[str, Any]:
    """Return a part of a score's fingerprint, such as `fields`; empty where it has none."""
    part = (score.get("fingerprint") or {}).get(name)
    return part if isinstance(part, dict) else {}
