"""`python -m data_prep solve`: answers of diagrams from their facts, and labels that these refute."""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from adora_vl.conversion.columns import Columns
from adora_vl.conversion.records import BadRecord, Records
from adora_vl.conversion.tables import open_local
from adora_vl.geometry.expressions import number_in_text
from adora_vl.geometry.figure import Verdict
from adora_vl.geometry.forms import LogicForm, read_form_from_record
from adora_vl.geometry.text import read_form_from_text
from adora_vl.geometry.verdict import solve_form
from adora_vl.utils.cli import Commands, amount, optional, path, read_json, whole
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replace_file, written_to
from data_prep.solved_rows import is_rounded_value

MAX_SHOWN = 12  # problems of one kind in the table for a person
_MAX_BYTES = 64 * 2**20  # of a file of facts
_LABEL_COLUMNS = Columns(
    problem="messages|problem|question|query|prompt|conversations",
    answer="solution|answer|gold|response|label",
    images=("images|image",),
    id="id",
    optional=("messages|problem|question|query|prompt|conversations", "images|image", "id"),
)
_OTHER_ANSWER = "another answer than the label"
# What a person should look at, for the statuses of a problem without an answer.
_KIND_BY_STATUS = {
    "conflict": "facts that exclude each other",
    "collapsed": "points that fall together",
    "ambiguous": "two figures fit",
    "open": "the facts leave it open",
    "unread": "not read",
}
_KINDS = (_OTHER_ANSWER, *_KIND_BY_STATUS.values())  # the worst first


@dataclass(frozen=True)
class SolvedProblem:
    """One problem with what the solver computed from its facts, and its label where it has one."""

    id: str
    verdict: Verdict  # the status, the value and the reason
    gold: str | None = None  # the label, the answer that the data set states

    @property
    def agrees(self) -> bool | None:
        """Whether the computed value is the label's, up to rounding.

        None where one of them is missing or no number.
        """
        label = None if self.gold is None else number_in_text(self.gold)
        if label is None or self.verdict.value is None:
            return None
        return is_rounded_value(label, self.verdict.value)

    @property
    def kind(self) -> str:
        """What a person should look at; empty where nothing is wrong."""
        if self.verdict.status != "answered":
            return _KIND_BY_STATUS[self.verdict.status]
        return _OTHER_ANSWER if self.agrees is False else ""

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


def read_forms_or_text(file: Path) -> dict[str, LogicForm]:
    """Read the facts and questions of a file, as logic forms by the names of their problems.

    A file of JSON (.json, .json.gz) has logic forms. Any other file has the facts of one problem,
    one a sentence. The names are the keys of the JSON, or the name of the file for a single problem.

    Raises `UserError` with the problem and what is wrong with it.
    """
    content = _file_content(file)
    if not _is_json(file):
        try:
            return {file.stem: read_form_from_text(content.decode("utf-8"))}
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
    is_single_form = "facts" in records or "line_instances" in records
    if is_single_form:
        # In Geometry3K the folder `17` has the file `logic_form.json` of problem 17.
        name = file.parent.name if file.stem == "logic_form" else file.stem
        records = {name: records}
    forms = {}
    for name, record in records.items():
        try:
            if not isinstance(record, Mapping):
                raise TypeError(f"it is {record!r:.40}, not an object")
            forms[str(name)] = read_form_from_record(record)
        except (KeyError, TypeError, ValueError) as error:
            needed = "points, lines, circles, facts and question"
            missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"input: problem {name!r} of {str(file)!r}: {missing}; a form has {needed}"
            ) from error
    return forms


def _is_json(file: Path) -> bool:
    """Return whether a file has logic forms in JSON, and not the text of one problem."""
    return file.name.lower().removesuffix(".gz").endswith(".json")


def _file_content(file: Path) -> bytes:
    """Return the bytes of a file, unpacked where it is a .gz.

    Raises `UserError` for one that cannot be read, or is too large.
    """
    try:
        content = file.read_bytes()
        if file.suffix.lower() == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise UserError(f"input: {str(file)!r} cannot be read ({error})") from error
    if len(content) > _MAX_BYTES:
        raise UserError(f"input: {str(file)!r} has over {_MAX_BYTES} bytes")
    return content


def read_labels(file: Path) -> dict[str, str]:
    """Read the labels (the stated answers) of a table, by the numbers of their problems.

    The number stands in the column `id`, or in the paths of the images.

    Raises `UserError` for a row that has neither, and for a table that cannot be read.
    """
    label_by_number: dict[str, str] = {}
    for position, record in _records_of_labels(file):
        row_in_words = f"{position} of {str(file)!r}"
        if isinstance(record, BadRecord):  # a line that cannot be read
            raise UserError(f"golds: {row_in_words}: {record.wrong}; {record.remedy}")
        label = record.get(_LABEL_COLUMNS.answer)
        number = _problem_number(record)
        if number is None:
            raise UserError(
                f"golds: {row_in_words} lacks a number in its id or in a path such as "
                "test/2401/img_diagram.png"
            )
        if not isinstance(label, str | int | float):
            raise UserError(f"golds: {row_in_words} lacks an answer that is a text or a number")
        label_by_number[number] = str(label)
    return label_by_number


