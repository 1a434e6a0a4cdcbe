"""The reward for true steps: what a response claims of its figure, checked on the figure.

A row's column `figure` has a solved figure (docs/geometry.md). A claim counts where it is true and
says something new (`adora_vl.geometry.check`), and a false one counts against it three times. The
reward depends on the response and the row alone: it keeps nothing from call to call that changes a
score, so a resumed run needs nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from adora_vl.rewards.completion import Completion, completion_text
from adora_vl.rewards.grade import grade
from adora_vl.rewards.thinking import final_part
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from adora_vl.geometry.checked import Checked

NAME = "steps"
COLUMN = "figure"
RANGE = (0.0, 1.0)
OPTIONS = ("gate",)
_PRICE = 3  # of one false claim, in new ones
_BOX = "\\boxed"
_MAX_CHARS = 100_000  # of a response that are read
_RIGHT = "correct"


@dataclass(frozen=True)
class ResponseWork:
    """The claims of one response, with their verdicts, and how many of them count.

    `new`: true claims that say something new and are not the answer itself. `false`: errors, each
    once. `unread`: claims that the grammar does not understand; these cost nothing. `room`: how
    many new claims its figure has at most.
    """

    claims: tuple[Checked, ...]
    room: int

    @property
    def new(self) -> int:
        """The number of steps."""
        return sum(claim.is_step for claim in self.claims)

    @property
    def false(self) -> int:
        """The number of errors; what follows from an error is none of its own."""
        return sum(claim.verdict == "false" for claim in self.claims)

    @property
    def unread(self) -> int:
        """The number of claims that are not understood."""
        return sum(claim.verdict == "unread" for claim in self.claims)

    @property
    def share(self) -> float:
        """The reward from 0 to 1: how much of what counts is true; 0 where nothing is new.

        It is a share, so that length earns nothing: one new truth without an error is 1, as ten
        are.
        """
        if not self.new:
            return 0.0
        return self.new / (self.new + _PRICE * self.false)

    @property
    def measure(self) -> int:
        """The work that the criterion `working` compares: new claims less false ones, at least 0."""
        return max(0, self.new - self.false)

    @property
    def is_luck(self) -> bool:
        """Whether a right answer of this response is luck: it errs, or nothing leads there."""
        return self.false > 0 or self.new == 0

    def spans(self) -> str:
        """The claims as JSON, for the record: start, end and verdict of each."""
        return json.dumps(
            [
                [checked.claim.start, checked.claim.end, _shown_verdict(checked)]
                for checked in self.claims
            ]
        )


def _shown_verdict(checked: Checked) -> str:
    """The verdict for the record: the answer itself is no step."""
    return "answer" if checked.verdict == "new" and checked.is_answer else checked.verdict


def work_of(response: str, figure: str) -> ResponseWork:
    """The claims of a response on the figure of its row, up to the end of its last box.

    Raises `UserError` for a figure that cannot be used.
    """
    # It needs numpy, which a run without this reward need not load.
    from adora_vl.geometry.check import figure_at

    try:
        checked_figure = figure_at(figure)
    except ValueError as error:
        raise UserError(
            f"column 'figure': {figure!r:.60} is no solved figure ({error}); make the rows anew "
            "with `python -m data_prep geometry3k --source facts`, or leave it null"
        ) from error
    claims = tuple(checked_figure.claims(worked_part(response)))
    return ResponseWork(claims=claims, room=checked_figure.room)


def measured_work(response: str, figure: str | None) -> ResponseWork | None:
    """The claims of a response where its work can be measured; None where it cannot.

    It cannot without a figure, nor on a figure that the given values settle by themselves: nothing
    new can be said of that one, and every right answer would count as luck.
    """
    if not figure:
        return None
    work = work_of(response, figure)
    return work if work.room else None


def worked_part(response: str) -> str:
    """What stands before the end of the last box; everything where there is no box.

    What is claimed behind the answer has not led to it.
    """
    text = response[:_MAX_CHARS]
    box = text.rfind(_BOX)
    if box < 0:
        return text
    opening = text.find("{", box)
    if opening < 0:
        return text
    depth = 0
    for position in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[: position + 1]
    return text


class StepsReward:
    """The reward function `steps` in TRL's form.

    With `gate` it is accuracy times a half to one, and the half goes by the share: a wrong answer
    earns nothing then, whatever its steps are.
    """

    def __init__(
        self, options: Mapping[str, object], *, rounding: bool = False, answer_tags: bool = False
    ) -> None:
        """Take in the options of the key. Raises `UserError` for one that it does not have."""
        for option, value in options.items():
            if option not in OPTIONS:
                raise UserError(
                    f"adora_reward.{NAME}: unknown option {option!r}, it has {', '.join(OPTIONS)}"
                )
            if not isinstance(value, bool):
                raise UserError(f"adora_reward.{NAME}.{option}: {value!r:.60} is not true or false")
        self.gate = bool(options.get("gate", False))
        self.accepted = {"rounding": rounding, "answer_tags": answer_tags}
        self.__name__ = f"{NAME}_reward"

    def __call__(
        self,
        completions: Sequence[Completion] = (),
        *,
        figure: Sequence[str | None] | None = None,
        answer: Sequence[str] | None = None,
        choices: Sequence[Sequence[str] | None] | None = None,
        log_extra: Callable[[str, list[object]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: object,
    ) -> list[float | None]:
        """One reward per completion; None where its row has no figure that leaves room for work.

        It adds the columns `new`, `false` and `steps` to the record, and logs the shares
        `steps/figures`, `steps/new`, `steps/false`, `steps/unread` and `steps/lucky`, and
        milliseconds per completion, `steps/ms`. Raises `UserError` where the column `figure` is
        missing, or with `gate` the column `answer`.
        """
        if figure is None:
            raise UserError(missing_column())
        if self.gate and answer is None:
            raise UserError(
                f"adora_reward.{NAME}.gate: the data set has no column 'answer'; leave out gate"
            )
        texts = [completion_text(completion) for completion in completions]
        begin = perf_counter()
        works = [measured_work(text, drawn) for text, drawn in zip(texts, figure, strict=True)]
        elapsed_ms = 1000 * (perf_counter() - begin)
        rights = self._rights(texts, works, answer, choices)
        if log_extra:
            log_extra("new", [work.new if work else None for work in works])
            log_extra("false", [work.false if work else None for work in works])
            log_extra("steps", [work.spans() if work else None for work in works])
        if log_metric and works:
            for name, value in _figures(works, rights).items():
                log_metric(f"{NAME}/{name}", value)
            log_metric(f"{NAME}/ms", elapsed_ms / len(works))
        return [self._score(work, right) for work, right in zip(works, rights, strict=True)]

    def _rights(
        self,
        texts: Sequence[str],
        works: Sequence[ResponseWork | None],
        answer: Sequence[str] | None,
        choices: Sequence[Sequence[str] | None] | None,
    ) -> list[bool | None]:
        """Whether each answer is right; None where there is no figure or no reference answer."""
        if answer is None:
            return [None] * len(texts)
        options = choices or [None] * len(texts)
        rights: list[bool | None] = []
        for text, work, gold, given_choices in zip(texts, works, answer, options, strict=True):
            if work is None:
                rights.append(None)
                continue
            result = grade(final_part(text), gold, choices=given_choices, **self.accepted)
            rights.append(result.verdict == _RIGHT)
        return rights

    def _score(self, work: ResponseWork | None, is_right: bool | None) -> float | None:
        if work is None:
            return None
        if not self.gate:
            return work.share
        return 0.5 + 0.5 * work.share if is_right else 0.0


def _figures(
    works: Sequence[ResponseWork | None], rights: Sequence[bool | None]
) -> dict[str, float]:
    """What a batch logs: shares of its rollouts with a figure, of claims, and of right rollouts."""
    figured = [work for work in works if work is not None]
    figures = {"figures": len(figured) / len(works)}
    if not figured:
        return figures
    figures["new"] = sum(work.new > 0 for work in figured) / len(figured)
    figures["false"] = sum(work.false > 0 for work in figured) / len(figured)
    claims = sum(len(work.claims) for work in figured)
    if claims:
        figures["unread"] = sum(work.unread for work in figured) / claims
    lucky = [
        work.is_luck for work, is_right in zip(works, rights, strict=True) if work and is_right
    ]
    if lucky:
        figures["lucky"] = sum(lucky) / len(lucky)
    return figures


def missing_column() -> str:
    """The message for a data set without figures."""
    return (
        f"adora_reward: '{NAME}' needs the column '{COLUMN}', a solved figure for each row; "
        "`python -m data_prep geometry3k --source facts` makes such rows"
    )
