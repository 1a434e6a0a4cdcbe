"""Starting over in a folder of an earlier run.

What that run wrote is put aside until the new run has a checkpoint. A user's file stays.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adora_vl.checkpoint.resume import InputFolder, lock_output_dir
from adora_vl.checkpoint.run_files import (
    OLD_RUN_FOLDER,
    WRITTEN_FILES_RECORD,
    list_run_entries,
    list_users_files,
    recording_saved_files,
    refuse_users_files,
)
from adora_vl.checkpoint.stop import mark_stopped
from adora_vl.checkpoint.store import (
    CHECKPOINT_NAME_PATTERN,
    STAGING_FOLDER,
    find_newest_valid_checkpoint,
    list_checkpoints,
)
from adora_vl.checkpoint.writer import delete_old_run, move_old_run_aside
from adora_vl.export import main as export
from adora_vl.record.metrics import METRICS_FILE, read_metrics
from adora_vl.record.record_files import write_record_file
from adora_vl.train import main
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.utils.errors import UserError
from adora_vl.utils.launch import STARTUP_LOG
from tests.support.checkpoints import FINGERPRINT, start_of_run, write_checkpoint
from tests.support.disk import folder_contents
from tests.support.stand_ins import FakeAccelerator, training_config
from tests.support.tiny_run import TINY_RUN_STEPS, tiny_run_arguments, train_tiny_run

MANIFEST_OF_RUN = '{"made_by": "adora_vl.train"}'
METRICS_OF_OLD_RUN = '{"step": 8, "kind": "train", "time": null}\n'
METRICS_OF_CRASHED_RUN = '{"step": 1, "kind": "train", "time": null}\n'


def write_run(folder: Path, *steps: int) -> Path:
    """Write what a finished run leaves behind, and a file of the user's; return the folder.

    `steps`: of its checkpoints.
    """
    for step in steps:
        write_checkpoint(folder, step)
    folder.mkdir(exist_ok=True)
    with recording_saved_files(folder, saves_model=True):
        for name in ("model.safetensors", "README.md", "trainer_state.json"):
            (folder / name).write_text("old")
    (folder / "metrics.jsonl").write_text(METRICS_OF_OLD_RUN)
    (folder / "manifest.json").write_text(MANIFEST_OF_RUN)
    (folder / "rollouts").mkdir()
    write_record_file(
        folder / "rollouts",
        pa.table({"step": [1]}).replace_schema_metadata({"adora_vl": "{}"}),
        first_step=1,
        last_step=8,
    )
    (folder / "notes.txt").write_text("the user's")
    return folder


def write_completions(run: Path, step: int) -> None:
    """Write TRL's table of the completions of a step."""
    (run / "completions").mkdir(exist_ok=True)
    table = pd.DataFrame({"step": [step], "prompt": ["p"], "completion": ["c"], "advantage": [0.0]})
    table.to_parquet(run / "completions" / f"completions_{step:05}.parquet")


