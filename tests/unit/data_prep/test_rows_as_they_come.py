"""Rows as they are in the world: marks of images, boxed answers, conversations, repeats and
contradictions.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adora_vl.conversion.chat import split_off_instruction
from adora_vl.conversion.convert import ensure_converted
from adora_vl.conversion.placeholders import MisplacedImagesError, TextWithImages, place_images
from adora_vl.data.dataset import read_manifest
from data_prep.cli import main
from tests.support.cases import CaseFolder
from tests.support.geometry3k import read_quarantined_rows, stderr_of_refusal
from tests.support.pictures import draw_figure, encode_picture
from tests.support.user_tables import (
    PNG_FILES,
    read_prepared_rows,
    run_convert,
    write_user_csv,
    write_user_jsonl,
)

# The columns of the table have names of one letter: q question, a answer, i image, c choices.
COLUMN_ARGUMENTS = ("problem=q", "answer=a", "images=i", "choices=c")
# The text of a question as a part of a conversation, with the keys of other parts set to None.
QUESTION_PART = {"type": "text", "text": "How long is AB?", "image": None, "image_url": None}
ROW_WITH_IMAGE = {"q": "Find x.", "a": "5", "i": "pics/0.png"}


def noted_counts(output: Path) -> dict[str, int]:
    """How many rows the manifest notes under each name, such as {"percent": 1}."""
    manifest = read_manifest(output)
    assert manifest is not None
    return {name: note["rows"] for name, note in manifest.get("warnings", {}).items()}


def test_each_mark_of_an_image_is_the_place_of_one(subtests: pytest.Subtests) -> None:
    """A mark of an image becomes `<image>`, and the images come in the order of their marks.

    Each case: a text, the number of its images, the text with its marks replaced, the order of the
    images, and whether the text numbers more images than there are.
    """
    cases: list[tuple[str, int, str, tuple[int, ...], bool]] = [
        ("Which?\n<image1>", 1, "Which?\n<image>", (0,), False),
        ("<image1>\nWhich?", 1, "Which?", (0,), False),
        ("See <|image|> and [image].", 2, "See <image> and <image>.", (0, 1), False),
        ("See <img> or <image>.", 2, "See <image> or <image>.", (0, 1), False),
        ("See <image 1>, <image 2>.", 2, "See <image>, <image>.", (0, 1), False),
        ("See <image2>, then <image1>.", 2, "See <image>, then <image>.", (1, 0), False),
        ("See <image0>, then <image1>.", 2, "See <image>, then <image>.", (0, 1), False),
        ("See <image1>; in <image1> is x.", 1, "See <image>; in image 1 is x.", (0,), False),
        ("See <image1> only.", 2, "See <image> only.\n<image>", (0, 1), False),
        (
            "Is <image1> as <image2> or <image3>?",
            1,
            "Is <image> as image 2 or image 3?",
            (0,),
            True,
        ),
        ("<image2> or <image3>?", 1, "or image 3?", (0,), True),
        ("See <|vision_start|><|image_pad|><|vision_end|>!", 1, "See <image>!", (0,), False),
        ("<image1>", 1, "<image>", (0,), False),
        ("No mark.", 2, "No mark.", (0, 1), False),
        ("<image><image>Both.", 2, "Both.", (0, 1), False),
        ("An <imagine> and [images].", 0, "An <imagine> and [images].", (), False),
    ]
    for text, image_count, placed, order, lacks_images in cases:
        with subtests.test(text):
            assert place_images(text, image_count) == TextWithImages(placed, order, lacks_images)
    for text, image_count, message in [
        ("See <image1>.", 0, "has <image1> and the row no image; put the picture in"),
        ("See [image].", 0, "has [image] and the row no image; put the picture in"),
        ("<image> <image>", 1, "has 2 <image> and the row 1 image; give as many"),
        ("<image> <image2>", 2, "with and without numbers; number all of them"),
    ]:
        with subtests.test(text), pytest.raises(MisplacedImagesError, match=re.escape(message)):
            place_images(text, image_count)


def test_numbered_images_reach_the_row_in_the_order_of_their_places(tmp_path, capsys):
    """Images that a problem numbers are stored in the order in which it names them.

    A number without an image becomes words, as in "image 2". The fourth row has a mark and no image
    at all, so it is refused.
    """
    rows = [
        {"q": "First <image2>, then <image1>.", "a": "1", "i": ["pics/0.png", "pics/1.png"]},
        {"q": "Is <image1> as <image2>?", "a": "2", "i": "pics/2.png"},
        {"q": "Which is as <image1>?", "a": "B", "i": "pics/3.png", "c": ["<image2>", "<image3>"]},
        {"q": "Where is <image1>?", "a": "4", "i": ""},
    ]
    source = write_user_jsonl(tmp_path / "in", rows)
    assert (
        run_convert(
            source, tmp_path / "out", "--allow-quarantined", "0.5", columns=COLUMN_ARGUMENTS
        )
        == 0
    )
    first, second, third = read_prepared_rows(tmp_path / "out")
    assert [image["bytes"] for image in first["images"]] == [PNG_FILES[1], PNG_FILES[0]]
    assert second["problem"] == "Is <image> as image 2?"
    assert third["choices"] == [
        "image 2",
        "image 3",
    ]
    (line,) = read_quarantined_rows(tmp_path / "out")
    assert line["reason"] == "placeholder"
    assert "<image1> and the row no image" in line["detail"]
    assert "line 7 of mine.jsonl" in line["detail"], "its lines have an empty one between them"
    # a row that numbers more images than it has, and one with images in its choices
    assert noted_counts(tmp_path / "out") == {"parts": 1, "options": 1}
    output = capsys.readouterr().out
    assert "noted: 1 of the rows number more images" in output
    assert line["detail"] in output
    assert run_convert(source, tmp_path / "without", columns=("problem=q", "answer=a")) == 2
    assert "name the column with the pictures, images=COLUMN" in capsys.readouterr().err


def test_nothing_in_a_cell_is_no_image_and_no_choices(case_folder: CaseFolder) -> None:
    """An empty cell, in any of four forms, gives a row no image and no choices.

    Beside such rows stand one with an image, and one that lacks both columns.
    """
    nothing: list[tuple[Any, Any]] = [
        ("", ""),
        (None, None),
        ([], []),
        (" ", " "),
    ]
    for form in ("jsonl", "csv"):
        with case_folder(form) as folder:
            rows = [
                {"q": f"What is {n}?", "a": "5", "i": i, "c": c} for n, (i, c) in enumerate(nothing)
            ]
            rows.append({"q": "Find x.", "a": "5", "i": "pics/0.png", "c": ""})
            if form == "jsonl":
                rows.append({"q": "What is 9?", "a": "5"})
            source = write_user_jsonl(folder / "in", rows)  # with its pictures
            if form == "csv":
                source = write_user_csv(folder / "in", "csv", rows)
            assert run_convert(source, folder / "out", columns=COLUMN_ARGUMENTS) == 0
            stored = read_prepared_rows(folder / "out")
            assert [len(row["images"]) for row in stored] == [0, 0, 0, 0, 1, 0][: len(rows)]
            assert not any(row["choices"] for row in stored)
            assert noted_counts(folder / "out") == {"without_image": len(rows) - 1}


def test_questions_that_differ_in_a_sign_are_no_leak(tmp_path: Path) -> None:
    """Questions are compared without punctuation, of which a sign of arithmetic is no part."""
    for split, sign in (("train", "+"), ("test", "-")):
        source = write_user_jsonl(tmp_path / "in", [{"q": f"What is 2 {sign} 3?", "a": "5"}])
        source.rename(tmp_path / "in" / f"{split}.jsonl")
    assert run_convert(tmp_path / "in", tmp_path / "out", columns=COLUMN_ARGUMENTS[:2]) == 0
    assert len(read_prepared_rows(tmp_path / "out")) == 1
    assert not (tmp_path / "out" / "quarantine.jsonl").exists()


def test_an_answer_that_nobody_can_meet_is_refused_with_what_to_write(tmp_path, capsys):
    """An answer that the grader cannot read as a number is refused, with what to write instead.

    These are the last three answers. Lines are counted with the head of the table.
    """
    rows = [{"q": f"Find x{n}.", "a": answer} for n, answer in enumerate(["5", "$5", "3,5", "5'"])]
    source = write_user_csv(tmp_path / "in", "csv", rows)
    assert (
        run_convert(
            source, tmp_path / "out", "--allow-quarantined", "1", columns=COLUMN_ARGUMENTS[:2]
        )
        == 0
    )
    output = capsys.readouterr().out
    for line, answer, remedy in (
        (3, "$5", "5 for $5"),
        (4, "3,5", "write 3.5"),
        (5, "5'", "number alone"),
    ):
        (message,) = [text for text in output.splitlines() if f"line {line} of mine.csv" in text]
        assert repr(answer) in message
        assert remedy in message


def test_a_line_is_counted_as_the_file_does(tmp_path: Path) -> None:
    """A refused row is named by the line of its file that an editor shows, or by its number.

    A line break in quotes and an empty line count. A row of Parquet and an item of a JSON list have
    numbers of their own.
    """
    (tmp_path / "mine.csv").write_text('q,a\n"What\nis 1?",1\n\n"What is 2?",nan\n')
    code = run_convert(
        tmp_path / "mine.csv",
        tmp_path / "out",
        "--allow-quarantined",
        "1",
        columns=COLUMN_ARGUMENTS[:2],
    )
    assert code == 0
    assert "line 5 of mine.csv" in read_quarantined_rows(tmp_path / "out")[0]["detail"]
    pq.write_table(
        pa.Table.from_pylist([{"q": "1?", "a": "1"}, {"q": "2?", "a": "nan"}]),
        tmp_path / "mine.parquet",
    )
    (tmp_path / "mine.json").write_text(
        json.dumps([{"q": "1?", "a": "1"}, {"q": "2?", "a": "nan"}])
    )
    for name, position in (("parquet", "row 2"), ("json", "item 2")):
        output = tmp_path / f"out.{name}"
        code = run_convert(
            tmp_path / f"mine.{name}",
            output,
            "--allow-quarantined",
            "1",
            columns=COLUMN_ARGUMENTS[:2],
        )
        assert code == 0
        assert f"{position} of mine.{name}" in read_quarantined_rows(output)[0]["detail"]


INSTRUCTION = "Reason first, in <think> </think> tags. Put the final answer in \\boxed{}."


INSTRUCTION_OF_COUNTING = (
    "Output the thinking process in <think> </think> and\n"
    " final answer (number) in <answer> </answer> tags."
)
INSTRUCTION_OF_GEO3K = (
    "You FIRST think about the reasoning process as an internal monologue and then provide "
    "the final answer. The reasoning process MUST BE enclosed within <think> </think> tags. "
    "The final answer MUST BE put in \\boxed{}."
)
ROW_OF_VERL = {
    "data_source": "hiyouga/geometry3k",
    "images": ["pics/0.png"],
    "ability": "math",
    "prompt": [{"role": "user", "content": f"<image>Find x. {INSTRUCTION_OF_GEO3K}"}],
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"split": "train", "index": 0, "answer": "3", "question": "<image>Find x."},
}


class ForeignRow(NamedTuple):
    """A row in the form of another trainer, and what it becomes."""

    preset: str
    row: dict[str, Any]
    problem: str
    instruction: str = ""  # that stands behind the problem
    image_count: int = 1


ROWS_OF_OTHER_TRAINERS = [
    ForeignRow("verl", ROW_OF_VERL, problem="Find x.", instruction=INSTRUCTION_OF_GEO3K),
    ForeignRow(
        "verl",
        {
            **ROW_OF_VERL,
            "prompt": [{"role": "system", "content": "Be brief."}, *ROW_OF_VERL["prompt"]],
            "images": [{"path": "pics/0.png"}],
        },
        problem="Find x.",
        instruction=INSTRUCTION_OF_GEO3K,
    ),
    ForeignRow(
        "easyr1",
        {"images": ["pics/0.png"], "answer": "3", "problem": "<image>Find x."},
        problem="Find x.",
    ),
    ForeignRow(
        "easyr1",
        {"images": ["pics/0.png"], "answer": "3", "prompt": f"<image>Find x. {INSTRUCTION}"},
        problem="Find x.",
        instruction=INSTRUCTION,
    ),
    ForeignRow(
        "swift",
        {
            "messages": [{"role": "user", "content": f"How many? {INSTRUCTION_OF_COUNTING}"}],
            "images": ["pics/0.png"],
            "solution": "<answer> 3 </answer>",
        },
        problem="How many?",
        instruction=INSTRUCTION_OF_COUNTING,
    ),
    ForeignRow(
        "swift",
        {
            "messages": [
                {"role": "system", "content": "You are a useful and harmless math calculator"},
                {"role": "user", "content": "1 + 2?"},
            ],
            "solution": "3",
        },
        problem="1 + 2?",
        image_count=0,
    ),
    ForeignRow(
        "swift",
        {"query": "Solve the equation x + 2 = 5", "solution": "3"},
        problem="Solve the equation x + 2 = 5",
        image_count=0,
    ),
    ForeignRow(
        "swift",
        {"image": "pics/0.png", "problem": "Sides?", "solution": "<answer> 3 </answer>"},
        problem="Sides?",
    ),
    ForeignRow(
        "swift",
        {"query": "1 + 2?", "solution": "We add. The value is \\(\\boxed{3}\\)."},
        problem="1 + 2?",
        image_count=0,
    ),
    ForeignRow(
        "swift",
        {"query": "1 + 2?", "solution": "<think>One, two.</think><answer>3</answer>"},
        problem="1 + 2?",
        image_count=0,
    ),
]


def test_rows_of_other_trainers_are_read_as_they_are(
    case_folder: CaseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows in the forms of other trainers become problems; their instructions may be taken off.

    The rows are those of verl's examples/data_preprocess/geo3k.py, EasyR1's data set, ms-swift's
    pages Custom-dataset and GRPO-Multi-Modal-Training, and the set of R1-V that the latter names.
    """
    for foreign in ROWS_OF_OTHER_TRAINERS:
        with case_folder(f"{foreign.preset} {foreign.row}") as folder:
            source = write_user_jsonl(folder / "in", [foreign.row])
            whole_text = f"{foreign.problem} {foreign.instruction}".strip()
            for options, expected_problem, noted_as in (
                ([], whole_text, "--drop-instruction takes it off"),
                (["--drop-instruction"], foreign.problem, "it was taken off"),
            ):
                capsys.readouterr()
                output = folder / "".join(["out", *options])
                arguments = ["--input", str(source), "--output", str(output), *options]
                assert main(["convert", "--preset", foreign.preset, *arguments]) == 0
                (stored,) = read_prepared_rows(output)
                assert stored["problem"] == expected_problem
                assert stored["answer"] == "3"
                assert len(stored["images"]) == foreign.image_count
                has_note = noted_as in capsys.readouterr().out
                assert has_note == (foreign.instruction != "")


