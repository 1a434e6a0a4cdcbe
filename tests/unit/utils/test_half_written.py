"""Writes of data preparation and evaluation on a disk that gives up half-way.

Nothing is lost, and nothing half-written is left.

The disk is the real one: the kernel refuses every byte of a file after the first N (RLIMIT_FSIZE),
for whichever library writes it.
"""

import json
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError

from adora_vl.data.dataset import load_split
from adora_vl.evals.inference.predictions import PredictionLog, sort_rows
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import naming_write_errors
from data_prep.cli import main as data_prep
from eval.command import main as evaluate
from eval.geometry3k import BENCHMARK
from tests.support.disk import folder_contents, limit_file_size
from tests.support.geometry3k import write_problem_folder
from tests.support.pictures import draw_figure, encode_picture


def prediction_row(pid: str) -> dict[str, str]:
    """Return a prediction that is correct, with a long response."""
    return {"pid": pid, "answer": "5", "response": "so \\boxed{5} " + "because " * 20}


def write_drawn_data(folder: Path) -> int:
    """Run `data_prep synthetic` in a folder, and return its exit code."""
    arguments = [
        "--rows",
        "3",
        "--test-rows",
        "0",
        "--output",
        str(folder / "out"),
        "--overwrite",
    ]
    return data_prep(["synthetic", *arguments])


def write_cleaned_data(folder: Path) -> int:
    """Run `data_prep geometry3k` on the raw data in a folder, and return its exit code."""
    arguments = [
        "--source",
        "intergps",
        "--input",
        str(folder / "raw"),
        "--output",
        str(folder / "out"),
        "--overwrite",
    ]
    return data_prep(["geometry3k", *arguments])


def write_page_of_data(folder: Path) -> int:
    """Write a page on the prepared data in a folder, and return the exit code."""
    return data_prep(["inspect", str(folder / "data"), "--html", str(folder / "page.html")])


def write_score(folder: Path) -> int:
    """Score the predictions in a folder, and return the exit code of the command."""
    return evaluate(
        BENCHMARK,
        [
            "score",
            "--predictions",
            str(folder / "p.jsonl"),
            "--output",
            str(folder / "s.json"),
        ],
    )


def append_prediction(folder: Path) -> None:
    """Append two predictions to those in a folder."""
    with PredictionLog(folder / "p.jsonl") as log:
        log.append([prediction_row("3"), prediction_row("4")])


def sort_predictions(folder: Path) -> None:
    """Sort the two predictions in a folder into the other order."""
    sort_rows(folder / "p.jsonl", [("2", 0), ("1", 0)])


