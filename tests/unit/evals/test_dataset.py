"""The benchmarks' data in their published formats: same problems from each, prompts as published,
faults named.
"""

import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
from PIL import ExifTags, Image

from adora_vl.data.dataset import load_split, write_split
from adora_vl.data.images import UnreadableImageError
from adora_vl.data.loading import with_decoded_images
from adora_vl.evals import prepared
from adora_vl.evals.benchmark import load_checked_problems
from adora_vl.evals.inference.dataset import _LoadedRows
from adora_vl.evals.options import DataOptions, HubDataOptions
from adora_vl.evals.records import Problem
from adora_vl.synthetic.generate import generate
from adora_vl.utils.errors import UserError
from eval import mathvista, mmstar
from tests.support.benchmark_data import (
    MATHVISTA_FEATURES,
    mathvista_rows,
    mmstar_rows,
    write_mathvista,
    write_mmstar,
)


def data_options(data: Path | str, split: str) -> HubDataOptions:
    """Return the options that name the data of a benchmark and its split."""
    return HubDataOptions(data=str(data), split=split)


def mmstar_options(data: Path | str, *, no_image: bool) -> mmstar.MMStarDataOptions:
    """Return the options of MMStar, which can be asked without its images."""
    return mmstar.MMStarDataOptions(data=str(data), split="val", no_image=no_image)


def asked_contents(problems: list[Problem]) -> list[tuple[Any, ...]]:
    """What each problem asks: its fields, its prompt, the number of its images and their pixels."""
    contents = []
    for problem in problems:
        pixels = [image.tobytes() for image in problem.images()]
        contents.append((problem.fields, problem.prompt, problem.n_images, pixels))
    return contents


def test_mathvista_is_the_same_from_parquet_json_a_file_and_the_hub(tmp_path, monkeypatch):
    """MathVista gives the same problems from Parquet, a folder of JSON, its file, and the hub."""
    rows = mathvista_rows()
    parquet = write_mathvista(tmp_path / "p", rows)
    folder = write_mathvista(tmp_path / "j", rows, "json")
    file = folder / "testmini.json"
    from_parquet = asked_contents(mathvista.load(data_options(parquet, "testmini")).problems)
    from_json = asked_contents(mathvista.load(data_options(folder, "testmini")).problems)
    from_file = asked_contents(mathvista.load(data_options(file, "testmini")).problems)
    assert from_json == from_parquet
    assert from_file == from_parquet

    def load_from_hub(
        name: str, config: str | None, split: str, revision: str | None
    ) -> datasets.Dataset:
        assert name == "AI4Math/MathVista"
        assert config is None
        assert split == "testmini"
        return datasets.Dataset.from_list(rows, features=MATHVISTA_FEATURES)

    monkeypatch.setattr(datasets, "load_dataset", load_from_hub)
    hub_problems = mathvista.load(data_options("AI4Math/MathVista", "testmini")).problems
    assert asked_contents(hub_problems) == from_parquet
    fields, prompt, n_images, _ = from_parquet[0]
    assert prompt == rows[0]["query"]
    assert prompt.startswith(
        "Hint: Please answer the question and provide the correct option letter"
    )
    assert n_images == 1
    published_fields = {name: value for name, value in rows[0].items() if name in fields}
    assert fields == published_fields
    assert fields.keys() == {
        "pid",
        "question",
        "question_type",
        "answer_type",
        "precision",
        "unit",
        "choices",
        "answer",
        "metadata",
    }


def test_the_datas_own_query_goes_before_a_built_one(tmp_path):
    """MathVista's data has the prompt of each problem, in the column `query`."""
    rows = mathvista_rows(1)
    rows[0]["query"] = "As published."
    folder = write_mathvista(tmp_path, rows)
    problems = mathvista.load(data_options(folder, "testmini")).problems
    assert problems[0].prompt == "As published."


