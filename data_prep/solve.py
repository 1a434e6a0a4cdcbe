"""`python -m data_prep solve`: answers of diagrams from facts, and labels that these refute."""

from __future__ import annotations

import argparse
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from adora_vl.conversion.columns import Columns
from adora_vl.conversion.problem import ROW_LOCATION
from adora_vl.conversion.records import BadRecord, PositionedRecords
from adora_vl.conversion.tables import open_local
from adora_vl.geometry.expressions import number_in_text
from adora_vl.geometry.figure import Verdict
from adora_vl.geometry.logic_form import LogicForm, read_form_from_record
from adora_vl.geometry.solve_form import solve_form
from adora_vl.geometry.text import read_form_from_text
from adora_vl.utils.cli import Commands, integer_between, none_or, path_option, pluralize, read_json
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import naming_write_errors, replace_file
from data_prep.solved_rows import is_rounded_value

MAX_PROBLEMS_SHOWN = 12  # of one kind, in the table for a person
_MAX_FACTS_FILE_BYTES = 64 * 2**20
# A table of labels may call its columns by any of these names, which stand between bars.
_PROBLEM_COLUMN = "messages|problem|question|query|prompt|conversations"
_ANSWER_COLUMN = "solution|answer|gold|response|label"
_IMAGES_COLUMN = "images|image"
_LABEL_TABLE_COLUMNS = Columns(
    problem=_PROBLEM_COLUMN,
    answer=_ANSWER_COLUMN,
    images=(_IMAGES_COLUMN,),
    id="id",
    optional=(_PROBLEM_COLUMN, _IMAGES_COLUMN, "id"),
)
_OTHER_ANSWER = "another answer than the label"
# What the report says of a problem without an answer, by the status of its verdict.
_FINDING_BY_STATUS = {
    "conflict": "facts that exclude each other",
    "collapsed": "points that fall together",
    "ambiguous": "two figures fit",
    "open": "the facts leave it open",
    "unread": "not read",
}
_FINDINGS_WORST_FIRST = (_OTHER_ANSWER, *_FINDING_BY_STATUS.values())


@dataclass(frozen=True)
class SolvedProblem:
    """One problem with what the solver computed from its facts, and its label where it has one."""

    id: str
    verdict: Verdict  # the status, the value and the reason
    label: str | None = None  # the answer that the data set states

    @property
    def agrees(self) -> bool | None:
        """Whether the computed value is the label's, up to rounding.

        None where one of them is missing or no number.
        """
        label_number = None if self.label is None else number_in_text(self.label)
        if label_number is None or self.verdict.value is None:
            return None
        return is_rounded_value(label_number, self.verdict.value)

    @property
    def finding(self) -> str:
        """What a person should look at, such as `two figures fit`; empty where nothing is wrong."""
        if self.verdict.status != "answered":
            return _FINDING_BY_STATUS[self.verdict.status]
        return _OTHER_ANSWER if self.agrees is False else ""

    def as_record(self) -> dict[str, Any]:
        """Return the values of the problem's line in the output file of JSON lines."""
        return {
            "id": self.id,
            "status": self.verdict.status,
            "value": self.verdict.value,
            "answer": self.verdict.answer,
            "how": self.verdict.basis,
            "assumed": list(self.verdict.assumed),
            "left_out": list(self.verdict.left_out),
            "gold": self.label,
            "agrees": self.agrees,
            "why": self.verdict.why,
        }


def read_forms_or_text(file: Path) -> dict[str, LogicForm]:
    """Return the logic forms in a file, the facts and question of each problem, by its name.

        forms.json (.json.gz)   {"17": {"facts": ...}, ...}   many forms, named by their keys
        kite.json (.json.gz)    {"facts": ...}                one form, named `kite`
        17/logic_form.json      {"line_instances": ...}       one form of Geometry3K, named `17`
        kite.txt (any other)    one fact in each sentence     one form, named `kite`

    Raises `UserError` with the problem and what is wrong with it.
    """
    if _is_json(file):
        return read_forms(file)
    try:
        return {file.stem: read_form_from_text(_read_bytes(file).decode("utf-8"))}
    except UnicodeDecodeError as error:
        raise UserError(f"input: {str(file)!r} is no text in UTF-8 ({error.reason})") from error


