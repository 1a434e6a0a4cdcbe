r"""Answers that are made to be large, deep or imprecise: the work is bounded, and no digit that is
lost decides.

A seeded part of the fuzzing with which the caps were found; no clock is read, the work is counted.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest

from adora_vl.rewards import answer as answers
from adora_vl.rewards import grade, number_with_error, verify_gold
from adora_vl.rewards.grammar import MAX_CHARS, MAX_COSTLY_TOKENS
from adora_vl.rewards.number_with_error import MAX_BITS, PRECISION_BITS
from benchmarks.grading_corpus import Case, cases

HIDDEN_ZERO = r"(\sqrt{2}\sqrt{3}-\sqrt{6})"  # nothing but rounding noise, whatever the precision


def in_box(answer: str) -> str:
    """Return a response whose box holds `answer`."""
    return rf"\boxed{{{answer}}}"


def tower_of_powers(base: str, height: int, top: str) -> str:
    """`base^{base^{...^{top}}}` with `height` powers."""
    return f"{base}^{{" * height + top + "}" * height


def fill_answer(piece: str, separator: str = "+", chars: int = MAX_CHARS) -> str:
    """Fill an answer with as many pieces as it has room for.

    If a piece has costly tokens, such as a root, there are at most `MAX_COSTLY_TOKENS` of them.
    """
    count = (chars + len(separator)) // (len(piece) + len(separator))
    costly = sum(piece.count(sign) for sign in ("^", r"\s", r"\t", r"\l", r"\a"))
    return separator.join([piece] * (min(count, MAX_COSTLY_TOKENS // costly) if costly else count))


LARGE_ANSWERS = {
    "a tower of numbers": tower_of_powers("9", height=8, top=r"\sqrt{2}"),
    "a tower of unknowns": tower_of_powers("x", height=14, top="64"),
    "powers of powers": "((((x+1)^{64})^{64})^{64})^{64}",
    "powers that cancel": "((((x+1)^{64})^{64})^{64})^{64}-((((1+x)^{64})^{64})^{64})^{64}+2x",
    "powers of small numbers": r"((((0.1x)^{64})^{64})^{64})^{-64}",
    "a large exponent": "x^{99999}",
    "an irrational exponent": r"\pi^{10^{64}\pi}",
    "factors at the cap": r"\cdot".join(["9^{64}"] * 16),
    "long literals": fill_answer(r"x\cdot" + "9" * 40),
    "fractions that add up": "+".join(rf"\frac{{x}}{{{n}}}" for n in range(101, 136)),
    "many unknowns": "+".join("abcdfghjklmnopqrstuvwxyz"),
    "a huge sum": fill_answer("x"),
    "a huge sum of irrationals": r"x\pi" + "+x" * 240,
    "a huge quotient of irrationals": r"x\pi" + "/x" * 240,
    "a huge product of complex numbers": r"\ln(x)" + "(x)" * 160,
    "roots of roots": r"\sqrt{" * 15 + "x" + "}" * 15,
    "roots of roots of noise": r"\sqrt{" * 12 + HIDDEN_ZERO + "}" * 12 + "+x",
    "roots of sums": r"\sqrt{x+" * 15 + "x" + "}" * 15,
    "logarithms of logarithms": r"\ln(" * 14 + "x" + ")" * 14,
    "sines of sines": r"\sin(" * 14 + "x" + ")" * 14,
    "tangents near a pole": r"\tan(90+10^{-60}x)\tan(\frac{\pi}{2}x)",
    "a sine of a large angle": r"\sin(\pi^{64}x)+\cos(10^{64}\pi x)",
    "a sine of a complex angle": r"\sin(\sqrt{x}\pi)",
    "a large power of nearly 1": r"0.7^{10^{60}x}+(1+10^{-60}\pi)^{10^{60}x}",
    "nested brackets": "(" * 16 + "x" + ")" * 16,
    "percent signs": "5" + "%" * 490,
    **{
        name: fill_answer(name)
        for name in (r"\sin x", r"\tan^{-1}x", r"\log x", r"\sqrt[9]{x}", "x^x", "x^{64}")
    },
}


@dataclass
class Work:
    """The work that was computed while a test ran.

    For each operation: the binary digits and the power of two of its result before the caps are
    applied, and its absolute value.
    """

    digits: list[int] = field(default_factory=list)
    powers: list[int] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)

    def clear(self) -> None:
        """Forget what was computed so far."""
        self.digits.clear()
        self.powers.clear()
        self.sizes.clear()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Records the operations of the grader's arithmetic.

    Each operation ends in one of the two functions that are watched here.
    """
    work_done = Work()
    fraction = number_with_error._exact_result
    computed = number_with_error._rounded_result

    def watched_fraction(value: Fraction) -> Any:
        work_done.digits.append(max(value.numerator.bit_length(), value.denominator.bit_length()))
        work_done.sizes.append((result := fraction(value)).magnitude)
        return result

    def watched_computed(value: Any, error: float = 0.0) -> Any:
        work_done.digits.append(
            max(abs(part.man).bit_length() for part in (value.real, value.imag))
        )
        work_done.powers.append(max(abs(part.exp) for part in (value.real, value.imag)))
        work_done.sizes.append((result := computed(value, error)).magnitude)
        return result

    monkeypatch.setattr(number_with_error, "_exact_result", watched_fraction)
    monkeypatch.setattr(number_with_error, "_rounded_result", watched_computed)
    return work_done