def test_mmstar_with_and_without_its_images(tmp_path):
    """MMStar is asked the same questions without its images, and its data have the same hash."""
    rows = mmstar_rows()
    folder = write_mmstar(tmp_path, rows)
    with_images = mmstar.load(mmstar_options(folder, no_image=False))
    without_images = mmstar.load(mmstar_options(folder, no_image=True))
    assert with_images.data_hash == without_images.data_hash
    questions = [row["question"] for row in rows]
    assert [problem.prompt for problem in with_images.problems] == questions
    assert [problem.prompt for problem in without_images.problems] == questions
    for problem in with_images.problems:
        assert len(problem.images()) == 1
    for problem in without_images.problems:
        assert problem.n_images == 0
        assert problem.images() == []
    assert len(with_images.problems) == len(without_images.problems) == 6
    row_fields = {name: value for name, value in rows[3].items() if name != "image"}
    assert with_images.problems[3].fields == {"pid": "3", **row_fields}


def test_other_data_has_another_hash(tmp_path):
    """A changed answer, another format and a changed picture of the same size are other data."""
    rows = mathvista_rows()

    def data_hash(name: str, form: str = "parquet") -> str:
        folder = write_mathvista(tmp_path / name, rows, form)
        return mathvista.load(data_options(folder, "testmini")).data_hash

    hashes = {data_hash("a")}
    rows[2]["answer"] = "77"
    hashes.add(data_hash("b"))
    hashes.add(data_hash("c", "json"))
    picture = rows[0]["decoded_image"]
    picture["bytes"] = picture["bytes"][:-1] + b"?"
    hashes.add(data_hash("d", "json"))
    assert len(hashes) == 4


def test_each_row_that_lacks_a_field_has_a_line(tmp_path):
    """Two of four rows lack fields, and the error names each row with its fields."""
    rows = mathvista_rows(4)
    write_mathvista(tmp_path, rows, "json")
    file = tmp_path / "testmini.json"
    content = json.loads(file.read_text())
    del content["2"]["answer_type"]
    del content["4"]["metadata"]
    del content["4"]["choices"]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        mathvista.load(data_options(tmp_path, "testmini"))
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert "row 2 lacks the field 'answer_type'" in lines[0]
    assert "row 4 lacks the fields 'choices', 'metadata'" in lines[1]


def test_a_value_that_could_not_be_scored_is_said_before_anything_is_asked(tmp_path):
    """A row that could not be scored is refused when the data are loaded, each with a line.

    The rows are a multiple choice without choices, a number without its precision, and a letter
    that is none.
    """
    rows = mathvista_rows(4)
    rows[0]["choices"] = None
    rows[2]["precision"] = None
    folder = write_mathvista(tmp_path / "v", rows)
    with pytest.raises(UserError) as error:
        mathvista.load(data_options(folder, "testmini"))
    first_line, second_line = str(error.value).splitlines()
    assert "row 1 is multiple choice with" in first_line
    assert "row 1 is multiple choice with" not in second_line
    assert "row 3 has precision = None" in second_line
    star_rows = mmstar_rows(2)
    star_rows[1]["answer"] = "75"
    star_folder = write_mmstar(tmp_path / "s", star_rows)
    with pytest.raises(UserError, match="row 2 has answer = '75', expected a letter"):
        mmstar.load(mmstar_options(star_folder, no_image=False))


def test_a_broken_image_fails_when_it_is_decoded_and_not_before(tmp_path):
    """A picture that is broken or missing raises when it is decoded, and not before."""
    rows = mathvista_rows(2)
    write_mathvista(tmp_path, rows, "json")
    (tmp_path / "images" / "1.jpg").write_bytes(b"no picture")
    (tmp_path / "images" / "2.jpg").unlink()
    problems = mathvista.load(data_options(tmp_path, "testmini")).problems
    with pytest.raises(UnreadableImageError, match="not in any known picture format"):
        problems[0].images()
    with pytest.raises(FileNotFoundError):
        problems[1].images()


