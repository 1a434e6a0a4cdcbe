"""Turns the rows of a source into a prepared data set.

Rows are read and cleaned by several processes. What depends on the rows before (duplicate ids,
leaks between splits, contradictions) is decided in this process, in the order of the rows, so that
the result does not depend on the number of processes.
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

from adora_vl.conversion.duplicates import AnsweredRow, SeenRows, write_without_contradictions
from adora_vl.conversion.leakage import Fingerprint, LeakIndex, fingerprint
from adora_vl.conversion.problem import PixelLimits, RawProblem, RowError, RowReaders, to_row
from adora_vl.conversion.quarantine import LEAK, MAX_SHARE, NOTES, Quarantine
from adora_vl.data.dataset import Manifest, Row, read_manifest, schema, write_manifest, write_split
from adora_vl.data.images import DEFAULT_FAMILY, VISIONS
from adora_vl.data.output import complete_or_absent, refuse_foreign, remove_report
from adora_vl.data.stored_images import stored_bytes
from adora_vl.rewards.forms import read_reference
from adora_vl.utils.cli import shown
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from datasets import Features

# These splits are read before train, so that a leak is known when its training row comes.
HELD_OUT = ("test", "validation")
_SHOWN_LEAKS = 1000  # leaks that the manifest lists; a dropped row is in the quarantine anyway


@dataclass(frozen=True)
class CleanedRow:
    """A usable row, whose images are encoded as they will be stored, and what is known of it."""

    row: Row
    fingerprint: Fingerprint
    originals: tuple[bytes, ...]  # the row's bytes in its source
    origin: str = ""  # where it stands in its source
    notes: Mapping[str, str] = field(default_factory=dict)  # examples, by the names of `NOTES`

    def refuse(self, kind: str, wrong: str, remedy: str) -> RowError:
        """Return the error that sends this row to the quarantine."""
        record = {name: self.row[name] for name in ("problem", "answer", "answer_raw", "choices")}
        return RowError(
            row_id=self.row["id"],
            kind=kind,
            wrong=wrong,
            remedy=remedy,
            originals=self.originals,
            record=record,
        )


def read_and_clean(
    read: Callable[[], RawProblem], limits: PixelLimits, *, near: bool = True
) -> CleanedRow | RowError:
    """Read and clean one row.

    An error is returned instead of raised, so that it comes back from another process in the order
    of the rows. `near` is that of `fingerprint`.
    """
    try:
        raw = read()
        row = to_row(raw, limits)
    except RowError as error:
        return error
    hashes = fingerprint(row["problem"], row["answer"], row["images"], row["choices"], near=near)
    pairs = zip(raw.images, row["images"], strict=True)
    images = [{"bytes": stored_bytes(encoded, image), "path": None} for encoded, image in pairs]
    return CleanedRow(
        row={**row, "images": images},
        fingerprint=hashes,
        originals=raw.originals,
        origin=raw.origin,
        notes={**raw.notes, **_answer_notes(row)},
    )


# Tables write such words where they have no answer.
_NO_ANSWER = re.compile(r"n/?a\.?|nan|null|none|nil|unknown|tbd|\?+|-+", re.IGNORECASE)


def _answer_notes(row: Row) -> dict[str, str]:
    """Return notes on a reference answer that some right answers of a model would not meet."""
    answer = str(row["answer"])
    raw_answer = row["answer_raw"]
    unasked_percent = answer.rstrip().endswith("%") and not re.search(
        "%|per ?cent", row["problem"], re.IGNORECASE
    )
    notes = {"percent": row["id"]} if unasked_percent else {}
    if row["choices"] is not None:
        return notes
    # A number with words beside it: `3 apples` or `#### 5`.
    has_words = re.search(r"[0-9]", answer) and re.search("[A-Za-z#]", answer)
    conditions = {
        "words": has_words and read_reference(answer).kind in ("text", "unreadable"),
        "no_answer": _NO_ANSWER.fullmatch(raw_answer.strip()),
        "letter": _LETTER.fullmatch(answer) and not _OPTIONS.search(row["problem"]),
        "signs": read_reference(answer).reason == "not_read" and re.search(r"[^\w\s.'-]", answer),
    }
    example = f"{row['id']} ({shown(raw_answer, 40)})"
    return notes | {name: example for name, holds in conditions.items() if holds}


_LETTER = re.compile("[A-F]")
# The options A and B in the text of a problem.
_OPTIONS = re.compile(r"(?:^|[\s(\[*])A\s*[.):、\]].*(?:^|[\s(\[*])B\s*[.):、\]]", re.DOTALL)


class Deduplicator:
    """Drops rows whose id is that of a row before, and training rows that a held-out split has too.

    It remembers hashes and not rows, so that memory does not grow with the pictures.
    """

    def __init__(self, quarantine: Quarantine, seen_rows: SeenRows, *, keep_leaks: bool) -> None:
        """Begin with no rows. `keep_leaks`: training rows that are test problems too stay."""
        self.quarantine = quarantine
        self.seen_rows = seen_rows
        self._keep_leaks = keep_leaks
        self._index = LeakIndex()
        # The record of leaks in the manifest.
        self.leaks: dict[str, Any] = {"found": 0, "dropped": 0, "rows": []}
        # By the names of `NOTES`, how many rows there are, and the first of them as an example.
        self.notes: dict[str, dict[str, Any]] = {}
        self.rows_read = 0

    def _note(self, name: str, example: str) -> None:
        """Count a row under the note `name`."""
        assert name in NOTES, name
        self.notes.setdefault(name, {"rows": 0, "example": example})["rows"] += 1

    def rows_to_store(self, split: str, results: Iterable[CleanedRow | RowError]) -> Iterator[Row]:
        """Yield the rows to store, in their order; the rest goes into the quarantine."""
        for result in results:
            self.rows_read += 1
            if isinstance(result, RowError):
                self.quarantine.add(split, result)
                continue
            fault = self._fault_among_rows(split, result)
            if fault is not None:
                self.quarantine.add(split, fault)
                continue
            row = result.row
            for name, example in result.notes.items():
                self._note(name, example)
            answered = AnsweredRow(row["id"], row["answer"], result.origin)
            if self.seen_rows.add(
                split, result.fingerprint.question, result.fingerprint.pictures, answered
            ):
                self._note("repeats", row["id"])
            yield row

    def _fault_among_rows(self, split: str, cleaned: CleanedRow) -> RowError | None:
        """Return the error for a sound row that is dropped for a row before it, else None.

        A row is dropped where an earlier row has its id, and a training row where it is a leak. A
        leak between two held-out splits is counted alone.
        """
        if not self.seen_rows.is_new(cleaned.row["id"]):
            return cleaned.refuse(
                "duplicate_id", "another row has this id", "give every row an id of its own"
            )
        leak = self._index.find(split, cleaned.fingerprint)
        if split in HELD_OUT:
            self._index.add(split, cleaned.row["id"], cleaned.fingerprint)
        if leak is None:
            return None
        other_id, comparison = leak
        self.leaks["found"] += 1
        if len(self.leaks["rows"]) < _SHOWN_LEAKS:
            entry = {"id": cleaned.row["id"], "also": other_id, "by": comparison}
            self.leaks["rows"].append(entry)
        if self._keep_leaks or split in HELD_OUT:
            return None
        self.leaks["dropped"] += 1
        wrong = (
            f"the diagram and question of {other_id} stand in this training row too "
            f"(by {comparison} comparison)"
        )
        return cleaned.refuse(LEAK, wrong, "keep such rows with --keep-leaks")


OrderedMap = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
_ROWS_BEFORE_POOL = 32  # rows that are cleaned in this process before the pool begins
_ROWS_IN_FLIGHT_PER_WORKER = (
    8  # rows for each worker that are handed to the pool before a result is awaited
)


@contextmanager
def ordered_map(workers: int) -> Iterator[OrderedMap]:
    """Give a `map` over `workers` processes that keeps the order of its items.

    One worker means this process. More are a pool, which ends with the block. The first rows are
    done in this process in any case, since a pool takes longer to begin than a small table to
    clean.
    """
    if workers == 1:
        yield map
        return
    # Workers are not forked from this process, since its threads and its lock on the output folder
    # must not live on in a worker.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["adora_vl.conversion.pipeline"])
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:

        def map_in_pool(work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
            """Yield what `work` makes of each item, in order, as `map` does.

            The workers are a few items ahead: they need not wait for the writer of the rows, and
            few results are in memory at once.
            """
            waiting: deque[Future[Any]] = deque()
            items = iter(items)
            yield from map(work, islice(items, _ROWS_BEFORE_POOL))
            try:
                for item in items:
                    waiting.append(pool.submit(work, item))
                    if len(waiting) >= workers * _ROWS_IN_FLIGHT_PER_WORKER:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                # After an error nobody takes these results.
                for future in waiting:
                    future.cancel()

        yield map_in_pool


def _end_with_parent() -> None:
    """End this worker when its parent ends, since it would wait for its next row for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    # Ctrl-C reaches all processes of the group; the parent decides how the workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        """Wait for the end of the parent, and then end this process at once."""
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


