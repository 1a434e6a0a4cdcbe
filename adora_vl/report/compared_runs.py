"""Training runs as a comparison needs them: settings, curves, scores, and the two sets of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from adora_vl.evals.inference.predictions import SCORE_FILE
from adora_vl.evals.score_files import ScoreFile, read_run
from adora_vl.evals.scoring.table import scored_dataset_name
from adora_vl.record.shown_metrics import PASS_RATE_KEY
from adora_vl.rewards.entries import normalize_reward_entries
from adora_vl.utils.cli import pluralize, with_dotted_keys
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import escapes_folder, refuse_escaping_links

_SEED_KEYS = frozenset({"seed", "data_seed"})
# Keys that may change when a run is continued, and still make two runs less alike: which steps are
# skipped, and how an evaluation samples.
_COMPARED_THOUGH_IGNORED = frozenset({"adora_max_ratio", "num_generations_eval"})
# What a training uses up, so that runs can be compared after equal amounts of it
BudgetUnit = Literal["rollouts", "seconds"]


class CurvePoint(NamedTuple):
    """The value of a metric at some time of a training."""

    rollouts: float
    """The number of rollouts that the run had sampled by then."""
    seconds: float
    """The seconds of training steps that it had taken by then."""
    value: float

    def amount_used(self, unit: BudgetUnit) -> float:
        """Return how many rollouts, or seconds, the run had used up by then."""
        return self.rollouts if unit == "rollouts" else self.seconds


@dataclass(frozen=True)
class ComparedRun:
    """A training run: its settings, its curves, and its scores on held-out problems."""

    name: str
    """The folder of the run, as it was given."""
    seed: int
    settings: dict[str, Any]
    """What is compared of the run, by dotted key (see `_compared_settings`)."""
    recipe: str
    """The method in words, such as GRPO."""
    curves: dict[str, list[CurvePoint]] = field(repr=False)
    """The pass rate in training (`PASS_RATE_KEY`), and the evaluations on the way, by name."""
    scores: dict[str, ScoreFile] = field(repr=False)
    """The newest score on each data set, by the name that the score gives it."""
    notes: tuple[str, ...] = ()
    """What a reader has to know of the run before believing its metrics."""


@dataclass(frozen=True)
class RunSet:
    """Runs of one config with different seeds, which are compared with another such set."""

    letter: str
    """The name of the set in the comparison, A or B."""
    runs: tuple[ComparedRun, ...]

    @property
    def recipe(self) -> str:
        """Return the recipe and the number of seeds: `GRPO, 3 seeds`."""
        return f"{self.runs[0].recipe}, {pluralize(len(self.runs), 'seed')}"

    @property
    def title(self) -> str:
        """Return the letter and the recipe: `A (GRPO, 3 seeds)`."""
        return f"{self.letter} ({self.recipe})"

    def by_seed(self, values: Sequence[float]) -> dict[int, float]:
        """Return the values of the runs by their seeds.

        `values`: one for each run, in the order of `runs`.
        """
        return {run.seed: value for run, value in zip(self.runs, values, strict=True)}

    def setting(self, key: str) -> str:
        """Return the value of a setting as JSON; `1 or 2` where the runs of the set differ."""
        value_texts = [
            json.dumps(run.settings.get(key), sort_keys=True, default=str) for run in self.runs
        ]
        return " or ".join(dict.fromkeys(value_texts))  # without repetitions, in order


def read_compared_run(folder: Path) -> ComparedRun:
    """Read the settings, curves and scores of a run from its folder, for a comparison.

    Raises:
        UserError: the folder is no run.
    """
    # Imported here, because they bring torch and Transformers along, which scores alone do not
    # need.
    from adora_vl.checkpoint.run_files import read_run_manifest
    from adora_vl.checkpoint.store import MANIFEST_FILE
    from adora_vl.record.manifest import describe_run
    from adora_vl.record.metrics import METRICS_FILE, read_metrics

    refuse_escaping_links("RUN", folder, folder / METRICS_FILE, folder / MANIFEST_FILE)
    manifest = read_run_manifest(folder)
    lines = read_metrics(folder / METRICS_FILE)
    if not manifest or not lines:
        missing = METRICS_FILE if manifest else "manifest.json"
        raise UserError(
            f"RUN: {str(folder)!r} has no {missing}; name the output_dir of a training run"
        )
    config = dict(manifest["config"])
    newest = _read_newest_scores(folder)
    return ComparedRun(
        name=str(folder),
        seed=int(config.get("seed") or 0),
        settings=_compared_settings(manifest),
        recipe=describe_run(manifest)["recipe"],
        curves=_build_curves(lines, rollouts_per_step(config)),
        scores=newest.score_by_benchmark,
        notes=(*_run_notes(folder, manifest), *newest.notes),
    )


def _compared_settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what may differ between two runs, by key: config, data, model, code and versions.

    Nested keys of the config are dotted, such as `adora_rollouts.budget`. Data and model are named
    by their fingerprints, since their paths may differ for the same content.
    """
    from adora_vl.checkpoint.fingerprint import IGNORED_KEYS
    from adora_vl.record.manifest import recorded_methods

    config = dict(manifest["config"])
    if isinstance(config.get("adora_reward"), list):
        config["adora_reward"] = normalize_reward_entries(config["adora_reward"])
    settings: dict[str, Any] = {}
    not_compared = (IGNORED_KEYS - _COMPARED_THOUGH_IGNORED) | _SEED_KEYS
    for key in config.keys() - not_compared:
        settings |= with_dotted_keys(key, config[key])
    settings |= {
        "adora_method": "+".join(recorded_methods(config)),
        "data": manifest["data"].get("fingerprint"),
        "model": manifest["model"].get("fingerprint") or manifest["model"].get("name"),
        "own": manifest.get("own") or {},
        **{key: manifest.get(key) for key in ("commit", "device", "versions")},
    }
    return settings


