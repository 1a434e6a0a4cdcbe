r"""Answers of several parts, relations and intervals: what must not matter does not, and what must
does.

Each property is tried on generated answers; the labelled ones are in `benchmarks/grading_corpus`.
"""

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adora_vl.rewards import canonical_gold, compare, grade, reward_function, verify_gold
from adora_vl.rewards.answer import Answer
from adora_vl.rewards.brackets import MAX_PARTS
from adora_vl.rewards.compare_values import ComparisonResult
from adora_vl.rewards.completion import last_adjacent_boxes
from adora_vl.rewards.explain import RULE_IN_WORDS, explain_grade
from benchmarks.grading_corpus import cases

FORM_CASES = [case for case in cases() if case.kind in ("forms", "guesses")]
SIXTY_EXAMPLES = settings(max_examples=60)
NUMBER_TEXTS = st.sampled_from(
    ["0", "3", "-4", "0.5", r"\frac{7}{3}", r"2\sqrt{5}", r"-\pi", "1200", r"1+\sqrt{2}"]
)
LISTS_OF_NUMBERS = st.lists(NUMBER_TEXTS, min_size=2, max_size=6, unique=True)
FACTOR_TEXTS = st.sampled_from(["2", "0.25", r"\sqrt{3}", "17", r"\frac{1}{9}"])
COEFFICIENTS = st.integers(-9, 9).filter(bool)


def verdict_on(answer: str, gold: str, **options: Any) -> str:
    """Return the verdict (correct, wrong or unparseable) on a response whose box holds `answer`."""
    return grade(rf"so \boxed{{{answer}}}", gold, **options).verdict


@SIXTY_EXAMPLES
@given(
    LISTS_OF_NUMBERS,
    st.randoms(use_true_random=False),
    st.sampled_from([", ", "; ", " and ", r"\text{ or }"]),
)
def test_the_order_of_a_list_and_its_separators_do_not_matter(
    values: list[str], rng: Any, separator: str
) -> None:
    r"""`1, 2`, `2; 1`, `2 and 1` and `\{2, 1\}` are the same answer."""
    gold = ", ".join(values)
    shuffled = rng.sample(values, len(values))
    assert verify_gold(gold) is None
    assert (
        verdict_on(separator.join(shuffled), gold)
        == verdict_on(rf"\{{{', '.join(shuffled)}\}}", gold)
        == "correct"
    )


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("5i + 3j", r"(5\%, 3)"),  # a percentage is no coordinate
        ("i + 2j + 3k", "(1, a, 2, 3)"),
        ("i + 2j + 3k", "(1, 2, 3, a)"),
    ],
)
def test_a_sum_of_unit_vectors_answers_only_a_point_of_two_or_three_numbers(
    answer: str, gold: str
) -> None:
    assert verify_gold(gold) is None
    assert verdict_on(answer, gold) == "wrong"
    assert verdict_on("i + 2j + 3k", "(1, 2, 3)") == "correct"


@SIXTY_EXAMPLES
@given(LISTS_OF_NUMBERS, st.data())
def test_one_value_more_less_or_other_makes_a_list_wrong(
    values: list[str], data: st.DataObject
) -> None:
    """A list is right only with all values of the gold and no other, each as often."""
    gold = ", ".join(values)
    position = data.draw(st.integers(0, len(values) - 1))
    rest = values[:position] + values[position + 1 :]
    wrong_lists = [
        rest,
        [*values, "77"],  # 77 is no value of `NUMBER_TEXTS`
        [*values, values[position]],
        [*rest, "77"],
        values[:1],
        [*rest, rest[0]],
    ]
    verdicts = [verdict_on(", ".join(wrong_list), gold) for wrong_list in wrong_lists]
    assert verdicts == ["wrong"] * len(wrong_lists)


