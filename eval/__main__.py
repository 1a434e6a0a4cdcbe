"""`python -m eval BENCHMARK ...` and `adora-vl-eval BENCHMARK ...` do the same as `python -m eval.BENCHMARK ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from adora_vl.utils.cli import imports
from adora_vl.utils.errors import did_you_mean
from eval.benchmark import NAMES, named

_USAGE = f"usage: adora-vl-eval {{{','.join(NAMES)},compare}} ..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark's command or `compare`. Returns its exit code, or 2 for an unknown name."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    if name == "compare":
        from eval.compare import main as compare

        return compare(rest)
    if name not in NAMES:
        close = did_you_mean(name, (*NAMES, "compare"))
        print(f"error: benchmark: {name!r} is not one of {', '.join(NAMES)}, or compare{close}", file=sys.stderr)
        return 2
    with imports():
        from eval.command import main as command

        benchmark = named(name)
    return command(benchmark, rest)


if __name__ == "__main__":
    sys.exit(main())