@pytest.mark.parametrize("stored", ["gone.png", {"bytes": None, "path": "gone.png"}])
def test_an_image_file_that_is_missing_is_named(tmp_path, stored):
    """A row whose only image is the path of a missing file fails with that path.

    The path is a text, or inside a struct, as the `datasets` library stores it. Of two columns, of
    which one has a usable image, a missing file of the other is passed over.
    """
    loaded = _LoadedRows(
        rows=[{"image": stored, "decoded_image": None}, {"image": stored, "decoded_image": b"PNG"}],
        image_column_by_name={},
        data_hash="",
        origin="",
        folder=tmp_path,
    )
    with pytest.raises(OSError, match=r"gone\.png"):
        loaded.read_encoded_image(0, ["image", "decoded_image"])
    assert loaded.read_encoded_image(1, ["image", "decoded_image"]) == b"PNG"


def test_a_path_that_leads_out_of_the_datas_folder_is_refused(tmp_path):
    """A picture's path that leads out of the data's folder is refused, for each row in a line.

    A data set from elsewhere must not show a model any file of this machine. The rows 1, 2 and 4
    have a path with `..`, an absolute one, and a link.
    """
    data = tmp_path / "data"
    write_mathvista(data, mathvista_rows(4), "json")
    file = data / "testmini.json"
    content = json.loads(file.read_text())
    secret = tmp_path / "secret.jpg"
    secret.write_bytes((data / "images" / "1.jpg").read_bytes())
    (data / "link.jpg").symlink_to(secret)
    content["1"]["image"] = "../secret.jpg"
    content["2"]["image"] = str(secret)
    content["4"]["image"] = "link.jpg"
    file.write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        mathvista.load(data_options(data, "testmini"))
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    for line, row_number in zip(lines, ("1", "2", "4"), strict=True):
        assert f"row {row_number} " in line
        assert "leads out of the data's folder; put the picture into it" in line


def test_images_are_upright_on_white_and_as_large_as_their_header_says(tmp_path):
    """A transparent picture is shown on white, a turned one upright, and of frames the first.

    Each picture has the size that `sizes` gives without decoding it.
    """
    rows = mathvista_rows(3)
    folder = write_mathvista(tmp_path, rows, "json")
    images_folder = tmp_path / "images"
    transparent_image = Image.new("RGBA", (40, 20), (0, 0, 0, 0))
    transparent_image.save(images_folder / "1.jpg", "PNG")
    rotated_exif = Image.Exif()
    rotated_exif[ExifTags.Base.Orientation] = 6  # turned by 90 degrees
    black = Image.new("RGB", (40, 20))
    black.save(images_folder / "2.jpg", exif=rotated_exif)
    red = Image.new("RGB", (40, 20), "red")
    blue = Image.new("RGB", (40, 20), "blue")
    red.save(images_folder / "3.jpg", "GIF", save_all=True, append_images=[blue])
    problems = mathvista.load(data_options(folder, "testmini")).problems
    images = [problem.images()[0] for problem in problems]
    assert [image.size for image in images] == [(40, 20), (20, 40), (40, 20)]
    for problem, image in zip(problems, images, strict=True):
        assert problem.sizes is not None
        assert problem.sizes() == [image.size]
    colors = [image.getpixel((1, 1)) for image in images]
    assert colors == [(255, 255, 255), (0, 0, 0), (255, 0, 0)]


def test_of_several_frames_an_evaluation_shows_the_one_that_a_training_shows(tmp_path):
    """An animation of a red and a blue frame is a red picture in evaluation and training."""
    (row,) = generate(1, split="test", seed=1)
    red = Image.new("RGB", (40, 20), "red")
    blue = Image.new("RGB", (40, 20), "blue")
    stream = io.BytesIO()
    red.save(stream, "GIF", save_all=True, append_images=[blue])
    write_split([{**row, "images": [stream.getvalue()]}], tmp_path, "test")

    (problem,) = prepared.load(DataOptions(data=str(tmp_path), split="test")).problems
    (asked_image,) = problem.images()
    (trained_image,) = with_decoded_images(load_split(tmp_path, "test"))[0]["images"]

    assert asked_image.getpixel((1, 1)) == (255, 0, 0)
    assert asked_image.tobytes() == trained_image.tobytes()


