"""Formats a score for the screen."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from adora_vl.evals.inference.views import DESCRIPTION_BY_VIEW
from adora_vl.evals.records import (
    BENCHMARK_BY_ALIAS,
    AccuracyMetric,
    BenchmarkSummary,
    Score,
    ScoredBenchmark,
)
from adora_vl.evals.scoring.coverage import partial_score_notes
from adora_vl.evals.scoring.score import find_benchmark_metrics
from adora_vl.utils.cli import pluralize

_MAX_GROUPS_IN_TABLE = 16  # of one kind; the score file has all


def format_score(scored: ScoredBenchmark) -> str:
    """Format a score for the screen.

    The text has the overall line, the groups, the benchmark's own metrics, the lengths of answers,
    and everything that qualifies the result.
    """
    score, summary = scored
    # A score has all keys of an `AccuracyMetric`, and is one too.
    overall: Any = score
    rows = [["", "", "right", "accuracy in %, [95 % interval]"]]
    rows += _table_rows("all", {"": overall})
    shortened_kinds: list[str] = []
    for kind, metric_by_group in score["groups"].items():
        if _repeats_overall(metric_by_group, overall):
            continue
        first_groups = dict(list(metric_by_group.items())[:_MAX_GROUPS_IN_TABLE])
        rows += _table_rows(kind, first_groups)
        n_left_out = len(metric_by_group) - len(first_groups)
        if n_left_out:
            shortened_kinds.append(f"{kind} ({n_left_out} more)")
    for key, metrics in find_benchmark_metrics(score).items():
        rows += _table_rows(key, metrics)
    lines = [describe_scored_run(score, summary), "", *align_columns(rows)]
    if shortened_kinds:
        lines.append(f"in the score file only: {', '.join(shortened_kinds)}")
    lines.append("")
    for name, metric in score.get("samples", {}).items():
        if "@" in name:  # such as pass@2; the others are counts
            lines.append(f"{name}: {percent_with_interval(metric['value'], metric['interval_95'])}")
    lines += [*summary.lines, *_answer_lines(score), *_warning_lines(score, summary)]
    return "\n".join(lines)


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format the rows of a table as lines, with the cells of a column below each other.

    A row may have fewer cells than others. The rows `["", "all"]` and `["base", "61.2"]` give the
    lines `      all` and `base  61.2`.
    """
    columns = list(zip_longest(*rows, fillvalue=""))
    widths = [max(len(cell) for cell in column) for column in columns]
    lines: list[str] = []
    for row in rows:
        padded_cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join(padded_cells).rstrip())
    return lines


def _repeats_overall(
    metric_by_group: Mapping[str, AccuracyMetric], overall: AccuracyMetric
) -> bool:
    """Return whether a kind has one group with all answers, whose row would repeat the first."""
    return [metric.get("total") for metric in metric_by_group.values()] == [overall.get("total")]


def describe_scored_run(score: Score, summary: BenchmarkSummary) -> str:
    """Format the first line: benchmark, model, engine, sampling, and the rules of the grades.

    An example is `mmstar val: runs/mine, vllm, greedy, rules letter`. Without a fingerprint beside
    the predictions only the benchmark and the rules are known.
    """
    rules = score["rules"]
    rules_text = summary.rules_text  # in words of the benchmark's own
    if not rules_text:
        rules_text = f"rules {rules['rules']}"
        if "extraction" in rules:
            rules_text += f", extraction {rules['extraction']}"
    name = scored_dataset_name(score)
    fields = (score.get("fingerprint") or {}).get("fields")
    if not fields:
        return f"{name}: {rules_text} (no fingerprint beside the predictions)"
    sampling = f"temperature {fields['temperature']}" if fields.get("temperature") else "greedy"
    # What the model was shown, where that was not just the picture.
    view_text = ", without images" if fields.get("no_image") else ""
    if fields.get("view"):
        view_text = f", shown {DESCRIPTION_BY_VIEW.get(fields['view'], fields['view'])}"
    # Problems whose picture cannot be replaced by its facts in words.
    if fields.get("left_out"):
        view_text += (
            f", without {pluralize(fields['left_out'], 'problem')} whose facts do not suffice"
        )
    return (
        f"{name} {fields['split']}: {fields['model']}, {fields['engine']}, {sampling}{view_text}, "
        f"{rules_text}"
    )


def scored_dataset_name(score: Score) -> str:
    """Return the name of the scored data set.

    It is the name of the benchmark, except for `problems`, which scores any prepared folder. Rows
    of such a folder have ids such as `mine/test/5`, which give the name `mine`.
    """
    benchmark = str(score["benchmark"])
    if BENCHMARK_BY_ALIAS.get(benchmark, benchmark) != "problems":
        return benchmark
    pids = [str(item["pid"]) for item in score["items"]]
    names = {pid.partition("/")[0] for pid in pids if "/" in pid}
    return names.pop() if len(names) == 1 else benchmark


