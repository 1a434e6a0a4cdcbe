"""Computes the score of predictions, which has the same form for every benchmark.

A score counts the right answers, over all and by group, and the answers that could not be judged.
It also describes the lengths of the answers.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from adora_vl.evals.inference.predictions import IMAGE_FAILED, NOT_ASKED_REASONS, PROMPT_TOO_LONG
from adora_vl.evals.options import ScoreOptions
from adora_vl.evals.records import (
    FAILED,
    JUDGE_FAILED,
    WRONG,
    AccuracyMetric,
    Benchmark,
    BenchmarkSummary,
    GradedAnswer,
    Prediction,
    ScoredBenchmark,
    ShareMetric,
)
from adora_vl.evals.scoring.statistics import (
    bootstrap_mean_interval,
    clustered_wilson_interval,
    pass_at_k,
    share_metric,
    wilson_interval,
)
from adora_vl.evals.scoring.steps import step_metrics
from adora_vl.rewards.completion import REFLECTIVE_WORD_REGEX, reflective_words
from adora_vl.rewards.thinking import closes_unopened_block, text_after_thinking, with_latex_boxes
from adora_vl.utils.cli import quantile


def length_statistics(token_counts: Sequence[int]) -> dict[str, float | int] | None:
    """Compute the `mean`, `median`, `p90` and `max` of the lengths of answers in tokens.

    Returns None if there is no answer.
    """
    if not token_counts:
        return None
    return {
        "mean": statistics.fmean(token_counts),
        "median": statistics.median(token_counts),
        "p90": quantile(token_counts, share=0.9),
        "max": max(token_counts),
    }


# The finish reasons of an answer that was cut off: by the limit on its length, by a tool call after
# the last one that is answered, and by a tool call whose answer does not fit the context.
_CUT_OFF_REASONS = ("length", "calls", "room")


def reflection_metrics(
    rows: Sequence[Prediction], problem_ids: Sequence[str]
) -> dict[str, Any] | None:
    """Compute the share of responses with reflective words, such as `wait`, with its interval.

    The result also has the occurrences of each word per 1,000 responses. Returns None if there is
    no response.

    Args:
        rows: The rows with the responses.
        problem_ids: The problem of each row, since answers to one problem are not independent.
    """
    if not rows:
        return None
    # How often each reflective word is in each response, such as {"wait": 2}.
    word_counts = [reflective_words(row["response"]) for row in rows]
    are_reflective = [bool(count_by_word) for count_by_word in word_counts]
    per_1000_answers = {}
    for word in REFLECTIVE_WORD_REGEX:
        count = sum(count_by_word.get(word, 0) for count_by_word in word_counts)
        if count:
            per_1000_answers[word] = 1000 * count / len(rows)
    return {**share_metric(are_reflective, problem_ids), "per_1000_answers": per_1000_answers}


# The groups of images by size: the most pixels of an image in a group, and the group's name.
_IMAGE_SIZE_GROUPS = (
    (128 * 128, "to 128x128"),
    (256 * 256, "to 256x256"),
    (512 * 512, "to 512x512"),
    (1024 * 1024, "to 1024x1024"),
)


def score_predictions(
    benchmark: Benchmark,
    rows: Sequence[Prediction],
    options: ScoreOptions,
    *,
    answer_tags: bool = False,
) -> ScoredBenchmark:
    """Grade predictions by the rules that `options` name, and compute the metrics of a score file.

    Args:
        benchmark: The benchmark, which grades each answer.
        rows: The predictions, at least one.
        options: The benchmark's `score_options`.
        answer_tags: Whether the prompts asked for `<answer> </answer>`. The benchmark finds it in
            `options.answer_tags`.
    """
    options = replace(options, answer_tags=answer_tags)
    prepared_rows, graded_answers = grade_rows(benchmark, rows, options)
    summary = BenchmarkSummary()
    if benchmark.summary is not None:
        summary = benchmark.summary(prepared_rows, graded_answers, options)
    rules = benchmark.rules(options)
    if benchmark.file:
        rules = rules | {"file": benchmark.file}
    claim_metrics = step_metrics(rows, graded_answers)
    steps = {"steps": claim_metrics} if claim_metrics else {}
    items = [
        _build_score_item(benchmark, row, graded)
        for row, graded in zip(prepared_rows, graded_answers, strict=True)
    ]
    # The score file has the keys in this order. The metrics of the benchmark may replace those
    # before them.
    content = {
        "benchmark": benchmark.name,
        **summarise_grades(graded_answers),
        **_normalise_metrics(summary),
        **answer_metrics(rows, graded_answers),
        **summary.extra_keys,
        **steps,
        "rules": rules,
        **_extraction_metrics(graded_answers),
        "items": items,
    }
    return ScoredBenchmark(content, summary)


def _normalise_metrics(summary: BenchmarkSummary) -> dict[str, dict[str, Any]]:
    """Return a benchmark's own metrics in the form of a score file.

    A metric that is a plain number becomes an `AccuracyMetric`: `{"variants": {"robustness": 0.7}}`
    becomes `{"variants": {"robustness": {"accuracy": 0.7}}}`.
    """
    metrics_by_key: dict[str, dict[str, Any]] = {}
    for key, metrics in summary.metrics.items():
        normalised: dict[str, Any] = {}
        for name, metric in metrics.items():
            is_number = isinstance(metric, int | float)
            normalised[name] = {"accuracy": metric} if is_number else metric
        metrics_by_key[key] = normalised
    return metrics_by_key


def _extraction_metrics(graded_answers: Sequence[GradedAnswer]) -> dict[str, Any]:
    """Count by which method answers were extracted, and how often the judge failed.

    Returns {} for a benchmark without a separate extraction.
    """
    extractions = [graded.grade.extraction for graded in graded_answers]
    count_by_method = Counter(
        extraction.method for extraction in extractions if extraction is not None
    )
    if not count_by_method:
        return {}
    return {
        "extraction_mix": dict(count_by_method.most_common()),
        "extraction_failed": count_by_method[JUDGE_FAILED],
    }


def grade_rows(
    benchmark: Benchmark, rows: Sequence[Prediction], options: ScoreOptions
) -> tuple[Sequence[Prediction], list[GradedAnswer]]:
    """Grade all rows by a benchmark, without their blocks of thinking.

    Only the part of a response after `</think>` is graded. If nothing is left, the answer is
    wrong, even by rules that would guess the nearest choice.

    Returns the rows as `benchmark.prepare` made them, without thinking and, for example, with the
    extracted answers; and their grades in the same order.
    """
    opens_thinking = template_opens_thinking(rows)
    prepared_rows: Sequence[Prediction] = [_remove_thinking(row, opens_thinking) for row in rows]
    if benchmark.prepare is not None:
        prepared_rows = benchmark.prepare(prepared_rows, options)
    graded_answers: list[GradedAnswer] = []
    for row, prepared_row in zip(rows, prepared_rows, strict=True):
        graded = grade_row(benchmark, prepared_row, options)
        final_response = prepared_row["response"]
        # Of a response without thinking only the spelling of its boxes has changed.
        had_thinking = final_response != with_latex_boxes(row["response"])
        if had_thinking:
            graded = _record_thinking(graded, has_answer=bool(final_response))
        graded_answers.append(graded)
    return prepared_rows, graded_answers


def _record_thinking(graded: GradedAnswer, *, has_answer: bool) -> GradedAnswer:
    """Return the graded answer with its field `thinking` set, for a response that had thinking.

    `has_answer` says whether the response has a text after its block of thinking. If not, the
    answer is wrong.
    """
    if has_answer:
        return replace(graded, thinking="set_aside")
    graded = replace(graded, thinking="without_answer")
    if graded.grade.verdict == FAILED:  # the problem was not asked, or the judge failed
        return graded
    grade = graded.grade._replace(verdict=WRONG, extracted=None, reason="thinking_without_answer")
    return replace(graded, grade=grade)


def template_opens_thinking(rows: Sequence[Prediction]) -> bool:
    """Guess whether the chat template ended every prompt in `<think>`.

    Each response then begins inside a block of thinking, which servers and other programs do not
    say. It is assumed if more than half of the finished responses have a `</think>` without a
    `<think>` before it. Responses that were cut off may lack the `</think>`, and are left out.
    """
    unfinished_reasons = (*_CUT_OFF_REASONS, *NOT_ASKED_REASONS)
    finished_responses = [
        row["response"] for row in rows if row.get("finish_reason") not in unfinished_reasons
    ]
    n_closing = sum(closes_unopened_block(response) for response in finished_responses)
    return 2 * n_closing > len(finished_responses)


def _remove_thinking(row: Prediction, opens_thinking: bool) -> Prediction:
    """Return a row whose response is cut to the part after its block of thinking.

    `opens_thinking` says that all responses begin inside a block of thinking. If it is false, the
    field `thinking_opened` of a single row may still say so.
    """
    thinking_opened = opens_thinking or row.get("thinking_opened", False)
    return {**row, "response": text_after_thinking(row["response"], thinking_opened)}


def grade_row(benchmark: Benchmark, row: Prediction, options: ScoreOptions) -> GradedAnswer:
    """Grade one row by a benchmark, and add the groups that every benchmark has.

    The verdict is `FAILED` if the problem was never asked, or if the judge failed.
    """
    grade = benchmark.grade(row, options)
    grade = grade._replace(groups={**grade.groups, **common_groups(row)})
    failure_reason = None
    if grade.extraction is not None and grade.extraction.method == JUDGE_FAILED:
        failure_reason = JUDGE_FAILED
    if row.get("finish_reason") in NOT_ASKED_REASONS:
        failure_reason = row.get("error") or row["finish_reason"]
    if failure_reason is not None:
        grade = grade._replace(verdict=FAILED, extracted=None, reason=failure_reason)
    return GradedAnswer(
        pid=row["pid"],
        grade=grade,
        original_id=None if benchmark.original_id is None else benchmark.original_id(row),
        n_tokens=row.get("n_tokens"),
        sample=row.get("sample", 0),
    )


def find_benchmark_metrics(score: Mapping[str, Any]) -> dict[str, dict[str, AccuracyMetric]]:
    """Return the metrics that a benchmark added to its score, by the key of the score and by name.

    A score with `"variants": {"worst_case": {"accuracy": 0.4}}` gives this entry. They are
    recognised by their form, also in a score that was read from a file: every mapping with an
    `accuracy` that is itself in a mapping of the score.
    """
    metrics_by_key: dict[str, dict[str, Any]] = {}
    for key, metrics in score.items():
        if not isinstance(metrics, dict):
            continue
        for name, metric in metrics.items():
            if isinstance(metric, dict) and isinstance(metric.get("accuracy"), int | float):
                metrics_by_key.setdefault(key, {})[name] = metric
    return metrics_by_key


def build_extraction_item(row: Prediction, graded: GradedAnswer) -> dict[str, Any]:
    """Build the entry of an answer in `items` of the score file, with `how` it was extracted.

    It is the `item` of benchmarks that extract an answer and then compare it with the reference.
    """
    return {
        "verdict": graded.grade.verdict,
        "correct": graded.correct,
        "answer": row["answer"],
        "extraction": graded.grade.extracted,
        "how": graded.grade.reason,
    }


def _build_score_item(
    benchmark: Benchmark, row: Prediction, graded: GradedAnswer
) -> dict[str, Any]:
    """Build the entry of an answer in `items` of the score file.

    A benchmark may have a function for it, `benchmark.item`. Two keys are left out if they would
    say nothing: `sample` for the first answer to a problem, and `problem` if the benchmark has no
    versions of its problems.
    """
    item: dict[str, Any] = {"pid": graded.pid}
    if benchmark.original_id is not None or graded.problem_id != graded.pid:
        item["problem"] = graded.problem_id
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


def groups_from_metadata(row: Prediction, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the groups in which an answer is counted, by some fields of its row's metadata.

    The metadata `{"skills": ["a", "b"], "grade": 5}` give `{"skills": ["a", "b"], "grade": ["5"]}`:
    a row with a list of values counts in the group of each value.
    """
    metadata = row.get("metadata") or {}
    groups: dict[str, list[str]] = {}
    for name in names:
        value = metadata.get(name)
        if value:
            values = value if isinstance(value, list) else [value]
            groups[name] = [str(element) for element in values]
    return groups


