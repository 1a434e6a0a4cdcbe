"""The presets: reward functions with TRL's signature, by name.

A completion is graded once, however many presets a run has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from adora_vl.rewards.completion import (
    has_equation_before_box,
    response_texts,
    think_answer_format_reward,
    think_format_reward,
)
from adora_vl.rewards.grade import VERDICTS, Grade, grade_batch, verify_gold
from adora_vl.rewards.knights import knights_logic_rl_reward, knights_reward
from adora_vl.rewards.thinking import text_after_thinking
from adora_vl.utils.cli import quantile
from adora_vl.utils.errors import UserError

RewardFunction = Callable[..., list[float]]


class _Reference(NamedTuple):
    """What a completion is graded against: the reference answer and the values of A, B, C, ..."""

    answer: str
    choices: tuple[str, ...] | None


# Rewards for (a correct answer, a complete box that is not correct, no complete box).
#   boxed_accuracy: the rewards of the paper; source: the grading policy, point 7.
#   easyr1: 0.9 x accuracy + 0.1 x format, the weights of EasyR1's examples/reward_function/math.py.
#     There the format is a <think> block and a box. Here it is a complete box, since our prompt
#     asks for no block, so the preset equals `boxed_accuracy`.
#   accuracy: the verdict alone.
#   format: a complete box alone, to be weighed against another reward.
PRESETS: Mapping[str, tuple[float, float, float]] = {
    "boxed_accuracy": (1.0, 0.1, 0.0),
    "easyr1": (0.9 + 0.1, 0.1, 0.0),
    "accuracy": (1.0, 0.0, 0.0),
    "format": (1.0, 1.0, 0.0),
}
# Rewards that are not about one mathematical answer.
REWARD_FUNCTION_BY_NAME: Mapping[str, RewardFunction] = {
    "knights": knights_reward,
    "knights_logic_rl": knights_logic_rl_reward,
    "think_format": think_format_reward,
    "think_answer_format": think_answer_format_reward,
}


@dataclass(frozen=True)
class PresetOptions:
    """The options of a preset.

    `rounding`: also accept a decimal that is the reference answer rounded, as `grade` does.
    """

    rounding: bool = False


@dataclass(frozen=True)
class NoOptions:
    """The options of a reward that has none."""


def reward_for_grade(grade: Grade, preset: str) -> float:
    """Return the reward that a preset gives for a grade."""
    correct, boxed, unboxed = PRESETS[preset]
    if grade.verdict == "correct":
        return correct
    return unboxed if grade.extracted is None else boxed


class LastBatchGrades:
    """Grades a batch of completions and keeps the grades of the last batch.

    The functions of several presets are called with the same batch one after another, and only the
    first call grades it.
    """

    def __init__(self, rounding: bool, answer_tags: bool) -> None:
        self._accepted = {"rounding": rounding, "answer_tags": answer_tags}
        # The batch of the last call, and its grades.
        self._texts: list[str] = []
        self._references: list[_Reference] = []
        self._grades: list[Grade] = []

    def __call__(self, texts: list[str], references: list[_Reference]) -> list[Grade]:
        """Return the grades of a batch, which are kept for the next preset that asks for it."""
        if texts != self._texts or references != self._references:
            self._grades = grade_batch(
                texts,
                golds=[reference.answer for reference in references],
                choices=[reference.choices for reference in references],
                **self._accepted,
            )
            self._texts = texts
            self._references = references
        return self._grades


def preset_function(preset: str, grader: LastBatchGrades, *, logs: bool) -> RewardFunction:
    """Return the reward function of one preset, with TRL's signature and named `<preset>_reward`.

    It reads the columns `answer` (the canonical reference answer) and, if it exists, `choices` (a
    list of strings or None), and returns one float per completion. It raises `UserError` for a
    missing or unusable reference answer, since a reward of zero for every answer to a problem would
    never be noticed.

    Args:
        preset: a name in `PRESETS`.
        grader: grades the completions; presets that share it grade each completion once.
        logs: whether the function adds `verdict`, `extracted` and `reason` to TRL's completions
            table, and logs `_batch_metrics` as `grading/<name>`.
    """

    def function(
        completions: Sequence[Any] = (),
        *,
        answer: Sequence[str] | None = None,
        choices: Sequence[Sequence[str] | None] | None = None,
        thinking_opened: Sequence[bool] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Grade the completions by their reference answers, and return the preset's rewards.

        The arguments are those that TRL passes, and the columns of the data set. `thinking_opened`
        says whether each prompt ends in `<think>`.
        """
        references = _build_references(answer, choices, len(completions))
        texts = response_texts(completions, thinking_opened)
        answers = [text_after_thinking(text) for text in texts]
        grades = grader(answers, references)
        if logs and log_extra:
            log_extra("verdict", [grade.verdict for grade in grades])
            log_extra("extracted", [grade.extracted for grade in grades])
            log_extra("reason", [grade.reason for grade in grades])
        if logs and log_metric and grades:
            for name, value in _batch_metrics(grades, texts).items():
                log_metric(f"grading/{name}", value)
        return [reward_for_grade(grade, preset) for grade in grades]

    function.__name__ = function.__qualname__ = f"{preset}_reward"
    return function


def _batch_metrics(grades: Sequence[Grade], texts: Sequence[str]) -> dict[str, float]:
    """Return the metrics of a batch by name.

    - each verdict: the share of responses that have it
    - `ms_median`, `ms_p99`: milliseconds that the grading of a response takes
    - `worked`: the share of responses that show more than a bare answer: an equation before it
    """
    verdicts = [grade.verdict for grade in grades]
    times_ms = [grade.ms for grade in grades]
    return {
        **{verdict: verdicts.count(verdict) / len(grades) for verdict in VERDICTS},
        "ms_median": quantile(times_ms, 0.5),
        "ms_p99": quantile(times_ms, 0.99),
        "worked": fmean(has_equation_before_box(text) for text in texts),
    }


def describe_reference_fault(answer: object, choices: Sequence[str] | None) -> str | None:
    """Return why no answer can be graded against a reference answer; None where one can.

    Args:
        answer: the value of the column `answer` in a row.
        choices: the values of A, B, C and so on; None for an open question.
    """
    return verify_gold(answer, choices) if isinstance(answer, str) else "not_a_string: write a text"


def _build_references(
    answer: Sequence[str] | None, choices: Sequence[Any] | None, count: int
) -> list[_Reference]:
    """Return what each completion is graded against, from the columns `answer` and `choices`.

    `count` is the number of completions. Raises `UserError` for a reference answer that is missing
    or unusable, since it would make every rollout of its problem wrong.
    """
    if answer is None:
        raise UserError(
            "the dataset has no column 'answer': the reward needs the reference answer of every row"
        )
    if len(answer) != count or (choices is not None and len(choices) != count):
        raise UserError(
            f"'answer' and 'choices' need one value for each of the {count} completions"
        )
    references: list[_Reference] = []
    # The rollouts of a prompt share one reference answer, which is verified once.
    usable_references: set[_Reference] = set()
    for row, row_answer in enumerate(answer):
        row_choices = choices[row] if choices is not None else None
        if row_choices is not None:
            row_choices = tuple(row_choices)
        reference = _Reference(answer=str(row_answer), choices=row_choices)
        if reference not in usable_references:
            fault = describe_reference_fault(row_answer, reference.choices)
            if fault is not None:
                raise UserError(
                    f"answer {row_answer!r} cannot be graded against ({fault}): prepare the data "
                    "with data_prep"
                )
            usable_references.add(reference)
        references.append(reference)
    return references
