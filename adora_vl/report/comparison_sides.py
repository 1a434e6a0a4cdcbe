"""Training runs as a comparison needs them: settings, curves, scores, and the two sides of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from adora_vl.evals.compare import ScoreFile, read_run
from adora_vl.evals.inference.predictions import SCORE
from adora_vl.rewards.judge import without_address
from adora_vl.utils.cli import amount, dotted
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import leads_out, refuse_links_out

PASS_RATE = "adora/pass_rate"  # noqa: S105  # no password
# Keys that say where a run writes, what it shows and how it resumes are not compared.
_NOT_COMPARED = {
    "output_dir",
    "run_name",
    "logging_dir",
    "overwrite_output_dir",
    "resume_from_checkpoint",
    "report_to",
    "save_steps",
    "save_strategy",
    "save_total_limit",
    "disable_tqdm",
    "seed",
    "data_seed",
    "project",
    "trackio_space_id",
    "dataset_name",
    "model_name_or_path",  # their fingerprints say more than where they lie
}


class Point(NamedTuple):
    """The value of a figure, and what the run had spent by then."""

    rollouts: float
    seconds: float
    value: float


@dataclass(frozen=True)
class ComparedRun:
    """One run: its settings, its curves, and its scores on held-out problems by benchmark."""

    name: str
    """The folder of the run, as it was given."""
    seed: int
    settings: dict[str, Any]
    """What is compared of the run, by dotted key (see `_compared_settings`)."""
    recipe: str
    """The method in words, such as GRPO."""
    curves: dict[str, list[Point]] = field(repr=False)
    """The pass rate in training, and the evaluations on the way, by name."""
    scores: dict[str, ScoreFile] = field(repr=False)
    """The newest score on each benchmark, by its name."""
    notes: tuple[str, ...] = ()
    """What a reader has to know of the run before believing its figures."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison: runs of one config with different seeds."""

    letter: str
    """A or B."""
    runs: tuple[ComparedRun, ...]

    @property
    def recipe(self) -> str:
        """Return the recipe and the number of seeds: `GRPO, 3 seeds`."""
        return f"{self.runs[0].recipe}, {amount(len(self.runs), 'seed')}"

    @property
    def title(self) -> str:
        """Return the letter and the recipe: `A (GRPO, 3 seeds)`."""
        return f"{self.letter} ({self.recipe})"

    def by_seed(self, values: Sequence[float]) -> dict[int, float]:
        """Return the values by seed; `values` has one per run, in the order of the runs."""
        return {run.seed: value for run, value in zip(self.runs, values, strict=True)}

    def setting(self, key: str) -> str:
        """Return the value of a key as JSON, or the different values where the runs differ."""
        value_texts = [
            json.dumps(run.settings.get(key), sort_keys=True, default=str) for run in self.runs
        ]
        return " or ".join(dict.fromkeys(value_texts))  # without repetitions, in order


def read_compared(folder: Path) -> ComparedRun:
    """Read what a comparison needs of a run; `UserError` is raised for a folder that is no run."""
    # Imported here, because they bring torch and Transformers along, which scores alone do not
    # need.
    from adora_vl.record.manifest import MANIFEST, facts_of_run, read_manifest
    from adora_vl.record.metrics import METRICS, read_metrics

    refuse_links_out("RUN", folder, folder / METRICS, folder / MANIFEST)
    manifest = read_manifest(folder)
    lines = read_metrics(folder / METRICS)
    if not manifest or not lines:
        missing = METRICS if manifest else "manifest.json"
        raise UserError(
            f"RUN: {str(folder)!r} has no {missing}; name the output_dir of a training run"
        )
    config = dict(manifest["config"])
    scores, score_notes = _newest_scores(folder)
    return ComparedRun(
        name=str(folder),
        seed=int(config.get("seed") or 0),
        settings=_compared_settings(manifest),
        recipe=facts_of_run(manifest)["recipe"],
        curves=_curves(lines, rollouts_per_step(config)),
        scores=scores,
        notes=(*_run_notes(folder, manifest), *score_notes),
    )


def _compared_settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is compared of a run: config by dotted keys, data, model, code and versions."""
    from adora_vl.record.manifest import methods_of

    config = dict(manifest["config"])
    if isinstance(config.get("adora_reward"), list):
        config["adora_reward"] = [without_address(entry) for entry in config["adora_reward"]]
    settings: dict[str, Any] = {}
    for key in config.keys() - _NOT_COMPARED:
        settings |= dotted(key, config[key])
    settings |= {
        "adora_method": "+".join(methods_of(config)),
        "data": manifest["data"].get("fingerprint"),
        "model": manifest["model"].get("fingerprint") or manifest["model"].get("name"),
        "own": manifest.get("own") or {},
        **{key: manifest.get(key) for key in ("commit", "device", "versions")},
    }
    return settings


def _run_notes(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return notes on a run: that it is not finished, or how its rollouts are counted."""
    notes = []
    if manifest.get("status") != "finished":
        notes.append(f"{folder}: the run is {manifest.get('status')}")
    rollout_options = manifest["config"].get("adora_rollouts") or {}
    if rollout_options.get("refill"):
        notes.append(
            f"{folder}: the further batches of adora_rollouts.refill are not counted as rollouts"
        )
    if rollout_options.get("budget") is not None:
        notes.append(
            f"{folder}: some generations of adora_rollouts.budget have fewer rollouts than are "
            "counted"
        )
    return notes


