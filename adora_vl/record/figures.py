"""The figures that a run shows in words: in its progress line, its summary and its model card."""

from dataclasses import dataclass

# Share of rollouts whose reward is above adora_correct_above
PASS = "adora/pass_rate"  # noqa: S105  # no password
# Share of rollouts whose answer is right
ACCURACY = "grading/correct"
# Share of rollouts without a reward
MISSING = "rewards/missing"


@dataclass(frozen=True, kw_only=True)
class LoggedFigure:
    """A figure of the log, and how it is shown; an empty title leaves it out."""

    # its name in the log
    key: str
    # in the table of the summary and of the model card
    title: str = ""
    format: str = "{:.3f}"
    # in the progress line, where room is scarce
    line_title: str = ""
    line_format: str = "{:.0%}"


# In the order in which they are shown
FIGURES = (
    LoggedFigure(key="reward", title="reward", line_title="reward", line_format="{:.3f}"),
    LoggedFigure(key=MISSING, line_title="without reward", line_format="{:.1%}"),
    LoggedFigure(key=PASS, title="pass rate", line_title="pass"),
    LoggedFigure(key=ACCURACY, title="accuracy", line_title="accuracy"),
    LoggedFigure(key="adora/tds_share", title="TDS share", line_title="TDS"),
    LoggedFigure(key="adora/weight_mean", title="mean weight"),
    LoggedFigure(key="completions/mean_length", line_title="length", line_format="{:.0f}"),
    LoggedFigure(key="adora/length_correct", title="length, correct", format="{:.1f}"),
    LoggedFigure(key="adora/length_wrong", title="length, wrong", format="{:.1f}"),
    LoggedFigure(key="entropy", title="entropy"),
    LoggedFigure(
        key="adora/drift",
        title="engine drift, nats",
        format="{:.2g}",
        line_title="drift",
        line_format="{:.1g}",
    ),
    LoggedFigure(key="step_time", title="seconds per step", format="{:.2f}"),
)
