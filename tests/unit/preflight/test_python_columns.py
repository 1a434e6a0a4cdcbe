"""Columns of data sets from Python that no step could use are refused before a weight is loaded."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset, Image, IterableDataset, List
from PIL import Image as PILImage

from adora_vl import AdoraGRPOConfig, AdoraGRPOTrainer
from adora_vl.data.dataloader import with_upright_rgb_images
from adora_vl.data.loading import unreadable_rows
from adora_vl.preflight.check_data import _check_pixel_limits
from adora_vl.preflight.python_columns import refuse_undecoded_columns, refuse_unusable_answers
from adora_vl.preflight.python_inputs import rewards_from_python
from adora_vl.utils.errors import UserError

PICTURE = PILImage.new("RGB", (56, 56), "red")
MESSAGES = [{"role": "user", "content": "How long is AB?"}]


def rows_with(column: str, value: object, count: int = 4) -> Dataset:
    """Return a data set in which each row has the same prompt, and this value in a column."""
    return Dataset.from_list([{"prompt": MESSAGES, column: value} for _ in range(count)])


def png() -> bytes:
    """Return the bytes of a PNG file of `PICTURE`."""
    file = io.BytesIO()
    PICTURE.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("column", "value", "remedy"),
    [
        ("images", ["a.png"], "cast_column('images', datasets.List(datasets.Image()))"),
        ("images", [png()], "cast_column('images', datasets.List(datasets.Image()))"),
        ("images", [{"bytes": png(), "path": None}], "cast_column('images', datasets.List("),
        ("images", PICTURE, "rename_column('images', 'image')"),
        ("image", "https://example.org/a.png", "cast_column('image', datasets.Image())"),
        ("image", [PICTURE], "rename_column('image', 'images')"),
    ],
    ids=["paths", "bytes", "dicts of bytes", "one picture", "URL", "list of pictures"],
)
@pytest.mark.parametrize("streams", [False, True], ids=["table", "stream"])
def test_pictures_that_are_not_decoded_are_refused_with_the_call_that_decodes_them(
    column, value, remedy, streams
):
    """The processor would fail at the first step, or read a path itself and record no picture."""
    rows = rows_with(column, value)
    with pytest.raises(UserError, match=f"^train_dataset: the column '{column}' is ") as refused:
        refuse_undecoded_columns("train_dataset", rows.to_iterable_dataset() if streams else rows)
    assert f"give dataset.{remedy}" in str(refused.value)


def test_what_the_remedy_makes_of_paths_is_taken(tmp_path):
    """Paths in a column that is cast are decoded; a list of fixed length is cast too."""
    file = tmp_path / "a.png"
    PICTURE.save(file)
    rows = rows_with("images", [str(file)])
    of_fixed_length = rows.cast_column("images", List(Image(), length=1))
    with pytest.raises(UserError, match=r"length=1\), and has to hold lists of decoded pictures"):
        refuse_undecoded_columns("train_dataset", of_fixed_length)
    for dataset in (rows, of_fixed_length):
        refuse_undecoded_columns("train_dataset", dataset.cast_column("images", List(Image())))


@pytest.mark.parametrize("value", [None, []])
def test_a_column_of_pictures_without_any_is_taken(value):
    refuse_undecoded_columns("train_dataset", rows_with("images", value))


def test_rows_that_come_as_tensors_are_refused_and_those_of_a_transform_are_not():
    """A transform may make pictures of anything, so only its rows can tell."""
    rows = rows_with("images", [PICTURE])
    with pytest.raises(UserError, match=r"in the format 'torch'.*give dataset.with_format\(None\)"):
        refuse_undecoded_columns("train_dataset", rows.with_format("torch"))
    paths = rows_with("images", ["a.png"]).with_transform(lambda batch: batch)
    refuse_undecoded_columns("train_dataset", paths)


def test_a_row_whose_images_are_no_pictures_is_unreadable():
    """Rows of a stream or a transform are known when they are drawn, whatever is in the columns."""
    rows: list[dict[str, object]] = [
        {"id": "path", "images": ["a.png"]},
        {"id": "bytes", "image": png()},
        {"id": "no list", "images": "a.png"},
        {"id": "null among them", "images": [PICTURE, None]},
        {"id": "picture", "images": [PICTURE]},
        {"id": "none", "images": [], "image": None},
    ]
    reasons = dict(unreadable_rows(with_upright_rgb_images(rows)))
    assert reasons == {
        "path": "it is of the type str, and no picture of Pillow (PIL)",
        "bytes": "it is of the type bytes, and no picture of Pillow (PIL)",
        "no list": "'images' is of the type str, and no list",
        "null among them": "it is of the type NoneType, and no picture of Pillow (PIL)",
    }


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            {"prompt": MESSAGES, "images": ["a.png"]},
            "row .*: it is of the type str, and no picture",
        ),
        ({"question": "How long is AB?"}, "row 0: its prompt is null; write messages"),
    ],
    ids=["paths", "no prompt"],
)
def test_the_first_rows_of_a_stream_are_read_before_the_weights(row, line, tmp_path):
    """The reward is one of ours, for which no row has to be read."""
    args = AdoraGRPOConfig(str(tmp_path / "run"), use_cpu=True, bf16=False, max_steps=1)
    stream = IterableDataset.from_generator(lambda: iter([{**row, "answer": "5"}] * 4))
    with pytest.raises(UserError, match=f"^train_dataset: {line}"):
        AdoraGRPOTrainer("tiny", "boxed_accuracy", args, stream)


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [
        (None, "its prompt is null"),
        ([], r"its prompt is \[\]"),
        ("", "its prompt is ''"),
        (
            [{"from": "human", "value": "How long is AB?"}],
            "its prompt has the message .* without a role",
        ),
    ],
    ids=["null", "no messages", "no text", "another trainer's"],
)
def test_a_prompt_that_is_neither_messages_nor_a_text_is_refused(prompt, fault, tmp_path):
    args = AdoraGRPOConfig(str(tmp_path / "run"), use_cpu=True, bf16=False, max_steps=1)
    rows = Dataset.from_list([{"prompt": prompt}] * 8)
    with pytest.raises(UserError, match=f"^train_dataset: row 0: {fault}"):
        AdoraGRPOTrainer("tiny", lambda completions, **kwargs: [0.0], args, rows)


def test_answers_that_a_reward_cannot_compare_with_are_refused_before_the_run():
    """A missing column is named, and so is the first row whose answer nothing could be equal to."""
    rewards = rewards_from_python("boxed_accuracy", Path())
    with pytest.raises(UserError, match="'boxed_accuracy' needs 'answer', which is no column of"):
        refuse_unusable_answers("train_dataset", rewards, rows_with("solution", "5"))
    faults = [
        (5, "not_a_string"),
        (["5"], "not_a_string"),
        (None, "not_a_string"),
        ("$5", "currency"),
    ]
    for answer, reason in faults:
        good_rows = [{"prompt": MESSAGES, "answer": "5"}] * 2
        if isinstance(answer, (int, list)):  # a column has values of one type
            good_rows = []
        rows = Dataset.from_list([*good_rows, {"prompt": MESSAGES, "answer": answer}])
        line = f"^train_dataset: row {len(good_rows)}: answer .* cannot be graded against .{reason}"
        with pytest.raises(UserError, match=line):
            refuse_unusable_answers("train_dataset", rewards, rows)


def test_answers_are_compared_with_the_choices_of_their_row():
    """`B` stands for a value where the row has choices, and the same text may be none elsewhere."""
    rewards = rewards_from_python(["accuracy", "format"], Path())
    rows = Dataset.from_list(
        [
            {"prompt": MESSAGES, "answer": "B", "choices": ["3", "5"]},
            {"prompt": MESSAGES, "answer": "5", "choices": None},
        ]
    )
    refuse_unusable_answers("train_dataset", rewards, rows)


def test_choices_that_are_no_texts_are_refused():
    """A grader compares an answer with the texts of the choices."""
    rewards = rewards_from_python("accuracy", Path())
    rows = Dataset.from_list([{"prompt": MESSAGES, "answer": "B", "choices": [["1"], ["2"]]}])
    with pytest.raises(UserError, match="^train_dataset: row 0: .*choices: write a list of texts"):
        refuse_unusable_answers("train_dataset", rewards, rows)


def test_a_reward_of_the_user_s_needs_no_answers():
    def accuracy(completions, **kwargs):
        return [0.0] * len(completions)

    refuse_unusable_answers(
        "train_dataset", rewards_from_python(accuracy, Path()), rows_with("solution", 5)
    )


def test_an_evaluation_needs_a_processor_whose_image_tokens_can_be_counted():
    """Else the first evaluation on the way would end a run that has begun."""
    with_limits = SimpleNamespace(size={"shortest_edge": 3136, "longest_edge": 12544})
    with_sides = SimpleNamespace(size={"height": 336, "width": 336})
    for image_processor in (None, with_limits):  # a text model has none
        _check_pixel_limits(SimpleNamespace(image_processor=image_processor))
    with pytest.raises(UserError, match="needs an image processor with limits in pixels"):
        _check_pixel_limits(SimpleNamespace(image_processor=with_sides))
