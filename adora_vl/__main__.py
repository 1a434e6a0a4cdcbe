"""`python -m adora_vl`: the commands of this project, each with what it does."""

import sys
from collections.abc import Sequence

from adora_vl.utils.cli import exit_code_of
from adora_vl.utils.errors import UserError, did_you_mean

COMMANDS = {
    "adora_vl.train": "train a model; --dry-run says before whether it fits",
    "adora_vl.report": "make a page of one or more runs, to click through",
    "adora_vl.doctor": "check the installation with the config of a run",
    "adora_vl.export": "make a model, or an adapter, of a checkpoint",
    "adora_vl.migrate": "make a config of one of EasyR1, verl, ms-swift or TRL",
    "adora_vl.rewards.explain": "say what an answer would score, and why",
    "data_prep": "prepare, convert, filter and inspect problems",
    "eval": "evaluate a model on a benchmark or on problems of your own",
}


def _text() -> str:
    """Return the list of the commands."""
    lines = [f"  python -m {name:<26}{words}" for name, words in COMMANDS.items()]
    return "\n".join(["Commands (--help behind each says more):", "", *lines])


def _list_commands(words: Sequence[str]) -> None:
    """Print the commands of the project.

    Raises `UserError` for any word behind `python -m adora_vl`: a command is a module of its own,
    such as `adora_vl.train`.
    """
    unknown_words = [word for word in words if word not in ("-h", "--help")]
    if unknown_words:
        word = unknown_words[0]
        module_by_name = {module.rpartition(".")[2]: module for module in COMMANDS}
        module = module_by_name.get(word)
        if module:
            suggestion = ""
            remedy = f"write python -m {module}"
        else:
            suggestion = did_you_mean(word, module_by_name)
            remedy = "`python -m adora_vl` lists all"
        raise UserError(f"command line: {word!r:.60} is no command{suggestion}; {remedy}")
    print(_text())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    return exit_code_of(lambda: _list_commands(words), "nothing was done")


if __name__ == "__main__":
    sys.exit(main())
