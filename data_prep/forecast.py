"""Forecasts on which groups ADORA's attenuation would act, from several answers to each problem.

Whether it then helps depends on whether short right answers are guesses, which none of these
figures can say. docs/experiments.md has tasks whose outcome is known.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pyarrow as pa
import torch
from pyarrow.dataset import dataset

from adora_vl.advantage import Groups
from adora_vl.advantage.adora import weigh_groups
from adora_vl.evals.inference.predictions import (
    NOT_ASKED_REASONS,
    PREDICTIONS_FILE,
    read_predictions,
)
from adora_vl.evals.records import Prediction
from adora_vl.evals.scoring.statistics import (
    interval_of_equal_values,
    paired_t_interval,
    wilson_interval,
)
from adora_vl.record.record_files import ROLLOUTS_FOLDER, list_record_files
from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import UserError, describe_error
from data_prep.filter import grade_as_in_training, prompts_asked_for_tags

# The number of groups that are read of a recorded run, from its start on, where training has
# changed little yet.
MAX_GROUPS_READ = 512
_MIN_GROUPS_FOR_FORECAST = 20  # with fewer groups that have a signal, no forecast is made
# Below and above these shares of groups, attenuation would act on little or on much.
_SMALL_SHARE = 0.1
_LARGE_SHARE = 0.5


@dataclass(frozen=True)
class ShareOfGroups:
    """A share of a total, which is printed with its 95 % interval (Wilson)."""

    count: int
    total: int

    def __str__(self) -> str:
        """Return the share with its 95 % interval and its counts."""
        if not self.total:
            return "-"
        low, high = wilson_interval(self.count, self.total)
        return f"{self.value:6.1%}  [{low:.1%}, {high:.1%}]  {self.count} of {self.total}"

    @property
    def value(self) -> float:
        """The share itself, of a total that is not 0."""
        return self.count / self.total


class MeanDifference(NamedTuple):
    """A mean of paired differences with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the mean with its interval."""
        return f"{self.mean:+6.1%}  [{self.low:+.1%}, {self.high:+.1%}]"


@dataclass(frozen=True)
class Forecast:
    """What ADORA's length criterion says of groups of answers to one problem each.

    A group has a signal if its rewards differ. ADORA attenuates a group with a signal if no right
    answer is longer than its wrong ones are on average. Such a group is called TDS. It is a tie if
    its longest right answer is as long as that average. It is `short_only` if it is no tie, and no
    right answer is longer than any wrong one.
    """

    groups: int  # with and without a signal
    tds: ShareOfGroups  # groups that are TDS, of those with a signal
    ties: ShareOfGroups  # of the TDS groups
    short_only: ShareOfGroups  # of the TDS groups
    # In the groups with a signal whose answers differ in length:
    longest: ShareOfGroups  # how many of the longest answers are right
    shortest: ShareOfGroups  # how many of the shortest answers are right
    # The mean over groups of `longest` minus `shortest`; None for fewer than two groups.
    longest_minus_shortest: MeanDifference | None
    # How many problems had too few answers to be a group.
    problems_left_out: int = 0

    def lines(self) -> list[str]:
        """Return the lines that are printed: a table of the shares, and what they mean."""
        lines = []
        if self.problems_left_out:
            lines.append(
                f"{pluralize(self.problems_left_out, 'problem')} left out: asked less often than "
                "the others, or not at all"
            )
        table = (
            ("groups with signal, of all", ShareOfGroups(self.tds.total, self.groups)),
            ("TDS, of those with signal", self.tds),
            ("ties of length, of those TDS", self.ties),
            ("only the shortest are right, of those TDS", self.short_only),
            ("the longest answer is right", self.longest),
            ("the shortest answer is right", self.shortest),
            ("longest - shortest", self.longest_minus_shortest or "-"),
        )
        for title, share in table:
            lines.append(f"{title:43}{share}")
        lines.append(self.sentence())
        return lines

    def sentence(self) -> str:
        """Return a sentence on how much attenuation would act, and on which groups."""
        if self.tds.total < _MIN_GROUPS_FOR_FORECAST:
            return (
                f"Only {self.tds.total} groups carry a signal, too few to say anything; take "
                "more problems."
            )
        difference = self.longest_minus_shortest
        length_clause = "length says nothing of what is right"
        # The interval of the difference leaves out 0 where length says something.
        if difference is not None and difference.high < 0:
            length_clause = "short answers are right more often than long ones"
        elif difference is not None and difference.low > 0:
            length_clause = "long answers are right more often than short ones"
        tds_share = self.tds.value
        if tds_share < _SMALL_SHARE:
            return (
                f"Attenuation would hardly act: {tds_share:.0%} of the groups with signal are TDS; "
                f"{length_clause}."
            )
        extent = "on some of what there is to learn from"
        if tds_share > _LARGE_SHARE:
            extent = "on most of what there is to learn from"
        kind_of_groups = "groups whose lengths overlap"
        if self.short_only.value > _LARGE_SHARE:
            kind_of_groups = "those in which short answers win"
        ties = ""
        if self.ties.value > _SMALL_SHARE:
            ties = f", and {self.ties.value:.0%} of them are ties"
        return (
            f"Attenuation would act {extent} ({tds_share:.0%} TDS), mostly {kind_of_groups}{ties}; "
            f"{length_clause}."
        )


def forecast_attenuation(groups: Groups) -> Forecast:
    """Return on how many groups ADORA's attenuation would act, and how lengths relate to rewards.

    The tensors of `groups` are (P, G), problems by answers, and those whose names end in `_P` have
    a value for each group. Attenuation acts on groups that are TDS: their right answers are no
    longer than their wrong ones. A group without a signal, whose rewards are all equal, teaches
    nothing and counts in the first number alone.
    """
    weighing = weigh_groups(groups)  # the weights that a training would give
    # A group whose answers were all truncated has no score, and so no signal.
    has_signal_P = groups.rewards_differ_P & groups.has_reward_PG.any(dim=1)
    is_tds_P = weighing.tds_P & has_signal_P
    is_tie_P = weighing.tds_by_tie_P & has_signal_P
    # Answers that are not wrong get infinity as their length, so that the least is a wrong one's.
    wrong_lengths_PG = torch.where(groups.wrong_PG, groups.lengths_PG.float(), torch.inf)
    shortest_wrong_P = wrong_lengths_PG.amin(dim=1)
    no_right_is_longer_P = groups.longest_correct_P <= shortest_wrong_P
    # It is also so in a tie, where the short answers do not win.
    is_short_only_P = is_tds_P & no_right_is_longer_P & ~is_tie_P
    shares = _right_shares_by_length(groups, has_signal_P)
    tds_count = int(is_tds_P.sum())
    return Forecast(
        groups=len(has_signal_P),
        tds=ShareOfGroups(count=tds_count, total=int(has_signal_P.sum())),
        ties=ShareOfGroups(count=int(is_tie_P.sum()), total=tds_count),
        short_only=ShareOfGroups(count=int(is_short_only_P.sum()), total=tds_count),
        # A group counts as one answer, also where several are equally long.
        longest=ShareOfGroups(
            count=round(sum(share.longest for share in shares)), total=len(shares)
        ),
        shortest=ShareOfGroups(
            count=round(sum(share.shortest for share in shares)), total=len(shares)
        ),
        longest_minus_shortest=_longest_minus_shortest(shares),
    )


class _RightShares(NamedTuple):
    """The shares of right answers among the longest and the shortest answers of a group."""

    longest: float
    shortest: float


def _right_shares_by_length(groups: Groups, has_signal_P: torch.Tensor) -> list[_RightShares]:
    """Return the shares of right answers among the longest and shortest ones of each group.

    `groups` has P groups of G answers, and `has_signal_P` says of each group whether its rewards
    differ. For example, a group has answers of 50, 50 and 20 tokens, and the second one alone is
    right. Its shares are 0.5 for the longest and 0 for the shortest. Groups without a signal are
    left out. So are groups whose answers all have the same length, and answers without a score.
    """
    shares: list[_RightShares] = []
    for group_index in has_signal_P.nonzero()[:, 0].tolist():
        is_scored_G = groups.has_reward_PG[group_index]
        lengths = groups.lengths_PG[group_index][is_scored_G]
        is_right = groups.correct_PG[group_index][is_scored_G].float()
        if lengths.min() < lengths.max():
            is_longest = torch.eq(lengths, lengths.max())
            is_shortest = torch.eq(lengths, lengths.min())
            shares.append(
                _RightShares(
                    longest=is_right[is_longest].mean().item(),
                    shortest=is_right[is_shortest].mean().item(),
                )
            )
    return shares


def _longest_minus_shortest(shares: Sequence[_RightShares]) -> MeanDifference | None:
    """Return how much more often the longest answers of a group are right than the shortest.

    Returns None for fewer than two groups, since one difference has no spread.
    """
    differences = [share.longest - share.shortest for share in shares]
    if len(differences) < 2:
        return None
    mean = fmean(differences)
    interval = paired_t_interval(differences)
    if interval is None:
        interval = interval_of_equal_values(mean, count=len(differences), lowest=-1, highest=1)
    low, high = interval
    return MeanDifference(mean, low=low, high=high)


def read_recorded_groups(run: Path) -> Groups:
    """Return the rewards and lengths of the first groups of a run, from the rollouts it recorded.

    `run` is the output folder of the run; docs/report.md describes the record.

    Raises `UserError` where `run` has no record.
    """
    # A file that was merged into another one may still be there, and would count twice.
    files = [part.path for part in list_record_files(run / ROLLOUTS_FOLDER)]
    if not files:
        raise UserError(
            f"attenuation: {str(run)!r} has no rollouts/; name the output_dir of a run, or stored "
            "answers"
        )
    try:
        record = dataset(files)
        settings = json.loads(record.schema.metadata[b"adora_vl"])
        group_size = int(settings["num_generations"])
        # The first groups of a long record are enough.
        columns = record.head(
            MAX_GROUPS_READ * group_size, columns=["reward", "length", "truncated"]
        ).to_pydict()
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"attenuation: a file in {str(run / ROLLOUTS_FOLDER)!r} is no file of a run's record "
            f"({describe_error(error)})"
        ) from error
    # A rollout without a reward, such as a truncated one, has a null in the record and NaN in a
    # tensor of rewards.
    rewards = [math.nan if reward is None else reward for reward in columns["reward"]]
    return _groups_of_columns(
        rewards=rewards,
        lengths=columns["length"],
        truncated=columns["truncated"],
        group_size=group_size,
        correct_above=float(settings.get("adora_correct_above", 0.5)),  # 0.5: the key's default
    )


def forecast_from_predictions(predictions: Path, *, rounding: bool) -> Forecast:
    """Return on which groups of answers in a file of predictions ADORA's attenuation would act.

    The answers are graded as in training, and those to one problem are a group. All groups need
    equally many answers, since the tensors are rectangular. So problems with fewer answers than the
    most are left out: their sampling was cut off, or they could not be asked. With `rounding` a
    rounded decimal is right too.

    Raises `UserError` where no problem has two answers, or where their lengths are not known.
    """
    answers_by_problem: dict[str, list[Prediction]] = {}
    for answer in read_predictions(predictions):
        # A problem that could not be asked is counted, with no answers.
        answers = answers_by_problem.setdefault(answer["pid"], [])
        if answer.get("finish_reason") not in NOT_ASKED_REASONS:
            answers.append(answer)
    group_size = max(map(len, answers_by_problem.values()))
    if group_size < 2:
        raise UserError(
            f"attenuation: {str(predictions)!r} has {group_size} answers to a problem; sample "
            "several with `python -m data_prep filter --samples 8`"
        )
    complete_groups = [
        answers for answers in answers_by_problem.values() if len(answers) == group_size
    ]
    all_answers = list(chain.from_iterable(complete_groups))
    if any(answer.get("n_tokens") is None for answer in all_answers):
        raise UserError(
            f"attenuation: {str(predictions)!r} lacks the lengths of its answers (n_tokens); "
            "sample them with `python -m data_prep filter --samples 8`"
        )
    graded_answers = grade_as_in_training(
        all_answers, rounding=rounding, answer_tags=prompts_asked_for_tags(predictions)
    )
    groups = _groups_of_columns(
        rewards=[float(graded.correct) for graded in graded_answers],
        lengths=[answer["n_tokens"] for answer in all_answers],
        truncated=[answer.get("finish_reason") == "length" for answer in all_answers],
        group_size=group_size,
        correct_above=0.5,  # rewards are 1 for a right answer, else 0
    )
    left_out = len(answers_by_problem) - len(complete_groups)
    return replace(forecast_attenuation(groups), problems_left_out=left_out)


def _groups_of_columns(
    *,
    rewards: Sequence[float],
    lengths: Sequence[int],
    truncated: Sequence[bool],
    group_size: int,
    correct_above: float,
) -> Groups:
    """Return answers as groups: tensors (P, G) of P groups with G = `group_size` answers in a row.

    Args:
        rewards: the reward of each answer.
        lengths: its tokens.
        truncated: whether it was cut off because it became too long.
        group_size: how many answers there are to each problem.
        correct_above: an answer is right if its reward is above this.
    """
    return Groups(
        rewards_PG=torch.tensor(rewards).view(-1, group_size),
        lengths_PG=torch.tensor(lengths).view(-1, group_size),
        truncated_PG=torch.tensor(truncated).view(-1, group_size),
        correct_above=correct_above,
    )


def forecast_from_path(path: Path, *, rounding: bool) -> Forecast:
    """Return on which groups of answers ADORA's attenuation would act.

    `path` is a run's folder, a folder of stored answers, or a file of them. With `rounding` a
    rounded decimal is right too.

    Raises `UserError` where a folder is none of these, and for `rounding` with a run.
    """
    # A folder without a file of predictions can only be the folder of a run.
    file = path / PREDICTIONS_FILE if path.is_dir() else path
    if not file.is_file():
        groups = read_recorded_groups(path)
        if rounding:
            raise UserError(
                f"rounding: {str(path)!r} has the rewards of a run, which are not graded anew; "
                "leave --rounding out"
            )
        return forecast_attenuation(groups)
    return forecast_from_predictions(file, rounding=rounding)
