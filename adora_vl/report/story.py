"""What a run did and why, in a few sentences from the record of its rollouts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from statistics import fmean
from typing import Any

from adora_vl.evals.scoring.statistics import welch
from adora_vl.record.rollouts import Part, read_part
from adora_vl.utils.cli import amount

_COLUMNS = [
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
# Verdicts by which answers are told apart; a run without a grader has none of them
_KINDS = {"correct": "right answers", "wrong": "wrong ones", "unparseable": "wrong ones"}


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """What the sentences need of one recorded group."""

    step: int
    weight: float | None
    """ADORA's weight of the group; None where the run gives none."""
    tds: bool
    """Whether ADORA's criteria mark the group."""
    has_signal: bool
    """Whether the rewards differ, so that there is something to learn."""
    advantage_before: float
    """The sum of |advantage| before the weight."""
    advantage_after: float
    """The sum of |advantage| as the loss gets it."""
    lengths: Mapping[str, float]
    """The mean length in tokens by kind of answer, for those kinds that the group has."""


def story_of(record: Sequence[Part]) -> list[str]:
    """Return the sentences about a run: its signal, its weights, and its lengths.

    Args:
        record: all files of the record, of all steps, also of those that the page leaves out.
    """
    groups = [group for part in record for group in _groups_of(part)]
    if not groups:
        return []
    sentences = [_signal_sentence(groups), _weights_sentences(groups), _lengths_sentence(groups)]
    return [sentence for sentence in sentences if sentence]


def _groups_of(part: Part) -> Iterable[GroupFacts]:
    """Yield the facts of each group in a file of the record, in its order."""
    rows = read_part(part, _COLUMNS).to_pylist()
    # the rows of a group follow one another
    for _, group_rows in groupby(rows, key=itemgetter("step", "group")):
        yield _facts(list(group_rows))


def _facts(rows: Sequence[Mapping[str, Any]]) -> GroupFacts:
    """Return the facts of one group from the rows of its rollouts.

    Step, weight and mark are the same in all rows of a group, and are read from the first.
    """
    first_row = rows[0]
    # A rollout whose reward is missing says nothing of whether the rewards differ.
    rewards = {row["reward"] for row in rows if row["reward"] is not None}
    lengths_by_kind: dict[str, list[float]] = {}
    for row in rows:
        kind = _KINDS.get(row["verdict"], "answers")
        lengths_by_kind.setdefault(kind, []).append(row["length"])
    return GroupFacts(
        step=first_row["step"],
        weight=first_row["weight"],
        tds=bool(first_row["tds"]),
        has_signal=len(rewards) > 1,
        advantage_before=sum(abs(row["advantage_raw"] or 0) for row in rows),
        advantage_after=sum(abs(row["advantage"] or 0) for row in rows),
        lengths={kind: fmean(lengths) for kind, lengths in lengths_by_kind.items()},
    )


def _signal_sentence(groups: Sequence[GroupFacts]) -> str:
    """Return the sentence about how many groups have rewards that differ."""
    with_signal = sum(group.has_signal for group in groups)
    total = amount(len(groups), "recorded group")
    if not with_signal:
        return f"Signal: none of {total} has rewards that differ, so nothing was learned from them."
    share = _percent(with_signal / len(groups))
    return (
        f"Signal: {with_signal:,} of {total} ({share}) have rewards that differ, "
        "and only these are learned from."
    )


def _weights_sentences(groups: Sequence[GroupFacts]) -> str | None:
    """Return what the weights did to the groups with signal; None where none has a weight."""
    weighted = [group for group in groups if group.has_signal and group.weight is not None]
    if not weighted:
        return None
    attenuated = [group for group in weighted if group.weight is not None and group.weight < 1]
    amplified = [group for group in weighted if group.weight is not None and group.weight > 1]
    if not attenuated and not amplified:
        marked = sum(group.tds for group in weighted)
        share = _percent(marked / len(weighted))
        return (
            f"Weights: all are 1. ADORA's criteria would mark {marked:,} of these groups ({share})."
        )
    sentences = []
    for name, changed in (("attenuated", attenuated), ("amplified", amplified)):
        if changed:
            sentences.append(_changed_weight_sentence(name, changed, weighted))
    return "Weights: " + " ".join(sentences)


def _changed_weight_sentence(
    name: str, changed: Sequence[GroupFacts], weighted: Sequence[GroupFacts]
) -> str:
    """Return how many groups were attenuated or amplified, and their share of |advantage|.

    Args:
        name: What was done to them: attenuated or amplified.
        changed: The groups to which it was done.
        weighted: All groups with signal and a weight.
    """
    share = _percent(len(changed) / len(weighted))
    before = _share_of(changed, weighted, "advantage_before")
    after = _share_of(changed, weighted, "advantage_after")
    return (
        f"{len(changed):,} of these groups ({share}) were {name}. They held {_percent(before)} of "
        f"all |advantage| before the weights and {_percent(after)} after."
    )


def _share_of(changed: Sequence[GroupFacts], weighted: Sequence[GroupFacts], field: str) -> float:
    """Return the sum of a field over `changed` as a share of that over `weighted`, else 0."""
    total = sum(getattr(group, field) for group in weighted)
    part = sum(getattr(group, field) for group in changed)
    return part / total if total else 0.0


def _lengths_sentence(groups: Sequence[GroupFacts]) -> str | None:
    """Return what became longer or shorter from the first to the last fifth of the recorded steps.

    A change is one where the 95 % interval of the difference, over groups, leaves out 0. None
    where fewer than two steps are recorded, or no kind of answer is in two groups of both fifths.
    """
    steps = sorted({group.step for group in groups})
    if len(steps) < 2:
        return None
    steps_of_a_fifth = max(1, len(steps) // 5)
    last_early_step = steps[steps_of_a_fifth - 1]
    first_late_step = steps[-steps_of_a_fifth]
    early = [group for group in groups if group.step <= last_early_step]
    late = [group for group in groups if group.step >= first_late_step]
    changes = []
    for kind in dict.fromkeys([*_KINDS.values(), "answers"]):
        before = [group.lengths[kind] for group in early if kind in group.lengths]
        after = [group.lengths[kind] for group in late if kind in group.lengths]
        # An interval needs two values on each side.
        if min(len(before), len(after)) > 1:
            changes.append(f"{kind} {_length_change(before, after)}")
    if not changes:
        return None
    return f"Length: from the first to the last fifth of the steps, {' and '.join(changes)}."


def _length_change(before: Sequence[float], after: Sequence[float]) -> str:
    """Return how mean lengths of groups changed, in words and tokens, by Welch's interval."""
    low, high = welch(before, after)
    arrow = f"({fmean(before):.0f} → {fmean(after):.0f} tokens"
    if low > 0:
        return f"became longer {arrow})"
    if high < 0:
        return f"became shorter {arrow})"
    return f"kept their length {arrow}, within noise)"


def _percent(share: float) -> str:
    """Return a share in percent: `25 %`."""
    return f"{100 * share:.0f} %"
