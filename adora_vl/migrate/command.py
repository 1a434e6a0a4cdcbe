"""The command `python -m adora_vl.migrate`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from adora_vl.migrate.config_text import format_unmatched, yaml_text
from adora_vl.migrate.easyr1 import convert_easyr1
from adora_vl.migrate.migration import LaunchPlan, Migration, path_exists
from adora_vl.migrate.source import read_source
from adora_vl.migrate.swift import convert_swift
from adora_vl.migrate.trl import convert_trl
from adora_vl.migrate.verl import convert_verl
from adora_vl.rewards.entries import with_canonical_names
from adora_vl.utils.cli import Parser, path_option, printable, run_command
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import naming_write_errors, replace_file


@dataclass(frozen=True)
class Trainer:
    """Another trainer whose configs can be converted."""

    convert: Callable[[Migration], LaunchPlan]
    """Sets our keys in the migration, and returns how the other trainer starts its processes."""
    nested: bool
    """Whether its keys are in groups, such as `worker.actor.optim.lr`."""


TRAINERS: Mapping[str, Trainer] = {
    "easyr1": Trainer(convert=convert_easyr1, nested=True),
    "verl": Trainer(convert=convert_verl, nested=True),
    "swift": Trainer(convert=convert_swift, nested=False),
    "trl": Trainer(convert=convert_trl, nested=False),
}
# This command's own options, and whether a value follows each of them
_TAKES_VALUE_BY_OPTION = {
    "--output": True,
    "--reward": True,
    "--all": False,
    "--help": False,
    "-h": False,
}
_CONFIG_SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".bash", ".slurm")
_EPILOG = """\
examples:
  python -m adora_vl.migrate easyr1 examples/qwen2_5_vl_3b_geo3k_grpo.sh
  python -m adora_vl.migrate verl run_qwen2_5_vl-7b_lora.sh trainer.n_gpus_per_node=2
  python -m adora_vl.migrate swift train.sh --reward reward.py:accuracy
  python -m adora_vl.migrate trl accelerate launch grpo_vlm.py --model_name_or_path M --use_peft
"""


def convert_config(
    trainer: str, config: Path | None, *, reward: str | None, words: Sequence[str]
) -> tuple[Migration, LaunchPlan]:
    """Convert the config of another trainer to our keys, and return too how its run is started.

    Args:
        trainer: one of `TRAINERS`.
        config: a YAML file or a shell script; None where `words` are all there is.
        reward: FILE.py:FUNCTION in place of the config's own reward; None for that one.
        words: arguments such as KEY=VALUE and --key value, which replace values of the config.

    Raises:
        UserError: the config cannot be read or converted.
    """
    other_trainer = TRAINERS[trainer]
    source = read_source(config, words, nested=other_trainer.nested)
    migration = Migration(source=source)
    launch = other_trainer.convert(migration)
    if reward:
        migration.set_key("adora_reward", with_canonical_names([reward]), note="--reward")
        # what a converter remarked about the config's own reward is settled
        migration.remarks = [text for text in migration.remarks if not text.startswith("reward")]
    migration.remarks += source.remarks
    migration.list_unmatched()
    return migration, launch


def _write_config(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Convert a config, write it to a file, and print what to look at and the next command.

    Args:
        options: the options of this command.
        words: the other trainer's arguments of the command line.

    Raises:
        UserError: the config cannot be converted, or the file is there already.
    """
    config: Path | None = options.config
    if config is None and not words:
        raise UserError(
            "CONFIG: name a YAML file or a shell script, or write KEY=VALUE; see `python -m "
            "adora_vl.migrate --help`"
        )
    migration, launch = convert_config(options.trainer, config, reward=options.reward, words=words)
    output: Path = options.output or Path(f"{options.trainer}.adora.yaml")
    if config is not None and options.output is None:
        output = config.with_suffix(".adora.yaml")
    if output.exists():
        raise UserError(f"output: {str(output)!r} is there; choose another name with --output")
    source_name = config.name if config else "the command line"
    text = yaml_text(migration, trainer=options.trainer, name=source_name, everything=options.all)
    with naming_write_errors("output", output):
        replace_file(output, text)
    lines = format_unmatched(migration, everything=options.all)
    hidden_count = len(migration.unmatched) - len(lines)
    print(f"{output}: {len(migration.keys)} keys")
    if lines:
        print("Without a counterpart:", *lines, sep="\n")
    if hidden_count:
        print(f"  (--all lists {hidden_count} more, which have their defaults)")
    if migration.remarks:
        print("Look at these:", *[f"  {printable(text)}" for text in migration.remarks], sep="\n")
    next_words = ["python", "-m", "adora_vl.train", "--config", str(output), "--dry-run"]
    next_words += launch.options
    print(f"Next: {shlex.join(next_words)}")


