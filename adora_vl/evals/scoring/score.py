"""The score of predictions, the same for every benchmark.

It has counts, groups, lengths, and what could not be judged.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from adora_vl.evals.inference.predictions import IMAGE_FAILED, NOT_ASKED, TOO_LONG
from adora_vl.evals.options import ScoreOptions
from adora_vl.evals.records import (
    CORRECT,
    FAILED,
    JUDGE_FAILED,
    WRONG,
    Benchmark,
    Cell,
    Graded,
    OwnFigures,
    Prediction,
    Scored,
)
from adora_vl.evals.scoring.statistics import bootstrap, pass_at, wilson
from adora_vl.evals.scoring.steps import step_figures
from adora_vl.rewards.completion import REFLECTIVE, reflective_words
from adora_vl.rewards.thinking import closes_unopened_block, final_part


def lengths(tokens: Sequence[int]) -> dict[str, float | int] | None:
    """Mean, median, 90th percentile and maximum of completion lengths in tokens.

    None where there is no completion.
    """
    if not tokens:
        return None
    ordered = sorted(tokens)
    high = {"p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], "max": ordered[-1]}
    return {"mean": statistics.fmean(ordered), "median": statistics.median(ordered), **high}


# The finish reasons of an answer that was cut off. The last two are those at a call that nobody
# answers, and at a call whose answer has no room.
_CUT = (
    "length",
    "calls",
    "room",
)


def reflection(responses: Sequence[str]) -> dict[str, Any] | None:
    """Return the share of answers with reflective words, and how often each word occurs.

    That is counted in 1,000 answers. None where there is no answer.
    """
    if not responses:
        return None
    words_by_answer = [reflective_words(text) for text in responses]
    counts = {word: sum(words.get(word, 0) for words in words_by_answer) for word in REFLECTIVE}
    reflective = sum(map(bool, words_by_answer))
    total = len(responses)
    share = {
        "answers": reflective,
        "total": total,
        "share": reflective / total,
        "wilson_95": list(wilson(reflective, total)),
    }
    return {
        **share,
        "per_1000_answers": {word: 1000 * count / total for word, count in counts.items() if count},
    }


# By total pixels of the first image: the upper ends of the groups.
_SIZES = (
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
    """Return the score of predictions by the rules that `options` name.

    Args:
        benchmark: The benchmark, which grades each answer.
        rows: The predictions, at least one.
        options: The benchmark's `score_options`.
        answer_tags: Whether the prompts asked for `<answer> </answer>`; `options.answer_tags`
            hands it to the benchmark.
    """
    options = replace(options, answer_tags=answer_tags)
    predictions = rows
    rows, graded = graded_rows(benchmark, predictions, options)
    summary = OwnFigures()
    if benchmark.summary is not None:
        summary = benchmark.summary(rows, graded, options)
    own_figures: dict[str, dict[str, Any]] = {}
    for key, figures in summary.figures.items():
        cells = {}
        for name, figure in figures.items():
            is_number = isinstance(figure, int | float)
            cells[name] = {"accuracy": figure} if is_number else figure
        own_figures[key] = cells
    rules = benchmark.rules(options)
    if benchmark.file:
        rules = rules | {"file": benchmark.file}
    methods = Counter(
        item.grade.extraction.method for item in graded if item.grade.extraction is not None
    )
    extraction = {}
    if methods:
        extraction = {
            "extraction_mix": dict(methods.most_common()),
            "extraction_failed": methods[JUDGE_FAILED],
        }
    claims = step_figures(predictions, graded)
    result = {
        "benchmark": benchmark.name,
        **aggregate(graded),
        **own_figures,
        **answers(predictions, graded),
        **summary.notes,
        **({"steps": claims} if claims else {}),
        "rules": rules,
        **extraction,
        "items": [_item(benchmark, row, item) for row, item in zip(rows, graded, strict=True)],
    }
    return Scored(result, summary)


def graded_rows(
    benchmark: Benchmark, rows: Sequence[Prediction], options: ScoreOptions
) -> tuple[Sequence[Prediction], list[Graded]]:
    """Return the rows as a benchmark reads them, and their grades.

    A benchmark, its rules and its judge get the final part of each response (`final_part`): a block
    of thinking is no answer. Where no answer stands behind it, the response is wrong by all rules,
    also by those that take the nearest choice for an answer that is not there.
    """
    opened = template_opens_thinking(rows)
    read: Sequence[Prediction] = [_without_thinking(row, opened) for row in rows]
    if benchmark.prepare is not None:
        read = benchmark.prepare(read, options)
    graded: list[Graded] = []
    for row, read_row in zip(rows, read, strict=True):
        item = grade_row(benchmark, read_row, options)
        if read_row["response"] != row["response"]:
            item = replace(item, thinking="set_aside" if read_row["response"] else "without_answer")
        if item.thinking == "without_answer" and item.grade.verdict != FAILED:
            grade = item.grade._replace(
                verdict=WRONG, extracted=None, reason="thinking_without_answer"
            )
            item = replace(item, grade=grade)
        graded.append(item)
    return read, graded


def template_opens_thinking(rows: Sequence[Prediction]) -> bool:
    """Return whether the prompts of these answers seem to have ended in `<think>`.

    A server does not say it, and other programs' predictions do not. It is so where most of the
    answers that came to an end close a block that they have not opened; those that were cut off
    before that have no tag at all.
    """
    unfinished = (*_CUT, *NOT_ASKED)
    ended = [row["response"] for row in rows if row.get("finish_reason") not in unfinished]
    closing = [response for response in ended if closes_unopened_block(response)]
    return 2 * len(closing) > len(ended)


def _without_thinking(row: Prediction, template_opens: bool) -> Prediction:
    """Return the row with the final part of its response in place of the whole one."""
    opened = template_opens or row.get("thinking_opened", False)
    return {**row, "response": final_part(row["response"], opened)}


def grade_row(benchmark: Benchmark, row: Prediction, options: ScoreOptions) -> Graded:
    """Return one row, with the final part of its response, as its benchmark grades it.

    It has failed where its problem was never asked, or where the judge could not say.
    """
    grade = benchmark.grade(row, options)
    grade = grade._replace(groups={**grade.groups, **common_groups(row)})
    failed = None
    if grade.extraction is not None and grade.extraction.method == JUDGE_FAILED:
        failed = JUDGE_FAILED
    if row.get("finish_reason") in NOT_ASKED:
        failed = row.get("error") or row["finish_reason"]
    if failed is not None:
        grade = grade._replace(verdict=FAILED, extracted=None, reason=failed)
    return Graded(
        pid=row["pid"], grade=grade, n_tokens=row.get("n_tokens"), sample=row.get("sample", 0)
    )


class HasRules(Protocol):
    """Options that name a set of rules."""

    @property
    def rules(self) -> str:
        """The name of the set."""
        ...


def rule_set(options: HasRules) -> dict[str, Any]:
    """Return the rules of a benchmark that has several sets of them to choose from."""
    return {"rules": options.rules}


def verdict_of(right: bool) -> str:
    """Return the verdict on an answer that could be judged."""
    return CORRECT if right else WRONG


def own_cells(score: Mapping[str, Any]) -> dict[str, dict[str, Cell]]:
    """Return the cells of a benchmark's own figures in a score, by key and name.

    They are recognised by their form, so that a score file that was read has them too.
    """
    cells: dict[str, dict[str, Any]] = {}
    for key, figures in score.items():
        if not isinstance(figures, dict):
            continue
        for name, figure in figures.items():
            if isinstance(figure, dict) and isinstance(figure.get("accuracy"), int | float):
                cells.setdefault(key, {})[name] = figure
    return cells


def missing_answers(score: Mapping[str, Any]) -> str | None:
    """Return a sentence if a score is of a part of the answers that were asked for.

    None for a whole one or an unknown one.
    """
    coverage = score.get("coverage") or {}
    answers = coverage.get("answers")
    requested = coverage.get("asked")
    if not answers or not requested or answers >= requested:
        return None
    return (
        f"the score of a part: {answers} of {requested} answers are there; run `infer` again for "
        "the others"
    )


def partial_notes(score: Mapping[str, Any]) -> list[str]:
    """Return what a reader has to know of a score over a part of the problems.

    A line for each reason. A part was answered, a part was asked (`--limit`), or nobody knows how
    many problems there are.
    """
    coverage = score.get("coverage") or {}
    if coverage and coverage.get("asked") is None:
        unknown = "it is not known of how many problems these are; no run lies beside the answers"
        return [f"note: {unknown}"]
    lines: list[str] = []
    missing = missing_answers(score)
    if missing:
        lines.append(f"warning: {missing}")
    requested = coverage.get("asked") or 0
    in_data = coverage.get("in_data") or 0
    if requested < in_data:
        lines.append(f"note: {requested} of the {in_data} answers to all the data (--limit)")
    return lines


def share_of_the_data(score: Mapping[str, Any]) -> str | None:
    """Return the words `60 of 512` for a score over 60 of the 512 answers to all the data.

    None for a score over all of them, or where it is not known.
    """
    coverage = score.get("coverage") or {}
    answers = coverage.get("answers")
    in_data = max(coverage.get("asked") or 0, coverage.get("in_data") or 0)
    if not answers or answers >= in_data:
        return None
    return f"{answers} of {in_data}"


def extraction_item(row: Prediction, graded: Graded) -> dict[str, Any]:
    """Return a benchmark's entry of an answer that is first extracted and then compared."""
    grade = graded.grade
    fields = {"correct": graded.correct, "answer": row["answer"]}
    return {"verdict": grade.verdict, **fields, "extraction": grade.extracted, "how": grade.reason}


