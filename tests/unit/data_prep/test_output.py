"""An output folder is complete or absent whatever happens, never a stranger's, and what it holds
can be counted.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adora_vl.data.dataset import (
    file_hashes,
    load_split,
    read_manifest,
    split_files,
    write_split,
)
from adora_vl.data.output import complete_or_absent
from adora_vl.synthetic.families import SyntheticProblem
from adora_vl.synthetic.generate import draw_problems, generate
from adora_vl.synthetic.generated import describe_synthetic, prepare_drawn
from adora_vl.utils.errors import UserError
from data_prep.cli import main
from data_prep.survey import survey_dataset
from tests.support.cases import CaseFolder
from tests.support.disk import file_contents
from tests.support.geometry3k import run_prepare_geometry3k, write_problem_folder
from tests.support.paths import REPOSITORY


def prepare_synthetic(output: Path, *options: str, rows: int = 3) -> int:
    """Run the command that draws `rows` problems and two test problems; return its exit code."""
    return main(
        ["synthetic", "--output", str(output), "--rows", str(rows), "--test-rows", "2", *options]
    )


def interrupt_at_row(monkeypatch: pytest.MonkeyPatch, row_index: int) -> None:
    """Interrupt the drawing of rows, as Ctrl-C does, at the row with this index."""

    def draw_until_interrupted(count: int, **options: Any) -> Iterator[SyntheticProblem]:
        for index, problem in enumerate(draw_problems(count, **options)):
            if index == row_index:
                raise KeyboardInterrupt
            yield problem

    monkeypatch.setattr("adora_vl.synthetic.generate.draw_problems", draw_until_interrupted)


def test_an_interrupted_preparation_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    """A preparation that is interrupted ends with 130, and leaves only what was there before.

    130 is the exit code after Ctrl-C.
    """
    assert prepare_synthetic(tmp_path / "out") == 0
    contents_before = file_contents(tmp_path / "out")
    interrupt_at_row(monkeypatch, row_index=70)  # a batch of 64 rows is on the disk by then
    assert prepare_synthetic(tmp_path / "out", "--overwrite", rows=100) == 130
    assert prepare_synthetic(tmp_path / "new", rows=100) == 130
    assert file_contents(tmp_path / "out") == contents_before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_that_cannot_be_read_is_not_called_an_output_that_cannot_be_written(
    tmp_path: Path,
) -> None:
    """The error of reading comes out as it is, and the output is not begun."""
    with pytest.raises(FileNotFoundError), complete_or_absent(tmp_path / "out"):
        (tmp_path / "in.jsonl").read_bytes()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_filled_and_the_same_dataset_made_again(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert prepare_synthetic(tmp_path / "out") == 0
    contents_before = file_contents(tmp_path / "out")
    assert prepare_synthetic(tmp_path / "out") == 0
    assert file_contents(tmp_path / "out") == contents_before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_dataset_is_replaced_only_where_that_is_said(tmp_path, capsys):
    """A folder made with other arguments is refused with the difference, and kept.

    `--overwrite` replaces it.
    """
    assert prepare_synthetic(tmp_path / "out") == 0
    contents_before = file_contents(tmp_path / "out")
    # the words of a command, by the difference that its error names
    commands = {
        "rows 3, this one 5": ["synthetic", "--rows", "5", "--test-rows", "2"],
        "seed 0, this one 1": ["synthetic", "--rows", "3", "--test-rows", "2", "--seed", "1"],
        "size 56, this one 112": [
            "synthetic",
            "--rows",
            "3",
            "--test-rows",
            "2",
            "--level",
            "2",
            "--size",
            "112",
        ],
        "source 'synthetic', this one 'knights'": ["knights", "--rows", "3", "--test-rows", "2"],
    }
    for difference, arguments in commands.items():
        capsys.readouterr()
        assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert difference in error
        assert "--overwrite" in error
        assert error.count("\n") == 1
        assert file_contents(tmp_path / "out") == contents_before
    assert prepare_synthetic(tmp_path / "out", "--overwrite", rows=5) == 0
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest["counts"] == {"train": 5, "test": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_is_not_ours_is_refused_and_kept(
    capsys: pytest.CaptureFixture[str], case_folder: CaseFolder
) -> None:
    """A folder without a manifest of ours is refused and stays as it is.

    The manifest is missing, broken or of another program.
    """
    for manifest in [None, "{", "[]", '{"made_by": "somebody else"}']:
        with case_folder(f"{manifest!r:.80}") as folder:
            output = folder / "out"
            output.mkdir()
            (output / "thesis.tex").write_text("years of work")
            if manifest is not None:
                (output / "manifest.json").write_text(manifest)
            contents_before = file_contents(output)
            assert prepare_synthetic(output) == 2
            error = capsys.readouterr().err
            assert error.startswith("error: output: ")
            assert error.count("\n") == 1
            assert str(output) in error
            assert file_contents(output) == contents_before
            assert [path.name for path in folder.iterdir()] == ["out"]


def test_a_strangers_file_in_a_prepared_folder_is_not_deleted(tmp_path, capsys):
    """A new data set would replace the whole folder."""
    assert prepare_synthetic(tmp_path / "out") == 0
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert prepare_synthetic(tmp_path / "out") == 2
    assert "'notes.txt'" in capsys.readouterr().err
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_the_manifest_says_what_is_in_the_folder_and_nothing_of_the_clock(tmp_path: Path) -> None:
    """The manifest has the arguments and the hash of each file, but no time.

    With a time in it, equal arguments would not give equal files.
    """
    manifest = prepare_drawn(tmp_path / "out", describe_synthetic(rows=3, test_rows=2, seed=4))
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
    assert manifest["files"] == file_hashes(tmp_path / "out")
    assert len(manifest["files"]) == 2
    assert manifest["arguments"] == {
        "rows": 3,
        "test_rows": 2,
        "seed": 4,
        "size": 56,
        "families": [],
    }
    keys = "arguments counts files input leaks made_by quarantined revision source versions"
    assert set(manifest) == set(keys.split())


def test_rows_are_written_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 rows with at most 64 in a row group are written as two groups, in their order."""
    # 64 rows are one batch then, since a picture has about 200 bytes
    monkeypatch.setattr("adora_vl.data.dataset._MAX_GROUP_IMAGE_BYTES", 64 * 1000)
    monkeypatch.setattr("adora_vl.data.dataset._MAX_GROUP_ROWS", 64)
    assert write_split(generate(100), tmp_path, "train") == 100
    (path,) = split_files(tmp_path)["train"]
    assert pq.ParquetFile(path).num_row_groups == 2
    assert load_split(tmp_path, "train")["id"] == [
        f"synthetic/0/train/{index}" for index in range(100)
    ]