def _run_notes(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return what makes the metrics of a run less comparable, in sentences.

    The run may not be finished, or sample more or fewer rollouts than `rollouts_per_step` counts.
    """
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
    """Return how many rollouts one optimizer step of a run samples, on average.

    A generation samples `generation_batch_size` rollouts. They are used for `steps_per_generation`
    micro-batches, `num_iterations` times, and an optimizer step takes
    `gradient_accumulation_steps` micro-batches. For example, a generation of 64 rollouts with 4
    steps per generation, 1 iteration and 2 accumulation steps gives 64 x 2 / 4 = 32.
    """

    def value_of(key: str) -> float:
        """Return the value of a key; 1 where a record lacks it."""
        return float(config.get(key) or 1)

    micro_batches_of_generation = value_of("steps_per_generation") * value_of("num_iterations")
    return (
        value_of("generation_batch_size")
        * value_of("gradient_accumulation_steps")
        / micro_batches_of_generation
    )


def _build_curves(
    lines: Sequence[dict[str, Any]], step_rollouts: float
) -> dict[str, list[CurvePoint]]:
    """Return the curves of the pass rate in training and of the accuracies of evaluations.

    The seconds of a point are those of training steps alone. An evaluation adds nothing to them.

    Args:
        lines: the lines of the run's `metrics.jsonl`.
        step_rollouts: rollouts that one optimizer step samples.

    Returns:
        the points by the name of the metric: `PASS_RATE_KEY`, or the name of an evaluation.
    """
    curves: dict[str, list[CurvePoint]] = {PASS_RATE_KEY: []}

    for line, seconds in zip(lines, _training_seconds(lines), strict=True):
        rollouts = line["step"] * step_rollouts
        if line["kind"] != "eval" and line.get(PASS_RATE_KEY) is not None:
            point = CurvePoint(rollouts=rollouts, seconds=seconds, value=line[PASS_RATE_KEY])
            curves[PASS_RATE_KEY].append(point)
        for key, value in line.items():
            if key.startswith("eval_") and key.endswith("_accuracy") and value is not None:
                name = key.removeprefix("eval_").removesuffix("_accuracy")
                point = CurvePoint(rollouts=rollouts, seconds=seconds, value=value)
                curves.setdefault(name, []).append(point)
    return curves


def _training_seconds(lines: Sequence[dict[str, Any]]) -> list[float]:
    """Return for each line of the log how many seconds the training steps up to it took.

    A line of training has the mean seconds of the steps since the training line before it. The line
    of an evaluation may stand between two lines of training. Its seconds are then interpolated by
    the steps. The seconds of the evaluation itself do not count.

    For example, training lines at the steps 10 and 20 with a mean of 2 and 4 seconds give 20 and
    60, and an evaluation at step 15 gives 40.

    `lines`: the lines of the run's `metrics.jsonl`.
    """
    import numpy as np

    from adora_vl.record.phases import TRAINING_PHASES

    known_steps = [0]
    known_seconds = [0.0]
    for line in lines:
        if line["kind"] == "eval":
            continue
        mean_seconds = sum(line.get(f"seconds/{phase}") or 0.0 for phase in TRAINING_PHASES)
        new_steps = line["step"] - known_steps[-1]
        known_steps.append(line["step"])
        known_seconds.append(known_seconds[-1] + new_steps * mean_seconds)
    line_steps = [line["step"] for line in lines]
    seconds: list[float] = np.interp(line_steps, known_steps, known_seconds).tolist()
    return seconds


class _NewestScores(NamedTuple):
    """The newest score of a run on each data set."""

    score_by_benchmark: dict[str, ScoreFile]
    notes: list[str]
    """Which score files of the run's folder were not taken, and why."""


def _read_newest_scores(folder: Path) -> _NewestScores:
    """Read the score files in a run's folder and in its subfolders, the newest of each data set.

    The score of the model before the training says nothing of the run, and is left out.
    """
    # Imported here for the same reason as in `read_compared_run`.
    from adora_vl.record.result import SCORE_FILE_BEFORE

    score_by_benchmark: dict[str, ScoreFile] = {}
    notes: list[str] = []
    paths_in_folder: list[Path] = []
    for path in (*folder.glob(SCORE_FILE), *folder.glob(f"*/{SCORE_FILE}")):
        if path == folder / SCORE_FILE_BEFORE:
            continue
        if escapes_folder(folder, path):
            notes.append(f"{path} is a link out of the run's folder, and is not read")
        else:
            paths_in_folder.append(path)
    # The oldest comes first, so that the newest one stays.
    for path in sorted(paths_in_folder, key=lambda path: path.stat().st_mtime):
        score = read_run(str(path))
        # `geometry3k` and `problems` are one benchmark, which scores any data set.
        benchmark = scored_dataset_name(score.score)
        if benchmark in score_by_benchmark:
            notes.append(
                f"{folder}: several scores of {benchmark}; the newest is taken, "
                f"{path.relative_to(folder)}"
            )
        score_by_benchmark[benchmark] = score
    return _NewestScores(score_by_benchmark, notes)


def make_run_sets(
    first: Sequence[ComparedRun], second: Sequence[ComparedRun]
) -> tuple[RunSet, RunSet]:
    """Return the sets A and B of a comparison, each with runs of one config and different seeds.

    Args:
        first: the runs of set A, or all runs.
        second: the runs of set B. If there are none, the runs in `first` are divided: two runs
            are a set each, and more runs are divided by their config.

    Raises:
        UserError: the runs have not exactly two configs, or a set has two runs of one seed.
    """
    if not second:
        first, second = _split_by_config(first)
    for runs in (first, second):
        seeds = {run.seed for run in runs}
        if len(seeds) < len(runs):
            names = ", ".join(run.name for run in runs)
            raise UserError(
                f"RUN: one side has the same seed twice ({names}); leave one of the runs out"
            )
    return RunSet(letter="A", runs=tuple(first)), RunSet(letter="B", runs=tuple(second))


def _split_by_config(
    runs: Sequence[ComparedRun],
) -> tuple[Sequence[ComparedRun], Sequence[ComparedRun]]:
    """Divide runs into two sets by their configs; the set of the first run comes first.

    Two runs are a set each, whatever their configs. Runs with one config may differ in device,
    versions and commit, so these do not count as config here.

    Raises:
        UserError: there are more than two runs, and they do not have exactly two configs.
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
