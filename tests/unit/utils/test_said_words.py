"""What the commands print: one thing is singular, and a long value is cut."""

from hypothesis import given
from hypothesis import strategies as st

from adora_vl.utils.cli import amount, quantile, shown


@given(st.integers(0, 10**9))
def test_an_amount_is_singular_for_one_alone(count: int) -> None:
    assert amount(count, "row") == (f"{count} row" if count == 1 else f"{count} rows")


def test_a_quantile_is_one_of_the_values() -> None:
    assert [quantile([5, 1, 4, 2, 3], share) for share in (0.01, 0.5, 0.95, 1.0)] == [1, 3, 5, 5]
    assert quantile(range(1, 101), 0.95) == 95
    assert quantile([7], 0.95) == 7


def test_a_value_is_shown_in_one_line_and_cut() -> None:
    class Long:
        def __repr__(self) -> str:
            return "a\n" * 50

    assert [shown(None), shown("5"), shown(5)] == ["null", "'5'", "5"]
    assert shown("x" * 100) == "'" + "x" * 59 + "..."
    assert shown(Long()).startswith("a a a")
    assert len(shown(Long())) == 63