def names_of_files(folder: Path) -> set[str]:
    """Return the names of all files in a folder and below it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_choosing_the_start_deletes_nothing(tmp_path):
    """The start notes that the old run will be replaced, and leaves all its files."""
    names_before = names_of_files(write_run(tmp_path, 4, 8))
    for resume_from in (None, "auto", "false"):
        start = start_of_run(tmp_path, resume_from=resume_from, overwrite=True)
        assert start.checkpoint is None
        assert start.replaces_old_run
        assert str(tmp_path / OLD_RUN_FOLDER) in start.notes[-1]
    assert names_of_files(tmp_path) == names_before


def test_a_named_checkpoint_of_the_folder_is_refused_and_one_from_elsewhere_is_used(tmp_path):
    """With `overwrite` a run can resume from a checkpoint elsewhere, but not from its own folder's.

    Those of its own folder are put aside when it begins.
    """
    run = write_run(tmp_path / "run", 4, 8)
    elsewhere = write_checkpoint(tmp_path / "other", 6)
    names_before = names_of_files(run)
    for resume_from in (str(run / "checkpoint-4"), f"{run}/../run/checkpoint-4/", "true"):
        with pytest.raises(UserError, match="^resume_from_checkpoint: .* leave out one of the two"):
            start_of_run(run, resume_from=resume_from, overwrite=True)
    start = start_of_run(run, resume_from=str(elsewhere), overwrite=True)
    assert start.checkpoint == str(elsewhere)
    assert start.replaces_old_run
    move_old_run_aside(run)
    assert elsewhere.is_dir()
    assert {name.removeprefix(f"{OLD_RUN_FOLDER}/") for name in names_of_files(run)} == names_before


def test_a_named_checkpoint_in_a_place_that_a_run_clears_is_refused_and_kept(tmp_path):
    """A checkpoint in the folder for the old run, or for unfinished saves, cannot be resumed from.

    The run that goes on from it would delete it. After it is moved elsewhere it is used.
    """
    run = write_run(tmp_path / "run", 4, 8)
    move_old_run_aside(run)
    write_checkpoint(run, 2)  # of the run after it
    (run / STAGING_FOLDER).mkdir(exist_ok=True)
    # whole, and killed before it got its place
    (run / "checkpoint-2").rename(run / STAGING_FOLDER / "checkpoint-2")
    names_before = names_of_files(run)
    places = (
        OLD_RUN_FOLDER + "/checkpoint-4",
        f"{OLD_RUN_FOLDER}/../{OLD_RUN_FOLDER}/checkpoint-8",
        STAGING_FOLDER + "/checkpoint-2",
    )
    for name, overwrite in product(places, (False, True)):
        with pytest.raises(
            UserError, match="^resume_from_checkpoint: .*, which a run clears; move it out of there"
        ):
            start_of_run(run, resume_from=str(run / name), overwrite=overwrite)
    assert names_of_files(run) == names_before
    moved_checkpoint = (run / OLD_RUN_FOLDER / "checkpoint-4").rename(tmp_path / "checkpoint-4")
    assert start_of_run(run, resume_from=str(moved_checkpoint), overwrite=True).checkpoint == str(
        moved_checkpoint
    )


def test_a_folder_that_holds_no_run_but_what_a_run_would_write_over_is_refused(tmp_path):
    """A folder without a run is refused if a run would write over one of its files.

    It may be a model, prepared data or a project that `--output_dir` names by mistake. After a run
    has left its manifest, the folder can be used.
    """
    names = ("README.md", "config.json", "model.safetensors", "manifest.json", "rollouts/mine")
    # TRL's, of a run whose engine did not start
    (tmp_path / "begun" / "completions").mkdir(parents=True)
    for name, overwrite in product(names, (False, True)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"made_by": "somebody else"}')
        with pytest.raises(
            UserError,
            match=f"^output_dir: .* holds '{name}', which no run is known to have written ",
        ):
            refuse_users_files(tmp_path, overwrite=overwrite)
        (tmp_path / name).unlink()
        (tmp_path / "manifest.json").write_text(MANIFEST_OF_RUN)  # a run that came to no checkpoint
        for usable_folder in (tmp_path, tmp_path / "nowhere", tmp_path / "begun"):
            refuse_users_files(usable_folder, overwrite=overwrite)
        (tmp_path / "manifest.json").unlink()


def test_what_the_run_reads_is_not_replaced(tmp_path):
    """A run that reads its model or data from the run that it would replace is refused.

    That may be a second stage of training. Paths outside that run's files, and names on the hub,
    are taken.
    """
    run = write_run(tmp_path / "run", 4)
    for name in ("merged", "eval"):
        (run / name).mkdir()
    names_before = names_of_files(run)
    inside_it = (".", "merged", "checkpoint-4", "rollouts", "eval/../merged")
    for key, inside in product(("model_name_or_path", "dataset_name"), inside_it):
        with pytest.raises(
            UserError, match=f"^{key}: .* whose run overwrite_output_dir: true replaces"
        ):
            start_of_run(run, overwrite=True, input_folders=[InputFolder(key, str(run / inside))])
    assert names_of_files(run) == names_before
    for elsewhere in (tmp_path, run / "eval", "somebody/model"):
        assert start_of_run(
            run, overwrite=True, input_folders=[InputFolder("model_name_or_path", str(elsewhere))]
        ).replaces_old_run


def test_after_a_crash_before_its_first_checkpoint_a_new_run_does_not_go_on_from_the_old_one(
    tmp_path,
):
    """After a new run crashed before its first checkpoint, the next start begins anew.

    The old run has been put aside when the new one begins, and stays aside as it was, until
    `delete_old_run`.
    """
    run = write_run(tmp_path, 4, 8)
    assert move_old_run_aside(run) == str(run / OLD_RUN_FOLDER)
    assert list_checkpoints(run) == []
    assert (run / "notes.txt").is_file()
    for overwrite in (False, True):  # the crash, and the same or the plain command again
        (run / "metrics.jsonl").write_text(METRICS_OF_CRASHED_RUN)
        start = start_of_run(run, overwrite=overwrite)
        assert start.checkpoint is None
        if start.replaces_old_run:
            move_old_run_aside(run)
            assert not (run / "metrics.jsonl").exists()
        assert (run / OLD_RUN_FOLDER / "metrics.jsonl").read_text() == METRICS_OF_OLD_RUN
    assert (
        find_newest_valid_checkpoint(run / OLD_RUN_FOLDER)[0]
        == run / OLD_RUN_FOLDER / "checkpoint-8"
    )
    delete_old_run(run)
    assert not (run / OLD_RUN_FOLDER).exists()


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["set aside", "crash", "checkpoint"]), max_size=6))
def test_a_whole_checkpoint_is_there_at_every_moment(tmp_path_factory, events):
    """A whole checkpoint is in the folder or put aside after any starts, crashes and saves.

    "set aside" is a start that replaces the run, "checkpoint" a save, and "crash" changes nothing.
    """
    run = write_checkpoint(tmp_path_factory.mktemp("run"), 4).parent
    for number, event in enumerate(events):
        if event == "set aside":
            move_old_run_aside(run)
        elif event == "checkpoint":
            write_checkpoint(run, 10 + number)
            assert find_newest_valid_checkpoint(run)[0] == run / f"checkpoint-{10 + number}"
            delete_old_run(run)
        assert (
            find_newest_valid_checkpoint(run)[0]
            or find_newest_valid_checkpoint(run / OLD_RUN_FOLDER)[0]
        )
    shutil.rmtree(run)


def test_a_finished_run_without_checkpoints_is_not_trained_over(tmp_path):
    """A finished run whose checkpoints are gone is refused, since its model would be replaced."""
    run = write_run(tmp_path)
    with pytest.raises(
        UserError,
        match="^output_dir: .* holds a finished run; choose another output_dir, or start anew with --overwrite_output_d"
        r"ir true, which deletes 'model.safetensors', .* and \d more once the new run has a whole checkpoint$",
    ):
        start_of_run(run)
    assert start_of_run(run, overwrite=True).replaces_old_run


@pytest.mark.slow
@pytest.mark.core
def test_the_command_keeps_the_old_run_until_the_new_one_has_a_checkpoint(
    adora_run, tmp_path, capsys
):
    """The old run stays if the command is refused, and goes when a run of two steps has saved."""
    run = shutil.copytree(adora_run, tmp_path / "run")
    names_before = names_of_files(run)
    wrong_arguments = tiny_run_arguments(
        run, overwrite_output_dir="true", use_peft="true", lora_target_modules="no_such_layer"
    )
    assert main(wrong_arguments) == 2
    assert "lora_target_modules" in capsys.readouterr().err.splitlines()[-1]
    assert names_of_files(run) >= names_before, "a run that could not begin has deleted something"
    write_completions(run, 9)
    train_tiny_run(run, overwrite_output_dir="true", max_steps=2, log_completions="true")
    tables = [path.name for path in sorted((run / "completions").iterdir())]
    assert tables == ["completions_00001.parquet", "completions_00002.parquet"], (
        "TRL's folder is there for the new run"
    )
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-2"]
    assert TINY_RUN_STEPS > 2
    assert not (run / OLD_RUN_FOLDER).exists()
    # a line for each of two steps, and one for the end
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2 + 1


ERROR_ABOUT_USERS_FILES = (
    "^output_dir: .* holds .*, which no run is known to have written and this one would write "
    "over or delete; "
)


@pytest.fixture(scope="module")
def finished_run(adora_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run with a table of completions, as `log_completions` leaves them."""
    run = shutil.copytree(adora_run, tmp_path_factory.mktemp("finished") / "run")
    write_completions(run, 1)
    return run


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run, which a test may change."""
    return shutil.copytree(finished_run, tmp_path / "run")


def replace_by_link(path: Path, target: Path) -> None:
    """Put a link in the place of a file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def write_users_file(path: Path, content: str = "the user's") -> None:
    """Write a file that the user has put there, in folders that may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def write_users_table(path: Path) -> None:
    """Write a table that has none of the columns of a run's tables."""
    pd.DataFrame({"step": [1], "mine": ["the user's"]}).to_parquet(path)


