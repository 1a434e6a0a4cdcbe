"""What every preparation of a source has in common: clean the rows, write them, the quarantine and the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Features
from tqdm import tqdm

from adora_vl.errors import UserError
from data_prep.clean_row import PixelLimits, RawProblem
from data_prep.clean_source import HELD_OUT, Intake, clean_one
from data_prep.output import complete_or_absent, refuse_another, refuse_foreign, remove_report
from data_prep.pixels import UNIT
from data_prep.quarantine import Quarantine
from data_prep.schema import FEATURES
from data_prep.storage import Manifest, read_manifest, require, write_manifest, write_split
from data_prep.workers import Mapper, ordered_map

MAX_WORKERS = 64
Reads = Iterator[Callable[[], RawProblem]]


@dataclass(frozen=True)
class SplitReads:
    """The rows of one split: `problems` begins to read them, `total` is how many there are, where that is known."""

    problems: Callable[[], Reads]
    total: int | None


@dataclass(frozen=True)
class Cleaning:
    """How rows are cleaned, and which are kept; see `geometry3k.Options`."""

    limits: PixelLimits
    keep_leaks: bool
    allow_quarantined: float
    features: Features = field(default_factory=lambda: FEATURES)


def check_target(output: Path, description: Mapping[str, Any] | None, *, overwrite: bool) -> None:
    """Raise `UserError` where the result could not be put, before a long download. `description`: None, not known."""
    for folder in (output, _report(output)):
        refuse_foreign(folder)
    if description is not None and not overwrite:
        refuse_another(output, description)


def check_limits(min_pixels: int | None, max_pixels: int | None, allow_quarantined: float, workers: int) -> None:
    """Raise `UserError` for options that no row could satisfy."""
    require("workers", workers, 1, MAX_WORKERS)
    for name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)):
        if value is not None:
            require(name, value, UNIT**2)  # one image token
    if min_pixels and max_pixels and min_pixels > max_pixels:
        raise UserError(f"min_pixels: {min_pixels} is over max_pixels, {max_pixels}; lower it")
    if not 0 <= allow_quarantined <= 1:
        raise UserError(f"allow_quarantined: {allow_quarantined} is not between 0 and 1; 0.05 is 5 %")


def clean_source(
    output: Path,
    splits: Mapping[str, SplitReads],
    description: Mapping[str, Any],
    cleaning: Cleaning,
    *,
    workers: int,
    overwrite: bool,
) -> Manifest:
    """Clean and write every split, the held-out ones first. Returns the manifest.

    Raises `UserError`. If too many rows were refused, `NAME.quarantine` is written beside `output` first.
    """
    with complete_or_absent(output, description, overwrite=overwrite) as folder:
        quarantine = Quarantine(folder)
        intake = Intake(quarantine, keep_leaks=cleaning.keep_leaks)
        with ordered_map(workers) as mapped:
            counts = {
                split: _written(folder, split, splits[split], cleaning, intake, mapped)
                for split in sorted(splits, key=lambda split: split not in HELD_OUT)
            }
        if not intake.read:
            raise UserError(f"input: {description['input']!r} has no rows; give data that has some")
        try:
            quarantine.check(intake.read, sum(counts.values()), cleaning.allow_quarantined, _report(output))
        except UserError:
            _publish(_report(output), quarantine, description)
            raise
        manifest = write_manifest(folder, description, counts, quarantine.summary(), intake.leaks())
    remove_report(_report(output))
    return manifest


def _report(output: Path) -> Path:
    return Path(f"{output.resolve()}.quarantine")


def _written(folder: Path, split: str, reads: SplitReads, cleaning: Cleaning, intake: Intake, mapped: Mapper) -> int:
    """Write what is kept of one split; the number of its rows."""
    results = mapped(partial(clean_one, limits=cleaning.limits), reads.problems())
    with tqdm(results, desc=split, total=reads.total, unit="row", disable=None) as bar:
        return write_split(intake.kept(split, bar), folder, split, cleaning.features)


def _publish(report: Path, quarantine: Quarantine, description: Mapping[str, Any]) -> None:
    """Put what was refused beside the output that was not made."""
    previous = read_manifest(report)
    if previous is not None and previous["counts"]:
        raise UserError(f"output: {str(report)!r} holds a dataset, where the refused rows should go; move it away")
    with complete_or_absent(report) as folder:
        quarantine.copy_to(folder)
        write_manifest(folder, description, {}, quarantine.summary(), None)
