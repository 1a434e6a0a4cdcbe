"""`python -m data_prep solve`: what the facts of diagrams say, and which labels of a data set they
contradict.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adora_vl.conversion.columns import Columns
from adora_vl.conversion.records import BadRecord
from adora_vl.conversion.tables import open_local
from adora_vl.geometry.expressions import number_of
from adora_vl.geometry.figure import Verdict
from adora_vl.geometry.forms import Form, form_of
from adora_vl.geometry.text import form_of_text
from adora_vl.geometry.verdict import verdict
from adora_vl.utils.cli import amount, optional, path, read_json, whole
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replace_file, written_to

MAX_SHOWN = 12  # problems of one kind in the table for a person
_MAX_BYTES = 64 * 2**20  # of a file of facts
# A label counts as the value where it was rounded as books round: by so much, or by this share.
_ROUNDED = 0.06
_ROUNDED_SHARE = 0.006
_GOLDS = Columns(
    problem="messages|problem|question|query|prompt|conversations",
    answer="solution|answer|gold|response|label",
    images=("images|image",),
    id="id",
    optional=("messages|problem|question|query|prompt|conversations", "images|image", "id"),
)
# Kinds of what a person should look at, the worst first.
_KINDS = (
    "another answer than the label",
    "facts that exclude each other",
    "points that fall together",
    "two figures fit",
    "the facts leave it open",
    "not read",
)


@dataclass(frozen=True)
class Solved:
    """One problem with its verdict, and its label where there is one."""

    id: str
    verdict: Verdict
    gold: str | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether the value is the label's, up to rounding.

        None where one of them is missing or no number.
        """
        number = None if self.gold is None else number_of(self.gold)
        if number is None or self.verdict.value is None:
            return None
        return abs(self.verdict.value - number) <= max(_ROUNDED, _ROUNDED_SHARE * abs(number))

    @property
    def kind(self) -> str:
        """What a person should look at; empty where nothing is wrong."""
        if self.agrees is False and self.verdict.status == "answered":
            return _KINDS[0]
        kinds = {"conflict": 1, "collapsed": 2, "ambiguous": 3, "open": 4, "unread": 5}
        return "" if self.verdict.status == "answered" else _KINDS[kinds[self.verdict.status]]

    def record(self) -> dict[str, Any]:
        """Return the problem as one line of JSON."""
        return {
            "id": self.id,
            "status": self.verdict.status,
            "value": self.verdict.value,
            "answer": self.verdict.answer,
            "how": self.verdict.how,
            "assumed": list(self.verdict.assumed),
            "left_out": list(self.verdict.left_out),
            "gold": self.gold,
            "agrees": self.agrees,
            "why": self.verdict.why,
        }


def forms_in(file: Path) -> dict[str, Form]:
    """The forms of a file: logic forms (.json, .json.gz) by their names, or the text form of one
    problem.

    Raises `UserError` with the problem and what is wrong with it.
    """
    content = _content(file)
    suffixes = file.name.lower().removesuffix(".gz")
    if not suffixes.endswith(".json"):
        try:
            return {file.stem: form_of_text(content.decode("utf-8"))}
        except UnicodeDecodeError as error:
            raise UserError(f"input: {str(file)!r} is no text in UTF-8 ({error.reason})") from error
    try:
        records = read_json(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"input: {str(file)!r} is not JSON ({error})") from error
    if not isinstance(records, dict) or not records:
        raise UserError(
            f"input: {str(file)!r} has no logic forms; give an object with one for each problem"
        )
    if "facts" in records or "line_instances" in records:
        records = {file.parent.name if file.stem == "logic_form" else file.stem: records}
    forms = {}
    for name, record in records.items():
        try:
            if not isinstance(record, Mapping):
                raise TypeError(f"it is {record!r:.40}, not an object")
            forms[str(name)] = form_of(record)
        except (KeyError, TypeError, ValueError) as error:
            needed = "points, lines, circles, facts and question"
            missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"input: problem {name!r} of {str(file)!r}: {missing}; a form has {needed}"
            ) from error
    return forms


def _content(file: Path) -> bytes:
    try:
        content = file.read_bytes()
        if file.suffix.lower() == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise UserError(f"input: {str(file)!r} cannot be read ({error})") from error
    if len(content) > _MAX_BYTES:
        raise UserError(f"input: {str(file)!r} has over {_MAX_BYTES} bytes")
    return content


