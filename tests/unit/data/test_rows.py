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

texts = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1).filter(str.strip)
plain = texts.filter(
    lambda text: "<image>" not in text and not any(token in text for token in CONTROL_TOKENS)
)
sound_rows = st.fixed_dictionaries(
    {
        "id": texts,
        "problem": plain,
        "answer": texts,
        "images": st.lists(st.just(PIXELS), max_size=3),
        "choices": st.none() | st.lists(plain),
    }
)
no_text = st.none() | st.sampled_from(["", " ", "\n\t"]) | st.integers() | st.lists(st.text())
around = st.tuples(st.text(max_size=5), st.text(max_size=5))
broken_values = {
    "id": no_text,
    "answer": no_text,
    "problem": no_text
    | st.tuples(around, st.sampled_from(CONTROL_TOKENS)).map(lambda drawn: drawn[1].join(drawn[0]))
    | around.map("<image>".join),
    "images": st.none()
    | st.just("picture.png")
    | st.lists(st.just(PIXELS)).map(lambda images: [*images, None])
    | st.just([{"bytes": None, "path": None}]),
    "choices": st.just("12") | st.just(["1", None]) | st.just(["<|im_end|>"]),
}


@given(sound_rows)
def test_a_sound_row_passes(row):
    assert fault_in_row(row) is None


@given(sound_rows, st.sampled_from(sorted(broken_values)), st.data())
def test_a_value_that_would_end_a_run_is_named_by_its_column_in_one_line(row, column, data):
    row = {**row, column: data.draw(broken_values[column])}
    if column == "problem" and "<image>" in str(row["problem"]):
        # as many as it has would be their places
        row["images"] = data.draw(st.sampled_from([[], [PIXELS] * 2]))
    problem = fault_in_row(row)
    assert problem is not None
    assert problem.startswith(f"{column}: ")
    assert "; " in problem
    assert len(problem.splitlines()) == 1
    assert len(problem) < 300


@given(sound_rows, st.sampled_from(["id", "problem", "answer", "images"]))
def test_a_column_that_is_not_there_is_like_null(row, column):
    rest = {name: value for name, value in row.items() if name != column}
    assert fault_in_row(rest) == fault_in_row({**row, column: None}) is not None


def test_the_drawn_problems_are_sound():
    assert all(
        fault_in_row(row) is None
        for row in generate(20, split="train", seed=0, size=56, families=())
    )


def test_every_token_that_the_tokenizer_would_not_read_as_text_is_refused():
    tokenizer = load_processor(str(PRETRAINED_FOLDER)).tokenizer
    special = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    assert special
    assert set(special) <= set(CONTROL_TOKENS)


def test_two_placeholders_for_one_image_are_counted():
    problem = fault_in_row({**SOUND, "problem": "<image>Find <image> x."})
    assert "2 <image> with 1 image" in problem


@given(st.lists(sound_rows, min_size=1, max_size=5), st.data())
def test_a_table_says_the_same_as_its_rows_and_copies_no_picture(rows, data):
    at = data.draw(st.integers(0, len(rows) - 1))
    column = data.draw(st.sampled_from(["answer", "problem", "images"]))
    value = (
        data.draw(st.sampled_from([None, [], [None], [{"bytes": None, "path": None}]]))
        if column == "images"
        else None
    )
    rows[at] = {**rows[at], column: value}
    ours = schema().arrow_schema
    sound_schema = pa.schema([ours.field(name) for name in SOUND])
    table = pa.concat_tables(
        [pa.Table.from_pylist(part, sound_schema) for part in (rows[: at + 1], rows[at + 1 :])]
    )
    read = list(rows_without_pixels(table))
    assert [fault_in_row(row) for row in read] == [fault_in_row(row) for row in rows]
    assert "pixels" not in repr([row["images"] for row in read])


def test_the_first_broken_row_is_named_and_the_others_are_counted():
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
    cases: Iterable[Any] = product(
        [DEFAULT_PROMPT, "{problem}\nChoices: {choices}"],
        [{}, {"choices": None}, {"choices": []}, {"choices": ()}],
    )
    for source, columns in cases:
        with subtests.test(f"{source!r:.80} {columns!r:.80}"):
            read_template(source).check_columns(["id", "problem", "answer", *columns], "here")
            assert read_template(source)({"problem": "Find x.", **columns}) == "Find x."


def test_choices_after_the_alphabet_are_numbered():
    lines = read_template(DEFAULT_PROMPT)(
        {"problem": "?", "choices": list(map(str, range(28)))}
    ).splitlines()
    assert lines[27:30] == ["(Z) 25", "(27) 26", "(28) 27"]


def test_it_is_known_where_a_template_changes_nothing(subtests):
    cases = [
        (DEFAULT_PROMPT, True, False),
        ("{problem}\n{choices}", True, False),
        ("{problem}", True, True),
        ("{problem} ", False, False),
        ("{problem}\nHint: {hint}", False, False),  # its rows may have one
        ("{hint}", False, False),
    ]
    for source, without, with_some in cases:
        with subtests.test(f"{source!r:.80}"):
            prompt_template = read_template(source)
            answers = (
                prompt_template.asks_the_problem_alone(with_choices=False),
                prompt_template.asks_the_problem_alone(with_choices=True),
            )
            assert answers == (without, with_some)


def test_anything_else_is_one_line(subtests):
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
