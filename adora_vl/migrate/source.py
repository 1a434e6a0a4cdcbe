"""What a person has of another trainer: a YAML file, a shell script, or the words of a command."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adora_vl.migrate.shell import read_script
from adora_vl.utils.cli import dotted, read_mapping, split_list, yaml_value
from adora_vl.utils.errors import UserError

_KEY_VALUE = re.compile(r"\+{0,2}[\w.]+=")
_PARENTS = 4  # folders above a script in which the top of its repository is looked for
# The words behind which the keys begin, by the word before: `swift rlhf`, `trl grpo`.
_STARTERS = ("swift", "megatron", "trl")


@dataclass
class Source:
    """The values of another trainer's config, by its names.

    `folder`: of the file, from which its paths are looked for. `environment`: the variables that
    a script sets. `launcher`: the words before the keys, such as `accelerate launch
    --num_processes 8 train.py`. `remarks`: what a person has to know of the reading.
    """

    values: dict[str, Any]
    folder: Path = Path()
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def find(self, name: str) -> Path | None:
        """Return the file or folder of a name that a config has, None where there is none.

        It is looked for from here, from the config's folder, and from the folders above that, since
        scripts name files from the top of their repository.
        """
        if not name or "\0" in name:
            return None
        folder = self.folder.resolve()
        folders = [Path(), self.folder, *list(folder.parents)[:_PARENTS]]
        for parent in folders:
            path = parent / Path(name).expanduser()
            try:
                if path.exists():
                    return path
            except OSError:  # a text of some length is no file name, from any folder
                return None
        return None


def read_source(config: Path | None, words: Sequence[str], *, nested: bool) -> Source:
    """Read a config and the words laid over it. Raises `UserError`.

    `config`: a YAML file or a shell script; None where the words are all there is. `nested`:
    whether mappings are the trainer's groups of keys, which get dotted names.
    """
    source = Source({}, folder=config.parent if config else Path())
    if config is not None and _is_script(config):
        _read_shell(source, config, nested=nested)
    elif config is not None:
        _lay_file(source, config, nested=nested)
    keys = _keys_of_command(list(words))
    number_before = len(words) - len(keys)
    if number_before:
        source.launcher = list(words[:number_before])
    # `MAX_PIXELS=1003520 swift rlhf ...` sets a variable for the command behind it
    variables: dict[str, str] = {}
    for word in words[:number_before]:
        name, sign, value = word.partition("=")
        if sign:
            variables[name] = value
    source.environment = {**source.environment, **variables}
    _lay_words(source, keys, nested=nested)
    return source


def _is_script(config: Path) -> bool:
    """Return whether a file is a shell script, by its name or its first line."""
    if config.suffix in (".sh", ".bash", ".slurm"):
        return True
    try:
        return config.read_bytes().startswith(b"#!")
    except OSError:
        # reading it as YAML names what is wrong with it
        return False


def _read_shell(source: Source, config: Path, *, nested: bool) -> None:
    """Read the command of a script that has the most keys into `source`.

    A script may also prepare data or start a server; what trains has the most to say. A remark
    tells where a second command comes near. Raises `UserError` where no command has a key.
    """
    try:
        text = config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"CONFIG: {str(config)!r} cannot be read ({error}); name a file") from error
    script = read_script(text, config.name)
    source.environment = script.variables
    whole_commands = _with_lost_lines(source, script.commands, config.name)
    commands = [_keys_of_command(command) for command in whole_commands]
    key_counts = [len(list(filter(_is_key, command))) for command in commands]
    largest_count = max(key_counts, default=0)
    if not largest_count:
        raise UserError(
            f"CONFIG: {str(config)!r} has no command with KEY=VALUE or --key value; name the "
            "script that starts the training"
        )
    long_commands = [count for count in key_counts if count > largest_count // 2]
    if len(long_commands) > 1:
        source.remarks.append(
            f"{config.name} has several commands with keys; the longest one was read"
        )
    command_index = key_counts.index(largest_count)
    keys = commands[command_index]
    command = whole_commands[command_index]
    number_before = len(command) - len(keys)
    source.launcher = command[:number_before]
    _lay_words(source, keys, nested=nested)


def _with_lost_lines(source: Source, commands: list[list[str]], name: str) -> list[list[str]]:
    """Join a command that begins with a key to the one before it.

    The line above it has lost its backslash. A shell would start the training without these keys,
    which cannot be what the script's author wants. `name`: the file, for the remark.
    """
    joined: list[list[str]] = []
    for command in commands:
        if joined and _is_key(command[0]):
            joined[-1] = [*joined[-1], *command]
            source.remarks.append(
                f"{name}: the line before {command[0]:.60} has no backslash at its end; the keys "
                "behind it were read too, which a shell would not pass on"
            )
        else:
            joined.append(command)
    return joined


def _is_key(word: str) -> bool:
    """Return whether a word of a command names a key, as `--key` and `group.key=value` do."""
    return word.startswith("--") or bool(_KEY_VALUE.match(word))


def _keys_of_command(words: list[str]) -> list[str]:
    """Return the words behind the program of a command, which are those of the trainer.

    `accelerate launch --num_processes 8 train.py --model m` has options of its own before the
    program. Words that begin with a key, or name no program, are all the trainer's.
    """
    name, sign, _ = "".join(words[:1]).partition("=")
    if name.startswith("--") or (sign and "." in name):
        return words
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        is_module = before == "-m" and not word.startswith("accelerate")
        is_file = word.endswith(".py") and not _is_key(word)
        if is_module or is_file or before in _STARTERS:
            return words[index + 1 :]
    return words


def _lay_file(source: Source, config: Path, *, nested: bool) -> None:
    """Read a YAML file, whose values replace those of the same names in `source`."""
    for key, value in read_mapping("CONFIG", config).items():
        source.values |= dotted(key, value) if nested else {key: value}


def _lay_words(source: Source, words: list[str], *, nested: bool) -> None:
    """Read the keys of a command into `source`.

    They replace the values of the config file that the command builds on, which replace those that
    were read before.
    """
    values = _values_of(words)
    for base in _base_names(values):
        path = source.find(base)
        if path is None:
            source.remarks.append(
                f"{base}: the config that the command builds on is not to be found; run this "
                "where it is, or name it before the script's keys"
            )
        else:
            _lay_file(source, path, nested=nested)
    for key, value in values.items():
        source.values |= dotted(key, value) if nested else {key: value}


def _base_names(values: dict[str, Any]) -> list[str]:
    """Remove the config files that a command builds on from its values, and return their names.

    EasyR1 writes `config=FILE`, TRL and ms-swift `--config FILE`, verl `--config-path` and
    `--config-name`.
    """
    names: list[str] = []
    folder = values.pop("config_path", None)
    name = values.pop("config_name", None)
    if name is not None:
        file = f"{name}".removesuffix(".yaml") + ".yaml"
        names.append(str(Path(str(folder or ""), file)))
    config = values.pop("config", None)
    if config is not None:
        names.append(str(config))
    return names


def _values_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of `key=value`, `--key value ...`, `--key=value` and `--flag` by their keys.

    Raises `UserError` for a word that belongs to no key.
    """
    texts: dict[str, list[str]] = {}  # by key, the words behind it
    option: str | None = None
    for word in words:
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            option = name.replace("-", "_")
            texts[option] = [value] if sign else []
        elif option is not None and not _is_dotted_key(word):
            texts[option].append(word)
        elif _KEY_VALUE.match(word):
            name, _, value = word.lstrip("+").partition("=")
            texts[name] = [value]
            option = None
        else:
            raise UserError(
                f"command line: {word!r:.60} belongs to no key; write KEY=VALUE, or --key value"
            )
    return {key: _value_of(values) for key, values in texts.items()}


