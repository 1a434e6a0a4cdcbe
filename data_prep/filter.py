"""Keeps the problems that a model solves sometimes: neither always, nor never.

Problems that a model always or never solves have groups of equal rewards, which teach nothing. The
source is ThinkLite-VL (arXiv 2504.07934), whose own measure counts iterations of a tree search;
this is the cheap version that it compares with, the pass rate of plain samples. The answers are
sampled as for an evaluation, which samples nothing twice.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from adora_vl.data import dataset
from adora_vl.data.dataset import (
    SPLITS,
    Manifest,
    Row,
    data_hash,
    read_manifest,
    split_files,
    stored_rows,
)
from adora_vl.data.output import complete_or_absent, refuse_unknown_files
from adora_vl.data.prompts import asks_for_answer_tags
from adora_vl.evals.benchmark import find_benchmark
from adora_vl.evals.inference.engines import build_engine
from adora_vl.evals.inference.predictions import PREDICTIONS_FILE, read_predictions
from adora_vl.evals.inference.provenance import FINGERPRINT_FILE, read_fingerprint
from adora_vl.evals.inference.requests import AnswerEngine, AnswerEngineSettings
from adora_vl.evals.inference.runner import infer
from adora_vl.evals.options import DataOptions
from adora_vl.evals.prepared import GraderOptions, load
from adora_vl.evals.records import GradedAnswer, Prediction
from adora_vl.evals.scoring.score import grade_rows
from adora_vl.models.load import model_hash
from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import UserError
from adora_vl.utils.hashing import content_hash

# A file of the output: the id of every problem, and how many of its answers are right.
RATES_FILE = "pass_rates.jsonl"
_RATE_TOLERANCE = 1e-9  # with it 3 of 10 answers are within 0.3:0.9


@dataclass(frozen=True)
class PassRateRange:
    """The range of pass rates to keep, both ends included."""

    low: float
    high: float

    def __contains__(self, rate: float) -> bool:
        return self.low - _RATE_TOLERANCE <= rate <= self.high + _RATE_TOLERANCE

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"


class AnswerTally(NamedTuple):
    """How many answers to a problem are right, and how many there are."""

    right: int
    answers: int

    @property
    def rate(self) -> float:
        """The share of right answers."""
        return self.right / self.answers


def grade_as_in_training(
    rows: Sequence[Prediction], *, rounding: bool, answer_tags: bool
) -> list[GradedAnswer]:
    """Return the grades of answers, as the reward of a training would judge them.

    Args:
        rows: the answers.
        rounding: whether a rounded decimal is right too.
        answer_tags: whether the answer stands between `<answer>` and `</answer>`.
    """
    # The benchmark of that name grades as the training does, whatever the data.
    benchmark = find_benchmark("geometry3k")
    options = GraderOptions(rounding=rounding, answer_tags=answer_tags)
    _, graded_answers = grade_rows(benchmark, rows, options)
    return graded_answers


def count_right_answers(
    rows: Sequence[Prediction], *, rounding: bool = False, answer_tags: bool = False
) -> dict[str, AnswerTally]:
    """Return how many answers to each problem are right, by its id, graded as in training.

    `rows` has several answers to each problem. The other arguments are those of
    `grade_as_in_training`.
    """
    right_counts: Counter[str] = Counter()
    answer_counts: Counter[str] = Counter()
    for graded in grade_as_in_training(rows, rounding=rounding, answer_tags=answer_tags):
        answer_counts[graded.pid] += 1
        if graded.correct:
            right_counts[graded.pid] += 1
    tally_by_id = {}
    for problem_id, answer_count in answer_counts.items():
        tally_by_id[problem_id] = AnswerTally(right=right_counts[problem_id], answers=answer_count)
    return tally_by_id


def samples_folder(output: Path) -> Path:
    """Return the folder of the sampled answers, `OUTPUT.samples` beside `output`.

    It stays, so that another `--keep` needs no new answers.
    """
    output = output.resolve()
    return output.with_name(f"{output.name}.samples")


# The settings of the engine on which a sampled answer depends.
_FINGERPRINT_SETTINGS = (
    "engine",
    "dtype",
    "max_tokens",
    "temperature",
    "seed",
    "min_pixels",
    "max_pixels",
    "batch_size",
)


def sample_answers(
    data: Path,
    split: str,
    folder: Path,
    settings: AnswerEngineSettings,
    *,
    samples: int,
    prompt: str | None = None,
    build: Callable[[AnswerEngineSettings], AnswerEngine] = build_engine,
) -> Path:
    """Sample `samples` answers to every problem of a split, to learn how often a model solves it.

    Args:
        data: the folder of the data set.
        split: its split.
        folder: where the answers are stored. Answers that it has already are not sampled again.
        settings: the model, how it samples, and its system prompt.
        samples: how many answers to each problem.
        prompt: the template of the user's message, as the key `adora_prompt` of a config.
        build: makes the engine that samples; tests pass a stand-in.

    Returns:
        The file of the answers.

    Raises:
        UserError: `folder` has answers that were made with another model, other data or other
            settings, or the template does not fit the data.
    """
    loaded = load(DataOptions(data=str(data), split=split), prompt)
    # The fingerprint is all that the answers depend on, and is stored beside them. Answers with
    # another one are not mixed with these.
    fingerprint = {
        "benchmark": "filter",
        "model": settings.model,
        "model_hash": model_hash(settings.model, settings.revision),
        "data_hash": loaded.data_hash,
        "split": split,
        "system_prompt": settings.system_prompt,
        "prompt": None if "prompt" in loaded.unused_options else prompt,
    }
    fingerprint |= {name: getattr(settings, name) for name in _FINGERPRINT_SETTINGS}
    fingerprint |= settings.fingerprint_fields
    infer(
        loaded.problems,
        output=folder,
        settings=settings,
        fingerprint=fingerprint,
        build=build,
        samples_per_problem=samples,
    )
    return folder / PREDICTIONS_FILE


def filter_dataset(
    data: Path,
    output: Path,
    predictions: Path,
    keep: PassRateRange,
    *,
    split: str = "train",
    rounding: bool = False,
    overwrite: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write a data set with the problems that a model solves sometimes, but not always.

    Args:
        data: the data set with all problems.
        output: the folder that is written.
        predictions: the file of answers to the problems of `split`, several to each.
        keep: which pass rates a problem may have. A pass rate is the share of right answers.
        split: the split that is filtered. All others are written unchanged.
        rounding: whether a rounded decimal is right too.
        overwrite: whether another data set in `output` is replaced.
        arguments: what the answers depend on, such as the model, for the manifest.

    Returns:
        The manifest.

    Raises:
        UserError: the answers are to another split, or no row is left.
    """
    check_input(data, split)
    rows_of_answers = read_predictions(predictions)
    answers_hash = content_hash([predictions])
    tally_by_id = count_right_answers(
        rows_of_answers,
        rounding=rounding,
        answer_tags=prompts_asked_for_tags(predictions),
    )
    _check_predictions_cover_split(tally_by_id, data=data, split=split, predictions=predictions)
    chosen_ids = {problem_id for problem_id, tally in tally_by_id.items() if tally.rate in keep}
    if not chosen_ids:
        raise UserError(
            f"keep: {keep} leaves no row; the pass rates are {_rates_in_words(tally_by_id)}"
        )
    description = {
        "source": "filter",
        "input": str(data),
        "revision": data_hash(data, split),
        "arguments": {
            "split": split,
            "keep": str(keep),
            "rounding": rounding,
            "answers": answers_hash,
            **(arguments or {}),
        },
    }
    with complete_or_absent(output, description, overwrite=overwrite) as folder:
        row_counts = _write_splits(folder, data=data, filtered_split=split, chosen_ids=chosen_ids)
        _write_tallies(folder / RATES_FILE, tally_by_id)
        summary = _filter_summary(tally_by_id.values(), keep)
        return dataset.write_manifest(folder, {**description, "filtered": summary}, row_counts)