def _item(benchmark: Benchmark, row: Prediction, graded: Graded) -> dict[str, Any]:
    """Return the entry of an answer in the score file: the benchmark's, or the usual one."""
    verdict, extracted, reason, *_ = graded.grade
    usual = {"verdict": verdict, "extracted": extracted, "reason": reason}
    fields = benchmark.item(row, graded) if benchmark.item else usual
    return {"pid": graded.pid, **({"sample": graded.sample} if graded.sample else {}), **fields}


def metadata_groups(row: Prediction, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the groups of a row by fields of its metadata, a value or a list of them each."""
    metadata = row.get("metadata") or {}
    groups = {}
    for name in names:
        value = metadata.get(name)
        if value:
            values = value if isinstance(value, list) else [value]
            groups[name] = [str(item) for item in values]
    return groups


def common_groups(row: Prediction) -> dict[str, list[str]]:
    """Return the groups that every benchmark has.

    They say why the answer ended, whether it called tools, and how large the image is.
    """
    groups = {}
    if row.get("finish_reason"):
        groups["finish_reason"] = [str(row["finish_reason"])]
    if row.get("calls") is not None:
        groups["called"] = ["yes" if row["calls"] else "no"]
    size = row.get("image_size")
    if size:
        pixels = size[0] * size[1]
        groups["image_size"] = [
            next((name for limit, name in _SIZES if pixels <= limit), "over 1024x1024")
        ]
    return groups


def aggregate(graded: Sequence[Graded]) -> dict[str, Any]:
    """Return counts over all answers (at least one) and by group.

    Problems that were not asked are counted too.
    """
    members: dict[str, dict[str, list[Graded]]] = defaultdict(lambda: defaultdict(list))
    for item in graded:
        for key, values in item.grade.groups.items():
            for value in values:
                members[key][value].append(item)
    counts: dict[str, Any] = {
        **accuracy_cell(graded),
        "groups": {
            key: {value: accuracy_cell(members[key][value]) for value in sorted(members[key])}
            for key in members
        },
        "verdicts": dict(Counter(item.grade.verdict for item in graded).most_common()),
        "image_failed": sum(
            item.grade.groups.get("finish_reason") == [IMAGE_FAILED] for item in graded
        ),
        "too_long": sum(item.grade.groups.get("finish_reason") == [TOO_LONG] for item in graded),
        "thinking": {
            "set_aside": sum(item.thinking != "none" for item in graded),
            "without_answer": sum(item.thinking == "without_answer" for item in graded),
        },
    }
    return counts | _samples(graded)


def answers(rows: Sequence[Prediction], graded: Sequence[Graded]) -> dict[str, Any]:
    """Return the figures over the answers to the problems that were asked.

    They are the lengths of right and wrong answers, the share cut off, and reflective words.
    """
    asked_rows = []
    correct_lengths = []
    wrong_lengths = []
    for row, item in zip(rows, graded, strict=True):
        if row.get("finish_reason") in NOT_ASKED:
            continue
        asked_rows.append(row)
        if item.n_tokens is None:
            continue
        if item.correct:
            correct_lengths.append(item.n_tokens)
        else:
            wrong_lengths.append(item.n_tokens)
    finish_reasons = [row["finish_reason"] for row in asked_rows if row.get("finish_reason")]
    cut = sum(reason in _CUT for reason in finish_reasons)
    total = max(1, len(finish_reasons))
    truncated = {
        "count": cut,
        "total": total,
        "share": cut / total,
        "wilson_95": list(wilson(cut, total)),
    }
    return {
        "tokens": {"correct": lengths(correct_lengths), "wrong": lengths(wrong_lengths)},
        "truncated": truncated if finish_reasons else None,
        "reflective_words": reflection([row["response"] for row in asked_rows]),
        "empty_responses": sum(not row["response"].strip() for row in asked_rows),
    }


def accuracy_cell(items: Sequence[Graded]) -> Cell:
    """Return the number of correct answers, their total, and the Wilson interval of the accuracy.

    Answers to one problem are not independent, so the interval is that of as many answers as there
    are problems: never too narrow, and wider than necessary where the answers to a problem differ.
    """
    correct = sum(item.correct for item in items)
    total = len(items)
    problems = len({item.pid for item in items})
    correct_problems: float = correct
    if problems < total:
        correct_problems = correct / total * problems
    interval = list(wilson(correct_problems, problems))
    return {"correct": correct, "total": total, "accuracy": correct / total, "wilson_95": interval}


def cell_from_counts(correct: int, total: int, answers: int = 1) -> Cell | None:
    """Return a cell from counts, with `answers` answers per problem.

    None if there is nothing to count.
    """
    if total <= 0 or not 0 <= correct <= total:
        return None
    interval = list(wilson(correct / answers, max(1, total // answers)))
    return {"correct": correct, "total": total, "accuracy": correct / total, "wilson_95": interval}


def correct_by_problem(items: Iterable[Graded]) -> dict[str, list[bool]]:
    """Return for each problem whether each of its answers is right."""
    verdicts: dict[str, list[bool]] = {}
    for item in items:
        verdicts.setdefault(item.pid, []).append(item.correct)
    return verdicts


def _samples(graded: Sequence[Graded]) -> dict[str, Any]:
    """Return the figures avg@k, and pass@j for j in 1, 2, 4 ... k, with intervals over problems.

    There are none if each problem has one answer.
    """
    problems = list(correct_by_problem(graded).values())
    k = max(map(len, problems))
    if k == 1:
        return {}
    full = [answers for answers in problems if len(answers) == k]
    result: dict[str, Any] = {
        "k": k,
        "problems": len(full),
        "incomplete": len(problems) - len(full),
    }
    result[f"avg@{k}"] = mean_with_interval([sum(answers) / k for answers in full])
    for j in sorted({1 << power for power in range(k.bit_length())} | {k}):
        result[f"pass@{j}"] = mean_with_interval([pass_at(j, k, sum(answers)) for answers in full])
    return {"samples": result}


def mean_with_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean over problems and its interval.

    If all values are 0 or 1 it is a Wilson interval, because the bootstrap of few or similar values
    is too narrow. Otherwise it is a bootstrap interval.
    """
    mean = sum(values) / len(values)
    by_wilson = set(values) <= {0.0, 1.0}
    interval = wilson(sum(values), len(values)) if by_wilson else bootstrap(values)
    return {
        "value": mean,
        "interval_95": list(interval),
        "interval": "wilson" if by_wilson else "bootstrap",
    }