def change_but_keep_size(path: Path) -> None:
    """Reverse the bytes of a file."""
    path.write_bytes(bytes(reversed(path.read_bytes())))


def make_folder_elsewhere(folder: Path) -> Path:
    """Return a folder where the user keeps other things."""
    write_users_file(folder.parent / "elsewhere" / "README.md")
    return folder.parent / "elsewhere"


def link_from_rollouts(folder: Path) -> None:
    """Put a link to a folder of the user's among the rollouts of a run."""
    (folder / "rollouts" / "more").symlink_to(make_folder_elsewhere(folder))


def move_and_link(path: Path) -> None:
    """Move a file to a folder of the user's, and leave a link to it."""
    target = make_folder_elsewhere(path.parent) / path.name
    path.rename(target)
    path.symlink_to(target)


def delete_manifest(checkpoint: Path) -> None:
    """Delete the file without which a checkpoint is none."""
    (checkpoint / "manifest.json").unlink()


PART = "rollouts-00000009-00000009.parquet"
# by the name under which it is refused: what puts a file of the user's into the folder of a run
MAKE_USERS_FILE: dict[str, Callable[[Path], object]] = {
    "README.md": lambda run: write_users_file(run / "README.md"),
    "config.json": lambda run: write_users_file(run / "config.json", "{}"),
    "model.safetensors": lambda run: change_but_keep_size(run / "model.safetensors"),
    "added_tokens.json": lambda run: write_users_file(run / "added_tokens.json"),
    "metrics.jsonl": lambda run: write_users_file(
        run / "metrics.jsonl", '{"step": 1, "loss": 0.5}\n'
    ),
    "manifest.json": lambda run: write_users_file(run / "manifest.json", '{"made_by": "somebody"}'),
    "stopped.json": lambda run: write_users_file(run / "stopped.json", "[]"),
    "rollouts/own.parquet": lambda run: write_users_table(run / "rollouts" / "own.parquet"),
    f"rollouts/{PART}": lambda run: write_users_table(run / "rollouts" / PART),
    "rollouts/_images/mine.png": lambda run: write_users_file(
        run / "rollouts" / "_images" / "mine.png"
    ),
    "rollouts/more": link_from_rollouts,
    "completions/completions_00009.parquet": lambda run: write_users_table(
        run / "completions" / "completions_00009.parquet"
    ),
    "completions/notes/a.txt": lambda run: write_users_file(
        run / "completions" / "notes" / "a.txt"
    ),
    "merged/predictions.jsonl": lambda run: write_users_file(run / "merged" / "predictions.jsonl"),
    "checkpoint-2/notes.txt": lambda run: write_users_file(run / "checkpoint-2" / "notes.txt"),
    "checkpoint-4": lambda run: delete_manifest(run / "checkpoint-4"),
    "checkpoint-7": lambda run: write_users_file(run / "checkpoint-7" / "model.safetensors"),
    "checkpoint-8": lambda run: write_users_file(run / "checkpoint-8"),
    "checkpoint-9": lambda run: replace_by_link(run / "checkpoint-9", make_folder_elsewhere(run)),
    "generation_config.json": lambda run: replace_by_link(
        run / "generation_config.json", make_folder_elsewhere(run) / "README.md"
    ),
    "chat_template.jinja": lambda run: move_and_link(run / "chat_template.jinja"),
    "rollouts": lambda run: replace_by_link(run / "rollouts", make_folder_elsewhere(run)),
    "tokenizer.json": lambda run: replace_by_link(run / "tokenizer.json", run.parent / "nowhere"),
    f"{OLD_RUN_FOLDER}/README.md": lambda run: write_users_file(run / OLD_RUN_FOLDER / "README.md"),
    f"{OLD_RUN_FOLDER}/notes.txt": lambda run: write_users_file(run / OLD_RUN_FOLDER / "notes.txt"),
    OLD_RUN_FOLDER: lambda run: replace_by_link(run / OLD_RUN_FOLDER, make_folder_elsewhere(run)),
}


