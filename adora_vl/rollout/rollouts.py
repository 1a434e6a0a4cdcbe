"""Rollouts and their groups, the requests that samplers get, and the results that come back."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, cast

from PIL import Image

from adora_vl.data.dataloader import ROW_NUMBER
from adora_vl.data.images import KeptImage
from adora_vl.types import Row
from adora_vl.utils.seeding import rollout_seed


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens from one source: the policy at one step, or a tool."""

    tokens: tuple[int, ...]
    # by the weights that sampled the tokens; None: the tokens are not the policy's, as a tool's
    logps: tuple[float | None, ...] | None
    step: int  # optimizer steps that had been made when it came


@dataclass(frozen=True)
class Picture:
    """A picture that a tool has returned."""

    digest: str  # of its content
    image: Image.Image
    span: int  # number of the segment that shows it; pictures stand in the order of the tokens


@dataclass(frozen=True)
class Call:
    """A call of a tool, for the record."""

    name: str
    arguments: str  # as they were written
    text: str  # what came back, as text
    seconds: float
    failed: bool
    span: int = -1  # number of the segment that answers it; -1 until it has one


@dataclass(frozen=True)
class Rollout:
    """A completion so far, or to its end.

    An unfinished one may pause between two segments, or wait for a tool.
    """

    segments: tuple[Segment, ...] = ()
    # "": in progress; "stop": it ended by itself; "length": at the run's limit; "calls": with a call
    # that nobody answers, since none are left; "room": no room is left in the completion or in the
    # engine's context
    ended: Literal["", "stop", "length", "calls", "room"] = ""
    compared: bool = True  # whether it was sampled on the trainer's images
    pictures: tuple[Picture, ...] = ()
    calls: tuple[Call, ...] = ()
    # the rollout's own, in a run that has environments
    environment: Any = field(default=None, compare=False, repr=False)

    @property
    def tokens(self) -> list[int]:
        """All tokens, those of tools included."""
        return [token for segment in self.segments for token in segment.tokens]

    @property
    def policy_mask(self) -> list[bool]:
        """Which of the tokens the policy has sampled."""
        return [segment.logps is not None for segment in self.segments for _ in segment.tokens]

    @property
    def policy_tokens(self) -> list[int]:
        """The tokens that the policy has sampled."""
        return [
            token
            for segment in self.segments
            if segment.logps is not None
            for token in segment.tokens
        ]

    @property
    def last_turn_tokens(self) -> list[int]:
        """The tokens that the policy has sampled since a tool last answered."""
        first = max(
            (number + 1 for number, segment in enumerate(self.segments) if segment.logps is None),
            default=0,
        )
        return [token for segment in self.segments[first:] for token in segment.tokens]

    @property
    def logps(self) -> list[float | None]:
        """The log-probability of every token; None where the engine was not asked for one."""
        return [
            logp
            for segment in self.segments
            for logp in segment.logps or (None,) * len(segment.tokens)
        ]

    def stale_tokens(self, step: int) -> int:
        """Return how many tokens at the beginning cannot be compared with the policy of `step`.

        Those are the tokens of earlier steps, or all tokens of a rollout that saw other images.
        """
        if not self.compared:
            return len(self.tokens)
        return sum(len(segment.tokens) for segment in self.segments if segment.step != step)


@dataclass(frozen=True)
class DrawnProblem:
    """A problem that a data loader has drawn."""

    number: int  # of its row in the data set; -1 where rows are not numbered
    where: str  # the name of the generation in which it was drawn
    place: int  # its number there, over all ranks

    @property
    def step(self) -> int:
        """Optimizer steps that had been made when it was drawn."""
        return int(self.where.split("/")[1])


