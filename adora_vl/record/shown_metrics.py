"""The metrics of a run that are shown: in its progress line, its summary, its model card, its page.

Each has one title and one way to be written, wherever it stands. Which of them a place shows, and
in which order, is a tuple of their keys.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Share of rollouts whose reward is above adora_correct_above
PASS_RATE_KEY = "adora/pass_rate"  # noqa: S105  # no password
# Share of rollouts whose answer is right
ACCURACY_KEY = "grading/correct"
# Share of groups that the run's methods can learn from, of those that have a reward
SIGNAL_SHARE_KEY = "adora/signal_share"
# Share of rollouts without a reward
MISSING_REWARD_KEY = "rewards/missing"

# Metrics that are the largest value since the line before; of others a line has the mean
LARGEST_VALUE_KEYS = frozenset({"adora/ratio_max", "adora/staleness_max"})


def keep_largest(values: list[float], value: float) -> None:
    """Replace a metric's values since the last log line by the largest of them and a new value.

    The log takes the mean of the values. In a mean, the single large ratio for which a step was
    skipped would hardly be seen. So only the largest value is kept. For example, [2.0] and 5.0
    become [5.0]. NaN is kept only if there is no number.
    """
    numbers = [number for number in (*values, value) if not math.isnan(number)]
    values[:] = [max(numbers, default=math.nan)]


MetricFormat = Literal["number", "share", "tokens", "nats", "seconds"]
# How a value is written in a table, and in a line, where room is scarce.
_TABLE_TEMPLATE_BY_FORMAT: dict[MetricFormat, str] = {
    "number": "{:.3f}",
    "share": "{:.1%}",
    "tokens": "{:.1f}",
    "nats": "{:.2g}",
    "seconds": "{:.2f}",
}
_LINE_TEMPLATE_BY_FORMAT: dict[MetricFormat, str] = {
    "number": "{:.3f}",
    "share": "{:.0%}",
    "tokens": "{:.0f}",
    "nats": "{:.1g}",
    "seconds": "{:.1f}",
}


@dataclass(frozen=True, kw_only=True)
class LoggedMetric:
    """A metric of the log.

    `key`: its name there. `title`: in tables. `format`: how a value is written.
    `short_title`: its title in the progress line; empty where `title` stands there too.
    """

    key: str
    title: str
    format: MetricFormat = "number"
    short_title: str = ""

    def format_for_table(self, value: float) -> str:
        """Return the value as text for a table."""
        return _TABLE_TEMPLATE_BY_FORMAT[self.format].format(value)

    def format_for_line(self, value: float) -> str:
        """Return the short title and the value as text for the progress line."""
        number = _LINE_TEMPLATE_BY_FORMAT[self.format].format(value)
        # A share is rounded to whole per cents. A small one would become 0 %, so it gets a decimal.
        if self.format == "share" and 0 < value < 0.1:
            number = self.format_for_table(value)
        return f"{self.short_title or self.title} {number}"


METRIC_BY_KEY: Mapping[str, LoggedMetric] = {
    metric.key: metric
    for metric in (
        LoggedMetric(key="reward", title="reward"),
        LoggedMetric(key=MISSING_REWARD_KEY, title="without reward", format="share"),
        LoggedMetric(key=PASS_RATE_KEY, title="pass rate", format="share", short_title="pass"),
        LoggedMetric(key=ACCURACY_KEY, title="accuracy", format="share"),
        LoggedMetric(key="grading/worked", title="answers with a solution", format="share"),
        LoggedMetric(key="steps/new", title="answers with a true step", format="share"),
        LoggedMetric(key="steps/lucky", title="right by luck", format="share"),
        LoggedMetric(key="adora/tds_share", title="TDS share", format="share", short_title="TDS"),
        LoggedMetric(key="adora/weight_mean", title="mean weight"),
        LoggedMetric(key="completions/mean_length", title="length", format="tokens"),
        LoggedMetric(key="adora/length_correct", title="length, right", format="tokens"),
        LoggedMetric(key="adora/length_wrong", title="length, wrong", format="tokens"),
        LoggedMetric(key="entropy", title="entropy"),
        LoggedMetric(key="loss", title="loss"),
        LoggedMetric(key="kl", title="KL"),
        LoggedMetric(key="grad_norm", title="gradient norm"),
        LoggedMetric(
            key="adora/drift", title="engine drift, nats", format="nats", short_title="drift"
        ),
        LoggedMetric(key="adora/staleness", title="age in generations"),
        LoggedMetric(key="tools/call_frequency", title="calls a rollout"),
        LoggedMetric(key="tools/failure_frequency", title="failed calls", format="share"),
        LoggedMetric(key="adora/unanswered_calls", title="unanswered calls", format="share"),
        LoggedMetric(key="adora/tool_gain", title="gain of a call"),
        LoggedMetric(key="adora/tools_s", title="seconds in tools", format="seconds"),
        LoggedMetric(key="adora/trainer_waited_s", title="trainer waited", format="seconds"),
        LoggedMetric(key="adora/servers_waited_s", title="servers waited", format="seconds"),
        LoggedMetric(key="step_time", title="seconds per step", format="seconds"),
    )
}
# The line that is printed for each log entry.
PROGRESS_LINE_KEYS = (
    "reward",
    MISSING_REWARD_KEY,
    PASS_RATE_KEY,
    ACCURACY_KEY,
    "adora/tds_share",
    "completions/mean_length",
    "adora/drift",
)
# The table of a run's first and last steps, in its summary, its model card and on its page.
SUMMARY_KEYS = (
    "reward",
    PASS_RATE_KEY,
    ACCURACY_KEY,
    "adora/tds_share",
    "adora/weight_mean",
    "adora/length_correct",
    "adora/length_wrong",
    "entropy",
    "kl",
    "grad_norm",
    "adora/drift",
    "step_time",
)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of the page of a run, over its steps."""

    title: str
    lines: tuple[tuple[str, str], ...]
    """For each line of the chart the key of its metric in the log, and its label in the legend. The
    label is empty where the chart has one line only."""
    begins_at_zero: bool = False
    """Whether the scale begins at 0."""
    is_optional: bool = False
    """Whether most runs do not log it: the page leaves out an empty chart of this sort, and says of
    any other that it was not logged."""