@SIXTY_EXAMPLES
@given(LISTS_OF_NUMBERS, st.data())
def test_a_tuple_is_right_in_its_order_only(values: list[str], data: st.DataObject) -> None:
    """An answer to a tuple needs all its values in their order; names and a point are allowed.

    The reference is a tuple such as `(3, -4)`, also with names: `(p, q) = (3, -4)`. No list that is
    drawn is the same backwards, and none has 77 in it.
    """
    gold = f"({', '.join(values)})"
    assert verify_gold(gold) is None
    named_tuple = f"({', '.join('pqrstu'[: len(values)])}) = {gold}"
    assert (
        verdict_on(gold, gold)
        == verdict_on(f"P{gold}", gold)
        == verdict_on(named_tuple, gold)
        == "correct"
    )
    names_exchanged = named_tuple.replace("(p, q", "(q, p")
    assert verdict_on(gold, named_tuple) == verdict_on(named_tuple, named_tuple) == "correct"
    assert verdict_on(names_exchanged, named_tuple) == "wrong"
    position = data.draw(st.integers(0, len(values) - 1))
    changed_values = [*values[:position], "77", *values[position + 1 :]]
    for wrong_values in (changed_values, values[:-1], [*values, "0"], values[::-1]):
        assert verdict_on(f"({', '.join(wrong_values)})", gold) != "correct", wrong_values


@SIXTY_EXAMPLES
@given(COEFFICIENTS, COEFFICIENTS, st.integers(-9, 9), FACTOR_TEXTS, st.booleans())
def test_a_line_may_be_scaled_turned_and_solved_for_y(
    a: int, b: int, c: int, factor: str, minus: bool
) -> None:
    """An equation of a line is right in every form that describes the same line."""
    gold = f"{a}x+({b})y={c}"
    scale = f"-({factor})" if minus else f"({factor})"
    spellings = [
        f"{c}={a}x+({b})y",
        f"{scale}({a}x+({b})y)={scale}({c})",
        rf"y=\frac{{{c}-({a})x}}{{{b}}}",
        f"{a}x+({b})y-({c})=0",
    ]
    assert verify_gold(gold) is None
    assert [verdict_on(answer, gold) for answer in spellings] == ["correct"] * 4
    wrong_lines = [
        f"{a}x+({b})y={c + 1}",
        f"{a + 10}x+({b})y={c}",
        f"{a}u+({b})v={c}",
        f"{a}x+({b})y<{c}",
        f"({a}x+({b})y-({c}))x=0",
        f"{a}x+({b})y-({c})",
        "x=x",
        f"({a}x+({b})y-({c}))(0)=0",
    ]
    assert [answer for answer in wrong_lines if verdict_on(answer, gold) == "correct"] == []


@SIXTY_EXAMPLES
@given(COEFFICIENTS, st.integers(-9, 9), FACTOR_TEXTS, st.sampled_from(["<", r"\le", ">", r"\geq"]))
def test_an_inequality_may_be_scaled_and_turned(a: int, b: int, factor: str, sign: str) -> None:
    """An inequality is right in every form with the same solutions; a negative factor turns it.

    The gold is `ax + b < 0`, or has another sign.
    """
    turned = {"<": ">", r"\le": r"\ge", ">": "<", r"\geq": r"\leq"}[sign]
    other_sign = {"<": r"\le", r"\le": "<", ">": r"\geq", r"\geq": ">"}[sign]
    gold = f"{a}x+({b}) {sign} 0"
    assert verify_gold(gold) is None
    equal_inequalities = [
        f"0 {turned} {a}x+({b})",
        f"({factor})({a}x+({b})) {sign} 0",
        f"-({factor})({a}x+({b})) {turned} 0",
        rf"x {sign if a > 0 else turned} \frac{{{-b}}}{{{a}}}",
    ]
    assert [verdict_on(answer, gold) for answer in equal_inequalities] == ["correct"] * 4
    other_inequalities = [
        f"{a}x+({b}) {turned} 0",
        f"{a}x+({b}) {other_sign} 0",
        f"{a}x+({b}) {sign} 1",
        f"{a}u+({b}) {sign} 0",
        f"{a}x+({b}) = 0",
    ]
    assert [answer for answer in other_inequalities if verdict_on(answer, gold) == "correct"] == []