def _image_size_group(pixels: int) -> str:
    """Return the group of an image with this number of pixels, such as `to 256x256`."""
    for limit, name in _IMAGE_SIZE_GROUPS:  # in ascending order of the limits
        if pixels <= limit:
            return name
    return "over 1024x1024"


def common_groups(row: Prediction) -> dict[str, list[str]]:
    """Return the groups in which an answer is counted, whatever its benchmark.

    They are the reason why the answer ended, whether it called tools, and the size of its image:
    `{"finish_reason": ["stop"], "called": ["no"], "image_size": ["to 256x256"]}`.
    """
    groups: dict[str, list[str]] = {}
    if row.get("finish_reason"):
        groups["finish_reason"] = [str(row["finish_reason"])]
    if row.get("calls") is not None:  # the model had tools
        groups["called"] = ["yes" if row["calls"] else "no"]
    if row.get("image_size"):
        width, height = row["image_size"]
        groups["image_size"] = [_image_size_group(width * height)]
    return groups


def summarise_grades(graded_answers: Sequence[GradedAnswer]) -> dict[str, Any]:
    """Compute the accuracy over all answers (at least one) and by group, and count the verdicts.

    Problems that were not asked are counted too.
    """
    # Every kind of group is a list, so each answer has a list with one reason.
    finish_reasons = [graded.grade.groups.get("finish_reason") for graded in graded_answers]
    verdicts = Counter(graded.grade.verdict for graded in graded_answers)
    # What became of the block of thinking in each answer; `none` where there was none.
    thinking = [graded.thinking for graded in graded_answers]
    counts: dict[str, Any] = {
        **accuracy_metric(graded_answers),
        "groups": _accuracy_by_group(graded_answers),
        "verdicts": dict(verdicts.most_common()),
        "image_failed": finish_reasons.count([IMAGE_FAILED]),
        "too_long": finish_reasons.count([PROMPT_TOO_LONG]),
        "thinking": {
            "set_aside": len(thinking) - thinking.count("none"),
            "without_answer": thinking.count("without_answer"),
        },
    }
    return counts | _sample_metrics(graded_answers)


