"""Formats a score for the screen."""

from collections.abc import Mapping
from typing import Any

from adora_vl.evals.inference.views import VIEWS
from adora_vl.evals.records import Cell, OwnFigures, Score, Scored
from adora_vl.evals.scoring.score import own_cells, partial_notes
from adora_vl.evals.scoring.steps import step_lines
from adora_vl.utils.cli import amount

_MANY = 16  # values of a group in the table; the score file has all


def table(scored: Scored) -> str:
    """Return the text of a score for the screen.

    It has the overall line, the groups, the benchmark's own figures, lengths, and everything that
    qualifies the result.
    """
    score, summary = scored
    lines = [made_with(score, summary), ""]
    overall: Any = score
    rows = list[tuple[str, str, Cell]]([("all", "", overall)])
    left_out = []
    for key, group in score["groups"].items():
        if _says_nothing(group, overall):
            continue
        values = list(group.items())[:_MANY]
        rows += _rows(key, dict(values))
        if len(group) > _MANY:
            left_out.append(f"{key} ({len(group) - _MANY} more)")
    for key, cells in own_cells(score).items():
        rows += _rows(key, cells)
    key_width = max(len(key) for key, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    for key, value, cell in rows:
        lines.append(f"{key:<{key_width}}  {value:<{value_width}}  {_cell(cell)}")
    if left_out:
        lines.append(f"in the score file only: {', '.join(left_out)}")
    lines.append("")
    for name, figure in score.get("samples", {}).items():
        if "@" in name:  # pass@2, and the like
            lines.append(f"{name}: {percent_with_interval(figure['value'], figure['interval_95'])}")
    lines += [*summary.lines, *_answers(score), *_warnings(score, summary)]
    return "\n".join(lines)


def _says_nothing(group: Mapping[str, Cell], everything: Cell) -> bool:
    """Whether a group has one value, which all problems have, so that its row repeats the first."""
    return [cell.get("total") for cell in group.values()] == [everything.get("total")]


def made_with(score: Score, summary: OwnFigures) -> str:
    """Return the first line: benchmark, model, engine, sampling, and the rules of the grades."""
    rules = score["rules"]
    # A benchmark may say its rules in words of its own.
    by = summary.by
    if not by:
        by = f"rules {rules['rules']}"
        if "extraction" in rules:
            by += f", extraction {rules['extraction']}"
    name = name_of_data(score)
    fields = (score.get("fingerprint") or {}).get("fields")
    if not fields:
        return f"{name}: {by} (no fingerprint beside the predictions)"
    sampling = f"temperature {fields['temperature']}" if fields.get("temperature") else "greedy"
    view = ", without images" if fields.get("no_image") else ""
    if fields.get("view"):
        view = f", shown {VIEWS.get(fields['view'], fields['view'])}"
    if fields.get("left_out"):
        view += f", without {amount(fields['left_out'], 'problem')} whose facts do not suffice"
    return (
        f"{name} {fields['split']}: {fields['model']}, {fields['engine']}, {sampling}{view}, {by}"
    )


# Benchmarks that score a folder of the user's own, whose name stands before the ids of its rows.
_OF_ANY_FOLDER = ("geometry3k", "problems")


def name_of_data(score: Score) -> str:
    """Return the name of the data set, or of the benchmark if it has one data set alone."""
    benchmark = str(score["benchmark"])
    pids = [str(item["pid"]) for item in score["items"]]
    names = {pid.partition("/")[0] for pid in pids if "/" in pid}
    if benchmark in _OF_ANY_FOLDER and len(names) == 1:
        return names.pop()
    return benchmark


def _rows(key: str, cells: Mapping[str, Cell]) -> list[tuple[str, str, Cell]]:
    """Return the rows of a group: its name in the first one, the value and the cell in each."""
    return [(key if i == 0 else "", name, cell) for i, (name, cell) in enumerate(cells.items())]


def _cell(cell: Cell) -> str:
    """Return a count, a share and its interval, such as `520/850   61.2 %  (95 %: 57.9 to 64.4)`.

    A figure that is no count has the share alone.
    """
    count = f"{cell['correct']}/{cell['total']}" if "total" in cell else ""
    text = f"{count:>11}  {100 * cell['accuracy']:5.1f} %"
    if "wilson_95" not in cell:
        return text
    low, high = cell["wilson_95"]
    return f"{text}  (95 %: {100 * low:.1f} to {100 * high:.1f})"


def percent_with_interval(value: float, interval: list[float]) -> str:
    """Return a share with its interval in percent, such as `61.2 % (95 %: 57.9 to 64.4)`."""
    return f"{100 * value:.1f} % (95 %: {100 * interval[0]:.1f} to {100 * interval[1]:.1f})"


def _answers(score: Score) -> list[str]:
    """Return the lines about the answers: verdicts, how they were found, thinking, and lengths."""
    lines = [
        "verdicts: " + ", ".join(f"{name} {count}" for name, count in score["verdicts"].items())
    ]
    if score.get("extraction_mix"):
        lines.append(
            "extraction: "
            + ", ".join(f"{method} {count}" for method, count in score["extraction_mix"].items())
        )
    thinking = score.get("thinking") or {"set_aside": 0, "without_answer": 0}
    if thinking["set_aside"]:
        line = f"thinking set aside: in {amount(thinking['set_aside'], 'answer')}"
        if thinking["without_answer"]:
            line += (
                f", of which {thinking['without_answer']} have no answer behind it and count as "
                "wrong"
            )
        lines.append(line)
    lengths = [(kind, length) for kind, length in score["tokens"].items() if length]
    tokens = [
        f"{kind} {length['mean']:.1f} (median {length['median']:g}, max {length['max']})"
        for kind, length in lengths
    ]
    if tokens:
        lines.append("tokens of an answer: " + ", ".join(tokens))
    if score.get("steps"):
        lines += step_lines(score["steps"])
    reflection = score["reflective_words"]
    if reflection:
        lines.append(f"reflective words: in {100 * reflection['share']:.1f} % of the answers")
    return lines


def _warnings(score: Score, summary: OwnFigures) -> list[str]:
    """Return the lines about what limits the result."""
    lines = partial_notes(score)
    too_long = "prompt too long for the model's context"
    for count, why in ((score["image_failed"], "unreadable images"), (score["too_long"], too_long)):
        if count:
            lines.append(f"warning: {amount(count, 'problem')} not asked ({why}), counted as wrong")
    if score.get("extraction_failed"):
        failed = amount(score["extraction_failed"], "answer")
        lines.append(f"warning: the judge failed on {failed}, counted as wrong")
    lines += [f"warning: {line}" for line in summary.warnings]
    if (score.get("samples") or {}).get("incomplete"):
        lacking = amount(score["samples"]["incomplete"], "problem")
        lines.append(f"warning: {lacking} without all answers, left out of avg@k and pass@k")
    if score["empty_responses"]:
        lines.append(f"note: {amount(score['empty_responses'], 'empty answer')}")
    if score["truncated"] and score["truncated"]["count"]:
        lines.append(
            f"note: {amount(score['truncated']['count'], 'answer')} cut off at the token limit"
        )
    return lines
