"""The explanation of a grade, as a person calls it."""

import ast
import io
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from adora_vl.rewards import explain
from adora_vl.rewards.answer import NO_VALUE_REASONS, UNREAD_REASONS
from adora_vl.rewards.explain import explain_grade
from adora_vl.rewards.numeric import Comparison
from benchmarks.grading_corpus import cases

REWARDS_FOLDER = Path(explain.__file__).parent
# Their first argument is a reason.
REASON_FUNCTIONS = {"correct_result", "wrong_result", "ParseError"}


def run_explain(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, str], str]:
    """Return the exit code of the command, its lines by their first word, and standard error."""
    code = explain.main(arguments)
    printed = capsys.readouterr()
    text_by_word: dict[str, str] = {}
    for line in printed.out.splitlines():
        first_word, text = line.split(maxsplit=1)
        text_by_word[first_word] = text
    return code, text_by_word, printed.err


def test_both_canonical_forms_the_rule_and_the_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints both sides in canonical form, the rule that decides, and all rewards.

    The answer √884 has the value of the reference, 2√221, which is 29.73.
    """
    gold = r"2 \sqrt { 221 }"
    response = r"so \boxed{\sqrt{884}\text{ cm}}"
    code, lines, _ = run_explain(capsys, "--gold", gold, "--response", response)
    assert code == 0
    assert lines["extracted"] == r"\sqrt{884}\text{ cm}"
    assert lines["answer"] == r"\sqrt{884}  [number, 29.7321375]"
    assert lines["gold"] == r"2\sqrt{221}  [number, 29.7321375]"
    assert lines["rule"].startswith("same_number: ")
    assert re.fullmatch(r"correct \(\d+\.\d ms\)", lines["verdict"])
    assert lines["rewards"] == "boxed_accuracy 1, easyr1 1, accuracy 1, format 1"


def test_choices_rounding_and_standard_input(capsys, monkeypatch):
    """The answer 8.66 is right for 5√3 with `--rounding` alone.

    The response `-` is taken from standard input.
    """
    response = r"\boxed{8.66}"
    arguments = ["--gold", r"5\sqrt{3}", "--response", "-", "--choices", "5", r"5 \sqrt { 3 }"]

    monkeypatch.setattr("sys.stdin", io.StringIO(response))
    _, lines, _ = run_explain(capsys, *arguments)
    assert lines["rule"].startswith("different_number")
    assert lines["rewards"] == "boxed_accuracy 0.1, easyr1 0.1, accuracy 0, format 1"

    monkeypatch.setattr("sys.stdin", io.StringIO(response))
    _, lines, _ = run_explain(capsys, *arguments, "--rounding")
    assert lines["rule"].startswith("rounded")


def test_an_expression_is_said_to_be_compared_at_points(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = run_explain(capsys, "--gold", "x+3", "--response", r"\boxed{3+x}")
    assert lines["rule"] == "same_value: expressions with the same value at six points"


def test_hidden_characters_are_shown_and_no_box_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A zero-width space is printed as its code; without a box there is no line of the answer."""
    _, lines, _ = run_explain(capsys, "--gold", "12", "--response", "\\boxed{1\u200b2}")
    assert lines["extracted"] == r"1\u200b2"
    assert lines["answer"] == "-  [unreadable: hidden_characters]"

    _, lines, _ = run_explain(capsys, "--gold", "12", "--response", "it is 12")
    assert lines["extracted"] == "(no complete box)"
    assert "answer" not in lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--gold", "1, 2, ...", "--response", "x"],
            r"--gold: '1, 2, ...' cannot be graded against \(open_list",
        ),
        (["--gold", "E", "--response", "x", "--choices", "1", "2"], "letter_without_choice"),
        (["--gold", "5"], "--response"),
        (["--gold", "5", "--response", "x", "--ruonding"], "--ruonding"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, words, message):
    """Words that cannot be explained give one line on standard error, which matches `message`."""
    code, lines, error = run_explain(capsys, *words)
    assert code == 2
    assert lines == {}
    assert re.search(message, error)
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_an_answer_in_its_tags_is_read_where_they_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only with `--answer-tags` is `<answer>12</answer>` an answer without a box."""
    arguments = ["--gold", "12", "--response", "<answer>12</answer>"]
    _, lines_with_tags, _ = run_explain(capsys, *arguments, "--answer-tags")
    _, lines_without, _ = run_explain(capsys, *arguments)
    assert lines_with_tags["verdict"].startswith("correct")
    assert lines_without["verdict"].startswith("unparseable")


def test_every_reason_in_the_code_is_explained() -> None:
    """Every reason that the grader's code names has its words in `RULE_IN_WORDS`.

    Reasons stand behind a verdict, as the first word of an error, or come from the grammar and
    its values.
    """
    reasons: set[Any] = {*get_args(Comparison), *NO_VALUE_REASONS, *UNREAD_REASONS}
    for name in (
        "grade",
        "compare",
        "compare_values",
        "structured",
        "canonical",
        "grammar",
        "numeric",
        "tree_value",
    ):
        code = (REWARDS_FOLDER / f"{name}.py").read_text()
        for node in ast.walk(ast.parse(code)):
            reasons |= named_reasons(node)
    # `equal` and `different` become other reasons, and `has_unknown` never leaves the grader
    reasons -= {"equal", "different", "has_unknown"}
    assert {"no_box", "same_value", "undefined", "letter", "labels"} <= reasons, "they were found"
    explained = {reason.removeprefix("gold_") for reason in reasons}
    assert explained <= explain.RULE_IN_WORDS.keys()


def named_reasons(node: ast.AST) -> set[object]:
    """Return the reasons that a node of the grader's code names.

    They are the argument `reason` of any call, and the arguments of `REASON_FUNCTIONS`.
    """
    if not isinstance(node, ast.Call):
        return set()
    elements = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
    if ast.unparse(node.func) in REASON_FUNCTIONS:
        elements += node.args
    return {element.value for element in elements if isinstance(element, ast.Constant)}


def test_what_is_right_is_never_explained_as_never_right() -> None:
    """The explanation of a correct case shows no side as unreadable, and no part as a wrong one.

    A right part has something to be compared with, and a reason such as `same_number`.
    """
    never_right = re.compile(r" against -:|: (?!same_|rounded|letter)")
    correct_cases = [case for case in cases() if case.label == "correct"]
    for case in correct_cases:
        lines = explain_grade(case.response, case.gold, case.choices, rounding=case.rounding)
        sides = [line for line in lines if line.startswith(("answer ", "gold "))]
        parts = [line for line in lines if line.startswith("part ")]
        unread_sides = [line for line in sides if "[unreadable" in line]
        wrong_parts = [line for line in parts if never_right.search(line)]
        assert len(sides) == 2, lines
        assert unread_sides == [], lines
        assert wrong_parts == [], lines
