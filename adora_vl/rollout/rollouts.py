"""What is asked of those who sample, and what comes back."""

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
    """Tokens in a row from one hand."""

    tokens: tuple[int, ...]
    # of the weights that sampled it; None: not the policy's own, as a tool's
    logps: tuple[float | None, ...] | None
    step: int  # optimizer steps that had been made when it came


@dataclass(frozen=True)
class Picture:
    """One that a tool has returned."""

    digest: str  # of its content
    image: Image.Image
    span: int  # that shows it; pictures stand in the order of the tokens


@dataclass(frozen=True)
class Call:
    """Of a tool, for the record."""

    name: str
    arguments: str  # as they were written
    text: str  # what came back, as text
    seconds: float
    failed: bool
    span: int = -1  # that answers it; -1 until it has one


@dataclass(frozen=True)
class Rollout:
    """An answer so far, or to its end: it may pause between two spans, or wait for a tool."""

    spans: tuple[Segment, ...] = ()
    # by itself, at the run's limit, with a call that nobody answers, or at the end of the room in
    # the answer or the engine
    ended: Literal["", "stop", "length", "calls", "room"] = ""
    compared: bool = True  # whether it was sampled on the trainer's images
    pictures: tuple[Picture, ...] = ()
    calls: tuple[Call, ...] = ()
    # its own, of a run that has some
    environment: Any = field(default=None, compare=False, repr=False)

    @property
    def tokens(self) -> list[int]:
        return [token for span in self.spans for token in span.tokens]

    @property
    def own(self) -> list[bool]:
        """Which tokens the policy has sampled."""
        return [span.logps is not None for span in self.spans for _ in span.tokens]

    @property
    def turn(self) -> list[int]:
        """What the policy has sampled since a tool last answered."""
        last = max(
            (number + 1 for number, span in enumerate(self.spans) if span.logps is None), default=0
        )
        return [token for span in self.spans[last:] for token in span.tokens]

    @property
    def said(self) -> list[int]:
        """The tokens that the policy has sampled."""
        return [token for span in self.spans if span.logps is not None for token in span.tokens]

    @property
    def logps(self) -> list[float | None]:
        """Of every token, None where the engine was not asked for any."""
        return [logp for span in self.spans for logp in span.logps or (None,) * len(span.tokens)]

    def stale(self, step: int) -> int:
        """How many tokens at the beginning cannot be compared with the present policy's.

        They are those of earlier steps, or all of a rollout that saw other images.
        """
        if not self.compared:
            return len(self.tokens)
        return sum(len(span.tokens) for span in self.spans if span.step != step)


@dataclass(frozen=True)
class DrawnProblem:
    """One that a data loader has drawn."""

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
    first_member: int = 0  # where a group spans ranks, each has a part of it

    @property
    def complete(self) -> bool:
        return all(rollout.ended for rollout in self.rollouts)

    def seed(self, run_seed: int, member: int, rollout: Rollout) -> int:
        """Of the next span of that rollout.

        With the seed of an earlier one its random numbers would be drawn again.
        """
        problem = self.problem
        number = sum(span.logps is not None for span in rollout.spans)
        where = f"{problem.where}/segment-{number}" if number else problem.where
        return rollout_seed(
            run_seed, position=where, group=problem.place, member=self.first_member + member
        )


def graded(row: Row, rollout: Rollout) -> Row:
    """What reward functions get of a rollout's row, and its environment under TRL's name."""
    return (
        row
        if rollout.environment is None
        else cast("Row", {**row, "environments": rollout.environment})
    )


def groups_of(
    rows: Sequence[Any], where: str, began: int, first: int, generations: int
) -> list[RolloutGroup]:
    """The rows of a rank, whose first one has the number `first` over all ranks, as groups that are
    about to begin, or parts of them. `where`, `began`: of the generation. `generations`: rollouts
    of a problem, whose rows are neighbours.
    """
    found: list[RolloutGroup] = []
    for place, numbered in groupby(enumerate(rows, first), key=lambda one: one[0] // generations):
        (number, row), *others = numbered
        own = dict(row)
        empty = (Rollout(),) * (1 + len(others))
        problem = DrawnProblem(own.pop(ROW_NUMBER, -1), where, place)
        found.append(
            RolloutGroup(
                problem=problem,
                row=cast("Row", own),
                began=began,
                rollouts=empty,
                first_member=number % generations,
            )
        )
    return found


def open_rollouts(
    groups: Sequence[RolloutGroup], limits: Iterable[int]
) -> dict[tuple[int, int], Rollout]:
    """Those that have not ended, by the group's number and their own; first those that go on, as
    the last to end.
    """
    found = {
        (n, member): one
        for n in limits
        for member, one in enumerate(groups[n].rollouts)
        if not one.ended
    }
    return dict(sorted(found.items(), key=lambda each: not each[1].spans))


@dataclass(frozen=True)
class SamplingRequest:
    """One rollout to be sampled, or to go on."""

    ids: list[int]  # the prompt with its image tokens expanded, and what the rollout has already
    images: list[Any]  # that the engine is to see
    # neighbours of one name that ask for the same may be one request; their seeds count up
    together: Hashable
    seed: int | None = None  # None: the engine's own
    limit: int | None = None  # of tokens; None: the run's


@dataclass(frozen=True)
class SamplingResult:
    """What was sampled for an ask."""

    tokens: list[int]
    # of each token, by the weights that sampled it; None where the engine was not asked for any
    logps: list[float | None]
    # by itself, at its limit, or at the end of the engine's room; servers do not say it
    reason: Literal["", "stop", "length", "room"] = ""
    read: list[int] = field(default_factory=list)  # the prompt as the engine has read it


def plan_requests(asks: Sequence[SamplingRequest]) -> list[list[SamplingRequest]]:
    """Neighbours that may be one request."""
    alike = groupby(
        asks, key=lambda ask: (ask.together, ask.limit, ask.ids, [*map(_identity, ask.images)])
    )
    return [list(request) for _, request in alike]


def _identity(image: Any) -> Any:
    return image.digest if isinstance(image, KeptImage) else id(image)
