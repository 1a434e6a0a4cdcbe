"""A row that would end a run is named before it begins, and a template makes its prompt of plain
columns alone.
"""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adora_vl.data.dataset import schema
from adora_vl.data.prompts import CONTROL_TOKENS, DEFAULT_PROMPT, read_template
from adora_vl.data.rows import fault_in_row, require_sound_rows, rows_without_pixels
from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from adora_vl.synthetic.generate import generate
from adora_vl.utils.errors import UserError

PIXELS = {"bytes": b"pixels", "path": None}
SOUND = {
    "id": "made/train/1",
    "problem": "Find $x$.",
    "answer": "12",
    "images": [PIXELS],
    "choices": None,
}

NOT_BLANK_TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1).filter(str.strip)
PLAIN_TEXTS = NOT_BLANK_TEXTS.filter(
    lambda text: "<image>" not in text and not any(token in text for token in CONTROL_TOKENS)
)
SOUND_ROWS = st.fixed_dictionaries(
    {
        "id": NOT_BLANK_TEXTS,
        "problem": PLAIN_TEXTS,
        "answer": NOT_BLANK_TEXTS,
        "images": st.lists(st.just(PIXELS), max_size=3),
        "choices": st.none() | st.lists(PLAIN_TEXTS),
    }
)
NO_TEXT_VALUES = (
    st.none() | st.sampled_from(["", " ", "\n\t"]) | st.integers() | st.lists(st.text())
)
TEXTS_AROUND = st.tuples(st.text(max_size=5), st.text(max_size=5))
BROKEN_VALUES_BY_COLUMN = {
    "id": NO_TEXT_VALUES,
    "answer": NO_TEXT_VALUES,
    "problem": NO_TEXT_VALUES
    | st.tuples(TEXTS_AROUND, st.sampled_from(CONTROL_TOKENS)).map(
        lambda drawn: drawn[1].join(drawn[0])
    )
    | TEXTS_AROUND.map("<image>".join),
    "images": st.none()
    | st.just("picture.png")
    | st.lists(st.just(PIXELS)).map(lambda images: [*images, None])
    | st.just([{"bytes": None, "path": None}]),
    "choices": st.just("12") | st.just(["1", None]) | st.just(["<|im_end|>"]),
}


@given(SOUND_ROWS)
def test_a_sound_row_passes(row):
    assert fault_in_row(row) is None


@given(SOUND_ROWS, st.sampled_from(sorted(BROKEN_VALUES_BY_COLUMN)), st.data())
def test_a_value_that_would_end_a_run_is_named_by_its_column_in_one_line(row, column, data):
    """A row of prepared data with one broken value has a fault of one line, which names the column.

    `fault_in_row` returns what is wrong with a row, None if nothing is.
    """
    row = {**row, column: data.draw(BROKEN_VALUES_BY_COLUMN[column])}
    if column == "problem" and "<image>" in str(row["problem"]):
        # as many as it has would be their places
        row["images"] = data.draw(st.sampled_from([[], [PIXELS] * 2]))
    problem = fault_in_row(row)
    assert problem is not None
    assert problem.startswith(f"{column}: ")
    assert "; " in problem
    assert len(problem.splitlines()) == 1
    assert len(problem) < 300


@given(SOUND_ROWS, st.sampled_from(["id", "problem", "answer", "images"]))
def test_a_column_that_is_not_there_is_like_null(row, column):
    """Each of these columns has to have a value."""
    rest = {name: value for name, value in row.items() if name != column}
    assert fault_in_row(rest) == fault_in_row({**row, column: None}) is not None


def test_the_drawn_problems_are_sound():
    assert all(
        fault_in_row(row) is None
        for row in generate(20, split="train", seed=0, size=56, families=())
    )


def test_every_token_that_the_tokenizer_would_not_read_as_text_is_refused():
    """A tokenizer makes one id of such a token, wherever it stands in a text."""
    tokenizer = load_processor(str(PRETRAINED_FOLDER)).tokenizer
    special = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    assert special
    assert set(special) <= set(CONTROL_TOKENS)


def test_two_placeholders_for_one_image_are_counted():
    problem = fault_in_row({**SOUND, "problem": "<image>Find <image> x."})
    assert "2 <image> with 1 image" in problem


@given(st.lists(SOUND_ROWS, min_size=1, max_size=5), st.data())
def test_a_table_says_the_same_as_its_rows_and_copies_no_picture(rows, data):
    """A check of an Arrow table finds the faults of its rows without the bytes of their images.

    One drawn row is broken, and the table has two chunks with the border behind that row.
    """
    position = data.draw(st.integers(0, len(rows) - 1))
    column = data.draw(st.sampled_from(["answer", "problem", "images"]))
    value = (
        data.draw(st.sampled_from([None, [], [None], [{"bytes": None, "path": None}]]))
        if column == "images"
        else None
    )
    rows[position] = {**rows[position], column: value}
    prepared_schema = schema().arrow_schema
    sound_schema = pa.schema([prepared_schema.field(name) for name in SOUND])
    table = pa.concat_tables(
        [
            pa.Table.from_pylist(part, sound_schema)
            for part in (rows[: position + 1], rows[position + 1 :])
        ]
    )
    rows_of_table = list(rows_without_pixels(table))
    assert [fault_in_row(row) for row in rows_of_table] == [fault_in_row(row) for row in rows]
    assert "pixels" not in repr([row["images"] for row in rows_of_table])


