"""Says whether a training helped: scores of `eval` on the same problems before and after it.

`python -m adora_vl.report.compare BEFORE.json AFTER.json [--beside GRPO=GRPO.json]` shows them, and
beside them those of another way of training.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from adora_vl.evals.compare import caution_lines
from adora_vl.evals.score_differences import difference_between
from adora_vl.evals.score_files import ScoreFile, check_one_benchmark, read_run
from adora_vl.evals.scoring.coverage import describe_missing_answers
from adora_vl.utils.cli import Parser, exit_code_of, text
from adora_vl.utils.errors import UserError

# Characters of a cell in the table of scores
_CELL_WIDTH = 23


def gain_lines(before: ScoreFile, after: ScoreFile, beside: ScoreFile | None = None) -> list[str]:
    """Return the table of scores before and after a training, overall and by kind of problem.

    Accuracies have 95 % Wilson intervals; the gain is in percentage points.

    Args:
        before: the score of the model before the training.
        after: the score of the model after it.
        beside: the score of another training on the same problems, which gets a column, and a line
            with the difference from it; None without one.

    Raises:
        UserError: the scores are of different benchmarks, or of different numbers of answers.
    """
    runs = [before, after]
    if beside is not None:
        runs.append(beside)
    check_one_benchmark(runs)
    for run in runs[1:]:
        _check_same_number(before, run)
    head = (
        f"{'held-out accuracy':<18}{'N':>6}  {'before [95 %]':<{_CELL_WIDTH}} "
        f"{'after [95 %]':<{_CELL_WIDTH}} {'gain':>7}"
    )
    if beside is not None:
        head += f"  {beside.name} [95 %]"
    lines = [head, _gain_row("all", [run.score for run in runs]), *_group_rows(runs)]
    before_low, before_high = before.score["wilson_95"]
    after_low, after_high = after.score["wilson_95"]
    are_apart = before_high < after_low or after_high < before_low
    lines.append(f"The two intervals {'do not overlap' if are_apart else 'overlap'}.")
    if beside is not None:
        difference = difference_between([beside], [after])
        # None where no problem was answered in both
        if difference is not None:
            lines.append(
                f"after - {beside.name}: {difference.points} (paired bootstrap over "
                f"{difference.over}; what another seed would change is not in it)."
            )
    for run in runs[1:]:
        if run.shares.keys() != before.shares.keys():
            lines.append(f"warning: before and {run.name} do not have the same problems")
    return lines + caution_lines(runs)


def _check_same_number(before: ScoreFile, run: ScoreFile) -> None:
    """Raise `UserError` where the scores have different numbers of answers."""
    if before.score["total"] == run.score["total"]:
        return
    # A score says itself where answers are missing; otherwise the problems were others.
    reasons = []
    for file in (before, run):
        missing = describe_missing_answers(file.score)
        if missing:
            reasons.append(f"{file.name}: {missing}")
    remedy = "; ".join(reasons) or "compare scores of the same problems"
    raise UserError(
        f"{before.name} has {before.score['total']} answers and {run.name} {run.score['total']}; "
        f"{remedy}"
    )


def _group_rows(runs: Sequence[ScoreFile]) -> list[str]:
    """Return a row for each family of problems, and below it one for each kind within the family.

    The name of a kind begins with that of its family: `crossing, vertical`. A family or kind that
    the score after the training lacks has no row.

    `runs`: the scores before and after the training, and perhaps another one.
    """
    families = runs[0].score["groups"].get("family", {})
    kinds = runs[0].score["groups"].get("kind", {})
    rows = []
    for family in families:
        rows += _group_row(runs, grouping="family", name=family, title=f"  {family}")
        family_prefix = f"{family}, "
        for kind in kinds:
            if kind.startswith(family_prefix):
                title = f"    {kind.removeprefix(family_prefix)}"
                rows += _group_row(runs, grouping="kind", name=kind, title=title)
    return rows


def _group_row(runs: Sequence[ScoreFile], grouping: str, name: str, title: str) -> list[str]:
    """Return the row of one family or kind of problems; empty where the second score lacks it."""
    scores = [run.score["groups"].get(grouping, {}).get(name) for run in runs]
    return [] if scores[1] is None else [_gain_row(title, scores)]


def _gain_row(title: str, scores: Sequence[dict[str, Any] | None]) -> str:
    """Return a row of the table: title, number of problems, accuracies, and the gain.

    `scores`: before and after the training, and perhaps that of another training, which may be None
    where it lacks these problems.
    """
    before, after, *extra_scores = scores
    assert before is not None
    assert after is not None
    gain = 100 * (after["accuracy"] - before["accuracy"])
    line = f"{title:<18}{before['total']:>6}  {_gain_cell(before)} {_gain_cell(after)} {gain:+7.1f}"
    for extra_score in extra_scores:
        line += f"  {_gain_cell(extra_score)}"
    return line.rstrip()


def _gain_cell(score: dict[str, Any] | None) -> str:
    """Return an accuracy in percent with its interval; a dash where a score has no such problems."""
    if score is None:
        return f"{'-':<{_CELL_WIDTH}}"
    low, high = score["wilson_95"]
    text = f"{100 * score['accuracy']:6.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
    return text.ljust(_CELL_WIDTH)


class _NamedFile(NamedTuple):
    """A score file, and the name under which the table shows it."""

    name: str
    path: str


def _named_file(value: str) -> _NamedFile:
    """Parse an option of the form NAME=FILE; argparse reports the error where it has another form."""
    name, _, path = text(value).partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{value!r:.60} is not NAME=FILE, such as GRPO=score.json")
    return _NamedFile(name, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, which prints the table of scores before and after a training.

    Returns:
        the exit code: 0 for success, 2 for wrong input, 130 after Ctrl-C.
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
        type=_named_file,
        metavar="NAME=FILE",
        help="the score of another way of training",
    )

    def command() -> None:
        """Parse the options, read the scores and print the table."""
        options = parser.parse_args(arguments)
        before = read_run(options.before, "before")
        after = read_run(options.after, "after")
        beside = None
        if options.beside is not None:
            beside = read_run(options.beside.path, options.beside.name)
        print("\n".join(gain_lines(before, after, beside)))

    return exit_code_of(command, "nothing was compared")


if __name__ == "__main__":
    sys.exit(main())
