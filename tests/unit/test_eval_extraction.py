"""Answers read out of responses by rules: what people's models write, and what only looks like an answer."""

from __future__ import annotations

import time

import pytest

from eval.extraction.choice import extract_choice
from eval.extraction.number import extract_list, extract_number
from eval.extraction.rules import extract

FRUIT = ["apple", "pear", "plum tree", "fig"]
ANGLES = ["30°", "45°", "60°", "90°"]
YES_NO = ["Yes", "No"]


@pytest.mark.parametrize(
    ("response", "choices", "letter"),
    [
        ("B", FRUIT, "B"),
        ("b", FRUIT, "B"),
        ("(b)", FRUIT, "B"),
        ("B. pear", FRUIT, "B"),
        ("B) pear", FRUIT, "B"),
        ("pear", FRUIT, "B"),
        ("Pear.", FRUIT, "B"),
        ("**C**", FRUIT, "C"),
        (r"Long story. \boxed{C}", FRUIT, "C"),
        (r"Long story. \boxed{\text{(C) plum tree}}", FRUIT, "C"),
        (r"\boxed{A}? No: \boxed{\textbf{D}}", FRUIT, "D"),
        (r"so it is $\boxed{60^\circ}$", ANGLES, "C"),
        (r"so it is $\boxed{60}$", ANGLES, "C"),
        ("The answer is A. Wait, no. The correct answer is (D).", FRUIT, "D"),
        ("Final Answer: C", FRUIT, "C"),
        ("**Answer: C**", FRUIT, "C"),
        ("Answer: (C) plum tree", FRUIT, "C"),
        ("The correct option is **B**, as seen.", FRUIT, "B"),
        ("答案是C。", FRUIT, "C"),
        ("故选：D", FRUIT, "D"),
        ("The correct choice is plum tree because of the leaves.", FRUIT, "C"),
        ("The answer is (C). Option (A) is incorrect, and choice (B) is incorrect too.", FRUIT, "C"),
        ("Choice (D) is wrong. The answer is (A). The option (B) is not correct.", FRUIT, "A"),
        (r"\boxed{30}", ["30m", r"30√{3}m", "60m"], "A"),
        (r"\boxed{30\sqrt{3}}", ["30m", r"30√{3}m", "60m"], "B"),
        (r"$\boxed{\dfrac{5}{12}}$", [r"\frac { 5 } { 12 }", r"\frac { 12 } { 5 }"], "A"),
        (r"$\boxed{x = 4\pi \text{ cm}}$", ["2πcm", "3πcm", "4πcm", "5πcm"], "C"),
        (r"\boxed{\angle A = 60}", ANGLES, "C"),
        ("By the leaves it must be (B), as (A) is incorrect.", FRUIT, "B"),
        ("Going by the leaves I would say option B fits, and option D is not right.", FRUIT, "B"),
        ("The answer is (C). The incorrect answers are A and B.", FRUIT, "C"),
        ("A circle has no corners, so the answer is option B.", FRUIT, "B"),
        ("I see a pear on the table. Therefore it is the fig that was meant.", FRUIT, "D"),
        ("The picture shows a plum tree.", FRUIT, "C"),
        ("Yes, it does.", YES_NO, "A"),
        ("No. It does not.", YES_NO, "B"),
        ("The line does not cross the axis.", YES_NO, "B"),
        ("The line crosses the axis.", YES_NO, "A"),
        ("Therefore the angle is 45 degrees.", ANGLES, "B"),
        ("x = 245, y = 60.5, so it is 90", ANGLES, "D"),  # 45 is not in 245, nor 60 in 60.5
        ("B", ["D", "C", "A", "B"], "B"),  # choices that are letters: a lone letter is the option
        ("", FRUIT, ""),
        ("I'm sorry, but I cannot see the image.", FRUIT, ""),
    ],
)
def test_a_choice_is_found(response: str, choices: list[str], letter: str) -> None:
    assert extract_choice(response, choices).text == letter