def golds_in(file: Path) -> dict[str, str]:
    """The labels of a table by the numbers of their problems, which stand in `id` or in the paths
    of its images.

    Raises `UserError` for a row that has neither, and for a table that cannot be read.
    """
    golds: dict[str, str] = {}
    for parts in open_local(file, _GOLDS).parts.values():
        for part in parts:
            for where, record in part.begin():
                if isinstance(record, BadRecord):
                    raise UserError(
                        f"golds: {where} of {str(file)!r}: {record.wrong}; {record.remedy}"
                    )
                gold = record.get(_GOLDS.answer)
                number = _number_of_row(record)
                if number is None or not isinstance(gold, str | int | float):
                    lacks = "a number in its id or in a path such as test/2401/img_diagram.png"
                    lacks = lacks if number is None else "an answer that is a text or a number"
                    raise UserError(f"golds: {where} of {str(file)!r} lacks {lacks}")
                golds[number] = str(gold)
    return golds


def _number_of_row(record: Mapping[str, Any]) -> str | None:
    row_id = record.get("id")
    if row_id is not None and str(row_id).strip():
        return str(row_id).split("/")[-1]
    paths = record.get(_GOLDS.images[0])
    match = re.search(
        r"(?:^|[/\"'])(\d+)/[^/]*$", str(paths[0] if isinstance(paths, list) else paths)
    )
    return match[1] if match else None


def solved(
    forms: Mapping[str, Form],
    golds: Mapping[str, str],
    *,
    looks: bool = False,
    repair: bool = False,
) -> Iterator[Solved]:
    """Solve forms one by one. `looks` and `repair`: what needs these counts as answered too."""
    for name, form in forms.items():
        result = verdict(form)
        is_seen = result.how == "looks" and looks
        is_repaired = result.how in ("without a fact", "rounded") and repair
        if result.value is not None and (is_seen or is_repaired):
            result = replace(result, status="answered")
        yield Solved(id=name, verdict=result, gold=golds.get(name))


def table_of(problems: Sequence[Solved], *, labelled: bool) -> str:
    """Return the counts, and what a person should look at, the worst kind first."""
    lines = [_counts(problems, labelled=labelled)]
    for kind in _KINDS:
        of_kind = [problem for problem in problems if problem.kind == kind]
        if not of_kind:
            continue
        lines += ["", f"{kind}: {len(of_kind)}"]
        lines += [f"  {_line(problem)}" for problem in of_kind[:MAX_SHOWN]]
        if len(of_kind) > MAX_SHOWN:
            lines.append(f"  and {len(of_kind) - MAX_SHOWN} more, which --output has")
    return "\n".join(lines)


def _line(problem: Solved) -> str:
    label = "" if problem.gold is None else f"label {problem.gold}, "
    value = (
        ""
        if problem.verdict.value is None
        else f"value {problem.verdict.answer or f'{problem.verdict.value:.6g}'}, "
    )
    return f"{problem.id}: {label}{value}{problem.verdict.why}"


_PHRASE_OF_BASIS = {
    "": "",
    "facts": "by the facts",
    "angles": "by angles alone",
    "looks": "but for what the picture shows",
}


def _counts(problems: Sequence[Solved], *, labelled: bool) -> str:
    """Return how many problems have which status, by how they were solved, for a person.

    `labelled`: also say how many of the values are those of the labels.
    """
    rows = Counter((problem.verdict.status, problem.verdict.how) for problem in problems)
    lines = [f"{amount(len(problems), 'problem')}"]
    for (status, basis), count in sorted(
        rows.items(), key=lambda item: (item[0][0] != "answered", -item[1])
    ):
        by = _PHRASE_OF_BASIS.get(basis, basis)
        line = f"  {status:<10} {by:<32} {count:>6}  {count / len(problems):6.1%}"
        if labelled:
            agree = [
                problem.agrees
                for problem in problems
                if (problem.verdict.status, problem.verdict.how) == (status, basis)
            ]
            comparisons = [agrees for agrees in agree if agrees is not None]
            line += (
                f"  {comparisons.count(True)} as labelled, {comparisons.count(False)} not"
                if comparisons
                else ""
            )
        lines.append(line)
    answered = [problem for problem in problems if problem.verdict.status == "answered"]
    lines.append(
        f"  answered: {len(answered)} of {len(problems)} ({len(answered) / len(problems):.1%})"
    )
    if labelled:
        compared = [problem for problem in answered if problem.agrees is not None]
        right = [problem for problem in compared if problem.agrees]
        valued = [problem for problem in problems if problem.agrees]
        lines.append(
            f"  of {len(compared)} answers with a numeric label {len(right)} are as labelled"
            f" ({len(right) / max(1, len(compared)):.1%})"
        )
        lines.append(
            f"  with the suggestions beside open and contradictory ones {len(valued)} are as "
            f"labelled ({len(valued) / len(problems):.1%} of all)"
        )
    return "\n".join(lines)


