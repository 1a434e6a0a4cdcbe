"""Turns the rows of a source into a prepared data set.

Rows are read and cleaned by several processes. What depends on the rows before (duplicate ids,
leaks between splits, contradictions) is decided in this process, in the order of the rows, so that
the result does not depend on the number of processes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from adora_vl.conversion.duplicates import AnsweredRow, SeenRows, write_without_contradictions
from adora_vl.conversion.leakage import Fingerprint, LeakIndex, fingerprint
from adora_vl.conversion.problem import RawProblem, RowError, RowReaders, to_row
from adora_vl.conversion.quarantine import LEAK_REASON, MAX_BROKEN_SHARE, WARNING_TEXTS, Quarantine
from adora_vl.conversion.workers import ordered_map
from adora_vl.data.dataset import Manifest, Row, read_manifest, schema, write_manifest, write_split
from adora_vl.data.images import DEFAULT_FAMILY, VISION_BY_FAMILY, PixelLimits
from adora_vl.data.output import complete_or_absent, refuse_unknown_files, remove_quarantine_report
from adora_vl.data.stored_images import stored_bytes
from adora_vl.rewards.structured import parse_reference
from adora_vl.utils.cli import short_repr
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from datasets import Features

# These splits are read before train. A leak is a training row that a held-out split has too, and it
# can be seen only once the held-out rows are known.
HELD_OUT_SPLITS = ("test", "validation")
# The number of leaks that the manifest lists. The quarantine has all rows that were dropped as
# leaks.
_MAX_LISTED_LEAKS = 1000


@dataclass(frozen=True)
class CleanedRow:
    """A usable row with its images encoded as they will be stored, and what is known of the row."""

    row: Row
    fingerprint: Fingerprint
    original_files: tuple[bytes, ...]  # the bytes of the row's files in its source
    origin: str = ""  # where the row stands in its source
    # What the user should know of the row: keys of `WARNING_TEXTS`, each with this row as its
    # example, such as {"percent": "geo/train/17"}.
    warnings: Mapping[str, str] = field(default_factory=dict)

    def row_error(self, reason: str, wrong: str, remedy: str) -> RowError:
        """Return the error of a fault of this row, which then goes to the file of unusable rows.

        `reason` is the broken rule in one word. `wrong` says what is wrong, `remedy` what to do.
        """
        record = {name: self.row[name] for name in ("problem", "answer", "answer_raw", "choices")}
        return RowError(
            row_id=self.row["id"],
            reason=reason,
            wrong=wrong,
            remedy=remedy,
            original_files=self.original_files,
            record=record,
        )


def read_and_clean(
    read: Callable[[], RawProblem], limits: PixelLimits, *, with_perceptual_hashes: bool = True
) -> CleanedRow | RowError:
    """Read one row from its source, clean it, and hash it so that duplicates can be found.

    A `RowError` is returned instead of raised. This runs in a worker process, and the error of an
    unusable row has to come back in the order of the rows, as a usable row does.

    Args:
        read: the function that reads the row.
        limits: how many pixels a picture may have.
        with_perceptual_hashes: whether each picture also gets a hash that is nearly the same for a
            scaled copy of it.
    """
    try:
        raw = read()
        row = to_row(raw, limits)
    except RowError as error:
        return error
    hashes = fingerprint(
        problem=row["problem"],
        answer=row["answer"],
        images=row["images"],
        choices=row["choices"],
        with_perceptual_hashes=with_perceptual_hashes,
    )
    stored_images = []
    for encoded, image in zip(raw.images, row["images"], strict=True):
        # A picture that cleaning left alone is stored with the bytes of the source.
        stored_images.append({"bytes": stored_bytes(encoded, image), "path": None})
    return CleanedRow(
        row={**row, "images": stored_images},
        fingerprint=hashes,
        original_files=raw.original_files,
        origin=raw.origin,
        warnings={**raw.warnings, **_answer_warnings(row)},
    )


# Tables write such words where they have no answer.
_NO_ANSWER_PATTERN = re.compile(r"n/?a\.?|nan|null|none|nil|unknown|tbd|\?+|-+", re.IGNORECASE)


def _answer_warnings(row: Row) -> dict[str, str]:
    """Return what a user should know of a row's reference answer, which is usable all the same.

    With such an answer a model's right answers may count as wrong. These are the keys of the result
    and of `WARNING_TEXTS`, each with an answer that has it:

        percent     40%        the problem does not ask for a percentage
        words       3 apples   the model may write `3`
        no_answer   n/a        the table has none
        letter      B          the problem lists no options
        signs       3→4        the grader does not read the arrow

    A problem with choices has at most the first one. The values are this row in words, as the
    example that is printed: {"words": "geo/train/17 ('3 apples')"}.
    """
    answer = str(row["answer"])
    raw_answer = row["answer_raw"]
    problem = row["problem"]
    warnings = {}
    asks_for_percent = re.search("%|per ?cent", problem, re.IGNORECASE) is not None
    if answer.rstrip().endswith("%") and not asks_for_percent:
        warnings["percent"] = row["id"]
    # The answer to a problem with choices is one of them, so its spelling does not matter.
    if row["choices"] is not None:
        return warnings
    # As the grader of the training reads it: `type` is `number` or `text`, say, and `reason` says
    # why a text is nothing else.
    reference = parse_reference(answer)
    has_number = re.search(r"[0-9]", answer) is not None
    has_words = re.search("[A-Za-z#]", answer) is not None  # `3 apples` or `#### 5`
    is_letter = _OPTION_LETTER_PATTERN.fullmatch(answer) is not None
    has_signs = re.search(r"[^\w\s.'-]", answer) is not None
    conditions = {
        "words": has_number and has_words and reference.type in ("text", "unreadable"),
        "no_answer": _NO_ANSWER_PATTERN.fullmatch(raw_answer.strip()) is not None,
        "letter": is_letter and _OPTIONS_IN_TEXT_PATTERN.search(problem) is None,
        "signs": has_signs and reference.reason == "not_read",
    }
    example = f"{row['id']} ({short_repr(raw_answer, max_characters=40)})"
    for name, is_met in conditions.items():
        if is_met:
            warnings[name] = example
    return warnings


_OPTION_LETTER_PATTERN = re.compile("[A-F]")
# The options A and B in the text of a problem.
_OPTIONS_IN_TEXT_PATTERN = re.compile(
    r"(?:^|[\s(\[*])A\s*[.):、\]].*(?:^|[\s(\[*])B\s*[.):、\]]", re.DOTALL
)


class Deduplicator:
    """Drops rows whose id an earlier row has, and training rows that a held-out split has too.

    It remembers hashes and not rows, so that memory does not grow with the pictures. It also counts
    what the manifest says of leaks and of usable rows.
    """

    def __init__(self, quarantine: Quarantine, seen_rows: SeenRows, *, keep_leaks: bool) -> None:
        """Set what is used for each row; no row was seen yet.

        Args:
            quarantine: takes the rows that are dropped.
            seen_rows: the database of the ids and questions of all rows so far.
            keep_leaks: whether a training row stays although a held-out split has it too.
        """
        self.quarantine = quarantine
        self.seen_rows = seen_rows
        self._keep_leaks = keep_leaks
        self._held_out_rows = LeakIndex()
        # What the manifest says of leaks: two counts, and the first rows as examples.
        self.leaks: dict[str, Any] = {"found": 0, "dropped": 0, "rows": []}
        # What the manifest says of usable rows, by the keys of `WARNING_TEXTS`: how many rows have
        # the warning, and the first of them: {"percent": {"rows": 2, "example": "geo/train/17"}}.
        self.warnings: dict[str, dict[str, Any]] = {}
        self.rows_read = 0

    def _count_warning(self, name: str, example: str) -> None:
        """Count a row that has the warning `name`, a key of `WARNING_TEXTS`.

        `example` is the row in words. That of the first row is kept.
        """
        assert name in WARNING_TEXTS, name
        self.warnings.setdefault(name, {"rows": 0, "example": example})
        self.warnings[name]["rows"] += 1

    def manifest_entries(self) -> dict[str, Any]:
        """Return what the manifest says of refused rows, of leaks, and of rows with a warning."""
        return {
            "quarantined": self.quarantine.summary(),
            "leaks": self.leaks,
            "warnings": self.warnings,
        }

    def count_shared_pictures(self) -> None:
        """Count the rows with a picture that many other rows have too, once all rows are read."""
        row_count, example_id = self.seen_rows.shared_pictures()
        if row_count:
            self.warnings["one_picture"] = {"rows": row_count, "example": example_id}

    def rows_to_store(self, split: str, results: Iterable[CleanedRow | RowError]) -> Iterator[Row]:
        """Yield the rows of a split that are stored, in order, and quarantine the others.

        `results` has a cleaned row, or the error of an unusable one, for each row of the source.
        """
        for result in results:
            self.rows_read += 1
            if isinstance(result, RowError):
                self.quarantine.add(split, result)
                continue
            error = self._duplicate_or_leak_error(split, result)
            if error is not None:
                self.quarantine.add(split, error)
                continue
            row = result.row
            for name, example in result.warnings.items():
                self._count_warning(name, example)
            answered = AnsweredRow(row_id=row["id"], answer=row["answer"], origin=result.origin)
            repeats_earlier_row = self.seen_rows.add(
                split,
                prompt=result.fingerprint.prompt,
                pictures=result.fingerprint.pictures,
                row=answered,
            )
            if repeats_earlier_row:
                self._count_warning("repeats", row["id"])
            yield row

    def _duplicate_or_leak_error(self, split: str, cleaned: CleanedRow) -> RowError | None:
        """Return the error for a row that must go because of an earlier row; None if it may stay.

        It must go in two cases:

        - An earlier row has its id.
        - It is a training row, and a held-out row has its diagram and question (a leak). With
          `keep_leaks` it stays, and is counted.

        A row that two held-out splits have stays in both, and is counted.
        """
        if not self.seen_rows.add_id(cleaned.row["id"]):
            return cleaned.row_error(
                reason="duplicate_id",
                wrong="another row has this id",
                remedy="give every row an id of its own",
            )
        match = self._held_out_rows.find(split, cleaned.fingerprint)
        if split in HELD_OUT_SPLITS:
            self._held_out_rows.add(split, cleaned.row["id"], cleaned.fingerprint)
        if match is None:
            return None
        self.leaks["found"] += 1
        if len(self.leaks["rows"]) < _MAX_LISTED_LEAKS:
            entry = {"id": cleaned.row["id"], "also": match.row_id, "by": match.comparison}
            self.leaks["rows"].append(entry)
        if self._keep_leaks or split in HELD_OUT_SPLITS:
            return None
        self.leaks["dropped"] += 1
        wrong = (
            f"the diagram and question of {match.row_id} stand in this training row too "
            f"(by {match.comparison} comparison)"
        )
        return cleaned.row_error(
            LEAK_REASON, wrong=wrong, remedy="keep such rows with --keep-leaks"
        )


@dataclass(frozen=True)
class SplitRows:
    """The rows of one split, before any of them is read."""

    # Begins to read, and returns an iterator with one function for each row. Calling the function
    # reads the row, which a worker process can do.
    begin_reading: Callable[[], RowReaders]
    row_count: int | None  # None where it is known only when all rows are read

    @classmethod
    def from_readers(cls, readers: Sequence[Callable[[], RawProblem]]) -> SplitRows:
        """Return the rows of a split that are read by these functions, one for each row."""
        return cls(begin_reading=partial(iter, readers), row_count=len(readers))


class OpenedSource(NamedTuple):
    """A source of rows after it was opened, before a row is read."""

    description: dict[str, Any]  # what the manifest says of the source and the options
    splits: Mapping[str, SplitRows]


@dataclass(frozen=True)
class CleaningOptions:
    """Options on how rows are cleaned, and which are stored; the manifest records them."""

    # Images outside these limits are resized by the rule of the model.
    min_pixels: int | None = None
    max_pixels: int | None = None
    family: str = DEFAULT_FAMILY  # the model_type whose image tokens decide which sizes there are
    limit: int | None = None  # the largest number of rows in a split
    keep_leaks: bool = False  # store training rows that also occur in a held-out split
    # the largest share of unusable rows that is not an error
    allow_quarantined: float = MAX_BROKEN_SHARE

    def pixel_limits(self) -> PixelLimits:
        """Return how many pixels an image may have, by `min_pixels` and `max_pixels`.

        Raises `UserError` for limits that no image could satisfy.
        """
        # An image token is a square of this side.
        token_side = VISION_BY_FAMILY[self.family].token_side
        token_pixels = token_side**2
        for name, value in (("min_pixels", self.min_pixels), ("max_pixels", self.max_pixels)):
            if value is not None and value < token_pixels:
                raise UserError(
                    f"{name}: {value} is less than an image token of {self.family}, {token_pixels}; "
                    "raise it"
                )
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise UserError(
                f"min_pixels: {self.min_pixels} is over max_pixels, {self.max_pixels}; lower it"
            )
        return PixelLimits(
            min_pixels=self.min_pixels or 0,
            max_pixels=self.max_pixels or sys.maxsize,
            token_side=token_side,
        )


def prepare(
    output: Path,
    options: CleaningOptions,
    open_source: Callable[[], OpenedSource],
    features: Features | None = None,
    *,
    workers: int,
    overwrite: bool,
) -> Manifest:
    """Read a source, clean its rows, and write them as a data set; return its manifest.

    Args:
        output: the folder that the data set is written to.
        options: how rows are cleaned, and which are stored.
        open_source: opens the source. It is called once the options and the output folder are known
            to be usable.
        features: the schema of the rows; None for the usual columns alone.
        workers: how many processes read and clean rows.
        overwrite: whether an older data set in `output` is replaced.

    Raises:
        UserError: a wrong option, a source that cannot be read, or too many unusable rows. These
            rows are then in the folder `OUTPUT.quarantine` beside `output`.
    """
    limits = options.pixel_limits()
    quarantine_folder = Path(f"{output.resolve()}.quarantine")
    for folder in (output, quarantine_folder):
        refuse_unknown_files(folder)
    description, splits = open_source()
    # A leak needs two splits. With one alone the hashes that find scaled pictures are not computed,
    # since they take time.
    clean = partial(read_and_clean, limits=limits, with_perceptual_hashes=len(splits) > 1)
    output_folder = complete_or_absent(output, description, overwrite=overwrite)
    with output_folder as folder, SeenRows(folder / "seen.sqlite") as seen_rows:
        quarantine = Quarantine(folder)
        deduplicator = Deduplicator(quarantine, seen_rows, keep_leaks=options.keep_leaks)
        row_counts = _write_splits(
            folder,
            splits,
            clean=clean,
            workers=workers,
            deduplicator=deduplicator,
            features=features or schema(),
        )
        stored = sum(row_counts.values())
        _require_usable_rows(
            deduplicator,
            stored=stored,
            allowed_share=options.allow_quarantined,
            description=description,
            quarantine_folder=quarantine_folder,
        )
        deduplicator.count_shared_pictures()
        seen_rows.close()  # its file must not become part of the data set
        manifest = write_manifest(
            folder, description, counts=row_counts, **deduplicator.manifest_entries()
        )
    remove_quarantine_report(quarantine_folder)
    return manifest


def _write_splits(
    folder: Path,
    splits: Mapping[str, SplitRows],
    *,
    clean: Callable[[Callable[[], RawProblem]], CleanedRow | RowError],
    workers: int,
    deduplicator: Deduplicator,
    features: Features,
) -> dict[str, int]:
    """Write the usable rows of all splits, and return how many each split has.

    Args:
        folder: the data set.
        splits: the rows of each split, which are not read yet.
        clean: reads and cleans a row, in one of the workers.
        workers: how many processes read and clean rows.
        deduplicator: drops rows that an earlier row or a held-out split has.
        features: the schema of the rows.
    """
    row_counts = {}
    with ordered_map(workers) as map_rows:
        for split in _held_out_first(splits):
            row_counts[split] = _write_split(
                folder,
                split=split,
                total=splits[split].row_count,
                results=map_rows(clean, splits[split].begin_reading()),
                deduplicator=deduplicator,
                features=features,
            )
    return row_counts


def _held_out_first(splits: Iterable[str]) -> list[str]:
    """Return splits in the order in which they are read: train and test become test and train.

    A training row is compared with all held-out rows, so the held-out splits come first.
    """
    held_out_splits = [split for split in splits if split in HELD_OUT_SPLITS]
    training_splits = [split for split in splits if split not in HELD_OUT_SPLITS]
    return held_out_splits + training_splits


def _write_split(
    folder: Path,
    *,
    split: str,
    total: int | None,
    results: Iterable[CleanedRow | RowError],
    deduplicator: Deduplicator,
    features: Features,
) -> int:
    """Write the usable rows of one split, and return how many there are.

    Args:
        folder: the data set.
        split: the split.
        total: how many `results` there will be, for the progress bar; None where it is not known.
        results: a cleaned row, or the error of an unusable one, for each row of the source.
        deduplicator: drops rows that an earlier row or a held-out split has.
        features: the schema of the rows.
    """
    with tqdm(results, desc=split, total=total, unit="row", disable=None) as bar:
        rows = deduplicator.rows_to_store(split, bar)
        row_count = write_split(rows, folder=folder, split=split, features=features)
    # Rows with the same question and different answers. They are known only now that all rows are
    # read, so the split is written again without them.
    contradictions = deduplicator.seen_rows.find_contradictions(split)
    if contradictions:
        row_count = write_without_contradictions(
            folder,
            split=split,
            features=features,
            contradictions=contradictions,
            quarantine=deduplicator.quarantine,
        )
    return row_count


def _require_usable_rows(
    deduplicator: Deduplicator,
    *,
    stored: int,
    allowed_share: float,
    description: dict[str, Any],
    quarantine_folder: Path,
) -> None:
    """Raise `UserError` for a source without rows, or with too many that cannot be used.

    Args:
        deduplicator: has the number of rows and the quarantine.
        stored: how many rows are stored.
        allowed_share: the share of rows that may be unusable.
        description: what the manifest says of the source.
        quarantine_folder: where the user finds the unusable rows if there are too many.
    """
    # An empty source is no data set, and no share of its rows can be checked.
    if not deduplicator.rows_read:
        raise UserError(f"input: {description['input']!r} has no rows; give data that has some")
    try:
        deduplicator.quarantine.check(
            rows=deduplicator.rows_read,
            stored=stored,
            allowed_share=allowed_share,
            quarantine_folder=quarantine_folder,
        )
    except UserError:
        _keep_unusable_rows(quarantine_folder, deduplicator.quarantine, description)
        raise


def _keep_unusable_rows(
    quarantine_folder: Path, quarantine: Quarantine, description: dict[str, Any]
) -> None:
    """Move the unusable rows into `quarantine_folder`, since this preparation fails.

    `description` is what the manifest there says of the source.

    Raises `UserError` where a data set stands in that folder.
    """
    if (read_manifest(quarantine_folder) or {}).get("counts"):
        raise UserError(
            f"output: {str(quarantine_folder)!r} holds a dataset, where the refused rows should "
            "go; move it away"
        ) from None
    with complete_or_absent(quarantine_folder) as folder:
        quarantine.move_to(folder)
        write_manifest(folder, description, counts={}, quarantined=quarantine.summary())
