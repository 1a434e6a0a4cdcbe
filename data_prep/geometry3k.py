"""Prepares Geometry3K: reads rows from a source, cleans them, and writes them, the quarantine and the manifest."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from adora_vl.errors import UserError
from data_prep.clean import PixelLimits, RawProblem
from data_prep.cleaning import HELD_OUT, Intake, clean_one
from data_prep.output import complete_or_absent, refuse_another, refuse_foreign, remove_report
from data_prep.pixels import UNIT
from data_prep.quarantine import MAX_SHARE, Quarantine
from data_prep.sources import DATASET_ID, Source, open_source
from data_prep.storage import Manifest, read_manifest, require, write_manifest, write_split
from data_prep.workers import Mapper, ordered_map

MAX_WORKERS = 64


@dataclass(frozen=True)
class Options:
    """The options that decide which rows are kept. They are written into the manifest.

    Attributes:
        min_pixels, max_pixels: images outside these limits are resized by the rule of the model.
        limit: number of rows per split, the first ones, or with a `seed` a random sample.
        seed: the seed of the sample.
        diagram: `plain` or `point`, for intergps only.
        keep_leaks: keep training rows that also occur in a held-out split.
        allow_quarantined: the largest share of unusable rows that is not an error.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    limit: int | None = None
    seed: int | None = None
    diagram: str | None = None
    keep_leaks: bool = False
    allow_quarantined: float = MAX_SHARE


def prepare_geometry3k(
    output: Path,
    *,
    source: str,
    location: str | None = None,
    revision: str | None = None,
    options: Options | None = None,
    workers: int = 1,
    overwrite: bool = False,
) -> Manifest:
    """Prepare Geometry3K from `source` (`data_prep.sources.SOURCES`) at `location`, a dataset id or a path.

    `revision`: a branch, tag or commit of the hub. `workers`: number of processes that clean rows; the output does not
    depend on it. `overwrite`: replace another prepared dataset at `output`; the same one is always replaced.

    Returns the manifest. Raises `UserError`. If too many rows were refused, `NAME.quarantine` is written beside
    `output` first.
    """
    options = options or Options()
    _check(options, workers)
    report = Path(f"{output.resolve()}.quarantine")
    for folder in (output, report):
        refuse_foreign(folder)  # before a long download
    opened = open_source(source, location, revision=revision, diagram=options.diagram)
    description = {
        "source": f"geometry3k/{source}",
        "input": location or DATASET_ID,
        "revision": opened.revision,
        "arguments": asdict(options),
    }
    if not overwrite:
        refuse_another(output, description)
    with complete_or_absent(output, description, overwrite=overwrite) as folder:
        quarantine = Quarantine(folder)
        intake = Intake(quarantine, keep_leaks=options.keep_leaks)
        with ordered_map(workers) as mapped:
            counts = {
                split: _written(folder, split, opened, options, intake, mapped)
                for split in sorted(opened.sizes, key=lambda split: split not in HELD_OUT)
            }
        try:
            quarantine.check(intake.read, sum(counts.values()), options.allow_quarantined, report)
        except UserError:
            _publish(report, quarantine, description)
            raise
        manifest = write_manifest(folder, description, counts, quarantine.summary(), intake.leaks())
    remove_report(report)
    return manifest


def _check(options: Options, workers: int) -> None:
    require("workers", workers, 1, MAX_WORKERS)
    if options.limit is not None:
        require("limit", options.limit, 1)
    if options.seed is not None and options.limit is None:
        raise UserError(f"seed: {options.seed} has nothing to choose without --limit; give both or none")
    for name in ("min_pixels", "max_pixels"):
        value = getattr(options, name)
        if value is not None:
            require(name, value, UNIT**2)  # one image token
    if options.min_pixels and options.max_pixels and options.min_pixels > options.max_pixels:
        raise UserError(f"min_pixels: {options.min_pixels} is over max_pixels, {options.max_pixels}; lower it")
    if not 0 <= options.allow_quarantined <= 1:
        raise UserError(f"allow_quarantined: {options.allow_quarantined} is not between 0 and 1; 0.05 is 5 %")


def _written(
    folder: Path,
    split: str,
    source: Source,
    options: Options,
    intake: Intake,
    mapped: Mapper,
) -> int:
    """Write what is kept of one split; the number of its rows."""
    limits = PixelLimits(options.min_pixels, options.max_pixels)
    chosen = _chosen(split, source.sizes[split], options)
    problems = (read for index, read in enumerate(source.problems(split)) if index in chosen)
    results = mapped(partial(clean_one, limits=limits), _ended(problems, len(chosen)))
    with tqdm(results, desc=split, total=len(chosen), unit="row", disable=None) as bar:
        return write_split(intake.kept(split, bar), folder, split)


def _chosen(split: str, size: int, options: Options) -> range | set[int]:
    """The positions of the rows to read: the first ones, or with a seed a sample that every split draws for itself."""
    if options.limit is None or options.limit >= size:
        return range(size)
    if options.seed is None:
        return range(options.limit)
    return set(random.Random(f"{options.seed}/{split}").sample(range(size), options.limit))


def _ended(problems: Iterator[Callable[[], RawProblem]], count: int) -> Iterator[Callable[[], RawProblem]]:
    """The first `count`, without reading the rest of the source to find that none of it is wanted."""
    for _ in range(count):
        problem = next(problems, None)
        if problem is None:
            return
        yield problem


def _publish(report: Path, quarantine: Quarantine, description: dict[str, Any]) -> None:
    """Put what was refused beside the output that was not made."""
    previous = read_manifest(report)
    if previous is not None and previous["counts"]:
        raise UserError(f"output: {str(report)!r} holds a dataset, where the refused rows should go; move it away")
    with complete_or_absent(report) as folder:
        quarantine.copy_to(folder)
        write_manifest(folder, description, {}, quarantine.summary(), None)