@pytest.mark.parametrize(
    ("response", "question", "number"),
    [
        ("5", "", "5"),
        ("5.", "", "5"),
        ("$1,234.50", "", "1234.50"),
        ("50%", "", "50"),
        ("−5", "", "-5"),
        (r"\boxed{12}", "", "12"),
        (r"First \boxed{3}, at last $\boxed{x = 12 \text{ cm}}$", "", "12"),
        (r"\boxed{\frac{3}{4}}", "", "0.75"),
        ("The answer is 7. I checked 9 others.", "", "7"),
        ("Answer: 7", "", "7"),
        ("Final answer: $1,000", "", "1000"),
        ("7\nbecause 3 + 4 = 7 and not 12", "", "7"),
        ("The year is **2013**. In 2014 there were 3538 - 2734 = 804.", "", "2013"),
        ("We have 3 * 20 = 60. And 4 * 20 = 80. So the total is 60 + 80 = $140.", "", "140"),
        ("There are 3 bars below 40. They are those of 58, 59 and 63.", "How many bars are below 40?", "3"),
        ("There are three groups with a bar below 40.", "How many groups have a bar below 40?", "3"),
        ("The ratio of boys to girls is 3:1.", "What is the ratio?", "3"),
        ("I'm sorry, but I cannot determine this.", "", ""),
        ("Let me think about it.", "", ""),
        ("", "", ""),
        ("It is 1e400 or so", "", "1e400"),
        (r"x = 5\sqrt{3} \approx 8.66", "", "8.66"),
        (r"\boxed{2.5 \times 10^{-3} \text{ m}}", "", "2.5e-3"),
        (r"\boxed{1{,}000}", "", "1000"),
        ("The answer is 1.5 x 10^3.", "", "1.5e3"),
    ],
)
def test_a_number_is_found(response: str, question: str, number: str) -> None:
    assert extract_number(response, question).text == number


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("The years are [2014,2016].", "[2014, 2016]"),
        (r"\boxed{[1.2, 1.3,1.4]} not [1]", "[1.2, 1.3, 1.4]"),
        ("no list", ""),
        ("[a, b]", ""),
    ],
)
def test_a_list_is_found_and_spaced_as_python_prints_it(response: str, found: str) -> None:
    assert extract_list(response).text == found


@pytest.mark.parametrize(
    "response",
    [
        "(" * 200_000,
        "the answer is " * 20_000,
        "1," * 100_000,
        "1 " * 100_000,
        r"\boxed{" * 50_000,
        "answer to " + "a" * 100_000,
        "a " * 60_000,
        "[" * 100_000,
        " \n" * 100_000,
        "\x00\u202e" * 50_000,
        "**" * 100_000,
        "not " * 50_000,
        "-" * 200_000,
        "[" + "1" * 100_000,
        "answer" + " " * 100_000 + "x",
        "the answer is" + "\n " * 50_000 + "x",
        "x" + " \n" * 100_000 + "x",
        "is " * 50_000 + "5",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_no_response_takes_long(response: str) -> None:
    start = time.perf_counter()
    extract_choice(response, FRUIT)
    extract_number(response, "How many?")
    extract_list(response)
    assert time.perf_counter() - start < 10  # quadratic ones take minutes


def test_an_integer_item_gets_an_integer() -> None:
    row = {"question": "", "question_type": "free_form", "answer_type": "integer", "choices": None}
    assert extract(row | {"response": "5.0"}).text == "5"
    assert extract(row | {"response": "It is 1.50."}).text == "1.50"
    assert extract(row | {"response": "5.0", "answer_type": "float"}).text == "5.0"


def test_an_open_text_item_gets_its_box_or_all_that_was_said() -> None:
    row = {"question": "", "question_type": "free_form", "answer_type": "text", "choices": None}
    assert extract(row | {"response": r"It is \boxed{blue}."}).text == "blue"
    assert extract(row | {"response": " blue\n"}).text == "blue"
