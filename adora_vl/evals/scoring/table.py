"""Formats a score for the screen."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from adora_vl.evals.inference.views import DESCRIPTION_BY_VIEW
from adora_vl.evals.records import AccuracyCell, BenchmarkFigures, Score, Scored
from adora_vl.evals.scoring.coverage import partial_score_notes
from adora_vl.evals.scoring.score import find_benchmark_cells
from adora_vl.evals.scoring.steps import step_lines
from adora_vl.utils.cli import amount

_MOST_GROUPS = 16  # of one kind in the table; the score file has all


class _TableRow(NamedTuple):
    """One row of the table of a score."""

    kind: str
    """The kind of group, such as `image_size`; only the first row of a kind has it."""
    group: str
    """The group, such as `to 256x256`."""
    cell: AccuracyCell
    """The accuracy in that group."""


def format_score(scored: Scored) -> str:
    """Format a score for the screen.

    The text has the overall line, the groups, the benchmark's own figures, the lengths of answers,
    and everything that qualifies the result.
    """
    score, summary = scored
    overall: Any = score  # a score has the keys of a cell itself
    rows = [_TableRow("all", "", overall)]
    shortened_kinds: list[str] = []
    for kind, cell_by_group in score["groups"].items():
        if _repeats_overall(cell_by_group, overall):
            continue
        first_groups = dict(list(cell_by_group.items())[:_MOST_GROUPS])
        rows += _table_rows(kind, first_groups)
        if len(cell_by_group) > _MOST_GROUPS:
            shortened_kinds.append(f"{kind} ({len(cell_by_group) - _MOST_GROUPS} more)")
    for key, cells in find_benchmark_cells(score).items():
        rows += _table_rows(key, cells)
    lines = [describe_scored_run(score, summary), "", *_aligned_rows(rows)]
    if shortened_kinds:
        lines.append(f"in the score file only: {', '.join(shortened_kinds)}")
    lines.append("")
    for name, figure in score.get("samples", {}).items():
        if "@" in name:  # such as pass@2; the others are counts
            lines.append(f"{name}: {percent_with_interval(figure['value'], figure['interval_95'])}")
    lines += [*summary.lines, *_answer_lines(score), *_warning_lines(score, summary)]
    return "\n".join(lines)


def _aligned_rows(rows: Sequence[_TableRow]) -> list[str]:
    """Format the rows of the table, with their columns below each other."""
    kind_width = max(len(row.kind) for row in rows)
    group_width = max(len(row.group) for row in rows)
    return [
        f"{row.kind:<{kind_width}}  {row.group:<{group_width}}  {_cell_text(row.cell)}"
        for row in rows
    ]


def _repeats_overall(cell_by_group: Mapping[str, AccuracyCell], overall: AccuracyCell) -> bool:
    """Return whether there is one group, which has all problems, so that it repeats the first row."""
    return [cell.get("total") for cell in cell_by_group.values()] == [overall.get("total")]


def describe_scored_run(score: Score, summary: BenchmarkFigures) -> str:
    """Format the first line: benchmark, model, engine, sampling, and the rules of the grades.

    Without a fingerprint beside the predictions only the benchmark and the rules are known.
    """
    rules = score["rules"]
    rules_text = summary.by  # in words of the benchmark's own
    if not rules_text:
        rules_text = f"rules {rules['rules']}"
        if "extraction" in rules:
            rules_text += f", extraction {rules['extraction']}"
    name = name_of_data(score)
    fields = (score.get("fingerprint") or {}).get("fields")
    if not fields:
        return f"{name}: {rules_text} (no fingerprint beside the predictions)"
    sampling = f"temperature {fields['temperature']}" if fields.get("temperature") else "greedy"
    view = ", without images" if fields.get("no_image") else ""
    if fields.get("view"):
        view = f", shown {DESCRIPTION_BY_VIEW.get(fields['view'], fields['view'])}"
    if fields.get("left_out"):
        view += f", without {amount(fields['left_out'], 'problem')} whose facts do not suffice"
    return (
        f"{name} {fields['split']}: {fields['model']}, {fields['engine']}, {sampling}{view}, "
        f"{rules_text}"
    )


# The benchmarks that score any prepared folder. Its rows have ids such as `mine/train/5`.
_BENCHMARKS_OF_FOLDERS = ("geometry3k", "problems")


def name_of_data(score: Score) -> str:
    """Return the name of the scored data set.

    It is the name of the benchmark, or for one that scores any prepared folder the name before the
    first `/` of all ids.
    """
    benchmark = str(score["benchmark"])
    if benchmark not in _BENCHMARKS_OF_FOLDERS:
        return benchmark
    pids = [str(item["pid"]) for item in score["items"]]
    names = {pid.partition("/")[0] for pid in pids if "/" in pid}
    return names.pop() if len(names) == 1 else benchmark


def _table_rows(kind: str, cell_by_group: Mapping[str, AccuracyCell]) -> list[_TableRow]:
    """Build the rows of one kind of group, of which only the first has the name of the kind."""
    rows: list[_TableRow] = []
    for group, cell in cell_by_group.items():
        shown_kind = "" if rows else kind
        rows.append(_TableRow(shown_kind, group, cell))
    return rows


def _cell_text(cell: AccuracyCell) -> str:
    """Format a count, a share and its interval: `520/850   61.2 %  (95 %: 57.9 to 64.4)`.

    A figure that is no count has the share alone.
    """
    count = f"{cell['correct']}/{cell['total']}" if "total" in cell else ""
    text = f"{count:>11}  {100 * cell['accuracy']:5.1f} %"
    if "wilson_95" not in cell:
        return text
    low, high = cell["wilson_95"]
    return f"{text}  (95 %: {100 * low:.1f} to {100 * high:.1f})"


def percent_with_interval(share: float, interval: Sequence[float]) -> str:
    """Format a share with its interval in percent, such as `61.2 % (95 %: 57.9 to 64.4)`."""
    low, high = interval
    return f"{100 * share:.1f} % (95 %: {100 * low:.1f} to {100 * high:.1f})"


def _answer_lines(score: Score) -> list[str]:
    """Format the lines on the answers: verdicts, extraction, thinking, lengths, claims and words."""
    verdicts = [f"{name} {count}" for name, count in score["verdicts"].items()]
    lines = [f"verdicts: {', '.join(verdicts)}"]
    if score.get("extraction_mix"):
        methods = [f"{method} {count}" for method, count in score["extraction_mix"].items()]
        lines.append(f"extraction: {', '.join(methods)}")
    # A score of an older version has no counts of thinking.
    thinking = score.get("thinking") or {"set_aside": 0, "without_answer": 0}
    if thinking["set_aside"]:
        line = f"thinking set aside: in {amount(thinking['set_aside'], 'answer')}"
        if thinking["without_answer"]:
            line += (
                f", of which {thinking['without_answer']} have no answer behind it and count as "
                "wrong"
            )
        lines.append(line)
    token_texts: list[str] = []
    for name, length in score["tokens"].items():  # of right and of wrong answers
        if length:
            token_texts.append(
                f"{name} {length['mean']:.1f} (median {length['median']:g}, max {length['max']})"
            )
    if token_texts:
        lines.append(f"tokens of an answer: {', '.join(token_texts)}")
    if score.get("steps"):
        lines += step_lines(score["steps"])
    reflection = score["reflective_words"]
    if reflection:
        lines.append(f"reflective words: in {100 * reflection['share']:.1f} % of the answers")
    return lines


def _warning_lines(score: Score, summary: BenchmarkFigures) -> list[str]:
    """Format the lines on what limits the result."""
    lines = partial_score_notes(score)
    count_by_reason = {
        "unreadable images": score["image_failed"],
        "prompt too long for the model's context": score["too_long"],
    }
    for reason, count in count_by_reason.items():
        if count:
            problems = amount(count, "problem")
            lines.append(f"warning: {problems} not asked ({reason}), counted as wrong")
    if score.get("extraction_failed"):
        answers = amount(score["extraction_failed"], "answer")
        lines.append(f"warning: the judge failed on {answers}, counted as wrong")
    lines += [f"warning: {line}" for line in summary.warnings]
    n_incomplete = (score.get("samples") or {}).get("incomplete")
    if n_incomplete:
        problems = amount(n_incomplete, "problem")
        lines.append(f"warning: {problems} without all answers, left out of avg@k and pass@k")
    if score["empty_responses"]:
        lines.append(f"note: {amount(score['empty_responses'], 'empty answer')}")
    truncated = score["truncated"]
    if truncated and truncated["count"]:
        lines.append(f"note: {amount(truncated['count'], 'answer')} cut off at the token limit")
    return lines