def read_forms(file: Path) -> dict[str, LogicForm]:
    """Return the logic forms in a file of JSON (.json or .json.gz), as `read_forms_or_text` does.

    Raises `UserError` with the problem and what is wrong with it.
    """
    try:
        records = read_json(_read_bytes(file))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"input: {str(file)!r} has no logic forms: it is not JSON ({error}); give an object with "
            "one for each problem"
        ) from error
    if not isinstance(records, dict) or not records:
        raise UserError(
            f"input: {str(file)!r} has no logic forms; give an object with one for each problem"
        )
    # A single form has one of these keys: `facts` in our format, `line_instances` in that of
    # Geometry3K. Otherwise the keys are the names of problems.
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
            fault = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"input: problem {name!r} of {str(file)!r}: {fault}; a form has points, lines, "
                "circles, facts and question"
            ) from error
    return forms


def _is_json(file: Path) -> bool:
    """Return whether a file has logic forms in JSON, and not the text of one problem."""
    return file.name.lower().removesuffix(".gz").endswith(".json")


def _read_bytes(file: Path) -> bytes:
    """Return the content of a file of facts, unpacked where it is a .gz.

    Raises `UserError` for a file that cannot be read, or is too large.
    """
    try:
        content = file.read_bytes()
        if file.suffix.lower() == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"input: {str(file)!r} cannot be read ({error})") from error
    if len(content) > _MAX_FACTS_FILE_BYTES:
        raise UserError(f"input: {str(file)!r} has over {_MAX_FACTS_FILE_BYTES} bytes")
    return content


def read_labels(file: Path) -> dict[str, str]:
    """Return the labels (the stated answers) in a table by the numbers of their problems.

    For example, {"2401": "5"}. The number stands in the column `id`, or in the paths of the images.

    Raises `UserError` for a row that has neither, and for a table that cannot be read.
    """
    label_by_number: dict[str, str] = {}
    for position, row in _read_label_table(file):
        row_in_words = f"{position} of {str(file)!r}"
        if isinstance(row, BadRecord):  # a line that cannot be read
            remedy = row.remedy.replace(ROW_LOCATION, "it")
            raise UserError(f"golds: {row_in_words}: {row.wrong}; {remedy}")
        label = row.get(_ANSWER_COLUMN)
        number = _problem_number(row)
        if number is None:
            raise UserError(
                f"golds: {row_in_words} lacks a number in its id or in a path such as "
                "test/2401/img_diagram.png"
            )
        if not isinstance(label, str | int | float):
            raise UserError(f"golds: {row_in_words} lacks an answer that is a text or a number")
        label_by_number[number] = str(label)
    return label_by_number


def _read_label_table(file: Path) -> PositionedRecords:
    """Yield the rows of a table with labels, each with its position such as `line 14`."""
    for tables in open_local(file, _LABEL_TABLE_COLUMNS).tables_by_split.values():
        for table in tables:
            yield from table.read_records()


def _problem_number(row: Mapping[str, Any]) -> str | None:
    """Return the number of a row's problem, such as `2401`, from its id or an image's path.

    Returns None where neither has a number.
    """
    row_id = row.get("id")
    if row_id is not None and str(row_id).strip():
        return str(row_id).split("/")[-1]  # 2401, of the id `geometry3k/test/2401`
    paths = row.get(_IMAGES_COLUMN)
    image_path = str(paths[0] if isinstance(paths, list) else paths)
    # The folder of the image is the number: 2401, of `test/2401/img_diagram.png`.
    folder_number = re.search(r"(?:^|[/\"'])(\d+)/[^/]*$", image_path)
    return folder_number[1] if folder_number else None


def solve_forms(
    forms: Mapping[str, LogicForm],
    labels: Mapping[str, str],
    *,
    accept_looks: bool = False,
    accept_repair: bool = False,
) -> Iterator[SolvedProblem]:
    """Solve problems one by one by their facts, and yield each with its label.

    Some problems have a value only if one assumes what their picture suggests, or if one leaves out
    or rounds a contradicting fact. Such a value is a suggestion, and counts as an answer only with
    the matching option.

    Args:
        forms: The facts and the question of each problem, by the problem's name.
        labels: The stated answers of some of the problems, by the same names.
        accept_looks: Count a value as an answer even if it needs what the picture suggests.
        accept_repair: Count a value as an answer even if facts were left out or rounded for it.
    """
    # A value that was computed by one of these counts as an answer too.
    accepted_bases: tuple[str, ...] = ()
    if accept_looks:
        accepted_bases += ("looks",)
    if accept_repair:
        accepted_bases += ("without a fact", "rounded")
    for name, form in forms.items():
        verdict = solve_form(form)
        if verdict.value is not None and verdict.basis in accepted_bases:
            verdict = replace(verdict, status="answered")
        yield SolvedProblem(id=name, verdict=verdict, label=labels.get(name))


