"""The two sides of a comparison: runs that differ in their seed alone, with what each of them reached."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adora_vl.commands import amount
from adora_vl.errors import UserError
from adora_vl.report.manifest import facts_of_run, read_manifest
from adora_vl.rollout_log.metrics_file import METRICS, read_metrics
from adora_vl.rollout_log.phases import PHASES
from eval.compare import SCORE, ScoreFile, read_run

PASS_RATE = "adora/pass_rate"  # noqa: S105  # no password
# Where a run writes, what it shows and how it may go on are no part of what is compared.
_NOT_COMPARED = {
    "output_dir", "run_name", "logging_dir", "overwrite_output_dir", "resume_from_checkpoint", "report_to",
    "save_steps", "save_strategy", "save_total_limit", "disable_tqdm", "seed", "data_seed", "project",
    "trackio_space_id",
    "dataset_name",  # the data's fingerprint says more than the folder's name
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """What a run had done, and what a figure was then."""

    rollouts: float
    seconds: float
    value: float


@dataclass(frozen=True)
class ComparedRun:
    """One run: its settings, its curves, and its scores on held-out problems by benchmark."""

    name: str
    seed: int
    settings: dict[str, Any]
    recipe: str
    curves: dict[str, list[Point]] = field(repr=False)  # the pass rate in training, and evaluations on the way
    scores: dict[str, ScoreFile] = field(repr=False)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Side:
    """Runs of one config."""

    letter: str
    runs: tuple[ComparedRun, ...]

    @property
    def recipe(self) -> str:
        """`GRPO, 3 seeds`."""
        return f"{self.runs[0].recipe}, {amount(len(self.runs), 'seed')}"

    @property
    def title(self) -> str:
        """`A (GRPO, 3 seeds)`."""
        return f"{self.letter} ({self.recipe})"

    def by_seed(self, values: Sequence[float]) -> dict[int, float]:
        """One value per run, by its seed."""
        return {run.seed: value for run, value in zip(self.runs, values, strict=True)}


def read_compared(folder: Path) -> ComparedRun:
    """Read what a comparison needs. Raises `UserError` for a folder that is no run."""
    manifest, lines = read_manifest(folder), read_metrics(folder / METRICS)
    if not manifest or not lines:
        missing = METRICS if manifest else "manifest.json"
        raise UserError(f"RUN: {str(folder)!r} has no {missing}; name the output_dir of a training run")
    config = manifest["config"]
    settings = {key: value for key, value in config.items() if key not in _NOT_COMPARED}
    settings |= {
        "data": manifest["data"].get("fingerprint"),
        "model": manifest["model"].get("fingerprint") or manifest["model"].get("name"),
        "rewards": manifest.get("rewards") or {},
        "commit": manifest.get("commit"),
        "device": manifest.get("device"),
        "versions": manifest.get("versions"),
    }
    settings.pop("model_name_or_path", None)
    notes = [] if manifest.get("status") == "finished" else [f"{folder}: the run is {manifest.get('status')}"]
    if config.get("adora_dynamic_sampling"):
        notes.append(f"{folder}: the further batches of adora_dynamic_sampling are not counted as rollouts")
    recipe = facts_of_run(manifest)["recipe"]
    scores, more = _scores(folder)
    curves = _curves(lines, rollouts_per_step(config))
    return ComparedRun(str(folder), int(config.get("seed") or 0), settings, recipe, curves, scores, (*notes, *more))


def rollouts_per_step(config: dict[str, Any]) -> float:
    """Rollouts that one optimizer step samples, on average: a generation serves several steps of TRL's."""
    steps = float(config.get("steps_per_generation") or 1) * float(config.get("num_iterations") or 1)
    return (
        float(config.get("generation_batch_size") or 1) * float(config.get("gradient_accumulation_steps") or 1) / steps
    )


def _curves(lines: Sequence[dict[str, Any]], per_step: float) -> dict[str, list[Point]]:
    """The figures by what had been sampled and how long the steps had taken, evaluations' own time left out."""
    curves: dict[str, list[Point]] = {PASS_RATE: []}
    before, seconds = 0, 0.0
    for line in lines:
        step = line["step"]
        if line["kind"] == "train":
            seconds += (step - before) * sum(line.get(f"seconds/{phase}") or 0.0 for phase in PHASES)
            before = step
            if line.get(PASS_RATE) is not None:
                curves[PASS_RATE].append(Point(step * per_step, seconds, line[PASS_RATE]))
        for key, value in line.items():
            if key.startswith("eval_") and key.endswith("_accuracy") and value is not None:
                curves.setdefault(key.removeprefix("eval_").removesuffix("_accuracy"), []).append(
                    Point(step * per_step, seconds, value)
                )
    return curves


def _scores(folder: Path) -> tuple[dict[str, ScoreFile], list[str]]:
    """The newest score of each benchmark in the run folder, and a note where there are several."""
    found: dict[str, ScoreFile] = {}
    notes = []
    files = [path for pattern in (SCORE, f"*/{SCORE}") for path in folder.glob(pattern)]
    for path in sorted(files, key=lambda path: path.stat().st_mtime):
        score = read_run(str(path))
        benchmark = score.score["benchmark"]
        if benchmark in found:
            notes.append(f"{folder}: several scores of {benchmark}; the newest is taken, {path.relative_to(folder)}")
        found[benchmark] = score
    return found, notes


def make_sides(first: Sequence[ComparedRun], second: Sequence[ComparedRun]) -> tuple[Side, Side]:
    """The sides as they were named; without a second one, two runs are two sides, and more are sorted by their config.

    Raises `UserError` where that gives no two sides, or a side with a seed twice.
    """
    if not second:
        first, second = _sorted_out(first)
    for runs in (first, second):
        seeds = [run.seed for run in runs]
        if len(set(seeds)) < len(seeds):
            names = ", ".join(run.name for run in runs)
            raise UserError(f"RUN: one side has the same seed twice ({names}); leave one of the runs out")
    return Side("A", tuple(first)), Side("B", tuple(second))


def _sorted_out(runs: Sequence[ComparedRun]) -> tuple[list[ComparedRun], list[ComparedRun]]:
    if len(runs) == 2:
        return [runs[0]], [runs[1]]
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        kept = {key: value for key, value in run.settings.items() if key not in ("device", "versions", "commit")}
        groups.setdefault(json.dumps(kept, sort_keys=True, default=str), []).append(run)
    if len(groups) != 2:
        raise UserError(
            f"RUN: the {len(runs)} runs have {len(groups)} different configs, and a comparison needs two sides; name "
            "them as `A1 A2 --compare B1 B2`"
        )
    one, other = groups.values()
    return one, other


def config_differences(first: Side, second: Side) -> dict[str, tuple[str, str]]:
    """What differs between the sides beside the seed, with the values of both."""
    differing = {}
    for key in sorted({key for side in (first, second) for run in side.runs for key in run.settings}):
        values = [_values(side, key) for side in (first, second)]
        if values[0] != values[1]:
            differing[key] = (values[0], values[1])
    return differing


def _values(side: Side, key: str) -> str:
    texts = dict.fromkeys(json.dumps(run.settings.get(key), sort_keys=True, default=str) for run in side.runs)
    return " or ".join(texts)
