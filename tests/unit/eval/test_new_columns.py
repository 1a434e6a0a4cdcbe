"""MMMU-Pro, LogicVista and DynaMath: their official rules by hand, their own figures, and rows that
are named.
"""

import json

import pytest

from eval import dynamath, logicvista, mmmu_pro
from tests.support import benchmark_data as support

CHOICES = ["a red fox", "the river bank of a town", "none of them"]
LETTER_BY_RESPONSE = [
    ("Answer: B", "B"),
    ("first Answer: A, then Answer: C", "C"),
    ("Answer: A or B, thus (B) not (A)", "A"),
    ("It is (C).", "C"),
    ("I take B here", "B"),
    ("B.", "B"),
    ("so we see that it is the River bank of a town", "B"),
    ("no letter at all", None),
    (r"\boxed{B}", None),
    ("", None),
]


@pytest.mark.parametrize(("response", "letter"), LETTER_BY_RESPONSE)
def test_the_letter_that_mmmu_pro_reads(response, letter):
    """Each case: a response, and the letter that the official code reads in it."""
    assert mmmu_pro.official_letter(response, CHOICES) == letter


@pytest.mark.parametrize(
    ("response", "letters"),
    [
        (r"\boxed{A, C}", "A, C"),
        (r"\boxed{\text{B and D}}", "B and D"),
        ("The answers are A and C.", "A and C"),
        ("B, D", "B, D"),
        ("The correct choice is D", "D"),
        (r"so \boxed{B}", "B"),
        ("<answer>C, A</answer>", "C, A"),
    ],
)
def test_the_letters_of_logicvista_are_read_out_of_a_response(response, letters):
    """A question may have several right letters, which `parse_letters` sorts."""
    assert logicvista.extract_letters(response).text == letters


@pytest.mark.parametrize("stored_value", ["A, C", "ca", ["c", "a"]])
def test_letters_of_logicvista_are_compared_in_any_form_and_order(stored_value):
    assert logicvista.parse_letters(stored_value) == ["a", "c"]


def test_the_prompt_of_dynamath_breaks_its_lines_as_the_official_one_does():
    """The prompt of DynaMath has the line breaks of the official one, also within sentences.

    Three of its breaks end no sentence, and a space stands before each.
    """
    lines = dynamath.prompt({"question": "How long? ", "answer_type": "float"}).split("\n")
    assert lines[:2] == [
        "## Question",
        "How long? Please answer in a floating-point number.",
    ]
    ends_of_lines = [line[-14:] for line in lines[2:6]]
    assert ends_of_lines == [
        "should adhere ",
        "y can contain ",
        "hoice option, ",
        "-point number.",
    ]
    assert json.loads("\n".join(lines[9:])).keys() == {"solution", "short answer"}


@pytest.mark.parametrize(
    ("response", "reference", "answer_type", "is_right"),
    [
        ('{"solution": "x", "short answer": "5.1255"}', "5.125", "float", True),
        ('```json\n{"short answer": "2.0π"}\n```', "6.2832", "float", True),
        ('{"short answer": "5.127 cm"}', "5.125", "float", False),
        ("steps\n5.125.", "5.125", "float", True),
        ("5.125", "5.125", "float", False),  # its JSON is a number, which has no short answer
        ('{"short answer": "B"}', "B", "multiple choice", True),
        ('{"short answer": "(B) 3"}', "B", "multiple choice", True),
        ('{"short answer": "3 is B"}', "B", "multiple choice", False),
        ('{"short answer": "in May"}', "May", "text", True),
    ],
)
def test_the_short_answer_of_dynamath(response, reference, answer_type, is_right):
    """DynaMath asks for JSON with a `short answer`; numbers are right to 0.001."""
    answer, _ = dynamath.extract_short_answer(response)
    assert dynamath.is_officially_right(answer, reference, answer_type) is is_right


def test_the_worst_case_of_dynamath_is_over_all_variants(tmp_path, capsys):
    """A problem is right in the worst case if all of its variants are.

    Two problems have ten variants each, and one variant of the second problem is wrong.
    """
    fields = {"question": "?", "answer": "5", "answer_type": "float", "subject": "a", "level": "b"}
    rows = []
    for problem in range(2):
        for variant in range(1, 11):
            is_wrong = problem == 1 and variant == 3
            response = json.dumps({"short answer": "6" if is_wrong else "5"})
            pid = f"sample_variant{variant}/{problem}"
            rows.append({**fields, "pid": pid, "response": response})
    score = support.score_predictions(dynamath.BENCHMARK, tmp_path, rows)
    worst_case = score["variants"]["worst_case"]
    assert score["correct"] == 2 * 10 - 1
    assert worst_case["correct"] == 1
    assert worst_case["total"] == 2
    # the worst case by the average: 1 of 2, and 19 of 20
    assert score["variants"]["robustness"]["accuracy"] == pytest.approx(0.5 / 0.95)
    warning = "warning: the worst case of 1 of 2 problems is over fewer than the 10 variants"
    assert warning not in capsys.readouterr().out
    # One variant is missing, as with --limit.
    support.score_predictions(dynamath.BENCHMARK, tmp_path, rows[:-1])
    assert warning in capsys.readouterr().out
