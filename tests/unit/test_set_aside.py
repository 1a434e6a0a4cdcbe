"""Starting over in a folder that holds a run: nothing of it goes before the new run has something to go on from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adora_vl.checkpoint.resume import choose_start, hold, refuse_foreign
from adora_vl.checkpoint.set_aside import ASIDE, delete_aside, set_aside
from adora_vl.checkpoint.store import STAGING, checkpoints, newest_valid
from adora_vl.errors import UserError
from adora_vl.train import main
from tests.tiny_run import STEPS, arguments, train
from tests.unit.test_checkpoint import RUN, make

pytestmark = pytest.mark.slow

OF_THE_OLD = ("metrics.jsonl", "manifest.json", "model.safetensors", "trainer_state.json", "rollouts/part.parquet")


def a_run(folder: Path, *steps: int) -> Path:
    for step in steps:
        make(folder, step)
    for name in OF_THE_OLD:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("old")
    (folder / "notes.txt").write_text("the user's")
    return folder


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_choosing_the_start_deletes_nothing(tmp_path):
    before = files(a_run(tmp_path, 4, 8))
    for wanted in (None, "auto", "false"):
        start = choose_start(tmp_path, wanted, True, RUN)
        assert start.checkpoint is None and start.replaces and str(tmp_path / ASIDE) in start.notes[-1]
    assert files(tmp_path) == before


def test_a_named_checkpoint_of_the_folder_is_refused_and_one_from_elsewhere_is_used(tmp_path):
    run, other = a_run(tmp_path / "run", 4, 8), make(tmp_path / "other", 6)
    before = files(run)
    for wanted in (str(run / "checkpoint-4"), f"{run}/../run/checkpoint-4/", "true"):
        with pytest.raises(UserError, match="^resume_from_checkpoint: .* leave out one of the two"):
            choose_start(run, wanted, True, RUN)
    start = choose_start(run, str(other), True, RUN)
    assert start.checkpoint == str(other) and start.replaces
    set_aside(run)
    assert other.is_dir() and {name.removeprefix(f"{ASIDE}/") for name in files(run)} == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_named_checkpoint_in_a_place_that_a_run_clears_is_refused_and_kept(tmp_path, overwrite):
    """It would go at the first checkpoint of the run that goes on from it, or before it was read."""
    run = a_run(tmp_path / "run", 4, 8)
    set_aside(run)
    make(run, 2)  # of the run after it
    (run / STAGING).mkdir(exist_ok=True)
    (run / "checkpoint-2").rename(run / STAGING / "checkpoint-2")  # whole, and killed before it got its place
    before = files(run)
    for place in (ASIDE + "/checkpoint-4", f"{ASIDE}/../{ASIDE}/checkpoint-8", STAGING + "/checkpoint-2"):
        with pytest.raises(UserError, match="^resume_from_checkpoint: .*, which a run clears; move it out of there"):
            choose_start(run, str(run / place), overwrite, RUN)
    assert files(run) == before
    moved = (run / ASIDE / "checkpoint-4").rename(tmp_path / "checkpoint-4")
    assert choose_start(run, str(moved), overwrite, RUN).checkpoint == str(moved)


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors", "manifest.json", "rollouts/mine"])
def test_a_folder_that_holds_no_run_but_what_a_run_would_write_over_is_refused(tmp_path, name):
    """A model, a prepared data set, or a project, which `--output_dir` names by mistake."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"made_by": "somebody else"}')
    with pytest.raises(UserError, match="^output_dir: .* holds '.*', which no run wrote and this one would write over"):
        refuse_foreign(tmp_path)
    (tmp_path / "manifest.json").write_text('{"made_by": "adora_vl.train"}')  # a run that came to no checkpoint
    refuse_foreign(tmp_path)
    refuse_foreign(a_run(tmp_path / "run"))
    refuse_foreign(tmp_path / "nowhere")
    (tmp_path / "begun" / "completions").mkdir(parents=True)  # TRL's, of a run whose engine did not start
    refuse_foreign(tmp_path / "begun")