def _records_of_labels(file: Path) -> Records:
    """Yield the rows of a table with labels, each with its position such as `line 14`."""
    for parts_of_split in open_local(file, _LABEL_COLUMNS).parts.values():
        for part in parts_of_split:
            yield from part.begin()


def _problem_number(record: Mapping[str, Any]) -> str | None:
    """Return the number of a row's problem, from its id or the path of its image, or None."""
    row_id = record.get("id")
    if row_id is not None and str(row_id).strip():
        return str(row_id).split("/")[-1]  # of `geometry3k/test/2401`
    paths = record.get(_LABEL_COLUMNS.images[0])
    image_path = str(paths[0] if isinstance(paths, list) else paths)
    match = re.search(r"(?:^|[/\"'])(\d+)/[^/]*$", image_path)
    return match[1] if match else None


def solve_forms(
    forms: Mapping[str, LogicForm],
    golds: Mapping[str, str],
    *,
    looks: bool = False,
    repair: bool = False,
) -> Iterator[SolvedProblem]:
    """Solve problems one by one by their facts, and yield each with its label.

    `forms` (the facts with the question) and `golds` (the labels) are by the names of the problems.

    Some problems have a value only if one assumes what their picture suggests, or leaves out or
    rounds a contradicting fact. Such a value is a suggestion. It counts as an answer with `looks`
    in the first case, and with `repair` in the second.
    """
    for name, form in forms.items():
        result = solve_form(form)
        counts_by_looks = looks and result.how == "looks"
        counts_by_repair = repair and result.how in ("without a fact", "rounded")
        if result.value is not None and (counts_by_looks or counts_by_repair):
            result = replace(result, status="answered")
        yield SolvedProblem(id=name, verdict=result, gold=golds.get(name))


def table_of(problems: Sequence[SolvedProblem], *, labelled: bool) -> str:
    """Return the report on solved problems: counts, and the problems that a person should look at.

    `labelled`: there are labels, with which the answers are compared.
    """
    lines = [_count_lines(problems, labelled=labelled)]
    for kind in _KINDS:
        problems_of_kind = [problem for problem in problems if problem.kind == kind]
        if not problems_of_kind:
            continue
        lines += ["", f"{kind}: {len(problems_of_kind)}"]
        lines += [f"  {_problem_line(problem)}" for problem in problems_of_kind[:MAX_SHOWN]]
        if len(problems_of_kind) > MAX_SHOWN:
            lines.append(f"  and {len(problems_of_kind) - MAX_SHOWN} more, which --output has")
    return "\n".join(lines)


def _problem_line(problem: SolvedProblem) -> str:
    """Return a problem in a line: its label, the value that was computed, and the reason."""
    label = "" if problem.gold is None else f"label {problem.gold}, "
    value = ""
    if problem.verdict.value is not None:
        shortest_form = problem.verdict.answer or f"{problem.verdict.value:.6g}"
        value = f"value {shortest_form}, "
    return f"{problem.id}: {label}{value}{problem.verdict.why}"


# How the report says by what a problem was solved, where `Verdict.how` is no phrase.
_PHRASE_OF_BASIS = {
    "": "",
    "facts": "by the facts",
    "angles": "by angles alone",
    "looks": "but for what the picture shows",
}


def _count_lines(problems: Sequence[SolvedProblem], *, labelled: bool) -> str:
    """Return the lines that count the problems by their status and by what solved them.

    `labelled`: also say how many of the values are those of the labels.
    """
    groups: dict[_StatusAndBasis, list[SolvedProblem]] = {}
    for problem in problems:
        key = _StatusAndBasis(status=problem.verdict.status, basis=problem.verdict.how)
        groups.setdefault(key, []).append(problem)

    def answered_and_frequent_first(key: _StatusAndBasis) -> tuple[bool, int]:
        """Return what the lines are sorted by; `False` comes before `True`."""
        return key.status != "answered", -len(groups[key])

    lines = [f"{amount(len(problems), 'problem')}"]
    for key in sorted(groups, key=answered_and_frequent_first):
        group = groups[key]
        phrase = _PHRASE_OF_BASIS.get(key.basis, key.basis)
        share = len(group) / len(problems)
        line = f"  {key.status:<10} {phrase:<32} {len(group):>6}  {share:6.1%}"
        comparisons = [problem.agrees for problem in group if problem.agrees is not None]
        if labelled and comparisons:
            line += f"  {comparisons.count(True)} as labelled, {comparisons.count(False)} not"
        lines.append(line)
    answered_count = sum(problem.verdict.status == "answered" for problem in problems)
    lines.append(
        f"  answered: {answered_count} of {len(problems)} ({answered_count / len(problems):.1%})"
    )
    if labelled:
        lines += _label_lines(problems)
    return "\n".join(lines)