@SIXTY_EXAMPLES
@given(COEFFICIENTS, st.integers(-9, 9), st.integers(1, 9), st.booleans())
def test_an_absolute_value_below_a_bound_is_an_interval_and_above_it_a_union(
    a: int, b: int, bound: int, closed: bool
) -> None:
    """|ax + b| < c is the interval between two bounds, and |ax + b| > c is what lies outside.

    Each form of one is right for it and wrong for the other.
    """
    below = r"\le" if closed else "<"
    above = r"\ge" if closed else ">"
    low, high = sorted([Fraction(-bound - b, a), Fraction(bound - b, a)])
    inside = f"{a}x+({b})"
    interval = f"({low}, {high})"
    union = rf"(-\infty, {low}) \cup ({high}, \infty)"
    if closed:
        interval = f"[{low}, {high}]"
        union = rf"(-\infty, {low}] \cup [{high}, \infty)"
    in_interval = [
        f"|{inside}| {below} {bound}",
        rf"\left|{inside}\right| {below} {bound}",
        f"{bound} {above} |{inside}|",
        f"|-({inside})|-{bound} {below} 0",
        rf"-\frac{{|{inside}|}}{{2}} {above} -\frac{{{bound}}}{{2}}",
    ]
    in_union = [
        f"|{inside}| {above} {bound}",
        rf"2\lvert {inside}\rvert {above} {2 * bound}",
        f"{bound} {below} |{inside}|",
    ]
    for gold, opposite, sign, answers in (
        (interval, union, below, in_interval),
        (union, interval, above, in_union),
    ):
        for answer in answers:
            assert verify_gold(answer) is None, answer
            assert verdict_on(answer, gold) == verdict_on(gold, answer) == "correct", answer
            assert verdict_on(answer, opposite) == verdict_on(opposite, answer) == "wrong", answer
        wrong_answers = [
            f"|{inside}| = {bound}",
            f"|{inside}| {sign} {bound + 1}",
            f"|{inside}+1| {sign} {bound}",
            f"{inside} {sign} {bound}",
        ]
        assert [answer for answer in wrong_answers if verdict_on(answer, gold) == "correct"] == []


@SIXTY_EXAMPLES
@given(st.integers(-9, 9), st.integers(1, 9), st.sampled_from(["()", "[]", "[)", "(]"]))
def test_an_interval_is_its_inequality_and_nothing_wider(low: int, width: int, kind: str) -> None:
    """(1, 2] and 1 < x <= 2 are each right for the other.

    Other brackets, wider bounds and further parts are wrong.
    """
    high = low + width
    signs = {"(": "<", "[": r"\le", ")": "<", "]": r"\le"}
    gold = f"{kind[0]}{low}, {high}{kind[1]}"
    inequality = f"{low} {signs[kind[0]]} x {signs[kind[1]]} {high}"
    assert verify_gold(gold) is verify_gold(inequality) is None
    for answer, reference in (
        (gold, inequality),
        (inequality, gold),
        (rf"x \in {gold}", gold),
        (inequality, inequality),
    ):
        assert verdict_on(answer, reference) == "correct", (answer, reference)
    flipped = {"(": "[", "[": "(", ")": "]", "]": ")"}
    wrong_answers = [
        f"{flipped[kind[0]]}{low}, {high}{kind[1]}",
        f"{kind[0]}{low}, {high}{flipped[kind[1]]}",
        f"{kind[0]}{low - 1}, {high}{kind[1]}",
        f"{kind[0]}{low}, {high + 1}{kind[1]}",
        r"(-\infty, \infty)",
        rf"{gold} \cup (50, 60)",
        f"x > {low - 1}",
        f"{low + width / 2}",
    ]
    assert not [
        (answer, right_answer)
        for answer in wrong_answers
        for right_answer in (gold, inequality)
        if verdict_on(answer, right_answer) == "correct"
    ]


