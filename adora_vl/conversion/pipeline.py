"""From a source to a prepared data set: rows are cleaned by several processes, duplicates dropped
in order.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from adora_vl.conversion.duplicates import Answered, SeenRows, leave_out
from adora_vl.conversion.leakage import Fingerprint, LeakIndex, fingerprint
from adora_vl.conversion.problem import PixelLimits, RawProblem, Reads, RowError, to_row
from adora_vl.conversion.quarantine import LEAK, MAX_SHARE, NOTES, Quarantine
from adora_vl.data.dataset import Manifest, Row, read_manifest, schema, write_manifest, write_split
from adora_vl.data.images import DEFAULT_FAMILY, VISIONS, stored_bytes
from adora_vl.data.output import complete_or_absent, refuse_foreign, remove_report
from adora_vl.rewards.forms import read
from adora_vl.utils.cli import shown
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from datasets import Features

# read before train, so that a leak is known when its training row comes
HELD_OUT = (
    "test",
    "validation",
)
_SHOWN_LEAKS = 1000  # in the manifest; a dropped row is in the quarantine anyway


@dataclass(frozen=True)
class Cleaned:
    """A usable row with images as they will be stored, its fingerprint, its original bytes and
    their place.
    """

    row: Row
    print_: Fingerprint
    originals: tuple[bytes, ...]
    origin: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)

    def refuse(self, kind: str, wrong: str, remedy: str) -> RowError:
        """The error that sends this row to the quarantine."""
        record = {name: self.row[name] for name in ("problem", "answer", "answer_raw", "choices")}
        return RowError(
            row_id=self.row["id"],
            kind=kind,
            wrong=wrong,
            remedy=remedy,
            originals=self.originals,
            record=record,
        )


def clean_one(
    read: Callable[[], RawProblem], limits: PixelLimits, *, near: bool = True
) -> Cleaned | RowError:
    """Read and clean one row.

    An error is returned, to be sent between processes. `near`: as for `fingerprint`.
    """
    try:
        raw = read()
        row = to_row(raw, limits)
    except RowError as error:
        return error
    print_ = fingerprint(row["problem"], row["answer"], row["images"], row["choices"], near=near)
    pairs = zip(raw.images, row["images"], strict=True)
    images = [{"bytes": stored_bytes(encoded, image), "path": None} for encoded, image in pairs]
    return Cleaned(
        row={**row, "images": images},
        print_=print_,
        originals=raw.originals,
        origin=raw.origin,
        notes={**raw.notes, **_notes_on(row)},
    )


# What tables write where they have no answer.
_NO_ANSWER = re.compile(r"n/?a\.?|nan|null|none|nil|unknown|tbd|\?+|-+", re.IGNORECASE)


def _notes_on(row: Row) -> dict[str, str]:
    """What is to be said of a row's reference answer, which can be met, but not by everything that
    is meant.
    """
    answer = str(row["answer"])
    given = row["answer_raw"]
    unasked = answer.rstrip().endswith("%") and not re.search(
        "%|per ?cent", row["problem"], re.IGNORECASE
    )
    notes = {"percent": row["id"]} if unasked else {}
    if row["choices"] is not None:
        return notes
    # as in `3 apples` or `#### 5`
    beside = re.search(r"[0-9]", answer) and re.search("[A-Za-z#]", answer)
    found = {
        "words": beside and read(answer).kind in ("text", "unreadable"),
        "no_answer": _NO_ANSWER.fullmatch(given.strip()),
        "letter": _LETTER.fullmatch(answer) and not _OPTIONS.search(row["problem"]),
        "signs": read(answer).reason == "not_read" and re.search(r"[^\w\s.'-]", answer),
    }
    return notes | {
        name: f"{row['id']} ({shown(given, 40)})" for name, holds in found.items() if holds
    }


_LETTER = re.compile("[A-F]")
# in the problem
_OPTIONS = re.compile(r"(?:^|[\s(\[*])A\s*[.):、\]].*(?:^|[\s(\[*])B\s*[.):、\]]", re.DOTALL)


class Deduplicator:
    """Drops rows whose id, or whose held-out diagram, was there before.

    It remembers hashes, not rows.
    """

    def __init__(self, quarantine: Quarantine, seen: SeenRows, *, keep_leaks: bool) -> None:
        self.quarantine = quarantine
        self.seen = seen
        self._keep_leaks = keep_leaks
        self._index = LeakIndex()
        # as the manifest has them
        self.leaks: dict[str, Any] = {
            "found": 0,
            "dropped": 0,
            "rows": [],
        }
        self.notes: dict[
            str, dict[str, Any]
        ] = {}  # by the names of `NOTES`: how many rows, and the first one
        self.read = 0

    def _note(self, name: str, example: str) -> None:
        assert name in NOTES, name
        self.notes.setdefault(name, {"rows": 0, "example": example})["rows"] += 1

    def kept(self, split: str, results: Iterable[Cleaned | RowError]) -> Iterator[Row]:
        """Yields the rows to store, in order. The others go into the quarantine."""
        for result in results:
            self.read += 1
            refused = result if isinstance(result, RowError) else self._refused(split, result)
            if refused is not None:
                self.quarantine.add(split, refused)
                continue
            assert isinstance(result, Cleaned)
            row = result.row
            for name, example in result.notes.items():
                self._note(name, example)
            answered = Answered(row["id"], row["answer"], result.origin)
            if self.seen.add(split, result.print_.asked, result.print_.pictures, answered):
                self._note("repeats", row["id"])
            yield row

    def _refused(self, split: str, cleaned: Cleaned) -> RowError | None:
        """The error for a row whose id was there, or a training row that is dropped as a leak; None
        for any other.
        """
        if not self.seen.is_new(cleaned.row["id"]):
            return cleaned.refuse(
                "duplicate_id", "another row has this id", "give every row an id of its own"
            )
        leak = self._index.find(split, cleaned.print_)
        if split in HELD_OUT:
            self._index.add(split, cleaned.row["id"], cleaned.print_)
        if leak is None:
            return None
        other, how = leak
        self.leaks["found"] += 1
        if len(self.leaks["rows"]) < _SHOWN_LEAKS:
            self.leaks["rows"].append({"id": cleaned.row["id"], "also": other, "by": how})
        if self._keep_leaks or split in HELD_OUT:
            return None
        self.leaks["dropped"] += 1
        wrong = (
            f"the diagram and question of {other} stand in this training row too (by {how} "
            "comparison)"
        )
        return cleaned.refuse(LEAK, wrong, "keep such rows with --keep-leaks")


Mapper = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
_DONE_HERE = 32  # rows before the pool begins
_AHEAD = 8  # rows handed to the pool, for each worker, before a result is awaited


@contextmanager
def ordered_map(workers: int) -> Iterator[Mapper]:
    """A `map` that keeps the order.

    One worker means this process; more use a pool that ends with the block.

    The first rows are done here in any case: a pool takes longer to begin than a small table to
    clean.
    """
    if workers == 1:
        yield map
        return
    # Not forked from this process: its threads and its lock on the output folder must not live on
    # in a worker.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["adora_vl.conversion.pipeline"])
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:

        def mapped(work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
            waiting: deque[Future[Any]] = deque()
            items = iter(items)
            yield from map(work, islice(items, _DONE_HERE))
            try:
                for item in items:
                    waiting.append(pool.submit(work, item))
                    if len(waiting) >= workers * _AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

        yield mapped


def _end_with_parent() -> None:
    """End this worker when its parent ends; else it would wait for its next row for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    # Ctrl-C reaches the whole group; the parent says what becomes of it
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