def test_the_work_is_bounded_by_the_length_of_an_answer(work: Work) -> None:
    """Each character of an answer costs at most two operations on capped values, at each point.

    An answer is computed when it is read, and then at six points.
    """
    # Two operations for each character, at six points and once more when it is read.
    max_operations = 2 * 7 * MAX_CHARS
    answers_over_the_bounds = []
    for name, answer in LARGE_ANSWERS.items():
        assert len(answer) <= MAX_CHARS, name
        # The same value in another spelling, so that both sides have to be computed.
        respelt_answer = answer[1:-1] if answer[0] == "(" else f"+{answer}"
        for gold in (respelt_answer, "x", "12"):
            work.clear()
            grade(in_box(answer), gold)
            is_bounded = [
                len(work.digits) <= max_operations,
                # A product of two capped numbers, before it is capped itself.
                max(work.digits, default=0) <= 2 * (MAX_BITS + PRECISION_BITS),
                max(work.powers, default=0) <= 10 * MAX_BITS,
                max(work.sizes, default=0) < 2.0**MAX_BITS,
            ]
            if not all(is_bounded):
                answers_over_the_bounds.append((name, gold[:40]))
    assert answers_over_the_bounds == []


def test_what_is_counted_is_what_is_computed(work: Work) -> None:
    grade(in_box(LARGE_ANSWERS["a huge sum of irrationals"]), "x")
    assert len(work.powers) > 240
    assert PRECISION_BITS - 8 <= max(work.digits) <= PRECISION_BITS


