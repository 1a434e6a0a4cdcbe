r"""Properties of the grader over drawn golds, spellings and garbage.

Derandomised: the same examples in every run.
"""

import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adora_vl.rewards import canonical_gold, grade, verify_gold
from adora_vl.rewards.grade import VERDICTS
from adora_vl.synthetic.drawing import PLAIN_STYLE
from adora_vl.synthetic.families import PLAIN_FAMILY_BY_NAME

pytestmark = pytest.mark.slow

FEWER_EXAMPLES = settings(
    derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.too_slow]
)
_INTEGERS = st.integers(2, 400)
_RADICANDS = st.integers(2, 300)


def _reference_numbers() -> st.SearchStrategy[str]:
    r"""Golds as the generator and Geometry3K write them, spaces between all tokens included."""
    forms = [
        st.integers(-500, 5000).map(str),
        st.builds("{}.{}".format, st.integers(0, 400), st.integers(1, 99)),
        st.builds(r"\frac {{ {} }} {{ {} }}".format, _INTEGERS, _INTEGERS),
        st.builds(r"- \frac {{ {} }} {{ {} }}".format, _INTEGERS, _INTEGERS),
        st.builds(r"\sqrt {{ {} }}".format, _RADICANDS),
        st.builds(r"{} \sqrt {{ {} }}".format, _INTEGERS, _RADICANDS),
        st.builds(
            r"\frac {{ {} \sqrt {{ {} }} }} {{ {} }}".format, _INTEGERS, _RADICANDS, _INTEGERS
        ),
        st.builds(r"{} \pi".format, _INTEGERS),
        st.builds(r"\frac {{ {} \pi }} {{ {} }}".format, _INTEGERS, _INTEGERS),
        st.builds(r"{} + {} \sqrt {{ {} }}".format, _INTEGERS, _INTEGERS, _RADICANDS),
        st.builds(r"{} \pi - {}".format, _INTEGERS, _INTEGERS),
        st.builds(r"{} - {} \pi".format, _INTEGERS, _INTEGERS),
    ]
    return st.one_of(forms)


REFERENCE_NUMBERS = _reference_numbers()
_TEMPLATES_AROUND_ANSWER = [
    "{}",
    "${}$",
    " {} ",
    "{}.",
    r"\displaystyle {}",
    "x = {}",
    "AB = {}",
    r"{}^\circ",
    r"{}\text{{ cm}}",
    "{} units",
]
_SAME_VALUE_REWRITINGS = [
    lambda text: text,
    lambda text: text.replace(" ", ""),
    lambda text: text.replace(r"\frac", r"\dfrac"),
    lambda text: text.replace(r"\frac", r"\tfrac"),
    lambda text: text.replace(r"\pi", "π"),
    lambda text: text.replace("-", "\u2212"),
    lambda text: re.sub(r"\\sqrt { (\d+) }", r"√\1", text),
    lambda text: re.sub(r"^\\frac { (\d+) } { (\d+) }$", r"\1/\2", text),
    lambda text: re.sub(r"(\d) \\(sqrt|pi)", r"\1 \\cdot \\\2", text),
    lambda text: re.sub(r"(\d) \\(sqrt|pi)", r"\1 \\times \\\2", text),
    lambda text: re.sub(r"\b(\d)(\d{3})\b(?!\.)", r"\1,\2", text) if "." not in text else text,
]


def in_box(answer: str) -> str:
    """Return a response whose box holds `answer`."""
    return rf"So \boxed{{{answer}}}"


@FEWER_EXAMPLES
@given(
    REFERENCE_NUMBERS,
    st.sampled_from(_TEMPLATES_AROUND_ANSWER),
    st.sampled_from(_SAME_VALUE_REWRITINGS),
)
def test_a_gold_is_correct_against_itself_in_every_spelling(
    gold: str, template: str, rewrite: object
) -> None:
    spelled = template.format(rewrite(gold))  # type: ignore[operator]
    assert verify_gold(gold) is None
    for against in (gold, canonical_gold(gold)):
        assert grade(in_box(spelled), against).verdict == "correct", (spelled, against)