def test_pictures_inside_of_a_conversation(case_folder: CaseFolder) -> None:
    """A picture inside of a conversation is found in each form that is in use.

    ms-swift and the chat templates put it into a part of the question.
    """
    data = "data:image/png;base64," + base64.b64encode(PNG_FILES[0]).decode()
    for name, part in {
        "address object": {
            "type": "image_url",
            "image_url": {"url": "pics/0.png", "detail": "auto"},
        },
        "address": {"type": "image_url", "image_url": "./pics/0.png"},
        "data URL": {"type": "image_url", "image_url": {"url": data}},
        "data URL without a type": {"type": "image", "image": data.replace("/png", "")},
        "file URL": {"type": "image", "image": "file://FOLDER/pics/0.png"},
        "relative file URL": {"type": "image", "url": "file://pics/0.png"},
        "escaped file URL": {"type": "image", "path": "FILE://FOLDER/pics/%30.png"},
        "whole path": {"type": "image", "text": None, "image": "FOLDER/pics/0.png"},
        "path and no bytes": {"type": "image", "image": {"bytes": None, "path": "pics/0.png"}},
    }.items():
        with case_folder(name) as folder:
            # the whole path of the input's folder is known only here
            part = json.loads(json.dumps(part).replace("FOLDER", str(folder / "in")))
            source = write_user_jsonl(folder / "in", [conversation_row([part, QUESTION_PART])])
            code = main(
                [
                    "convert",
                    "--preset",
                    "swift",
                    "--input",
                    str(source),
                    "--output",
                    str(folder / "out"),
                ]
            )
            assert code == 0
            (row,) = read_prepared_rows(folder / "out")
            assert row["problem"] == "How long is AB?"
            assert [i["bytes"] for i in row["images"]] == [PNG_FILES[0]]