def test_a_percent_sign_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer with 490 percent signs is read with at most four calls of the canonical form.

    Each call takes one sign off, so that the answer might take 490 calls.
    """
    texts: list[str] = []

    def counted(text: str) -> tuple[str, str]:
        texts.append(text)
        return text, ""

    monkeypatch.setattr(answers, "canonical_value_and_unit", counted)
    assert answers.parse_value("5" + "%" * 490).reason == "percentage"
    assert answers.parse_value(r"5\%").type == "percentage"
    assert len(texts) <= 4


def test_functions_are_capped() -> None:
    """An answer may have `MAX_COSTLY_TOKENS` functions, and not one more."""
    grades = []
    for count in (MAX_COSTLY_TOKENS, MAX_COSTLY_TOKENS + 1):
        graded = grade(in_box("+".join([r"\sqrt{x}"] * count)), rf"{count}\sqrt{{x}}")
        grades.append((graded.verdict, graded.reason))
    assert grades == [("correct", "same_value"), ("unparseable", "too_large")]


SAME_VALUE_TEMPLATES = [
    "({})",
    "0+{}",
    r"\frac{{2({})}}{{2}}",
    r"\frac{{({})\sqrt{{2}}}}{{\sqrt{{2}}}}",
    "-(-({}))",
    r"(\sqrt{{{}}})^2",
    r"\sqrt[3]{{{}}}\sqrt[3]{{{}}}\sqrt[3]{{{}}}",
    r"({})+\pi-\pi",
    r"({})+10^{{40}}\pi-10^{{40}}\pi",
    r"({})+" + HIDDEN_ZERO.replace("{", "{{").replace("}", "}}"),
    r"({})(\sin^2(17)+\cos^2(17))",
    r"({})\cdot1.0",
]
OTHER_VALUE_TEMPLATES = [
    "2({})+7",
    "-1-({})",
    r"\frac{{{}}}{{2}}-2",
    r"1.00001({})+\frac{{1}}{{3}}",
]


def fill_template(template: str, value: str) -> str:
    """Put a value into a template whose braces of LaTeX are doubled, into each `{}` of it."""
    return template.replace("{}", value).replace("{{", "{").replace("}}", "}")


def draw_expression(rng: random.Random, depth: int) -> str:
    """Return a random expression, with the unknown x or without one."""
    if not depth:
        return rng.choice(["x", "x", r"\pi", "0.5", "2", "3", "7", "12", "45", str(10**20 + 1)])
    term = draw_expression(rng, depth - 1)
    other_term = draw_expression(rng, rng.randrange(depth))
    forms = [
        *(
            f"{term}+{other_term}",
            f"{term}-({other_term})",
            f"({term})({other_term})",
            rf"\frac{{{term}}}{{{other_term}}}",
        ),
        *(
            rf"\sqrt{{{term}}}",
            rf"\sqrt[3]{{{term}}}",
            f"({term})^2",
            f"({term})^{{-1}}",
            f"2^{{{term}}}",
        ),
        *(
            rf"\sin({term})",
            rf"\tan({term})",
            rf"\ln({term})",
            rf"\arcsin({term})",
            rf"\log_{{2}}({term})",
        ),
    ]
    return rng.choice(forms)


def test_another_spelling_of_a_value_is_never_called_wrong_nor_another_value_right() -> None:
    """A gold in another spelling is never wrong, and one that was changed in value never right.

    Golds are drawn, and spelled or changed by a drawn template. A spelling may leave arithmetic to
    be done, which is wrong for a number (`unevaluated`).
    """
    rng = random.Random(20)
    right_count = 0
    wrong_count = 0
    for _ in range(600):
        gold = draw_expression(rng, rng.randrange(1, 4))
        if verify_gold(gold):  # no answer can be graded against it
            continue
        template = rng.choice(SAME_VALUE_TEMPLATES)
        same_value_grade = grade(in_box(fill_template(template, gold)), gold)
        if same_value_grade.verdict == "correct":
            right_count += 1
        assert same_value_grade.verdict != "wrong" or same_value_grade.reason == "unevaluated", (
            template,
            gold,
            same_value_grade,
        )
        template = rng.choice(OTHER_VALUE_TEMPLATES)
        other_value_grade = grade(in_box(fill_template(template, gold)), gold)
        if other_value_grade.verdict == "wrong":
            wrong_count += 1
        assert other_value_grade.verdict != "correct", (template, gold)
    assert right_count > 300
    assert wrong_count > 300


def test_threads_find_what_one_finds_alone() -> None:
    """Eight threads grade the cases as one thread does.

    The contexts of the arithmetic are cached for each thread; each case is graded twice.
    """
    drawn_cases = [
        case for case in cases() if case.kind in {"functions", "expressions", "radicals", "pi"}
    ] * 2
    number_with_error._context_cache.clear()

    def grade_case(case: Case) -> Any:
        return grade(case.response, case.gold, choices=case.choices, rounding=case.rounding)

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(grade_case, drawn_cases))
    assert results == [grade_case(case) for case in drawn_cases]
