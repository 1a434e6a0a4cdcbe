"""Which columns of a user's table hold the problem, the answer and the images.

A user writes `problem=question answer=label`: our name, and the name of the table's column.
`PRESETS` has these names for published data sets, and for the rows that other trainers read.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from adora_vl.data.dataset import TYPE_BY_COLUMN, schema
from adora_vl.utils.errors import UserError, did_you_mean
from adora_vl.utils.nested_values import NO_VALUE, value_at_path

if TYPE_CHECKING:
    from datasets import Features

OUR_NAMES = ("problem", "answer", "images", "choices", "id")
# These options say how the columns are read; they stand beside the names of the columns.
OPTIONS = ("decimal_comma", "answer_is", "image_dir", "text_answers", "keep_options_in_text")
_BOOLEAN_OPTIONS = ("decimal_comma", "text_answers", "keep_options_in_text")
# What a whole number beside choices is: one of the options, or its index, from 0 or from 1.
ANSWER_IS = (
    "value",
    "index",
    "index-from-1",
)
_REQUIRED_NAMES = ("problem", "answer")
_MULTI_COLUMN_NAMES = ("images", "choices")  # may be spread over several columns
# An extra column cannot have these names: the schema has some of them, TRL passes others to a
# reward function, and a template lists the choices under `multiple_choice`.
_RESERVED_NAMES = (
    *TYPE_BY_COLUMN,
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
_MAX_SHOWN_NAMES = 20  # column names that an error message lists
_MAX_COMPARED_NAMES = 1000  # column names among which the nearest to a wrong name is looked for


@dataclass(frozen=True)
class Columns:
    """The names that the columns have in a table, and how their values are read.

    A dot in a name leads into an object (`reward_model.ground_truth`), and `a|b` is the column `a`
    or the column `b`, whichever a table has.
    """

    problem: str
    answer: str
    # One column that holds all images of a row, or several columns that hold one image each.
    images: tuple[str, ...] = ()
    # One column that holds all options of a row, or several columns that hold one option each.
    choices: tuple[str, ...] = ()
    id: str | None = None
    # Extra columns of the user, as pairs of our name and the table's name: (("level", "grade"),).
    # Their values are texts, which prompts and reward functions can use.
    extras: tuple[tuple[str, str], ...] = ()
    optional: tuple[str, ...] = ()  # columns that a table may lack
    requires_image: bool = False  # a row without an image is broken
    decimal_comma: bool = False  # `52,5` in an answer or option is a number
    answer_is: str = ""  # what a whole number beside choices is, a value of `ANSWER_IS`
    image_dir: str = ""  # where the paths of images begin, in place of the table's folder
    text_answers: bool = False  # a sentence is a reference answer too
    keep_options_in_text: bool = False  # options in the problem's text do not become choices

    @property
    def table_names(self) -> list[str]:
        """All names of table columns, each once, as the user wrote them (dots and `|` included)."""
        names = [self.problem, self.answer, *self.images, *self.choices]
        if self.id is not None:
            names.append(self.id)
        names += [table_name for _, table_name in self.extras]
        return list(dict.fromkeys(names))

    def needed_from(self, table_columns: Iterable[str]) -> list[str]:
        """Return which of a table's columns have to be read.

        For the name `reward_model.ground_truth` it is the column `reward_model`.
        """
        table_column_set = set(table_columns)
        columns = []
        for name in self.table_names:
            columns += [column for column, _ in _possible_columns(name, table_column_set)]
        return list(dict.fromkeys(columns))  # each once

    @property
    def features(self) -> Features:
        """The schema of the prepared rows: our columns, and the extra columns behind them."""
        from datasets import Features, Value

        return Features({**schema(), **{name: Value("string") for name, _ in self.extras}})

    def to_mapping(self) -> dict[str, Any]:
        """Return the mapping from our names to the table's, as `columns_from` reads it.

        For example, {"problem": "question", "answer": "label", "level": "grade"}.
        """
        mapping: dict[str, Any] = {"problem": self.problem, "answer": self.answer}
        for name, table_names in (("images", self.images), ("choices", self.choices)):
            if table_names:
                mapping[name] = table_names[0] if len(table_names) == 1 else list(table_names)
        for name in OPTIONS:
            value = getattr(self, name)
            if value:
                mapping[name] = value
        if self.id is not None:
            mapping["id"] = self.id
        return {**mapping, **dict(self.extras)}


@dataclass(frozen=True)
class Preset:
    """The columns of a published data set, or of the rows that another trainer reads."""

    id: str | None  # the data set on the hub; None for the rows of another trainer
    columns: Columns


_GEOMETRY3K = Columns(
    problem="problem",
    answer="answer",
    images=("images",),
    choices=("choices",),
    id="id",
    optional=("choices", "id"),
    requires_image=True,
    answer_is="value",
)
_CHAT_COLUMNS = "messages|conversations"  # the answer is in it too
_QUESTION_COLUMNS = "messages|query|conversations|prompt|problem|question"
_SOLUTION_COLUMNS = f"solution|response|{_CHAT_COLUMNS}"
_IMAGES = ("images",)
_IMAGES_OR_IMAGE = ("images|image",)
PRESETS = {
    "geometry3k": Preset(id="hiyouga/geometry3k", columns=_GEOMETRY3K),
    "easyr1": Preset(
        id=None,
        columns=Columns(
            problem="prompt|problem", answer="answer", images=_IMAGES, optional=_IMAGES
        ),
    ),
    "verl": Preset(
        id=None,
        columns=Columns(
            problem="prompt", answer="reward_model.ground_truth", images=_IMAGES, optional=_IMAGES
        ),
    ),
    "swift": Preset(
        id=None,
        columns=Columns(
            problem=_QUESTION_COLUMNS,
            answer=_SOLUTION_COLUMNS,
            images=_IMAGES_OR_IMAGE,
            optional=_IMAGES_OR_IMAGE,
        ),
    ),
    "llamafactory": Preset(
        id=None,
        columns=Columns(
            problem=_CHAT_COLUMNS,
            answer=_CHAT_COLUMNS,
            images=_IMAGES_OR_IMAGE,
            optional=_IMAGES_OR_IMAGE,
        ),
    ),
}


def columns_from(mapping: Mapping[str, Any], key: str) -> Columns:
    """Return the `Columns` that a mapping from our names to the table's columns says.

    The mapping has options such as `decimal_comma` too. Every name that is neither ours nor an
    option becomes an extra column: {problem: question, answer: label, level: grade} has the extra
    column `level`, from the table's column `grade`. `key` is the option or key of a config that has
    the mapping; error messages begin with it.

    Raises `UserError` for a missing problem or answer, a wrong value of an option, a value that
    names no column or too many, and a name that an extra column cannot have.
    """
    for name in _REQUIRED_NAMES:
        if name not in mapping:
            other_names = [str(other_name) for other_name in mapping if other_name not in OUR_NAMES]
            raise UserError(
                f"{key}: {name} is missing{did_you_mean(name, other_names)}; write {name}=COLUMN, "
                "the table's column that has it"
            )
    options = _options_from(mapping, key)
    table_names: dict[str, tuple[str, ...]] = {}  # the names of the table's columns by our names
    for name, value in mapping.items():
        if name not in options:
            table_names[str(name)] = _parse_column_names(name, value, key)
    extras = []
    for name, columns in table_names.items():
        if name in OUR_NAMES:
            continue
        extras.append((name, columns[0]))
        if not name.isidentifier() or name in _RESERVED_NAMES:
            raise UserError(
                f"{key}: {name!r} cannot be the name of a column of your "
                f"own{did_you_mean(name, OUR_NAMES)}; ours are {', '.join(OUR_NAMES)}, and others "
                "are plain words that are not taken"
            )
    return Columns(
        problem=table_names["problem"][0],
        answer=table_names["answer"][0],
        images=table_names.get("images", ()),
        choices=table_names.get("choices", ()),
        id=table_names["id"][0] if "id" in table_names else None,
        extras=tuple(extras),
        **options,
    )


def _options_from(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the options, such as {"decimal_comma": True}, in a mapping that has columns too.

    Error messages begin with `key`, the option or key of a config that has the mapping.

    Raises `UserError` for a value that an option cannot have.
    """
    options = {name: mapping[name] for name in OPTIONS if name in mapping}
    allowed_values: dict[str, tuple[object, ...]] = {
        **dict.fromkeys(_BOOLEAN_OPTIONS, (True, False)),
        "answer_is": ANSWER_IS,
    }
    for name, values in allowed_values.items():
        if name in options and options[name] not in values:
            raise UserError(
                f"{key}: {name} is {options[name]!r:.60}; write one of "
                f"{', '.join(map(str, values)).lower()}"
            )
    return options


