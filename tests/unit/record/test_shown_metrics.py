"""Each metric has one title and one form, in the progress line, summary, card and page."""

import math

from adora_vl.record.shown_metrics import (
    CHARTS,
    METRIC_BY_KEY,
    MISSING_REWARD_KEY,
    PASS_RATE_KEY,
    PROGRESS_LINE_KEYS,
    SUMMARY_KEYS,
    keep_largest,
    page_metrics,
)


def test_every_place_shows_metrics_of_the_one_table():
    """Each metric of progress line, summary and charts is in `METRIC_BY_KEY`, with a title."""
    charted_keys: list[str] = []
    for chart in CHARTS:
        charted_keys += [key for key, _ in chart.lines]
    shown_keys = {*PROGRESS_LINE_KEYS, *SUMMARY_KEYS, *charted_keys}
    titles = [metric.title for metric in METRIC_BY_KEY.values()]
    assert shown_keys <= METRIC_BY_KEY.keys()
    assert len(charted_keys) == len(set(charted_keys)), "a metric stands in one chart"
    assert len(titles) == len(set(titles)), "no two metrics have the same title"


def test_a_chart_has_shares_alone_or_none():
    """Its scale is from 0 to 100 %, or that of its numbers."""
    for chart in CHARTS:
        formats = [METRIC_BY_KEY[key].format for key, _ in chart.lines]
        share_count = formats.count("share")
        assert share_count in (0, len(formats)), chart.title


def test_a_share_is_a_percentage_in_a_table_a_line_and_on_the_page():
    """The pass rate stands in each of the three, and has one row and one chart of the page."""
    pass_rate = METRIC_BY_KEY[PASS_RATE_KEY]
    missing_share = METRIC_BY_KEY[MISSING_REWARD_KEY]
    assert pass_rate.format_for_table(0.375) == "37.5%"
    assert pass_rate.format_for_line(0.375) == "pass 38%"
    assert missing_share.format_for_line(0.002) == "without reward 0.2%"

    page = page_metrics()
    rows = [row for row in page["rows"] if row["key"] == PASS_RATE_KEY]
    charts = [chart for chart in page["charts"] if chart["keys"] == ((PASS_RATE_KEY, ""),)]
    assert len(rows) == 1
    assert len(charts) == 1
    assert rows[0]["share"]
    assert charts[0]["share"]


def test_the_largest_value_since_the_last_line_is_not_averaged_away():
    values: list[float] = []
    for value in (1.0, 60.0, 1.5):
        keep_largest(values, value)
    assert values == [60.0]


def test_a_value_that_is_no_number_hides_no_largest_value():
    """A comparison with NaN is false, so NaN would stay, or hide a larger value."""
    values: list[float] = []
    keep_largest(values, math.nan)
    assert math.isnan(values[0])
    for value in (1.5, math.nan, 1.0):
        keep_largest(values, value)
    assert values == [1.5]
    values_of_older_checkpoint = [1.2, 40.0]
    keep_largest(values_of_older_checkpoint, 3.0)
    assert values_of_older_checkpoint == [40.0]
