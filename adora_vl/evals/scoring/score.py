"""Computes the score of predictions, which has the same form for every benchmark.

A score counts the right answers, over all and by group, and the answers that could not be judged.
It also describes the lengths of the answers.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from adora_vl.evals.inference.predictions import IMAGE_FAILED, NOT_ASKED_REASONS, PROMPT_TOO_LONG
from adora_vl.evals.options import ScoreOptions
from adora_vl.evals.records import (
    CORRECT,
    FAILED,
    JUDGE_FAILED,
    WRONG,
    AccuracyCell,
    Benchmark,
    BenchmarkFigures,
    GradedAnswer,
    Prediction,
    Scored,
)
from adora_vl.evals.scoring.statistics import (
    mean_interval,
    pass_at,
    wilson_interval,
    wilson_over_problems,
)
from adora_vl.evals.scoring.steps import step_metrics
from adora_vl.rewards.completion import REFLECTIVE_WORD_REGEX, reflective_words
from adora_vl.rewards.thinking import closes_unopened_block, final_part


def length_statistics(token_counts: Sequence[int]) -> dict[str, float | int] | None:
    """Compute the mean, median, 90th percentile and maximum of the lengths of answers in tokens.

    Returns None if there is no answer.
    """
    if not token_counts:
        return None
    sorted_counts = sorted(token_counts)
    index_of_p90 = min(len(sorted_counts) - 1, int(0.9 * len(sorted_counts)))
    return {
        "mean": statistics.fmean(sorted_counts),
        "median": statistics.median(sorted_counts),
        "p90": sorted_counts[index_of_p90],
        "max": sorted_counts[-1],
    }


# The finish reasons of an answer that was cut off: by the limit on its length, by a tool call after
# the last one that is answered, and by a tool call whose answer does not fit the context.
_CUT_OFF_REASONS = ("length", "calls", "room")


def reflection_metrics(
    rows: Sequence[Prediction], problems: Sequence[str]
) -> dict[str, Any] | None:
    """Compute the share of responses with reflective words, such as `wait`, with its interval.

    The result also has the occurrences of each word per 1,000 responses. Returns None if there is
    no response.

    Args:
        rows: The rows with the responses.
        problems: The problem of each row, for the interval (`wilson_over_problems`).
    """
    if not rows:
        return None
    counts_of_responses = [reflective_words(row["response"]) for row in rows]
    are_reflective = [bool(counts) for counts in counts_of_responses]
    n_reflective = sum(are_reflective)
    total = len(rows)
    per_1000_answers = {}
    for word in REFLECTIVE_WORD_REGEX:
        count = sum(counts.get(word, 0) for counts in counts_of_responses)
        if count:
            per_1000_answers[word] = 1000 * count / total
    return {
        "answers": n_reflective,
        "total": total,
        "share": n_reflective / total,
        "wilson_95": list(wilson_over_problems(are_reflective, problems)),
        "per_1000_answers": per_1000_answers,
    }


# The groups of images by size: the most pixels of an image in a group, and the group's name.
_IMAGE_SIZE_GROUPS = (
    (128 * 128, "to 128x128"),
    (256 * 256, "to 256x256"),
    (512 * 512, "to 512x512"),
    (1024 * 1024, "to 1024x1024"),
)


def score(
    benchmark: Benchmark,
    rows: Sequence[Prediction],
    options: ScoreOptions,
    *,
    answer_tags: bool = False,
) -> Scored:
    """Score predictions by the rules that `options` name.

    Args:
        benchmark: The benchmark, which grades each answer.
        rows: The predictions, at least one.
        options: The benchmark's `score_options`.
        answer_tags: Whether the prompts asked for `<answer> </answer>`. The benchmark finds it in
            `options.answer_tags`.
    """
    options = replace(options, answer_tags=answer_tags)
    prepared_rows, graded = grade_rows(benchmark, rows, options)
    summary = BenchmarkFigures()
    if benchmark.summary is not None:
        summary = benchmark.summary(prepared_rows, graded, options)
    rules = benchmark.rules(options)
    if benchmark.file:
        rules = rules | {"file": benchmark.file}
    claims = step_metrics(rows, graded)
    items = [
        _describe_answer(benchmark, row, item)
        for row, item in zip(prepared_rows, graded, strict=True)
    ]
    # The score file has the keys in this order. The metrics of the benchmark may replace those
    # before them.
    content = {
        "benchmark": benchmark.name,
        **summarise_grades(graded),
        **_metrics_as_cells(summary),
        **answer_metrics(rows, graded),
        **summary.notes,
        **({"steps": claims} if claims else {}),
        "rules": rules,
        **_extraction_metrics(graded),
        "items": items,
    }
    return Scored(content, summary)


def _metrics_as_cells(summary: BenchmarkFigures) -> dict[str, dict[str, Any]]:
    """Return a benchmark's own metrics in the form of a score file, by key and then by name.

    A metric that is a plain number becomes a cell, which is a mapping with the key `accuracy`.
    """
    cells_by_key: dict[str, dict[str, Any]] = {}
    for key, metrics in summary.figures.items():
        cells: dict[str, Any] = {}
        for name, metric in metrics.items():
            is_number = isinstance(metric, int | float)
            cells[name] = {"accuracy": metric} if is_number else metric
        cells_by_key[key] = cells
    return cells_by_key


def _extraction_metrics(graded: Sequence[GradedAnswer]) -> dict[str, Any]:
    """Count how answers were extracted, and how often the judge failed.

    Returns {} for a benchmark without a separate extraction.
    """
    methods = Counter(
        item.grade.extraction.method for item in graded if item.grade.extraction is not None
    )
    if not methods:
        return {}
    return {
        "extraction_mix": dict(methods.most_common()),
        "extraction_failed": methods[JUDGE_FAILED],
    }


def grade_rows(
    benchmark: Benchmark, rows: Sequence[Prediction], options: ScoreOptions
) -> tuple[Sequence[Prediction], list[GradedAnswer]]:
    """Grade all rows by a benchmark, without their blocks of thinking.

    A response is replaced by its final part (`final_part`), since a block of thinking is no answer.
    If nothing is left, the answer is wrong, even by rules that would guess the nearest choice.

    Returns the rows as the benchmark has prepared them, and their grades in the same order.
    """
    opens_thinking = template_opens_thinking(rows)
    prepared_rows: Sequence[Prediction] = [_remove_thinking(row, opens_thinking) for row in rows]
    if benchmark.prepare is not None:
        prepared_rows = benchmark.prepare(prepared_rows, options)
    graded: list[GradedAnswer] = []
    for row, prepared_row in zip(rows, prepared_rows, strict=True):
        item = grade_row(benchmark, prepared_row, options)
        final_response = prepared_row["response"]
        if final_response != row["response"]:
            item = _note_thinking(item, has_answer=bool(final_response))
        graded.append(item)
    return prepared_rows, graded


def _note_thinking(item: GradedAnswer, *, has_answer: bool) -> GradedAnswer:
    """Return the grade of a response with its field `thinking` set.

    `has_answer` says whether the response has a text behind its block of thinking. If not, the
    answer is wrong.
    """
    if has_answer:
        return replace(item, thinking="set_aside")
    item = replace(item, thinking="without_answer")
    if item.grade.verdict == FAILED:  # the problem was not asked, or the judge failed
        return item
    grade = item.grade._replace(verdict=WRONG, extracted=None, reason="thinking_without_answer")
    return replace(item, grade=grade)


def template_opens_thinking(rows: Sequence[Prediction]) -> bool:
    """Guess whether the prompts of these predictions ended in `<think>`.

    If so, each response begins inside a block of thinking. Servers and predictions of other
    programs do not say it. It is assumed if more than half of the finished responses close a block
    that they have not opened. Responses that were cut off are left out, since they may lack the end
    of the block.
    """
    unfinished_reasons = (*_CUT_OFF_REASONS, *NOT_ASKED_REASONS)
    finished_responses = [
        row["response"] for row in rows if row.get("finish_reason") not in unfinished_reasons
    ]
    n_closing = sum(closes_unopened_block(response) for response in finished_responses)
    return 2 * n_closing > len(finished_responses)


def _remove_thinking(row: Prediction, template_opens: bool) -> Prediction:
    """Return a row whose response is replaced by its final part, without a block of thinking.

    `template_opens` says that all responses begin inside such a block. If it is false, a row may
    still say so in its own field `thinking_opened`.
    """
    thinking_opened = template_opens or row.get("thinking_opened", False)
    return {**row, "response": final_part(row["response"], thinking_opened)}


def grade_row(benchmark: Benchmark, row: Prediction, options: ScoreOptions) -> GradedAnswer:
    """Grade one row by a benchmark, and add the groups that every benchmark has.

    The verdict is `FAILED` if the problem was never asked, or if the judge failed.
    """
    grade = benchmark.grade(row, options)
    grade = grade._replace(groups={**grade.groups, **common_groups(row)})
    failure = None  # the reason of a failure, where there is one
    if grade.extraction is not None and grade.extraction.method == JUDGE_FAILED:
        failure = JUDGE_FAILED
    if row.get("finish_reason") in NOT_ASKED_REASONS:
        failure = row.get("error") or row["finish_reason"]
    if failure is not None:
        grade = grade._replace(verdict=FAILED, extracted=None, reason=failure)
    return GradedAnswer(
        pid=row["pid"],
        grade=grade,
        version_of=None if benchmark.version_of is None else benchmark.version_of(row),
        n_tokens=row.get("n_tokens"),
        sample=row.get("sample", 0),
    )


class HasRules(Protocol):
    """Score options that name a set of rules."""

    @property
    def rules(self) -> str:
        """The name of the set."""
        ...


def describe_rule_set(options: HasRules) -> dict[str, Any]:
    """Describe the rules of a score for a benchmark with several sets of rules to choose from."""
    return {"rules": options.rules}


def verdict_of(is_right: bool) -> str:
    """Return the verdict on an answer that could be judged."""
    return CORRECT if is_right else WRONG


def find_benchmark_cells(score: Mapping[str, Any]) -> dict[str, dict[str, AccuracyCell]]:
    """Return the cells of a benchmark's own metrics in a score, by its key and by name.

    For example, `{"variants": {"worst_case": {"accuracy": 0.4}}}` in a score is returned as it is.
    A key counts as the benchmark's own if its value is a mapping with cells, and a cell is a
    mapping with an `accuracy`. So the function also works on a score that was read from a file.
    """
    cells_by_key: dict[str, dict[str, Any]] = {}
    for key, metrics in score.items():
        if not isinstance(metrics, dict):
            continue
        for name, metric in metrics.items():
            if isinstance(metric, dict) and isinstance(metric.get("accuracy"), int | float):
                cells_by_key.setdefault(key, {})[name] = metric
    return cells_by_key


def describe_extracted_answer(row: Prediction, graded: GradedAnswer) -> dict[str, Any]:
    """Describe one answer for the score file, for benchmarks that extract it and then compare it."""
    return {
        "verdict": graded.grade.verdict,
        "correct": graded.correct,
        "answer": row["answer"],
        "extraction": graded.grade.extracted,
        "how": graded.grade.reason,
    }


def _describe_answer(benchmark: Benchmark, row: Prediction, graded: GradedAnswer) -> dict[str, Any]:
    """Describe one answer for the score file, in the benchmark's own way if it has one.

    Two keys are left out if they would say nothing: `sample` for the first answer to a problem, and
    `problem` if the benchmark has no versions of its problems.
    """
    item: dict[str, Any] = {"pid": graded.pid}
    if benchmark.version_of is not None or graded.problem != graded.pid:
        item["problem"] = graded.problem
    if graded.sample:
        item["sample"] = graded.sample
    if benchmark.item is not None:
        return {**item, **benchmark.item(row, graded)}
    grade = graded.grade
    return {
        **item,
        "verdict": grade.verdict,
        "extracted": grade.extracted,
        "reason": grade.reason,
    }


def metadata_groups(row: Prediction, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the groups of a row by some fields of its metadata.

    The metadata `{"skills": ["a", "b"], "grade": 5}` give `{"skills": ["a", "b"], "grade": ["5"]}`:
    a row with a list of values counts in the group of each value.
    """
    metadata = row.get("metadata") or {}
    groups: dict[str, list[str]] = {}
    for name in names:
        value = metadata.get(name)
        if value:
            values = value if isinstance(value, list) else [value]
            groups[name] = [str(item) for item in values]
    return groups


