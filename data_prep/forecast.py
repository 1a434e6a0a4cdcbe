"""Forecasts on which groups ADORA's attenuation would act, from several answers to each problem.

Whether it then helps depends on whether short right answers are guesses, which none of these figures
can say. docs/experiments.md has tasks whose outcome is known.
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
from adora_vl.evals.benchmark import find_benchmark
from adora_vl.evals.inference.predictions import PREDICTIONS, read_predictions
from adora_vl.evals.prepared import GraderOptions
from adora_vl.evals.scoring.score import graded_rows
from adora_vl.evals.scoring.statistics import paired_t, wilson
from adora_vl.utils.errors import UserError, in_one_line
from data_prep.filter import asked_for_tags

# Only so many groups of a recorded run are read: its start, where training has changed little yet.
FIRST_GROUPS = 512
_FEWEST_GROUPS = 20  # with fewer groups that have a signal, no forecast is made
# Below and above these shares of groups, attenuation would act on little or on much.
_SMALL_SHARE = 0.1
_LARGE_SHARE = 0.5


@dataclass(frozen=True)
class Share:
    """A share of a total, which is printed with its 95 % interval (Wilson)."""

    count: int
    total: int

    def __str__(self) -> str:
        """Return the share with its 95 % interval and its counts."""
        if not self.total:
            return "-"
        low, high = wilson(self.count, self.total)
        return (
            f"{self.count / self.total:6.1%}  [{low:.1%}, {high:.1%}]  {self.count} of {self.total}"
        )

    @property
    def value(self) -> float:
        """The share itself; NaN of nothing."""
        return self.count / self.total if self.total else math.nan


@dataclass(frozen=True)
class Forecast:
    """What ADORA's length criterion says of groups of answers whose rewards differ."""

    groups: int
    tds: Share  # the share of groups with signal that are TDS
    ties: Share  # the share of TDS groups whose lengths are tied
    short_only: Share  # TDS groups in which no right answer is longer than a wrong one
    longest: Share  # right answers among the longest of groups with signal and lengths that differ
    shortest: Share  # right answers among the shortest of the same groups
    ahead: tuple[float, float]  # 95 % interval of longest minus shortest, paired

    def lines(self) -> list[str]:
        """Return the lines that are printed: a table of the shares, and the sentence."""
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
        """Return a sentence on how much attenuation would act, and on which groups."""
        if self.tds.total < _FEWEST_GROUPS:
            return (
                f"Only {self.tds.total} groups carry a signal, too few to say anything; take "
                "more problems."
            )
        low, high = self.ahead
        if high < 0:
            lengths = "short answers are right more often than long ones"
        elif low > 0:
            lengths = "long answers are right more often than short ones"
        else:
            lengths = "length says nothing of what is right"
        share = self.tds.value
        if share < _SMALL_SHARE:
            return (
                f"Attenuation would hardly act: {share:.0%} of the groups with signal are TDS; "
                f"{lengths}."
            )
        extent = "on some of what there is to learn from"
        if share > _LARGE_SHARE:
            extent = "on most of what there is to learn from"
        kind = "groups whose lengths overlap"
        if self.short_only.value > _LARGE_SHARE:
            kind = "those in which short answers win"
        ties = (
            f", and {self.ties.value:.0%} of them are ties"
            if self.ties.value > _SMALL_SHARE
            else ""
        )
        return f"Attenuation would act {extent} ({share:.0%} TDS), mostly {kind}{ties}; {lengths}."


def forecast(groups: Groups) -> Forecast:
    """Make the forecast of whole groups, whose tensors are (P, G): problems by answers.

    Groups whose rewards are all equal teach nothing, and count nowhere.
    """
    weighing = weigh_groups(groups)
    # A group whose answers were all truncated has no score, and so no signal.
    signal_P = groups.differs_P & groups.scored_PG.any(dim=1)
    tds_P = weighing.tds_P & signal_P
    wrong_lengths_PG = torch.where(groups.wrong_PG, groups.lengths_PG.float(), torch.inf)
    # No right answer is longer than the shortest wrong one.
    short_P = tds_P & (groups.longest_correct_P <= wrong_lengths_PG.amin(dim=1))
    pairs = _right_shares_by_length(groups, signal_P)
    ahead = (math.nan, math.nan)
    if len(pairs) > 1:
        ahead = paired_t([longest - shortest for longest, shortest in pairs])
    right_longest = sum(longest for longest, _ in pairs)
    right_shortest = sum(shortest for _, shortest in pairs)
    tds = int(tds_P.sum())
    return Forecast(
        groups=len(signal_P),
        tds=Share(tds, int(signal_P.sum())),
        ties=Share(int((weighing.tds_by_tie_P & signal_P).sum()), tds),
        short_only=Share(int(short_P.sum()), tds),
        longest=Share(round(right_longest), len(pairs)),
        shortest=Share(round(right_shortest), len(pairs)),
        ahead=ahead,
    )