@dataclass(frozen=True)
class RolloutGroup:
    """A problem that has begun, and its rollouts."""

    problem: DrawnProblem
    row: Row  # empty in a checkpoint, since the data set has it
    began: int  # the generation in which it began
    rollouts: tuple[Rollout, ...]
    first_member: int = 0  # number of the first rollout, where each rank has a part of the group

    @property
    def complete(self) -> bool:
        """Whether all rollouts have ended."""
        return all(rollout.ended for rollout in self.rollouts)

    def seed(self, run_seed: int, member: int, rollout: Rollout) -> int:
        """Return the seed of the next segment of the rollout with the number `member`.

        It differs from the seeds of earlier segments, whose random numbers would be drawn again.
        """
        problem = self.problem
        number = sum(segment.logps is not None for segment in rollout.segments)
        where = f"{problem.where}/segment-{number}" if number else problem.where
        return rollout_seed(
            run_seed, position=where, group=problem.place, member=self.first_member + member
        )


def row_for_rewards(row: Row, rollout: Rollout) -> Row:
    """Return the row as reward functions get it.

    It has the rollout's environment, under TRL's name.
    """
    if rollout.environment is None:
        return row
    return cast("Row", {**row, "environments": rollout.environment})


def groups_of(
    rows: Sequence[Any], where: str, began: int, first: int, generations: int
) -> list[RolloutGroup]:
    """Return the rows of a rank as groups that are about to begin, or as parts of groups.

    Args:
        rows: one for each rollout; those of a problem are neighbours.
        where: the name of the generation.
        began: the number of the generation.
        first: the number of the first row over all ranks.
        generations: rollouts of a problem.
    """
    groups: list[RolloutGroup] = []
    for place, numbered in groupby(
        enumerate(rows, first), key=lambda number_and_row: number_and_row[0] // generations
    ):
        members = list(numbered)
        number, row = members[0]
        columns = dict(row)
        problem = DrawnProblem(columns.pop(ROW_NUMBER, -1), where, place)
        groups.append(
            RolloutGroup(
                problem=problem,
                row=cast("Row", columns),
                began=began,
                rollouts=(Rollout(),) * len(members),
                first_member=number % generations,
            )
        )
    return groups


def open_rollouts(
    groups: Sequence[RolloutGroup], limits: Iterable[int]
) -> dict[tuple[int, int], Rollout]:
    """Return unfinished rollouts by the number of their group and their own in the group.

    Only groups whose numbers are in `limits` are looked at. Continued rollouts come first, since
    they are expected to take longest.
    """
    unfinished = {
        (number, member): rollout
        for number in limits
        for member, rollout in enumerate(groups[number].rollouts)
        if not rollout.ended
    }
    return dict(sorted(unfinished.items(), key=lambda item: not item[1].segments))


@dataclass(frozen=True)
class SamplingRequest:
    """One rollout that is to begin or to continue."""

    # the prompt with its image tokens expanded, and the tokens that the rollout has already
    prompt_ids: list[int]
    images: list[Any]  # that the engine is to see
    # neighbours of one group that ask for the same may be one request; their seeds count up
    group: Hashable
    seed: int | None = None  # None: the engine's own
    max_tokens: int | None = None  # None: the run's limit


@dataclass(frozen=True)
class SamplingResult:
    """The tokens that were sampled for a request."""

    tokens: list[int]
    # of each token, by the weights that sampled it; None where the engine was not asked for any
    logps: list[float | None]
    # "stop": it ended by itself; "length": at its limit; "room": at the end of the engine's context;
    # "": servers do not say it
    finish_reason: Literal["", "stop", "length", "room"] = ""
    # the prompt as the engine has read it
    prompt_ids_read: list[int] = field(default_factory=list)


def merge_requests(requests: Sequence[SamplingRequest]) -> list[list[SamplingRequest]]:
    """Return lists of neighbouring requests that ask for the same.

    An engine may get each list as one request.
    """
    alike = groupby(
        requests,
        key=lambda request: (
            request.group,
            request.max_tokens,
            request.prompt_ids,
            [_identity(image) for image in request.images],
        ),
    )
    return [list(merged) for _, merged in alike]


def _identity(image: object) -> object:
    """Equal for images that an engine need not read twice."""
    return image.digest if isinstance(image, KeptImage) else id(image)