def test_loading_says_what_is_missing(tmp_path: Path) -> None:
    """Loading a split of prepared data says what is missing.

    One after the other: no folder, no split, no column, no rows, no rows at all.
    """
    with pytest.raises(UserError, match="no folder"):
        load_split(tmp_path / "none", "train")
    write_split(generate(1), tmp_path, "train")
    with pytest.raises(UserError, match=r"has no split 'test'.*it has train"):
        load_split(tmp_path, "test")
    pq.write_table(
        pa.table({"id": ["1"], "problem": ["p"], "answer": ["1"]}),
        tmp_path / "data" / "test-0.parquet",
    )
    with pytest.raises(UserError, match="lacks the column 'images'"):
        load_split(tmp_path, "test")
    (train,) = split_files(tmp_path)["train"]
    pq.write_table(pq.read_table(train).slice(0, 0), tmp_path / "data" / "test-0.parquet")
    with pytest.raises(UserError, match="has no rows in the split 'test'"):
        load_split(tmp_path, "test")
    train.unlink()
    with pytest.raises(UserError, match="^dataset: .* has no rows; prepare it again"):
        survey_dataset(tmp_path)


def synthetic_command(output: Path, rows: int) -> list[str]:
    """Return the command that draws `rows` problems into a folder, in place of what is there."""
    arguments = ["--output", str(output), "--rows", str(rows), "--test-rows", "0", "--overwrite"]
    return [sys.executable, "-m", "data_prep", "synthetic", *arguments]


def partial_folders(output: Path) -> list[Path]:
    """Return the folders beside an output into which it is being written."""
    return sorted(output.parent.glob(f".{output.name}.*"))


def wait_until(condition: object, process: subprocess.Popen[bytes]) -> None:
    """Wait until the condition holds, while the process is still running."""
    assert callable(condition)
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the preparation ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_kill_9_in_the_middle_leaves_the_old_output_and_the_next_run_clears_up(
    tmp_path: Path,
) -> None:
    """A killed preparation leaves the old output whole, and the next one removes what it has left.

    It writes beside the old output. While it lives, another preparation leaves its folder alone.
    """
    output = tmp_path / "out"
    write_problem_folder(tmp_path / "raw")
    assert run_prepare_geometry3k("intergps", tmp_path / "raw", output) == 0
    contents_before = file_contents(output)
    process = subprocess.Popen(
        synthetic_command(output, rows=100_000), cwd=REPOSITORY, stderr=subprocess.DEVNULL
    )
    try:  # until rows are on the disk
        wait_until(
            lambda: any(p.stat().st_size > 4 for p in tmp_path.glob(".out.partial-*/new/data/*")),
            process,
        )
        (partial,) = partial_folders(output)
        assert run_prepare_geometry3k("intergps", tmp_path / "raw", output) == 0, (
            "another preparation at the same time"
        )
        assert partial.is_dir(), "a living process was robbed of its folder"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert file_contents(output) == contents_before
    assert partial.is_dir()  # nobody could remove it yet
    assert run_prepare_geometry3k("intergps", tmp_path / "raw", output) == 0
    assert not partial_folders(output)
    assert file_contents(output) == contents_before


@pytest.mark.slow
def test_kill_9_of_a_preparation_ends_its_workers(tmp_path: Path) -> None:
    """The workers of a preparation end when it is killed with SIGKILL.

    They would go on writing into a folder that nobody reads.
    """
    for number in range(400):
        write_problem_folder(tmp_path / "raw", number=number)
    command = [
        sys.executable,
        "-m",
        "data_prep",
        "geometry3k",
        "--source",
        "intergps",
        "--workers",
        "2",
    ]
    process = subprocess.Popen(
        [*command, "--input", str(tmp_path / "raw"), "--output", str(tmp_path / "out")],
        cwd=REPOSITORY,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # the workers can be found by it
    )
    try:
        wait_until(
            lambda: any(p.stat().st_size > 4 for p in tmp_path.glob(".out.partial-*/new/data/*")),
            process,
        )
        assert len(living_processes(process.pid)) > 2, "there are no workers to be ended"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 60
    while living_processes(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not living_processes(process.pid)
    assert not (tmp_path / "out").exists()


def living_processes(session: int) -> list[int]:
    """Return the living processes of a session."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            pids.append(int(path.name))
    return pids