def _table_rows(kind: str, metric_by_group: Mapping[str, AccuracyMetric]) -> list[list[str]]:
    """Build the rows of one kind of group: the kind, the group, its count and its accuracy.

    An example is `["level", "1", "520/850", " 61.2 [57.9, 64.4]"]`. Only the first row has the name
    of the kind.
    """
    rows: list[list[str]] = []
    for group, metric in metric_by_group.items():
        shown_kind = "" if rows else kind
        count = f"{metric['correct']}/{metric['total']}" if "total" in metric else ""
        rows.append([shown_kind, group, count, accuracy_text(metric)])
    return rows


def accuracy_text(metric: AccuracyMetric | None) -> str:
    """Format an accuracy with its interval for a table, in percent: `61.2 [57.9, 64.4]`.

    A metric without an interval has the share alone. A missing metric, None, is `-`.
    """
    if metric is None:
        return "-"
    share = f"{100 * metric['accuracy']:5.1f}"
    interval = metric.get("interval_95")
    if interval is None:
        return share
    low, high = interval
    return f"{share} [{100 * low:.1f}, {100 * high:.1f}]"


def percent_with_interval(share: float, interval: Sequence[float]) -> str:
    """Format a share with its interval for a sentence, such as `61.2 % (95 %: 57.9 to 64.4)`."""
    low, high = interval
    return f"{100 * share:.1f} % (95 %: {100 * low:.1f} to {100 * high:.1f})"


def _answer_lines(score: Score) -> list[str]:
    """Format what a score says of the answers in lines, such as `verdicts: correct 6, wrong 4`.

    They are on the verdicts, the extraction, blocks of thinking, lengths, the claims on figures,
    and reflective words.
    """
    verdicts = [f"{name} {count}" for name, count in score["verdicts"].items()]
    lines = [f"verdicts: {', '.join(verdicts)}"]
    if score.get("extraction_mix"):
        methods = [f"{method} {count}" for method, count in score["extraction_mix"].items()]
        lines.append(f"extraction: {', '.join(methods)}")
    thinking = score["thinking"]
    if thinking["set_aside"]:
        line = f"thinking set aside: in {pluralize(thinking['set_aside'], 'answer')}"
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


def step_lines(metrics: Mapping[str, Any]) -> list[str]:
    """Format the metrics of `step_metrics` as lines for the screen.

    They say how many claims of an answer, such as `angle ABC = 40`, are true, and which share of
    the right answers is right by luck.
    """
    lines = [
        f"true claims of an answer: {_number_with_interval(metrics['true'])}",
        f"false claims of an answer: {_number_with_interval(metrics['false'])}",
    ]
    lucky_metric = metrics["lucky"]
    if lucky_metric is None:
        return [*lines, "right by luck: no answer is right"]
    lucky_share = percent_with_interval(lucky_metric["share"], lucky_metric["interval_95"])
    lines.append(
        f"right by luck: {lucky_share} of {lucky_metric['total']} right answers have a false claim, "
        "or none that is new"
    )
    return lines


def _number_with_interval(metric: Mapping[str, Any]) -> str:
    """Format a mean with its interval, such as `1.25 (95 %: 1.10 to 1.40)`."""
    low, high = metric["interval_95"]
    return f"{metric['value']:.2f} (95 %: {low:.2f} to {high:.2f})"


def _warning_lines(score: Score, summary: BenchmarkSummary) -> list[str]:
    """Format lines on what limits the result: missing, failed, truncated and empty answers."""
    lines = partial_score_notes(score)
    count_by_reason = {
        "unreadable images": score["image_failed"],
        "prompt too long for the model's context": score["too_long"],
    }
    for reason, count in count_by_reason.items():
        if count:
            problems = pluralize(count, "problem")
            lines.append(f"warning: {problems} not asked ({reason}), counted as wrong")
    if score.get("extraction_failed"):
        answers = pluralize(score["extraction_failed"], "answer")
        lines.append(f"warning: the judge failed on {answers}, counted as wrong")
    lines += [f"warning: {line}" for line in summary.warnings]
    n_incomplete = (score.get("samples") or {}).get("incomplete")
    if n_incomplete:
        problems = pluralize(n_incomplete, "problem")
        lines.append(f"warning: {problems} without all answers, left out of avg@k and pass@k")
    if score["empty_responses"]:
        lines.append(f"note: {pluralize(score['empty_responses'], 'empty answer')}")
    truncated = score["truncated"]
    if truncated and truncated["count"]:
        lines.append(f"note: {pluralize(truncated['count'], 'answer')} cut off at the token limit")
    return lines