@pytest.mark.parametrize("inside", [".", "merged", "checkpoint-4", "rollouts", "eval/../merged"])
def test_what_the_run_reads_is_not_replaced(tmp_path, inside):
    """A second stage that begins from the model of the run that it replaces."""
    run = a_run(tmp_path / "run", 4)
    for name in ("merged", "eval"):
        (run / name).mkdir()
    before = files(run)
    for key in ("model_name_or_path", "dataset_name"):
        with pytest.raises(UserError, match=f"^{key}: .* whose run overwrite_output_dir: true replaces"):
            choose_start(run, None, True, RUN, [(key, str(run / inside))])
    assert files(run) == before
    for elsewhere in (tmp_path, run / "eval", "somebody/model"):
        assert choose_start(run, None, True, RUN, [("model_name_or_path", str(elsewhere))]).replaces


def test_after_a_crash_before_its_first_checkpoint_a_new_run_does_not_go_on_from_the_old_one(tmp_path):
    run = a_run(tmp_path, 4, 8)
    assert set_aside(run) == str(run / ASIDE)
    assert checkpoints(run) == [] and (run / "notes.txt").is_file()
    for overwrite in (False, True):  # the crash, and the same or the plain command again
        (run / "metrics.jsonl").write_text("of the crashed run")
        start = choose_start(run, None, overwrite, RUN)
        assert start.checkpoint is None
        if start.replaces:
            set_aside(run)
        assert (run / ASIDE / "metrics.jsonl").read_text() == "old"
    assert newest_valid(run / ASIDE).checkpoint == run / ASIDE / "checkpoint-8"
    delete_aside(run)
    assert not (run / ASIDE).exists()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["set aside", "crash", "checkpoint"]), max_size=6))
def test_a_whole_checkpoint_is_there_at_every_moment(tmp_path_factory, events):
    """Whatever the order of starts, crashes and checkpoints: something whole is in the folder, or aside."""
    run = make(tmp_path_factory.mktemp("run"), 4).parent
    for number, event in enumerate(events):
        if event == "set aside":
            set_aside(run)
        elif event == "checkpoint":
            make(run, 10 + number)
            assert newest_valid(run).checkpoint == run / f"checkpoint-{10 + number}"
            delete_aside(run)
        assert newest_valid(run).checkpoint or newest_valid(run / ASIDE).checkpoint
    shutil.rmtree(run)


def test_a_finished_run_without_checkpoints_is_not_trained_over(tmp_path):
    run = a_run(tmp_path)
    with pytest.raises(UserError, match="^output_dir: .* holds a finished run; choose another, or --over"):
        choose_start(run, None, False, RUN)
    assert choose_start(run, None, True, RUN).replaces


@pytest.mark.parametrize("place", ["a_file", "a_file/below", "/proc/nowhere/run", "x" * 300])
def test_an_output_dir_that_cannot_be_made_is_refused(tmp_path, place):
    (tmp_path / "a_file").write_text("")
    with pytest.raises(UserError, match=r"^output_dir: .* cannot be made or written to \(.*choose another folder"):
        hold(tmp_path / place)


def test_the_command_keeps_the_old_run_until_the_new_one_has_a_checkpoint(adora_run, tmp_path, capsys):
    run = shutil.copytree(adora_run, tmp_path / "run")
    before = files(run)
    wrong = arguments(run, overwrite_output_dir="true", use_peft="true", lora_target_modules="no_such_layer")
    assert main(wrong) == 2
    assert "lora_target_modules" in capsys.readouterr().err.splitlines()[-1]
    assert files(run) >= before, "a run that could not begin has deleted something"
    (run / "completions").mkdir(exist_ok=True)
    (run / "completions" / "completions_00009.parquet").write_text("old")
    train(run, overwrite_output_dir="true", max_steps=2, log_completions="true")
    tables = [path.name for path in sorted((run / "completions").iterdir())]
    assert tables == ["completions_00001.parquet", "completions_00002.parquet"], "TRL's folder is there for the new run"
    assert [path.name for path in checkpoints(run)] == ["checkpoint-2"] and STEPS > 2
    assert not (run / ASIDE).exists() and len((run / "metrics.jsonl").read_text().splitlines()) == 3


def test_what_an_unfinished_run_has_left_does_not_take_the_place_of_the_old_run(tmp_path):
    run = a_run(tmp_path, 4)
    set_aside(run)
    (run / "metrics.jsonl").write_text("of the unfinished run")
    set_aside(run)
    assert (run / ASIDE / "metrics.jsonl").read_text() == "old" and not (run / "metrics.jsonl").exists()