def _accuracy_by_group(
    graded_answers: Sequence[GradedAnswer],
) -> dict[str, dict[str, AccuracyMetric]]:
    """Compute the accuracy in each group of answers, by the kind of group and by the group.

    For example, `{"level": {"1": {"accuracy": 0.6, ...}, "2": {"accuracy": 0.4, ...}}}`.
    """
    answers_by_kind: dict[str, dict[str, list[GradedAnswer]]] = {}
    for graded in graded_answers:
        for kind, groups in graded.grade.groups.items():
            for group in groups:
                answers_by_kind.setdefault(kind, {}).setdefault(group, []).append(graded)
    accuracy_by_kind: dict[str, dict[str, AccuracyMetric]] = {}
    for kind, answers_by_group in answers_by_kind.items():
        accuracy_by_kind[kind] = {
            group: accuracy_metric(answers_by_group[group]) for group in sorted(answers_by_group)
        }
    return accuracy_by_kind


def answer_metrics(
    rows: Sequence[Prediction], graded_answers: Sequence[GradedAnswer]
) -> dict[str, Any]:
    """Compute the metrics on the answers themselves, over the problems that were asked.

    They are the lengths of right and of wrong answers, the share of answers that was cut off, the
    reflective words, and the number of empty responses.
    """
    asked_rows: list[Prediction] = []
    problem_ids: list[str] = []  # of the rows that were asked
    correct_lengths: list[int] = []
    wrong_lengths: list[int] = []
    for row, graded in zip(rows, graded_answers, strict=True):
        if row.get("finish_reason") in NOT_ASKED_REASONS:
            continue
        asked_rows.append(row)
        problem_ids.append(graded.problem_id)
        if graded.n_tokens is None:
            continue
        if graded.correct:
            correct_lengths.append(graded.n_tokens)
        else:
            wrong_lengths.append(graded.n_tokens)
    return {
        "tokens": {
            "correct": length_statistics(correct_lengths),
            "wrong": length_statistics(wrong_lengths),
        },
        "truncated": _truncation_metrics(asked_rows, problem_ids),
        "reflective_words": reflection_metrics(asked_rows, problem_ids),
        "empty_responses": sum(not row["response"].strip() for row in asked_rows),
    }


