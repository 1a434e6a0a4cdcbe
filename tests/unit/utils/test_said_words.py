"""What the commands print: one thing is singular, and a long value is cut."""

from hypothesis import given
from hypothesis import strategies as st

from adora_vl.utils.cli import pluralize, quantile, short_repr


@given(st.integers(0, 10**9))
def test_an_amount_is_singular_for_one_alone(count: int) -> None:
    """1 row, and 0 or 2 rows."""
    text = pluralize(count, "row")

    noun = "row" if count == 1 else "rows"
    assert text == f"{count} {noun}"


def test_a_quantile_is_one_of_the_values() -> None:
    """The quantile q of n values is the one at place q · n, rounded up."""
    values = [5, 1, 4, 2, 3]
    assert quantile(values, 0.01) == 1
    assert quantile(values, 0.5) == 3
    assert quantile(values, 0.95) == 5
    assert quantile(values, 1.0) == 5
    assert quantile(range(1, 101), 0.95) == 95
    assert quantile([7], 0.95) == 7


def test_a_value_is_shown_in_one_line_and_cut() -> None:
    """A value is shown as in YAML, or in Python's way, in 60 characters and three dots."""

    class LongRepresentation:
        """An object whose `repr` has 50 lines."""

        def __repr__(self) -> str:
            return "a\n" * 50

    assert short_repr(None) == "null"
    assert short_repr("5") == "'5'"
    assert short_repr(5) == "5"
    long_text = "x" * 100
    assert short_repr(long_text) == "'" + "x" * 59 + "..."
    shown_object = short_repr(LongRepresentation())
    assert shown_object.startswith("a a a")
    assert len(shown_object) == 63
