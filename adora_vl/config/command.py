"""The reader of a training command: the config file, with the command line laid over it.

Nothing slow is imported here, so a mistake is named at once. Each value is converted once: those of
our own keys and of `RANGES` here, those of keys whose types only TRL and Transformers know when
their dataclasses are built (`build_configs` in `schema.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adora_vl.config.keys import AdoraKeys, AdoraScriptArguments
from adora_vl.config.trl_keys import Key, read_keys
from adora_vl.config.trl_ranges import RANGES
from adora_vl.config.values import convert, declared, takes
from adora_vl.utils.cli import is_null, read_mapping, yaml_line, yaml_value
from adora_vl.utils.errors import UserError, nearest
from adora_vl.utils.own_files import search_files_beside

# A key of another trainer's configs: the trainer's name, and its word for `adora_vl.migrate`.
OTHERS = {
    "worker": ("EasyR1", "easyr1"),
    "actor_rollout_ref": ("verl", "verl"),
    "rlhf_type": ("ms-swift", "swift"),
}
# The options of the training command beside the keys, which a misspelt key may have meant.
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
# The options of ADORA's criteria, by which groups are judged even if that is only logged.
_CRITERIA = frozenset(
    {
        *("criteria", "combine", "tau", "empty_wrong", "ties", "no_figure", "no_correct"),
        "needs_correct",
    }
)


class CliWords(list[str]):
    """The words behind a key on the command line.

    They become a value once it is known what the key takes.
    """


@dataclass(frozen=True, kw_only=True)
class CliArgs:
    """A command that was read.

    `words`: of the command line. `file`: the config file, if it names one. `values`: the converted
    value of each key that the user has set and whose type is known here. `unread`: the values of
    the other keys that were set, as `CliWords` or as the file has them; their types only TRL knows.
    """

    words: Sequence[str]
    file: Path | None
    values: Mapping[str, Any]
    unread: Mapping[str, object]

    @property
    def set_keys(self) -> set[str]:
        """The keys that the user has set, in the file or on the command line."""
        return {*self.values, *self.unread}


def read_value(key: str, value: object, hint: Any) -> Any:
    """Convert what the user wrote for a key to the type `hint`. Raises `UserError`."""
    if isinstance(value, CliWords):
        value = _join_words(key, value, hint)
    return convert(key, value, hint)


def read(arguments: Sequence[str], *, needs_model: bool = True) -> CliArgs:
    """Read a training command, and set the environment variables that its file asks for.

    `needs_model`: refuse a command that names no model. Raises `UserError` for a key that no
    training config has, a file that cannot be read, and a value that its key does not take.
    """
    keys = read_keys()
    words_by_key = _by_key(arguments)
    file = _config_file(words_by_key)
    search_files_beside(file)
    values = read_file(file) if file else {}
    _set_environment(values.pop("env", {}), str(file))
    for dotted_key, words in words_by_key:
        if dotted_key != "config":
            _lay_over(values, dotted_key=dotted_key, words=words, keys=keys)
    hints = {**RANGES, **declared(AdoraScriptArguments), **declared(AdoraKeys)}
    unread = {key: value for key, value in values.items() if key not in hints}
    values = {
        key: read_value(key, value, hints[key]) for key, value in values.items() if key in hints
    }
    if "output_dir" in values:
        refuse_no_folder(values["output_dir"])
    if needs_model and "model_name_or_path" not in values:
        raise UserError(
            "model_name_or_path: not set; name a file with --config "
            "FILE.yaml, or a model folder, a hub id or 'tiny' (`python -m adora_vl.train --help`)"
        )
    return CliArgs(words=arguments, file=file, values=values, unread=unread)


def _config_file(words_by_key: Sequence[tuple[str, CliWords]]) -> Path | None:
    """Return the file that a command names with `--config`, if any. Raises `UserError`."""
    named = [words for key, words in words_by_key if key == "config"]
    if not named:
        return None
    if len(named) > 1:
        raise UserError("--config: given twice; name one file, and other keys on the command line")
    words = named[0]
    refuse_stray(words[1:])
    if not words:
        raise UserError("--config: expected the path of a YAML file after it")
    return recipe(words[0])


def recipe(name: str) -> Path:
    """Return the config file `name`, or the recipe of that name which the package ships.

    A recipe is named without its folder, such as `adora_3b_1gpu_lora`, and a file of the user's
    with the same name wins.
    """
    file = Path(name)
    word = Path(name).with_suffix("").name
    # the top of a checkout, and where a wheel installs the recipes
    homes = (
        Path(__file__).parents[2],
        Path(sys.prefix, "share", "adora_vl"),
    )
    names_recipe = name in (word, f"{word}.yaml") and not file.exists()
    if not names_recipe:
        return file
    for home in homes:
        shipped = home / "configs" / "train" / f"{word}.yaml"
        if shipped.is_file():
            return shipped
    return file


def read_file(path: Path) -> dict[str, Any]:
    """Read the mapping in a config file and check its keys. Raises `UserError` naming the file."""
    content = read_mapping("--config", path)
    for key, (trainer, command) in OTHERS.items():
        ours = f"`python -m adora_vl.migrate {command} {path}` writes one of ours"
        if key in content:
            raise UserError(f"--config: {str(path)!r} is a config of {trainer}; {ours}")
    for key, value in content.items():
        if key != "env":
            _check_key(key, value=value, where=str(path), keys=read_keys())
    return content


def refuse_no_folder(value: object) -> None:
    """Raise `UserError` for an `output_dir` that nobody can mean.

    The root of the file system is one; null is another, for which Transformers would choose a
    folder.
    """
    if is_null(value):
        raise UserError("output_dir: null is no folder; name one for this run, such as runs/first")
    if not isinstance(value, str) or not value.strip():
        return
    folder = Path(value).resolve()
    if folder == Path(folder.anchor):
        raise UserError(
            f"output_dir: {value!r} is the root of the file system; name a folder for this run"
        )


def refuse_stray(words: Sequence[str]) -> None:
    """Raise `UserError` if there are words that belong to no key, naming the first."""
    if words:
        raise UserError(
            f"command line: {words[0]!r} belongs to no key; write --config FILE.yaml, or --key "
            "value"
        )


def _by_key(arguments: Sequence[str]) -> list[tuple[str, CliWords]]:
    """Return the keys of a command line in their order, each with its words."""
    words_by_key: list[tuple[str, CliWords]] = []
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            words = CliWords([value] if equals else [])
            words_by_key.append((name.replace("-", "_"), words))
        elif words_by_key:
            _, words = words_by_key[-1]
            words.append(word)
        else:
            refuse_stray([word])
    return words_by_key


def _check_key(
    key: str,
    value: object,
    where: str,
    keys: Mapping[str, Key],
    options: Collection[str] = (),
) -> None:
    """Raise `UserError` for a key that is not among `keys`, naming the nearest key or option."""
    if key in keys:
        return
    root, _, option = key.partition(".")
    if option and root in keys:
        line = f"{root}: {{{option}: {yaml_line(value)}}}"
        raise UserError(f"{where}: {key}: dots are for the command line; write {line}")
    spellings = _spellings(keys, options)
    close = nearest(key, spellings)
    hint = f"; did you mean {spellings[close]!r}?" if close else ""
    raise UserError(f"{where}: unknown key '{key}'{hint}")


def _spellings(keys: Mapping[str, Key], options: Collection[str]) -> dict[str, str]:
    """Return what an unknown key may have meant, and how that is written."""
    spellings: dict[str, str] = {}
    for key in keys.values():
        spellings[key.name] = key.name
        for option in key.options:
            spellings[option.name] = option.name
    # An option of ADORA without its block, such as `adora_factor`.
    for name in ("mode", "factor", *_CRITERIA):
        spellings[f"adora_{name}"] = f"adora_method.adora.{name}"
    for word in options:
        spellings[word.replace("-", "_")] = f"--{word}"
    return spellings


def _lay_over(
    values: dict[str, Any], dotted_key: str, words: CliWords, keys: Mapping[str, Key]
) -> None:
    """Lay what the command line says of a key over what the file says, in `values`.

    A dot in the key reaches into a mapping, and `no_KEY` is false for a key that is true by
    default.
    """
    key, *names = dotted_key.split(".")
    negated = key[3:] if key.startswith("no_") and key not in keys else ""
    if negated in keys and keys[negated].default is True:
        refuse_stray(words)
        values[negated] = False
        return
    _check_key(key, value=words, where="command line", keys=keys, options=OPTIONS)
    if not names:
        values[key] = _keep_criteria(words, values.get(key)) if key == "adora_method" else words
        return
    base = values.get(key, keys[key].default)
    if isinstance(base, CliWords):
        base = _parse_words(base)
    values[key] = _with(key, base, names, _parse_words(words))


def _keep_criteria(words: CliWords, recipe_methods: object) -> Any:
    """Return the methods that the command line names, with the criteria of the recipe's ADORA kept.

    If ADORA is not among the named methods, it is added switched off, so that its criteria are
    still logged.
    """
    if len(words) != 1 or "{" in words[0]:
        # a mapping says all of its methods itself
        return words
    names = [name.strip() for name in words[0].split("+")]
    criteria = _criteria_of(recipe_methods)
    names_twice = len(set(names)) < len(names)
    if not criteria or "adora" in names or names_twice:
        return words
    methods: dict[str, Any] = {name: {} for name in names}
    methods["adora"] = {**criteria, "mode": "off"}
    return methods


def _criteria_of(recipe_methods: object) -> dict[str, Any]:
    """Return the criteria that a recipe sets for its ADORA; none where it sets none."""
    if not isinstance(recipe_methods, Mapping):
        return {}
    options = recipe_methods.get("adora")
    if not isinstance(options, Mapping):
        return {}
    return {name: value for name, value in options.items() if name in _CRITERIA}


def _with(key: str, base: Any, names: Sequence[str], value: Any) -> Any:
    """Return a copy of `base` with another value below `names`.

    `base` may be a mapping, a word such as `dapo+adora`, or a list of words and mappings. A word or
    a list has to contain the first name already.
    """
    if not names:
        return value
    name = names[0]
    inner_names = names[1:]
    if isinstance(base, list):
        return _with_in_list(key, base, names, value)
    mapping: Mapping[Any, Any] = {}
    if isinstance(base, Mapping):
        mapping = base
    elif isinstance(base, str):
        mapping = {word.strip(): {} for word in base.split("+")}
        _entry_of(key, list(mapping), name)
    entry = next((entry for entry in mapping if _is_named(entry, name)), name)
    return {**mapping, entry: _with(key, mapping.get(entry), inner_names, value)}


def _with_in_list(key: str, base: list[Any], names: Sequence[str], value: Any) -> list[Any]:
    """Return a copy of a list of words and mappings with another value below `names`."""
    entries = [next(iter(item)) if isinstance(item, Mapping) else item for item in base]
    entry = _entry_of(key, entries, names[0])
    index = entries.index(entry)
    item = base[index]
    options = item[entry] if isinstance(item, Mapping) else {}
    changed = [*base]
    changed[index] = {entry: _with(key, options, names[1:], value)}
    return changed


def _is_named(entry: object, name: str) -> bool:
    """Return whether `name` means this entry: it is its name, or that of its function in a file."""
    return str(entry).rpartition(":")[2] == name


def _entry_of(key: str, entries: Sequence[Any], name: str) -> Any:
    """Return the entry that a name means. Raises `UserError` if there is none."""
    entry = next((entry for entry in entries if _is_named(entry, name)), None)
    if entry is None:
        listed = ", ".join(map(str, entries))
        raise UserError(f"{key}: {listed} has no {name}; write --{key} {name} before its options")
    return entry


def _parse_words(words: CliWords) -> Any:
    """Return the value that these words would have in a file; true for no words."""
    values = [yaml_value(word) for word in words]
    if not values:
        return True
    return values[0] if len(values) == 1 else values


def _join_words(key: str, words: CliWords, hint: Any) -> Any:
    """Return the words as `convert` takes them: all of them for a list, else the only one."""
    if not words and takes(hint, bool):
        return True
    if not words:
        raise UserError(f"{key}: its value is missing; write --{key} VALUE")
    if takes(hint, list):
        return list(words)
    refuse_stray(words[1:])
    return words[0]


def _set_environment(variables: object, where: str) -> None:
    """Set the environment variables of a file's `env`, as TRL does. Raises `UserError`."""
    if not isinstance(variables, dict):
        raise UserError(
            f"{where}: env: {variables!r:.60} is not a mapping of environment variables, such as "
            "{A: 1}"
        )
    for name, value in variables.items():
        is_name = isinstance(name, str) and bool(name) and "=" not in name
        has_nul = "\0" in f"{name}{value}"
        if not is_name or has_nul or isinstance(value, dict | list):
            raise UserError(
                f"{where}: env: {name!r:.60}: {value!r:.60} is not a name and a text; write such "
                "as A: 1"
            )
    os.environ.update({name: str(value) for name, value in variables.items()})