def _write_splits(
    folder: Path, *, data: Path, filtered_split: str, chosen_ids: set[str]
) -> dict[str, int]:
    """Write the splits of a data set to `folder`, and return how many rows each has now.

    Of `filtered_split` only the rows with the chosen ids are written, of all others every row.
    """
    row_counts = {}
    for split in split_files(data):
        rows: Iterable[Row] = stored_rows(data, split)
        if split == filtered_split:
            rows = (row for row in rows if row["id"] in chosen_ids)
        row_counts[split] = dataset.write_split(
            rows, folder=folder, split=split, features=dataset.features_of_split(data, split)
        )
    return row_counts


def _write_tallies(path: Path, tally_by_id: Mapping[str, AnswerTally]) -> None:
    """Write one line of JSON for each problem: its id, and how many answers are right."""
    lines = []
    for problem_id, tally in tally_by_id.items():
        record = {"id": problem_id, "right": tally.right, "answers": tally.answers}
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def _filter_summary(problem_tallies: Iterable[AnswerTally], keep: PassRateRange) -> dict[str, int]:
    """Return how many problems a filter kept and left out, such as {"kept": 12, "below": 3, ...}.

    `problem_tallies` has a tally for each problem, and `keep` is the range of pass rates.
    """
    rates = [tally.rate for tally in problem_tallies]
    rates_outside = [rate for rate in rates if rate not in keep]
    return {
        "problems": len(rates),
        "kept": len(rates) - len(rates_outside),
        "below": sum(rate < keep.low for rate in rates_outside),
        "above": sum(rate > keep.high for rate in rates_outside),
        "never_solved": rates.count(0),
        "always_solved": rates.count(1),
    }


