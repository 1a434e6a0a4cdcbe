"""The reader of a training command: the config file, with the command line laid over it.

Nothing slow is imported here, so a mistake is named at once. Each value is converted once: those of
our own keys and of `TYPE_BY_TRL_KEY` here, those of keys whose types only TRL and Transformers know
when their dataclasses are built (`build_configs` in `schema.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.config.keys import AdoraKeys, AdoraScriptArguments
from adora_vl.config.trl_keys import ConfigKey, config_key_by_name
from adora_vl.config.trl_ranges import TYPE_BY_TRL_KEY
from adora_vl.config.values import annotations_of_keys, convert_key
from adora_vl.utils.cli import is_null, read_mapping, yaml_line, yaml_value
from adora_vl.utils.convert import allows_type
from adora_vl.utils.errors import UserError, nearest_choice
from adora_vl.utils.own_files import search_files_beside

# Other trainers, whose config a user may name by mistake, by a key that only their configs have:
# what the trainer is called, and what `adora_vl.migrate` calls it.
OTHER_TRAINERS_BY_KEY = {
    "worker": ("EasyR1", "easyr1"),
    "actor_rollout_ref": ("verl", "verl"),
    "rlhf_type": ("ms-swift", "swift"),
}
# The options of the training command that are no config keys. A misspelt key may have meant one.
COMMAND_OPTIONS = (
    "config",
    "dry-run",
    *(option.name.replace("_", "-") for option in fields(DryRunOptions)),
    "help",
    "help-all",
)
# The options of ADORA that decide which groups it changes. The log has these decisions even where
# ADORA itself is off.
_CRITERIA_OPTIONS = frozenset(
    {
        "criteria",
        "combine",
        "tau",
        "empty_wrong",
        "ties",
        "no_figure",
        "no_correct",
        "needs_correct",
    }
)


class CliWords(list[str]):
    """The words that follow `--key` on the command line, as the shell has split them.

    They become a value once it is known what the key takes.
    """


@dataclass(frozen=True)
class CliKey:
    """A key on the command line.

    `dotted_name`: its name, with underscores, and dots where it reaches into a mapping, such as
    `adora_rollouts.refill`. `words`: those that follow it.
    """

    dotted_name: str
    words: CliWords


@dataclass(frozen=True, kw_only=True)
class CliArgs:
    """A training command that was read: what the user has set, in the file or on the command line.

    The keys that the user has set are in `converted_values` or in `raw_values`.
    """

    words: Sequence[str]
    """All words of the command line."""
    file: Path | None
    """The config file; None for a command that names none."""
    converted_values: Mapping[str, Any]
    """The converted value of each key whose type is known without TRL."""
    raw_values: Mapping[str, object]
    """The values of the other keys, as `CliWords` or as the file has them.

    They are converted once TRL is imported.
    """

    @property
    def set_keys(self) -> set[str]:
        """The keys that the user has set, in the file or on the command line."""
        return {*self.converted_values, *self.raw_values}


def convert_cli_value(key: str, value: object, hint: Any) -> Any:
    """Convert what the user wrote for a key to the type of its annotation. Raises `UserError`.

    `value`: the value in the config file, or the `CliWords` behind the key on the command line.
    """
    if isinstance(value, CliWords):
        value = _words_for_annotation(key, value, hint)
    return convert_key(key, value, hint)


def parse_command(arguments: Sequence[str]) -> CliArgs:
    """Read a training command: its config file, and the command line, which wins over the file.

    The environment variables that the file asks for are set. TRL is not imported, so keys whose
    types only TRL knows stay unconverted.

    `arguments`: the words of the command line.

    Raises `UserError` for a key that no training config has, a file that cannot be read, a value
    that its key does not take, and a command that names no model.
    """
    keys = config_key_by_name()
    cli_keys = _group_words_by_key(arguments)
    file = _config_file(cli_keys)
    # A FILE.py that a key names is also looked for in the folder of the config file.
    search_files_beside(file)
    values_from_user = read_config_file(file) if file else {}
    _set_environment(values_from_user.pop("env", {}), error_prefix=str(file))
    for cli_key in cli_keys:
        if cli_key.dotted_name != "config":
            _override_from_command_line(values_from_user, cli_key, keys)
    known_types = {
        **TYPE_BY_TRL_KEY,
        **annotations_of_keys(AdoraScriptArguments),
        **annotations_of_keys(AdoraKeys),
    }
    converted_values: dict[str, Any] = {}
    raw_values: dict[str, object] = {}
    for key, value in values_from_user.items():
        if key in known_types:
            converted_values[key] = convert_cli_value(key, value, known_types[key])
        else:
            raw_values[key] = value
    if "output_dir" in converted_values:
        refuse_unusable_output_dir(converted_values["output_dir"])
    if "model_name_or_path" not in converted_values:
        raise UserError(
            "model_name_or_path: not set; name a file with --config "
            "FILE.yaml, or a model folder, a hub id or 'tiny' (`python -m adora_vl.train --help`)"
        )
    return CliArgs(
        words=arguments,
        file=file,
        converted_values=converted_values,
        raw_values=raw_values,
    )


def _config_file(cli_keys: Sequence[CliKey]) -> Path | None:
    """Return the config file that a command names with `--config`, or None without it.

    Raises `UserError` if `--config` is there twice, or not exactly one path follows it.
    """
    config_options = [key for key in cli_keys if key.dotted_name == "config"]
    if not config_options:
        return None
    if len(config_options) > 1:
        raise UserError("--config: given twice; name one file, and other keys on the command line")
    words = config_options[0].words
    refuse_extra_words(words[1:])
    if not words:
        raise UserError("--config: expected the path of a YAML file after it")
    return resolve_config_path(words[0])


def resolve_config_path(name: str) -> Path:
    """Return the path of the config file that `--config NAME` means.

    NAME is a path, or the name of a recipe, such as `adora_3b_1gpu_lora`. Recipes are the config
    files that the package ships. If the user has a file NAME, that file is meant.
    """
    user_file = Path(name)
    recipe_name = user_file.with_suffix("").name
    # A recipe is named without a folder, with or without `.yaml`.
    may_be_recipe = name in (recipe_name, f"{recipe_name}.yaml")
    if not may_be_recipe or user_file.exists():
        return user_file
    checkout = Path(__file__).parents[2]
    installed_by_wheel = Path(sys.prefix, "share", "adora_vl")
    for home in (checkout, installed_by_wheel):
        shipped_file = home / "configs" / "train" / f"{recipe_name}.yaml"
        if shipped_file.is_file():
            return shipped_file
    # Reading this file will say that it does not exist.
    return user_file


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a config file as the values of its keys, and check that all keys exist.

    Raises `UserError` naming the file, also for a config of another trainer.
    """
    values_by_key = read_mapping("--config", path)
    for key, (trainer, migrate_word) in OTHER_TRAINERS_BY_KEY.items():
        if key in values_by_key:
            command = f"`python -m adora_vl.migrate {migrate_word} {path}`"
            raise UserError(
                f"--config: {str(path)!r} is a config of {trainer}; {command} writes one of ours"
            )
    for key, value in values_by_key.items():
        # `env` is TRL's: environment variables, and no key of a config.
        if key != "env":
            _check_key(key, value=value, error_prefix=str(path), keys=config_key_by_name())
    return values_by_key


