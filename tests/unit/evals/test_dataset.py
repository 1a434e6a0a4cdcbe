"""The benchmarks' data in their published formats: same problems from each, prompts as published,
faults named.
"""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import ExifTags, Image

from adora_vl.data.images import UnreadableImageError
from adora_vl.evals.options import HubDataOptions
from adora_vl.evals.records import Problem
from adora_vl.utils.errors import UserError
from eval import mathvista, mmstar
from tests.support.benchmark_data import (
    MATHVISTA,
    mathvista_rows,
    mmstar_rows,
    write_mathvista,
    write_mmstar,
)


def options(data: Path | str, split: str) -> HubDataOptions:
    return HubDataOptions(data=str(data), split=split)


def star_options(data: Path | str, *, no_image: bool) -> mmstar.MMStarDataOptions:
    return mmstar.MMStarDataOptions(data=str(data), split="val", no_image=no_image)


def shown(problems: list[Problem]) -> list[tuple[Any, ...]]:
    return [
        (p.fields, p.prompt, p.n_images, [image.tobytes() for image in p.images()])
        for p in problems
    ]


def test_mathvista_is_the_same_from_parquet_json_a_file_and_the_hub(tmp_path, monkeypatch):
    rows = mathvista_rows()
    parquet = write_mathvista(tmp_path / "p", rows)
    from_parquet = shown(mathvista.load(options(parquet, "testmini"))[0])
    folder = write_mathvista(tmp_path / "j", rows, "json")
    assert shown(mathvista.load(options(folder, "testmini"))[0]) == from_parquet
    assert shown(mathvista.load(options(folder / "testmini.json", "testmini"))[0]) == from_parquet

    def hub(name: str, config: str | None, split: str, revision: str | None) -> datasets.Dataset:
        assert name == "AI4Math/MathVista"
        assert config is None
        assert split == "testmini"
        return datasets.Dataset.from_list(rows, features=MATHVISTA)

    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert shown(mathvista.load(options("AI4Math/MathVista", "testmini"))[0]) == from_parquet
    fields, prompt, n_images, _ = from_parquet[0]
    assert prompt == rows[0]["query"]
    assert prompt.startswith(
        "Hint: Please answer the question and provide the correct option letter"
    )
    assert n_images == 1
    assert {**fields} == {k: v for k, v in rows[0].items() if k in fields}
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
    rows = mathvista_rows(1)
    rows[0]["query"] = "As published."
    problems = mathvista.load(options(write_mathvista(tmp_path, rows), "testmini")).problems
    assert problems[0].prompt == "As published."


def test_mmstar_with_and_without_its_images(tmp_path):
    rows = mmstar_rows()
    folder = write_mmstar(tmp_path, rows)
    with_images, hash_, _ = mmstar.load(star_options(folder, no_image=False))
    blind, same, _ = mmstar.load(star_options(folder, no_image=True))
    assert hash_ == same
    assert (
        [p.prompt for p in with_images]
        == [p.prompt for p in blind]
        == [row["question"] for row in rows]
    )
    assert [len(p.images()) for p in with_images] == [1] * 6
    assert [(p.n_images, p.images()) for p in blind] == [(0, [])] * 6
    assert with_images[3].fields == {
        "pid": "3",
        **{k: v for k, v in rows[3].items() if k != "image"},
    }


def test_other_data_has_another_hash(tmp_path):
    rows = mathvista_rows()
    hashes = {mathvista.load(options(write_mathvista(tmp_path / "a", rows), "testmini"))[1]}
    rows[2]["answer"] = "77"
    hashes.add(mathvista.load(options(write_mathvista(tmp_path / "b", rows), "testmini"))[1])
    for name in ("c", "d"):
        hashes.add(
            mathvista.load(options(write_mathvista(tmp_path / name, rows, "json"), "testmini"))[1]
        )
        # of the same size
        rows[0]["decoded_image"]["bytes"] = rows[0]["decoded_image"]["bytes"][:-1] + b"?"
    assert len(hashes) == 4


def test_each_row_that_lacks_a_field_has_a_line(tmp_path):
    rows = mathvista_rows(4)
    write_mathvista(tmp_path, rows, "json")
    content = json.loads((tmp_path / "testmini.json").read_text())
    del content["2"]["answer_type"], content["4"]["metadata"], content["4"]["choices"]
    (tmp_path / "testmini.json").write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        mathvista.load(options(tmp_path, "testmini"))
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert "row 2 lacks the field 'answer_type'" in lines[0]
    assert "row 4 lacks the fields 'choices', 'metadata'" in lines[1]