@SIXTY_EXAMPLES
@given(
    st.lists(NUMBER_TEXTS, min_size=2, max_size=4, unique=True), st.randoms(use_true_random=False)
)
def test_names_go_with_their_values(values: list[str], rng: Any) -> None:
    """Values with names are right in any order, and without names in the order of the gold.

    The gold has a name for each value, as in `AB = 3, CD = -4`.
    """
    names = ["AB", "CD", r"\angle 3", "x_1"][: len(values)]
    named_values = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
    gold = ", ".join(named_values)
    assert verify_gold(gold) is None
    assert (
        verdict_on(", ".join(rng.sample(named_values, len(named_values))), gold)
        == verdict_on(", ".join(values), gold)
        == "correct"
    )
    rotated = [*values[1:], values[0]]
    named_rotated = [f"{name} = {value}" for name, value in zip(names, rotated, strict=True)]
    other_name = [f"EF = {values[0]}", *named_values[1:]]
    assert verdict_on(", ".join(rotated), gold) != "correct"
    assert verdict_on(", ".join(named_rotated), gold) != "correct"
    assert verdict_on(", ".join(other_name), gold) != "correct"


SINGLE_VALUES = [
    "12",
    "0.5",
    r"5\sqrt{3}",
    "x + 3",
    "rhombus",
    "12\\%",
    "|AB| = 1",
    "z = 1 + 1 = 2",
]


@pytest.mark.parametrize("gold", SINGLE_VALUES)
def test_a_reference_with_one_value_never_accepts_several(gold: str) -> None:
    """An answer that names further values beside the right one is wrong.

    77 is no part of any reference here, so each text of `several` says more than the reference.
    """
    value = {"|AB| = 1": "1", "z = 1 + 1 = 2": "2"}.get(gold, gold)
    several = [
        f"{value}, 77",
        f"77, {value}",
        f"{value}, {value}",
        rf"{value} \text{{ or }} 77",
        rf"\{{{value}, 77\}}",
        rf"\{{{value}\}}",
        f"({value}, 77)",
        f"[{value}, {value}]",
        rf"{value} \pm 0",
        f"x = {value}, y = 77",
        f"x < {value}",
        f"{value}; {value}",
    ]
    assert verify_gold(gold) is None
    assert [answer for answer in several if verdict_on(answer, gold) == "correct"] == []
    assert grade(rf"\boxed{{{value}}} and \boxed{{77}}", gold).verdict != "correct"


def test_guesses_at_a_reference_with_several_values_earn_what_a_wrong_answer_earns() -> None:
    """No list, range or tautology earns more than the 0.1 of a wrong answer in a box."""
    golds = ["1, 2", "(1, 2)", "[1, 2)", "x < 1", "2x + y = 3", "AB = 1, CD = 2"]
    guesses = [
        ", ".join(map(str, range(10))),
        "1",
        "2",
        "1, 2, 3",
        "(1, 2), (2, 1)",
        r"(-\infty, \infty)",
        "x = x",
        "0 = 0",
        "x < 1 or x > 0",
        r"x \in \mathbb{R}",
        r"1, 2, \ldots",
        "",
        "1 or 2, 3",
        "[0, 5]",
        r"\pm 1, \pm 2",
        "x",
        "AB = 1, CD = 2, EF = 3",
    ]
    function = reward_function("boxed_accuracy")
    boxed_guesses = [rf"\boxed{{{guess}}}" for guess in guesses]
    for gold in golds:
        rewards = function(completions=boxed_guesses, answer=[gold] * len(guesses))
        assert max(rewards) <= 0.1, (gold, rewards)
        assert function(completions=[rf"\boxed{{{gold}}}"], answer=[gold]) == [1.0]


def test_boxes_before_the_block_of_the_answer_are_no_part_of_it() -> None:
    response = r"<think>\boxed{1}, </think><answer>\boxed{2}</answer>"
    both_in_answer = r"<answer>\boxed{1}, \boxed{2}</answer>"
    both_in_thinking = r"<think>\boxed{1} and \boxed{2}</think><answer>2</answer>"
    assert grade(response, "1, 2", answer_tags=True).verdict == "wrong"
    assert grade(both_in_answer, "1, 2", answer_tags=True).verdict == "correct"
    assert grade(both_in_thinking, "1, 2", answer_tags=True).verdict == "wrong"