MAX_WORKERS = 64


def usable_cores() -> int:
    """How many cores this process may use, so many workers by default."""
    return min(
        MAX_WORKERS,
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


@dataclass(frozen=True)
class SplitReads:
    problems: Callable[[], Reads]  # begins to read the rows of one split
    total: int | None  # how many there are, where that is known


@dataclass(frozen=True)
class Cleaning:
    """How rows are cleaned, and which are kept. The options are written into the manifest."""

    # images outside these limits are resized by the rule of the model
    min_pixels: int | None = None
    max_pixels: int | None = None
    family: str = DEFAULT_FAMILY  # the model_type whose image tokens decide which sizes there are
    limit: int | None = None  # rows per split
    keep_leaks: bool = False  # training rows that also occur in a held-out split
    allow_quarantined: float = MAX_SHARE  # the largest share of unusable rows that is not an error

    def check(self) -> PixelLimits:
        """The limits of images. Raises `UserError` for those that no image could satisfy."""
        unit = VISIONS[self.family].unit
        for name, value in (("min_pixels", self.min_pixels), ("max_pixels", self.max_pixels)):
            if value is not None and value < unit**2:
                raise UserError(
                    f"{name}: {value} is less than an image token of {self.family}, {unit**2}; "
                    "raise it"
                )
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise UserError(
                f"min_pixels: {self.min_pixels} is over max_pixels, {self.max_pixels}; lower it"
            )
        return PixelLimits(self.min_pixels, self.max_pixels, unit)


_UNSAID = {"family": DEFAULT_FAMILY, "split_name": None, "drop_instruction": False, "texts": None}


def recorded(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for a manifest.

    The usual values of some are left out, as before there were others.
    """
    return {
        key: value for key, value in options.items() if key not in _UNSAID or value != _UNSAID[key]
    }


def prepare(
    output: Path,
    options: Cleaning,
    begin: Callable[[], tuple[dict[str, Any], Mapping[str, SplitReads]]],
    features: Features | None = None,
    *,
    workers: int,
    overwrite: bool,
) -> Manifest:
    """Clean and write every split of a source, the held-out ones first.

    Returns the manifest.

    `begin`: opens the source, for what its manifest is known by and the rows of its splits.
    `features`: the schema, where there are more columns than ours. Raises `UserError`, where it can
    before the source is opened; where too many rows were refused, `NAME.quarantine` stands beside
    `output` then.
    """
    limits = options.check()
    report = Path(f"{output.resolve()}.quarantine")
    for folder in (output, report):
        refuse_foreign(folder)
    description, splits = begin()
    work = partial(clean_one, limits=limits, near=len(splits) > 1)
    whole = complete_or_absent(output, description, overwrite=overwrite)
    with whole as folder, SeenRows(folder / "seen.sqlite") as seen:
        quarantine = Quarantine(folder)
        deduplicator = Deduplicator(quarantine, seen, keep_leaks=options.keep_leaks)
        with ordered_map(workers) as mapped:
            counts = {}
            for split in sorted(splits, key=lambda split: split not in HELD_OUT):
                results = mapped(work, splits[split].problems())
                with tqdm(
                    results, desc=split, total=splits[split].total, unit="row", disable=None
                ) as bar:
                    counts[split] = write_split(
                        deduplicator.kept(split, bar), folder=folder, split=split, features=features
                    )
                if contradicting := seen.contradicting(split):
                    counts[split] = leave_out(
                        folder,
                        split=split,
                        features=features or schema(),
                        contradicting=contradicting,
                        quarantine=quarantine,
                    )
        if not deduplicator.read:
            raise UserError(f"input: {description['input']!r} has no rows; give data that has some")
        try:
            quarantine.check(
                deduplicator.read, sum(counts.values()), options.allow_quarantined, report
            )
        except UserError:
            if (read_manifest(report) or {}).get("counts"):
                holds = f"{str(report)!r} holds a dataset, where the refused rows should go"
                raise UserError(f"output: {holds}; move it away") from None
            with complete_or_absent(report) as refused:
                quarantine.move_to(refused)
                write_manifest(refused, description, {}, quarantine.summary())
            raise
        sharing, example = seen.shared_pictures()
        if sharing:
            deduplicator.notes["one_picture"] = {"rows": sharing, "example": example}
        seen.close()
        noted = deduplicator.notes
        manifest = write_manifest(
            folder, description, counts, quarantine.summary(), deduplicator.leaks, noted
        )
    remove_report(report)
    return manifest
