"""Keeps the problems that a model solves sometimes: neither always, nor never.

Source: ThinkLite-VL (arXiv 2504.07934), whose own measure counts iterations of a tree search; this
is the cheap version that it compares with, the pass rate of plain samples. The answers come from
`eval`, which asks for nothing twice.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from adora_vl.data import dataset
from adora_vl.data.dataset import (
    SPLITS,
    Manifest,
    data_hash,
    read_manifest,
    split_files,
    stored_rows,
)
from adora_vl.data.output import complete_or_absent, refuse_foreign
from adora_vl.data.prompts import SYSTEM_PROMPT, asks_for_answer_tags
from adora_vl.evals.benchmark import named
from adora_vl.evals.inference.engines import build_engine
from adora_vl.evals.inference.predictions import PREDICTIONS, read_predictions
from adora_vl.evals.inference.provenance import FILE_NAME, read
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

# in the output: id, right answers and answers of every problem of the split
RATES_FILE = "pass_rates.jsonl"
_ROUNDING = 1e-9  # so that 3 of 10 answers are within 0.3:0.9


@dataclass(frozen=True)
class Keep:
    """Pass rates to keep, both ends included."""

    low: float
    high: float

    def __contains__(self, rate: float) -> bool:
        return self.low - _ROUNDING <= rate <= self.high + _ROUNDING

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"


class Tally(NamedTuple):
    right: int
    answers: int

    @property
    def rate(self) -> float:
        return self.right / self.answers


def tallies(
    rows: Sequence[Prediction], *, rounding: bool = False, answer_tags: bool = False
) -> dict[str, Tally]:
    """The right answers and all answers of each problem by its id, graded as in training."""
    benchmark = named("geometry3k")
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
    """The folder of the answers, beside `output`.

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
    """Get `samples` answers to every problem of the split, except those that `folder` has.

    Returns their file.

    `prompt`: the template of the text that is asked, as `adora_prompt`. Raises `UserError` if
    `folder` has answers that were made with another model, other data or other settings, and for a
    template that does not fit the data.
    """
    asked = load(DataOptions(data=str(data), split=split), prompt)
    fingerprint = {
        "benchmark": "filter",
        "model": settings.model,
        "model_hash": model_hash(settings.model, settings.revision),
        "data_hash": asked.data_hash,
        "split": split,
        "system_prompt": system_prompt,
        "prompt": None if "prompt" in asked.unused_options else prompt,
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
    fingerprint |= {name: getattr(settings, name) for name in names} | settings.described
    infer(
        asked.problems,
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
    """Write a dataset with those rows of `split` whose pass rate is in `keep`, and with the other
    splits unchanged.

    `arguments`: what else the choice depends on. Raises `UserError` for answers of another split,
    or if no row is left.
    """
    check_input(data, split)
    tags = asked_for_tags(predictions)
    held = content_hash([predictions])
    found = tallies(read_predictions(predictions), rounding=rounding, answer_tags=tags)
    _check_covered(found, data=data, split=split, predictions=predictions)
    kept = {pid for pid, tally in found.items() if tally.rate in keep}
    if not kept:
        shares = Counter(f"{tally.rate:.3g}" for tally in found.values())
        seen = ", ".join(
            f"{rate} of {count}"
            for rate, count in sorted(shares.items(), key=lambda one: float(one[0]))
        )
        raise UserError(f"keep: {keep} leaves no row; the pass rates are {seen}")
    given = {
        "split": split,
        "keep": str(keep),
        "rounding": rounding,
        "answers": held,
        **(arguments or {}),
    }
    description = {
        "source": "filter",
        "input": str(data),
        "revision": data_hash(data, split),
        "arguments": given,
    }
    with complete_or_absent(output, description, overwrite=overwrite) as folder:
        counts = {}
        for name in split_files(data):
            chosen = (row for row in stored_rows(data, name) if name != split or row["id"] in kept)
            counts[name] = dataset.write_split(
                chosen, folder=folder, split=name, features=dataset.features_of(data, name)
            )
        lines = (
            json.dumps({"id": pid, "right": t.right, "answers": t.answers})
            for pid, t in found.items()
        )
        (folder / RATES_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
        rates = [tally.rate for tally in found.values()]
        summary = {
            "problems": len(rates),
            "kept": len(kept),
            "below": sum(rate < keep.low and rate not in keep for rate in rates),
            "above": sum(rate > keep.high and rate not in keep for rate in rates),
            "never_solved": sum(rate == 0 for rate in rates),
            "always_solved": sum(rate == 1 for rate in rates),
        }
        return dataset.write_manifest(folder, {**description, "filtered": summary}, counts)


def check_input(data: Path, split: str) -> None:
    """Raise `UserError` where `data` is not a prepared dataset of mathematical problems, or has no
    such split.
    """
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
    """Before anything is sampled: raise `UserError` where `output` could not be written."""
    if output.resolve() == data.resolve():
        raise UserError(f"output: {str(output)!r} is the dataset to filter; choose another folder")
    refuse_foreign(output.resolve())


def asked_for_tags(predictions: Path) -> bool:
    """Whether the prompts of these answers asked for `<answer> </answer>`, as the fingerprint
    beside them says.
    """
    path = predictions.parent / FILE_NAME
    fields = read(path)["fields"] if path.is_file() else {}
    return asks_for_answer_tags(fields.get("system_prompt"), fields.get("prompt"))


def _check_covered(found: Mapping[str, Tally], data: Path, split: str, predictions: Path) -> None:
    """The same number of answers to each row of the split, and to nothing else."""
    ids = set(dataset.load_split(data, split)["id"])
    missing = sorted(ids - found.keys())
    foreign = sorted(found.keys() - ids)
    if missing or foreign:
        name, what = (
            (missing[0], "has no answer")
            if missing
            else (foreign[0], f"is not in the split {split!r}")
        )
        raise UserError(
            f"predictions: {name!r} {what} in {str(predictions)!r} ({len(missing)} of {len(ids)} "
            f"rows have none, {len(foreign)} rows are others); sample the whole split"
        )
    counts = Counter(tally.answers for tally in found.values())
    if len(counts) > 1:
        few = min(counts)
        many = max(counts)
        unlike = f"{str(predictions)!r} has {few} answers to some problems and {many} to others"
        raise UserError(f"predictions: {unlike}; finish the sampling with the same command")


def in_words(manifest: Manifest) -> str:
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
