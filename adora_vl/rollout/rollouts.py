"""Rollouts and their groups, the requests that samplers get, and the results that come back."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any, Literal, NamedTuple, cast

from PIL import Image

from adora_vl.data.dataloader import ROW_NUMBER_COLUMN
from adora_vl.data.shared_images import ImageWithDigest
from adora_vl.types import Row
from adora_vl.utils.seeding import rollout_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class StepKey:
    """Where in a run a batch of rollouts is sampled.

    Seeds are made of `position` and `name`. A resumed run arrives at the same texts, and so
    draws the same random numbers; they must never change.
    """

    mode: Literal["train", "eval", "try"]
    step: int
    """Optimizer steps that have been made."""
    micro: int
    """Micro-batches of the present optimizer step that come before it."""
    refill_round: int = 0
    """The round of further problems that replace groups without signal, from 1; 0 before them."""

    @property
    def position(self) -> str:
        """The place in the run, such as `12/0`: step and micro-batch."""
        return f"{self.step}/{self.micro}"

    @property
    def name(self) -> str:
        """The name of the batch in its run, such as `train/12/0`; with a refill `train/12/0/1`."""
        suffix = f"/{self.refill_round}" if self.refill_round else ""
        return f"{self.mode}/{self.position}{suffix}"


class FinishReason(StrEnum):
    """Why a rollout, or one turn of it, has ended.

    Predictions and checkpoints contain the values.
    """

    RUNNING = ""
    """It has not ended. In a result: servers do not say why they stopped."""
    STOP = "stop"
    """It ended by itself."""
    LENGTH = "length"
    """It is as long as it may be."""
    CALLS = "calls"
    """Its last turn calls a tool, and no calls are left."""
    CONTEXT = "room"
    """No room is left in the completion or in the engine's context."""

    @property
    def is_unanswered(self) -> bool:
        """Whether the last turn may have called a tool that nobody answers."""
        return self in (FinishReason.CALLS, FinishReason.CONTEXT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive tokens from one source: the policy at one step, or a tool."""

    tokens: tuple[int, ...]
    logps: tuple[float | None, ...] | None
    """Log-probabilities by the weights that sampled the tokens, None for a token whose
    log-probability is not known; None: the tokens are a tool's."""
    step: int
    """Optimizer steps that had been made when it came."""

    @property
    def is_sampled(self) -> bool:
        """Whether the policy has sampled the tokens; otherwise they are a tool's."""
        return self.logps is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture that a tool has returned."""

    digest: str
    """The digest of its content."""
    image: Image.Image
    segment_number: int
    """The number of the segment that shows it; pictures stand in the order of the tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of a tool, for the record."""

    name: str
    arguments: str
    """The arguments as they were written."""
    text: str
    """The reply, as text."""
    seconds: float
    failed: bool
    segment_number: int = -1
    """The number of the segment that answers it; -1 until it has one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """A completion so far, or to its end.

    An unfinished rollout may pause between two segments, or wait for a tool. For example, a rollout
    with the tokens a b of the policy, x y of a tool, and c of the policy has three segments. Its
    `tokens` are a b x y c, its `policy_mask` is 1 1 0 0 1, its `policy_tokens` are a b c, and its
    `last_turn_tokens` are c.
    """

    segments: tuple[Segment, ...] = ()
    finish_reason: FinishReason = FinishReason.RUNNING
    saw_trainer_images: bool = True
    """Whether the engine that sampled it saw the images that the trainer sees."""
    pictures: tuple[Picture, ...] = ()
    calls: tuple[Call, ...] = ()
    environment: Any = field(default=None, compare=False, repr=False)
    """The rollout's own environment, in a run that has environments."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is sampled for it."""
        return self.finish_reason is not FinishReason.RUNNING

    @property
    def tokens(self) -> list[int]:
        """All tokens, those of tools included."""
        return [token for segment in self.segments for token in segment.tokens]

    @property
    def policy_mask(self) -> list[bool]:
        """Which of the tokens the policy has sampled."""
        return [segment.is_sampled for segment in self.segments for _ in segment.tokens]

    @property
    def policy_tokens(self) -> list[int]:
        """The tokens that the policy has sampled."""
        return [
            token for segment in self.segments if segment.is_sampled for token in segment.tokens
        ]

    @property
    def last_turn_tokens(self) -> list[int]:
        """The tokens that the policy has sampled since a tool last answered."""
        tokens: list[int] = []
        for segment in self.segments:
            if segment.is_sampled:
                tokens += segment.tokens
            else:  # a tool's answer, after which a new turn begins
                tokens = []
        return tokens

    @property
    def logps(self) -> list[float | None]:
        """The log-probability of every token; None where the engine was not asked for one."""
        return [
            logp
            for segment in self.segments
            for logp in segment.logps or (None,) * len(segment.tokens)
        ]

    def stale_tokens(self, step: int) -> int:
        """Return how many tokens came before optimizer step `step`, from older weights.

        They are the first tokens of a rollout that was paused; tokens of tools count too. For
        example, segments of 5 tokens of step 3 and 2 tokens of step 4 have 5 stale tokens in step
        4. If the engine saw other images than the trainer, all tokens count, since with its own
        images the policy would have sampled others.
        """
        if not self.saw_trainer_images:
            return len(self.tokens)
        return sum(len(segment.tokens) for segment in self.segments if segment.step != step)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnProblem:
    """A problem that was drawn from the data set, as an identity of its group."""

    row_number: int
    """The number of its row in the data set; -1 where rows are not numbered."""
    key: StepKey
    """The batch for which it was drawn."""
    group_number: int
    """The number of its group there, over all ranks."""


class RolloutKey(NamedTuple):
    """The number of a rollout among the groups of its rank."""

    group: int
    rollout_index: int
    """Its number in the group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """The rollouts of one problem, or those of them that this rank has."""

    problem: DrawnProblem
    row: Row
    """The problem's row; empty in a checkpoint, since the data set has it."""
    start_generation: int
    """The number of the generation in which it began."""
    rollouts: tuple[Rollout, ...]
    first_rollout_index: int = 0
    """How many rollouts of the group lower ranks have, where ranks share a group."""

    @property
    def complete(self) -> bool:
        """Whether all rollouts have ended."""
        return all(rollout.has_ended for rollout in self.rollouts)

    def seed(self, run_seed: int, rollout_index: int, rollout: Rollout) -> int:
        """Return the seed with which the next tokens of a rollout of this group are sampled.

        Each segment of a rollout has a seed of its own. Otherwise the random numbers of an earlier
        segment would be drawn again.

        Args:
            run_seed: the seed of the run.
            rollout_index: the index of the rollout in `rollouts`.
            rollout: the rollout so far.
        """
        problem = self.problem
        sampled_count = sum(segment.is_sampled for segment in rollout.segments)
        # The text that names the draw, such as `train/12/0`, or `train/12/0/segment-1`.
        draw_name = problem.key.name
        if sampled_count:
            draw_name = f"{draw_name}/segment-{sampled_count}"
        return rollout_seed(
            run_seed,
            draw_name=draw_name,
            group=problem.group_number,
            rollout_index=self.first_rollout_index + rollout_index,
        )

    def tool_seed(self, run_seed: int, rollout_index: int) -> str:
        """Return the text that seeds the random numbers of a rollout's tools.

        For example, `42/train/12/0/3/1` is the seed of the run, the batch for which the problem was
        drawn, the number of its group there, and the number of the rollout in the group.

        Args:
            run_seed: the seed of the run.
            rollout_index: the index of the rollout in `rollouts`.
        """
        problem = self.problem
        number_over_ranks = self.first_rollout_index + rollout_index
        return f"{run_seed}/{problem.key.name}/{problem.group_number}/{number_over_ranks}"


def row_for_rewards(row: Row, rollout: Rollout) -> Row:
    """Return the row of the data as reward functions get it.

    In a run with environments it has the rollout's environment too, under TRL's name.
    """
    if rollout.environment is None:
        return row
    return cast("Row", {**row, "environments": rollout.environment})


def new_groups_of_rows(
    rows: Sequence[Any],
    key: StepKey,
    *,
    start_generation: int,
    first_row_number: int,
    group_size: int,
) -> list[RolloutGroup]:
    """Return groups of empty rollouts for the rows that a rank has drawn.

    Groups are numbered over all ranks. A group may be divided between ranks; each of them then has
    a part of it. For example, with groups of 4 and 6 rows per rank, rank 1 has the rows 6 to 11:
    the last two rollouts of group 1, with `first_rollout_index` 2, and all four of group 2.

    Args:
        rows: a row for each rollout; those of the same problem are neighbours.
        key: the batch for which the rows were drawn.
        start_generation: the number of the generation in which the groups begin.
        first_row_number: the number of the first row, counted over all ranks.
        group_size: the number of rollouts of a problem.
    """
    rows_by_group: dict[int, list[Any]] = {}
    for number, row in enumerate(rows, first_row_number):
        rows_by_group.setdefault(number // group_size, []).append(row)
    groups: list[RolloutGroup] = []
    for group_number, rows_of_group in rows_by_group.items():
        columns = dict(rows_of_group[0])
        row_number = columns.pop(ROW_NUMBER_COLUMN, -1)
        problem = DrawnProblem(row_number=row_number, key=key, group_number=group_number)
        groups.append(
            RolloutGroup(
                problem=problem,
                row=cast("Row", columns),
                start_generation=start_generation,
                rollouts=(Rollout(),) * len(rows_of_group),
                # Above 0 only in a group whose first rows an earlier rank has drawn.
                first_rollout_index=max(first_row_number - group_number * group_size, 0),
            )
        )
    return groups


def unfinished_rollouts(
    groups: Sequence[RolloutGroup], group_indices: Iterable[int]
) -> dict[RolloutKey, Rollout]:
    """Return the rollouts that have not ended, by the number of their group and their own in it.

    Rollouts that were paused come first, since they are expected to take longest. For example, of
    group 0 with the rollouts new, ended, paused, the result has (0, 2) and then (0, 0).

    Args:
        groups: groups of this rank.
        group_indices: the indices of the groups that are searched.
    """
    paused: dict[RolloutKey, Rollout] = {}
    new: dict[RolloutKey, Rollout] = {}
    for group_index in group_indices:
        for rollout_index, rollout in enumerate(groups[group_index].rollouts):
            if rollout.has_ended:
                continue
            key = RolloutKey(group=group_index, rollout_index=rollout_index)
            if rollout.segments:
                paused[key] = rollout
            else:
                new[key] = rollout
    return paused | new


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRequest:
    """One rollout that is to begin or to continue."""

    prompt_ids: list[int]
    """The prompt with its image tokens expanded, and the tokens that the rollout has already."""
    images: list[Any]
    """The images that the engine is to see."""
    merge_key: Hashable
    """Neighbours with equal keys and prompts may become one request for several rollouts, whose
    seeds count up (`merge_requests`). The rollouts of a group have one key."""
    seed: int | None = None
    """None: the engine draws one."""
    max_tokens: int | None = None
    """Tokens that are sampled at most; None: the run's limit."""
    max_length: int | None = None
    """Tokens of the whole completion, with those of tools; None where only one turn is sampled."""

    def sampling_parameters(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return vLLM's sampling parameters for this request.

        `settings`: those of the run, of which the request's seed and number of tokens replace some.
        """
        parameters = dict(settings)
        if self.seed is not None:
            parameters["seed"] = self.seed
        if self.max_tokens is not None:
            parameters["max_tokens"] = self.max_tokens
            # vLLM refuses a `min_tokens` above `max_tokens`, such as in the short answers by which
            # engine and policy are compared before the first step.
            if "min_tokens" in parameters:
                parameters["min_tokens"] = min(parameters["min_tokens"], self.max_tokens)
        return parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingResult:
    """The tokens that were sampled for a request."""

    tokens: list[int]
    logps: list[float | None]
    """The log-probability of each token, by the weights that sampled it; None where the engine was
    not asked for any."""
    finish_reason: FinishReason = FinishReason.RUNNING
    """`RUNNING`: servers do not say why they stopped."""
    prompt_ids_read: list[int] = field(default_factory=list)
    """The prompt as the engine has read it."""


def logp_or_minus_infinity(value: float | None) -> float:
    """Return a log-probability that an engine has returned, or minus infinity if it is not finite.

    Weights that overflow give NaN, which TRL's client reads as None. Elsewhere in this package None
    and NaN mean that the engine was not asked, and such a token is not compared. Minus infinity
    makes it count as a disagreement.
    """
    return -math.inf if value is None or not math.isfinite(value) else value


def merge_requests(requests: Sequence[SamplingRequest]) -> list[list[SamplingRequest]]:
    """Divide requests into lists of neighbours that an engine may get as one request.

    The requests of a list have the same merge key, prompt, images and limit of tokens, and differ
    only in their seeds. For example, requests with the keys a a b a become [a a], [b], [a].
    """
    equal_neighbours = groupby(
        requests,
        key=lambda request: (
            request.merge_key,
            request.max_tokens,
            request.prompt_ids,
            [_image_identity(image) for image in request.images],
        ),
    )
    return [list(merged) for _, merged in equal_neighbours]


def _image_identity(image: object) -> object:
    """Return a value that is equal for images which an engine need not read twice."""
    return image.digest if isinstance(image, ImageWithDigest) else id(image)
