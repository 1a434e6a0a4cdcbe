"""Files and folders that are replaced as a whole.

A full disk, a crash or a kill leaves the old one, and nothing else.

The disk is the real one, as in test_half_written.py, which has data preparation and evaluation.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from adora_vl.checkpoint.resume import lock_output_dir
from adora_vl.checkpoint.store import clear_staging
from adora_vl.data.dataset import split_files
from adora_vl.data.output import complete_or_absent
from adora_vl.utils.errors import RunError, UserError
from adora_vl.utils.files import make_output_folder, replace_file, replacing_folder
from tests.support.disk import folder_contents, limit_file_size

ROOT = Path(__file__).parents[3]
WRITING_METHODS = {
    "write_text",
    "write_bytes",
    "save_pretrained",
    "ParquetWriter",
    "copy2",
    "copyfile",
    "copytree",
}
# Who may write without `adora_vl.utils.files`: inside its `replacing_folder` or
# `complete_or_absent`, or appending.
FILES_THAT_WRITE_OTHERWISE = {
    "adora_vl/utils/files.py",
    "adora_vl/utils/launch.py",
    "adora_vl/checkpoint/universal.py",
    "adora_vl/record/metrics.py",
    "adora_vl/export.py",
    "adora_vl/builtin/small_model.py",
    "adora_vl/models/four_bit.py",
    "adora_vl/data/dataset.py",
    "adora_vl/conversion/quarantine.py",
    "adora_vl/evals/inference/predictions.py",
    "data_prep/filter.py",
}


def writes_a_file_directly(call: ast.Call) -> bool:
    """Return whether a call writes a file: `open` for writing, or one of `WRITING_METHODS`."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    arguments = [*call.args, *[keyword.value for keyword in call.keywords]]
    texts = [
        argument.value
        for argument in arguments
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    has_write_mode = any(set(text) & set("wax") for text in texts)
    return (name == "open" and has_write_mode) or name in WRITING_METHODS


def test_whole_files_are_written_in_one_way():
    """Only the files of `FILES_THAT_WRITE_OTHERWISE` write without `adora_vl.utils.files`."""
    writers = {
        path.relative_to(ROOT).as_posix()
        for top in ("adora_vl", "data_prep", "eval")
        for path in (ROOT / top).rglob("*.py")
        if any(
            isinstance(node, ast.Call) and writes_a_file_directly(node)
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert writers == FILES_THAT_WRITE_OTHERWISE


def write_manifest_file(folder: Path) -> None:
    """Write the manifest of a finished run into a folder."""
    from adora_vl.record.manifest import write_manifest

    write_manifest({"status": "finished", "notes": "x" * 2000}, folder)


def write_stopped_file(folder: Path) -> None:
    """Write the note of a run that was stopped at step 4 into a folder."""
    from adora_vl.checkpoint.stop import mark_stopped

    mark_stopped(folder, step=4)


def write_report_file(folder: Path) -> None:
    """Write a page of a report into a folder."""
    from adora_vl.report.page import GENERATOR, write_page

    write_page(GENERATOR + "x" * 2000, folder / "report.html")


def write_metrics_file(folder: Path) -> None:
    """Write the metrics of nine steps into a folder, as the begin of a training does it."""
    from adora_vl.record.metrics import MetricsFile

    state: Any = SimpleNamespace(is_world_process_zero=True, global_step=9, log_history=[])
    state.log_history = [{"step": step, "loss": 1.0} for step in range(1, 10)]
    MetricsFile().on_train_begin(SimpleNamespace(output_dir=str(folder)), state, None)


def write_rollouts_file(folder: Path) -> None:
    """Write a file with the rollouts of step 1 into a folder."""
    import pyarrow as pa

    from adora_vl.record.record_files import write_record_file

    write_record_file(folder, pa.table({"step": list(range(500))}), first_step=1, last_step=1)


def write_diagram_file(folder: Path) -> None:
    """Store a picture of a row in a folder."""
    from adora_vl.record.diagrams import DiagramStore

    DiagramStore(folder, limit_bytes=1e9).store("row", [Image.effect_noise((60, 60), 90)])


def write_card_file(folder: Path) -> None:
    """Write a model card into a folder."""
    from transformers import TrainerState

    from adora_vl.record.card import write_card

    write_card({"versions": {"torch": "x" * 2000}}, folder, TrainerState())


class SavesTwoFiles:
    """A model, or a processor: writes `name` in two files, the second of which does not fit."""

    def __init__(self, name: str) -> None:
        self.name = name

    def merge_and_unload(self) -> SavesTwoFiles:
        return self

    def parameters(self) -> tuple[()]:
        return ()

    def save_pretrained(self, folder: Path) -> None:
        (folder / f"{self.name}.json").write_text("{}")
        (folder / f"{self.name}.bin").write_text("x" * 2000)


def write_merged_model(folder: Path) -> None:
    """Write a merged model into a folder, without merging anything."""
    from accelerate import Accelerator

    from adora_vl import export as module

    with mock.patch("accelerate.utils.is_peft_model", lambda model: True):
        assert module.save_merged(
            SavesTwoFiles("config"),
            SavesTwoFiles("processor"),
            folder / "merged",
            Accelerator(cpu=True),
        )


def write_tiny_model(folder: Path) -> None:
    """Save a tiny model into a folder, without building one."""
    from adora_vl.builtin import WarmStart
    from adora_vl.builtin.small_model import save_model_and_facts

    save_model_and_facts(
        folder / "tiny",
        SavesTwoFiles("config"),
        SavesTwoFiles("processor"),
        WarmStart(),
    )


def write_plan_file(folder: Path) -> None:
    """Write a dry run's plan into a folder."""
    from adora_vl.planning.dry_run import _write_output

    _write_output("--json", folder / "plan.json", "x" * 2000)


def copy_checkpoint_again(folder: Path) -> None:
    """Copy a checkpoint over the model in a folder."""
    from adora_vl.export import copy_model

    copy_model(folder / "checkpoint", folder)


WRITE_FUNCTIONS = [
    write_manifest_file,
    write_stopped_file,
    write_report_file,
    write_metrics_file,
    write_rollouts_file,
    write_diagram_file,
    write_card_file,
    write_merged_model,
    write_tiny_model,
    write_plan_file,
    copy_checkpoint_again,
]


@pytest.fixture
def folder_with_old_files(tmp_path: Path) -> Path:
    """Create a folder with an old file at each name that the functions here write."""
    from adora_vl.report.page import GENERATOR

    for model in ("merged", "tiny", "checkpoint"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text('"old"')
    (tmp_path / "report.html").write_text(GENERATOR)
    for name in (
        "manifest.json",
        "stopped.json",
        "metrics.jsonl",
        "README.md",
        "plan.json",
        "model.safetensors",
    ):
        (tmp_path / name).write_text('"old"')
    (tmp_path / "checkpoint" / "model.safetensors").write_text("new" * 1000)
    (tmp_path / "rollouts-00000001-00000001.parquet").write_text("old")
    return tmp_path


@pytest.mark.parametrize("write", WRITE_FUNCTIONS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("size", [0, 60])
def test_a_full_disk_leaves_what_was_there_and_nothing_else(write, size, folder_with_old_files):
    """No file may be longer than `size` bytes; once it may, the same call writes."""
    contents_before = folder_contents(folder_with_old_files)
    with (
        limit_file_size(0 if write is write_stopped_file else size),
        pytest.raises((OSError, RunError, UserError)),
    ):
        write(folder_with_old_files)
    contents_after = folder_contents(folder_with_old_files)
    if write is copy_checkpoint_again:
        # This small file may be copied whole, before the copy of the weights fails.
        contents_after.pop("config.json", None)
    assert contents_after == contents_before
    write(folder_with_old_files)
    assert folder_contents(folder_with_old_files) != contents_before


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_cannot_take_its_place_is_taken_away(error, folder_with_old_files, monkeypatch):
    """If the last rename fails, the new file is removed, and the old folder gets its name back.

    That holds whichever of the folder's two renames fails, and for a file that did not exist.
    """
    contents_before = folder_contents(folder_with_old_files)
    real_rename = Path.rename
    for name_whose_rename_fails in ("merged", "new"):

        def rename(
            self: Path, target: Path, name_whose_rename_fails: str = name_whose_rename_fails
        ) -> Path:
            if self.name == name_whose_rename_fails:
                raise error
            return real_rename(self, target)

        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(Path, "rename", rename)
            write_merged_model(folder_with_old_files)
        assert folder_contents(folder_with_old_files) == contents_before
    monkeypatch.setattr(Path, "replace", mock.Mock(side_effect=error))
    for name in ("manifest.json", "new.json"):
        with pytest.raises(error):
            replace_file(folder_with_old_files / name, "new")
        assert folder_contents(folder_with_old_files) == contents_before


WRITE_UNTIL_KILLED = """
import os, signal, sys
from pathlib import Path
from adora_vl.utils.files import replacing_file, replacing_folder
folder = Path(sys.argv[1])
with replacing_file(folder / "manifest.json") as file, replacing_folder(folder / "merged") as staged:
    file.write(b"half"); file.flush()
    (staged / "config.json").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_start_removes_what_a_killed_run_has_left(folder_with_old_files):
    """The next start removes half-written files of a killed run, and no file of the user's.

    The user's files have similar names.
    """
    contents_before = folder_contents(folder_with_old_files)
    (folder_with_old_files / ".mine.partial").write_text("the user's")
    (folder_with_old_files / ".mine.partial-download").write_text("the user's")
    subprocess.run(
        [sys.executable, "-c", WRITE_UNTIL_KILLED, str(folder_with_old_files)],
        env={"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert len(folder_contents(folder_with_old_files)) > len(contents_before) + 1
    clear_staging(folder_with_old_files)
    assert folder_contents(folder_with_old_files) == {
        **contents_before,
        ".mine.partial": b"the user's",
        ".mine.partial-download": b"the user's",
    }


DIE_BETWEEN_RENAMES = """
import os, signal, sys
from pathlib import Path
from adora_vl.utils.files import replacing_folder
rename = Path.rename
def dying(self, target):
    rename(self, target)
    os.kill(os.getpid(), signal.SIGKILL)
Path.rename = dying
with replacing_folder(Path(sys.argv[1]) / "merged") as staged:
    (staged / "config.json").write_text("new")
"""


def prepare_over_merged(folder: Path) -> None:
    """`merged` is not ours to replace; however the preparation ends, it first puts things right."""
    with pytest.raises(UserError), complete_or_absent(folder / "merged"):
        pass


def test_a_folder_whose_replacement_was_killed_between_two_renames_comes_back(
    folder_with_old_files,
):
    """The old folder gets its name back at the run's next start, or at the next writing of it.

    The process is killed when the old folder has moved away and the new one is not there yet.
    """
    contents_before = folder_contents(folder_with_old_files)
    for recover in (clear_staging, prepare_over_merged):
        subprocess.run(
            [sys.executable, "-c", DIE_BETWEEN_RENAMES, str(folder_with_old_files)],
            env={"PYTHONPATH": str(ROOT)},
            check=False,
        )
        assert not (folder_with_old_files / "merged").exists()
        recover(folder_with_old_files)
        assert folder_contents(folder_with_old_files) == contents_before


def test_the_bytes_are_on_the_disk_before_they_have_their_name(tmp_path, monkeypatch):
    """A file or folder is flushed to the disk before it gets its name.

    Otherwise a power cut could leave an empty file under the name of a whole one.
    """
    events: list[str] = []
    fsync = os.fsync
    replace = Path.replace
    rename = Path.rename

    def note_fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        events.append("the file" if ".partial-" in name else name)
        fsync(descriptor)

    def noting_name(move: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def move_and_note(source: Path, target: Path) -> Path:
            events.append(f"named {target.name}")
            return move(source, target)

        return move_and_note

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", noting_name(replace))
    monkeypatch.setattr(Path, "rename", noting_name(rename))
    replace_file(tmp_path / "score.json", "whole")
    assert events == ["the file", "named score.json"]
    events.clear()
    with replacing_folder(tmp_path / "merged") as staged:
        (staged / "weights").write_text("whole")
    assert {"weights", "new"} == set(events[:2])
    assert events[2:] == ["named merged", tmp_path.name]


def test_what_is_no_file_is_written_to_as_it_is(tmp_path):
    """A named pipe and `/dev/stdout` are written to, and no file takes their place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_file(pipe, "heard")
    assert os.read(reader, 100) == b"heard"
    assert pipe.is_fifo()
    os.close(reader)
    code = (
        "from pathlib import Path; from adora_vl.utils import files; "
        "files.replace_file(Path('/dev/stdout'), 'heard')"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert process.stdout == "heard"
    assert Path("/dev/stdout").is_symlink()


@pytest.mark.parametrize("what_is_there", ["a file", "other things"])
def test_the_tiny_model_is_built_over_nothing_else(what_is_there, tmp_path, capsys):
    """A build of the tiny model refuses a file, or a folder of other files, as its output.

    Before, `--output ~` deleted the home when the model was built.
    """
    from adora_vl.builtin.__main__ import main

    output = tmp_path / "mine"
    if what_is_there == "a file":
        output.write_text("mine")
    else:
        output.mkdir()
        (output / "thesis.txt").write_text("mine")
    contents_before = folder_contents(tmp_path)
    assert main(["--output", str(output), "--steps", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: output: ")
    assert folder_contents(tmp_path) == contents_before
    if output.is_dir():
        shutil.rmtree(output)
        with replacing_folder(output) as staged:
            (staged / "build.json").write_text(json.dumps({}))
        assert [path.name for path in output.iterdir()] == ["build.json"]


def test_a_link_to_nothing_says_what_it_is(tmp_path):
    """Each command that is given such a link, or a path below it, is refused and makes nothing."""
    (tmp_path / "link").symlink_to("gone")
    message = "'.*/link' is a link to 'gone', which is not there; make that, or remove the link$"
    for output in (tmp_path / "link", tmp_path / "link" / "below"):
        with pytest.raises(UserError, match=f"^output: {message}"):
            make_output_folder(output)
        with pytest.raises(UserError, match=f"^output_dir: {message}"):
            lock_output_dir(output)
        with pytest.raises(UserError, match=f"^dataset: {message}"):
            split_files(output)
    assert list(tmp_path.iterdir()) == [tmp_path / "link"]


def permission_bits(path: Path) -> int:
    """Return who may read, write and execute a file."""
    return path.stat().st_mode & 0o777


def test_others_may_read_saved_weights_as_the_umask_says(tmp_path):
    """A umask takes its bits from 0o666, for weights and config alike."""
    for umask, expected_mode in (
        (0o022, 0o644),
        (0o027, 0o640),
        (0o077, 0o600),
    ):
        umask_before = os.umask(umask)
        try:
            with replacing_folder(tmp_path / "model") as folder:
                save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
                (folder / "config.json").write_text("{}")
        finally:
            os.umask(umask_before)
        modes = {path.name: permission_bits(path) for path in (tmp_path / "model").iterdir()}
        assert modes == {"model.safetensors": expected_mode, "config.json": expected_mode}


@pytest.mark.slow
def test_a_run_leaves_no_weights_that_its_owner_alone_may_read(adora_run):
    """The weights of a finished run have the permissions of its config."""
    weights = list(adora_run.rglob("*.safetensors"))
    assert len(weights) > 1
    assert {permission_bits(path) for path in weights} == {
        permission_bits(adora_run / "config.json")
    }