def common_groups(row: Prediction) -> dict[str, list[str]]:
    """Return the groups of a row that every benchmark has.

    They are the reason why the answer ended, whether it called tools, and the size of its image.
    """
    groups: dict[str, list[str]] = {}
    if row.get("finish_reason"):
        groups["finish_reason"] = [str(row["finish_reason"])]
    if row.get("calls") is not None:  # the model had tools
        groups["called"] = ["yes" if row["calls"] else "no"]
    if row.get("image_size"):
        width, height = row["image_size"]
        # The groups are in ascending order of their limits, so the first that fits is the group.
        fitting_groups = [name for limit, name in _IMAGE_SIZE_GROUPS if width * height <= limit]
        groups["image_size"] = [fitting_groups[0] if fitting_groups else "over 1024x1024"]
    return groups


def summarise_grades(graded: Sequence[GradedAnswer]) -> dict[str, Any]:
    """Count right answers over all (at least one) and by group, and the verdicts of each kind.

    Problems that were not asked are counted too.
    """
    # The answers by the kind of group, such as `image_size`, and by the group.
    answers_by_kind_and_group: dict[str, dict[str, list[GradedAnswer]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for item in graded:
        for kind, groups in item.grade.groups.items():
            for group in groups:
                answers_by_kind_and_group[kind][group].append(item)
    cells_by_kind: dict[str, dict[str, AccuracyCell]] = {}
    for kind, answers_by_group in answers_by_kind_and_group.items():
        cells_by_kind[kind] = {
            group: accuracy_cell(answers_by_group[group]) for group in sorted(answers_by_group)
        }
    finish_reasons = [item.grade.groups.get("finish_reason") for item in graded]
    counts: dict[str, Any] = {
        **accuracy_cell(graded),
        "groups": cells_by_kind,
        "verdicts": dict(Counter(item.grade.verdict for item in graded).most_common()),
        "image_failed": finish_reasons.count([IMAGE_FAILED]),
        "too_long": finish_reasons.count([PROMPT_TOO_LONG]),
        "thinking": {
            "set_aside": sum(item.thinking != "none" for item in graded),
            "without_answer": sum(item.thinking == "without_answer" for item in graded),
        },
    }
    return counts | _sample_metrics(graded)


def answer_metrics(rows: Sequence[Prediction], graded: Sequence[GradedAnswer]) -> dict[str, Any]:
    """Compute the metrics on the answers themselves, over the problems that were asked.

    They are the lengths of right and of wrong answers, the share of answers that was cut off, the
    reflective words, and the number of empty responses.
    """
    asked_rows: list[Prediction] = []
    asked_problems: list[str] = []
    correct_lengths: list[int] = []
    wrong_lengths: list[int] = []
    for row, item in zip(rows, graded, strict=True):
        if row.get("finish_reason") in NOT_ASKED_REASONS:
            continue
        asked_rows.append(row)
        asked_problems.append(item.problem)
        if item.n_tokens is None:
            continue
        if item.correct:
            correct_lengths.append(item.n_tokens)
        else:
            wrong_lengths.append(item.n_tokens)
    return {
        "tokens": {
            "correct": length_statistics(correct_lengths),
            "wrong": length_statistics(wrong_lengths),
        },
        "truncated": _truncation_metrics(asked_rows, asked_problems),
        "reflective_words": reflection_metrics(asked_rows, asked_problems),
        "empty_responses": sum(not row["response"].strip() for row in asked_rows),
    }


def _truncation_metrics(
    rows: Sequence[Prediction], problems: Sequence[str]
) -> dict[str, Any] | None:
    """Compute the share of answers that were cut off, among those with a finish reason.

    Returns None if no answer has a finish reason.

    Args:
        rows: The rows of the answers.
        problems: The problem of each row, for the interval (`wilson_over_problems`).
    """
    are_cut_off: list[bool] = []
    problems_with_reason: list[str] = []
    for row, problem in zip(rows, problems, strict=True):
        if row.get("finish_reason"):
            are_cut_off.append(row["finish_reason"] in _CUT_OFF_REASONS)
            problems_with_reason.append(problem)
    if not are_cut_off:
        return None
    n_cut_off = sum(are_cut_off)
    total = len(are_cut_off)
    return {
        "count": n_cut_off,
        "total": total,
        "share": n_cut_off / total,
        "wilson_95": list(wilson_over_problems(are_cut_off, problems_with_reason)),
    }


def accuracy_cell(items: Sequence[GradedAnswer]) -> AccuracyCell:
    """Compute the accuracy of answers, with its counts and its Wilson interval over the problems."""
    return share_cell([item.correct for item in items], [item.problem for item in items])


def share_cell(are_counted: Sequence[bool], problems: Sequence[str]) -> AccuracyCell:
    """Compute a share, with its counts and its Wilson interval over the problems.

    Args:
        are_counted: Whether each value is counted, such as whether an answer is right; at least one.
        problems: The problem of each value. Values of one problem are not independent.
    """
    count = sum(are_counted)
    total = len(are_counted)
    interval = list(wilson_over_problems(are_counted, problems))
    return {"correct": count, "total": total, "accuracy": count / total, "wilson_95": interval}


def cell_from_counts(correct: int, total: int, answers_per_problem: int = 1) -> AccuracyCell | None:
    """Compute an accuracy from counts alone, with its Wilson interval over the problems.

    With 2 answers to each problem, 4 right answers of 8 have the interval of 2 right answers of 4.
    Where answers are missing, the number of problems is no whole number: 3 right answers of 5 have
    the interval of 1.5 right answers of 2.5.

    Returns None if `total` is 0, or if `correct` is not between 0 and `total`.
    """
    if total <= 0 or not 0 <= correct <= total:
        return None
    accuracy = correct / total
    n_problems = max(1.0, total / answers_per_problem)
    interval = list(wilson_interval(accuracy * n_problems, n_problems))
    return {"correct": correct, "total": total, "accuracy": accuracy, "wilson_95": interval}


def correct_by_problem(items: Iterable[GradedAnswer]) -> dict[str, list[bool]]:
    """Return whether each answer to a problem is right, by the id of the problem."""
    correct: dict[str, list[bool]] = {}
    for item in items:
        correct.setdefault(item.pid, []).append(item.correct)
    return correct


def answers_per_problem(graded: Iterable[GradedAnswer]) -> int:
    """Return the largest number of answers to a problem."""
    return max(len(answers) for answers in correct_by_problem(graded).values())


def _sample_metrics(graded: Sequence[GradedAnswer]) -> dict[str, Any]:
    """Compute avg@k and pass@j for j = 1, 2, 4, ... k, with intervals over the problems.

    k is the largest number of answers to a problem: with k = 6 there are pass@1, pass@2, pass@4 and
    pass@6. Problems with fewer answers are left out, and counted as `incomplete`. Returns {} if
    each problem has one answer.
    """
    k = answers_per_problem(graded)
    if k == 1:
        return {}
    answers_by_pid = correct_by_problem(graded)
    problem_by_pid = {item.pid: item.problem for item in graded}
    complete = {pid: answers for pid, answers in answers_by_pid.items() if len(answers) == k}
    problems = [problem_by_pid[pid] for pid in complete]
    metrics: dict[str, Any] = {
        "k": k,
        "problems": len(complete),
        "incomplete": len(answers_by_pid) - len(complete),
    }
    shares = [sum(answers) / k for answers in complete.values()]
    metrics[f"avg@{k}"] = mean_with_interval(shares, problems)
    # j runs through the powers of two up to k, and k itself.
    powers_of_two = {1 << power for power in range(k.bit_length())}
    for j in sorted(powers_of_two | {k}):
        chances = [pass_at(j, samples=k, correct=sum(answers)) for answers in complete.values()]
        metrics[f"pass@{j}"] = mean_with_interval(chances, problems)
    return {"samples": metrics}


def mean_with_interval(values: Sequence[float], problems: Sequence[str]) -> dict[str, Any]:
    """Compute the mean of shares, with its 95 % interval over the problems.

    If all values are 0 or 1 it is a Wilson interval, since a bootstrap interval of few or equal
    values is too narrow. Otherwise it is a bootstrap interval.

    Args:
        values: A share or a chance for each version of a problem.
        problems: The problem of each value. Values of one problem are not independent.
    """
    mean = sum(values) / len(values)
    are_single_answers = set(values) <= {0.0, 1.0}
    interval = (
        wilson_over_problems([value == 1.0 for value in values], problems)
        if are_single_answers
        else mean_interval(values, problems, lowest=0.0, highest=1.0)
    )
    return {
        "value": mean,
        "interval_95": list(interval),
        "interval": "wilson" if are_single_answers else "bootstrap",
    }