def _rates_in_words(tally_by_id: Mapping[str, AnswerTally]) -> str:
    """Return how many problems have each pass rate: `0 of 3, 1 of 5` where 3 are never solved."""
    counts_by_rate = Counter(f"{tally.rate:.3g}" for tally in tally_by_id.values())
    lowest_first = sorted(counts_by_rate.items(), key=lambda item: float(item[0]))
    return ", ".join(f"{rate} of {count}" for rate, count in lowest_first)


def check_input(data: Path, split: str) -> None:
    """Raise `UserError` where `data` is no prepared dataset of mathematics or has no such split."""
    manifest = read_manifest(data)
    if manifest is None:
        raise UserError(
            f"input: {str(data)!r} is not a folder made by `python -m data_prep`; prepare it first"
        )
    # The puzzles of knights and knaves, whose answers are roles and no values.
    if manifest["source"] == "knights":
        raise UserError(
            f"input: {str(data)!r} holds puzzles; filter grades mathematical answers only"
        )
    if split not in split_files(data):
        raise UserError(
            f"split: {str(data)!r} has no {split!r}; it has {', '.join(split_files(data))}"
        )


def check_output(data: Path, output: Path) -> None:
    """Raise `UserError` where `output` could not be written, before anything is sampled."""
    if output.resolve() == data.resolve():
        raise UserError(f"output: {str(output)!r} is the dataset to filter; choose another folder")
    refuse_unknown_files(output.resolve())


def prompts_asked_for_tags(predictions: Path) -> bool:
    """Return whether the prompts of stored answers asked for `<answer> </answer>`.

    The prompts are in the file of settings (the fingerprint) beside the answers. Without that file
    the prompts of the project are assumed, which ask for no tags.
    """
    path = predictions.parent / FINGERPRINT_FILE
    settings = read_fingerprint(path)["fields"] if path.is_file() else {}
    return asks_for_answer_tags(settings.get("system_prompt"), settings.get("prompt"))


def _check_predictions_cover_split(
    tally_by_id: Mapping[str, AnswerTally], data: Path, split: str, predictions: Path
) -> None:
    """Raise `UserError` unless the answers are to all rows of the split, and to no other rows.

    All rows need the same number of answers, since otherwise the sampling has not ended.
    `tally_by_id` has the answers that were counted, by the ids of the rows.
    """
    row_ids = set(dataset.load_split(data, split)["id"])
    unanswered_ids = sorted(row_ids - tally_by_id.keys())
    unknown_ids = sorted(tally_by_id.keys() - row_ids)
    if unanswered_ids or unknown_ids:
        if unanswered_ids:
            fault = f"{unanswered_ids[0]!r} has no answer"
        else:
            fault = f"{unknown_ids[0]!r} is not in the split {split!r}"
        raise UserError(
            f"predictions: {fault} in {str(predictions)!r} ({len(unanswered_ids)} of "
            f"{len(row_ids)} rows have none, {len(unknown_ids)} rows are others); sample the whole "
            "split"
        )
    answer_counts = {tally.answers for tally in tally_by_id.values()}
    if len(answer_counts) > 1:
        raise UserError(
            f"predictions: {str(predictions)!r} has {min(answer_counts)} answers to some problems "
            f"and {max(answer_counts)} to others; finish the sampling with the same command"
        )


def filter_report(manifest: Manifest) -> str:
    """Return the sentences that tell the user what a filter kept, from the manifest it wrote."""
    summary = manifest["filtered"]
    keep = manifest["arguments"]["keep"]
    rows = ", ".join(
        f"{split} {manifest['counts'][split]}" for split in SPLITS if split in manifest["counts"]
    )
    return (
        f"{pluralize(summary['problems'], 'problem')}: {summary['kept']} kept with a pass rate of "
        f"{keep}, {summary['below']} below and {summary['above']} above "
        f"({summary['never_solved']} never solved, {summary['always_solved']} always). Rows: {rows}"
    )