def report_text(problems: Sequence[SolvedProblem], *, has_labels: bool) -> str:
    """Return the report on solved problems: counts, and the problems that a person should look at.

    `has_labels` says whether there are labels, with which the answers are compared.
    """
    lines = [_status_counts(problems, has_labels=has_labels)]
    for finding in _FINDINGS_WORST_FIRST:  # such as `two figures fit`
        problems_with_finding = [problem for problem in problems if problem.finding == finding]
        if not problems_with_finding:
            continue
        lines += ["", f"{finding}: {len(problems_with_finding)}"]
        shown_problems = problems_with_finding[:MAX_PROBLEMS_SHOWN]
        lines += [f"  {_problem_line(problem)}" for problem in shown_problems]
        hidden_count = len(problems_with_finding) - len(shown_problems)
        if hidden_count > 0:
            lines.append(f"  and {hidden_count} more, which --output has")
    return "\n".join(lines)


def _problem_line(problem: SolvedProblem) -> str:
    """Return the line of a problem in the report: `2401: label 5, value 4.5, REASON`."""
    verdict = problem.verdict
    label = "" if problem.label is None else f"label {problem.label}, "
    value = ""
    if verdict.value is not None:
        value_text = verdict.answer or f"{verdict.value:.6g}"
        value = f"value {value_text}, "
    return f"{problem.id}: {label}{value}{verdict.why}"


# How the report says by what a problem was solved. Any other `Verdict.basis`, such as `without a
# fact`, is a phrase itself.
_PHRASE_BY_BASIS = {
    "": "",
    "facts": "by the facts",
    "angles": "by angles alone",
    "looks": "but for what the picture shows",
}


def _status_counts(problems: Sequence[SolvedProblem], *, has_labels: bool) -> str:
    """Return the lines that count the problems by their status and by what solved them.

    `has_labels` says whether to count also how many of the values equal their labels.
    """
    groups: dict[tuple[str, str], list[SolvedProblem]] = {}  # by status and basis
    for problem in problems:
        key = (problem.verdict.status, problem.verdict.basis)
        groups.setdefault(key, []).append(problem)

    def answered_and_frequent_first(group: list[SolvedProblem]) -> tuple[bool, int]:
        """Return what the groups are sorted by; `False` comes before `True`."""
        return group[0].verdict.status != "answered", -len(group)

    lines = [pluralize(len(problems), "problem")]
    for group in sorted(groups.values(), key=answered_and_frequent_first):
        verdict = group[0].verdict  # all verdicts of a group have this status and basis
        phrase = _PHRASE_BY_BASIS.get(verdict.basis, verdict.basis)
        share = len(group) / len(problems)
        line = f"  {verdict.status:<10} {phrase:<32} {len(group):>6}  {share:6.1%}"
        comparisons = [problem.agrees for problem in group if problem.agrees is not None]
        if has_labels and comparisons:
            line += f"  {comparisons.count(True)} as labelled, {comparisons.count(False)} not"
        lines.append(line)
    answered_count = sum(problem.verdict.status == "answered" for problem in problems)
    lines.append(
        f"  answered: {answered_count} of {len(problems)} ({answered_count / len(problems):.1%})"
    )
    if has_labels:
        lines += _agreement_lines(problems)
    return "\n".join(lines)


