"""Sums up a run in a few sentences, from the record of its rollouts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from statistics import fmean
from typing import Any

from adora_vl.evals.scoring.statistics import welch_interval
from adora_vl.record.record_files import RecordFile, read_record_file
from adora_vl.record.result import first_and_last_fifth
from adora_vl.utils.cli import pluralize

_SUMMARISED_COLUMNS = [
    "step",
    "group",
    "verdict",
    "reward",
    "weight",
    "tds",
    "advantage_raw",
    "advantage",
    "length",
]
# The kind of an answer in words; a run without a grader has none of these verdicts
_ANSWER_KIND_BY_VERDICT = {
    "correct": "right answers",
    "wrong": "wrong ones",
    "unparseable": "wrong ones",
}


@dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """What the summary of a run needs to know of one recorded group of rollouts."""

    step: int
    weight: float | None
    """ADORA's weight of the group; None where the run gives none."""
    tds: bool
    """Whether ADORA's criteria call the group temporarily disadvantageous (TDS)."""
    rewards_differ: bool
    """Whether the rewards of its rollouts differ."""
    advantages_differ: bool
    """Whether the advantages of its rollouts differ, as the loss gets them."""
    advantage_sum_unweighted: float
    """The sum of |advantage| over its rollouts, before the group's weight."""
    advantage_sum_weighted: float
    """The same as the loss gets it, with the weight."""
    length_by_kind: Mapping[str, float]
    """The mean length in tokens by kind of answer, for those kinds that the group has."""

    @property
    def has_signal(self) -> bool:
        """Whether there is something to learn.

        Most methods learn only from rewards that differ. Some methods also learn from equal
        rewards, such as DAPO with its penalty for long answers.
        """
        return self.rewards_differ or self.advantages_differ

    @property
    def is_left_out(self) -> bool:
        """Whether the loss did not get the group, though it has signal.

        The option `refill` replaces groups without signal. It may sample more groups than it needs,
        and leaves out the rest. A group with the weight 0 is no such group: its advantages are 0
        too, but the loss did get it.
        """
        return self.has_signal and self.advantage_sum_weighted == 0 and self.weight != 0

    @property
    def is_attenuated(self) -> bool:
        """Whether the weight lowers what is learned from the group."""
        return self.weight is not None and self.weight < 1

    @property
    def is_amplified(self) -> bool:
        """Whether the weight raises what is learned from the group."""
        return self.weight is not None and self.weight > 1


def summarise_run(record: Sequence[RecordFile]) -> list[str]:
    """Sum up a run in sentences: what it learned from, ADORA's weights, and how lengths changed.

    An example is `Signal: 120 of 400 recorded groups (30 %) have rewards that differ, and only
    these are learned from.`

    Args:
        record: all files of the record. The sentences are about all steps, also about those that
            the page leaves out.
    """
    groups = [group for record_file in record for group in _read_groups(record_file)]
    if not groups:
        return []
    sentences = [_signal_sentence(groups), _weights_sentences(groups), _lengths_sentence(groups)]
    return [sentence for sentence in sentences if sentence is not None]


def _read_groups(record_file: RecordFile) -> Iterable[GroupSummary]:
    """Yield the summary of each group in a file of the record, in the order of the file."""
    rows = read_record_file(record_file, _SUMMARISED_COLUMNS).to_pylist()
    # the rows of a group follow one another
    for _, group_rows in groupby(rows, key=itemgetter("step", "group")):
        yield _summarise_group(list(group_rows))


def _summarise_group(rows: Sequence[Mapping[str, Any]]) -> GroupSummary:
    """Sum up one group from the recorded rows of its rollouts."""
    # All rows of a group have the same step and weight, and the same `tds`: whether the group is
    # temporarily disadvantageous to learn from.
    first_row = rows[0]
    # Whether the rewards differ is decided without the rollouts that have no reward.
    rewarded_rows = [row for row in rows if row["reward"] is not None]
    rewards = {row["reward"] for row in rewarded_rows}
    lengths_by_kind: dict[str, list[float]] = {}
    for row in rows:
        kind = _ANSWER_KIND_BY_VERDICT.get(row["verdict"], "answers")
        lengths_by_kind.setdefault(kind, []).append(row["length"])
    return GroupSummary(
        step=first_row["step"],
        weight=first_row["weight"],
        tds=bool(first_row["tds"]),
        rewards_differ=len(rewards) > 1,
        advantages_differ=advantages_differ(rewarded_rows),
        advantage_sum_unweighted=sum(abs(row["advantage_raw"] or 0) for row in rows),
        advantage_sum_weighted=sum(abs(row["advantage"] or 0) for row in rows),
        length_by_kind={kind: fmean(lengths) for kind, lengths in lengths_by_kind.items()},
    )


