"""What the commands print: one thing is singular, and a long value is cut."""

from hypothesis import given
from hypothesis import strategies as st

from adora_vl.utils.cli import amount, quantile, shown


@given(st.integers(0, 10**9))
def test_an_amount_is_singular_for_one_alone(count: int) -> None:
    words = amount(count, "row")

    noun = "row" if count == 1 else "rows"
    assert words == f"{count} {noun}"


def test_a_quantile_is_one_of_the_values() -> None:
    values = [5, 1, 4, 2, 3]
    assert quantile(values, 0.01) == 1
    assert quantile(values, 0.5) == 3
    assert quantile(values, 0.95) == 5
    assert quantile(values, 1.0) == 5
    assert quantile(range(1, 101), 0.95) == 95
    assert quantile([7], 0.95) == 7


def test_a_value_is_shown_in_one_line_and_cut() -> None:
    class Long:
        def __repr__(self) -> str:
            return "a\n" * 50

    assert shown(None) == "null"
    assert shown("5") == "'5'"
    assert shown(5) == "5"
    long_text = "x" * 100
    assert shown(long_text) == "'" + "x" * 59 + "..."
    shown_object = shown(Long())
    assert shown_object.startswith("a a a")
    assert len(shown_object) == 63