@pytest.fixture(scope="module")
def prepared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with all inputs of the writers, and an old file at each name they write."""
    folder = tmp_path_factory.mktemp("prepared")
    write_problem_folder(folder / "raw", number=1)
    # What cannot be used goes into the quarantine with its bytes: that is a write too.
    write_problem_folder(
        folder / "raw", number=2, image=encode_picture(draw_figure(2, size=300))[:-9]
    )
    (folder / "p.jsonl").write_text("".join(json.dumps(prediction_row(pid)) + "\n" for pid in "12"))
    assert (
        data_prep(["synthetic", "--rows", "2", "--test-rows", "1", "--output", str(folder / "out")])
        == 0
    )
    exit_code = data_prep(
        ["synthetic", "--rows", "2", "--test-rows", "1", "--output", str(folder / "data")]
    )
    assert exit_code == 0
    assert write_page_of_data(folder) == write_score(folder) == 0
    return folder


@pytest.fixture
def copied_folder(prepared_folder: Path, tmp_path: Path) -> Path:
    """Return a copy of `prepared_folder` for one test."""
    return Path(shutil.copytree(prepared_folder, tmp_path / "place"))


@pytest.mark.parametrize(
    "write",
    [
        write_drawn_data,
        write_cleaned_data,
        write_page_of_data,
        write_score,
        append_prediction,
        sort_predictions,
    ],
    ids=lambda write: write.__name__,
)
@pytest.mark.parametrize("size", [0, 700])
def test_what_was_there_stays_and_nothing_is_left_over(write, size, copied_folder, capsys):
    """No file may be longer than `size` bytes: the command ends with one line and no new file.

    Predictions are longer from the start, and so is what may be written of them.
    """
    contents_before = folder_contents(copied_folder)
    if write is append_prediction:
        size = max(size, len(contents_before["p.jsonl"] or b"") + 50)
    if write is sort_predictions:
        size = min(size, 300)
    with limit_file_size(size):
        try:
            exit_code = write(copied_folder)
            stderr = capsys.readouterr().err
        except UserError as error:
            exit_code = 2
            stderr = f"error: {error}\n"
    assert exit_code == 2
    errors = [line for line in stderr.splitlines() if "%|" not in line]
    assert len(errors) == 1, stderr
    assert errors[0].startswith("error: "), stderr
    assert "cannot be written" in errors[0], stderr
    assert folder_contents(copied_folder) == contents_before


def test_a_full_disk_under_the_cache_of_datasets_is_one_line(
    prepared_folder, tmp_path, monkeypatch
):
    """A full disk under the cache of `datasets` is one line, and the prepared folder stays whole.

    Training and evaluation read a prepared folder through that cache.
    """
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    contents_before = folder_contents(prepared_folder)
    full_disk_error = pytest.raises(
        UserError, match="^dataset: .* cache of `datasets`, .*; make room there"
    )
    with limit_file_size(200), full_disk_error as caught:
        load_split(prepared_folder / "data", "train")
    assert len(str(caught.value).splitlines()) == 1
    assert folder_contents(prepared_folder) == contents_before
    assert load_split(prepared_folder / "data", "train").num_rows == 2


def test_an_error_of_safetensors_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """A full disk is one line also where safetensors reports it, by an error that is no `OSError`.

    An error that says already what is wrong, or is no fault of the disk, is raised as it is.
    """
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    message = "cannot be written .*; free some space"
    with pytest.raises(UserError, match=message), naming_write_errors("output", tmp_path):
        raise full
    for error in (UserError("OUT: 'x' is full; No space left"), SafetensorError("wrong header")):
        with pytest.raises(type(error)) as caught, naming_write_errors("output", tmp_path):
            raise error
        assert caught.value is error


def test_a_file_that_is_damaged_inside_is_not_taken_for_a_full_disk(
    prepared_folder, tmp_path, monkeypatch
):
    """Data that is damaged inside is to be prepared again, and is not taken for a full disk.

    The end of the file is whole, so its columns and the number of its rows can be read.
    """
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    shutil.copytree(prepared_folder / "data", tmp_path / "data")
    (file,) = (tmp_path / "data" / "data").glob("train-*.parquet")
    content = bytearray(file.read_bytes())
    content[4:400] = bytes(396)
    file.write_bytes(content)
    with pytest.raises(
        UserError, match=r"^dataset: .* cannot be read \(.*\); prepare it again"
    ) as caught:
        load_split(tmp_path / "data", "train")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "output", ["file", "file/below", "", "x" * 300], ids=["file", "below a file", "empty", "long"]
)
def test_an_output_that_cannot_be_is_one_line(output, copied_folder, capsys):
    """Every command refuses an output that is a file, below one, empty or too long a name."""
    (copied_folder / "file").write_text("mine")
    contents_before = folder_contents(copied_folder)
    path = str(copied_folder / output) if output else ""
    commands = [
        lambda: data_prep(["synthetic", "--rows", "1", "--test-rows", "0", "--output", path]),
        lambda: data_prep(
            [
                "geometry3k",
                "--source",
                "intergps",
                "--input",
                str(copied_folder / "raw"),
                "--output",
                path,
            ]
        ),
        lambda: evaluate(
            BENCHMARK, ["score", "--predictions", str(copied_folder / "p.jsonl"), "--output", path]
        ),
        lambda: evaluate(
            BENCHMARK,
            ["run", "--model", "tiny", "--data", str(copied_folder / "data"), "--output", path],
        ),
    ]
    for command in commands:
        capsys.readouterr()
        assert command() == 2
        stderr = capsys.readouterr().err
        assert stderr.count("\n") == 1, stderr
        assert "output" in stderr, stderr
        assert folder_contents(copied_folder) == contents_before


def test_a_score_replaces_nothing_but_a_score(copied_folder, capsys):
    """Another JSON file and the predictions are not overwritten; new names, and a folder, are."""
    arguments = ["score", "--predictions", str(copied_folder / "p.jsonl"), "--output"]
    (copied_folder / "notes.json").write_text('{"years": "of work"}')
    contents_before = folder_contents(copied_folder)
    for name in ("notes.json", "p.jsonl"):
        assert evaluate(BENCHMARK, [*arguments, str(copied_folder / name)]) == 2
        assert folder_contents(copied_folder) == contents_before
    capsys.readouterr()
    assert evaluate(BENCHMARK, [*arguments, str(copied_folder / "new")]) == 0
    assert json.loads((copied_folder / "new" / "score.json").read_text())["total"] == 2
    assert evaluate(BENCHMARK, [*arguments, str(copied_folder / "new" / "other.json")]) == 0
    assert sorted(path.name for path in (copied_folder / "new").iterdir()) == [
        "other.json",
        "score.json",
    ]