def test_boxes_in_a_row_end_where_something_else_stands_between() -> None:
    """Little but a comma or `and` may stand between the boxes of one answer."""
    assert last_adjacent_boxes(r"\boxed{1}, no: \boxed{2} and \boxed{3}", False) == ["2", "3"]
    assert last_adjacent_boxes(r"\boxed{1} papers and \boxed{2} bins", False) == ["1", "2"]
    assert last_adjacent_boxes(r"\boxed{1} no no no \boxed{2}", False) == ["2"]
    assert len(last_adjacent_boxes(r"\boxed{1}," * 9000, False)) < 40


def test_the_work_on_lists_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lists of the same length take the square of it in comparisons at most.

    A longer list is not compared part by part.
    """
    compared: list[int] = []
    original = compare._compare_structured

    def counted(answer: Answer, reference: Answer, *, rounding: bool) -> ComparisonResult:
        compared.append(1)
        return original(answer, reference, rounding=rounding)

    monkeypatch.setattr(compare, "_compare_structured", counted)
    longest = ", ".join(f"y={n}x" for n in range(1, MAX_PARTS + 1))
    assert verify_gold(longest) is None
    compared.clear()
    assert verdict_on(", ".join(f"y={n}x" for n in range(MAX_PARTS, 0, -1)), longest) == "correct"
    assert MAX_PARTS < len(compared) <= MAX_PARTS**2 + 1  # 1 for the lists themselves
    compared.clear()
    assert verdict_on(longest + ", y=77x", longest) == "wrong"
    assert compared == [1]


@pytest.mark.parametrize("gold", sorted({case.gold for case in FORM_CASES}))
def test_a_stored_form_is_stable_and_graded_as_the_one_it_was_made_from(gold: str) -> None:
    """The stored form of a reference grades as the reference does, and stays when stored again.

    A data set stores `canonical_gold` of a reference.
    """
    stored = canonical_gold(gold)
    assert verify_gold(gold) is None
    assert verify_gold(stored) is None
    assert canonical_gold(stored) == stored
    for case in FORM_CASES:
        if case.gold == gold:
            assert grade(case.response, stored).verdict == grade(case.response, gold).verdict, (
                case.name
            )


def test_the_table_of_forms_on_the_page_is_true() -> None:
    """Each row of the documented table has references, right answers and wrong ones.

    An answer in it is right if it is right for one of the row's references.
    """
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    rows = page.partition("## Forms of answers")[2].partition("- **Parts**")[0].splitlines()
    cells = [re.split(r"(?<!\\) \| ", row) for row in rows if row.startswith("| ") and "`" in row]
    false = []

    def codes_of(cell: str) -> list[str]:
        return [code.replace(r"\|", "|") for code in re.findall("`(.*?)`", cell)]

    for _, golds_cell, right_cell, wrong_cell in cells:
        golds = codes_of(golds_cell)
        right_answers = codes_of(right_cell)
        wrong_answers = codes_of(wrong_cell)
        false += [gold for gold in golds if verify_gold(gold)]
        false += [
            answer
            for answer in right_answers
            if all(verdict_on(answer, gold) != "correct" for gold in golds)
        ]
        false += [
            answer
            for answer in wrong_answers
            if any(verdict_on(answer, gold) == "correct" for gold in golds)
        ]
    assert len(cells) > 10
    assert false == []


def test_the_explanation_names_every_part_and_every_reason_has_a_rule() -> None:
    """An explanation shows each part with its counterpart, and all reasons have words."""
    lines = "\n".join(explain_grade(r"\boxed{CD = 5, AB = 4.1}", "AB = 4, CD = 5"))
    assert "CD=5 against CD=5: same_part" in lines
    assert "AB=4.1 against -: different_part" in lines
    assert "3 against 3: same_number" in "\n".join(explain_grade(r"\boxed{(3, -4)}", "(3, -4)"))
    reasons = {grade(case.response, case.gold).reason for case in FORM_CASES}
    assert reasons <= RULE_IN_WORDS.keys()
    assert {"same_parts", "same_solutions", "same_equation", "different_length"} <= reasons
