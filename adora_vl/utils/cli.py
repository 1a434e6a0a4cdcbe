"""What the commands have in common: exit codes, options, words for nothing, yes and no, YAML and
JSON of users.
"""

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from adora_vl.utils.errors import UserError
from adora_vl.utils.secrets import masked_text

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
EXIT_UNREAD = 141  # 128 + SIGPIPE
MAX_SEED = 2**32 - 1  # what NumPy, torch and vLLM all take
READING_S = 15  # the seconds that the imports of a training take, of an idle machine with a disk
_LONGEST = 300  # characters of a complaint about an option
_NO_VALUE = ("none", "null")
_MOST_YAML = 100_000  # values of a YAML text whose aliases are written out


class MistakesError(UserError):
    """Several mistakes of one kind, each with a line of its own."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = [masked_text(line) for line in lines]


def exit_code_of(command: Callable[[], None], interrupted: str, *, speaks: bool = True) -> int:
    """Run a command: 0 done, 2 the user's input is wrong, 130 Ctrl-C, 141 nobody reads on, as
    behind `| head`. `interrupted`: what became of its work. `speaks`: whether this process says
    what is wrong with the input.
    """
    try:
        command()
        sys.stdout.flush()
    except UserError as error:
        lines = error.lines if isinstance(error, MistakesError) else [" ".join(str(error).split())]
        print("".join(f"error: {line}\n" for line in lines if speaks), end="", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; {interrupted}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    return 0


def amount(count: int, noun: str) -> str:
    """Return `1 row`, `2 rows`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def quantile(values: Sequence[Any], share: float) -> Any:
    """Return the nearest-rank quantile of at least one value.

    It is the smallest value that this share of them does not exceed.
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def shown(value: object, longest: int = 60) -> str:
    """Return a value in one line as a person writes it: null rather than None, a long one cut."""
    written = "null" if value is None else " ".join(repr(value).splitlines())
    return written if len(written) <= longest else f"{written[:longest]}..."


def spelled(value: object) -> str:
    """Return a value as a config spells it.

    A member of Transformers' enumerations is spelled by its own value.
    """
    return str(getattr(value, "value", value))


def plain(value: Any) -> Any:
    """Return a value in the types of JSON and YAML.

    A block of options becomes a mapping, or the value of its `shorthand` where all others have
    their defaults.
    """
    if is_dataclass(value) and not isinstance(value, type):
        options = {key.name: plain(getattr(value, key.name)) for key in fields(value)}
        short = str(getattr(value, "shorthand", ""))
        alone = short and all(
            getattr(value, key.name) == key.default for key in fields(value) if key.name != short
        )
        return options[short] if alone else options
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def dotted(key: str, value: Any) -> dict[str, Any]:
    """Return a key with its value; a mapping is replaced by its entries under dotted names."""
    if not isinstance(value, Mapping) or not value:
        return {key: value}
    return {
        name: item
        for inside in value
        for name, item in dotted(f"{key}.{inside}", value[inside]).items()
    }


def section(title: str, lines: Sequence[str]) -> list[str]:
    """Return the lines of a report below their underlined title."""
    return ["", title, "-" * len(title), *lines]


def announce_reading(seconds: int) -> None:
    """Say on stderr that the libraries are being read, which is silent for `seconds`.

    Nothing is said where torch is there already, and by one process of several alone.
    """
    if "torch" in sys.modules or os.environ.get("RANK", "0") != "0":
        return
    print(f"Reading config and libraries, about {seconds} s", file=sys.stderr, flush=True)


@contextmanager
def imports() -> Iterator[None]:
    """End the imports of a command, which take seconds, with a line after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; nothing was begun", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None


class Parser(argparse.ArgumentParser):
    """argparse prints its usage before an error; one line is the rule of this project.

    No option may be shortened.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **keywords})

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` of one line for what argparse found wrong."""
        if len(message) > _LONGEST:  # what was given stands in it
            message = f"{message[: _LONGEST // 2]}...{message[-_LONGEST // 2 :]}"
        raise UserError(f"{message}; see `{self.prog} --help`")


