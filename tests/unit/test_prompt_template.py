"""`adora_prompt`: a text with plain names of columns, and nothing that could reach further."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adora_vl.errors import UserError
from adora_vl.prompt_template import template

ROW = {"problem": "Find $x$ in {x}.", "choices": ["3", "4"], "hint": None, "number": 7}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{problem}", "Find $x$ in {x}."),
        ("{problem}\nChoices: {choices}", "Find $x$ in {x}.\nChoices: (A) 3 (B) 4"),
        ("Hint: {hint}\n{problem}", "Find $x$ in {x}."),  # no line for what is null
        ("{problem} {hint}!", "Find $x$ in {x}. !"),
        ("Answer in \\boxed{{}}.\n\n{problem}", "Answer in \\boxed{}.\n\nFind $x$ in {x}."),
        ("<image>\n{number}: {problem}\n", "<image>\n7: Find $x$ in {x}.\n"),
    ],
)
def test_a_template_is_filled_with_the_columns_of_the_row(source, text):
    assert template(source)(ROW) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{problem.__class__}", "not the plain name"),
        ("{problem[0]}", "not the plain name"),
        ("{problem!r}", "not the plain name"),
        ("{problem:>10}", "not the plain name"),
        ("{}", "not the plain name"),
        ("{0}", "not the plain name"),
        ("{problem} \\boxed{}", "not the plain name"),
        ("{problem", "cannot be read"),
        ("problem}", "cannot be read"),
        ("Solve it.", "names no column"),
        ("{problem} {answer}", "would tell the model the answer"),
        (" ", "is not a text"),
    ],
)
def test_anything_else_is_one_line(source, message):
    with pytest.raises(UserError, match=message) as refused:
        template(source)
    assert str(refused.value).startswith("adora_prompt: ") and "\n" not in str(refused.value)


def test_a_column_that_is_not_there_is_named_with_the_nearest():
    with pytest.raises(UserError, match="'problm' is no column of here; did you mean 'problem'"):
        template("{problm}").check_columns(["id", "problem", "answer"], "here")


@given(st.text(alphabet="{}abc.[]!:_\n ", max_size=12), st.text(max_size=20))
def test_whatever_is_written_it_is_the_value_or_one_line(source, value):
    row = dict.fromkeys(("a", "b", "c", "abc", "_"), value)
    try:
        made = template(source)
        made.check_columns(row, "here")
    except UserError as error:
        assert "\n" not in str(error)
        return
    text = made(row)
    assert value in text and set(made.names) <= row.keys()