PICTURE_PART = {"type": "image_url", "image_url": {"url": "pics/1.png"}}
OR_PART = {"type": "text", "text": " or "}


def test_pictures_of_a_conversation_keep_their_places(case_folder: CaseFolder) -> None:
    """Pictures in a conversation keep their places in the text.

    Pictures of the system message are none of the question, and a bare mark takes the next of
    `images`.
    """
    is_part = {"type": "text", "text": "Is "}
    mark = {"type": "image"}
    other_picture = {"type": "image", "image": "pics/0.png"}
    system = {"role": "system", "content": [{"type": "image", "image": "pics/3.png"}]}
    # rows, and the numbers of their pictures
    cases = [
        (conversation_row([is_part, PICTURE_PART, OR_PART, other_picture]), [1, 0]),
        (
            conversation_row([is_part, mark, OR_PART, mark], images=["pics/2.png", "pics/0.png"]),
            [2, 0],
        ),
        (conversation_row([is_part, PICTURE_PART, OR_PART, PICTURE_PART], system), [1, 1]),
    ]
    for row, pictures in cases:
        with case_folder(str(row)) as folder:
            source = write_user_jsonl(folder / "in", [row])
            arguments = ["--input", str(source), "--output", str(folder / "out")]
            assert main(["convert", "--preset", "swift", *arguments]) == 0
            (stored,) = read_prepared_rows(folder / "out")
            assert stored["problem"] == "Is <image> or <image>"
            assert [image["bytes"] for image in stored["images"]] == [
                PNG_FILES[number] for number in pictures
            ]


