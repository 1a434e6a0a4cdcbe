"""Reads a config of another trainer: a YAML file, a shell script, or the arguments of a command."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adora_vl.migrate.shell import read_script
from adora_vl.utils.cli import read_mapping, split_list, with_dotted_keys, yaml_value
from adora_vl.utils.errors import UserError

_KEY_VALUE_PATTERN = re.compile(r"\+{0,2}[\w.]+=")
# Folders above a script in which the top of its repository is looked for
_MAX_PARENTS = 4
# Programs whose first word is a subcommand, such as `rlhf` of `swift rlhf`; keys begin after it
_PROGRAMS_WITH_SUBCOMMAND = ("swift", "megatron", "trl")


@dataclass
class SourceConfig:
    """What was read of another trainer: the values of its config, and how it is started."""

    values: dict[str, Any]
    """The values by the trainer's names, which are dotted for keys in groups: `a.b`."""
    folder: Path = Path()
    """The folder of the config, from which its relative paths are looked for."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables that a script sets."""
    launcher: list[str] = field(default_factory=list)
    """The arguments before the keys, such as `accelerate launch --num_processes 8 train.py`."""
    remarks: list[str] = field(default_factory=list)
    """What a person has to look at, each a line."""

    def find_path(self, name: str) -> Path | None:
        """Return the path of a file or folder that a config names; None where there is none.

        It is looked for in the current folder, in that of the config, and in the folders above
        that, since scripts name files from the top of their repository.
        """
        if not name or "\0" in name:
            return None
        folder = self.folder.resolve()
        folders = [Path(), self.folder, *list(folder.parents)[:_MAX_PARENTS]]
        for parent in folders:
            path = parent / Path(name).expanduser()
            try:
                if path.exists():
                    return path
            except OSError:  # the text is too long for the name of a file
                return None
        return None


def read_source(config: Path | None, words: Sequence[str], *, nested: bool) -> SourceConfig:
    """Read a config of another trainer, and arguments that replace its values.

    Args:
        config: a YAML file or a shell script; None where the words are all there is.
        words: arguments such as KEY=VALUE and --key value, or a whole command of the other trainer.
        nested: whether the trainer's keys are in groups, as `worker.actor.optim.lr`. Nested
            mappings then become dotted names; otherwise a mapping is the value of its key.

    Raises:
        UserError: the file cannot be read, or a word belongs to no key.
    """
    source = SourceConfig(values={}, folder=config.parent if config else Path())
    if config is not None and _is_script(config):
        _read_training_command(source, config, nested=nested)
    elif config is not None:
        source.values |= read_yaml(config, nested=nested)
    program_arguments = _arguments_of_program(list(words))
    launcher_length = len(words) - len(program_arguments)
    launcher = list(words[:launcher_length])
    if launcher:
        source.launcher = launcher
    # `MAX_PIXELS=1003520 swift rlhf ...` sets a variable for the command after it
    variables: dict[str, str] = {}
    for word in launcher:
        name, equals_sign, value = word.partition("=")
        if equals_sign:
            variables[name] = value
    source.environment = {**source.environment, **variables}
    _apply_arguments(source, program_arguments, nested=nested)
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


def _read_training_command(source: SourceConfig, config: Path, *, nested: bool) -> None:
    """Read the training command of a script into `source`: the command that has the most keys.

    Other commands of a script may prepare data or start a server. If a second command has more than
    half as many keys, a remark says so.

    Args:
        source: what is read; its values, variables and launcher are set.
        config: the script.
        nested: whether the trainer's keys are in groups.

    Raises:
        UserError: the script cannot be read, or no command of it has a key.
    """
    if not config.exists():
        raise UserError(f"CONFIG: no file {str(config)!r}")
    try:
        text = config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"CONFIG: {str(config)!r} cannot be read ({error}); name a file") from error
    script = read_script(text, config.name)
    source.environment = script.variables
    commands = _join_broken_commands(source, script.commands, config.name)
    # for each command the arguments after its program, and how many keys are among them
    arguments_by_command = [_arguments_of_program(command) for command in commands]
    key_counts = [
        sum(_is_key(word) for word in program_arguments)
        for program_arguments in arguments_by_command
    ]
    largest_count = max(key_counts, default=0)
    if largest_count == 0:
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
    command = commands[command_index]
    program_arguments = arguments_by_command[command_index]
    launcher_length = len(command) - len(program_arguments)
    source.launcher = command[:launcher_length]
    _apply_arguments(source, program_arguments, nested=nested)


