"""Prepares generated data (drawn geometry, puzzles): writes the rows and a manifest."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from adora_vl.synthetic.generate import (
    FIGURE_COLUMNS,
    draw_problems,
    facts_and_figure,
    row_of,
)
from adora_vl.synthetic.knights import PEOPLE, read_puzzles
from adora_vl.utils.errors import UserError

# A revision stands for the rows that equal arguments give. Change it where drawing or wording gives
# other rows, which tests/unit/data_prep/test_synthetic.py notices: cached data is then drawn anew,
# and no run resumes on the old rows.
SYNTHETIC_REVISION = "c3064087ddd5c7de8ef695622661f522c7274cb74744a62006bff839e355686e"
KNIGHTS_REVISION = "09d4eb893ffe4b46ba1f27f32b4d5b009ce8fb5ebcd1e37a8145a250cb069dab"
DEFAULT_TEST_ROWS = 512
DEFAULT_SIZE = 56


Draw = Callable[[int, str], Iterable[Row]]  # so many rows of a split


@dataclass(frozen=True)
class Drawn:
    """A data set that is drawn instead of read."""

    sizes: dict[str, int]  # of its splits
    draw: Draw
    # what determines the rows, the arguments and the revision of the drawing code
    description: dict[str, Any]
    further_columns: tuple[str, ...] = ()  # texts behind the columns of the schema


def synthetic(
    *,
    rows: int,
    test_rows: int = DEFAULT_TEST_ROWS,
    seed: int = 0,
    size: int = DEFAULT_SIZE,
    families: tuple[str, ...] = (),
    figures: bool = False,
    **options: Any,
) -> Drawn:
    """Describe a data set of geometry problems with the splits train and test.

    `options` are further arguments of `generate`. With `figures` each row has its text form
    (`facts`) and the figure that is solved from it, on which a reward can check steps.

    Raises `UserError` as `generate`, when its rows are drawn.
    """
    arguments = {"seed": seed, "size": size, "families": families, **options}
    n_choices = options.pop("choices", 0)

    def draw(count: int, split: str) -> Iterator[Row]:
        problems = draw_problems(
            count, split=split, seed=seed, size=size, families=families, **options
        )
        for index, problem in enumerate(problems):
            row = row_of(problem, split=split, index=index, seed=seed, n_choices=n_choices)
            row["answer"] = canonical_gold(row["answer"])
            yield {**row, **facts_and_figure(problem)} if figures else row

    if figures:  # a description without it stays what it was
        arguments["figures"] = True

    drawn = _drawn(
        "synthetic",
        revision=SYNTHETIC_REVISION,
        draw=draw,
        rows=rows,
        test_rows=test_rows,
        arguments=arguments,
    )
    return replace(drawn, further_columns=FIGURE_COLUMNS if figures else ())


def puzzles(
    *,
    rows: int,
    test_rows: int = DEFAULT_TEST_ROWS,
    seed: int = 0,
    people: tuple[int, int] = PEOPLE,
) -> Drawn:
    """Describe a data set of knights-and-knaves puzzles with the splits train and test.

    Raises `UserError` as `knights.generate`, when its rows are drawn.
    """
    arguments: dict[str, Any] = {"seed": seed, "people": people}

    return _drawn(
        "knights",
        revision=KNIGHTS_REVISION,
        draw=partial(knights.generate, **arguments),
        rows=rows,
        test_rows=test_rows,
        arguments=arguments,
    )


def _drawn(
    source: str,
    revision: str,
    draw: Draw,
    rows: int,
    test_rows: int,
    arguments: Mapping[str, Any],
) -> Drawn:
    """Describe a drawn data set, with its arguments as JSON will have them."""
    as_json = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in arguments.items()
    }
    sizes = {split: count for split, count in (("train", rows), ("test", test_rows)) if count}
    description = {
        "source": source,
        "input": None,
        "revision": revision,
        "arguments": {"rows": rows, "test_rows": test_rows, **as_json},
    }
    return Drawn(sizes, draw, description)


def prepare_drawn(output: Path, drawn: Drawn, *, overwrite: bool = False) -> Manifest:
    """Write the splits of a drawn data set and its manifest, and return the manifest.

    Two equal preparations give equal bytes. `overwrite` replaces another prepared data set.

    Raises `UserError` where `output` cannot be written, or the rows cannot be drawn.
    """
    # Imported here, since it takes seconds, and a command that only prints its help needs it not.
    from datasets import Features, Value

    further_columns = {column: Value("string") for column in drawn.further_columns}
    features = Features({**schema(), **further_columns})
    with complete_or_absent(output, drawn.description, overwrite=overwrite) as folder:
        counts = {}
        for split, size in drawn.sizes.items():
            rows = tqdm(drawn.draw(size, split), desc=split, total=size, unit="row", disable=None)
            counts[split] = write_split(rows, folder, split, features)
        return write_manifest(folder, drawn.description, counts)


def ensure_drawn(folder: Path, drawn: Drawn) -> Path:
    """Make a drawn data set unless `folder` holds it already.

    If several processes call this at once, a lock lets one of them make it.

    Raises `UserError` if the folder holds a data set of another kind.
    """
    description = drawn.description
    if _is_made(folder, description):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.resolve()
    with FileLock(path.with_name(f".{path.name}.lock")):
        if not _is_made(folder, description):
            manifest = read_manifest(folder)
            if manifest is not None and manifest["source"] != description["source"]:
                holds = f"{str(folder)!r} holds {manifest['source']!r}, not {description['source']} data"
                raise UserError(f"dataset: {holds}; choose another folder")
            prepare_drawn(folder, drawn, overwrite=True)
    return folder


def prepare_knights_table(
    output: Path, location: Path, *, question: str = "box", overwrite: bool = False
) -> Manifest:
    """Write the puzzles of the reference's Parquet file or folder, in the splits that its rows name.

    The `question` `box` appends how to answer; `plain` leaves that to the system prompt.

    Raises `UserError` as `read_puzzles` and `prepare_drawn`.
    """
    rows_by_split = read_puzzles(location, question)
    texts = "\n".join(
        f"{row['split']}\t{row['problem']}\t{row['answer']}"
        for rows in rows_by_split.values()
        for row in rows
    )
    revision = hashlib.sha256(texts.encode()).hexdigest()
    arguments = {"source": "parquet", "question": question}
    description = {
        "source": "knights",
        "input": str(location),
        "revision": revision,
        "arguments": arguments,
    }
    table = Drawn(
        {split: len(rows) for split, rows in rows_by_split.items()},
        lambda _, split: rows_by_split[split],
        description,
    )
    return prepare_drawn(output, table, overwrite=overwrite)


def _is_made(folder: Path, description: Manifest) -> bool:
    """Return whether a folder holds a data set of this description, with all its files."""
    manifest = read_manifest(folder)
    if manifest is None or any(manifest.get(key) != value for key, value in description.items()):
        return False
    return all((folder / name).is_file() for name in manifest["files"])