def _right_shares_by_length(groups: Groups, signal_P: torch.Tensor) -> list[tuple[float, float]]:
    """Return the shares of right answers among the longest and the shortest of each group.

    Groups whose answers all have one length are left out.
    """
    pairs: list[tuple[float, float]] = []
    for group in signal_P.nonzero()[:, 0].tolist():
        scored = groups.scored_PG[group]
        lengths = groups.lengths_PG[group][scored]
        correct = groups.correct_PG[group][scored].float()
        shortest = lengths.min()
        longest = lengths.max()
        if shortest < longest:
            of_longest = torch.eq(lengths, longest)
            of_shortest = torch.eq(lengths, shortest)
            pairs.append((correct[of_longest].mean().item(), correct[of_shortest].mean().item()))
    return pairs


def recorded_groups(run: Path) -> Groups:
    """Read the first groups that a run has recorded (docs/report.md).

    Raises `UserError` where `run` has no record.
    """
    files = sorted((run / "rollouts").glob("rollouts-*.parquet"))
    if not files:
        raise UserError(
            f"attenuation: {str(run)!r} has no rollouts/; name the output_dir of a run, or stored "
            "answers"
        )
    try:
        record = dataset(files)
        settings = json.loads(record.schema.metadata[b"adora_vl"])
        size = int(settings["num_generations"])
        columns = record.head(
            FIRST_GROUPS * size, columns=["reward", "length", "truncated"]
        ).to_pydict()
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
        why = f"is no file of a run's record ({in_one_line(error)})"
        raise UserError(f"attenuation: a file in {str(run / 'rollouts')!r} {why}") from error
    rewards = [math.nan if reward is None else reward for reward in columns["reward"]]
    above = float(settings.get("adora_correct_above", 0.5))
    return _groups_of_columns(
        rewards, columns["length"], columns["truncated"], size=size, above=above
    )


def sampled_groups(predictions: Path) -> Groups:
    """Read the groups of stored answers, graded as in training.

    Problems with fewer answers than the most are left out.

    Raises `UserError` where there is but one answer to a problem, or lengths are not known.
    """
    benchmark = find_benchmark("geometry3k")
    options = GraderOptions(answer_tags=asked_for_tags(predictions))
    rows_of_problem = defaultdict(list)
    for row in read_predictions(predictions):
        rows_of_problem[row["pid"]].append(row)
    size = max(map(len, rows_of_problem.values()), default=0)
    rows = []
    for group in rows_of_problem.values():
        # The tensors are rectangular: a problem whose sampling was cut off has no place in them.
        if len(group) == size:
            rows += group
    if size < 2 or any(row.get("n_tokens") is None for row in rows):
        raise UserError(
            f"attenuation: {str(predictions)!r} has {size} answers to a problem, or not their "
            "lengths; sample several with `python -m data_prep filter --samples 8`"
        )
    _, graded = graded_rows(benchmark, rows, options)
    rewards = [float(item.correct) for item in graded]
    lengths = [row["n_tokens"] for row in rows]
    truncated = [row.get("finish_reason") == "length" for row in rows]
    # Rewards are 1 for a right answer, else 0.
    return _groups_of_columns(rewards, lengths, truncated, size=size, above=0.5)


def _groups_of_columns(
    rewards: Sequence[float],
    lengths: Sequence[int],
    truncated: Sequence[bool],
    *,
    size: int,
    above: float,
) -> Groups:
    """Group the columns of answers, of which `size` in a row answer one problem.

    An answer with a reward over `above` is right.
    """
    return Groups(
        rewards_PG=torch.tensor(rewards).view(-1, size),
        lengths_PG=torch.tensor(lengths).view(-1, size),
        truncated_PG=torch.tensor(truncated).view(-1, size),
        correct_above=above,
    )


def forecast_at(path: Path) -> Forecast:
    """Make the forecast of a run's folder, a folder of stored answers, or a file of them."""
    file = path / PREDICTIONS if path.is_dir() else path
    groups = sampled_groups(file) if file.is_file() else recorded_groups(path)
    return forecast(groups)