# What `add_subparsers` returns: a command adds its own parser to it.
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"

# Converters for argparse, which puts the name of the option before their message.


def whole(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return a converter of whole numbers from `minimum` to `maximum`."""

    def convert(text: str) -> int:
        """Read a whole number within the bounds."""
        # The length first: Python refuses to read more than 4,300 digits, with an error of its own.
        value = (
            int(text)
            if len(text) < 20 and text.isascii() and text.removeprefix("-").isdecimal()
            else None
        )
        if value is None or value < minimum or (maximum is not None and value > maximum):
            between = f"from {minimum} on" if maximum is None else f"from {minimum} to {maximum}"
            raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number {between}")
        return value

    return convert


def number(minimum: float, maximum: float, *, also: float | None = None) -> Callable[[str], float]:
    """Return a converter of numbers from `minimum` to `maximum`, and `also`; never NaN."""

    def convert(text: str) -> float:
        """Read a number within the bounds, or the one beside them."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (minimum <= value <= maximum or value == also):
            beside = "" if also is None else f"{also:g} or "
            raise argparse.ArgumentTypeError(
                f"{text!r:.60} is not {beside}a number from {minimum:g} to {maximum:g}"
            )
        return value

    return convert


def text(value: str) -> str:
    """Return a text with something in it."""
    if not value.strip() or "\0" in value:
        raise argparse.ArgumentTypeError(
            f"{value!r} is empty or no text; write something, or leave the option out"
        )
    return value


def path(value: str) -> Path:
    """Convert to a path; an empty one is refused, as it would mean the current folder."""
    path_value = Path(text(value))
    if any(len(part.encode(errors="surrogateescape")) > 255 for part in path_value.parts):
        raise argparse.ArgumentTypeError(f"{value!r:.60} has a name of over 255 bytes; shorten it")
    return path_value


def is_no_value(word: str) -> bool:
    """Return whether a word on the command line is YAML's null, or `none`.

    Many write `none` for it.
    """
    return word.strip().lower() in _NO_VALUE


def optional(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a converter that gives None for `none` and `null`, else what `convert` does."""
    return lambda word: None if is_no_value(word) else convert(word)


_NULL = ("null", "~")  # as YAML reads them, in any case
_TRUE = ("true", "yes", "t", "y", "1")
_FALSE = ("false", "no", "f", "n", "0")
# a lone regular expression, as PEFT takes, is no list
_PLAIN_LIST = re.compile(r"[\w./:+=-]+(,[\w./:+=-]+)+")


def is_null(text: object) -> bool:
    """Return whether `text` is None or the word null.

    The word `none` is a value of some keys, so it is not.
    """
    return text is None or (isinstance(text, str) and text.strip().lower() in _NULL)


def truth(value: object) -> bool | None:
    """Return `value` as true or false; None where it is neither."""
    word = str(value).strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    return None


def split_list(words: Sequence[Any]) -> list[Any]:
    """Return the entries of a list given as `a b`, `a,b`, `[a,b]` or `[a, b]`.

    Raises `ValueError` for an open bracket.
    """
    texts = [str(word) for word in words]
    if texts and texts[0].startswith("[") and texts[-1].endswith("]"):
        entries = yaml_value(" ".join(texts))
        if isinstance(entries, list):
            return entries
    if texts and texts[0].startswith("[") and "]" not in "".join(texts):
        raise ValueError("has an opening bracket only")
    listed = (
        word.split(",") if isinstance(word, str) and _PLAIN_LIST.fullmatch(word) else [word]
        for word in words
    )
    return [entry for entries in listed for entry in entries]


def _load_yaml(text: str) -> Any:
    """Return what YAML makes of a text.

    Raises `ValueError` for what is none, and `RecursionError`.
    """
    import yaml  # in here, so that an interrupted import of a command ends with a line

    try:
        return yaml.load(text, _loader())  # noqa: S506  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


@cache
def _loader() -> Any:
    """Return a YAML loader that refuses equal keys and endless aliases.

    PyYAML takes the last of two equal keys without a word. A key that is merged with `<<` may be
    given again. It also takes aliases of aliases, of which a few lines hold more than any memory.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def get_single_node(self) -> Any:
            """Read the whole document, and refuse one that aliases make too large."""
            node = super().get_single_node()
            remaining_visits = iter(range(_MOST_YAML))

            def visit(node: Any) -> None:
                """Visit a node and all below it, those behind an alias each time."""
                if next(remaining_visits, None) is None:
                    raise yaml.constructor.ConstructorError(
                        None, None, "its aliases make it larger than any config"
                    )
                if not isinstance(node, yaml.CollectionNode):
                    return
                for part in node.value:
                    children = part if isinstance(part, tuple) else (part,)
                    for child in children:
                        visit(child)

            if node is not None:
                visit(node)
            return node

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            """Read a mapping, and refuse one that has a key twice."""
            names: set[str] = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in names:
                    twice = f"line {key.start_mark.line + 1} gives {key.value!r} a second time"
                    raise yaml.constructor.ConstructorError(None, None, twice)
                names.add(key.value)
            return super().construct_mapping(node, deep)

    return Loader


def read_json(text: str | bytes) -> Any:
    """Return what a JSON text stands for.

    Raises `ValueError`, also for a key given twice, of which Python takes one.
    """
    return json.loads(text, object_pairs_hook=each_once)


class GivenTwiceError(ValueError):
    """An object of a JSON text gives a key twice."""


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the mapping of these keys and values. Raises `GivenTwiceError`."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise GivenTwiceError(f"{shown(twice)} is given twice in one object")
    return mapping


def yaml_value(text: str) -> Any:
    """Return what a text stands for behind `key:` in a file.

    The text itself where it is no YAML.
    """
    try:
        return _load_yaml(text)
    except (ValueError, RecursionError):
        return text


def yaml_line(value: object) -> str:
    """Return a value as one writes it behind `key:` in a file."""
    import yaml

    written = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False)
    return written.removesuffix("\n").removesuffix("\n...")


def flow_mapping(text: str) -> dict[str, Any] | None:
    """Return the mapping of a text in YAML's short form, `{a: 1, b: [2, 3]}`.

    Its values are those that JSON knows.
    """
    content = yaml_value(text) if text.startswith("{") else None
    try:
        return dict(json.loads(json.dumps(content))) if isinstance(content, dict) else None
    except (ValueError, TypeError, RecursionError):
        return None


def read_mapping(option: str, path: Path) -> dict[str, Any]:
    """Return the keys and values in a file.

    Raises `UserError`, which begins with `option`, in one line.
    """
    try:
        content = _load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{option}: no file {str(path)!r}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{option}: {str(path)!r} is not UTF-8 text ({error.reason}); save it as UTF-8"
        ) from error
    except OSError as error:
        raise UserError(
            f"{option}: {str(path)!r} cannot be read ({error.strerror}); name a YAML file"
        ) from error
    except ValueError as error:  # also of a date that is none
        raise UserError(f"{option}: {str(path)!r} is not valid YAML ({error!s:.300})") from error
    except RecursionError as error:
        raise UserError(
            f"{option}: {str(path)!r} is nested too deeply; name a file of `key: value` lines"
        ) from error
    if not isinstance(content, dict):
        kind = "nothing" if content is None else type(content).__name__
        raise UserError(f"{option}: {str(path)!r}: expected `key: value` lines, found {kind}")
    return {str(key): value for key, value in content.items()}


def printable(text: str) -> str:
    """Return one line without control characters: a row must not command the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)
