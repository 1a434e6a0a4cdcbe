"""Forecasts on what attenuation would act, from several answers to each problem.

Whether it then helps depends on whether short right answers are guesses, which no figure of these
can say: see docs/experiments.md for tasks where the outcome is known.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch
from pyarrow.dataset import dataset

from adora_vl.advantage import Groups
from adora_vl.advantage.adora import weigh_groups
from adora_vl.evals.benchmark import named
from adora_vl.evals.inference.predictions import PREDICTIONS, read_predictions
from adora_vl.evals.prepared import GraderOptions
from adora_vl.evals.scoring.score import graded_rows
from adora_vl.evals.scoring.statistics import paired_t, wilson
from adora_vl.utils.errors import UserError, in_one_line
from data_prep.filter import asked_for_tags

FIRST_GROUPS = 512  # of a recorded run: its start, which the training has not changed yet
_FEW = 20  # groups with signal, below which nothing is said
# shares of them that would be attenuated
_LITTLE = 0.1
_MUCH = 0.5


@dataclass(frozen=True)
class Share:
    count: int
    total: int

    def __str__(self) -> str:
        if not self.total:
            return "-"
        low, high = wilson(self.count, self.total)
        return (
            f"{self.count / self.total:6.1%}  [{low:.1%}, {high:.1%}]  {self.count} of {self.total}"
        )

    @property
    def value(self) -> float:
        return self.count / self.total if self.total else math.nan


@dataclass(frozen=True)
class Forecast:
    """What ADORA's length criterion says of groups of answers whose rewards differ."""

    groups: int
    tds: Share  # of the groups with signal
    ties: Share  # of those that are TDS
    short_only: Share  # TDS groups in which no right answer is longer than a wrong one
    longest: Share  # right answers among the longest of groups with signal and lengths that differ
    shortest: Share
    ahead: tuple[float, float]  # 95 % interval of longest minus shortest, paired

    def lines(self) -> list[str]:
        low, high = self.ahead
        rows = (
            ("groups with signal, of all", Share(self.tds.total, self.groups)),
            ("TDS, of those with signal", self.tds),
            ("ties of length, of those TDS", self.ties),
            ("only the shortest are right, of those TDS", self.short_only),
            ("the longest answer is right", self.longest),
            ("the shortest answer is right", self.shortest),
            (
                "longest - shortest",
                f"{self.longest.value - self.shortest.value:+6.1%}  [{low:+.1%}, {high:+.1%}]",
            ),
        )
        return [*(f"{title:43}{cell}" for title, cell in rows), self.sentence()]

    def sentence(self) -> str:
        if self.tds.total < _FEW:
            return (
                f"Only {self.tds.total} groups carry a signal, too few to say anything; take "
                "more problems."
            )
        low, high = self.ahead
        where = (
            "short answers are right more often than long ones"
            if high < 0
            else (
                "long answers are right more often than short ones"
                if low > 0
                else "length says nothing of what is right"
            )
        )
        share = self.tds.value
        if share < _LITTLE:
            return (
                f"Attenuation would hardly act: {share:.0%} of the groups with signal are TDS; "
                f"{where}."
            )
        how = (
            "on most of what there is to learn from"
            if share > _MUCH
            else "on some of what there is to learn from"
        )
        on = (
            "those in which short answers win"
            if self.short_only.value > _MUCH
            else "groups whose lengths overlap"
        )
        ties = f", and {self.ties.value:.0%} of them are ties" if self.ties.value > _LITTLE else ""
        return f"Attenuation would act {how} ({share:.0%} TDS), mostly {on}{ties}; {where}."