def add_solve(commands: Any) -> None:
    """Add the command to the parser of `python -m data_prep`."""
    command = commands.add_parser(
        "solve", help="compute the answers of diagrams from their facts, and check labels"
    )
    add = command.add_argument
    add(
        "facts",
        type=path,
        metavar="FACTS",
        help="logic forms (.json, .json.gz), or a text with one fact a sentence",
    )
    add(
        "--golds",
        type=optional(path),
        metavar="TABLE",
        help="the labels: any table that convert reads",
    )
    add("--output", type=optional(path), metavar="FILE", help="one line of JSON a problem")
    add(
        "--picture",
        type=optional(path),
        metavar="FILE.png",
        help="of a text: its figure, default: beside it",
    )
    add(
        "--limit",
        type=optional(whole(1)),
        metavar="N",
        help="only the first N problems, with labels of those with one",
    )
    add(
        "--looks",
        action="store_true",
        help="count as answered what needs what only the picture shows",
    )
    add(
        "--repair",
        action="store_true",
        help="count as answered what needs a contradicting fact left out",
    )
    command.set_defaults(run=_solve)


def _solve(arguments: argparse.Namespace) -> None:
    forms = forms_in(arguments.facts)
    golds = golds_in(arguments.golds) if arguments.golds is not None else {}
    if golds:
        both = {name: form for name, form in forms.items() if name in golds}
        if not both:
            some = next(iter(golds))
            raise UserError(
                f"golds: none of its {amount(len(golds), 'row')} is a problem of "
                f"{str(arguments.facts)!r}; the first is {some!r}, and there "
                f"{next(iter(forms))!r}"
            )
        forms = both
    forms = dict(list(forms.items())[: arguments.limit])
    is_text = not arguments.facts.name.lower().removesuffix(".gz").endswith(".json")
    if arguments.picture is not None and not is_text:
        raise UserError(
            "picture: it is for a text of facts alone; leave --picture out, or give one problem "
            "as a text"
        )
    problems = list(solved(forms, golds=golds, looks=arguments.looks, repair=arguments.repair))
    if arguments.output is not None:
        lines = [json.dumps(problem.record(), ensure_ascii=False) for problem in problems]
        with written_to("output", arguments.output):
            replace_file(arguments.output, "".join(f"{line}\n" for line in lines))
    if is_text:
        print(_said(problems[0], next(iter(forms.values()))))
        _draw(problems[0].verdict, arguments)
    else:
        print(table_of(problems, labelled=bool(golds)))
        if arguments.output is not None:
            print(f"\n{arguments.output}: {amount(len(problems), 'line')}")


def _said(problem: Solved, form: Form) -> str:
    """The verdict on one problem in a line: `AC = 4.514 (no short form), determined by the facts`."""
    from adora_vl.geometry.shapes import terms_of
    from adora_vl.geometry.words import words_of

    result = problem.verdict
    goal_words = next(
        (words_of(term.arguments[0]) for term in terms_of(form.question) if term.head == "Find"),
        "the goal",
    )
    if result.value is None:
        return f"{result.status}: {result.why}"
    value = f"{result.value:.10g}"
    short = f"{result.answer}" if result.answer is not None else f"{value} (no short form)"
    if result.answer is not None and result.answer != value:
        short = f"{result.answer} = {value}"
    return (
        f"{goal_words} = {short}   "
        f"{'' if result.status == 'answered' else f'{result.status}: '}{result.why}"
    )


def _draw(result: Verdict, arguments: argparse.Namespace) -> None:
    """Write the figure beside the text, or to `--picture`; say so where there is none."""
    if result.figure is None:
        if arguments.picture is not None:
            print("no picture: there is no figure with places")
        return
    from adora_vl.data.images import (
        png_bytes,
    )  # Pillow and matplotlib are of no use for logic forms
    from data_prep.redraw import can_be_drawn, drawn

    file = arguments.picture or arguments.facts.with_suffix(".png")
    points = {name: (x, -y) for name, (x, y) in result.figure.at.items()}
    form = replace(result.figure.form, points=points)
    if not can_be_drawn(form):
        print("no picture: not all points of the facts have a place")
        return
    with written_to("picture", file):
        replace_file(file, png_bytes(drawn(form)))
    print(f"picture: {file}")
