"""Each figure has one title and one form, in the progress line, the summary, the card and the page."""

from adora_vl.record.figures import CHARTS, FIGURES, MISSING, PASS, PROGRESS, SUMMARY, for_page


def test_every_place_shows_figures_of_the_one_table():
    charted = [key for chart in CHARTS for key, _ in chart.series]
    assert {*PROGRESS, *SUMMARY, *charted} <= FIGURES.keys()
    assert len(charted) == len(set(charted)), "a figure stands in one chart"
    titles = [figure.title for figure in FIGURES.values()]
    assert len(titles) == len(set(titles))


def test_a_chart_has_shares_alone_or_none():
    """Its scale is from 0 to 100 %, or that of its numbers."""
    for chart in CHARTS:
        formats = {FIGURES[key].format == "share" for key, _ in chart.series}
        assert len(formats) == 1, chart.title


def test_a_share_is_a_percentage_in_a_table_a_line_and_on_the_page():
    assert FIGURES[PASS].in_table(0.375) == "37.5%"
    assert FIGURES[PASS].in_line(0.375) == "pass 38%"
    assert FIGURES[MISSING].in_line(0.002) == "without reward 0.2%"
    page = for_page()
    (row,) = [row for row in page["rows"] if row["key"] == PASS]
    (chart,) = [chart for chart in page["charts"] if chart["keys"] == ((PASS, ""),)]
    assert row["share"]
    assert chart["share"]