def _truncation_metrics(
    rows: Sequence[Prediction], problem_ids: Sequence[str]
) -> ShareMetric | None:
    """Compute the share of answers that were cut off, among those with a finish reason.

    Returns None if no answer has a finish reason.

    Args:
        rows: The rows of the answers.
        problem_ids: The problem of each row, since answers to one problem are not independent.
    """
    are_cut_off: list[bool] = []
    counted_problem_ids: list[str] = []
    for row, problem_id in zip(rows, problem_ids, strict=True):
        if row.get("finish_reason"):
            are_cut_off.append(row["finish_reason"] in _CUT_OFF_REASONS)
            counted_problem_ids.append(problem_id)
    if not are_cut_off:
        return None
    return share_metric(are_cut_off, counted_problem_ids)


def accuracy_metric(graded_answers: Sequence[GradedAnswer]) -> AccuracyMetric:
    """Compute the accuracy of answers (at least one), with its counts and its Wilson interval."""
    are_correct = [graded.correct for graded in graded_answers]
    return accuracy_of_share(are_correct, [graded.problem_id for graded in graded_answers])


def accuracy_of_share(successes: Sequence[bool], problem_ids: Sequence[str]) -> AccuracyMetric:
    """Return `share_metric` under the names of an `AccuracyMetric`: `correct`, `accuracy`.

    The arguments are those of `share_metric`.
    """
    metric = share_metric(successes, problem_ids)
    return {
        "correct": metric["count"],
        "total": metric["total"],
        "accuracy": metric["share"],
        "interval_95": metric["interval_95"],
    }


