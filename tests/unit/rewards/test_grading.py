r"""The grader on answers that people and models really write, near misses, and reference answers:
rows of JSONL files.

`cases/README.md` says how to add one. The labelled corpus in `benchmarks/` names no rules, and
other graders run on it.
"""

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from adora_vl.rewards import canonical_gold, grade, grade_batch, verify_gold
from adora_vl.rewards.completion import last_boxed
from adora_vl.rewards.explain import RULE_IN_WORDS
from adora_vl.rewards.grammar import ParseError, parse_tree
from adora_vl.rewards.numeric import evaluate_closed_form
from benchmarks.grading_corpus import Case, cases
from tests.support.grading_rows import ANSWER_ROWS, boxed, expand_repeats, read_grading_rows

LABELLED_CASES = cases()


REFERENCE_ROWS = read_grading_rows("references.jsonl")
ANSWER_KINDS = list(dict.fromkeys(row["kind"] for _, row in ANSWER_ROWS))


def grade_options(row: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `grade` that a row has."""
    return {name: row[name] for name in ("choices", "rounding", "answer_tags") if name in row}


@pytest.mark.parametrize("kind", ANSWER_KINDS)
def test_every_answer_has_the_verdict_and_the_reason_of_its_row(kind: str) -> None:
    """Each answer of this kind in `answers.jsonl` gets the verdict and the reason of its row.

    A row has an answer for the box, or a whole response.
    """
    failing = []
    for line, row in ANSWER_ROWS:
        if row["kind"] == kind:
            response = (
                expand_repeats(row["response"])
                if "response" in row
                else boxed(expand_repeats(row["answer"]))
            )
            graded = grade(response, row["reference"], **grade_options(row))
            if (graded.verdict, graded.reason) != (row["verdict"], row["reason"]):
                failing.append(f"{line}: {graded.verdict} ({graded.reason}), but {row}")
    assert not failing, "\n".join(failing)


def test_every_reference_is_stored_in_a_stable_form_or_refused() -> None:
    """`cases/references.jsonl` says how a data set stores a reference, or why it refuses it."""
    failing = []
    for line, row in REFERENCE_ROWS:
        reference = expand_repeats(row["reference"])
        choices = row.get("choices")
        refusal = verify_gold(reference, choices)  # None if it can be graded against
        stored = canonical_gold(reference)
        if refusal != row.get("refused") or stored != row.get("stored", reference):
            failing.append(f"{line}: refused {refusal}, stored {stored!r}, but {row}")
        if refusal is None:
            stored_again = verify_gold(stored, choices), canonical_gold(stored)
            verdicts = [
                grade(boxed(spelling), stored, choices=choices).verdict
                for spelling in (reference, stored)
            ]
            if stored_again != (None, stored) or verdicts != ["correct"] * 2:
                failing.append(
                    f"{line}: {reference!r} is graded as {verdicts} and stored as {stored_again}"
                )
        elif grade(boxed("5"), reference, choices=choices).verdict == "correct":
            failing.append(f"{line}: 5 is accepted for {reference!r}, which is refused")
    assert not failing, "\n".join(failing)


def test_the_rows_of_the_grader_have_the_right_keys_and_none_twice() -> None:
    """Each row has the keys that its test reads, a known reason, and no twin.

    A key that is misspelled would else make a row that proves nothing.
    """
    required = {"kind", "reference", "verdict", "reason"}
    optional = {"answer", "response", "choices", "rounding", "answer_tags"}
    for line, row in ANSWER_ROWS:
        assert required < row.keys() <= required | optional, line
        assert ("answer" in row) != ("response" in row), line
        assert row["reason"].removeprefix("gold_") in RULE_IN_WORDS, line
    for line, row in REFERENCE_ROWS:
        assert "reference" in row, line
        assert row.keys() <= {"reference", "choices", "stored", "refused"}, line
        assert "stored" in row or "refused" in row, line
    for rows in (ANSWER_ROWS, REFERENCE_ROWS):
        counts = Counter(json.dumps({**row, "kind": ""}, sort_keys=True) for _, row in rows)
        assert [row for row, count in counts.items() if count > 1] == []


def _is_as_labelled(case: Case, verdict: str) -> bool:
    """Whether a verdict fits the label; a case labelled `rejected` may be wrong or unparseable."""
    return verdict != "correct" if case.label == "rejected" else verdict == case.label


def test_every_verdict_of_the_labelled_corpus_is_its_label() -> None:
    failing = []
    for case in LABELLED_CASES:
        graded = grade(case.response, case.gold, choices=case.choices, rounding=case.rounding)
        if not _is_as_labelled(case, graded.verdict):
            failing.append(f"{case.name}: {case.label}, not {graded.verdict} ({graded.reason})")
    assert not failing, "\n".join(failing)


def test_no_case_of_the_corpus_stands_there_twice() -> None:
    """No two cases have the same name, or the same response and reference answer."""
    assert (
        len({case.name for case in LABELLED_CASES})
        == len({(c.name, c.response, c.gold) for c in LABELLED_CASES})
        == len(LABELLED_CASES)
    )


def test_a_batch_gives_the_same_grades() -> None:
    quick = [case for case in LABELLED_CASES if case.kind != "attacks" and not case.rounding]
    grades = grade_batch(
        [c.response for c in quick], [c.gold for c in quick], choices=[c.choices for c in quick]
    )
    assert grades == [grade(case.response, case.gold, choices=case.choices) for case in quick]
    assert {"same_number", "same_value", "same_text"} <= {graded.reason for graded in grades}


CONTENT_BY_RESPONSE = [  # a response, and what stands in its last complete box
    (r"\boxed{5}", "5"),
    (r"\fbox{5}", "5"),
    (r"\boxed {5}", "5"),
    (r"\boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
    (r"\boxed{4}, no: \boxed{5}", "5"),
    (r"\boxed{5} and then \boxed{6", "5"),
    (r"\boxed{5 \boxed{6}", "6"),
    (r"\boxed{\boxed{ 5 }}", "5"),
    (r"\boxed{1 \boxed{5}}", r"1 \boxed{5}"),
    (r"\boxed{\boxed{1}\boxed{5}}", r"\boxed{1}\boxed{5}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"a } stray { brace, \boxed{5}", "5"),
    (r"x &= 5 \\ \boxed{5} \\\boxed{6}", "6"),
    ("\\\\boxed{5}", "5"),
    (r"\boxed{}", ""),
    (r"\boxed{5", None),
    (r"\boxed 5", None),
    (r"\boxedx{5}", None),
    (r"boxed{5}", None),
    (r"\boxed{5\}", None),
    (r"\boxed{5}" + " " * 2_000_000, None),  # only the end of so long a response is looked at
    ("The answer is 5.", None),
    ("", None),
]


def test_the_last_complete_box_is_the_answer() -> None:
    assert [(text[:60], last_boxed(text)) for text, _ in CONTENT_BY_RESPONSE] == [
        (text[:60], content) for text, content in CONTENT_BY_RESPONSE
    ]


def test_no_complete_box_extracts_nothing_and_an_unreadable_one_its_content() -> None:
    """A grade has the content of an unreadable box, and None without a complete box.

    The reward for a box without a right answer needs to know whether there is a box.
    """
    assert grade(r"The answer is 5, \boxed{5", "5").extracted is None
    for line, row in ANSWER_ROWS:
        # the reward presets count such a box
        if row["verdict"] == "unparseable" and "answer" in row:
            assert (
                grade(boxed(expand_repeats(row["answer"])), row["reference"]).extracted is not None
            ), line


TEXTS_WITHOUT_NUMBER = [
    "",
    "x",
    "x+3",
    "12, 13",
    "[1,2]",
    "12%",
    "x=5",
    "5 cm",
    r"\alpha",
    "1e3",
    "--5",
    r"\sqrt[1]{2}",
    "5)",
]


def test_what_is_no_closed_form_has_no_number() -> None:
    """No number can be read from any of these texts, so reading them raises."""
    for text in TEXTS_WITHOUT_NUMBER:
        with pytest.raises(ParseError):
            pytest.fail(f"{text!r} has the number {evaluate_closed_form(parse_tree(text))}")


def test_the_package_needs_nothing_heavy() -> None:
    heavy = "{'torch', 'sympy', 'math_verify', 'mpmath', 'numpy', 'trl'}"
    code = f"import sys, adora_vl.rewards; print(sorted({heavy} & set(sys.modules)))"
    imported = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert imported.stdout.strip() == "[]"
