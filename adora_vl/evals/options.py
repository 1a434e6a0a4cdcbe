"""Options of an evaluation: dataclasses, from which the commands make their parsers.

Each option stands once, with its default and its help. Code below the commands gets an instance,
which a training makes without a command line.
"""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from adora_vl.utils.cli import none_or, text_option

# The parser's default of both prompts. It stands for the prompt that the model was trained with.
PROMPT_OF_TRAINING: Any = object()
_ARGUMENT_KEY = "argument"  # the key in the metadata of a field

Options = TypeVar("Options")


def option(
    default: object = MISSING, *, help: str, parser_default: object = MISSING, **arguments: Any
) -> Any:
    """Declare a field of a dataclass that is an option of the command line too.

    `max_tokens: int = option(2048, help="limit per answer")` becomes the option `--max-tokens`.

    Args:
        default: The default of the field. A field without one has to be set in code.
        help: What `--help` says of the option.
        parser_default: The default on the command line, if it differs from `default`.
        arguments: Further arguments of `add_argument`. A field whose type is a `Literal` needs no
            `choices`, except in a file with `from __future__ import annotations`, where its type is
            a text.
    """
    if parser_default is MISSING:
        parser_default = None if default is MISSING else default
    argument = {"default": parser_default, "help": help, **arguments}
    return field(default=default, metadata={_ARGUMENT_KEY: argument})


def parser_arguments_of(option_field: "Field[Any]") -> Mapping[str, Any] | None:
    """Return the arguments of argparse's `add_argument` for a field; None if it is no option."""
    arguments: Mapping[str, Any] | None = option_field.metadata.get(_ARGUMENT_KEY)
    return arguments


def option_names(options_class: type) -> list[str]:
    """Return the names of the options of a dataclass, in its order."""
    return [field.name for field in fields(options_class) if parser_arguments_of(field) is not None]


def required_names(options_class: type) -> list[str]:
    """Return the names of the fields of a dataclass that have no default."""
    return [
        field.name
        for field in fields(options_class)
        if field.default is MISSING and field.default_factory is MISSING
    ]


def add_options(parser: ArgumentParser, options_class: type) -> None:
    """Add the options of a dataclass to a parser, in the order of its fields."""
    for option_field in fields(options_class):
        arguments = parser_arguments_of(option_field)
        if arguments is None:
            continue
        if get_origin(option_field.type) is Literal:
            arguments = {"choices": get_args(option_field.type), **arguments}
        parser.add_argument("--" + option_field.name.replace("_", "-"), **arguments)


def options_from(options_class: type[Options], source: object, **overrides: Any) -> Options:
    """Build an instance of a dataclass of options from the attributes of another object.

    Args:
        options_class: The dataclass. A field that the source does not have keeps its default.
        source: Has the values as attributes, such as the namespace of argparse. Attributes that are
            no fields are ignored.
        overrides: Values of fields, in place of those of the source.
    """
    values: dict[str, Any] = {}
    # `options_class` is a dataclass, which no type says.
    for option_field in fields(options_class):  # type: ignore[arg-type]
        if hasattr(source, option_field.name):
            values[option_field.name] = getattr(source, option_field.name)
    return options_class(**{**values, **overrides})


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which problems of a benchmark are asked.

    A benchmark with further options has a subclass.
    """

    data: str
    """A folder, a file or a hub id."""
    split: str
    """The name of the split in it."""


@dataclass(frozen=True, kw_only=True)
class HubDataOptions(DataOptions):
    """Which problems are asked of a benchmark that is published on the hub."""

    data_revision: str | None = option(
        None, help="of the data on the hub", type=none_or(text_option), metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """How answers are graded. A benchmark with rules to choose from has a subclass.

    Every field has a default, with which answers are scored during a training.
    """

    answer_tags: bool = False
    """Whether the prompts asked for `<answer> </answer>`, so that an answer may stand in them."""
    columns: Sequence[str] = ()
    """The names of fields in a file of predictions, `OURS=THEIRS` each."""
    output: Path | None = None
    """Where the score is written: a folder, or a file whose name ends in `.json`."""