def forecast(groups: Groups) -> Forecast:
    """The forecast of whole groups, (P, G).

    Groups whose rewards are all equal teach nothing, and count nowhere.
    """
    weighing = weigh_groups(groups)
    signal_P = groups.differs_P & groups.scored_PG.any(dim=1)
    tds_P = weighing.tds_P & signal_P
    wrong_lengths_PG = torch.where(groups.wrong_PG, groups.lengths_PG.float(), torch.inf)
    short_P = tds_P & (groups.longest_correct_P <= wrong_lengths_PG.amin(dim=1))
    pairs = _ends(groups, signal_P)
    ahead = (
        paired_t([long - short for long, short in pairs])
        if len(pairs) > 1
        else (math.nan, math.nan)
    )
    longest, shortest = (Share(round(sum(one[i] for one in pairs)), len(pairs)) for i in (0, 1))
    tds = int(tds_P.sum())
    return Forecast(
        groups=len(signal_P),
        tds=Share(tds, int(signal_P.sum())),
        ties=Share(int((weighing.ties_P & signal_P).sum()), tds),
        short_only=Share(int(short_P.sum()), tds),
        longest=longest,
        shortest=shortest,
        ahead=ahead,
    )


def _ends(groups: Groups, signal_P: torch.Tensor) -> list[tuple[float, float]]:
    """How many of the longest and of the shortest answers are right, group by group, as shares."""
    found: list[tuple[float, float]] = []
    correct_PG = groups.correct_PG
    scored_PG = groups.scored_PG
    for p in signal_P.nonzero()[:, 0].tolist():
        lengths = groups.lengths_PG[p][scored_PG[p]]
        right = correct_PG[p][scored_PG[p]].float()
        if lengths.min() < lengths.max():
            longest, shortest = (
                right[lengths == end].mean().item() for end in (lengths.max(), lengths.min())
            )
            found.append((longest, shortest))
    return found


def recorded(run: Path) -> Groups:
    """The first groups that a run has recorded (docs/report.md).

    Raises `UserError` where `run` has no record.
    """
    files = sorted((run / "rollouts").glob("rollouts-*.parquet"))
    if not files:
        raise UserError(
            f"attenuation: {str(run)!r} has no rollouts/; name the output_dir of a run, or stored "
            "answers"
        )
    try:
        held = dataset(files)
        settings = json.loads(held.schema.metadata[b"adora_vl"])
        size = int(settings["num_generations"])
        columns = held.head(
            FIRST_GROUPS * size, columns=["reward", "length", "truncated"]
        ).to_pydict()
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
        why = f"is no file of a run's record ({in_one_line(error)})"
        raise UserError(f"attenuation: a file in {str(run / 'rollouts')!r} {why}") from error
    rewards = [math.nan if reward is None else reward for reward in columns["reward"]]
    above = float(settings.get("adora_correct_above", 0.5))
    return _groups([rewards, columns["length"], columns["truncated"]], size, above)


def sampled(predictions: Path) -> Groups:
    """The groups of stored answers, graded as in training.

    Raises `UserError` where their lengths are not known.
    """
    benchmark = named("geometry3k")
    options = GraderOptions(answer_tags=asked_for_tags(predictions))
    rows = defaultdict(list)
    for row in read_predictions(predictions):
        rows[row["pid"]].append(row)
    size = max(map(len, rows.values()), default=0)
    flat = [row for own in rows.values() if len(own) == size for row in own]
    if size < 2 or any(row.get("n_tokens") is None for row in flat):
        raise UserError(
            f"attenuation: {str(predictions)!r} has {size} answers to a problem, or not their "
            "lengths; sample several with `python -m data_prep filter --samples 8`"
        )
    _, graded = graded_rows(benchmark, flat, options)
    rewards = [float(item.correct) for item in graded]
    truncated = [row.get("finish_reason") == "length" for row in flat]
    return _groups([rewards, [row["n_tokens"] for row in flat], truncated], size, 0.5)


def _groups(columns: Sequence[Sequence[float]], size: int, above: float) -> Groups:
    rewards, lengths, truncated = (torch.tensor(column).view(-1, size) for column in columns)
    return Groups(
        rewards_PG=rewards, lengths_PG=lengths, truncated_PG=truncated, correct_above=above
    )


def of(place: Path) -> Forecast:
    """The forecast of a run's folder, of a folder of stored answers, or of a file of them."""
    file = place / PREDICTIONS if place.is_dir() else place
    return forecast(sampled(file) if file.is_file() else recorded(place))
