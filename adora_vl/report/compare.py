"""Says whether a training helped: scores of `eval` on the same problems before and after it.

`python -m adora_vl.report.compare BEFORE.json AFTER.json [--beside GRPO=GRPO.json]` shows them, and
beside them those of another way of training.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from adora_vl.evals.compare import caution_lines
from adora_vl.evals.score_differences import difference_between
from adora_vl.evals.score_files import ScoreFile, check_one_benchmark, read_run
from adora_vl.evals.scoring.coverage import missing_answers
from adora_vl.utils.cli import Parser, exit_code_of, text
from adora_vl.utils.errors import UserError

# Characters of a cell in the table of scores
_CELL = 23


def gain_lines(before: ScoreFile, after: ScoreFile, beside: ScoreFile | None = None) -> list[str]:
    """Return the table of scores before and after a training: overall, by family and by kind.

    Accuracies have 95 % Wilson intervals; the gain is in percentage points. `UserError` is raised
    for scores of different benchmarks, or of different numbers of answers.

    Args:
        before: the score of the model before the training.
        after: the score of the model after it.
        beside: another score of the same problems, which gets a column and a paired difference.
    """
    runs = [before, after, *([beside] if beside else [])]
    check_one_benchmark(runs)
    for run in runs[1:]:
        _check_same_number(before, run)
    head = (
        f"{'held-out accuracy':<18}{'N':>6}  {'before [95 %]':<{_CELL}} "
        f"{'after [95 %]':<{_CELL}} {'gain':>7}"
    )
    lines = ["  ".join([head, *(f"{run.name} [95 %]" for run in runs[2:])])]
    lines += [_gain_row("all", [run.score for run in runs]), *_group_rows(runs)]
    before_low, before_high = before.score["wilson_95"]
    after_low, after_high = after.score["wilson_95"]
    are_apart = before_high < after_low or after_high < before_low
    lines.append(f"The two intervals {'do not overlap' if are_apart else 'overlap'}.")
    difference = difference_between([beside], [after]) if beside else None
    if beside and difference:
        lines.append(
            f"after - {beside.name}: {difference.points} (paired bootstrap over {difference.over}; "
            "what another seed would change is not in it)."
        )
    for run in runs[1:]:
        if run.shares.keys() != before.shares.keys():
            lines.append(f"warning: before and {run.name} do not have the same problems")
    return lines + caution_lines(runs)


def _check_same_number(before: ScoreFile, run: ScoreFile) -> None:
    """Raise `UserError` where the scores have different numbers of answers."""
    if before.score["total"] == run.score["total"]:
        return
    missing = []
    for file in (before, run):
        line = missing_answers(file.score)
        if line:
            missing.append(f"{file.name}: {line}")
    raise UserError(
        f"{before.name} has {before.score['total']} answers and {run.name} {run.score['total']}; "
        f"{'; '.join(missing) or 'compare scores of the same problems'}"
    )


def _group_rows(runs: Sequence[ScoreFile]) -> list[str]:
    """Return a row for each family of problems, and below it one for each of its kinds.

    A kind is named after its family: `crossing, vertical`. A group that the score after the
    training lacks has no row.
    """
    groups = runs[0].score["groups"]
    rows = []
    for family in groups.get("family", {}):
        family_prefix = f"{family}, "
        title_by_group = {("family", family): f"  {family}"}
        for kind in groups.get("kind", {}):
            if kind.startswith(family_prefix):
                title_by_group["kind", kind] = f"    {kind.removeprefix(family_prefix)}"
        for (key, name), title in title_by_group.items():
            cells = [run.score["groups"].get(key, {}).get(name) for run in runs]
            if cells[1] is not None:
                rows.append(_gain_row(title, cells))
    return rows


def _gain_row(title: str, cells: Sequence[dict[str, Any] | None]) -> str:
    """Return a row of the table; `cells` are the scores before, after, and beside, where there is one."""
    before, after = cells[:2]
    assert before is not None
    assert after is not None
    gain = 100 * (after["accuracy"] - before["accuracy"])
    line = f"{title:<18}{before['total']:>6}  {_gain_cell(before)} {_gain_cell(after)} {gain:+7.1f}"
    return "  ".join([line, *map(_gain_cell, cells[2:])]).rstrip()


def _gain_cell(cell: dict[str, Any] | None) -> str:
    """Return an accuracy in percent with its interval; a dash where a score has no such problems."""
    if cell is None:
        return f"{'-':<{_CELL}}"
    low, high = cell["wilson_95"]
    return f"{100 * cell['accuracy']:6.1f} % [{100 * low:.1f}, {100 * high:.1f}]".ljust(_CELL)


def _name_and_file(value: str) -> tuple[str, str]:
    """Return the name and the file in `NAME=FILE`, for argparse."""
    name, _, path = text(value).partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{value!r:.60} is not NAME=FILE, such as GRPO=score.json")
    return name, path


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of scores.

    Returns the exit code: 0 for success, 2 for wrong input, 130 after Ctrl-C.
    """
    parser = Parser(
        prog="python -m adora_vl.report.compare",
        description="What training changed on held-out problems.",
    )
    parser.add_argument(
        "before", type=text, metavar="BEFORE.json", help="the score of the model before training"
    )
    parser.add_argument("after", type=text, metavar="AFTER.json", help="and after it")
    parser.add_argument(
        "--beside",
        type=_name_and_file,
        metavar="NAME=FILE",
        help="the score of another way of training",
    )

    def command() -> None:
        options = parser.parse_args(arguments)
        before = read_run(options.before, "before")
        after = read_run(options.after, "after")
        beside = read_run(options.beside[1], options.beside[0]) if options.beside else None
        print("\n".join(gain_lines(before, after, beside)))

    return exit_code_of(command, "nothing was compared")


if __name__ == "__main__":
    sys.exit(main())