def accuracy_from_counts(
    correct: int, total: int, samples_per_problem: int = 1
) -> AccuracyMetric | None:
    """Compute an accuracy from counts alone, with its Wilson interval over the problems.

    With 2 samples per problem, 4 right answers of 8 have the interval of 2 right answers of 4.
    Where answers are missing, the number of problems is no whole number: 3 right answers of 5 have
    the interval of 1.5 right answers of 2.5.

    Returns None if `total` is 0, or if `correct` is not between 0 and `total`.
    """
    if total <= 0 or not 0 <= correct <= total:
        return None
    accuracy = correct / total
    n_problems = max(1.0, total / samples_per_problem)
    interval = list(wilson_interval(accuracy * n_problems, n_problems))
    return {"correct": correct, "total": total, "accuracy": accuracy, "interval_95": interval}


def correctness_by_pid(graded_answers: Iterable[GradedAnswer]) -> dict[str, list[bool]]:
    """Return for each pid whether its answers are right: `{"p1": [True, False], "p2": [False]}`."""
    are_correct: dict[str, list[bool]] = {}
    for graded in graded_answers:
        are_correct.setdefault(graded.pid, []).append(graded.correct)
    return are_correct


def samples_per_problem(graded_answers: Iterable[GradedAnswer]) -> int:
    """Return the largest number of answers to a problem."""
    return max(len(are_correct) for are_correct in correctness_by_pid(graded_answers).values())


def _sample_metrics(graded_answers: Sequence[GradedAnswer]) -> dict[str, Any]:
    """Compute avg@k and pass@j for j = 1, 2, 4, ... k, with intervals over the problems.

    k is the largest number of answers to a problem: with k = 6 there are pass@1, pass@2, pass@4 and
    pass@6. Problems with fewer answers are left out, and counted as `incomplete`. Returns {} if
    each problem has one answer.
    """
    k = samples_per_problem(graded_answers)
    if k == 1:
        return {}
    are_correct_by_pid = correctness_by_pid(graded_answers)
    # How many of the k answers are right, for each problem that has all of them.
    n_correct_by_pid = {
        pid: sum(are_correct)
        for pid, are_correct in are_correct_by_pid.items()
        if len(are_correct) == k
    }
    problem_id_by_pid = {graded.pid: graded.problem_id for graded in graded_answers}
    problem_ids = [problem_id_by_pid[pid] for pid in n_correct_by_pid]
    metrics: dict[str, Any] = {
        "k": k,
        "problems": len(n_correct_by_pid),
        "incomplete": len(are_correct_by_pid) - len(n_correct_by_pid),
    }
    accuracies = [n_correct / k for n_correct in n_correct_by_pid.values()]
    metrics[f"avg@{k}"] = mean_with_interval(accuracies, problem_ids)
    # j runs through the powers of two up to k, and k itself.
    powers_of_two = {1 << power for power in range(k.bit_length())}
    for j in sorted(powers_of_two | {k}):
        pass_rates = [
            pass_at_k(j, samples=k, correct=n_correct) for n_correct in n_correct_by_pid.values()
        ]
        metrics[f"pass@{j}"] = mean_with_interval(pass_rates, problem_ids)
    return {"samples": metrics}


def mean_with_interval(values: Sequence[float], problem_ids: Sequence[str]) -> dict[str, Any]:
    """Compute the mean of values from 0 to 1, with its 95 % interval over the problems.

    If all values are 0 or 1 it is a Wilson interval, since a bootstrap interval of few or equal
    values is too narrow. Otherwise it is a bootstrap interval.

    Args:
        values: The accuracy (or pass@k) of each version of a problem.
        problem_ids: The problem of each value. Values of one problem are not independent.

    Returns for example `{"value": 0.6, "interval_95": [0.5, 0.7], "interval": "bootstrap"}`.
    """
    mean = sum(values) / len(values)
    are_single_answers = set(values) <= {0.0, 1.0}
    if are_single_answers:
        interval_name = "wilson"
        interval = clustered_wilson_interval([value == 1.0 for value in values], problem_ids)
    else:
        interval_name = "bootstrap"
        interval = bootstrap_mean_interval(values, problem_ids, lowest=0.0, highest=1.0)
    return {"value": mean, "interval_95": list(interval), "interval": interval_name}
