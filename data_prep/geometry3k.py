"""Prepares Geometry3K: reads rows from a source, cleans them, and writes them, the quarantine and the manifest."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adora_vl.errors import UserError
from data_prep.clean_row import PixelLimits, RawProblem
from data_prep.pipeline import MAX_WORKERS, Cleaning, Reads, SplitReads, check_limits, check_target, clean_source
from data_prep.pixels import DEFAULT_FAMILY, VISIONS
from data_prep.quarantine import MAX_SHARE
from data_prep.sources import DATASET_ID, Source, open_source
from data_prep.storage import Manifest, require

__all__ = ["MAX_WORKERS", "Options", "prepare_geometry3k"]


@dataclass(frozen=True)
class Options:
    """The options that decide which rows are kept. They are written into the manifest.

    Attributes:
        min_pixels, max_pixels: images outside these limits are resized by the rule of the model.
        family: the model_type of that model, whose image tokens decide which sizes there are.
        limit: number of rows per split, the first ones, or with a `seed` a random sample.
        seed: the seed of the sample.
        diagram: `plain` or `point`, for intergps only.
        keep_leaks: keep training rows that also occur in a held-out split.
        allow_quarantined: the largest share of unusable rows that is not an error.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    family: str = DEFAULT_FAMILY
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
    check_target(output, None, overwrite=overwrite)
    opened = open_source(source, location, revision=revision, diagram=options.diagram)
    description = {
        "source": f"geometry3k/{source}",
        "input": location or DATASET_ID,
        "revision": opened.revision,
        "arguments": _recorded(options),
    }
    check_target(output, description, overwrite=overwrite)
    limits = PixelLimits(options.min_pixels, options.max_pixels, VISIONS[options.family].unit)
    cleaning = Cleaning(limits, options.keep_leaks, options.allow_quarantined)
    splits = {split: _reads(split, opened, options) for split in opened.sizes}
    return clean_source(output, splits, description, cleaning, workers=workers, overwrite=overwrite)


def _recorded(options: Options) -> dict[str, Any]:
    """The options; the usual family is left out, as it was before there were others, so a dataset stays the same."""
    found = asdict(options)
    return {key: value for key, value in found.items() if (key, value) != ("family", DEFAULT_FAMILY)}


def _check(options: Options, workers: int) -> None:
    check_limits(options.min_pixels, options.max_pixels, options.allow_quarantined, workers)
    if options.limit is not None:
        require("limit", options.limit, 1)
    if options.seed is not None and options.limit is None:
        raise UserError(f"seed: {options.seed} has nothing to choose without --limit; give both or none")
    if options.family not in VISIONS:
        raise UserError(f"family: {options.family!r} is not one of {', '.join(VISIONS)}")
    for name in ("min_pixels", "max_pixels"):
        value = getattr(options, name)
        if value is not None:
            require(name, value, VISIONS[options.family].unit ** 2)  # one image token


def _reads(split: str, source: Source, options: Options) -> SplitReads:
    """The rows to read of one split."""
    chosen = _chosen(split, source.sizes[split], options)

    def problems() -> Reads:
        wanted = (read for index, read in enumerate(source.problems(split)) if index in chosen)
        return _ended(wanted, len(chosen))

    return SplitReads(problems, len(chosen))


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