def refuse_unusable_output_dir(value: object) -> None:
    """Raise `UserError` for an `output_dir` that nobody can mean: null, or the file system's root.

    Transformers would choose a folder of its own for null.
    """
    if is_null(value):
        raise UserError("output_dir: null is no folder; name one for this run, such as runs/first")
    if not isinstance(value, str) or not value.strip():
        # The conversion of the key's value refuses these.
        return
    folder = Path(value).resolve()
    if folder == Path(folder.anchor):
        raise UserError(
            f"output_dir: {value!r} is the root of the file system; name a folder for this run"
        )


def refuse_extra_words(words: Sequence[str]) -> None:
    """Raise `UserError` if `words`, which belong to no key of the command line, has any."""
    if words:
        raise UserError(
            f"command line: {words[0]!r} belongs to no key; write --config FILE.yaml, or --key "
            "value"
        )


def _group_words_by_key(arguments: Sequence[str]) -> list[CliKey]:
    """Split a command line into its keys, each with the words that follow it.

    Both `--key value` and `--key=value` are read. For example, `--beta=0.1 --dataset-name a b`
    gives the keys `beta` with the words [0.1], and `dataset_name` with [a, b].

    Raises `UserError` for words before the first key.
    """
    cli_keys: list[CliKey] = []
    for word in arguments:
        if word.startswith("--"):
            name, equals_sign, value = word[2:].partition("=")
            words = CliWords([value] if equals_sign else [])
            cli_keys.append(CliKey(dotted_name=name.replace("-", "_"), words=words))
        elif cli_keys:
            cli_keys[-1].words.append(word)
        else:
            refuse_extra_words([word])
    return cli_keys