CHARTS = (
    Chart(title="Reward", lines=(("reward", ""),), begins_at_zero=True),
    Chart(title="Share of answers with a step-by-step solution", lines=(("grading/worked", ""),)),
    Chart(
        title="Share of answers with a true step, and of right ones by luck",
        lines=(("steps/new", "true and new"), ("steps/lucky", "right by luck")),
        is_optional=True,
    ),
    Chart(title="Pass rate", lines=((PASS_RATE_KEY, ""),)),
    Chart(title="Accuracy in training", lines=((ACCURACY_KEY, ""),)),
    Chart(
        title="Length in tokens, right and wrong",
        lines=(("adora/length_correct", "right"), ("adora/length_wrong", "wrong")),
    ),
    Chart(title="Share of TDS prompts", lines=(("adora/tds_share", ""),)),
    Chart(title="Entropy, nats per token", lines=(("entropy", ""),), begins_at_zero=True),
    Chart(title="Loss", lines=(("loss", ""),)),
    Chart(title="KL to the reference", lines=(("kl", ""),), begins_at_zero=True),
    Chart(title="Gradient norm", lines=(("grad_norm", ""),), begins_at_zero=True),
    Chart(
        title="Drift of engine and trainer, nats per token",
        lines=(("adora/drift", ""),),
        begins_at_zero=True,
    ),
    Chart(
        title="Age of the rollouts in generations",
        lines=(("adora/staleness", ""),),
        begins_at_zero=True,
        is_optional=True,
    ),
    Chart(
        title="Calls of tools a rollout",
        lines=(("tools/call_frequency", ""),),
        begins_at_zero=True,
        is_optional=True,
    ),
    Chart(
        title="Share of calls that fail, and of rollouts that end unanswered",
        lines=(
            ("tools/failure_frequency", "failed"),
            ("adora/unanswered_calls", "unanswered"),
        ),
        is_optional=True,
    ),
    Chart(
        title="Reward with a call minus without, in one group",
        lines=(("adora/tool_gain", ""),),
        is_optional=True,
    ),
    Chart(
        title="Seconds in tools",
        lines=(("adora/tools_s", ""),),
        begins_at_zero=True,
        is_optional=True,
    ),
    Chart(
        title="Seconds waited",
        lines=(
            ("adora/trainer_waited_s", "by the trainer"),
            ("adora/servers_waited_s", "by the servers"),
        ),
        begins_at_zero=True,
        is_optional=True,
    ),
)


def page_metrics() -> dict[str, Any]:
    """Return the charts and table rows that the page of a run shows, as its JavaScript reads them.

    The entry `share` of a chart or row says whether its values are shares, shown in per cent.
    """
    charts = []
    for chart in CHARTS:
        # All lines of a chart have the same format, so the first one decides.
        first_key, _ = chart.lines[0]
        charts.append(
            {
                "title": chart.title,
                "keys": chart.lines,
                "zero": chart.begins_at_zero,
                "optional": chart.is_optional,
                "share": METRIC_BY_KEY[first_key].format == "share",
            }
        )
    rows = [
        {
            "key": key,
            "title": METRIC_BY_KEY[key].title,
            "share": METRIC_BY_KEY[key].format == "share",
        }
        for key in SUMMARY_KEYS
    ]
    return {"charts": charts, "rows": rows}
