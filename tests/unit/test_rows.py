"""A row that would end a run, or an evaluation, is named before it begins."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adora_vl.errors import UserError
from adora_vl.models.load import load_processor
from adora_vl.models.tiny.build import PRETRAINED
from adora_vl.rows import CONTROL_TOKENS, problem_with_row, require_sound_rows, rows_without_pixels
from data_prep.schema import FEATURES
from data_prep.synthetic.generate import generate

PIXELS = {"bytes": b"pixels", "path": None}
SOUND = {"id": "made/train/1", "problem": "Find $x$.", "answer": "12", "images": [PIXELS], "choices": None}

texts = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1).filter(str.strip)
plain = texts.filter(lambda text: "<image>" not in text and not any(token in text for token in CONTROL_TOKENS))
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


@settings(deadline=None)
@given(sound_rows)
def test_a_sound_row_passes(row):
    assert problem_with_row(row) is None


@settings(deadline=None)
@given(sound_rows, st.sampled_from(sorted(broken_values)), st.data())
def test_a_value_that_would_end_a_run_is_named_by_its_column_in_one_line(row, column, data):
    row = {**row, column: data.draw(broken_values[column])}
    if column == "problem" and "<image>" in str(row["problem"]):
        row["images"] = data.draw(st.sampled_from([[], [PIXELS] * 2]))  # as many as it has would be their places
    problem = problem_with_row(row)
    assert problem is not None and problem.startswith(f"{column}: ") and "; " in problem
    assert len(problem.splitlines()) == 1 and len(problem) < 300


@settings(deadline=None)
@given(sound_rows, st.sampled_from(["id", "problem", "answer", "images"]))
def test_a_column_that_is_not_there_is_like_null(row, column):
    rest = {name: value for name, value in row.items() if name != column}
    assert problem_with_row(rest) == problem_with_row({**row, column: None}) is not None


def test_the_drawn_problems_are_sound():
    assert all(problem_with_row(row) is None for row in generate(20, split="train", seed=0, size=56, families=()))


def test_every_token_that_the_tokenizer_would_not_read_as_text_is_refused():
    tokenizer = load_processor(str(PRETRAINED)).tokenizer
    special = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    assert special and set(special) <= set(CONTROL_TOKENS)


def test_two_placeholders_for_one_image_are_counted():
    problem = problem_with_row({**SOUND, "problem": "<image>Find <image> x."})
    assert "2 <image> with 1 image" in problem


@settings(deadline=None)
@given(st.lists(sound_rows, min_size=1, max_size=5), st.data())
def test_a_table_says_the_same_as_its_rows_and_copies_no_picture(rows, data):
    at, column = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.sampled_from(["answer", "problem", "images"]))
    value = (
        data.draw(st.sampled_from([None, [], [None], [{"bytes": None, "path": None}]])) if column == "images" else None
    )
    rows[at] = {**rows[at], column: value}
    schema = FEATURES.arrow_schema
    kept = pa.schema([schema.field(name) for name in SOUND])
    table = pa.concat_tables([pa.Table.from_pylist(part, kept) for part in (rows[: at + 1], rows[at + 1 :])])
    read = list(rows_without_pixels(table))
    assert [problem_with_row(row) for row in read] == [problem_with_row(row) for row in rows]
    assert "pixels" not in repr([row["images"] for row in read])


def test_the_first_broken_row_is_named_and_the_others_are_counted():
    rows = [SOUND, {**SOUND, "id": "made/train/2", "answer": None}, {**SOUND, "id": None}]
    with pytest.raises(UserError, match=r"^data: row made/train/2: answer: null .* \(and 1 more such rows\)$"):
        require_sound_rows(rows, "data")
    with pytest.raises(UserError, match=r"^data: row number 0: id: null"):
        require_sound_rows(rows[2:], "data")
    require_sound_rows(rows[:1], "data")