def _is_dotted_key(word: str) -> bool:
    """Return whether a word is `group.key=value`; `a=b` without a dot may be an option's value."""
    key, _, _ = word.partition("=")
    return bool(_KEY_VALUE.match(word)) and "." in key


def _value_of(texts: list[str]) -> Any:
    """Return the value of the words behind a key; a key without any is a switch."""
    if not texts:
        return True
    if len(texts) == 1 and "\n" in texts[0] and not texts[0].startswith(("[", "{")):
        # YAML would fold the lines of a prompt into one
        return texts[0]
    if len(texts) == 1:
        return yaml_value(texts[0])
    try:
        return [_number_in(text) for text in split_list([text.removesuffix(",") for text in texts])]
    except ValueError as error:
        raise UserError(f"command line: {' '.join(texts)!r:.60} {error}") from error


def options_of(words: Sequence[str]) -> dict[str, str]:
    """Return the options of a launcher by their names; words that belong to none are left out.

    They are written `--key value` or `--key=value`; one without a value has an empty text.
    """
    options: dict[str, str] = {}
    option = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            option = name.replace("-", "_")
            options[option] = value
        elif option:
            options[option] = options[option] or word
            option = ""
    return options


def _number_in(text: object) -> Any:
    """Return the number that a text is, as in `--reward_weights 1.0 0.1`, or else the text."""
    value = yaml_value(text) if isinstance(text, str) else text
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else text