def _parse_column_names(name: str, value: object, key: str) -> tuple[str, ...]:
    """Return the names of the table's columns in one entry of a mapping: a text, `a,b`, or a list.

    For example, choices=A,B and choices=[A, B] both give ("A", "B").

    Args:
        name: our name of the column, such as `choices`.
        value: what the mapping has for it.
        key: the option or key of a config that has the mapping, for error messages.

    Raises:
        UserError: the value names no column, or several where only one may be named.
    """
    names = list(value) if isinstance(value, list | tuple) else str(value).split(",")
    are_names = all(isinstance(column, str) and column.strip() for column in names)
    if not are_names or isinstance(value, Mapping):
        raise UserError(f"{key}: {name}={value!r:.60} is not the name of a column; write one")
    if len(names) > 1 and name not in _MULTI_COLUMN_NAMES:
        raise UserError(
            f"{key}: {name}={value!r:.60} names {len(names)} columns; only images and choices may"
        )
    return tuple(column.strip() for column in names)


def columns_from_words(words: Sequence[str]) -> Columns:
    """Return the `Columns` of the words `problem=question answer=label` of a command line.

    Raises `UserError` for a word without `=`, a name that is given twice, and as `columns_from`.
    """
    mapping: dict[str, str] = {}
    for word in words:
        name, equals_sign, column = word.partition("=")
        if not equals_sign or not name:
            raise UserError(f"--columns: {word!r:.60} is not NAME=COLUMN, such as problem=question")
        if name in mapping:
            raise UserError(
                f"--columns: {name} is given twice, {mapping[name]!r:.60} and {column!r:.60}; "
                "give one"
            )
        mapping[name] = column
    return columns_from(mapping, "--columns")