def test_the_first_broken_row_is_named_and_the_others_are_counted():
    """An error on broken rows names the first, by its id or number, and counts the others."""
    rows = [SOUND, {**SOUND, "id": "made/train/2", "answer": None}, {**SOUND, "id": None}]
    with pytest.raises(
        UserError, match=r"^data: row made/train/2: answer: null .* \(and 1 more such rows\)$"
    ):
        require_sound_rows(rows, "data")
    with pytest.raises(UserError, match=r"^data: row number 0: id: null"):
        require_sound_rows(rows[2:], "data")
    require_sound_rows(rows[:1], "data")


ROW = {"problem": "Find $x$ in {x}.", "choices": ["3", "4"], "hint": None, "number": 7}


def test_a_template_is_filled_with_the_columns_of_the_row(subtests):
    """Each case: a template, and the prompt that it makes of `ROW`."""
    cases = [
        ("{problem}", "Find $x$ in {x}."),
        ("{problem}\nChoices: {choices}", "Find $x$ in {x}.\nChoices: (A) 3 (B) 4"),
        (
            DEFAULT_PROMPT,
            "Find $x$ in {x}.\nChoices:\n(A) 3\n(B) 4\nAnswer with the letter of the right choice.",
        ),
        ("Hint: {hint}\n{problem}", "Find $x$ in {x}."),  # no line for what is null
        ("{problem} {hint}!", "Find $x$ in {x}. !"),
        ("Answer in \\boxed{{}}.\n\n{problem}", "Answer in \\boxed{}.\n\nFind $x$ in {x}."),
        ("<image>\n{number}: {problem}\n", "<image>\n7: Find $x$ in {x}.\n"),
    ]
    for source, text in cases:
        with subtests.test(f"{source!r:.80}"):
            assert read_template(source)(ROW) == text


def test_a_row_without_choices_is_asked_its_problem_alone(subtests):
    """A template leaves out its line with the choices for a row without any."""
    cases: Iterable[Any] = product(
        [DEFAULT_PROMPT, "{problem}\nChoices: {choices}"],
        [{}, {"choices": None}, {"choices": []}, {"choices": ()}],
    )
    for source, columns in cases:
        with subtests.test(f"{source!r:.80} {columns!r:.80}"):
            read_template(source).check_columns(["id", "problem", "answer", *columns], "here")
            assert read_template(source)({"problem": "Find x.", **columns}) == "Find x."


def test_choices_after_the_alphabet_are_numbered():
    """The last two of 28 choices have no letter; the first line is the problem's."""
    lines = read_template(DEFAULT_PROMPT)(
        {"problem": "?", "choices": list(map(str, range(28)))}
    ).splitlines()
    assert lines[27:30] == ["(Z) 25", "(27) 26", "(28) 27"]


def test_it_is_known_where_a_template_changes_nothing(subtests):
    """A template tells whether its prompt is the problem alone, for rows with and without choices.

    Each case: a template, and the answers without and with choices.
    """
    cases = [
        (DEFAULT_PROMPT, True, False),
        ("{problem}\n{choices}", True, False),
        ("{problem}", True, True),
        ("{problem} ", False, False),
        ("{problem}\nHint: {hint}", False, False),  # its rows may have one
        ("{hint}", False, False),
    ]
    for source, without_choices, with_choices in cases:
        with subtests.test(f"{source!r:.80}"):
            template = read_template(source)
            assert template.asks_the_problem_alone(with_choices=False) is without_choices
            assert template.asks_the_problem_alone(with_choices=True) is with_choices


def test_anything_else_is_one_line(subtests):
    """Each case: a template that is refused, and a part of the error."""
    cases = [
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
    ]
    for source, message in cases:
        with subtests.test(source):
            with pytest.raises(UserError, match=message) as refused:
                read_template(source)
            assert str(refused.value).startswith("adora_prompt: ")
            assert "\n" not in str(refused.value)


def test_a_column_that_is_not_there_is_named_with_the_nearest():
    with pytest.raises(UserError, match="'problm' is no column of here; did you mean 'problem'"):
        read_template("{problm}").check_columns(["id", "problem", "answer"], "here")


@given(st.text(alphabet="{}abc.[]!:_\n ", max_size=12), st.text(max_size=20))
def test_whatever_is_written_it_is_the_value_or_one_line(source, value):
    """A drawn template is refused in one line, or makes a prompt of the columns that it names."""
    row = dict.fromkeys(("a", "b", "c", "abc", "_"), value)
    try:
        prompt_template = read_template(source)
        prompt_template.check_columns(row, "here")
    except UserError as error:
        assert "\n" not in str(error)
        return
    text = prompt_template(row)
    assert value in text
    assert set(prompt_template.names) <= row.keys()
