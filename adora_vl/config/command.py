"""What a user wrote, read once: the file, the command line laid over it, each value as its key
takes it. Nothing slow is imported here, so a mistake is named at once; values of keys whose types
TRL and Transformers know are read later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from adora_vl.config.help import Key, read_keys
from adora_vl.config.keys import AdoraKeys, AdoraScriptArguments
from adora_vl.config.values import RANGES, convert, declared, takes
from adora_vl.utils.cli import is_null, read_mapping, yaml_line, yaml_value
from adora_vl.utils.errors import UserError, nearest
from adora_vl.utils.own_files import look_beside

# A key that the configs of another trainer have: its name, and the word of `adora_vl.migrate`.
OTHERS = {
    "worker": ("EasyR1", "easyr1"),
    "actor_rollout_ref": ("verl", "verl"),
    "rlhf_type": ("ms-swift", "swift"),
}
# What the training command takes beside the keys, for a word that is meant as one of them.
OPTIONS = (
    "config",
    "dry-run",
    "card-gib",
    "processes",
    "accelerate-config",
    "write-config",
    "help",
    "help-all",
)
# Options of ADORA by which groups are judged, also for the log alone.
_JUDGES = frozenset(
    {"criteria", "combine", "tau", "empty_wrong", "ties", "no_correct", "needs_correct"}
)
T = TypeVar("T")


class CliWords(list[str]):
    """The words behind a key on the command line, which become a value once it is known what the
    key takes.
    """


@dataclass(frozen=True)
class CliArgs:
    """A command as it was read. `values`: of each key that was given."""

    arguments: Sequence[str]
    file: Path | None
    values: dict[str, Any]

    @property
    def words(self) -> set[str]:
        """The keys that the user has set, in the file or on the command line."""
        return set(self.values)

    def read(self, key: str, hint: Any) -> Any:
        """The value of a key that was given, as `hint`. Raises `UserError`."""
        value = self.values[key]
        return convert(
            key, _of_words(key, value, hint) if isinstance(value, CliWords) else value, hint
        )

    def build(self, kind: type[T]) -> T:
        """The dataclass with the given keys.

        Raises `UserError`, also with the one line of TRL or Transformers.
        """
        keys: Any = kind
        try:
            return kind(
                **{
                    key: self.read(key, hint)
                    for key, hint in declared(keys).items()
                    if key in self.values
                }
            )
        except UserError:
            raise
        except (ValueError, TypeError) as error:
            raise UserError(" ".join(str(error).split())) from error

    def but(self, **values: Any) -> CliArgs:
        return CliArgs(self.arguments, self.file, self.values | values)


def read(arguments: Sequence[str], *, whole: bool = True) -> CliArgs:
    """The command.

    Raises `UserError` for a key that no training config has, a file that cannot be read, a value
    that its key does not take, and without a model, unless not `whole`. Sets the environment that
    the file asks for.
    """
    known = read_keys()
    spoken = _by_key(arguments)
    names = [words for key, words in spoken if key == "config"]
    if len(names) > 1:
        raise UserError("--config: given twice; name one file, and other keys on the command line")
    refuse_stray(names[0][1:] if names else [])
    if names and not names[0]:
        raise UserError("--config: expected the path of a YAML file after it")
    file = recipe(names[0][0]) if names else None
    look_beside(file)
    values = read_file(file) if file else {}
    _set_environment(values.pop("env", {}), str(file))
    for key, words in spoken:
        if key != "config":
            _lay_over(values, spoken=key, words=words, known=known)
    given = CliArgs(arguments, file, values)
    hints = {**RANGES, **declared(AdoraScriptArguments), **declared(AdoraKeys)}
    for key in [key for key in values if key in hints]:
        values[key] = given.read(key, hints[key])
    if "output_dir" in values:
        check_output_dir(values["output_dir"])
    if whole and "model_name_or_path" not in values:
        raise UserError(
            "model_name_or_path: not set; name a file with --config "
            "FILE.yaml, or a model folder, a hub id or 'tiny' (`python -m adora_vl.train --help`)"
        )
    return given


def recipe(name: str) -> Path:
    """The file of that name, or else the recipe that comes with this package, as
    `adora_3b_1gpu_lora`.
    """
    file = Path(name)
    word = Path(name).with_suffix("").name
    # a checkout; where a wheel puts them
    homes = (
        Path(__file__).parents[2],
        Path(sys.prefix, "share", "adora_vl"),
    )
    shipped = [home / "configs" / "train" / f"{word}.yaml" for home in homes]
    named = name in (word, f"{word}.yaml") and not file.exists()
    return next((each for each in shipped if named and each.is_file()), file)


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a config file, its keys checked. Raises `UserError` naming the file."""
    content = read_mapping("--config", path)
    for key, (trainer, command) in OTHERS.items():
        ours = f"`python -m adora_vl.migrate {command} {path}` writes one of ours"
        if key in content:
            raise UserError(f"--config: {str(path)!r} is a config of {trainer}; {ours}")
    for key, value in content.items():
        if key != "env":
            _check_key(key, value=value, where=str(path), known=read_keys())
    return content


def check_output_dir(value: Any) -> None:
    """Raise `UserError` for a place that nobody means: null would be a folder of Transformers'
    choice.
    """
    if is_null(value):
        raise UserError("output_dir: null is no folder; name one for this run, such as runs/first")
    root = (
        isinstance(value, str)
        and value.strip()
        and Path(value).resolve() == Path(Path(value).resolve().anchor)
    )
    if root:
        raise UserError(
            f"output_dir: {value!r} is the root of the file system; name a folder for this run"
        )