def _possible_columns(name: str, table_columns: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield the columns that may have the value of `name`, each with the path inside its objects.

    Only columns of the table are yielded. For example:

        name   columns   yielded
        a|c    a, c      (a, ""), (c, "")
        a.b    a.b, a    (a.b, ""): a column of that very name comes first
        a.b    a         (a, "b"): the key b in the objects of column a

    A column may be yielded twice.
    """
    for alternative in (name, *name.split("|")):
        # The column may have the whole name, or what stands before one of its dots.
        dot_positions = [match.start() for match in re.finditer(r"\.", alternative)]
        for column_end in (len(alternative), *dot_positions):
            column = alternative[:column_end]
            if column in table_columns:
                yield column, alternative[column_end + 1 :]
                break


ClassNames = Mapping[str, Sequence[str]]  # for each column that has classes: {"answer": ["A", "B"]}


def pick_columns(
    record: Mapping[str, Any], columns: Columns, names_by_column: ClassNames
) -> dict[str, Any]:
    """Return the values of a record by the names in `columns`, also those inside of objects.

    For example, {"reward_model": {"ground_truth": "5"}} gives {"reward_model.ground_truth": "5"}.
    A name that leads to no value is absent.

    `names_by_column` has the names of classes of some columns, {"answer": ["A", "B"]}; numbers in
    such a column become names.
    """
    picked = {}
    for name in columns.table_names:
        # The column may be `reward_model`, with the path `ground_truth` inside its objects.
        for column, path in _possible_columns(name, record):
            value = value_at_path(record[column], path)
            if value is not NO_VALUE:
                if name in names_by_column:
                    value = _class_name(value, names_by_column[name])
                picked[name] = value
                break
    return picked


def class_names(columns: Columns, features: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Return the class names of each column that stores classes as numbers: {"answer": ["A", "B"]}.

    Such a column is a `ClassLabel`, or a list of them, in `features`, those of `datasets`.
    """
    names_by_column = {}
    for name in columns.table_names:
        for column, path in _possible_columns(name, features):
            feature: Any = features[column]
            # Follow a path such as `ground_truth` into the objects of the column, also in lists.
            for key in path.split("."):
                feature = _feature_of_items(feature)
                if isinstance(feature, Mapping):
                    feature = feature.get(key, feature)
            feature = _feature_of_items(feature)
            if getattr(feature, "names", None):  # a `ClassLabel` has them
                names_by_column[name] = feature.names
    return names_by_column


def _feature_of_items(feature: object) -> Any:
    """Return the feature of a list's items; any other feature of `datasets` as it is."""
    return getattr(feature, "feature", feature)


def _class_name(value: object, class_names: Sequence[str]) -> object:
    """Return the class name for a number, a number in digits (as in CSV), or each item of a list.

    For example, with the names cat and dog "1" gives dog, and [0, -1] gives [cat, None]: -1 is the
    mark of `datasets` for a missing class. Any other value is returned as it is.
    """
    if isinstance(value, list):
        return [_class_name(item, class_names) for item in value]
    number = value
    if isinstance(value, str) and value.isascii() and value.isdigit():
        number = int(value)
    # True is an `int` in Python. A class may have a number as its name, which is then no index.
    if isinstance(number, bool) or not isinstance(number, int) or value in class_names:
        return value
    return class_names[number] if 0 <= number < len(class_names) else None


def require_columns(columns: Columns, table_columns: Iterable[str], where: str) -> None:
    """Raise `UserError` for a column that the user has named and a table lacks.

    `where` is the table in words.
    """
    table_column_list = list(table_columns)
    table_column_set = set(table_column_list)
    missing = []  # such as `'awnser'; did you mean 'answer'?`
    for name in columns.table_names:
        is_present = any(_possible_columns(name, table_column_set))
        if not is_present and name not in columns.optional:
            hint = did_you_mean(name, islice(table_column_list, _MAX_COMPARED_NAMES))
            missing.append(f"{name!r:.60}{hint}")
    if missing:
        shown_names = ", ".join(f"{column:.40}" for column in table_column_list[:_MAX_SHOWN_NAMES])
        ellipsis = ""
        if len(table_column_list) > _MAX_SHOWN_NAMES:
            ellipsis = f", ... ({len(table_column_list)} columns)"
        raise UserError(
            f"columns: {where} has no column {', and none '.join(missing)}; it has "
            f"{shown_names or 'none'}{ellipsis}"
        )
