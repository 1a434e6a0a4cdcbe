"""`python -m adora_vl.report.gain BEFORE.json AFTER.json [--beside GRPO=GRPO.json]`: scores of the same problems.

The files are those of `eval`. What stands beside is another way of training, scored on the same problems. It may be a
stored score, which has `stored` with the `command`, the `date` and the `versions` that it was made with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adora_vl.commands import Parser, exit_code_of, text
from adora_vl.comparability import cautions, missing_answers
from adora_vl.errors import UserError
from adora_vl.report.difference import between_problems
from eval.compare import ScoreFile

Score = dict[str, Any]
Named = tuple[str, Score]
_NAMES = ("before", "after")
_CELL = 23


def _read(path: str) -> Score:
    try:
        score = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable score file ({error})") from error
    if not isinstance(score, dict) or not {"accuracy", "total", "wilson_95", "groups"} <= score.keys():
        raise UserError(f"{path}: not a score file; make one with `python -m eval.geometry3k score`")
    return score


def _cell(score: Score | None) -> str:
    if score is None:
        return f"{'-':<{_CELL}}"
    low, high = score["wilson_95"]
    return f"{100 * score['accuracy']:6.1f} % [{100 * low:.1f}, {100 * high:.1f}]".ljust(_CELL)


def _row(name: str, before: Score, after: Score, beside: Sequence[Score | None]) -> str:
    gain = 100 * (after["accuracy"] - before["accuracy"])
    line = f"{name:<18}{before['total']:>6}  {_cell(before)} {_cell(after)} {gain:+7.1f}"
    return "  ".join([line, *map(_cell, beside)]).rstrip()


def _group_rows(before: Score, after: Score, beside: Sequence[Score]) -> list[str]:
    """A row for each family of problems, and below it one for each kind of it (`crossing, vertical`)."""
    rows = []
    for family in before["groups"].get("family", {}):
        kinds = [name for name in before["groups"].get("kind", {}) if name.startswith(f"{family}, ")]
        for key, name in (("family", family), *(("kind", kind) for kind in kinds)):
            cells = [score["groups"].get(key, {}).get(name) for score in (before, after, *beside)]
            if cells[1] is not None:
                title = f"  {name}" if key == "family" else f"    {name.removeprefix(f'{family}, ')}"
                rows.append(_row(title, cells[0], cells[1], cells[2:]))
    return rows


def gain_lines(before: Score, after: Score, beside: Named | None = None) -> list[str]:
    """The table, overall, by family and by kind, with 95 % Wilson intervals. The gain is in percentage points.

    `beside` is another score of the same problems: it gets a column, and a paired difference.
    """
    named = [*zip(_NAMES, (before, after), strict=True), *([beside] if beside else [])]
    for name, score in named[1:]:
        _check_comparable(("before", before), (name, score))
    others = [score for _, score in named[2:]]
    head = f"{'held-out accuracy':<18}{'N':>6}  {'before [95 %]':<{_CELL}} {'after [95 %]':<{_CELL}} {'gain':>7}"
    lines = ["  ".join([head, *(f"{name} [95 %]" for name, _ in named[2:])])]
    lines += [_row("all", before, after, others), *_group_rows(before, after, others)]
    apart = before["wilson_95"][1] < after["wilson_95"][0] or after["wilson_95"][1] < before["wilson_95"][0]
    lines.append(f"The two intervals {'do not overlap' if apart else 'overlap'}.")
    if beside:
        lines += _beside_lines(after, beside)
    for name, score in named[1:]:
        if _problems(before) != _problems(score):
            lines.append(f"warning: before and {name} do not have the same problems")
    return lines + cautions([(name, _as_if_made_now(score, before)) for name, score in named])


def _check_comparable(first: Named, second: Named) -> None:
    (name, score), (other, found) = first, second
    if score.get("benchmark") != found.get("benchmark"):
        raise UserError(
            f"{name} is of {score.get('benchmark')} and {other} of {found.get('benchmark')}; compare one benchmark"
        )
    if score["total"] != found["total"]:
        parts = [f"{title}: {line}" for title, one in (first, second) if (line := missing_answers(one))]
        remedy = "; ".join(parts) or "compare scores of the same problems"
        raise UserError(f"{name} has {score['total']} answers and {other} {found['total']}; {remedy}")


def _beside_lines(after: Score, beside: Named) -> list[str]:
    """The difference to what stands beside, problem by problem, and where a stored score comes from."""
    name, score = beside
    sides = [ScoreFile.of(title, one) for title, one in (("after", after), beside)]
    lines = []
    if sides[0].shares.keys() & sides[1].shares.keys():
        found = between_problems(sides[1:], sides[:1])
        assert found.low is not None and found.high is not None
        lines.append(
            f"after - {name}: {100 * found.value:+.1f} points, 95 % [{100 * found.low:+.1f}, {100 * found.high:+.1f}] "
            f"(paired bootstrap over {found.over}; what another seed would change is not in it)."
        )
    if stored := score.get("stored"):
        versions = ", ".join(f"{package} {version}" for package, version in stored["versions"].items())
        lines.append(f"{name} was not run now: it is stored, of {stored['date']}, with {versions}, by")
        lines.append(f"  {stored['command']}")
    return lines


def _problems(score: Score) -> tuple[set[str], dict[str, dict[str, int]]]:
    """What is known of a score's problems: their ids, and how many of each family, kind and form there are."""
    groups = {key: score["groups"].get(key, {}) for key in ("family", "kind", "answer_form")}
    counts = {key: {name: cell["total"] for name, cell in cells.items()} for key, cells in groups.items()}
    return set(ScoreFile.of("", score).shares), counts


def _as_if_made_now(score: Score, before: Score) -> Score:
    """A stored score with the data's hash of `before`. That hash is over files, which another version of a library
    writes in other bytes, so of a stored score the problems are compared instead.
    """
    fields = (score.get("fingerprint") or {}).get("fields")
    if not fields or "stored" not in score:
        return score
    now = ((before.get("fingerprint") or {}).get("fields") or {}).get("data_hash")
    return {**score, "fingerprint": {**score["fingerprint"], "fields": {**fields, "data_hash": now}}}


def _named(value: str) -> tuple[str, str]:
    """`NAME=FILE`."""
    name, _, path = text(value).partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{value!r:.60} is not NAME=FILE, such as GRPO=score.json")
    return name, path


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(prog="python -m adora_vl.report.gain", description="What training changed, on held-out problems.")
    parser.add_argument("before", type=text, metavar="BEFORE.json", help="the score of the model before training")
    parser.add_argument("after", type=text, metavar="AFTER.json", help="and after it")
    parser.add_argument("--beside", type=_named, metavar="NAME=FILE", help="the score of another way of training")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()

    def command() -> None:
        options = parser.parse_args(arguments)
        beside = (options.beside[0], _read(options.beside[1])) if options.beside else None
        print("\n".join(gain_lines(_read(options.before), _read(options.after), beside)))

    return exit_code_of(command, "nothing was compared")


if __name__ == "__main__":
    sys.exit(main())
