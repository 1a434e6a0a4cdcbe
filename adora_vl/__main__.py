"""`python -m adora_vl`, or `adora-vl`: the commands of this project, and the way to start one.

`python -m adora_vl train ...` is `python -m adora_vl.train ...`.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from adora_vl.utils.cli import run_command
from adora_vl.utils.errors import UserError, did_you_mean

# What each command does, by its module
DESCRIPTION_BY_COMMAND = {
    "adora_vl.train": "train a model; --dry-run says before whether it fits",
    "adora_vl.report": "make a page of one or more runs, to click through",
    "adora_vl.doctor": "check the installation with the config of a run",
    "adora_vl.export": "make a model, or an adapter, of a checkpoint",
    "adora_vl.migrate": "make a config of one of EasyR1, verl, ms-swift or TRL",
    "adora_vl.rewards.explain": "say what an answer would score, and why",
    "data_prep": "prepare, convert, filter and inspect problems",
    "eval": "evaluate a model on a benchmark or on problems of your own",
}
_MODULE_BY_NAME = {module.rpartition(".")[2]: module for module in DESCRIPTION_BY_COMMAND}


def _list_commands() -> None:
    """Print the commands of the project."""
    lines = [
        f"  python -m {module:<26}{purpose}" for module, purpose in DESCRIPTION_BY_COMMAND.items()
    ]
    print("\n".join(["Commands (--help behind each says more):", "", *lines]))
    print("\nadora-vl NAME is the same, with the last word of such a name, as in `adora-vl train`.")


def _refuse_unknown(name: str) -> None:
    """Raise `UserError`, since there is no command of this name."""
    suggestion = did_you_mean(name, _MODULE_BY_NAME)
    raise UserError(
        f"command line: {name!r:.60} is no command{suggestion}; `python -m adora_vl` lists all"
    )


def _run_command(module: str, words: Sequence[str]) -> None:
    """Run a command with the words of its command line, as `python -m MODULE WORDS` does.

    The command ends this process by `SystemExit` with its exit code.
    """
    # A folder `eval` of the user's may lie where this is started, and would be run in place of
    # ours.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first word names, or list all, and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        return run_command(_list_commands, interrupt_note="nothing was done")
    if name not in _MODULE_BY_NAME:
        return run_command(lambda: _refuse_unknown(name), interrupt_note="nothing was done")
    _run_command(_MODULE_BY_NAME[name], words[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
