"""The command `python -m adora_vl.migrate`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adora_vl.migrate.config_text import without_counterpart, yaml_text
from adora_vl.migrate.easyr1 import convert_easyr1
from adora_vl.migrate.migration import LaunchPlan, Migration, path_exists
from adora_vl.migrate.source import read_source
from adora_vl.migrate.swift import convert_swift
from adora_vl.migrate.trl import convert_trl
from adora_vl.migrate.verl import convert_verl
from adora_vl.utils.cli import Parser, exit_code_of, path, printable
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replace_file


@dataclass(frozen=True)
class Trainer:
    """Another trainer: what converts its configs, and whether its keys are in groups.

    `convert` returns how the run is started.
    """

    convert: Callable[[Migration], LaunchPlan]
    nested: bool


TRAINERS: Mapping[str, Trainer] = {
    "easyr1": Trainer(convert_easyr1, nested=True),
    "verl": Trainer(convert_verl, nested=True),
    "swift": Trainer(convert_swift, nested=False),
    "trl": Trainer(convert_trl, nested=False),
}
# Of our own options, whether a value follows.
_OPTIONS = {"--output": True, "--reward": True, "--all": False, "--help": False, "-h": False}
_ENDINGS = (".yaml", ".yml", ".json", ".sh", ".bash", ".slurm")
_EPILOG = """\
examples:
  python -m adora_vl.migrate easyr1 examples/qwen2_5_vl_3b_geo3k_grpo.sh
  python -m adora_vl.migrate verl run_qwen2_5_vl-7b_lora.sh trainer.n_gpus_per_node=2
  python -m adora_vl.migrate swift train.sh --reward reward.py:accuracy
  python -m adora_vl.migrate trl accelerate launch grpo_vlm.py --model_name_or_path M --use_peft
"""


def convert_config(
    trainer: str, config: Path | None, reward: str | None = None, words: Sequence[str] = ()
) -> Migration:
    """Convert the config of another trainer to our keys.

    `config`: a YAML file or a shell script. `reward`: FILE.py:FUNCTION in place of the config's own
    reward. `words`: KEY=VALUE and --key value, laid over the config. Raises `UserError`.
    """
    migration, _ = _convert(trainer, config, reward=reward, words=words)
    return migration


def _convert(
    trainer: str, config: Path | None, *, reward: str | None, words: Sequence[str]
) -> tuple[Migration, LaunchPlan]:
    """Convert a config as `convert_config` does, and return how its run is started too."""
    other_trainer = TRAINERS[trainer]
    source = read_source(config, words, nested=other_trainer.nested)
    migration = Migration(source)
    launch = other_trainer.convert(migration)
    if reward:
        migration.put("adora_reward", [reward], note="--reward")
        migration.remarks = [text for text in migration.remarks if not text.startswith("reward")]
    migration.remarks += source.remarks
    migration.list_unmatched()
    return migration, launch


def _write_config(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Write the converted config, and print what to look at."""
    config: Path | None = options.config
    if config is None and not words:
        raise UserError(
            "CONFIG: name a YAML file or a shell script, or write KEY=VALUE; see `python -m "
            "adora_vl.migrate --help`"
        )
    migration, launch = _convert(options.trainer, config, reward=options.reward, words=words)
    output: Path = options.output or Path(f"{options.trainer}.adora.yaml")
    if config is not None and options.output is None:
        output = config.with_suffix(".adora.yaml")
    if output.exists():
        raise UserError(f"output: {str(output)!r} is there; choose another name with --output")
    source_name = config.name if config else "the command line"
    text = yaml_text(migration, options.trainer, source_name, everything=options.all)
    replace_file(output, text)
    listed = without_counterpart(migration, everything=options.all)
    hidden = len(migration.unmatched) - len(listed)
    print(f"{output}: {len(migration.keys)} keys")
    if listed:
        print("Without a counterpart:", *listed, sep="\n")
    if hidden:
        print(f"  (--all lists {hidden} more, which have their defaults)")
    if migration.remarks:
        print("Look at these:", *[f"  {printable(text)}" for text in migration.remarks], sep="\n")
    words = ["-m", "adora_vl.train", "--config", str(output), "--dry-run", *launch.options]
    print(f"Next: {shlex.join(['python', *words])}")


def _divide_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the words of a command into ours and the other trainer's, and return both.

    The first word without dashes is the trainer. The next one is the config, unless it is a key or
    begins a launch line.
    """
    options: list[str] = []
    positional: list[str] = []
    theirs: list[str] = []
    words = iter(arguments)
    for word in words:
        name, sign, _ = word.partition("=")
        takes_value = _OPTIONS.get(name, False)
        if name in _OPTIONS and (takes_value or not sign):
            options.append(word)
            if takes_value and not sign:
                options += [value for value in [next(words, None)] if value is not None]
        elif not positional or (len(positional) == 1 and not theirs and _is_config(word)):
            positional.append(word)
        else:
            theirs.append(word)
    return [*options, *positional], theirs


def _is_config(word: str) -> bool:
    """Return whether a word is the path of a YAML file or a script."""
    if word.startswith("--") or "=" in word:
        return False
    return Path(word).suffix in _ENDINGS or path_exists(Path(word))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""

    parser = Parser(
        prog="python -m adora_vl.migrate",
        description="A config of another trainer as one of ours.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trainer", choices=list(TRAINERS), help="whose config it is")
    parser.add_argument(
        "config",
        type=path,
        nargs="?",
        metavar="CONFIG",
        help="its YAML file or shell script; behind it KEY=VALUE and --key value of theirs, or in "
        "its place their whole command",
    )
    parser.add_argument(
        "--output", type=path, metavar="FILE", help="default: CONFIG with .adora.yaml at its end"
    )
    parser.add_argument(
        "--reward",
        metavar="FILE.py:FUNCTION",
        help="the reward function, in its own form or in TRL's; default: the config's own",
    )
    parser.add_argument("--all", action="store_true", help="list also what has its default there")

    def run() -> None:
        """Read the words, and write the config."""
        ours, theirs = _divide_words(sys.argv[1:] if arguments is None else arguments)
        _write_config(parser.parse_args(ours), theirs)

    return exit_code_of(run, "nothing was written")
