"""The command `python -m eval.compare A B ...`, which lays scores of one benchmark side by side.

With the scores it prints tests of their differences (`adora_vl.evals.compare`).
"""

from collections.abc import Sequence

from adora_vl.evals.compare import compare_runs
from adora_vl.evals.score_files import read_run
from adora_vl.utils.cli import Parser, path_or_id, run_command, text_option


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the scores that the command line names, and print a table with tests.

    Returns the exit code: 0 for success, 2 for wrong input, 130 after Ctrl-C.
    """
    parser = build_parser()

    def command() -> None:
        """Read the score files and print their comparison."""
        options = parser.parse_args(argv)
        runs = [read_run(path) for path in options.runs]
        lines = compare_runs(runs, group_kinds=options.by, quote_published=not options.no_published)
        print("\n".join(lines))

    return run_command(command, interrupt_note="nothing was written")


def build_parser() -> Parser:
    """Build the parser of the command."""
    parser = Parser(prog="python -m eval.compare", description="Scores side by side, with tests.")
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        type=path_or_id,
        metavar="RUN",
        help="a score file, or the folder of a `run`",
    )
    add(
        "--by",
        action="append",
        type=text_option,
        default=[],
        metavar="GROUP",
        help="also by group; may be repeated",
    )
    add("--no-published", action="store_true", help="leave the published rows out")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