def advantages_differ(rewarded_rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the advantages of a group's rollouts differ, as the loss gets them.

    They are not compared with 0: if all rewards are equal, rounding in TRL's float32 may leave
    advantages of up to 6e-4, but these are equal too.

    `rewarded_rows`: the recorded rows of the group's rollouts that have a reward.
    """
    return len({row["advantage"] for row in rewarded_rows}) > 1


def _signal_sentence(groups: Sequence[GroupSummary]) -> str:
    """Return the sentence that says how many groups have rewards that differ.

    With equal rewards all advantages of a group are 0, so that nothing is learned from it, unless
    the run has a method that learns from such groups too.
    """
    differing_count = sum(group.rewards_differ for group in groups)
    learned_though_equal = sum(group.has_signal and not group.rewards_differ for group in groups)
    total = pluralize(len(groups), "recorded group")
    share = _percent(differing_count / len(groups))
    if learned_though_equal > 0:
        return (
            f"Signal: {differing_count:,} of {total} ({share}) have rewards that differ. The run's "
            f"method learned from {learned_though_equal:,} of the others too."
        )
    if differing_count == 0:
        return f"Signal: none of {total} has rewards that differ, so nothing was learned from them."
    left_out_count = sum(group.is_left_out for group in groups)
    exception = f", but for {left_out_count:,} that were left out" if left_out_count > 0 else ""
    return (
        f"Signal: {differing_count:,} of {total} ({share}) have rewards that differ, "
        f"and only these are learned from{exception}."
    )


def _weights_sentences(groups: Sequence[GroupSummary]) -> str | None:
    """Say how many of the groups that were learned from were attenuated, and how many amplified.

    A weight below 1 attenuates what is learned from a group, one above 1 amplifies it. Returns None
    where no such group has a recorded weight.
    """
    learned_groups = [group for group in groups if group.has_signal and not group.is_left_out]
    weighted_groups = [group for group in learned_groups if group.weight is not None]
    if not weighted_groups:
        return None
    attenuated_groups = [group for group in weighted_groups if group.is_attenuated]
    amplified_groups = [group for group in weighted_groups if group.is_amplified]
    if not attenuated_groups and not amplified_groups:
        tds_count = sum(group.tds for group in weighted_groups)
        share = _percent(tds_count / len(weighted_groups))
        return f"Weights: all are 1. ADORA's criteria would mark {tds_count:,} of these groups ({share})."
    sentences = []
    if attenuated_groups:
        sentences.append(_weight_sentence("attenuated", attenuated_groups, weighted_groups))
    if amplified_groups:
        sentences.append(_weight_sentence("amplified", amplified_groups, weighted_groups))
    return "Weights: " + " ".join(sentences)


def _weight_sentence(
    verb: str, reweighted_groups: Sequence[GroupSummary], all_groups: Sequence[GroupSummary]
) -> str:
    """Say how many groups were attenuated or amplified, and how much their advantages counted.

    Args:
        verb: `attenuated` or `amplified`.
        reweighted_groups: the groups to which the verb applies.
        all_groups: all groups that were learned from and have a weight.
    """
    share = _percent(len(reweighted_groups) / len(all_groups))
    before = _share_of_sum(
        [group.advantage_sum_unweighted for group in reweighted_groups],
        [group.advantage_sum_unweighted for group in all_groups],
    )
    after = _share_of_sum(
        [group.advantage_sum_weighted for group in reweighted_groups],
        [group.advantage_sum_weighted for group in all_groups],
    )
    return (
        f"{len(reweighted_groups):,} of these groups ({share}) were {verb}. They held "
        f"{_percent(before)} of all |advantage| before the weights and {_percent(after)} after."
    )


def _share_of_sum(some_values: Sequence[float], all_values: Sequence[float]) -> float:
    """Return the sum of some values as a share of the sum of all; 0 where that is 0."""
    total = sum(all_values)
    return sum(some_values) / total if total else 0.0


def _lengths_sentence(groups: Sequence[GroupSummary]) -> str | None:
    """Say whether answers became longer or shorter from the first to the last fifth of the steps.

    Right and wrong answers are told apart where the run has a grader. Returns None where fewer than
    two steps are recorded, or where no kind of answer is in at least two groups of each fifth.
    """
    steps = sorted({group.step for group in groups})
    if len(steps) < 2:
        return None
    first_steps, last_steps = first_and_last_fifth(steps)
    first_groups = [group for group in groups if group.step <= first_steps[-1]]
    last_groups = [group for group in groups if group.step >= last_steps[0]]
    changes = []
    # Each kind once, though two verdicts have the same.
    kinds = dict.fromkeys([*_ANSWER_KIND_BY_VERDICT.values(), "answers"])
    for kind in kinds:
        first_lengths = _lengths_of_kind(first_groups, kind)
        last_lengths = _lengths_of_kind(last_groups, kind)
        # An interval needs two values on each side.
        if min(len(first_lengths), len(last_lengths)) > 1:
            changes.append(f"{kind} {_length_change(first_lengths, last_lengths)}")
    if not changes:
        return None
    return f"Length: from the first to the last fifth of the steps, {' and '.join(changes)}."


def _lengths_of_kind(groups: Sequence[GroupSummary], kind: str) -> list[float]:
    """Return the mean length of a kind of answer in each group that has such an answer."""
    return [group.length_by_kind[kind] for group in groups if kind in group.length_by_kind]


def _length_change(first_lengths: Sequence[float], last_lengths: Sequence[float]) -> str:
    """Say whether lengths became longer or shorter, with their means in tokens.

    They became longer if the 95 % interval of the difference (by Welch's t) lies above 0, and
    shorter if it lies below 0. Otherwise the change may be chance. There is no interval where the
    lengths of each fifth are equal.

    Each argument has the mean length of each group. An example of the text is `became longer
    (210 → 260 tokens)`.
    """
    first_mean = fmean(first_lengths)
    last_mean = fmean(last_lengths)
    means = f"{first_mean:.0f} → {last_mean:.0f} tokens"
    interval = welch_interval(first_lengths, last_lengths)
    if interval is None:
        if first_mean == last_mean:
            return f"kept their length ({means})"
        return f"changed ({means}, without an interval, as the groups of a fifth are all alike)"
    low, high = interval
    if low > 0:
        return f"became longer ({means})"
    if high < 0:
        return f"became shorter ({means})"
    return f"kept their length ({means}, within noise)"


def _percent(share: float) -> str:
    """Return a share between 0 and 1 as text: `25 %`."""
    return f"{100 * share:.0f} %"
