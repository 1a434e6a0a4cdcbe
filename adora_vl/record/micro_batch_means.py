"""Joins the metrics of micro-batches, as if all of their rollouts had shared one."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from adora_vl.config import AdoraGRPOConfig
from adora_vl.training.micro_batches import LOSSES_WITH_ROW_MEAN
from adora_vl.types import Batch

# What TRL's loss logs of a micro-batch as a mean over the tokens that it counts.
_MEANS_OVER_TOKENS = ("entropy", "kl")
# The same, but with a ratio for each rollout (`importance_sampling_level: sequence`) a mean over
# rollouts.
_RATIO_MEANS = (
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "cispo_clip_ratio",
)
_MEANS_OVER_ROLLOUTS = ("vespo/phi_seq_mean",)
# The smallest and the largest share of a rollout's tokens that are clipped.
_EXTREME_CLIP_SHARES = ("clip_ratio/low_min", "clip_ratio/high_max")
# A mean over rollouts or tokens, as the loss is.
_POLICY_LOSS = "policy_loss"


class _WeightedValue(NamedTuple):
    """A metric of some of the rollouts."""

    value: float
    weight: float  # the number of tokens or rollouts that were counted


class MicroBatchMeans:
    """Combines the metrics of the micro-batches of an optimizer step into one value each.

    TRL logs the mean over its micro-batches, which have equally many rollouts of any length. Ours
    have unequal numbers, and rollouts of similar lengths share one. In the mean over them a token
    of a short answer would weigh many times as much as one of a long answer. So a metric gets one
    value for the step, in which all tokens weigh the same.
    """

    def __init__(self, config: AdoraGRPOConfig, metrics: Mapping[str, list[float]]) -> None:
        """Begin without any metric.

        Args:
            config: the run's config. It decides which metrics are means over rollouts.
            metrics: TRL's `_metrics` of a training: the values of each metric since the last line
                of the log.
        """
        self._metrics = metrics
        self._weighted_values_by_name: dict[str, list[_WeightedValue]] = {}
        # Names of metrics that weigh a micro-batch by its rollouts. All others weigh it by the
        # tokens that the loss counts.
        self._names_weighed_by_rollouts = set(_MEANS_OVER_ROLLOUTS)
        if config.importance_sampling_level == "sequence":
            self._names_weighed_by_rollouts.update(_RATIO_MEANS)
        if config.loss_type in LOSSES_WITH_ROW_MEAN:
            self._names_weighed_by_rollouts.add(_POLICY_LOSS)

    def begin(self) -> None:
        """Begin anew: what is added from here on is of other rollouts, or of another step."""
        self._weighted_values_by_name = {}

    def add(self, name: str, value: float, weight: float) -> None:
        """Add a metric of one part of the rollouts, and replace its value in the log.

        The new value is that of all parts since `begin`: their mean by weight, or the smallest or
        largest value where the name ends in `min` or `max`. For example, the value 1 of 30 tokens
        and the value 5 of 10 tokens become 2.

        Args:
            name: the metric's name in the log.
            value: the metric of this part, which is the same on every rank.
            weight: the number of tokens or rollouts of this part, over all ranks.
        """
        values = self._metrics[name]
        weighted_values = self._weighted_values_by_name.setdefault(name, [])
        # The log has one value for all of them so far, unless a line was written meanwhile.
        if weighted_values and values:
            values.pop()
        weighted_values.append(_WeightedValue(value=value, weight=weight))
        values.append(_combine(name, weighted_values))

    def snapshot(self) -> Callable[[], None]:
        """Return a function that undoes what is logged from here on, combined metrics too."""
        values_by_name = {name: [*values] for name, values in self._metrics.items()}
        weighted_values_by_name = {
            name: [*values] for name, values in self._weighted_values_by_name.items()
        }

        def restore() -> None:
            for name, values in self._metrics.items():
                values[:] = values_by_name.get(name, [])
            self._weighted_values_by_name = weighted_values_by_name

        return restore

    @contextmanager
    def combine_logged(self, micro_batch: Batch) -> Iterator[None]:
        """Combine metrics that the `with` block logs of a micro-batch with those of earlier ones.

        Inside the block TRL appends a value to each metric. After the block that value is taken out
        again, and `add` gets it with the number of its tokens or rollouts.
        """
        names = (
            *_MEANS_OVER_TOKENS,
            *_RATIO_MEANS,
            *_MEANS_OVER_ROLLOUTS,
            *_EXTREME_CLIP_SHARES,
            _POLICY_LOSS,
        )
        count_by_name = {name: len(self._metrics.get(name, ())) for name in names}
        yield
        row_count = len(micro_batch["completion_mask"])
        token_count = micro_batch["loss_tokens"]
        for name, count_before in count_by_name.items():
            if len(self._metrics.get(name, ())) > count_before:
                value = self._metrics[name].pop()
                is_weighed_by_rollouts = name in self._names_weighed_by_rollouts
                self.add(name, value, weight=row_count if is_weighed_by_rollouts else token_count)


def _combine(name: str, weighted_values: list[_WeightedValue]) -> float:
    """Return the metric of all rollouts from the metrics of parts of them.

    For example, the mean 1 of 30 tokens and the mean 5 of 10 tokens give 2.

    It is NaN where all weights are 0, and the log leaves NaN out. TRL's value for such a part is 0,
    which would lower the mean over the generations of a step.
    """
    # A value without weight may be NaN, a mean over nothing.
    counted_values = [weighted for weighted in weighted_values if weighted.weight]
    if not counted_values:
        return math.nan
    values = [weighted.value for weighted in counted_values]
    if name.endswith(("/min", "_min")):
        return min(values)
    if name.endswith(("/max", "_max")):
        return max(values)
    total_weight = sum(weighted.weight for weighted in counted_values)
    return sum(weighted.value * weighted.weight for weighted in counted_values) / total_weight