def test_pictures_of_a_conversation_come_from_nowhere_else(case_folder: CaseFolder) -> None:
    """A picture of a conversation that is not in the folder of its file refuses its row."""
    for address, reason, message in [
        (
            "https://example.org/a.png",
            "not_a_file",
            "nothing is downloaded; put the picture itself into line 3",
        ),
        (
            "file:///etc/hostname",
            "path_outside",
            "'file:///etc/hostname', which leads out of the input's folder",
        ),
        ("file://../outside.png", "path_outside", "leads out of the input's folder"),
        ("file://pics/9.png", "file_missing", "no file"),
        (None, "no_image", "image 1 is null; put the picture, or its path, into line 3"),
        (
            "twice",
            "field_type",
            "pictures in the conversation and beside it; leave them out of one of the two in",
        ),
    ]:
        with case_folder(str(address)) as folder:
            both = {"images": ["pics/0.png"]} if address == "twice" else {}
            row = conversation_row(
                [PICTURE_PART, OR_PART, {"type": "image_url", "image_url": {"url": address}}],
                **both,
            )
            source = write_user_jsonl(folder / "in", [{"query": "1 + 1?", "solution": "2"}, row])
            arguments = ["--preset", "swift", "--input", str(source), "--allow-quarantined", "0.5"]
            assert main(["convert", *arguments, "--output", str(folder / "out")]) == 0
            (line,) = read_quarantined_rows(folder / "out")
            assert line["reason"] == reason, line
            assert message in line["detail"], line


