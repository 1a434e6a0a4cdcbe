"""Arithmetic in facts and in responses is computed as Python computes it."""

import math
import random
import re

import numpy as np
import pytest

from adora_vl.geometry.claims import read_claims
from adora_vl.geometry.derivatives import Differentiated, apply_function
from adora_vl.geometry.quantities import Arithmetic, Constant, Equal, number_of_quantity
from adora_vl.geometry.reading import read_facts
from adora_vl.geometry.solve_form import solve_form
from adora_vl.geometry.text import read_form_from_text

TRIANGLE = read_facts(read_form_from_text("triangle ABC\nAB = 5\nBC = 6\nCA = 7\nfind angle BAC"))


def draw_expression(rng: random.Random, depth: int) -> str:
    """Return random arithmetic on whole numbers as people write it.

    It has signs, brackets, powers and products such as `3(4)`; `depth` bounds how deep it is
    nested.
    """
    if depth == 0 or rng.random() < 0.25:
        return str(rng.randint(1, 9))
    first = draw_expression(rng, depth - 1)
    second = draw_expression(rng, depth - 1)
    space = rng.choice(["", " "])
    candidates = [
        f"{first}{space}+{space}{second}",
        f"{first}{space}-{space}{second}",
        f"{first}{space}*{space}{second}",
        f"{first}{space}/{space}{second}",
        f"({first} - {second})",
        f"({first})^{rng.randint(1, 3)}",
        f"{rng.randint(2, 9)}({second})",
        f"(-{first})",
    ]
    return rng.choice(candidates)


def draw_problems(count: int) -> list[tuple[str, float]]:
    """Return random expressions with the values that Python gives them.

    Those that divide by zero are left out.
    """
    rng = random.Random(7)
    problems: list[tuple[str, float]] = []
    while len(problems) < count:
        expression = draw_expression(rng, depth=3)
        python_code = re.sub(r"(\d)\(", r"\1*(", expression).replace("^", "**")
        try:
            value = eval(python_code)  # noqa: S307  # of digits and signs that were drawn above
            problems.append((expression, float(value)))
        except ZeroDivisionError:
            continue
    return problems


@pytest.mark.slow
def test_a_length_in_words_is_what_python_computes() -> None:
    """A length has to be positive, and is kept between 1e-3 and 1e4."""
    problems = [(words, value) for words, value in draw_problems(400) if 1e-3 < value < 1e4]
    assert len(problems) > 150, "of the 400 that were drawn"
    for words, value in problems:
        result = solve_form(read_form_from_text(f"triangle ABC\nAB = {words}\nfind AB"))
        assert result.value == pytest.approx(value), words


def test_a_number_in_a_response_is_what_python_computes() -> None:
    """A claim AB = `words` has on its right side the value that Python computes."""
    claim_count = 0
    for words, value in draw_problems(1000):
        if abs(value) > 1e6:
            continue
        claims = read_claims(f"AB = {words}", TRIANGLE)
        # What the grammar does not read is said to be unread; it is never read as something else.
        if claims[0].kind == "unread":
            continue
        claim_count += 1
        relation = claims[0].alternatives[0][0]
        assert isinstance(relation, Equal)
        assert number_of_quantity(relation.right) == pytest.approx(value), words
    assert claim_count > 900, "most of the 1,000 are read"


@pytest.mark.parametrize(
    ("base", "exponent", "value"),
    [
        (2.0, 3.0, 8.0),
        (-2.0, 3.0, -8.0),
        (-2.0, 2.0, 4.0),
        # A search for a figure may pass through a negative length, whose root is that of its size.
        (-9.0, 0.5, 3.0),
        (4.0, -0.5, 0.5),
        (-2.0, -1.0, -0.5),
    ],
)
def test_a_power_has_the_derivative_of_its_values(
    base: float, exponent: float, value: float
) -> None:
    """A power has its value, the slope of a central difference, and a finite slope at 0."""
    power = Arithmetic(function="^", parts=(Constant(base), Constant(exponent)))

    def power_at(x: float) -> Differentiated:
        """Return the power of the base x with its derivative by x."""
        slopes = np.array([1.0])
        parts = [Differentiated(x, slopes), Differentiated(exponent, np.zeros(1))]
        return apply_function(power, parts)

    assert number_of_quantity(power) == pytest.approx(value)
    assert power_at(base).value == pytest.approx(value)
    step = 1e-6
    difference_quotient = (power_at(base + step).value - power_at(base - step).value) / (2 * step)
    assert power_at(base).slope[0] == pytest.approx(difference_quotient, rel=1e-6)
    if exponent > 0:
        assert math.isfinite(power_at(0.0).slope[0])