def test_a_file_of_the_users_is_refused_by_its_name_and_nothing_moves(finished_run, tmp_path):
    """Each file of `MAKE_USERS_FILE` in a run's folder is refused by name before anything moves.

    It is looked for at the start, and again when the old run is put aside.
    """
    for number, (name, make_users_file) in enumerate(MAKE_USERS_FILE.items()):
        run = shutil.copytree(finished_run, tmp_path / str(number) / "run")
        make_users_file(run)
        contents_before = folder_contents(run.parent)
        # and a late file
        for refuse in (
            lambda run=run: refuse_users_files(run, overwrite=True),
            lambda run=run: move_old_run_aside(run),
        ):
            with pytest.raises(UserError, match=ERROR_ABOUT_USERS_FILES) as caught:
                refuse()
            assert f"'{name}'" in str(caught.value)
        assert folder_contents(run.parent) == contents_before, name


@pytest.mark.slow
@pytest.mark.core
def test_the_command_says_what_is_in_its_way_and_what_will_go(run, capsys, monkeypatch):
    """With `overwrite_output_dir` files of the user's are refused; without them a run is replaced.

    They are named before the weights are loaded. `learning_rate` differs from that of the run in
    the folder, so the plain command is refused as well, and says what the flag would delete.
    """
    for name in ("README.md", "config.json", "rollouts/own.parquet", "checkpoint-7"):
        MAKE_USERS_FILE[name](run)
    contents_before = folder_contents(run)
    with monkeypatch.context() as patch:
        patch.setattr(
            "adora_vl.train.load_trainer",
            lambda *_: pytest.fail("the weights were loaded for a run that cannot be"),
        )
        assert main(tiny_run_arguments(run, overwrite_output_dir="true", learning_rate=2e-3)) == 2
    assert folder_contents(run) == contents_before
    names = "'checkpoint-7', 'config.json', 'README.md', 'rollouts/own.parquet'"
    assert (
        f" holds {names}, which no run is known to have written "
        in capsys.readouterr().err.splitlines()[-1]
    )

    shutil.rmtree(run / "checkpoint-7")
    for name in ("README.md", "config.json", "rollouts/own.parquet"):
        (run / name).unlink()
    assert main(tiny_run_arguments(run, learning_rate=2e-3)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "learning_rate" in line
    assert "; set it back, choose another output_dir, or start anew with --" in line
    # five are named in `goes`
    count = len(list_run_entries(run)) - 5
    goes = (
        "'checkpoint-2', 'checkpoint-4', 'model.safetensors', 'generation_config.json', "
        "'processor_config.json'"
    )
    assert line.endswith(
        f", which deletes {goes} and {count} more once the new run has a whole checkpoint"
    )

    # sealed too, but no run gives that name
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-best")
    write_users_file(run / "eval" / "predictions.jsonl")
    contents = folder_contents(run / "checkpoint-best")
    assert (
        main(tiny_run_arguments(run, overwrite_output_dir="true", learning_rate=2e-3, max_steps=2))
        == 0
    )
    assert (
        "'checkpoint-2', 'checkpoint-4', 'model.safetensors', 'generation_config.json'"
        in capsys.readouterr().out
    )
    assert folder_contents(run / "checkpoint-best") == contents
    assert (run / "eval" / "predictions.jsonl").is_file()
    assert not (run / "checkpoint-4").exists()
    assert not (run / OLD_RUN_FOLDER).exists()
    assert list_users_files(run) == []


@pytest.mark.slow
@pytest.mark.core
def test_a_resume_writes_over_nothing_of_the_users(run, tmp_path, capsys):
    """A resumed run refuses to write its final model over files of the user's, and names them.

    Files that an earlier process of the run was saving when it was killed are the run's own, and
    are written over.
    """
    notes = json.loads((run / WRITTEN_FILES_RECORD).read_text())
    killed = shutil.copytree(run, tmp_path / "killed")
    for name in ("README.md", "config.json"):
        write_users_file(run / name)
    write_users_file(run / "rollouts" / "_images" / "mine.png")  # stays where it is
    contents_before = folder_contents(run)
    assert main(tiny_run_arguments(run, max_steps=6)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert " holds 'config.json', 'README.md', which no run is known to have written " in line
    assert folder_contents(run) == contents_before
    for name in ("README.md", "config.json"):
        (run / name).rename(tmp_path / name)
    assert main(tiny_run_arguments(run, max_steps=6)) == 0
    assert list_users_files(run) == ["rollouts/_images/mine.png"]

    write_users_file(killed / "added_tokens.json")
    with pytest.raises(RuntimeError), recording_saved_files(killed, saves_model=True):
        write_users_file(killed / "model.safetensors", "half of an")
        shutil.copy(killed / WRITTEN_FILES_RECORD, tmp_path)
        raise RuntimeError
    shutil.copy(tmp_path / WRITTEN_FILES_RECORD, killed)  # as a kill would leave it
    with pytest.raises(UserError, match="holds 'added_tokens.json', which"):
        refuse_users_files(killed, overwrite=False)
    (killed / "added_tokens.json").unlink()
    refuse_users_files(killed, overwrite=False)
    assert notes["files"].keys() >= {"README.md", "config.json"}


def test_files_of_a_save_that_is_killed_twice_stay_the_runs(tmp_path):
    """Files that two processes were saving when they were killed are not taken for the user's.

    The second one is killed before it has saved the file of the first again.
    """

    def save_until_killed(name: str) -> None:
        with pytest.raises(RuntimeError), recording_saved_files(tmp_path, saves_model=True):
            write_users_file(tmp_path / name, "half of one")
            notes_of_killed_process = (tmp_path / WRITTEN_FILES_RECORD).read_bytes()
            raise RuntimeError
        (tmp_path / WRITTEN_FILES_RECORD).write_bytes(notes_of_killed_process)

    write_users_file(tmp_path / "config.json")
    save_until_killed("model.safetensors")
    save_until_killed("tokenizer.json")
    assert list_users_files(tmp_path) == ["config.json"]
    with recording_saved_files(tmp_path, saves_model=True):
        write_users_file(tmp_path / "model.safetensors", "a whole one")
    assert list_users_files(tmp_path) == ["config.json"], "'tokenizer.json' was not saved again"


def test_a_model_that_is_merged_where_a_run_proposes_it_is_the_runs(run, tmp_path):
    for output in (run / "merged", tmp_path / "merged"):
        assert export([str(run), str(output)]) == 0
    assert list_users_files(run) == []
    assert not (tmp_path / WRITTEN_FILES_RECORD).exists()


def test_a_run_that_has_taken_all_its_steps_takes_none_and_counts_as_stopped_no_more(run, capsys):
    """A run that was stopped at its last step trains nothing when started again.

    It leaves weights and rollouts as they are, and removes `stopped.json`.
    """
    mark_stopped(run, TINY_RUN_STEPS)
    contents_before = {
        path: content
        for path, content in folder_contents(run).items()
        if path.endswith((".safetensors", ".parquet"))
    }
    assert main(tiny_run_arguments(run)) == 0
    assert (
        f"checkpoint-{TINY_RUN_STEPS} is the last step: nothing left to train"
        in capsys.readouterr().out
    )
    assert not (run / "stopped.json").exists()
    assert contents_before.items() <= folder_contents(run).items()


@pytest.mark.slow
def test_a_run_that_dies_after_its_last_checkpoint_is_finished_from_it(tmp_path, monkeypatch):
    """A run that died between its last checkpoint and its final files is finished at the next try.

    It uses LoRA, and gets the adapter, the merged model, the figures of the steps since the last
    line of the log, and a manifest that says `finished`. A start after that changes nothing.
    """
    keys: dict[str, Any] = {"use_peft": "true", "lora_r": 2, "logging_steps": 3}
    uninterrupted = train_tiny_run(tmp_path / "whole", **keys)
    died_run = shutil.copytree(uninterrupted, tmp_path / "died")
    for path in died_run.iterdir():
        if path.is_file() and path.name not in ("manifest.json", METRICS_FILE):
            path.unlink()
    shutil.rmtree(died_run / "merged")
    lines = (uninterrupted / METRICS_FILE).read_text().splitlines(keepends=True)
    (died_run / METRICS_FILE).write_text("".join(lines[:-1]))
    manifest = json.loads((uninterrupted / "manifest.json").read_text())
    (died_run / "manifest.json").write_text(json.dumps({**manifest, "status": "running"}))

    def fail_to_merge(*arguments: object, **options: object) -> None:
        raise UserError("RUN: the adapter's base model cannot be loaded")

    with monkeypatch.context() as patch:
        patch.setattr("adora_vl.export.merge_checkpoint", fail_to_merge)
        assert main(tiny_run_arguments(died_run, **keys)) == 2
    unfinished_manifest = json.loads((died_run / "manifest.json").read_text())
    assert unfinished_manifest["status"] == "running", "the merged model is missing"

    assert main(tiny_run_arguments(died_run, **keys)) == 0
    assert names_of_files(uninterrupted) - names_of_files(died_run) == {STARTUP_LOG}
    for name in ("adapter_model.safetensors", "merged/model.safetensors"):
        assert (died_run / name).read_bytes() == (uninterrupted / name).read_bytes(), name
    last_line = read_metrics(died_run / METRICS_FILE)[-1]
    expected_line = read_metrics(uninterrupted / METRICS_FILE)[-1]
    assert (last_line["step"], last_line["kind"]) == (TINY_RUN_STEPS, "end")
    for name in ("train_loss", "reward", "adora/pass_rate", "entropy", "epoch"):
        assert last_line[name] == expected_line[name], name
    history = json.loads((died_run / "trainer_state.json").read_text())["log_history"]
    assert history[-1]["reward"] == expected_line["reward"]
    ended_manifest = json.loads((died_run / "manifest.json").read_text())
    assert ended_manifest["status"] == "finished"
    assert ended_manifest["steps"] == TINY_RUN_STEPS
    assert len(ended_manifest["starts"]) == 1
    contents = folder_contents(died_run)
    with monkeypatch.context() as patch:
        patch.setattr("adora_vl.export.merge_checkpoint", fail_to_merge)
        assert main(tiny_run_arguments(died_run, **keys)) == 0, (
            "a finished run merges nothing again"
        )
    assert folder_contents(died_run) == contents, "a start of a finished run changes nothing"


@pytest.mark.slow
def test_a_folder_is_not_judged_while_another_process_writes_into_it(run, capsys):
    """A run is refused while another process holds the lock of its folder, and can lock it after.

    The folder also has a file that would be refused as the user's, which is not looked at.
    """
    write_users_file(run / "config.json", "half")
    code = "import sys, pathlib; from adora_vl.checkpoint import resume; "
    code += "lock = resume.lock_output_dir(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", f"{code}; print('held', flush=True); input()", str(run)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout.readline() == "held\n"
        contents_before = folder_contents(run)
        assert main(tiny_run_arguments(run, overwrite_output_dir="true")) == 2
        with pytest.raises(UserError, match="another run is writing to"):
            lock_output_dir(run)
        writer.kill()
        writer.wait()
        lock_output_dir(run).release()  # the lock dies with its process, however that ended
    assert "another run is writing to" in capsys.readouterr().err.splitlines()[-1]
    assert folder_contents(run) == contents_before


def test_the_flag_is_recommended_with_what_it_would_refuse(tmp_path):
    """An error that recommends `--overwrite_output_dir` says what has to be moved away first.

    That is a checkpoint without a manifest here, as another trainer writes it.
    """
    write_users_file(tmp_path / "checkpoint-500" / "model.safetensors")  # another trainer's
    with pytest.raises(
        UserError, match="move away 'checkpoint-500', which no run .* --overwrite_output_dir true$"
    ):
        start_of_run(tmp_path)
    write_checkpoint(tmp_path, 4)
    with pytest.raises(
        UserError, match="move away 'checkpoint-500', .* true, which deletes 'checkpoint-4' once "
    ):
        start_of_run(tmp_path, fingerprint={**FINGERPRINT, "adora_method.adora.factor": "0.2"})


def test_a_stopped_a_resumed_and_a_killed_run_are_known_as_a_whole(run, resumed_run):
    """A stopped, resumed or killed run leaves nothing that is taken for a file of the user's."""
    assert list_users_files(resumed_run.folder) == []
    mark_stopped(run, step=4)
    for path in list_run_entries(run):
        if not CHECKPOINT_NAME_PATTERN.fullmatch(path.name) and path.name not in (
            "metrics.jsonl",
            "manifest.json",
            "rollouts",
        ):
            shutil.rmtree(path) if path.is_dir() else path.unlink()  # it was killed before its end
    (run / "checkpoint-4" / "complete").unlink()  # and has been damaged
    (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes() + b'{"step": 5, "ki')
    write_users_file(run / "rollouts" / f".rollouts-00000005-00000005.parquet.partial-{'0' * 16}")
    mark_stopped(run, step=4)
    assert list_users_files(run) == []
    refuse_users_files(run, overwrite=True)
    assert move_old_run_aside(run)
    assert list_run_entries(run) == []
    refuse_users_files(run, overwrite=True)  # what was put aside is known there as well


def test_a_run_that_was_killed_while_it_put_another_one_aside_can_be_started_again(
    run, monkeypatch
):
    """A run that is killed in the midst of putting another one aside can be started again.

    The sixth of its moves is the one that does not happen.
    """
    moves = iter([True] * 5)
    rename = Path.rename
    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(Path, "rename", lambda path, target: next(moves) and rename(path, target))
        move_old_run_aside(run)
    assert (run / OLD_RUN_FOLDER / "config.json").is_file()
    assert (run / "README.md").is_file()
    refuse_users_files(run, overwrite=True)


def test_a_model_without_a_note_of_what_was_written_is_refused_until_it_is_moved(run, tmp_path):
    """Without the run's record of its files, its model counts as the user's and has to be moved.

    `WRITTEN_FILES_RECORD` has a hash of each file that a run has saved. A record that no run can
    have written is the user's too.
    """
    (run / WRITTEN_FILES_RECORD).unlink()
    with pytest.raises(
        UserError,
        match=rf"{ERROR_ABOUT_USERS_FILES.split(' .*')[0]} .* holds 'model.safetensors', .* and \d more, ",
    ):
        refuse_users_files(run, overwrite=True)
    for name in list_users_files(run):
        shutil.move(run / name, tmp_path)
    refuse_users_files(run, overwrite=True)
    write_users_file(run / WRITTEN_FILES_RECORD, '{"files": {}}')
    assert list_users_files(run) == [WRITTEN_FILES_RECORD]


def test_a_copy_of_a_run_and_a_link_to_one_are_runs(run, tmp_path):
    """A copied run has no files of the user's, and through a link the run itself is moved aside."""
    # as users copy: with other times
    subprocess.run(["cp", "-r", str(run), str(tmp_path / "copy")], check=True)
    assert list_users_files(tmp_path / "copy") == []
    (tmp_path / "link").symlink_to(run)
    refuse_users_files(tmp_path / "link", overwrite=True)
    assert move_old_run_aside(tmp_path / "link")
    assert (run / OLD_RUN_FOLDER / "checkpoint-4").is_dir()
    assert (tmp_path / "link").is_symlink()


def test_a_hidden_folder_of_somebody_elses_is_not_cleared(tmp_path):
    """A folder named as the one for unfinished saves is refused, unless a run is around it."""
    write_users_file(tmp_path / STAGING_FOLDER / "mine")
    with pytest.raises(
        UserError,
        match=ERROR_ABOUT_USERS_FILES.replace(".* holds .*", f".* holds '{STAGING_FOLDER}'"),
    ):
        refuse_users_files(tmp_path, overwrite=False)
    # of a run that was killed while it saved
    write_users_file(tmp_path / "manifest.json", '{"made_by": "adora_vl.train"}')
    refuse_users_files(tmp_path, overwrite=False)


def test_what_a_run_saves_is_noted_and_nothing_else(tmp_path):
    """Files that a process writes while it saves the model are noted as the run's, and no others.

    One save succeeds, one fails, and one is of a process that does not save the model. A file that
    was there, or is behind a link, stays the user's.
    """
    write_users_file(tmp_path / "merged" / "mine")
    write_users_file(tmp_path / "notes.txt")
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "notes.txt")
    with recording_saved_files(tmp_path, saves_model=True):
        write_users_file(tmp_path / "config.json", "a run's")
    with pytest.raises(OSError, match="full"), recording_saved_files(tmp_path, saves_model=True):
        write_users_file(tmp_path / "README.md", "a run's")
        write_users_file(tmp_path / "tokenizer.json", "through the link")
        raise OSError("full")
    with recording_saved_files(tmp_path, saves_model=False):
        write_users_file(tmp_path / "model.safetensors", "of another process")
    assert json.loads((tmp_path / WRITTEN_FILES_RECORD).read_text())["files"].keys() == {
        "config.json",
        "README.md",
    }
    assert list_users_files(tmp_path) == ["merged/mine", "model.safetensors", "tokenizer.json"]


def test_a_model_that_is_pushed_to_the_hub_on_the_way_is_noted(tmp_path, monkeypatch):
    """Files that TRL copies into the run's folder for a push to the hub count as the run's."""
    stock = "trl.GRPOTrainer._push_from_checkpoint"
    monkeypatch.setattr(
        stock, lambda self, folder: write_users_file(tmp_path / "config.json", folder)
    )
    trainer = object.__new__(AdoraGRPOTrainer)
    trainer.args = training_config(output_dir=str(tmp_path))
    trainer.accelerator = FakeAccelerator()
    trainer._push_from_checkpoint("checkpoint-2")
    assert (tmp_path / "config.json").read_text() == "checkpoint-2"
    assert list_users_files(tmp_path) == []