MAX_WORKERS = 64  # far above what the one writer of rows keeps up with


def usable_cores() -> int:
    """Return how many cores this process may use, the default number of workers."""
    if hasattr(os, "sched_getaffinity"):  # Linux alone has it
        return min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    return min(MAX_WORKERS, os.cpu_count() or 1)


@dataclass(frozen=True)
class SplitRows:
    """The rows of one split, before any of them is read."""

    problems: Callable[[], RowReaders]  # begins to read the rows
    total: int | None  # how many rows there are, where that is known


@dataclass(frozen=True)
class Cleaning:
    """Options on how rows are cleaned, and which are stored; the manifest records them."""

    # Images outside these limits are resized by the rule of the model.
    min_pixels: int | None = None
    max_pixels: int | None = None
    family: str = DEFAULT_FAMILY  # the model_type whose image tokens decide which sizes there are
    limit: int | None = None  # the largest number of rows in a split
    keep_leaks: bool = False  # store training rows that also occur in a held-out split
    allow_quarantined: float = MAX_SHARE  # the largest share of unusable rows that is not an error

    def check(self) -> PixelLimits:
        """Return the limits of images.

        Raises `UserError` for limits that no image could satisfy.
        """
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


# These options are younger than the first manifests; their default values are not recorded.
_UNRECORDED_DEFAULTS = {
    "family": DEFAULT_FAMILY,
    "split_name": None,
    "drop_instruction": False,
    "texts": None,
}