def refuse_stray(words: Sequence[str]) -> None:
    """Raise `UserError` for the first of these words, which belong to no key."""
    for word in words:
        if 1:
            raise UserError(
                f"command line: {word!r} belongs to no key; write --config FILE.yaml, or --key "
                "value"
            )


def _by_key(arguments: Sequence[str]) -> list[tuple[str, CliWords]]:
    """The keys of a command line in their order, each with its words."""
    found: list[tuple[str, CliWords]] = []
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found.append((name.replace("-", "_"), CliWords([value] if equals else [])))
        elif found:
            found[-1][1].append(word)
        else:
            refuse_stray([word])
    return found


def _check_key(
    key: str, value: Any, where: str, known: Mapping[str, Key], options: Collection[str] = ()
) -> None:
    """Raises `UserError` for a key that is not `known`, with the nearest one that is, or of the
    `options`.
    """
    if key in known:
        return
    root, _, option = key.partition(".")
    if option and root in known:
        line = f"{root}: {{{option}: {yaml_line(value)}}}"
        raise UserError(f"{where}: {key}: dots are for the command line; write {line}")
    near = {one.name: one.name for each in known.values() for one in (each, *each.options)}
    # An option without its block, as `adora_factor`.
    near |= {f"adora_{name}": f"adora_method.adora.{name}" for name in ("mode", "factor", *_JUDGES)}
    near |= {option.replace("-", "_"): f"--{option}" for option in options}
    close = nearest(key, near)
    raise UserError(
        f"{where}: unknown key '{key}'{f'; did you mean {near[close]!r}?' if close else ''}"
    )


def _lay_over(
    values: dict[str, Any], spoken: str, words: CliWords, known: Mapping[str, Key]
) -> None:
    """Put what the command line says of a key over what the file says.

    A dot reaches into a mapping.
    """
    key, *names = spoken.split(".")
    negated = key[3:] if key.startswith("no_") and key not in known else ""
    if negated in known and known[negated].default is True:
        refuse_stray(words)
        values[negated] = False
        return
    _check_key(key, value=words, where="command line", known=known, options=OPTIONS)
    if not names:
        values[key] = _judging(words, values.get(key)) if key == "adora_method" else words
        return
    base = values.get(key, known[key].default)
    base = _plain(base) if isinstance(base, CliWords) else base
    values[key] = _with(key, base, names, _plain(words))


def _judging(words: CliWords, recipe: Any) -> Any:
    """The methods that the command line names, with ADORA's criteria of the recipe for the log if
    ADORA is not one.
    """
    given = recipe.get("adora") if isinstance(recipe, Mapping) else None
    kept = (
        {name: value for name, value in given.items() if name in _JUDGES}
        if isinstance(given, Mapping)
        else {}
    )
    names = (
        [name.strip() for name in words[0].split("+")]
        if len(words) == 1 and "{" not in words[0]
        else ["adora"]
    )
    if not kept or "adora" in names or len(set(names)) < len(names):
        return words
    return {**{name: {} for name in names}, "adora": {**kept, "mode": "off"}}


def _with(key: str, base: Any, names: Sequence[str], value: Any) -> Any:
    """`base` with another value below `names`.

    Of a word or a list the first name has to be one of them already.
    """
    if not names:
        return value
    name = names[0]
    rest = names[1:]
    if isinstance(base, str):
        base = {each.strip(): {} for each in base.split("+")}
        _entry_of(key, list(base), name)
    if isinstance(base, list):
        entries = [next(iter(each)) if isinstance(each, Mapping) else each for each in base]
        at = entries.index(_entry_of(key, entries, name))
        inside = base[at][entries[at]] if isinstance(base[at], Mapping) else {}
        new: Any = {entries[at]: _with(key, inside, rest, value)}
        return [*base[:at], new, *base[at + 1 :]]
    inside = base if isinstance(base, Mapping) else {}
    known = next((each for each in inside if str(each).rpartition(":")[2] == name), name)
    return {**inside, known: _with(key, inside.get(known), rest, value)}


def _entry_of(key: str, entries: Sequence[Any], name: str) -> Any:
    """The entry that a name means: itself, or the function of a file."""
    found = next((each for each in entries if str(each).rpartition(":")[2] == name), None)
    if found is None:
        given = ", ".join(map(str, entries))
        raise UserError(f"{key}: {given} has no {name}; write --{key} {name} before its options")
    return found


def _plain(words: CliWords) -> Any:
    """Words as the file would have them."""
    read = [yaml_value(word) for word in words]
    return read[0] if len(read) == 1 else read or True


def _of_words(key: str, words: CliWords, hint: Any) -> Any:
    """What `convert` is given for words: all of them for a list, else the only one."""
    if not words and takes(hint, bool):
        return True
    if not words:
        raise UserError(f"{key}: its value is missing; write --{key} VALUE")
    if takes(hint, list):
        return list(words)
    refuse_stray(words[1:])
    return words[0]


def _set_environment(variables: object, where: str) -> None:
    """As TRL does with the `env` of a file."""
    if not isinstance(variables, dict):
        raise UserError(
            f"{where}: env: {variables!r:.60} is not a mapping of environment variables, such as "
            "{A: 1}"
        )
    for name, value in variables.items():
        text = f"{name}{value}"
        if (
            not isinstance(name, str)
            or not name
            or "=" in name
            or "\0" in text
            or isinstance(value, dict | list)
        ):
            raise UserError(
                f"{where}: env: {name!r:.60}: {value!r:.60} is not a name and a text; write such "
                "as A: 1"
            )
    os.environ.update({name: str(value) for name, value in variables.items()})
