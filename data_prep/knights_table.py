"""Knights and knaves as ADORA's own repository has them: Parquet files with `quiz`, `names`, `solution`, `statements`.

Source: `ADORA/data/kk/instruct/Nppl/{train,test}.parquet` of ShadeCloak/ADORA, from the generator of arXiv 2410.23123.
A puzzle is taken only if its statements, read by logic, have the given solution and no other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa  # pyarrow ships no types
import pyarrow.parquet as pq  # pyarrow ships no types

from adora_vl.errors import UserError, in_one_line
from data_prep.knights import PEOPLE, ROLES, example_answer, puzzle_row
from data_prep.schema import Row
from data_prep.storage import SPLITS

COLUMNS = ("quiz", "names", "solution", "statements", "extra_info")
BOX = "Put the answer in a box, like \\boxed{{{example}}}."
# What may follow the quiz: our own way to ask for a box, or nothing, where the system prompt says how to answer.
QUESTIONS = ("box", "plain")


def holds(claim: Any, is_knight: tuple[bool, ...]) -> bool:
    """Whether a claim such as `("or", ("telling-truth", 1), ("lying", 2))` is true of these people, numbered from 0.

    Raises `ValueError` for a claim of another form.
    """
    match claim:
        case ("telling-truth", int(person)) if person in range(len(is_knight)):
            return is_knight[person]
        case ("lying", int(person)) if person in range(len(is_knight)):
            return not is_knight[person]
        case ("not", inner):
            return not holds(inner, is_knight)
        case ("and", *parts) if parts:
            return all(holds(part, is_knight) for part in parts)
        case ("or", *parts) if parts:
            return any(holds(part, is_knight) for part in parts)
        case ("->", first, second):
            return holds(second, is_knight) or not holds(first, is_knight)
        case ("<=>", first, second):
            return holds(first, is_knight) == holds(second, is_knight)
        case _:
            raise ValueError(f"{str(claim)[:60]!r} is no claim about knights and knaves")


def fitting(claims: tuple[Any, ...]) -> list[tuple[bool, ...]]:
    """Every way to call people knights in which knights, and they alone, say what is true. Person i makes claim i."""
    assignments = product((True, False), repeat=len(claims))
    return [kinds for kinds in assignments if all(holds(c, kinds) == k for c, k in zip(claims, kinds, strict=True))]


def read_puzzles(location: Path, question: str) -> dict[str, list[Row]]:
    """The rows of a file, or of all Parquet files in a folder at any depth, by split.

    `question`: one of `QUESTIONS`. Raises `UserError` naming the file and the row.
    """
    files = sorted(location.rglob("*.parquet")) if location.is_dir() else [location]
    if not files or not files[0].is_file():
        raise UserError(f"input: {str(location)!r} has no Parquet file; give the reference's data/kk, or a file of it")
    by_split: dict[str, list[Row]] = {}
    seen: dict[str, str] = {}
    for file in files:
        for index, record in enumerate(_records(file)):
            place = f"row {index} of {file}"
            row = _row(record, place, question)
            if row["problem"] in seen:
                raise UserError(f"input: {place} has the same puzzle as {seen[row['problem']]}; leave one file out")
            seen[row["problem"]] = place
            rows = by_split.setdefault(row["split"], [])
            row["id"] = f"knights/reference/{row['split']}/{len(rows)}"
            rows.append(row)
    if not by_split:
        raise UserError(f"input: {str(location)!r} has no rows; give files that have some")
    return {split: by_split[split] for split in SPLITS if split in by_split}


def _records(file: Path) -> Iterator[dict[str, Any]]:
    try:
        table = pq.ParquetFile(file)
        missing = [name for name in COLUMNS if name not in table.schema_arrow.names]
        if missing:
            raise UserError(
                f"input: {str(file)!r} has no column {missing[0]!r}; it is no file of the reference's data/kk"
            )
        yield from table.read(columns=[*COLUMNS]).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"input: {str(file)!r} cannot be read ({in_one_line(error)}); download it again") from error


def _row(record: Mapping[str, Any], place: str, question: str) -> Row:
    try:
        names, solution, split = record["names"], record["solution"], record["extra_info"]["split"]
        claims = ast.literal_eval(record["statements"])
        if not PEOPLE[0] <= len(names) <= PEOPLE[1] or not all(
            isinstance(name, str) and name.isalpha() for name in names
        ):
            raise ValueError(f"names is {names!r}, and not {PEOPLE[0]} to {PEOPLE[1]} words")
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}, and not one of {', '.join(SPLITS)}")
        if not len(claims) == len(solution) == len(set(names)) == len(names):
            raise ValueError(f"{len(claims)} statements and {len(solution)} solutions for {len(set(names))} people")
        if fitting(claims) != [tuple(solution)]:
            raise ValueError("solution is not the only one that fits the statements")
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"input: {place}: {in_one_line(error)}; leave the row out") from error
    gold = ", ".join(f"{name} is a {ROLES[kind]}" for name, kind in zip(names, solution, strict=True))
    asked = f" {BOX.format(example=example_answer(names))}" if question == "box" else ""
    return puzzle_row("", record["quiz"].strip() + asked, gold, people=len(names), split=split)