def recorded_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as a manifest records them.

    Default values of later options are left out, so that the manifests of older folders, which do
    not have these options, still say the same.
    """
    recorded = {}
    for name, value in options.items():
        is_default = name in _UNRECORDED_DEFAULTS and value == _UNRECORDED_DEFAULTS[name]
        if not is_default:
            recorded[name] = value
    return recorded


def prepare(
    output: Path,
    options: Cleaning,
    begin: Callable[[], tuple[dict[str, Any], Mapping[str, SplitRows]]],
    features: Features | None = None,
    *,
    workers: int,
    overwrite: bool,
) -> Manifest:
    """Clean and write every split of a source, the held-out ones first.

    `begin` opens the source; it returns the description that the manifest begins with, and the
    rows of each split. `features` is the schema, where there are more columns than ours.

    Returns the manifest.

    Raises `UserError`, if possible before the source is opened. Where too many rows were refused,
    `OUTPUT.quarantine` then stands beside `output`.
    """
    limits = options.check()
    report = Path(f"{output.resolve()}.quarantine")
    for folder in (output, report):
        refuse_foreign(folder)
    description, splits = begin()
    # A leak needs two splits, so rows of a single one need no difference hashes.
    clean = partial(read_and_clean, limits=limits, near=len(splits) > 1)
    output_folder = complete_or_absent(output, description, overwrite=overwrite)
    with output_folder as folder, SeenRows(folder / "seen.sqlite") as seen_rows:
        quarantine = Quarantine(folder)
        deduplicator = Deduplicator(quarantine, seen_rows, keep_leaks=options.keep_leaks)
        with ordered_map(workers) as map_rows:
            counts = {}
            # Sorting is stable, so that splits of one kind stay in the order of the source.
            for split in sorted(splits, key=lambda split: split not in HELD_OUT):
                counts[split] = _write_split(
                    folder,
                    split=split,
                    total=splits[split].total,
                    results=map_rows(clean, splits[split].problems()),
                    deduplicator=deduplicator,
                    features=features,
                )
        # An empty source is no data set, and no share of its rows can be checked.
        if not deduplicator.rows_read:
            raise UserError(f"input: {description['input']!r} has no rows; give data that has some")
        try:
            quarantine.check(
                rows=deduplicator.rows_read,
                stored=sum(counts.values()),
                allowed=options.allow_quarantined,
                report=report,
            )
        except UserError:
            _write_report(report, quarantine, description)
            raise
        rows_sharing_picture, example = seen_rows.shared_pictures()
        if rows_sharing_picture:
            deduplicator.notes["one_picture"] = {
                "rows": rows_sharing_picture,
                "example": example,
            }
        seen_rows.close()
        manifest = write_manifest(
            folder,
            description,
            counts,
            quarantine.summary(),
            deduplicator.leaks,
            deduplicator.notes,
        )
    remove_report(report)
    return manifest


def _write_split(
    folder: Path,
    *,
    split: str,
    total: int | None,
    results: Iterable[CleanedRow | RowError],
    deduplicator: Deduplicator,
    features: Features | None,
) -> int:
    """Write the rows of one split that are used, and return how many there are.

    `total` is how many `results` there will be, for the progress bar; None where nobody knows.
    """
    with tqdm(results, desc=split, total=total, unit="row", disable=None) as bar:
        rows = deduplicator.rows_to_store(split, bar)
        count = write_split(rows, folder=folder, split=split, features=features)
    contradicting = deduplicator.seen_rows.contradicting(split)
    if contradicting:
        count = write_without_contradictions(
            folder,
            split=split,
            features=features or schema(),
            contradicting=contradicting,
            quarantine=deduplicator.quarantine,
        )
    return count


def _write_report(report: Path, quarantine: Quarantine, description: dict[str, Any]) -> None:
    """Move the refused rows into the folder `report`, for a preparation that ends without output.

    Raises `UserError` where a data set stands there.
    """
    if (read_manifest(report) or {}).get("counts"):
        holds = f"{str(report)!r} holds a dataset, where the refused rows should go"
        raise UserError(f"output: {holds}; move it away") from None
    with complete_or_absent(report) as folder:
        quarantine.move_to(folder)
        write_manifest(folder, description, {}, quarantine.summary())