def _join_broken_commands(
    source: SourceConfig, commands: list[list[str]], name: str
) -> list[list[str]]:
    """Join commands of a script that fell apart, since a line lacks the backslash at its end.

    A "command" such as `--lr 1e-6`, which begins with a key, is the rest of the command before it.
    A shell would start the training without these keys, which cannot be what the author wants. A
    remark says so.

    Args:
        source: gets the remarks.
        commands: the commands of the script as lists of words.
        name: the name of the script, for the remarks.
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
    return word.startswith("--") or bool(_KEY_VALUE_PATTERN.match(word))


def _arguments_of_program(words: list[str]) -> list[str]:
    """Return the arguments of the training program in a command: what is after its name.

        accelerate launch --num_processes 8 train.py --model m   --model m
        python -m verl.trainer.main a.b=1                        a.b=1
        swift rlhf --model m                                     --model m
        --model m                                                --model m

    All words are returned where the first is a key, or where no program is among them.
    """
    if not words:
        return words
    first_name, equals_sign, _ = words[0].partition("=")
    is_dotted_key = equals_sign != "" and "." in first_name
    if first_name.startswith("--") or is_dotted_key:
        return words
    for index, word in enumerate(words):
        previous_word = words[index - 1] if index > 0 else ""
        is_module = previous_word == "-m" and not word.startswith("accelerate")
        is_file = word.endswith(".py") and not _is_key(word)
        is_subcommand = previous_word in _PROGRAMS_WITH_SUBCOMMAND
        if is_module or is_file or is_subcommand:
            return words[index + 1 :]
    return words


def read_yaml(config: Path, *, nested: bool) -> dict[str, Any]:
    """Return the values of a YAML file by their names, which are dotted if they are `nested`."""
    return _flatten_keys(read_mapping("CONFIG", config), nested=nested)


def _flatten_keys(values: Mapping[str, Any], *, nested: bool) -> dict[str, Any]:
    """Return the values of nested mappings by dotted names: `{"a": {"b": 1}}` gives `{"a.b": 1}`.

    If they are not `nested`, they are returned as they are.
    """
    if not nested:
        return dict(values)
    value_by_name: dict[str, Any] = {}
    for key, value in values.items():
        value_by_name |= with_dotted_keys(key, value)
    return value_by_name


def _apply_arguments(source: SourceConfig, words: list[str], *, nested: bool) -> None:
    """Set the values of a command's arguments in `source`, over those that were read so far.

    A command may name a config file that it builds on. That file is read first, so that the
    command's own values replace those of the file.

    Args:
        source: what was read so far; it is changed.
        words: the words of the command after its program.
        nested: whether nested mappings become dotted names.

    Raises:
        UserError: a word belongs to no key.
    """
    values = _parse_arguments(words)
    for config_name in _pop_config_files(values):
        path = source.find_path(config_name)
        if path is None:
            source.remarks.append(
                f"{config_name}: the config that the command builds on is not to be found; run this "
                "where it is, or name it before the script's keys"
            )
        else:
            source.values |= read_yaml(path, nested=nested)
    source.values |= _flatten_keys(values, nested=nested)


def _pop_config_files(values: dict[str, Any]) -> list[str]:
    """Return the names of the config files that a command builds on, and remove them from `values`.

    EasyR1 writes `config=FILE`, and TRL and ms-swift write `--config FILE`. In verl `--config-path
    conf --config-name ppo` is the file `conf/ppo.yaml`.
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


def _parse_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Parse arguments such as `key=value`, `--key value ...`, `--key=value` and `--flag`.

    For example, `a.b=1 --lr=0.5 --names x y --flag` gives {"a.b": 1, "lr": 0.5, "names": ["x",
    "y"], "flag": True}.

    Raises:
        UserError: a word belongs to no key.
    """
    words_by_key: dict[str, list[str]] = {}
    # the last `--key`, to which the words without a key of their own belong
    option: str | None = None
    for word in words:
        if word.startswith("--"):
            name, equals_sign, value = word.removeprefix("--").partition("=")
            option = name.replace("-", "_")
            words_by_key[option] = [value] if equals_sign else []
        elif option is not None and not _is_dotted_key(word):
            words_by_key[option].append(word)
        elif _KEY_VALUE_PATTERN.match(word):
            name, _, value = word.lstrip("+").partition("=")
            words_by_key[name] = [value]
            option = None
        else:
            raise UserError(
                f"command line: {word!r:.60} belongs to no key; write KEY=VALUE, or --key value"
            )
    return {key: _parse_value(value_words) for key, value_words in words_by_key.items()}


def _is_dotted_key(word: str) -> bool:
    """Return whether a word is `group.key=value`; `a=b` without a dot may be an option's value."""
    key, _, _ = word.partition("=")
    return bool(_KEY_VALUE_PATTERN.match(word)) and "." in key


def _parse_value(words: list[str]) -> Any:
    """Parse the words after a key to its value: True for no word, a list for several words.

    Raises:
        UserError: the words are a list whose opening bracket is never closed.
    """
    if not words:
        return True
    if len(words) == 1:
        is_collection = words[0].startswith(("[", "{"))
        has_lines = "\n" in words[0]
        # such as a prompt, whose lines YAML would fold into one
        if has_lines and not is_collection:
            return words[0]
        return yaml_value(words[0])
    try:
        entries = split_list([word.removesuffix(",") for word in words])
    except ValueError as error:
        raise UserError(f"command line: {' '.join(words)!r:.60} {error}") from error
    return [_parse_number(entry) for entry in entries]


def parse_launcher_options(words: Sequence[str]) -> dict[str, str]:
    """Parse the options of a launcher such as `accelerate launch`, and return them by their names.

    They are written `--key value` or `--key=value`. Words that belong to no option are left out.
    For example, `accelerate launch --num_processes 8 --use_cpu --x=3 train.py` gives
    {"num_processes": "8", "use_cpu": "", "x": "3"}.
    """
    value_by_option: dict[str, str] = {}
    # The option to which the next word belongs; empty for none. An option that has a value already,
    # as `--x=3`, keeps it.
    option = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            option = name.replace("-", "_")
            value_by_option[option] = value
        elif option:
            value_by_option[option] = value_by_option[option] or word
            option = ""
    return value_by_option


def _parse_number(text: object) -> Any:
    """Return an entry of a list as a number if its text is one, as in `--reward_weights 1.0 0.1`.

    Any other text stays as it is: `true` or `null` in a list are words.
    """
    value = yaml_value(text) if isinstance(text, str) else text
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else text
