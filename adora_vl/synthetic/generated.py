"""Prepares generated data (drawn geometry, puzzles): writes the rows and a manifest."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm import tqdm

from adora_vl.data.dataset import (
    Manifest,
    Row,
    read_manifest,
    schema,
    write_manifest,
    write_split,
)
from adora_vl.data.output import complete_or_absent
from adora_vl.rewards import canonical_gold
from adora_vl.synthetic import knights
from adora_vl.synthetic.generate import FIGURE_COLUMNS, generate
from adora_vl.synthetic.knights import PEOPLE_RANGE, read_puzzles
from adora_vl.utils.errors import UserError

# A revision stands for the rows that equal arguments give. Change it where drawing or wording gives
# other rows, which tests/unit/data_prep/test_synthetic.py notices: cached data is then drawn anew,
# and no run resumes on the old rows.
SYNTHETIC_REVISION = "c3064087ddd5c7de8ef695622661f522c7274cb74744a62006bff839e355686e"
KNIGHTS_REVISION = "09d4eb893ffe4b46ba1f27f32b4d5b009ce8fb5ebcd1e37a8145a250cb069dab"
DEFAULT_TEST_ROWS = 512
DEFAULT_SIZE = 56


# Draws rows of a data set. Arguments: how many rows, and of which split.
DrawRows = Callable[[int, str], Iterable[Row]]


@dataclass(frozen=True)
class DrawnDataset:
    """A data set that is drawn instead of read."""

    row_counts: dict[str, int]  # how many rows each split has
    draw: DrawRows  # draws the rows of a split, and is called when the data set is written
    # What determines the rows: the arguments, and the revision of the code that draws.
    description: dict[str, Any]
    further_columns: tuple[str, ...] = ()  # of texts, behind the columns of the schema


def describe_synthetic(
    *, rows: int, test_rows: int = DEFAULT_TEST_ROWS, **options: Any
) -> DrawnDataset:
    """Return a data set of drawn geometry problems with the splits train and test.

    Nothing is drawn before `prepare_drawn` writes it.

    Args:
        rows: how many rows the split train has.
        test_rows: how many rows the split test has.
        options: further arguments of `generate`, which also says what is raised.
    """
    arguments = {"seed": 0, "size": DEFAULT_SIZE, "families": (), **options}

    def draw(count: int, split: str) -> Iterator[Row]:
        """Draw `count` rows of a split, with the reference answers as the grader spells them."""
        for row in generate(count, split=split, **arguments):
            row["answer"] = canonical_gold(row["answer"])
            yield row

    return _describe_drawn(
        "synthetic",
        revision=SYNTHETIC_REVISION,
        draw=draw,
        rows=rows,
        test_rows=test_rows,
        arguments=arguments,
        further_columns=FIGURE_COLUMNS if arguments.get("figures") else (),
    )


def describe_puzzles(
    *,
    rows: int,
    test_rows: int = DEFAULT_TEST_ROWS,
    seed: int = 0,
    people: tuple[int, int] = PEOPLE_RANGE,
) -> DrawnDataset:
    """Return a data set of drawn knights-and-knaves puzzles with the splits train and test.

    `people` is the smallest and the largest number of people in a puzzle. Nothing is drawn before
    `prepare_drawn` writes the data set; `knights.generate` says what is then raised.
    """
    arguments: dict[str, Any] = {"seed": seed, "people": people}
    return _describe_drawn(
        "knights",
        revision=KNIGHTS_REVISION,
        draw=partial(knights.generate, **arguments),
        rows=rows,
        test_rows=test_rows,
        arguments=arguments,
    )


def _describe_drawn(
    source: str,
    revision: str,
    draw: DrawRows,
    rows: int,
    test_rows: int,
    arguments: Mapping[str, Any],
    further_columns: tuple[str, ...] = (),
) -> DrawnDataset:
    """Return a data set of generated rows, with the description that its manifest will have.

    A data set in the cache is used again if its manifest has the same description.

    Args:
        source: the kind of data, `synthetic` or `knights`.
        revision: stands for the code that draws, and changes where that draws other rows.
        draw: draws rows. Its arguments are their number and the split.
        rows: how many rows the split train has.
        test_rows: how many rows the split test has.
        arguments: of the drawing, by their names.
        further_columns: columns of texts behind those of the schema.
    """
    # A manifest is JSON, which has no tuples.
    json_arguments = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in arguments.items()
    }
    row_counts = {"train": rows}
    if test_rows:
        row_counts["test"] = test_rows
    description = {
        "source": source,
        "input": None,
        "revision": revision,
        "arguments": {"rows": rows, "test_rows": test_rows, **json_arguments},
    }
    return DrawnDataset(
        row_counts=row_counts, draw=draw, description=description, further_columns=further_columns
    )


def prepare_drawn(output: Path, drawn: DrawnDataset, *, overwrite: bool = False) -> Manifest:
    """Draw the splits of a data set, write them with a manifest, and return the manifest.

    Equal data sets give equal bytes. `overwrite`: whether another prepared data set in `output` is
    replaced.

    Raises `UserError` where `output` cannot be written, or the rows cannot be drawn.
    """
    # Imported here, since it takes seconds, and a command that only prints its help needs it not.
    from datasets import Features, Value

    further_columns = {column: Value("string") for column in drawn.further_columns}
    features = Features({**schema(), **further_columns})
    with complete_or_absent(output, drawn.description, overwrite=overwrite) as folder:
        stored_counts = {}
        for split, row_count in drawn.row_counts.items():
            rows = drawn.draw(row_count, split)
            rows_with_bar = tqdm(rows, desc=split, total=row_count, unit="row", disable=None)
            stored_counts[split] = write_split(
                rows_with_bar, folder=folder, split=split, features=features
            )
        return write_manifest(folder, drawn.description, stored_counts)


def ensure_drawn(folder: Path, drawn: DrawnDataset) -> Path:
    """Draw and write a data set unless `folder` holds it already, and return the folder.

    If several processes call this at once, a lock lets one of them make it.

    Raises `UserError` if the folder holds a data set of another source.
    """
    description = drawn.description
    if _holds_dataset(folder, description):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.resolve()
    with FileLock(path.with_name(f".{path.name}.lock")):
        # Another process may have made it while this one waited for the lock.
        if not _holds_dataset(folder, description):
            manifest = read_manifest(folder)
            if manifest is not None and manifest["source"] != description["source"]:
                raise UserError(
                    f"dataset: {str(folder)!r} holds {manifest['source']!r}, not "
                    f"{description['source']} data; choose another folder"
                )
            prepare_drawn(folder, drawn, overwrite=True)
    return folder


def prepare_knights_table(
    output: Path, location: Path, *, question: str = "box", overwrite: bool = False
) -> Manifest:
    """Write the published puzzles of a Parquet file or folder, in the splits that its rows name.

    With the `question` `box` a puzzle ends with how to answer; `plain` leaves that to the system
    prompt. Returns the manifest.

    Raises `UserError` as `read_puzzles` and `prepare_drawn`.
    """
    rows_by_split = read_puzzles(location, question)
    texts = "\n".join(
        f"{row['split']}\t{row['problem']}\t{row['answer']}"
        for rows in rows_by_split.values()
        for row in rows
    )
    description = {
        "source": "knights",
        "input": str(location),
        "revision": hashlib.sha256(texts.encode()).hexdigest(),
        "arguments": {"source": "parquet", "question": question},
    }
    puzzles = DrawnDataset(
        row_counts={split: len(rows) for split, rows in rows_by_split.items()},
        draw=lambda count, split: rows_by_split[split],  # they are all read already
        description=description,
    )
    return prepare_drawn(output, puzzles, overwrite=overwrite)


def _holds_dataset(folder: Path, description: Manifest) -> bool:
    """Return whether a folder holds a data set of this description, with all its files."""
    manifest = read_manifest(folder)
    if manifest is None or any(manifest.get(key) != value for key, value in description.items()):
        return False
    return all((folder / name).is_file() for name in manifest["files"])