def _check_key(
    key: str,
    value: object,
    error_prefix: str,
    keys: Mapping[str, ConfigKey],
    command_options: Collection[str] = (),
) -> None:
    """Raise `UserError` for a key that no training config has, with a proposal what to write.

    Args:
        key: The key as the user wrote it.
        value: Its value, to write the proposal out.
        error_prefix: The file or the command line, for the error.
        keys: All keys of a training config by name.
        command_options: Options of the command that are no keys, such as `dry-run`; the user may
            have misspelt one of these.
    """
    if key in keys:
        return
    root, _, option = key.partition(".")
    if option and root in keys:
        line = f"{root}: {{{option}: {yaml_line(value)}}}"
        raise UserError(f"{error_prefix}: {key}: dots are for the command line; write {line}")
    suggestion_by_word = _suggestion_by_word(keys, command_options)
    nearest_word = nearest_choice(key, suggestion_by_word)
    hint = f"; did you mean {suggestion_by_word[nearest_word]!r}?" if nearest_word else ""
    raise UserError(f"{error_prefix}: unknown key '{key}'{hint}")


def _suggestion_by_word(
    keys: Mapping[str, ConfigKey], command_options: Collection[str]
) -> dict[str, str]:
    """Return what an error may propose to write in place of an unknown key.

    Each proposal stands under the word that the unknown key is compared with. Examples:

        beta            beta
        adora_factor    adora_method.adora.factor
        dry_run         --dry-run
    """
    suggestion_by_word: dict[str, str] = {}
    for key in keys.values():
        suggestion_by_word[key.name] = key.name
        for option in key.options:
            suggestion_by_word[option.name] = option.name
    # Users write an option of ADORA like a key of its own, such as `adora_factor`.
    for name in ("mode", "factor", *_CRITERIA_OPTIONS):
        suggestion_by_word[f"adora_{name}"] = f"adora_method.adora.{name}"
    for option_name in command_options:
        suggestion_by_word[option_name.replace("-", "_")] = f"--{option_name}"
    return suggestion_by_word


def _override_from_command_line(
    values: dict[str, Any], cli_key: CliKey, keys: Mapping[str, ConfigKey]
) -> None:
    """Write the value that the command line has for a key into `values`, over the config file's.

    The forms of a key, in the order in which they are tried:

        --no_key                 sets a key to false that is true by default
        --key.option VALUE       sets one option of a mapping
        --adora_method VALUE     also keeps ADORA's criteria of the config file
        --key VALUE              sets a key

    `keys`: all keys of a training config by name. Raises `UserError` for an unknown key.
    """
    key, *option_path = cli_key.dotted_name.split(".")
    words = cli_key.words
    if key not in keys and key.startswith("no_"):
        negated_key = key.removeprefix("no_")
        if negated_key in keys and keys[negated_key].default is True:
            refuse_extra_words(words)
            values[negated_key] = False
            return
    _check_key(
        key, value=words, error_prefix="command line", keys=keys, command_options=COMMAND_OPTIONS
    )
    if option_path:
        value_before = values.get(key, keys[key].default)
        if isinstance(value_before, CliWords):
            # The whole key was set too, earlier on the command line.
            value_before = _words_to_yaml_value(value_before)
        new_option = _words_to_yaml_value(words)
        values[key] = _with_option(key, value_before, option_path, new_option)
    elif key == "adora_method":
        values[key] = _methods_with_file_criteria(words, file_methods=values.get(key))
    else:
        values[key] = words


def _methods_with_file_criteria(words: CliWords, file_methods: object) -> Any:
    """Return the methods that `--adora_method` names, with ADORA's criteria from the config file.

    ADORA's criteria decide which groups it changes. Where the command line names other methods
    only, ADORA is added with the file's criteria but switched off, so that the log still has the
    decisions.

    For example, `dapo` with `{"adora": {"tau": 0.5, "factor": 2}}` in the file gives
    `{"dapo": {}, "adora": {"tau": 0.5, "mode": "off"}}`. `tau` is a criterion, `factor` is not.

    Args:
        words: The words behind `--adora_method`, such as `dapo+daro`.
        file_methods: The value of `adora_method` in the config file, None without one.
    """
    if len(words) != 1 or "{" in words[0]:
        # A mapping names all methods and their options itself.
        return words
    names = [name.strip() for name in words[0].split("+")]
    criteria = _criteria_options(file_methods)
    # A method that is named twice is refused later, so these words stay as they are.
    has_duplicates = len(set(names)) < len(names)
    if not criteria or "adora" in names or has_duplicates:
        return words
    methods: dict[str, Any] = {name: {} for name in names}
    methods["adora"] = {**criteria, "mode": "off"}
    return methods


def _criteria_options(file_methods: object) -> dict[str, Any]:
    """Return the options for ADORA's criteria in a config file's `adora_method`, if it has any.

    The criteria decide which groups of rollouts ADORA gives another weight.
    """
    if not isinstance(file_methods, Mapping):
        return {}
    options = file_methods.get("adora")
    if not isinstance(options, Mapping):
        return {}
    return {name: value for name, value in options.items() if name in _CRITERIA_OPTIONS}


