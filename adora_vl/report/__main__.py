"""`python -m adora_vl.report RUN [RUN ...]`: the curves and the rollouts of one or more runs as one
HTML file.

With `--compare` it says instead, in one paragraph and one table, whether the second run is better
than the first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adora_vl.utils.cli import (
    Parser,
    integer_between,
    number_between,
    path_option,
    pluralize,
    run_command,
)
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from adora_vl.report.run_view import RunView


def report(
    runs: Sequence[Path], output: Path, *, max_rollouts: int, max_image_mb: float
) -> list[RunView]:
    """Write the page of one or more runs, and return what it shows of them.

    Args:
        runs: the folders of the runs.
        output: the file of the page.
        max_rollouts: how many rollouts of a run are shown at most.
        max_image_mb: the limit of all diagrams together, in MB.

    Raises:
        UserError: a folder is no run, or the page cannot be written.
    """
    from adora_vl.report.page import build_page, write_page
    from adora_vl.report.run_view import encode_images, load_run

    views = [load_run(run, max_rollouts) for run in runs]
    # A run is named after its folder. Runs whose folders have equal names get their paths instead.
    names = [view.name for view in views]  # before any of them is changed
    for view, run in zip(views, runs, strict=True):
        if names.count(view.name) > 1:
            view.name = str(run)
    images, left_out = encode_images(list(runs), views, max_bytes=int(max_image_mb * 1e6))
    if left_out:
        views[0].notes.append(
            f"{left_out} diagrams are left out (--max-image-mb {max_image_mb:g})."
        )
    write_page(build_page(views, images), output)
    return views


_DESCRIPTION = (
    "The curves and the rollouts of one or more runs as one HTML file. With --compare it says "
    "instead, in one paragraph and one table, whether the second run is better than the first."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, which writes the page of runs or prints their comparison.

    Returns:
        the exit code: 0 for success, 2 for wrong input, 130 after Ctrl-C.
    """
    parser = _parser()

    def command() -> None:
        """Parse the options and do what they ask for."""
        options = parser.parse_args(arguments)
        if options.compare is not None:
            from adora_vl.report.compare_runs import comparison_lines

            if len(options.runs + options.compare) < 2:
                raise UserError("--compare: one run is named; name two, A B")
            print("\n".join(comparison_lines(options.runs, options.compare)))
            return
        output = options.output or options.runs[0] / "report.html"
        views = report(
            options.runs,
            output,
            max_rollouts=options.max_rollouts,
            max_image_mb=options.max_image_mb,
        )
        for view in views:
            rollouts = sum(len(group["rollouts"]) for group in view.groups)
            metrics = pluralize(len(view.metrics), "line")
            print(
                f"{view.name}: {metrics} of metrics, {pluralize(rollouts, 'rollout')}",
                *view.notes,
                sep="; ",
            )
        print(f"{output} ({output.stat().st_size / 1e6:.1f} MB)")

    return run_command(command, interrupt_note="no page was written")


def _parser() -> Parser:
    """Return the parser of the command's options."""
    parser = Parser(prog="python -m adora_vl.report", description=_DESCRIPTION)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="output_dir of a training run"
    )
    parser.add_argument(
        "--output",
        type=path_option,
        metavar="FILE.html",
        help="default: report.html in the first RUN",
    )
    parser.add_argument(
        "--max-rollouts",
        type=integer_between(1),
        default=20_000,
        metavar="N",
        help="of a run; evenly spaced steps are kept (default: 20,000)",
    )
    parser.add_argument(
        "--max-image-mb",
        type=number_between(0, 1e6),
        default=30,
        metavar="MB",
        help="limit of all diagrams together (default: 30)",
    )
    compare_help = (
        "did B help? A B --compare; with several seeds A1 A2 --compare B1 B2, or all before it"
    )
    parser.add_argument("--compare", type=Path, nargs="*", metavar="RUN", help=compare_help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
