"""The command `python -m eval BENCHMARK ...`, which is `adora-vl eval BENCHMARK ...` too.

It does the same as `python -m eval.BENCHMARK ...`, and also takes a benchmark of the user's own,
`FILE.py:NAME`.
"""

import ast
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from adora_vl.evals.benchmark import BENCHMARK_NAMES, find_benchmark
from adora_vl.utils.cli import run_command
from adora_vl.utils.errors import UserError

# Names that are not benchmarks, with the module of each command.
_MODULE_BY_COMMAND = {"all": "eval.suite", "compare": "eval.compare"}
_USAGE = (
    f"usage: python -m eval {{{','.join((*BENCHMARK_NAMES, *_MODULE_BY_COMMAND))},FILE.py:NAME}} ...\n"
    "       adora-vl eval does the same, where a folder eval/ of your own is in the way"
)
_EXAMPLES = """
examples:
  python -m eval problems run --model tiny --data data/mine --output runs/mine/eval
  python -m eval problems run --help
  python -m eval compare runs/before/eval runs/after/eval"""


def _read_description(benchmark: str) -> str:
    """Return what `--help` says of a benchmark: the text after the colon in its module docstring.

    The file is parsed and not imported, since importing all benchmarks takes long.
    """
    source = Path(__file__).with_name(f"{benchmark}.py").read_bytes()
    docstring = ast.get_docstring(ast.parse(source)) or ""
    first_paragraph = docstring.partition("\n\n")[0].replace("\n", " ")
    _, _, description = first_paragraph.partition(": ")
    return description


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of a benchmark, `all` for a suite of benchmarks, or `compare`.

    Args:
        arguments: The arguments of the command line; the first names the command. None takes the
            arguments of this process, and an empty list prints the help.

    Returns the exit code of the command, or 2 for an unknown name.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    name, *command_arguments = arguments or ["--help"]
    if name in ("-h", "--help"):
        return run_command(_print_help, interrupt_note="nothing was done")
    if name in _MODULE_BY_COMMAND:
        # Each command is imported only when it is run, since its imports take long.
        command_main: Callable[[list[str]], int] = import_module(_MODULE_BY_COMMAND[name]).main
        return command_main(command_arguments)
    try:
        benchmark = find_benchmark(name, extra_names=tuple(_MODULE_BY_COMMAND))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from eval.command import main as run_benchmark

    return run_benchmark(benchmark, command_arguments)


def _print_help() -> None:
    """Print the usage, a line for each benchmark, and examples."""
    lines = [_USAGE, ""]
    for name in BENCHMARK_NAMES:
        lines.append(f"  {name:<12}{_read_description(name)}")
    lines.append(_EXAMPLES)
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
