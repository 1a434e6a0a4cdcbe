"""What the commands share: exit codes, converters of options, and users' YAML and JSON."""

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
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import yaml

from adora_vl.utils.errors import UserError, did_you_mean
from adora_vl.utils.files import path_problem
from adora_vl.utils.interrupts import EXIT_INTERRUPTED
from adora_vl.utils.outputs import OUTPUT_DESCRIPTORS, redirect_to_null
from adora_vl.utils.secrets import redact_secrets

EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
MAX_SEED = 2**32 - 1  # what NumPy, torch and vLLM all take
# how many seconds the imports of a training take on an idle machine
USUAL_IMPORT_S = 15
_MAX_MESSAGE_CHARACTERS = 300  # characters of a message about a wrong option
_WORDS_FOR_NO_VALUE = ("none", "null")
_MAX_YAML_NODES = 100_000  # values of a YAML text whose aliases are written out
_MAX_NAME_BYTES = 255  # of a file; file systems take no longer names


class MultiLineUserError(UserError):
    """Several mistakes of one kind, each with a line of its own."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = [redact_secrets(line) for line in lines]


def run_command(
    command: Callable[[], None], *, interrupt_note: str, prints_errors: bool = True
) -> int:
    """Run a command, print its error in one line, and return the exit code for its process.

    Args:
        command: does the command's work. It raises `UserError` for a mistake of the user.
        interrupt_note: what to say of its work after Ctrl-C, such as `nothing was written`.
        prints_errors: whether this process prints errors; of several ranks only one does.

    Returns:
        0 for success, 2 for wrong input of the user, 130 after Ctrl-C, and 141 where nobody reads
        the output on, as behind `| head`.
    """
    try:
        # If nobody reads the output on, this raises the BrokenPipeError inside of the `try`.
        with flushing_stdout():
            command()
    except UserError as error:
        one_line = " ".join(str(error).split())
        lines = error.lines if isinstance(error, MultiLineUserError) else [one_line]
        if prints_errors:
            print("".join(f"error: {line}\n" for line in lines), end="", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; {interrupt_note}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return handle_broken_pipe()
    return 0


@contextmanager
def flushing_stdout() -> Iterator[None]:
    """Flush stdout at the end of the block.

    Otherwise Python would flush it when it ends, where an error could not change the exit code.

    Raises:
        BrokenPipeError: nobody reads the output any more.
        UserError: it cannot be written, as to a file on a full disk.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        # Printing a long text may itself have failed, for want of room on the disk. Then a further
        # line fails too, and `_flush_stdout` raises the `UserError` for it.
        _flush_stdout(further_text="\n")
        raise
    _flush_stdout()