def test_a_picture_in_a_conversation_that_changes_makes_the_data_set_of_a_config_anew(
    tmp_path: Path,
) -> None:
    """A data set that a config names is converted again if a picture in its conversations changes.

    It is converted into a cache.
    """
    source = write_user_jsonl(
        tmp_path / "in",
        [conversation_row([{"type": "image", "image": "file://pics/0.png"}, QUESTION_PART])],
    )
    columns = {"problem": "messages", "answer": "solution"}
    folder = ensure_converted(str(source), columns, tmp_path / "cache")
    (tmp_path / "in" / "pics" / "0.png").write_bytes(encode_picture(draw_figure(7, size=64)))
    assert ensure_converted(str(source), columns, tmp_path / "cache") == folder
    assert [image["bytes"] for image in read_prepared_rows(folder)[0]["images"]] == [
        encode_picture(draw_figure(7, size=64))
    ]


def conversation_row(
    content: list[dict[str, Any]], *before: dict[str, Any], **columns: Any
) -> dict[str, Any]:
    """Return a row of ms-swift with the answer 3, whose question has this content."""
    return {"messages": [*before, {"role": "user", "content": content}], "solution": "3", **columns}


# by the name of a note: a part of its line, and rows (problem, answer, 1 if the row is noted)
NOTED_ANSWERS: dict[str, tuple[str, list[tuple[str, str, int]]]] = {
    "percent": (
        "50 is wrong for 50%",
        [
            ("What share is shaded?", "50%", 1),
            ("What share is shaded?", r"50\%", 1),
            ("What share is shaded?", "50", 0),
            ("What percent is shaded?", "50%", 0),
            ("How many % are shaded?", "50%", 0),
        ],
    ),
    "words": (
        "the number alone is wrong for them",
        [  # a text, so that the number would be wrong at every step
            ("How long?", "3 pens", 1),
            *(
                ("How long?", answer, 0)
                for answer in ("#### 5", "10 km/h", "5 cm", "x = 5", "3x + 1", "12:30")
            ),
            *(
                ("How long?", answer, 0)
                for answer in ("rhombus", "AD and BE", r"\angle 2 and \angle 6")
            ),
        ],
    ),
    "stated": (
        "what stands behind its last `Answer:`",
        [
            *(
                ("How long?", answer, 1)
                for answer in ("The answer is 5", "We add, so it is 5.\nAnswer: 5", "答案：5")
            ),
            *(("How long?", answer, 0) for answer in ("5", "#### 5", r"so \boxed{5}")),
        ],
    ),
    "options_in_text": (
        "--keep-options-in-text leaves them there",
        [
            ("Which? A: 4 B: 5 C: 6", "B", 1),
            ("Which?\nOptions:\n(A) 4\n(B) 5", "5", 1),
            ("Which?\nA. 4\nB. 5\nAnswer with the letter.", "B. 5", 1),
            ("Which? A: 4 B: 5 C: 6", "7", 0),
            ("A: (0, 0), B: (3, 4). How long is AB?", "5", 0),
            ("Triangle ABC has a right angle at B. How long?", "B", 0),
        ],
    ),
    "no_answer": (
        "it is taken as a text",
        [
            *(("Which figure is it?", answer, 1) for answer in ("N/A", "null", "None", "?", "-")),
            *(("Which figure is it?", answer, 0) for answer in ("no", "nonagon")),
        ],
    ),
}