class _DividedArguments(NamedTuple):
    """The arguments of `adora_vl.migrate`, divided into its own and the other trainer's."""

    our_arguments: list[str]
    """This command's options, the name of the trainer and the config."""
    trainer_arguments: list[str]
    """The other trainer's keys and values, or its whole command."""


def _divide_arguments(arguments: Sequence[str]) -> _DividedArguments:
    """Divide the arguments of a command line into this command's and the other trainer's.

    argparse cannot do it, since the other trainer's arguments look like options too. For example:

        arguments                           this command's          the other trainer's
        swift a.sh --all --beta 0.1         --all swift a.sh        --beta 0.1
        trl accelerate launch a.py --lr 1   trl                     accelerate launch a.py --lr 1

    The first argument that is no option of this command is the trainer. The next one is the config,
    unless it is a key or begins a launch line.
    """
    options: list[str] = []
    trainer_and_config: list[str] = []
    trainer_arguments: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals_sign, _ = word.partition("=")
        takes_value = _TAKES_VALUE_BY_OPTION.get(name, False)
        is_own_option = name in _TAKES_VALUE_BY_OPTION and (takes_value or not equals_sign)
        may_be_config = len(trainer_and_config) == 1 and not trainer_arguments
        if is_own_option:
            options.append(word)
            value_follows = takes_value and not equals_sign
            if value_follows:
                # at the end of the line there is none, which argparse reports
                options += islice(words, 1)
        elif not trainer_and_config or (may_be_config and _is_config(word)):
            trainer_and_config.append(word)
        else:
            trainer_arguments.append(word)
    return _DividedArguments([*options, *trainer_and_config], trainer_arguments)


def _is_config(word: str) -> bool:
    """Return whether a word names a config: a file that exists, or a name with such an ending."""
    if word.startswith("--") or "=" in word:
        return False
    return Path(word).suffix in _CONFIG_SUFFIXES or path_exists(Path(word))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, which writes the converted config and prints what to look at.

    Returns:
        the exit code: 0 for success, 2 for wrong input, 130 after Ctrl-C.
    """
    parser = Parser(
        prog="python -m adora_vl.migrate",
        description="A config of another trainer as one of ours.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trainer", choices=list(TRAINERS), help="whose config it is")
    parser.add_argument(
        "config",
        type=path_option,
        nargs="?",
        metavar="CONFIG",
        help="its YAML file or shell script; behind it KEY=VALUE and --key value of theirs, or in "
        "its place their whole command",
    )
    parser.add_argument(
        "--output",
        type=path_option,
        metavar="FILE",
        help="default: CONFIG with .adora.yaml at its end",
    )
    parser.add_argument(
        "--reward",
        metavar="FILE.py:FUNCTION",
        help="the reward function, in its own form or in TRL's; default: the config's own",
    )
    parser.add_argument("--all", action="store_true", help="list also what has its default there")

    def run() -> None:
        """Parse the command line, and write the config."""
        divided = _divide_arguments(sys.argv[1:] if arguments is None else arguments)
        _write_config(parser.parse_args(divided.our_arguments), divided.trainer_arguments)

    return run_command(run, interrupt_note="nothing was written")