def rollouts_per_step(config: Mapping[str, Any]) -> float:
    """Return the rollouts that one optimizer step samples, on average.

    A generation serves several of TRL's steps, and each of them several times.
    """

    def value_of(key: str) -> float:
        return float(config.get(key) or 1)

    sampled = value_of("generation_batch_size") * value_of("gradient_accumulation_steps")
    return sampled / (value_of("steps_per_generation") * value_of("num_iterations"))


def _curves(lines: Sequence[dict[str, Any]], per_step: float) -> dict[str, list[Point]]:
    """Return the curves of a run by name: the pass rate in training, and the evaluations.

    Seconds are those of training steps, so that an evaluation adds nothing to them.

    Args:
        lines: the lines of the run's metrics.
        per_step: rollouts that one optimizer step samples.
    """
    from adora_vl.record.phases import PHASES

    curves: dict[str, list[Point]] = {PASS_RATE: []}
    last_step = 0
    seconds = 0.0
    for line in lines:
        step = line["step"]
        if line["kind"] == "train":
            # The figures of a line are means per step since the line before it.
            step_seconds = sum(line.get(f"seconds/{phase}") or 0.0 for phase in PHASES)
            seconds += (step - last_step) * step_seconds
            last_step = step
            if line.get(PASS_RATE) is not None:
                curves[PASS_RATE].append(Point(step * per_step, seconds, line[PASS_RATE]))
        for key, value in line.items():
            if key.startswith("eval_") and key.endswith("_accuracy") and value is not None:
                name = key.removeprefix("eval_").removesuffix("_accuracy")
                curves.setdefault(name, []).append(Point(step * per_step, seconds, value))
    return curves


def _newest_scores(folder: Path) -> tuple[dict[str, ScoreFile], list[str]]:
    """Return the newest score of each benchmark in a run folder, and notes on what is not read."""
    newest: dict[str, ScoreFile] = {}
    notes = []
    score_paths = [*folder.glob(SCORE), *folder.glob(f"*/{SCORE}")]
    outside = [path for path in score_paths if leads_out(folder, path)]
    notes += [f"{path} is a link out of the run's folder, and is not read" for path in outside]
    inside = [path for path in score_paths if path not in outside]
    # The oldest comes first, so that the newest one stays.
    for path in sorted(inside, key=lambda path: path.stat().st_mtime):
        score = read_run(str(path))
        benchmark = score.score["benchmark"]
        if benchmark in newest:
            notes.append(
                f"{folder}: several scores of {benchmark}; the newest is taken, "
                f"{path.relative_to(folder)}"
            )
        newest[benchmark] = score
    return newest, notes


def make_sides(first: Sequence[ComparedRun], second: Sequence[ComparedRun]) -> tuple[Side, Side]:
    """Return the sides A and B of a comparison.

    Without runs for a second side, two runs are a side each, and more runs are sorted by their
    config. `UserError` is raised where that gives no two sides, or a side with a seed twice.
    """
    if not second:
        first, second = _split_by_config(first)
    for runs in (first, second):
        if len({run.seed for run in runs}) < len(runs):
            names = ", ".join(run.name for run in runs)
            raise UserError(
                f"RUN: one side has the same seed twice ({names}); leave one of the runs out"
            )
    return Side("A", tuple(first)), Side("B", tuple(second))


def _split_by_config(
    runs: Sequence[ComparedRun],
) -> tuple[Sequence[ComparedRun], Sequence[ComparedRun]]:
    """Return the runs of the first side and those of the second: a side has those of one config.

    Device, versions and commit do not divide the runs, since seeds of one config may differ in them.
    Raises `UserError` where more than two runs have not exactly two configs.
    """
    if len(runs) == 2:
        return runs[:1], runs[1:]
    runs_by_config: dict[str, list[ComparedRun]] = {}
    for run in runs:
        settings = {
            key: value
            for key, value in run.settings.items()
            if key not in ("device", "versions", "commit")
        }
        config_text = json.dumps(settings, sort_keys=True, default=str)
        runs_by_config.setdefault(config_text, []).append(run)
    if len(runs_by_config) != 2:
        raise UserError(
            f"RUN: the {len(runs)} runs have {len(runs_by_config)} different configs, and a comparison "
            "needs two sides; name them as `A1 A2 --compare B1 B2`"
        )
    first, second = runs_by_config.values()
    return first, second