def test_every_gold_of_the_generator_is_correct_in_every_spelling() -> None:
    """The answer of a drawn problem is right in every spelling and inside every template.

    There are 20 problems of each family of the synthetic data, 64 pixels wide and of level 1.
    """
    for draw in PLAIN_FAMILY_BY_NAME.values():
        for seed in range(20):
            gold = draw(random.Random(seed), 64, 1, PLAIN_STYLE).answer
            assert verify_gold(gold) is None
            for template in _TEMPLATES_AROUND_ANSWER:
                for rewrite in _SAME_VALUE_REWRITINGS:
                    spelled = template.format(rewrite(gold))
                    assert grade(in_box(spelled), canonical_gold(gold)).verdict == "correct", (
                        spelled,
                        gold,
                    )


@FEWER_EXAMPLES
@given(REFERENCE_NUMBERS, REFERENCE_NUMBERS)
def test_equality_of_numbers_is_symmetric(answer: str, reference: str) -> None:
    """Two numbers in closed form get the same verdict, whichever of them is the reference.

    Rounded values, letters and sums such as 1 + 2, for which that does not hold, are not drawn.
    """
    assert grade(in_box(answer), reference).verdict == grade(in_box(reference), answer).verdict


@FEWER_EXAMPLES
@given(
    REFERENCE_NUMBERS,
    st.sampled_from(
        [
            r"{} + 1",
            r"2 ( {} )",
            r"{} \pm 1",
            r"{} , {}",
            r"{} \%",
            r"{} or 7",
            r"[ {} , {} ]",
            "x > {}",
            "{} x",
        ]
    ),
)
def test_a_gold_with_something_added_is_not_correct(gold: str, addition: str) -> None:
    if gold != "0":
        assert grade(in_box(addition.replace("{}", gold)), gold).verdict != "correct"


_TEXT_PIECES = st.sampled_from(
    [
        *"0123456789xyABC.,;:+-*/^_=<>(){}[]|!%$& \t\n'\"#~`",
        *(
            r"\boxed{",
            r"\fbox{",
            r"\frac{",
            r"\frac",
            r"\sqrt{",
            r"\sqrt[3]{",
            r"\sqrt",
            r"\pi",
            r"\text{",
            r"\left(",
            "}{",
            "}}",
        ),
        *(
            r"^\circ",
            r"^{",
            r"\sin",
            r"\tan^{-1}",
            r"\log_",
            r"\ln",
            r"\cdot",
            r"\div",
            r"\pm",
            r"\infty",
            "or",
            "π",
            "√",
            "²",
        ),
        *(
            "\u2212",
            "\u200b",
            "\u202e",
            "\x00",
            "\ud800",
            "９",
            "nan",
            "inf",
            "10^{10}",
            "9^{9^{9}}",
            r"\overline",
            r"\angle",
        ),
    ]
)
GARBAGE_TEXTS = st.one_of(
    st.text(max_size=300),
    st.binary(max_size=300).map(lambda raw: raw.decode("latin-1")),
    st.lists(_TEXT_PIECES, max_size=60).map("".join),
)


@settings(FEWER_EXAMPLES, max_examples=300)
@given(
    GARBAGE_TEXTS, st.sampled_from(["12", r"5 \sqrt { 3 }", "x + 3", "C", "rhombus"]), st.booleans()
)
def test_garbage_raises_nothing_and_has_a_verdict(garbage: str, gold: str, in_a_box: bool) -> None:
    graded = grade(
        in_box(garbage) if in_a_box else garbage, gold, choices=["1", "2", "3"], rounding=True
    )
    assert graded.verdict in VERDICTS


@FEWER_EXAMPLES
@given(GARBAGE_TEXTS)
def test_a_garbage_gold_raises_nothing(garbage: str) -> None:
    assert grade(in_box("137.25"), garbage).verdict in VERDICTS
    verify_gold(garbage)


@FEWER_EXAMPLES
@given(REFERENCE_NUMBERS, st.data())
def test_a_mutated_gold_is_graded_without_harm(gold: str, data: st.DataObject) -> None:
    """The answer is the gold, with a piece of text put in and up to three characters cut out."""
    position = data.draw(st.integers(0, len(gold)))
    piece = data.draw(_TEXT_PIECES)
    cut = data.draw(st.integers(0, 3))
    assert grade(in_box(gold[:position] + piece + gold[position + cut :]), gold).verdict in VERDICTS