def test_a_value_that_could_not_be_scored_is_said_before_anything_is_asked(tmp_path):
    rows = mathvista_rows(4)
    rows[0]["choices"] = None
    rows[2]["precision"] = None
    with pytest.raises(UserError) as error:
        mathvista.load(options(write_mathvista(tmp_path / "v", rows), "testmini"))
    assert ["row 1 is multiple choice with" in line for line in str(error.value).splitlines()] == [
        True,
        False,
    ]
    assert "row 3 has precision = None" in str(error.value)
    stars = mmstar_rows(2)
    stars[1]["answer"] = "75"
    with pytest.raises(UserError, match="row 2 has answer = '75', expected a letter"):
        mmstar.load(star_options(write_mmstar(tmp_path / "s", stars), no_image=False))


def test_a_broken_image_fails_when_it_is_decoded_and_not_before(tmp_path):
    rows = mathvista_rows(2)
    write_mathvista(tmp_path, rows, "json")
    (tmp_path / "images" / "1.jpg").write_bytes(b"no picture")
    (tmp_path / "images" / "2.jpg").unlink()
    problems = mathvista.load(options(tmp_path, "testmini")).problems
    with pytest.raises(UnreadableImageError, match="not in any known picture format"):
        problems[0].images()
    with pytest.raises(FileNotFoundError):
        problems[1].images()


def test_a_path_that_leads_out_of_the_datas_folder_is_refused(tmp_path):
    """A data set from elsewhere must not show a model any file of this machine."""
    data = tmp_path / "data"
    write_mathvista(data, mathvista_rows(4), "json")
    content = json.loads((data / "testmini.json").read_text())
    secret = tmp_path / "secret.jpg"
    secret.write_bytes((data / "images" / "1.jpg").read_bytes())
    (data / "link.jpg").symlink_to(secret)
    for pid, name in (("1", "../secret.jpg"), ("2", str(secret)), ("4", "link.jpg")):
        content[pid]["image"] = name
    (data / "testmini.json").write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        mathvista.load(options(data, "testmini"))
    lines = str(error.value).splitlines()
    assert [line.split("row ")[1][0] for line in lines] == ["1", "2", "4"]
    assert all("leads out of the data's folder; put the picture into it" in line for line in lines)


def test_images_are_upright_on_white_and_as_large_as_their_header_says(tmp_path):
    rows = mathvista_rows(3)
    folder = write_mathvista(tmp_path, rows, "json")
    drawn = Image.new("RGBA", (40, 20), (0, 0, 0, 0))
    drawn.save(tmp_path / "images" / "1.jpg", "PNG")
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "images" / "2.jpg", exif=turned)
    frames = [Image.new("RGB", (40, 20), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "images" / "3.jpg", "GIF", save_all=True, append_images=frames[1:])
    problems = mathvista.load(options(folder, "testmini")).problems
    images = [problem.images()[0] for problem in problems]
    assert [image.size for image in images] == [(40, 20), (20, 40), (40, 20)]
    assert [problem.sizes() for problem in problems if problem.sizes] == [
        [image.size] for image in images
    ]
    assert [image.getpixel((1, 1)) for image in images] == [(255, 255, 255), (0, 0, 0), (255, 0, 0)]


def test_a_question_may_stand_in_its_picture(tmp_path):
    rows = mmstar_rows(2)
    rows[1]["question"] = ""
    folder = write_mmstar(tmp_path, rows)
    problems = mmstar.load(star_options(folder, no_image=False)).problems
    assert [problem.prompt for problem in problems] == [rows[0]["question"], ""]
    with pytest.raises(UserError, match="row 2 problem: '' is not a text"):
        mmstar.load(star_options(folder, no_image=True))


def test_a_split_is_not_taken_from_the_file_of_another(tmp_path):
    folder = write_mathvista(tmp_path, mathvista_rows())
    (table,) = folder.rglob("*.parquet")
    table.rename(folder / "mathvista.parquet")
    assert mathvista.load(options(folder, "testmini"))[0], "it is of no split by its name"
    (folder / "mathvista.parquet").rename(folder / "test-00000-of-00001.parquet")
    (folder / "notes.json").write_text("[]")
    with pytest.raises(
        UserError,
        match=r"has nothing for the split 'testmini'; it has notes.json, test-00000-of-0000",
    ):
        mathvista.load(options(folder, "testmini"))


def test_wrong_data_is_said_in_a_line(case, monkeypatch):
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
    for data, message in cases:
        with case(data) as folder, monkeypatch.context() as patch:
            patch.chdir(folder)
            Path("folder").mkdir()
            Path("twice.jsonl").write_text('{}\n{"a": 1, "a": 2}')
            for name, content in (
                ("bad.json", "{"),
                ("list.json", "[1]"),
                ("empty.json", "[]"),
                ("bad.parquet", "x"),
            ):
                Path(name).write_text(content)
            with pytest.raises(UserError, match=message) as error:
                mathvista.load(options(data, "testmini"))
            assert "\n" not in str(error.value)
