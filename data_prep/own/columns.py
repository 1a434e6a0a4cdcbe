"""Which columns of a stranger's table are the problem, the answer, the images: `problem=question answer=label`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from datasets import Features, Value

from adora_vl.errors import UserError, nearest
from data_prep.schema import FEATURES

OURS = ("problem", "answer", "images", "choices", "id")
_NEEDED = ("problem", "answer")
_LISTED = ("images", "choices")  # may be spread over several columns
# Columns of the schema that a row gets anyway, and names by which TRL hands other things to a reward function.
_TAKEN = (
    *FEATURES, "image", "prompt", "prompts", "completions", "completion_ids", "trainer_state", "environments",
    "log_extra", "log_metric", "columns", "kwargs", "self",
)  # fmt: skip
_SHOWN = 20  # names in a message
_COMPARED = 1000  # names that may be meant by a wrong one


@dataclass(frozen=True)
class Columns:
    """Their names in the table. `images` and `choices`: one column that holds all, or several that hold one each.

    `extras`: columns of the user's own, our name to theirs, kept as texts for prompts and rewards.
    """

    problem: str
    answer: str
    images: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    id: str | None = None
    extras: tuple[tuple[str, str], ...] = ()

    @property
    def wanted(self) -> list[str]:
        """Every column that is read, each once."""
        own = (theirs for _, theirs in self.extras)
        one = () if self.id is None else (self.id,)
        return list(dict.fromkeys((self.problem, self.answer, *self.images, *self.choices, *one, *own)))

    @property
    def features(self) -> Features:
        """The schema of the rows: ours, and the extras behind it."""
        return Features({**FEATURES, **{name: Value("string") for name, _ in self.extras}})

    def described(self) -> dict[str, Any]:
        """As it stands in the manifest, and as `columns_from` reads it."""
        found: dict[str, Any] = {"problem": self.problem, "answer": self.answer}
        for name, theirs in (("images", self.images), ("choices", self.choices)):
            if theirs:
                found[name] = theirs[0] if len(theirs) == 1 else list(theirs)
        return {**found, **({} if self.id is None else {"id": self.id}), **dict(self.extras)}


def columns_from(mapping: Mapping[str, Any], key: str) -> Columns:
    """Read a mapping from our names to the table's; `key` begins the messages. Raises `UserError`.

    `images` and `choices` may be a list of columns, or names with commas between them.
    """
    for name in _NEEDED:
        if name not in mapping:
            close = nearest(name, [str(given) for given in mapping if given not in OURS])
            raise UserError(
                f"{key}: {name} is missing{close}; write {name}=COLUMN, the column of the table that has it"
            )
    found: dict[str, tuple[str, ...]] = {}
    for name, theirs in mapping.items():
        words = list(theirs) if isinstance(theirs, list | tuple) else str(theirs).split(",")
        if not all(isinstance(word, str) and word.strip() for word in words) or isinstance(theirs, Mapping):
            raise UserError(f"{key}: {name}={theirs!r:.60} is not the name of a column; write one")
        if len(words) > 1 and name not in _LISTED:
            raise UserError(
                f"{key}: {name}={theirs!r:.60} names {len(words)} columns; only {' and '.join(_LISTED)} may"
            )
        found[str(name)] = tuple(word.strip() for word in words)
    extras = tuple((name, theirs[0]) for name, theirs in found.items() if name not in OURS)
    for name, _ in extras:
        if not name.isidentifier() or name in _TAKEN:
            raise UserError(
                f"{key}: {name!r} cannot be the name of a column of your own{nearest(name, OURS)}; ours are "
                f"{', '.join(OURS)}, and others are plain words that are not taken"
            )
    return Columns(
        found["problem"][0], found["answer"][0], found.get("images", ()), found.get("choices", ()),
        found["id"][0] if "id" in found else None, extras,
    )  # fmt: skip


def columns_of_words(words: Sequence[str]) -> Columns:
    """The same from the command line: `problem=question answer=label`. Raises `UserError`."""
    mapping: dict[str, str] = {}
    for word in words:
        name, sign, theirs = word.partition("=")
        if not sign or not name:
            raise UserError(f"--columns: {word!r:.60} is not NAME=COLUMN, such as problem=question")
        if name in mapping:
            raise UserError(f"--columns: {name} is given twice, {mapping[name]!r:.60} and {theirs!r:.60}; give one")
        mapping[name] = theirs
    return columns_from(mapping, "--columns")


def require_columns(columns: Columns, present: Iterable[str], where: str) -> None:
    """Raise `UserError` for a named column that the table `where` lacks."""
    there = list(present)
    known = set(there)
    for name in columns.wanted:
        if name not in known:
            more = f", ... ({len(there)} columns)" if len(there) > _SHOWN else ""
            close = nearest(name, islice(there, _COMPARED))
            listed = ", ".join(f"{column:.40}" for column in there[:_SHOWN]) or "none"
            raise UserError(f"columns: {where} has no column {name!r:.60}{close}; it has {listed}{more}")
