"""The reward for true steps: what a response claims of its figure, checked on the figure.

A row's column `figure` has a solved figure (docs/geometry.md). A claim counts where it is true and
says something new (`adora_vl.geometry.check`), and a false one counts against it three times. The
reward depends on the response and the row alone: it keeps nothing from call to call that changes a
score, so a resumed run needs nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING

from adora_vl.rewards.completion import Completion, completion_text, response_texts
from adora_vl.rewards.grade import grade
from adora_vl.rewards.thinking import BOX_TOKENS, text_after_thinking
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from adora_vl.geometry.checked import CheckedClaim

STEPS = "steps"
FIGURE_COLUMN = "figure"
REWARD_RANGE = (0.0, 1.0)
_PRICE_OF_FALSE_CLAIM = 3  # how many new claims a false one weighs as much as
_BOX_COMMAND = "\\boxed"
_MAX_CHARS = 100_000  # how many characters of a response are read, from its start


@dataclass(frozen=True)
class ClaimCheck:
    """The result of a check of one response: its claims about its figure, each with its verdict.

    A new claim is true, says something that the problem does not say, and is not the answer itself.
    """

    claims: tuple[CheckedClaim, ...]
    max_new_claims: int
    """How many new claims the figure allows at most."""

    @property
    def new_count(self) -> int:
        """The number of new claims."""
        return sum(claim.is_step for claim in self.claims)

    @property
    def false_count(self) -> int:
        """The number of false claims.

        A claim that is false because of an earlier one has the verdict `follows` instead.
        """
        return sum(claim.verdict == "false" for claim in self.claims)

    @property
    def unread_count(self) -> int:
        """The number of claims that are not understood, which cost nothing."""
        return sum(claim.verdict == "unread" for claim in self.claims)

    @property
    def reward(self) -> float:
        """The reward of the claims, from 0 to 1; 0 where nothing is new.

        It is the share of new claims among new and false ones, where a false one counts three times
        (`_PRICE_OF_FALSE_CLAIM`): 3 new claims and 1 false one give 3 / (3 + 3 * 1) = 0.5. A share
        does not reward length: one new claim without an error earns 1, and so do ten.
        """
        if self.new_count == 0:
            return 0.0
        return self.new_count / (self.new_count + _PRICE_OF_FALSE_CLAIM * self.false_count)

    @property
    def is_right_by_luck(self) -> bool:
        """Whether a right answer of this response is luck: a claim is false, or none is new."""
        return self.false_count > 0 or self.new_count == 0

    def verdicts_as_json(self) -> str:
        """Return the claims as a JSON list, for the record: start, end and verdict of each.

        Start and end are positions in the response: `[[0, 6, "new"], [8, 14, "false"]]`.
        """
        records = []
        for checked_claim in self.claims:
            claim = checked_claim.claim
            records.append([claim.start, claim.end, _recorded_verdict(checked_claim)])
        return json.dumps(records)


def _recorded_verdict(claim: CheckedClaim) -> str:
    """Return the verdict on a claim for the record: `answer` for a new claim that is the answer."""
    return "answer" if claim.verdict == "new" and claim.is_answer else claim.verdict


def check_claims(response: str, figure: str) -> ClaimCheck:
    """Check what a response claims about its figure, up to the end of its last box.

    `figure` is the solved figure of the row, as JSON. Raises `UserError` for a figure that cannot
    be used.
    """
    # It needs numpy, which a run without this reward need not load.
    from adora_vl.geometry.check import checked_figure_of

    try:
        checked_figure = checked_figure_of(figure)
    except ValueError as error:
        raise UserError(
            f"column 'figure': {figure!r:.60} is no solved figure ({error}); make the rows anew "
            "with `python -m data_prep geometry3k --source facts`, or leave it null"
        ) from error
    claims = tuple(checked_figure.claims(text_up_to_answer(response)))
    return ClaimCheck(claims=claims, max_new_claims=checked_figure.max_new_claims)


def check_claims_if_possible(response: str, figure: str | None) -> ClaimCheck | None:
    """Check a response's claims like `check_claims`, but return None if new ones are impossible.

    They are impossible where the row has no figure, and where the given values already say
    everything about the figure. Then no claim could be new, so that every right answer would count
    as luck.
    """
    if not figure:
        return None
    check = check_claims(response, figure)
    return check if check.max_new_claims > 0 else None


def text_up_to_answer(response: str) -> str:
    r"""Return a response up to the end of its last `\boxed{}`, or all of it without a box.

    A claim behind the answer has not led to it, so it does not count:
    `AB = 5, so \boxed{5} as AC = 3` is cut behind `\boxed{5}`.
    """
    text = response[:_MAX_CHARS]
    box = text.rfind(_BOX_COMMAND)
    # A closing token alone ends no box: `\boxed{5} as AC = 3 <|end_of_box|>` ends behind `}`.
    glm_box = text.rfind(BOX_TOKENS[0])
    end_of_glm_box = text.find(BOX_TOKENS[1], glm_box)
    glm_box_is_last = glm_box > box
    if glm_box_is_last and end_of_glm_box >= 0:
        return text[: end_of_glm_box + len(BOX_TOKENS[1])]
    if box < 0:
        return text
    opening = text.find("{", box)
    if opening < 0:
        return text
    depth = 0
    for position in range(opening, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
        if depth == 0:
            return text[: position + 1]
    return text  # the box does not end


@dataclass(frozen=True)
class StepsOptions:
    """The options of the entry `steps` in `adora_reward`: those of `StepsReward`."""

    gate: bool = False


class StepsReward:
    """The reward function `steps` with TRL's signature.

    Without options the reward is `ClaimCheck.reward`. With `gate` a wrong answer earns 0, and a
    right one 0.5 + 0.5 * `ClaimCheck.reward`.
    """

    def __init__(
        self, *, gate: bool = False, rounding: bool = False, answer_tags: bool = False
    ) -> None:
        """Create the reward function.

        Args:
            gate: whether a wrong answer earns nothing.
            rounding: what counts as a right answer, as in `grade`.
            answer_tags: as in `grade`.
        """
        self.gate = gate
        self.accepted = {"rounding": rounding, "answer_tags": answer_tags}
        self.__name__ = f"{STEPS}_reward"  # TRL logs the reward under it

    def __call__(
        self,
        completions: Sequence[Completion] = (),
        *,
        figure: Sequence[str | None] | None = None,
        answer: Sequence[str] | None = None,
        choices: Sequence[Sequence[str] | None] | None = None,
        thinking_opened: Sequence[bool] | None = None,
        log_extra: Callable[[str, list[object]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: object,
    ) -> list[float | None]:
        """Return one reward per completion; None where its row has no figure with possible claims.

        The arguments are those that TRL passes, and the columns of the data set. `thinking_opened`
        says whether each prompt ends in `<think>`.

        It adds the columns `new`, `false` and `steps` to the record, the counts and verdicts of
        `ClaimCheck`. It logs `steps/ms`, milliseconds per completion, and the shares of
        `_batch_metrics`: `steps/figures`, `steps/new`, `steps/false`, `steps/unread` and
        `steps/lucky`. Raises `UserError` where the column `figure` is missing, or with `gate` the
        column `answer`.
        """
        if figure is None:
            raise UserError(missing_figure_message())
        if self.gate and answer is None:
            raise UserError(
                f"adora_reward.{STEPS}.gate: the data set has no column 'answer'; leave out gate"
            )
        texts = [completion_text(completion) for completion in completions]
        start_time = perf_counter()
        claim_checks = [
            check_claims_if_possible(text, row_figure)
            for text, row_figure in zip(texts, figure, strict=True)
        ]
        elapsed_ms = 1000 * (perf_counter() - start_time)
        responses = response_texts(completions, thinking_opened)
        are_right = self._grade_answers(
            responses, claim_checks=claim_checks, answer=answer, choices=choices
        )
        if log_extra:
            log_extra("new", [check.new_count if check else None for check in claim_checks])
            log_extra("false", [check.false_count if check else None for check in claim_checks])
            log_extra(
                "steps", [check.verdicts_as_json() if check else None for check in claim_checks]
            )
        if log_metric and claim_checks:
            for name, value in _batch_metrics(claim_checks, are_right).items():
                log_metric(f"{STEPS}/{name}", value)
            log_metric(f"{STEPS}/ms", elapsed_ms / len(claim_checks))
        return [
            self._score(check, is_right)
            for check, is_right in zip(claim_checks, are_right, strict=True)
        ]

    def _grade_answers(
        self,
        responses: Sequence[str],
        claim_checks: Sequence[ClaimCheck | None],
        answer: Sequence[str] | None,
        choices: Sequence[Sequence[str] | None] | None,
    ) -> list[bool | None]:
        """Return whether each answer is right; None without a figure or a reference answer.

        Args:
            responses: the completions as text.
            claim_checks: the check of each one's claims; None where its row has no figure.
            answer: the column of reference answers; None if the data set has none.
            choices: the column with the values of A, B, C, ...; None if the data set has none.
        """
        if answer is None:
            return [None] * len(responses)
        choices_of_rows = choices or [None] * len(responses)
        are_right: list[bool | None] = []
        for response, check, reference, row_choices in zip(
            responses, claim_checks, answer, choices_of_rows, strict=True
        ):
            if check is None:
                are_right.append(None)
                continue
            result = grade(
                text_after_thinking(response), reference, choices=row_choices, **self.accepted
            )
            are_right.append(result.verdict == "correct")
        return are_right

    def _score(self, check: ClaimCheck | None, is_right: bool | None) -> float | None:
        """Return the reward of one completion, None where its claims cannot be measured."""
        if check is None:
            return None
        if not self.gate:
            return check.reward
        return 0.5 + 0.5 * check.reward if is_right else 0.0


def _batch_metrics(
    claim_checks: Sequence[ClaimCheck | None], are_right: Sequence[bool | None]
) -> dict[str, float]:
    """Return the metrics of a batch by name.

    - `figures`: the share of rollouts whose claims could be measured
    - `new`, `false`: the share of those with a new claim, with a false claim
    - `unread`: the share of claims that are not understood
    - `lucky`: the share of right answers that are luck, as a claim is false or none is new

    A share of nothing is left out.
    """
    possible_checks = [check for check in claim_checks if check is not None]
    metrics = {"figures": len(possible_checks) / len(claim_checks)}
    if not possible_checks:
        return metrics
    metrics["new"] = fmean(check.new_count > 0 for check in possible_checks)
    metrics["false"] = fmean(check.false_count > 0 for check in possible_checks)
    claim_count = sum(len(check.claims) for check in possible_checks)
    if claim_count > 0:
        metrics["unread"] = sum(check.unread_count for check in possible_checks) / claim_count
    luck_of_right_answers = []
    for check, is_right in zip(claim_checks, are_right, strict=True):
        if check is not None and is_right:
            luck_of_right_answers.append(check.is_right_by_luck)
    if luck_of_right_answers:
        metrics["lucky"] = fmean(luck_of_right_answers)
    return metrics


def missing_figure_message() -> str:
    """Return the message for a data set without the column of figures."""
    return (
        f"adora_reward: '{STEPS}' needs the column '{FIGURE_COLUMN}', a solved figure for each row; "
        "`python -m data_prep synthetic --figures` and `geometry3k --source facts` make such rows"
    )
