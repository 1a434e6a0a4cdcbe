"""Prepares generated data (drawn geometry, puzzles): writes the rows and a manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm import tqdm

from adora_vl.data.dataset import Manifest, Row, read_manifest, require, write_manifest, write_split
from adora_vl.utils.errors import UserError
from data_prep import knights
from data_prep.knights import PEOPLE, QUESTIONS, read_puzzles
from data_prep.output import complete_or_absent
from data_prep.problem import checked_gold
from data_prep.synthetic.generate import generate

# A revision stands for the rows that equal arguments give. Change it where drawing or wording gives other rows, which
# tests/unit/data_prep/test_synthetic.py notices: cached data is then drawn anew, and no run resumes on the old rows.
SYNTHETIC_REVISION = "c3064087ddd5c7de8ef695622661f522c7274cb74744a62006bff839e355686e"
KNIGHTS_REVISION = "09d4eb893ffe4b46ba1f27f32b4d5b009ce8fb5ebcd1e37a8145a250cb069dab"
DEFAULT_TEST_ROWS = 512
DEFAULT_SIZE = 56
MAX_ROWS = 10_000_000
SIZES = (28, 1024)  # below, a label is not readable; above, the oversampled canvas takes gigabytes


def prepare_synthetic(
    output: Path,
    *,
    rows: int,
    test_rows: int = DEFAULT_TEST_ROWS,
    seed: int = 0,
    size: int = DEFAULT_SIZE,
    families: tuple[str, ...] = (),
    overwrite: bool = False,
    **more: Any,
) -> Manifest:
    """Draw the splits train (`rows`) and test (`test_rows`). Returns the manifest. Raises `UserError`.

    `overwrite`: replace another prepared dataset at `output`. `more`: `level`, `styles`, `choices`, as of `generate`.
    """
    sizes = _sizes(rows, test_rows)
    require("size", size, *SIZES)
    description = _synthetic_description(rows, test_rows, seed, size, families, **more)
    drawn = {
        split: generate(count, split=split, seed=seed, size=size, families=families, **more)
        for split, count in sizes.items()
    }
    return _write(output, {split: _canonical(drawn[split]) for split in drawn}, sizes, description, overwrite)


def _sizes(rows: int, test_rows: int) -> dict[str, int]:
    """The rows of each split that has any. Raises `UserError`."""
    require("rows", rows, 1, MAX_ROWS)
    require("test_rows", test_rows, 0, MAX_ROWS)
    return {split: count for split, count in (("train", rows), ("test", test_rows)) if count}


def ensure_synthetic(folder: Path, *, rows: int, test_rows: int, seed: int, size: int) -> Path:
    """Make sure that `folder` holds the synthetic dataset with these arguments, and make it if it does not.

    Several processes may call this at once: one makes the dataset, the others wait. Raises `UserError` if the folder
    holds anything other than a synthetic dataset.
    """
    wanted = _synthetic_description(rows, test_rows, seed, size, ())
    make = partial(prepare_synthetic, rows=rows, test_rows=test_rows, seed=seed, size=size, overwrite=True)
    return _ensure(Path(folder), wanted, make)


def _ensure(folder: Path, wanted: Manifest, make: Callable[[Path], Manifest]) -> Path:
    if _is_made(folder, wanted):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = folder.resolve()
    with FileLock(place.with_name(f".{place.name}.lock")):
        if not _is_made(folder, wanted):
            manifest = read_manifest(folder)
            if manifest is not None and manifest["source"] != wanted["source"]:
                raise UserError(
                    f"dataset: {str(folder)!r} holds {manifest['source']!r}, not {wanted['source']} data; choose "
                    "another folder"
                )
            make(folder)
    return folder


def prepare_knights(
    output: Path,
    *,
    rows: int,
    test_rows: int = DEFAULT_TEST_ROWS,
    seed: int = 0,
    people: tuple[int, int] = PEOPLE,
    overwrite: bool = False,
) -> Manifest:
    """Write knights-and-knaves puzzles, splits train and test. Returns the manifest. Raises `UserError`.

    `overwrite`: replace another prepared dataset at `output`.
    """
    sizes = _sizes(rows, test_rows)
    puzzles = {split: knights.generate(count, split=split, seed=seed, people=people) for split, count in sizes.items()}
    return _write(output, puzzles, sizes, _knights_description(rows, test_rows, seed, people), overwrite)


def prepare_knights_table(
    output: Path, location: Path, *, question: str = QUESTIONS[0], overwrite: bool = False
) -> Manifest:
    """Write the puzzles of the reference's Parquet file or folder `location`, under the splits that its rows name.

    `question`: `box` appends how to answer, `plain` leaves that to the system prompt. Returns the manifest. Raises
    `UserError`.
    """
    puzzles = read_puzzles(location, question)
    texts = "\n".join(f"{row['split']}\t{row['problem']}\t{row['answer']}" for rows in puzzles.values() for row in rows)
    description = {
        "source": "knights",
        "input": str(location),
        "revision": hashlib.sha256(texts.encode()).hexdigest(),
        "arguments": {"source": "parquet", "question": question},
    }
    sizes = {split: len(rows) for split, rows in puzzles.items()}
    return _write(output, puzzles, sizes, description, overwrite)


def ensure_knights(folder: Path, *, rows: int, test_rows: int, people: tuple[int, int], seed: int = 0) -> Path:
    """Like `ensure_synthetic`, but for puzzles."""
    wanted = _knights_description(rows, test_rows, seed, people)
    make = partial(prepare_knights, rows=rows, test_rows=test_rows, seed=seed, people=people, overwrite=True)
    return _ensure(folder, wanted, make)


def _knights_description(rows: int, test_rows: int, seed: int, people: tuple[int, int]) -> Manifest:
    return {
        "source": "knights",
        "input": None,
        "revision": KNIGHTS_REVISION,
        "arguments": {"rows": rows, "test_rows": test_rows, "seed": seed, "people": list(people)},
    }


def _is_made(folder: Path, wanted: Manifest) -> bool:
    manifest = read_manifest(folder)
    if manifest is None or any(manifest.get(key) != value for key, value in wanted.items()):
        return False
    return all((folder / name).is_file() for name in manifest["files"])


def _synthetic_description(
    rows: int, test_rows: int, seed: int, size: int, families: tuple[str, ...], **more: Any
) -> Manifest:
    """What determines the rows: the arguments and the revision of the drawing code."""
    arguments = {"rows": rows, "test_rows": test_rows, "seed": seed, "size": size, "families": families, **more}
    as_json = {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()}
    return {"source": "synthetic", "input": None, "revision": SYNTHETIC_REVISION, "arguments": as_json}


def _write(
    output: Path,
    splits: Mapping[str, Iterable[Row]],
    sizes: Mapping[str, int],
    description: Mapping[str, Any],
    overwrite: bool,
) -> Manifest:
    """Write the splits and the manifest into `output`. Two equal preparations give equal bytes."""
    with complete_or_absent(output, description, overwrite=overwrite) as folder:
        counts = {
            split: write_split(tqdm(rows, desc=split, total=sizes[split], unit="row", disable=None), folder, split)
            for split, rows in splits.items()
        }
        return write_manifest(folder, description, counts)


def _canonical(rows: Iterable[Row]) -> Iterator[Row]:
    for row in rows:
        answer = checked_gold(row["answer"], row["choices"], row_id=row["id"], origin="data_prep/synthetic")
        yield {**row, "answer": answer}