def _agreement_lines(problems: Sequence[SolvedProblem]) -> list[str]:
    """Return the two lines that count how many values equal their labels.

    The first line counts answers alone. The second also counts values that are only suggested.
    """
    compared_answers = []
    for problem in problems:
        if problem.verdict.status == "answered" and problem.agrees is not None:
            compared_answers.append(problem)
    right_count = sum(problem.agrees is True for problem in compared_answers)
    right_with_suggestions = sum(problem.agrees is True for problem in problems)
    return [
        f"  of {len(compared_answers)} answers with a numeric label {right_count} are as labelled"
        f" ({right_count / max(1, len(compared_answers)):.1%})",
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
        type=path_option,
        metavar="FACTS",
        help="logic forms (.json, .json.gz), or a text with one fact a sentence",
    )
    add(
        "--golds",
        type=none_or(path_option),
        metavar="TABLE",
        help="the labels: any table that convert reads",
    )
    add("--output", type=none_or(path_option), metavar="FILE", help="one line of JSON a problem")
    add(
        "--picture",
        type=none_or(path_option),
        metavar="FILE.png",
        help="of a text: its figure, default: beside it",
    )
    add(
        "--limit",
        type=none_or(integer_between(1)),
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
    command.set_defaults(run=_run_solve)


def _run_solve(arguments: argparse.Namespace) -> None:
    """Run `solve`: compute the answers of the problems in a file, and report them.

    With labels (`--golds`) only the problems that have a label are solved. `--output` gets all
    results as lines of JSON. A text of facts is one problem, whose answer is printed and whose
    figure is drawn. A file of logic forms has many problems, on which a report is printed.

    Raises `UserError` for labels of other problems, and for a picture of several problems.
    """
    forms = read_forms_or_text(arguments.facts)
    labels: dict[str, str] = {}
    if arguments.golds is not None:
        labels = read_labels(arguments.golds)
    if labels:
        forms = _forms_with_label(forms, labels, arguments.facts)
    forms = dict(islice(forms.items(), arguments.limit))
    is_text = not _is_json(arguments.facts)
    if arguments.picture is not None and not is_text:
        raise UserError(
            "picture: it is for a text of facts alone; leave --picture out, or give one problem "
            "as a text"
        )
    problems = list(
        solve_forms(
            forms,
            labels=labels,
            accept_looks=arguments.looks,
            accept_repair=arguments.repair,
        )
    )
    if arguments.output is not None:
        lines = [json.dumps(problem.as_record(), ensure_ascii=False) for problem in problems]
        with naming_write_errors("output", arguments.output):
            replace_file(arguments.output, "".join(f"{line}\n" for line in lines))
    if is_text:
        (form,) = forms.values()
        (problem,) = problems
        print(_answer_line(problem, form))
        _draw_figure(problem.verdict, arguments)
    else:
        print(report_text(problems, has_labels=bool(labels)))
        if arguments.output is not None:
            print(f"\n{arguments.output}: {pluralize(len(problems), 'line')}")


def _forms_with_label(
    forms: Mapping[str, LogicForm], labels: Mapping[str, str], facts_file: Path
) -> dict[str, LogicForm]:
    """Return the forms of the problems that have a label; both are by the names of the problems.

    Raises `UserError` where no problem of `facts_file` has one.
    """
    labelled_forms = {name: form for name, form in forms.items() if name in labels}
    if not labelled_forms:
        first_label = next(iter(labels))
        first_form = next(iter(forms))
        raise UserError(
            f"golds: none of its {pluralize(len(labels), 'row')} is a problem of "
            f"{str(facts_file)!r}; the first is {first_label!r}, and there {first_form!r}"
        )
    return labelled_forms


def _answer_line(problem: SolvedProblem, form: LogicForm) -> str:
    """Return what was computed for one problem as a line of text for the user.

    The line says what was asked, its value, and why it is so: `AC = 4.514 (no short form)   ...`.
    `form` has the problem's facts and its question.
    """
    from adora_vl.geometry.shapes import parse_terms
    from adora_vl.geometry.words import term_in_words

    verdict = problem.verdict
    if verdict.value is None:
        return f"{verdict.status}: {verdict.why}"
    # The question is `Find(LengthOf(Line(A, C)))`, say, whose words are `AC`.
    find_terms = [term for term in parse_terms(form.question) if term.head == "Find"]
    goal_words = term_in_words(find_terms[0].arguments[0]) if find_terms else "the goal"
    value = f"{verdict.value:.10g}"
    if verdict.answer is None:
        answer_and_value = f"{value} (no short form)"
    elif verdict.answer == value:
        answer_and_value = value
    else:
        answer_and_value = f"{verdict.answer} = {value}"
    status = "" if verdict.status == "answered" else f"{verdict.status}: "
    return f"{goal_words} = {answer_and_value}   {status}{verdict.why}"


def _draw_figure(verdict: Verdict, arguments: argparse.Namespace) -> None:
    """Draw the figure that was computed, beside the file of facts or to `--picture`.

    Prints where it is, or why there is none.
    """
    if verdict.figure is None:
        if arguments.picture is not None:
            print("no picture: there is no figure with places")
        return
    # Pillow and matplotlib are of no use for logic forms.
    from adora_vl.data.images import png_bytes
    from data_prep.redraw import can_be_drawn, draw_form, points_in_picture

    file = arguments.picture or arguments.facts.with_suffix(".png")
    points = points_in_picture(verdict.figure.coordinates)
    form = replace(verdict.figure.form, points=points)
    if not can_be_drawn(form):
        print("no picture: not all points of the facts have a place")
        return
    with naming_write_errors("picture", file):
        replace_file(file, png_bytes(draw_form(form)))
    print(f"picture: {file}")
