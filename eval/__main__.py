"""The command `python -m eval BENCHMARK ...`, which is `adora-vl-eval BENCHMARK ...` too.

It does the same as `python -m eval.BENCHMARK ...`, and also takes a benchmark of the user's own,
`FILE.py:NAME`.
"""

import ast
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from adora_vl.evals.benchmark import NAMES, find_benchmark
from adora_vl.utils.cli import exit_code_of, imports
from adora_vl.utils.errors import UserError

_OTHERS = {"all": "eval.suite", "compare": "eval.compare"}
_USAGE = (
    f"usage: python -m eval {{{','.join((*NAMES, *_OTHERS))},FILE.py:NAME}} ...\n"
    "       adora-vl-eval does the same, where a folder eval/ of your own is in the way"
)
_EXAMPLES = """
examples:
  python -m eval problems run --model tiny --data data/mine --output runs/mine/eval
  python -m eval problems run --help
  python -m eval compare runs/before/eval runs/after/eval"""


def _description_of(benchmark: str) -> str:
    """Return the description of a benchmark in the first sentence of its module.

    The file is parsed and not imported, since importing all of them takes long.
    """
    source = Path(__file__).with_name(f"{benchmark}.py").read_bytes()
    docstring = ast.get_docstring(ast.parse(source)) or ""
    sentence = docstring.partition("\n\n")[0].replace("\n", " ")
    return sentence.partition(": ")[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark's command, `all` of a suite, or `compare`.

    Returns its exit code, or 2 for an unknown name.
    """
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        lines = [
            _USAGE,
            "",
            *(
                f"  {benchmark_name:<12}{_description_of(benchmark_name)}"
                for benchmark_name in NAMES
            ),
            _EXAMPLES,
        ]
        return exit_code_of(lambda: print("\n".join(lines)), "nothing was done")
    if name in _OTHERS:
        command: Callable[[list[str]], int] = import_module(_OTHERS[name]).main
        return command(rest)
    try:
        with imports():
            benchmark = find_benchmark(name, extra_names=tuple(_OTHERS))
            from eval.command import main as run
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run(benchmark, rest)


if __name__ == "__main__":
    sys.exit(main())