def _with_option(key: str, container: Any, option_path: Sequence[str], value: Any) -> Any:
    """Return a copy of a key's value in which one option is set, as `--key.name.option VALUE` asks.

    For example, `--adora_method.adora.factor 2` makes `{"dapo": {}, "adora": {"factor": 2}}` of
    `dapo+adora`.

    Args:
        key: Name of the config key, for errors.
        container: The key's value before: a mapping, a text such as `dapo+adora`, or a list of
            names and mappings. Anything else is replaced by a mapping. A text or a list has to
            contain the first name of the path already.
        option_path: Names from the outermost mapping to the option, such as `name` and `option`. If
            it is empty, the new value replaces the whole container.
        value: The option's new value.
    """
    if not option_path:
        return value
    name, *inner_path = option_path
    if isinstance(container, list):
        return _with_option_in_list(key, container, option_path, value)
    mapping: Mapping[Any, Any] = {}
    if isinstance(container, Mapping):
        mapping = container
    elif isinstance(container, str):
        mapping = {word.strip(): {} for word in container.split("+")}
        # This refuses an option of a name that the text does not have.
        _find_entry(key, list(mapping), name)
    # NAME alone also means an entry FILE.py:NAME of the mapping.
    entry = next((entry for entry in mapping if _entry_has_name(entry, name)), name)
    return {**mapping, entry: _with_option(key, mapping.get(entry), inner_path, value)}


def _with_option_in_list(
    key: str, items: list[Any], option_path: Sequence[str], value: Any
) -> list[Any]:
    """Return a copy of a list in which an option of one of its items is set.

    An item is a name, or a mapping of one name to its options, as in
    `adora_reward: [accuracy, {judge: {model: m}}]`. For example, the path (judge, model) and the
    value m make `[accuracy, {judge: {model: m}}]` of `[accuracy, judge]`.

    `option_path`: the name of the item, then the names down to the option. Raises `UserError` for
    an item that is not in the list.
    """
    name, *inner_path = option_path
    entries = [next(iter(item)) if isinstance(item, Mapping) else item for item in items]
    entry = _find_entry(key, entries, name)
    index = entries.index(entry)
    item = items[index]
    options = item[entry] if isinstance(item, Mapping) else {}
    new_items = [*items]
    new_items[index] = {entry: _with_option(key, options, inner_path, value)}
    return new_items


def _entry_has_name(entry: object, name: str) -> bool:
    """Return whether `name` means an entry, which is a name or FILE.py:NAME."""
    return str(entry).rpartition(":")[2] == name


def _find_entry(key: str, entries: Sequence[Any], name: str) -> Any:
    """Return the entry that `name` means: the name itself, or an entry FILE.py:NAME.

    For example, `Canon` means the entry `docs/canon.py:Canon`. `key`: the config key that has the
    entries. Raises `UserError` if none is meant.
    """
    entry = next((entry for entry in entries if _entry_has_name(entry, name)), None)
    if entry is None:
        listed = ", ".join(map(str, entries))
        raise UserError(f"{key}: {listed} has no {name}; write --{key} {name} before its options")
    return entry


def _words_to_yaml_value(words: CliWords) -> Any:
    """Return the value that the words of a key would have in a config file; true for no words."""
    values = [yaml_value(word) for word in words]
    if not values:
        return True
    return values[0] if len(values) == 1 else values


def _words_for_annotation(key: str, words: CliWords, hint: Any) -> Any:
    """Return the words that follow a key on the command line as one value, still unconverted.

    The value is True for a flag without words, a list for a key that takes a list, else the only
    word. `hint`: the annotation of the key. Raises `UserError` for no word or too many.
    """
    if not words and allows_type(hint, bool):
        return True
    if not words:
        raise UserError(f"{key}: its value is missing; write --{key} VALUE")
    if allows_type(hint, list):
        return list(words)
    refuse_extra_words(words[1:])
    return words[0]


def _set_environment(variables: object, error_prefix: str) -> None:
    """Set the environment variables that a config file has under `env`, as TRL does.

    `error_prefix`: the file, for errors. Raises `UserError` for what is no variable.
    """
    if not isinstance(variables, dict):
        raise UserError(
            f"{error_prefix}: env: {variables!r:.60} is not a mapping of environment variables, such as "
            "{A: 1}"
        )
    for name, value in variables.items():
        is_name = isinstance(name, str) and bool(name) and "=" not in name
        has_nul = "\0" in f"{name}{value}"
        if not is_name or has_nul or isinstance(value, dict | list):
            raise UserError(
                f"{error_prefix}: env: {name!r:.60}: {value!r:.60} is not a name and a text; write such "
                "as A: 1"
            )
    os.environ.update({name: str(value) for name, value in variables.items()})