class _StatusAndBasis(NamedTuple):
    """The status of a problem, and by what it was solved, in the words of a `Verdict`."""

    status: str
    basis: str


def _label_lines(problems: Sequence[SolvedProblem]) -> list[str]:
    """Return the lines that count how many values are those of the labels.

    The first counts answers alone, the second also the values that are only suggested.
    """
    comparisons = [
        problem.agrees
        for problem in problems
        if problem.verdict.status == "answered" and problem.agrees is not None
    ]
    right_count = comparisons.count(True)
    right_with_suggestions = sum(problem.agrees is True for problem in problems)
    return [
        f"  of {len(comparisons)} answers with a numeric label {right_count} are as labelled"
        f" ({right_count / max(1, len(comparisons)):.1%})",
        f"  with the suggestions beside open and contradictory ones {right_with_suggestions} are as "
        f"labelled ({right_with_suggestions / len(problems):.1%} of all)",
    ]


def add_solve(commands: Commands) -> None:
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
    """Run `solve`: compute the answers of the problems in a file, and report them.

    Raises `UserError` for labels of other problems, and for a picture of several problems.
    """
    forms = read_forms_or_text(arguments.facts)
    golds = read_labels(arguments.golds) if arguments.golds is not None else {}
    if golds:
        labelled_forms = {name: form for name, form in forms.items() if name in golds}
        if not labelled_forms:
            first_label = next(iter(golds))
            raise UserError(
                f"golds: none of its {amount(len(golds), 'row')} is a problem of "
                f"{str(arguments.facts)!r}; the first is {first_label!r}, and there "
                f"{next(iter(forms))!r}"
            )
        forms = labelled_forms
    forms = dict(islice(forms.items(), arguments.limit))
    is_text = not _is_json(arguments.facts)
    if arguments.picture is not None and not is_text:
        raise UserError(
            "picture: it is for a text of facts alone; leave --picture out, or give one problem "
            "as a text"
        )
    problems = list(solve_forms(forms, golds=golds, looks=arguments.looks, repair=arguments.repair))
    if arguments.output is not None:
        lines = [json.dumps(problem.record(), ensure_ascii=False) for problem in problems]
        with written_to("output", arguments.output):
            replace_file(arguments.output, "".join(f"{line}\n" for line in lines))
    if is_text:
        print(_verdict_in_words(problems[0], next(iter(forms.values()))))
        _write_picture(problems[0].verdict, arguments)
    else:
        print(table_of(problems, labelled=bool(golds)))
        if arguments.output is not None:
            print(f"\n{arguments.output}: {amount(len(problems), 'line')}")


def _verdict_in_words(problem: SolvedProblem, form: LogicForm) -> str:
    """Return what was computed for one problem as a line of text for the user.

    The line says what was asked, its value, and why it is so: `AC = 4.514 (no short form)   ...`.
    """
    from adora_vl.geometry.shapes import parse_terms
    from adora_vl.geometry.words import term_in_words

    result = problem.verdict
    goal_words = next(
        (
            term_in_words(term.arguments[0])
            for term in parse_terms(form.question)
            if term.head == "Find"
        ),
        "the goal",
    )
    if result.value is None:
        return f"{result.status}: {result.why}"
    value = f"{result.value:.10g}"
    if result.answer is None:
        spelling = f"{value} (no short form)"
    elif result.answer == value:
        spelling = value
    else:
        spelling = f"{result.answer} = {value}"
    status = "" if result.status == "answered" else f"{result.status}: "
    return f"{goal_words} = {spelling}   {status}{result.why}"


def _write_picture(result: Verdict, arguments: argparse.Namespace) -> None:
    """Draw the figure that was computed, beside the file of facts or to `--picture`.

    Prints where it is, or why there is none.
    """
    if result.figure is None:
        if arguments.picture is not None:
            print("no picture: there is no figure with places")
        return
    # Pillow and matplotlib are of no use for logic forms.
    from adora_vl.data.images import png_bytes
    from data_prep.redraw import can_be_drawn, draw_form

    file = arguments.picture or arguments.facts.with_suffix(".png")
    # A form has y downwards, as a picture has it, and a figure upwards.
    points = {name: (x, -y) for name, (x, y) in result.figure.at.items()}
    form = replace(result.figure.form, points=points)
    if not can_be_drawn(form):
        print("no picture: not all points of the facts have a place")
        return
    with written_to("picture", file):
        replace_file(file, png_bytes(draw_form(form)))
    print(f"picture: {file}")