def _flush_stdout(further_text: str = "") -> None:
    """Print `further_text`, and flush stdout. The errors are those of `flushing_stdout`."""
    if sys.stdout is None:  # closed from the beginning: `>&-`
        return
    try:
        print(further_text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is still in the buffer would fail once more when Python ends.
        redirect_to_null(sys.stdout.fileno())
        raise UserError(
            f"stdout: what is printed cannot be written ({error.strerror}); make room there, or "
            "send it to another place"
        ) from error


def handle_broken_pipe() -> int:
    """Redirect stdout and stderr to /dev/null, and return the exit code for a broken pipe.

    A command has printed to a pipe that nobody reads any more. Python flushes its outputs once more
    when it ends, which has to succeed.
    """
    for descriptor in OUTPUT_DESCRIPTORS:
        redirect_to_null(descriptor)
    return EXIT_BROKEN_PIPE


def pluralize(count: int, noun: str) -> str:
    """Return a number with its noun, such as `1 row` or `2 rows`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def quantile(values: Sequence[Any], share: float) -> Any:
    """Return a quantile of values: for a `share` of 0.5 the median, for 0.9 the 90th percentile.

    It is one of the values (the nearest-rank quantile): the smallest one for which at least this
    share of all values is not larger. For example, the median of 10, 20, 30, 40 is 20. There must
    be at least one value.
    """
    rank = math.ceil(share * len(values))
    index = max(0, rank - 1)
    return sorted(values)[index]


def short_repr(value: object, max_characters: int = 60) -> str:
    """Return a value as text for a message: in one line, cut after `max_characters`.

    None is `null`, as users write it.
    """
    value_text = "null" if value is None else " ".join(repr(value).splitlines())
    if len(value_text) > max_characters:
        return f"{value_text[:max_characters]}..."
    return value_text


def enum_value(value: object) -> str:
    """Return a member of an enumeration by its value, as text; any other value as text too.

    Transformers turns words of a config, such as `constant`, into members of enumerations.
    """
    return str(getattr(value, "value", value))


def to_json_types(value: Any) -> Any:
    """Return a value of the config in the types of JSON and YAML, as a user would write it.

    A dataclass of options becomes a mapping of its options. A dataclass may name one option as its
    `shorthand`. If all other options have their defaults, the value of that option alone is
    returned. For example, the shorthand of `Schedule` is `start`, so `Schedule(start=0.1)` becomes
    0.1, which is short for `{start: 0.1}`.
    """
    if is_dataclass(value) and not isinstance(value, type):
        options = {
            option.name: to_json_types(getattr(value, option.name)) for option in fields(value)
        }
        shorthand = str(getattr(value, "shorthand", ""))
        if not shorthand:
            return options
        others_are_default = all(
            getattr(value, option.name) == option.default
            for option in fields(value)
            if option.name != shorthand
        )
        return options[shorthand] if others_are_default else options
    if isinstance(value, Mapping):
        return {key: to_json_types(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_json_types(item) for item in value)
    return value


def with_dotted_keys(key: str, value: Any) -> dict[str, Any]:
    """Return a key's value as a flat mapping with dotted keys, such as `adora_rollouts.budget`.

    For example, the key `a` with `{"b": 1, "c": {"d": 2}}` gives `{"a.b": 1, "a.c.d": 2}`. A value
    that is no mapping stands under `key` itself, and so does an empty mapping.
    """
    if not isinstance(value, Mapping) or not value:
        return {key: value}
    value_by_key: dict[str, Any] = {}
    for inner_key, inner_value in value.items():
        value_by_key |= with_dotted_keys(f"{key}.{inner_key}", inner_value)
    return value_by_key


def report_section(title: str, lines: Sequence[str]) -> list[str]:
    """Return the lines of a report below their underlined title."""
    return ["", title, "-" * len(title), *lines]


def announce_imports(seconds: int) -> None:
    """Print on stderr that imports take about so many seconds, in which nothing else is printed.

    Only rank 0 prints it, and no rank where torch is imported already.
    """
    if "torch" in sys.modules or os.environ.get("RANK", "0") != "0":
        return
    print(f"Reading config and libraries, about {seconds} s", file=sys.stderr, flush=True)


_UNKNOWN_OPTION_PATTERN = re.compile(r"unrecognized arguments: (--[\w-]+)")
_UNKNOWN_COMMAND_PATTERN = re.compile(
    r"argument [^:]+: invalid choice: '(\w+)' \(choose from (.*)\)"
)


class Parser(argparse.ArgumentParser):
    """A parser of the command line whose errors are one line, and not argparse's whole usage.

    No option may be shortened: a new option could make a short form ambiguous.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **keywords})

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` of one line for what argparse found wrong."""
        # The message repeats the user's words, which may be a whole file.
        if len(message) > _MAX_MESSAGE_CHARACTERS:
            half = _MAX_MESSAGE_CHARACTERS // 2
            message = f"{message[:half]}...{message[-half:]}"
        raise UserError(f"{message}{self._suggestion(message)}; see `{self.prog} --help`")

    def _suggestion(self, message: str) -> str:
        """Return a hint such as `; did you mean 'x'?` for an error of argparse.

        The hint is for an unknown option or command. For any other error it is empty.
        """
        option_match = _UNKNOWN_OPTION_PATTERN.match(message)
        if option_match is not None:
            option = option_match[1]
            known_options = self._options()
            if option in known_options:
                # argparse reports what a command does not know to the parser above it, which knows
                # the options of all commands.
                return f"; {option!r} belongs to another command"
            return did_you_mean(option, known_options)
        command_match = _UNKNOWN_COMMAND_PATTERN.match(message)
        if command_match is not None:
            command, listed_commands = command_match.groups()
            return did_you_mean(command, re.findall(r"\w+", listed_commands))
        return ""

    def _options(self) -> list[str]:
        """Return the options of this parser and of its commands."""
        options: list[str] = []
        for action in self._actions:
            options += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    options += parser._options()
        return options


# What `add_subparsers` returns: a command adds its own parser to it.
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"

# Converters for argparse, which puts the name of the option before their message.


def integer_between(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return a converter of whole numbers from `minimum` to `maximum` for argparse."""

    def convert(text: str) -> int:
        """Read a whole number within the bounds."""
        has_digits_only = text.isascii() and text.removeprefix("-").isdecimal()
        # The length is bounded, since Python has another error for more than 4,300 digits.
        if has_digits_only and len(text) < 20:
            value = int(text)
            is_below_maximum = maximum is None or value <= maximum
            if value >= minimum and is_below_maximum:
                return value
        bounds = f"from {minimum} on" if maximum is None else f"from {minimum} to {maximum}"
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number {bounds}")

    return convert


def number_between(
    minimum: float, maximum: float, *, also: float | None = None
) -> Callable[[str], float]:
    """Return a function for `type=` of argparse, which converts a text to a float within bounds.

    `also`: one more number that is allowed outside of the bounds; None for no other. For example,
    `number_between(1, 10, also=0)` takes `0` and `2.5`, and refuses `0.5`.
    """

    def convert(text: str) -> float:
        """Read a number within the bounds, or the additional one."""
        try:
            value = float(text)
        except ValueError:
            # NaN lies within no bounds and equals no number, so it is refused below.
            value = math.nan
        is_within = minimum <= value <= maximum
        if not is_within and value != also:
            additional = "" if also is None else f"{also:g} or "
            raise argparse.ArgumentTypeError(
                f"{text!r:.60} is not {additional}a number from {minimum:g} to {maximum:g}"
            )
        return value

    return convert


def text_option(value: str) -> str:
    """Return an option's text as it is; one without a visible character is refused."""
    if not value.strip() or "\0" in value:
        raise argparse.ArgumentTypeError(
            f"{value!r} is empty or no text; write something, or leave the option out"
        )
    return value


def path_or_id(value: str) -> str:
    """Return a text that is a path or an id of the hub; one that can be neither is refused."""
    problem = path_problem(text_option(value))
    if problem:
        raise argparse.ArgumentTypeError(
            f"{short_repr(value)} cannot be a path ({problem}); write another one"
        )
    return value


def path_option(value: str) -> Path:
    """Convert to a path; an empty one is refused, as it would mean the current folder."""
    path_value = Path(text_option(value))
    name_bytes = [len(part.encode(errors="surrogateescape")) for part in path_value.parts]
    if any(count > _MAX_NAME_BYTES for count in name_bytes):
        raise argparse.ArgumentTypeError(f"{value!r:.60} has a name of over 255 bytes; shorten it")
    path_or_id(value)
    return path_value


def none_or(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a converter that gives None for `none` and `null`, else what `convert` does."""
    return lambda word: None if word.strip().lower() in _WORDS_FOR_NO_VALUE else convert(word)


_NULL_WORDS = ("null", "~")  # as YAML reads them, in any case
_TRUE_WORDS = ("true", "yes", "t", "y", "1")
_FALSE_WORDS = ("false", "no", "f", "n", "0")
# a lone regular expression, as PEFT takes, is no list
_PLAIN_LIST_PATTERN = re.compile(r"[\w./:+=-]+(,[\w./:+=-]+)+")


def is_null(text: object) -> bool:
    """Return whether `text` is None or the word null.

    The word `none` is a value of some keys, so it is not.
    """
    return text is None or (isinstance(text, str) and text.strip().lower() in _NULL_WORDS)


def parse_bool(value: object) -> bool | None:
    """Return the truth value that a word such as `yes` or `0` means; None for any other value."""
    word = str(value).strip().lower()
    if word in _TRUE_WORDS:
        return True
    if word in _FALSE_WORDS:
        return False
    return None


def split_list(words: Sequence[Any]) -> list[Any]:
    """Return the entries of a list that a command line writes as `a b`, `a,b`, `[a,b]` or `[a, b]`.

    Args:
        words: the words that follow the option, such as `["[a,", "b]"]` for the last form.

    Raises:
        ValueError: the list has an opening bracket only.
    """
    texts = [str(word) for word in words]
    if texts and texts[0].startswith("[") and texts[-1].endswith("]"):
        entries = yaml_value(" ".join(texts))
        if isinstance(entries, list):
            return entries
    if texts and texts[0].startswith("[") and "]" not in "".join(texts):
        raise ValueError("has an opening bracket only")
    entries = []
    for word in words:
        is_comma_list = isinstance(word, str) and _PLAIN_LIST_PATTERN.fullmatch(word) is not None
        entries += word.split(",") if is_comma_list else [word]
    return entries


class _StrictLoader(yaml.SafeLoader):
    """Loads YAML as PyYAML's `SafeLoader`, but refuses two mistakes.

    One is a key that stands twice in a mapping: PyYAML takes the last value without a word. (A key
    that is merged with `<<` may stand there again.) The other is aliases of aliases: a few lines of
    them stand for more values than any memory holds.
    """

    def get_single_node(self) -> yaml.Node | None:
        """Return the root node of the document, and refuse one that aliases make too large."""
        root = super().get_single_node()
        visit_count = 0  # nodes so far, those behind an alias once for each of its uses

        def visit(node: yaml.Node) -> None:
            """Count a node and all below it, and refuse a document with too many."""
            nonlocal visit_count
            visit_count += 1
            if visit_count > _MAX_YAML_NODES:
                raise yaml.constructor.ConstructorError(
                    None, None, "its aliases make it larger than any config"
                )
            if not isinstance(node, yaml.CollectionNode):
                return
            for entry in node.value:
                # an entry of a mapping is a pair of key and value, one of a sequence is a node
                children = entry if isinstance(entry, tuple) else (entry,)
                for child in children:
                    visit(child)

        # None for an empty document
        if root is not None:
            visit(root)
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the dict of a mapping's node, and refuse a mapping that has a key twice."""
        key_texts: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in key_texts:
                line_number = key_node.start_mark.line + 1
                problem = f"line {line_number} gives {key_node.value!r} a second time"
                raise yaml.constructor.ConstructorError(None, None, problem)
            key_texts.add(key_node.value)
        return super().construct_mapping(node, deep)


def _load_yaml(text: str) -> Any:
    """Read a text as YAML.

    Raises:
        ValueError: it is no YAML.
        RecursionError: it is nested too deeply.
    """
    try:
        return yaml.load(text, _StrictLoader)  # noqa: S506  # a subclass of SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def read_json(text: str | bytes) -> Any:
    """Read a JSON text as `json.loads` does, but refuse a key that stands twice in an object.

    Python would take the last value without a word.

    Raises:
        ValueError: the text is no JSON, or has a key twice.
    """
    return json.loads(text, object_pairs_hook=refuse_repeated_keys)


class DuplicateKeyError(ValueError):
    """An object of a JSON text gives a key twice."""


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of keys and values as a dictionary, if no key is repeated.

    It is passed to `json.loads` as `object_pairs_hook`.

    Raises:
        DuplicateKeyError: a key is in two pairs.
    """
    value_by_key = dict(pairs)
    if len(value_by_key) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated_key, _ = counts.most_common(1)[0]
        raise DuplicateKeyError(f"{short_repr(repeated_key)} is given twice in one object")
    return value_by_key


def yaml_value(text: str) -> Any:
    """Return the value that a text has behind `key:` in YAML; the text itself if it is no YAML.

    So words of the command line mean the same as in a config file. For example, `[a, 1]` becomes
    `["a", 1]`, `off` becomes False, and `{a` stays a text.
    """
    try:
        return _load_yaml(text)
    except (ValueError, RecursionError):
        return text


def yaml_line(value: object) -> str:
    """Return a value as one writes it behind `key:` in a YAML file, in one line."""
    document = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False)
    # PyYAML ends a document that is a single word with a line of dots
    return document.removesuffix("\n").removesuffix("\n...")


def flow_mapping(text: str) -> dict[str, Any] | None:
    """Return the mapping that a text such as `{a: 1, b: [2, 3]}` stands for, in YAML's flow style.

    The result is None where the text is no such mapping, or has a value that JSON cannot hold, such
    as a date.
    """
    content = yaml_value(text) if text.startswith("{") else None
    if not isinstance(content, dict):
        return None
    try:
        # Through JSON and back: a value that JSON cannot hold raises an error.
        return dict(json.loads(json.dumps(content)))
    except (ValueError, TypeError, RecursionError):
        return None


def read_mapping(option: str, path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file of `key: value` lines, with its keys as texts.

    Args:
        option: the option that names the file, with which a message begins.
        path: the file.

    Raises:
        UserError: the file cannot be read, or has another form.
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
        type_name = "nothing" if content is None else type(content).__name__
        raise UserError(f"{option}: {str(path)!r}: expected `key: value` lines, found {type_name}")
    return {str(key): value for key, value in content.items()}


def printable(text: str) -> str:
    """Return a text with a space in place of each control character and line end.

    Otherwise a row of a data set that is printed could send escape sequences to the terminal.
    """
    return "".join(char if char.isprintable() else " " for char in text)