def test_a_question_may_stand_in_its_picture(tmp_path):
    """A problem without a text needs its picture, and is refused where it is asked without."""
    rows = mmstar_rows(2)
    rows[1]["question"] = ""
    folder = write_mmstar(tmp_path, rows)
    problems = mmstar.load(mmstar_options(folder, no_image=False)).problems
    assert [problem.prompt for problem in problems] == [rows[0]["question"], ""]
    with pytest.raises(UserError, match="the problem '1' problem: '' is not a text"):
        load_checked_problems(mmstar.BENCHMARK, mmstar_options(folder, no_image=True))


def test_a_split_is_not_taken_from_the_file_of_another(tmp_path):
    """A file of no split is read; one that is named after another split is not."""
    folder = write_mathvista(tmp_path, mathvista_rows())
    (table,) = folder.rglob("*.parquet")
    table.rename(folder / "mathvista.parquet")
    assert mathvista.load(data_options(folder, "testmini"))[0], "it is of no split by its name"
    (folder / "mathvista.parquet").rename(folder / "test-00000-of-00001.parquet")
    (folder / "notes.json").write_text("[]")
    with pytest.raises(
        UserError,
        match=r"has nothing for the split 'testmini'; it has notes.json, test-00000-of-0000",
    ):
        mathvista.load(data_options(folder, "testmini"))


@pytest.mark.parametrize("ending", ["", "-725687bf7a18d64b"])
def test_a_split_of_which_files_are_missing_is_refused(tmp_path, ending):
    """A split of which a file is missing is refused; all its files together are one split.

    A download that broke off would be a smaller benchmark. `ending` is a hash, as some files of the
    hub have it.
    """
    folder = write_mathvista(tmp_path, mathvista_rows())
    (table,) = folder.rglob("*.parquet")
    first = table.rename(table.parent / f"testmini-00000-of-00002{ending}.parquet")
    with pytest.raises(UserError, match=r"has 1 of the 2 files testmini-\*-of-00002.parquet; get"):
        mathvista.load(data_options(folder, "testmini"))
    rows = pq.read_table(first)
    pq.write_table(rows[:2], first)
    pq.write_table(rows[2:], str(first).replace("00000", "00001", 1))
    assert len(mathvista.load(data_options(folder, "testmini"))[0]) == len(mathvista_rows())


def test_wrong_data_is_said_in_a_line(case_folder, monkeypatch):
    """Data that are missing, empty or broken are refused in one line.

    Each case: what is named as the data, in a folder with the files of `file_contents`, and the
    error.
    """
    cases = [
        ("nothing", "'nothing' is neither a file or folder here nor a hub id"),
        ("folder/nothing", "'folder/nothing' is neither"),
        ("folder", "has nothing for the split 'testmini'"),
        ("bad.json", "is not JSON"),
        ("list.json", "is not a list of objects"),
        ("empty.json", "has no rows"),
        ("twice.jsonl", "line 2 of 'twice.jsonl' is not JSON .'a' is given twice"),
        ("bad.parquet", "is not a readable Parquet file"),
    ]
    file_contents = {
        "twice.jsonl": '{}\n{"a": 1, "a": 2}',
        "bad.json": "{",
        "list.json": "[1]",
        "empty.json": "[]",
        "bad.parquet": "x",
    }
    for data, message in cases:
        with case_folder(data) as folder, monkeypatch.context() as patch:
            patch.chdir(folder)
            Path("folder").mkdir()
            for name, content in file_contents.items():
                Path(name).write_text(content)
            with pytest.raises(UserError, match=message) as error:
                mathvista.load(data_options(data, "testmini"))
            assert "\n" not in str(error.value)
