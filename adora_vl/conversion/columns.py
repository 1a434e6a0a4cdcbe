"""Which columns of a stranger's table are the problem, the answer, the images: `problem=question
answer=label`.

`PRESETS` knows them of published data sets, and of the rows of other trainers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from adora_vl.data.dataset import COLUMNS, schema
from adora_vl.utils.cli import read_json
from adora_vl.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from datasets import Features

OURS = ("problem", "answer", "images", "choices", "id")
# Of how columns are read, beside their names.
OPTIONS = ("decimal_comma", "answer_is", "image_dir", "text_answers", "keep_options_in_text")
_SWITCHES = ("decimal_comma", "text_answers", "keep_options_in_text")
# one of the options, or its place, counted from 0 or from 1
ANSWER_IS = (
    "value",
    "index",
    "index-from-1",
)
_NEEDED = ("problem", "answer")
_LISTED = ("images", "choices")  # may be spread over several columns
# Names that a column of the user's own cannot have: those of the schema, those that TRL gives to a
# reward function, and the one by which a template lists the choices.
_TAKEN = (
    *COLUMNS,
    "image",
    "prompt",
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "environments",
    "log_extra",
    "log_metric",
    "columns",
    "kwargs",
    "self",
    "multiple_choice",
)
_SHOWN = 20  # names in a message
_COMPARED = 1000  # names that a wrong one is compared with


@dataclass(frozen=True)
class Columns:
    """Their names in the table.

    A dot leads into an object, and `a|b` is whichever of the two there is.
    """

    problem: str
    answer: str
    images: tuple[str, ...] = ()  # one column that holds all, or several that hold one each
    choices: tuple[str, ...] = ()  # as images
    id: str | None = None
    extras: tuple[
        tuple[str, str], ...
    ] = ()  # the user's own, our name to theirs: texts for prompts and rewards
    optional: tuple[str, ...] = ()  # columns that a table may lack
    pictured: bool = False  # a row without an image is broken
    decimal_comma: bool = False  # `52,5` in an answer or option is a number
    answer_is: str = ""  # of `ANSWER_IS`: what a whole number beside choices is
    image_dir: str = ""  # where the paths of images begin, in place of the table's folder
    text_answers: bool = False  # a sentence is a reference answer too
    keep_options_in_text: bool = False  # options in the problem's text do not become choices

    @property
    def wanted(self) -> list[str]:
        own = (theirs for _, theirs in self.extras)
        one = () if self.id is None else (self.id,)
        return list(
            dict.fromkeys((self.problem, self.answer, *self.images, *self.choices, *one, *own))
        )

    def held_by(self, present: Iterable[str]) -> list[str]:
        """The columns of a table that have to be read for these."""
        known = set(present)
        return list(
            dict.fromkeys(place for name in self.wanted for place, _ in _places(name, known))
        )

    @property
    def features(self) -> Features:
        """The schema of the rows: ours, and the extras behind it."""
        from datasets import Features, Value

        return Features({**schema(), **{name: Value("string") for name, _ in self.extras}})

    def described(self) -> dict[str, Any]:
        """As it stands in the manifest, and as `columns_from` reads it."""
        found: dict[str, Any] = {"problem": self.problem, "answer": self.answer}
        for name, theirs in (("images", self.images), ("choices", self.choices)):
            if theirs:
                found[name] = theirs[0] if len(theirs) == 1 else list(theirs)
        found |= {name: value for name in OPTIONS if (value := getattr(self, name))}
        return {**found, **({} if self.id is None else {"id": self.id}), **dict(self.extras)}


@dataclass(frozen=True)
class Preset:
    id: str | None  # of a data set on the hub, None for a form of rows
    columns: Columns


_GEOMETRY3K = Columns(
    problem="problem",
    answer="answer",
    images=("images",),
    choices=("choices",),
    id="id",
    optional=("choices", "id"),
    pictured=True,
    answer_is="value",
)
_CHAT = "messages|conversations"  # the answer is in it too
_QUESTIONS = "messages|query|conversations|prompt|problem|question"
_SOLUTIONS = f"solution|response|{_CHAT}"
_ONE = ("images",)
_EITHER = ("images|image",)
PRESETS = {
    "geometry3k": Preset("hiyouga/geometry3k", _GEOMETRY3K),
    "easyr1": Preset(
        None, Columns(problem="prompt|problem", answer="answer", images=_ONE, optional=_ONE)
    ),
    "verl": Preset(
        None,
        Columns(problem="prompt", answer="reward_model.ground_truth", images=_ONE, optional=_ONE),
    ),
    "swift": Preset(
        None, Columns(problem=_QUESTIONS, answer=_SOLUTIONS, images=_EITHER, optional=_EITHER)
    ),
    "llamafactory": Preset(
        None, Columns(problem=_CHAT, answer=_CHAT, images=_EITHER, optional=_EITHER)
    ),
}


def columns_from(mapping: Mapping[str, Any], key: str) -> Columns:
    """Read a mapping from our names to the table's columns; `key` begins the messages.

    Raises `UserError`.
    """
    for name in _NEEDED:
        if name not in mapping:
            close = did_you_mean(name, [str(given) for given in mapping if given not in OURS])
            raise UserError(
                f"{key}: {name} is missing{close}; write {name}=COLUMN, the table's column that "
                "has it"
            )
    found: dict[str, tuple[str, ...]] = {}
    given = {name: mapping[name] for name in OPTIONS if name in mapping}
    switches = [(name, (True, False)) for name in _SWITCHES]
    for name, values in (*switches, ("answer_is", ANSWER_IS)):
        if given.get(name, values[0]) not in values:
            raise UserError(
                f"{key}: {name} is {given[name]!r:.60}; write one of "
                f"{', '.join(map(str, values)).lower()}"
            )
    for name, theirs in mapping.items():
        if name in given:
            continue
        words = list(theirs) if isinstance(theirs, list | tuple) else str(theirs).split(",")
        if not all(isinstance(word, str) and word.strip() for word in words) or isinstance(
            theirs, Mapping
        ):
            raise UserError(f"{key}: {name}={theirs!r:.60} is not the name of a column; write one")
        if len(words) > 1 and name not in _LISTED:
            raise UserError(
                f"{key}: {name}={theirs!r:.60} names {len(words)} columns; only images and "
                "choices may"
            )
        found[str(name)] = tuple(word.strip() for word in words)
    extras = tuple((name, theirs[0]) for name, theirs in found.items() if name not in OURS)
    for name, _ in extras:
        if not name.isidentifier() or name in _TAKEN:
            raise UserError(
                f"{key}: {name!r} cannot be the name of a column of your "
                f"own{did_you_mean(name, OURS)}; ours are {', '.join(OURS)}, and others are plain "
                "words that are not taken"
            )
    return Columns(
        problem=found["problem"][0],
        answer=found["answer"][0],
        images=found.get("images", ()),
        choices=found.get("choices", ()),
        id=found["id"][0] if "id" in found else None,
        extras=extras,
        **given,
    )


def columns_of_words(words: Sequence[str]) -> Columns:
    """The same from the command line: `problem=question answer=label`. Raises `UserError`."""
    mapping: dict[str, str] = {}
    for word in words:
        name, sign, theirs = word.partition("=")
        if not sign or not name:
            raise UserError(f"--columns: {word!r:.60} is not NAME=COLUMN, such as problem=question")
        if name in mapping:
            raise UserError(
                f"--columns: {name} is given twice, {mapping[name]!r:.60} and {theirs!r:.60}; "
                "give one"
            )
        mapping[name] = theirs
    return columns_from(mapping, "--columns")


def _places(name: str, present: Container[str]) -> Iterator[tuple[str, str]]:
    """The columns that may have a value, and the path inside: of `a|b` both, of `a.b` itself, or
    `a` with `b`.
    """
    for part in (name, *name.split("|")):
        ends = (len(part), *(at for at, sign in enumerate(part) if sign == "."))
        end = next((end for end in ends if part[:end] in present), None)
        if end is not None:
            yield part[:end], part[end + 1 :]


ClassNames = Mapping[str, Sequence[str]]


def picked(
    record: Mapping[str, Any], columns: Columns, names: ClassNames | None = None
) -> dict[str, Any]:
    """The wanted columns that a record has, also those inside of others.

    `names`: of `class_names`.
    """
    found = {}
    for name in columns.wanted:
        for place, path in _places(name, record):
            held = _inside(record[place], path)
            if held:
                found[name] = _named(held[0], names[name]) if names and name in names else held[0]
                break
    return found


def class_names(columns: Columns, features: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """The names of the wanted columns that hold their numbers: `ClassLabel` in the features of
    `datasets`.
    """
    found = {}
    for name in columns.wanted if features else ():
        for place, path in _places(name, features):
            kind: Any = features[place]
            for inside in path.split("."):
                kind = getattr(kind, "feature", kind)
                kind = kind.get(inside, kind) if isinstance(kind, Mapping) else kind
            kind = getattr(kind, "feature", kind)
            if getattr(kind, "names", None):
                found[name] = kind.names
    return found


def _named(value: Any, names: Sequence[str]) -> Any:
    """The name for a number, for each of a list, or for one in digits, as in CSV; None for -1,
    which is no class.
    """
    if isinstance(value, list):
        return [_named(item, names) for item in value]
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if isinstance(number, bool) or not isinstance(number, int) or value in names:
        return value
    return names[number] if 0 <= number < len(names) else None


def _inside(value: Any, path: str) -> list[Any]:
    """What stands in an object under names with dots between them, as a list; an empty one where it
    has no such.
    """
    for name in path.split(".") if path else ():
        if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
            try:
                value = read_json(value)
            except (ValueError, RecursionError):
                return []
        if (
            isinstance(value, list)
            and name.lstrip("-").isdecimal()
            and -len(value) <= int(name) < len(value)
        ):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            return []
    return [value]


def require_columns(columns: Columns, present: Iterable[str], where: str) -> None:
    """Raise `UserError` for a named column that the table `where` lacks."""
    there = list(present)
    known = set(there)
    absent = [
        name
        for name in columns.wanted
        if not any(_places(name, known)) and name not in columns.optional
    ]
    lacking = [f"{name!r:.60}{did_you_mean(name, islice(there, _COMPARED))}" for name in absent]
    if lacking:
        more = f", ... ({len(there)} columns)" if len(there) > _SHOWN else ""
        listed = ", ".join(f"{column:.40}" for column in there[:_SHOWN]) or "none"
        raise UserError(
            f"columns: {where} has no column {', and none '.join(lacking)}; it has {listed}{more}"
        )
