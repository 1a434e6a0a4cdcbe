"""Keeps the problems that a model solves sometimes: neither always, nor never.

Problems that a model always or never solves have groups of equal rewards, which teach nothing. The
source is ThinkLite-VL (arXiv 2504.07934), whose own measure counts iterations of a tree search; this
is the cheap version that it compares with, the pass rate of plain samples. The answers are sampled
as for an evaluation, which samples nothing twice.
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
from adora_vl.data.output import complete_or_absent, refuse_foreign
from adora_vl.data.prompts import SYSTEM_PROMPT, asks_for_answer_tags
from adora_vl.evals.benchmark import find_benchmark
from adora_vl.evals.inference.engines import build_engine
from adora_vl.evals.inference.predictions import PREDICTIONS, read_predictions
from adora_vl.evals.inference.provenance import FINGERPRINT_FILE, read_fingerprint
from adora_vl.evals.inference.requests import AnswerEngine, AnswerEngineSettings
from adora_vl.evals.inference.runner import infer
from adora_vl.evals.options import DataOptions
from adora_vl.evals.prepared import GraderOptions, load
from adora_vl.evals.records import Prediction
from adora_vl.evals.scoring.score import graded_rows
from adora_vl.models.load import model_hash
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError
from adora_vl.utils.hashing import content_hash

# This file of the output has the id, the right answers and all answers of every problem.
RATES_FILE = "pass_rates.jsonl"
_ROUNDING = 1e-9  # with it 3 of 10 answers are within 0.3:0.9


@dataclass(frozen=True)
class Keep:
    """The range of pass rates to keep, both ends included."""

    low: float
    high: float

    def __contains__(self, rate: float) -> bool:
        return self.low - _ROUNDING <= rate <= self.high + _ROUNDING

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"


class Tally(NamedTuple):
    """How many answers to a problem are right, and how many there are."""

    right: int
    answers: int

    @property
    def rate(self) -> float:
        """The share of right answers."""
        return self.right / self.answers


def tallies(
    rows: Sequence[Prediction], *, rounding: bool = False, answer_tags: bool = False
) -> dict[str, Tally]:
    """Return the tally of each problem by its id, graded as in training."""
    benchmark = find_benchmark("geometry3k")
    options = GraderOptions(rounding=rounding, answer_tags=answer_tags)
    right: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    _, graded = graded_rows(benchmark, rows, options)
    for item in graded:
        answers[item.pid] += 1
        if item.correct:
            right[item.pid] += 1
    return {pid: Tally(right[pid], answers[pid]) for pid in answers}


def samples_folder(output: Path) -> Path:
    """Return the folder of the answers, beside `output`.

    It stays, so that another `--keep` needs no new answers.
    """
    output = output.resolve()
    return output.with_name(f"{output.name}.samples")


def sample(
    data: Path,
    split: str,
    folder: Path,
    settings: AnswerEngineSettings,
    *,
    samples: int,
    system_prompt: str | None = SYSTEM_PROMPT,
    prompt: str | None = None,
    build: Callable[[AnswerEngineSettings], AnswerEngine] = build_engine,
) -> Path:
    """Sample `samples` answers to every problem of a split, except those that `folder` has.

    `prompt` is the template of the text of a prompt, as the key `adora_prompt` has it.

    Returns the file of the answers.

    Raises `UserError` if `folder` has answers that were made with another model, other data or
    other settings, and for a template that does not fit the data.
    """
    loaded = load(DataOptions(data=str(data), split=split), prompt)
    fingerprint = {
        "benchmark": "filter",
        "model": settings.model,
        "model_hash": model_hash(settings.model, settings.revision),
        "data_hash": loaded.data_hash,
        "split": split,
        "system_prompt": system_prompt,
        "prompt": None if "prompt" in loaded.unused_options else prompt,
    }
    names = (
        "engine",
        "dtype",
        "max_tokens",
        "temperature",
        "seed",
        "min_pixels",
        "max_pixels",
        "batch_size",
    )
    fingerprint |= {name: getattr(settings, name) for name in names} | settings.fingerprint_fields
    infer(
        loaded.problems,
        output=folder,
        settings=settings,
        fingerprint=fingerprint,
        system_prompt=system_prompt,
        build=build,
        samples=samples,
    )
    return folder / PREDICTIONS


def filter_dataset(
    data: Path,
    output: Path,
    predictions: Path,
    keep: Keep,
    *,
    split: str = "train",
    rounding: bool = False,
    overwrite: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write a dataset with the rows of `split` whose pass rate is in `keep`.

    All other splits are written unchanged. `arguments` is what the choice depends on besides, for
    the manifest.

    Raises `UserError` for answers to another split, or if no row is left.
    """
    check_input(data, split)
    tags = asked_for_tags(predictions)
    answers_hash = content_hash([predictions])
    tally_of = tallies(read_predictions(predictions), rounding=rounding, answer_tags=tags)
    _check_covered(tally_of, data=data, split=split, predictions=predictions)
    chosen_ids = {pid for pid, tally in tally_of.items() if tally.rate in keep}
    if not chosen_ids:
        raise UserError(
            f"keep: {keep} leaves no row; the pass rates are {_rates_in_words(tally_of)}"
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
        counts = {}
        for name in split_files(data):
            rows: Iterable[Row] = stored_rows(data, name)
            if name == split:
                rows = (row for row in rows if row["id"] in chosen_ids)
            counts[name] = dataset.write_split(
                rows, folder=folder, split=name, features=dataset.features_of(data, name)
            )
        lines = []
        for pid, tally in tally_of.items():
            lines.append(json.dumps({"id": pid, "right": tally.right, "answers": tally.answers}))
        (folder / RATES_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
        rates = [tally.rate for tally in tally_of.values()]
        summary = {
            "problems": len(rates),
            "kept": len(chosen_ids),
            "below": sum(rate < keep.low and rate not in keep for rate in rates),
            "above": sum(rate > keep.high and rate not in keep for rate in rates),
            "never_solved": sum(rate == 0 for rate in rates),
            "always_solved": sum(rate == 1 for rate in rates),
        }
        return dataset.write_manifest(folder, {**description, "filtered": summary}, counts)


def _rates_in_words(tally_of: Mapping[str, Tally]) -> str:
    """Return the pass rates of problems from the lowest on, and how many have each."""
    counts_by_rate = Counter(f"{tally.rate:.3g}" for tally in tally_of.values())
    lowest_first = sorted(counts_by_rate.items(), key=lambda item: float(item[0]))
    return ", ".join(f"{rate} of {count}" for rate, count in lowest_first)


def check_input(data: Path, split: str) -> None:
    """Raise `UserError` where `data` is no prepared dataset of mathematics, or has no such split."""
    manifest = read_manifest(data)
    if manifest is None:
        raise UserError(
            f"input: {str(data)!r} is not a folder made by `python -m data_prep`; prepare it first"
        )
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
    refuse_foreign(output.resolve())


def asked_for_tags(predictions: Path) -> bool:
    """Return whether the prompts of stored answers asked for `<answer> </answer>`.

    The fingerprint that stands beside the answers says so.
    """
    path = predictions.parent / FINGERPRINT_FILE
    fields = read_fingerprint(path)["fields"] if path.is_file() else {}
    return asks_for_answer_tags(fields.get("system_prompt"), fields.get("prompt"))


def _check_covered(
    tally_of: Mapping[str, Tally], data: Path, split: str, predictions: Path
) -> None:
    """Check that there are as many answers to each row of a split, and none to any other row.

    Raises `UserError` where that is not so.
    """
    ids = set(dataset.load_split(data, split)["id"])
    missing = sorted(ids - tally_of.keys())
    foreign = sorted(tally_of.keys() - ids)
    if missing or foreign:
        if missing:
            name = missing[0]
            fault = "has no answer"
        else:
            name = foreign[0]
            fault = f"is not in the split {split!r}"
        raise UserError(
            f"predictions: {name!r} {fault} in {str(predictions)!r} ({len(missing)} of {len(ids)} "
            f"rows have none, {len(foreign)} rows are others); sample the whole split"
        )
    counts = Counter(tally.answers for tally in tally_of.values())
    if len(counts) > 1:
        unlike = (
            f"{str(predictions)!r} has {min(counts)} answers to some problems and {max(counts)} "
            "to others"
        )
        raise UserError(f"predictions: {unlike}; finish the sampling with the same command")


def in_words(manifest: Manifest) -> str:
    """Return a sentence on what a filter kept, by the manifest of its output."""
    facts = manifest["filtered"]
    keep = manifest["arguments"]["keep"]
    rows = ", ".join(
        f"{split} {manifest['counts'][split]}" for split in SPLITS if split in manifest["counts"]
    )
    return (
        f"{amount(facts['problems'], 'problem')}: {facts['kept']} kept with a pass rate of "
        f"{keep}, {facts['below']} below and {facts['above']} above ({facts['never_solved']} "
        f"never solved, {facts['always_solved']} always). Rows: {rows}"
    )