def test_an_answer_graded_otherwise_than_meant_is_counted(
    case_folder: CaseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows whose answer may be graded otherwise than meant are kept, and counted with why."""
    for name, (message, rows) in NOTED_ANSWERS.items():
        for problem, answer, counted in rows:
            with case_folder(f"{problem} {answer}") as folder:
                source = write_user_jsonl(
                    folder / "in", [{"q": problem, "a": answer, "i": "pics/0.png"}]
                )
                capsys.readouterr()
                run_convert(
                    source, folder / "out", "--allow-quarantined", "1", columns=COLUMN_ARGUMENTS[:3]
                )
                assert noted_counts(folder / "out").get(name, 0) == counted
                assert (message in capsys.readouterr().out) == bool(counted)
    with case_folder("choices") as folder:
        row = {"q": "How long?", "a": "A", "i": "pics/0.png", "c": ["3 hours", "4 hours"]}
        assert (
            run_convert(
                write_user_jsonl(folder / "in", [row]), folder / "out", columns=COLUMN_ARGUMENTS
            )
            == 0
        )
        assert "words" not in noted_counts(folder / "out"), "its letter is an answer"


def test_a_column_inside_another_is_named_with_a_dot(
    case_folder: CaseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """A column name with dots such as `r.g.t` is a value inside of the column `r`, in any format.

    A cell of a CSV has JSON. A missing part is refused by its name.
    """
    rows = [
        {
            "m": [{"from": "human", "value": f"What is {n}?"}, {"from": "gpt", "value": "?"}],
            "r": {"g": {"t": n}},
        }
        for n in range(3)
    ]
    for form in ("jsonl", "parquet", "csv"):
        with case_folder(form) as folder:
            (folder / "in").mkdir()
            source = folder / "in" / f"mine.{form}"
            if form == "parquet":
                pq.write_table(pa.Table.from_pylist(rows), source)
            elif form == "csv":
                write_user_csv(
                    folder / "in",
                    form,
                    [{name: json.dumps(value) for name, value in row.items()} for row in rows],
                )
            else:
                write_user_jsonl(folder / "in", rows)
            assert run_convert(source, folder / "out", columns=("problem=m", "answer=r.g.t")) == 0
            assert [row["problem"] for row in read_prepared_rows(folder / "out")] == [
                f"What is {n}?" for n in range(3)
            ]
            assert [row["answer"] for row in read_prepared_rows(folder / "out")] == ["0", "1", "2"]
            capsys.readouterr()
            code = run_convert(source, folder / "no", columns=("problem=m", "answer=s.g"))
            assert "has no column 's.g'" in stderr_of_refusal(code, folder / "no", capsys)
            code = run_convert(source, folder / "no", columns=("problem=m", "answer=r.x"))
            assert "'r.x' is missing" in stderr_of_refusal(code, folder / "no", capsys)


def test_a_conversation_of_several_questions_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would not be clear which of them the answer belongs to."""
    turns = [{"role": role, "content": "What?"} for role in ("user", "assistant", "user")]
    source = write_user_jsonl(tmp_path / "in", [{"q": turns, "a": "5"}])
    code = run_convert(source, tmp_path / "out", columns=COLUMN_ARGUMENTS[:2])
    assert "make it a text, or a conversation with one question, in line 1" in stderr_of_refusal(
        code, tmp_path / "out", capsys
    )


def test_an_instruction_is_the_last_sentences_on_how_to_answer(subtests: pytest.Subtests) -> None:
    """The last sentences of a problem are split off if they say how to answer.

    Each case: a problem, and what is left of it (None: all of it).
    """
    for problem, rest in [
        (f"Find x. {INSTRUCTION}", "Find x."),
        (
            'How many?\nLet\'s think step by step and output the final answer after "####".',
            "How many?",
        ),
        ("Find x.\n\nFirst output the thinking process in <think> </think> tags.", "Find x."),
        ("Find the final answer.", None),
        (INSTRUCTION, None),  # nothing before it
        ("He climbs step by step. How far?", None),
        (r"What is in $\boxed{5}$?", None),
    ]:
        with subtests.test(problem):
            assert split_off_instruction(problem)[0] == (problem if rest is None else rest)


def test_contradicting_rows_are_left_out_by_name_and_repeats_are_counted(tmp_path: Path) -> None:
    """Rows with one question and two answers are left out; equal rows are kept and counted.

    A question is one with its picture and choices.
    """
    rows = [
        # three rows that contradict each other
        {**ROW_WITH_IMAGE, "a": "5"},
        {**ROW_WITH_IMAGE, "a": "5"},
        {**ROW_WITH_IMAGE, "a": "6"},
        # three rows with one question and one answer
        {**ROW_WITH_IMAGE, "q": "Find  y."},
        {**ROW_WITH_IMAGE, "q": "Find  y."},
        {**ROW_WITH_IMAGE, "q": "Find y.", "a": "10/2"},
        # all others differ in their picture, question or choices
        {**ROW_WITH_IMAGE, "i": "pics/1.png", "a": "7"},
        {"q": "What is 2+3?", "a": "5"},
        {"q": "What is 2-3?", "a": "-1"},
        {"q": "Which?", "a": "A", "c": ["1", "2"]},
        {"q": "Which?", "a": "A", "c": ["3", "4"]},
    ]
    source = write_user_jsonl(tmp_path / "in", rows)
    assert (
        run_convert(
            source, tmp_path / "out", "--allow-quarantined", "0.5", columns=COLUMN_ARGUMENTS
        )
        == 0
    )
    assert [row["id"] for row in read_prepared_rows(tmp_path / "out")] == [
        f"mine/train/{n}" for n in range(3, 11)
    ]
    # the second "5", which is left out then, and the second and third "Find y."
    assert noted_counts(tmp_path / "out")["repeats"] == 3
    lines = read_quarantined_rows(tmp_path / "out")
    assert [(line["id"], line["reason"]) for line in lines] == [
        (f"mine/train/{n}", "contradiction") for n in range(3)
    ]
    assert (
        "those of line 1 of mine.jsonl (mine/train/0), where the answer is '5' and not '6'"
        in lines[2]["detail"]
    )
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest["counts"] == {"train": 8}
    assert not (tmp_path / "out" / "again").exists()


def test_a_test_share_is_of_questions_so_that_no_row_is_lost(tmp_path: Path) -> None:
    """`--test-share` puts equal questions into the same split, so that none is a leak.

    Each of ten questions stands in two rows, in two spellings.
    """
    write_user_jsonl(tmp_path / "in")
    rows: list[dict[str, Any]] = []
    for n in range(10):
        (tmp_path / "in" / f"{n}.png").write_bytes(encode_picture(draw_figure(n, size=60)))
        rows.append({"q": "Find x.", "a": str(n), "i": f"{n}.png; 0.png"})
        rows.append(
            {"q": [{"role": "user", "content": "find x"}], "a": str(n), "i": [f"{n}.png", "0.png"]}
        )
    source = write_user_jsonl(tmp_path / "in", rows)
    assert (
        run_convert(source, tmp_path / "out", "--test-share", "0.2", columns=COLUMN_ARGUMENTS[:3])
        == 0
    )
    test_rows = read_prepared_rows(tmp_path / "out", "test")
    train_rows = read_prepared_rows(tmp_path / "out")
    assert len(test_rows) == 4
    assert len(train_rows) == 16
    assert not {row["answer"] for row in test_rows} & {row["answer"] for row in train_rows}


def test_a_file_called_test_may_be_named_another_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single table test.jsonl is refused with `--test-share`, unless `--split-name` is given.

    By its name all its rows would be test rows, and none would be left to train on.
    """
    rows = [{"q": f"What is {n}?", "a": n} for n in range(10)]
    source = write_user_jsonl(tmp_path / "in", rows).rename(tmp_path / "in" / "test.jsonl")
    message = stderr_of_refusal(
        run_convert(source, tmp_path / "out", "--test-share", "0.2", columns=COLUMN_ARGUMENTS[:2]),
        tmp_path / "out",
        capsys,
    )
    assert "test.jsonl is the split test by its name" in message
    assert "--split-name train" in message
    options = ("--test-share", "0.2", "--split-name", "train")
    assert run_convert(source, tmp_path / "out", *options, columns=COLUMN_ARGUMENTS[:2]) == 0
    assert len(read_prepared_rows(tmp_path / "out")) == 8
    assert len(read_prepared_rows(tmp_path / "out", "test")) == 2
    write_user_jsonl(tmp_path / "in", rows).rename(tmp_path / "in" / "train.jsonl")
    code = run_convert(
        tmp_path / "in", tmp_path / "no", "--split-name", "train", columns=COLUMN_ARGUMENTS[:2]
    )
    assert "is for one table" in stderr_of_refusal(code, tmp_path / "no", capsys)
