"""The digits on a card: its plan is of sixty million parameters, and says before what a gain is."""

import copy
import json
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from adora_vl.builtin import SHIPPED_SIZE, ModelSize
from adora_vl.packing.vision_windows import BATCHED_ATTENTION, STOCK_ATTENTION
from adora_vl.synthetic.generate import generate
from adora_vl.utils.errors import UserError
from benchmarks import scanned

CARD_PLAN = yaml.safe_load(scanned.CARD_PLAN.read_text())
(CASE,) = CARD_PLAN["cases"]


def finished_run(seed, arm, *, accuracy, worked, loss=0.08):
    """Return a line of runs.jsonl, with what the verdict and the tables read."""
    held_out = [
        {"step": step, "accuracy": value, "usual": value, "any": value}
        for step, value in ((0, 0.4), (20, 0.4), (40, accuracy))
    ]
    steps = [{"step": 40, "worked": worked, "every_step": 0.5, "tokens": 20.0}]
    return {
        "case": CASE,
        "start": 1,
        "seed": seed,
        "arm": arm,
        "start_losses": [loss, 0.2],
        "commit": "abc",
        "held_out": held_out,
        "steps": steps,
        "processor_seconds": 30.0,
    }


def pair_of_runs(seed, *, ahead, workings, loss=0.08):
    """Return the runs of both arms of a seed, with ADORA so far ahead of GRPO."""
    grpo = finished_run(
        seed=seed,
        arm="grpo",
        accuracy=0.4,
        worked=0.2,
        loss=loss,
    )
    adora = finished_run(
        seed=seed,
        arm="adora",
        accuracy=0.4 + ahead,
        worked=0.2 + workings,
        loss=loss,
    )
    return [grpo, adora]


def test_the_two_arms_of_a_seed_come_one_after_the_other():
    """Seed 0 is run with GRPO and then with ADORA; pilot seeds are others."""
    order = scanned.runs_in_order(CARD_PLAN, pilot=False)
    assert [trial[2:] for trial in order[:2]] == [(0, "grpo"), (0, "adora")]
    assert not set(CARD_PLAN["pilot"]["seeds"]) & set(CARD_PLAN["seeds"])


def test_both_plans_differ_in_what_the_size_asks_for_alone():
    """The plan for the larger model differs in two training keys from that of the small one.

    The task and the arms are those of the model with a million parameters.
    """
    small_plan = yaml.safe_load(scanned.PLAN.read_text())
    for key in ("pixels", "rows"):
        assert CARD_PLAN[key] == small_plan[key]
    assert CARD_PLAN["cases"][CASE]["one_digit"] == small_plan["cases"][CASE]["one_digit"]
    assert {arm: small_plan["arms"][arm] for arm in CARD_PLAN["arms"]} == CARD_PLAN["arms"]
    changed_keys = {
        key for key in CARD_PLAN["train"] if CARD_PLAN["train"][key] != small_plan["train"].get(key)
    }
    assert changed_keys == {"learning_rate", "adora_vllm_enforce_eager"}


@pytest.mark.parametrize(
    ("ahead", "workings", "beginning_of_verdict"),
    [
        (0.2, 0.7, "a gain: ADORA is +20.0 points of accuracy"),
        (0.2, 0.3, "no gain: "),
        (0.05, 0.7, "no gain: "),
        (-0.1, 0.7, "no gain: ADORA is -10.0 points"),
    ],
)
def test_a_gain_is_accuracy_and_workings(ahead, workings, beginning_of_verdict):
    """20 points of accuracy and 0.7 of workings are a gain; less of either is not."""
    runs = [run for seed in (0, 1) for run in pair_of_runs(seed, ahead=ahead, workings=workings)]
    assert scanned.verdict(CARD_PLAN, runs).startswith(beginning_of_verdict)
    assert scanned.verdict(CARD_PLAN, runs).endswith("in 2 seeds")


def test_a_start_that_cannot_read_answers_nothing():
    """A start with a loss of 0.2 in reading has no verdict, whatever the gain."""
    runs = pair_of_runs(seed=0, ahead=0.3, workings=0.8, loss=0.2)
    assert scanned.verdict(CARD_PLAN, runs).startswith("no answer: the start's loss")


def test_half_a_seed_does_not_count():
    """A seed with GRPO alone changes neither the verdict nor the count of whole seeds."""
    whole_seed = pair_of_runs(seed=0, ahead=0.2, workings=0.7)
    half_a_seed = finished_run(seed=1, arm="grpo", accuracy=0.9, worked=0.9)
    assert scanned.verdict(CARD_PLAN, [*whole_seed, half_a_seed]) == scanned.verdict(
        CARD_PLAN, whole_seed
    )
    assert scanned.verdict(CARD_PLAN, [half_a_seed]) == "no answer: no seed is whole"
    assert "1 of 3 seeds are whole" in scanned.tables(CARD_PLAN, [*whole_seed, half_a_seed])


def test_a_size_of_the_command_goes_before_that_of_the_plan():
    """A size that is given replaces that of the plan, and must be a multiple of 32."""
    small_plan = yaml.safe_load(scanned.PLAN.read_text())
    assert scanned.size_of(small_plan) is None
    assert scanned.with_model_size(small_plan, {"width": None}) == small_plan
    assert scanned.size_of(scanned.with_model_size(small_plan, {"layers": 5})) == ModelSize(
        layers=5
    )
    wider_plan = scanned.with_model_size(CARD_PLAN, {"width": 512, "dtype": "float32"})
    assert scanned.size_of(wider_plan) == ModelSize(width=512, layers=7, dtype="float32")
    assert scanned.size_of(CARD_PLAN) == ModelSize(width=640, layers=7, dtype="bfloat16")
    with pytest.raises(UserError, match="width: 100 is no multiple of 32"):
        scanned.with_model_size(CARD_PLAN, {"width": 100})


def test_a_start_of_each_size_has_a_folder_of_its_own(tmp_path):
    """Seed 1's folder has width, layers and dtype in its name, if the plan has a size."""
    plans: list[dict[str, Any]] = [
        CARD_PLAN,
        scanned.with_model_size(CARD_PLAN, {"width": 512}),
        {"arms": {}},
    ]
    folders = {scanned.start_folder(tmp_path, plan, 1).name for plan in plans}
    assert folders == {"1_640x7_bfloat16", "1_512x7_bfloat16", "1"}


@pytest.mark.parametrize(
    ("size", "device", "keys"),
    [
        (None, "cpu", {"use_cpu": True}),
        (SHIPPED_SIZE, "cuda", {"use_cpu": False, "bf16": False}),
        (ModelSize(dtype="bfloat16"), "cuda", {"use_cpu": False, "bf16": True}),
    ],
)
def test_the_machine_and_the_dtype_decide_the_same_keys_of_each_arm(size, device, keys):
    """`machine_keys` sets CPU or GPU, and bf16 by the model's dtype."""
    assert scanned.machine_keys(size, device) == keys


def test_a_rehearsal_has_the_model_and_the_arms_and_two_steps(tmp_path):
    """The plan itself is not changed, and the reward tells a group's answers apart."""
    plan_before = copy.deepcopy(CARD_PLAN)
    plan = scanned.rehearsal_of(CARD_PLAN, tmp_path)
    assert plan_before == CARD_PLAN
    assert plan["model"] == CARD_PLAN["model"]
    assert (
        scanned.runs_in_order(plan, pilot=False)
        == scanned.runs_in_order(CARD_PLAN, pilot=False)[:2]
    )
    assert plan["train"]["max_steps"] == 2
    assert len(plan["train"]["adora_reward"]) == len(plan["train"]["reward_weights"])
    assert "def varied(" in (tmp_path / "rewards.py").read_text()


def test_a_run_is_stored_where_git_is_not_installed(tmp_path, monkeypatch):
    """Without the program the commit of the runs is unknown, and no error."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert scanned.commit_of_runs() == "unknown"


def test_no_run_begins_that_would_not_end_in_time():
    """A run is taken to last as long as the longest one before, 50 s."""
    assert not scanned.is_too_late([], remaining=-1.0), "the first run always begins"
    assert not scanned.is_too_late([40.0, 50.0], remaining=51.0)
    assert scanned.is_too_late([40.0, 50.0], remaining=49.0)


@pytest.mark.parametrize(
    ("arguments", "beginning_of_error"),
    [
        (["--card"], "error: --card: no GPU is visible"),
        (["--card", "--layers", "0"], "error: layers: 0 is no depth"),
        (["--dtype", "int8"], "error: dtype: 'int8' is not"),
        (["--tables", "nowhere.jsonl"], "error: --tables: nowhere.jsonl is no file"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    arguments, beginning_of_error, capsys, monkeypatch
):
    """Without a GPU, with a wrong size or without the file, the command ends with 2."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert scanned.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(beginning_of_error)


def test_an_untaught_model_of_any_size_learns_the_digits_lessons(tmp_path, monkeypatch):
    """A model of another size takes two steps of each lesson, and is saved in the plan's dtype.

    A second call leaves what is there.
    """
    drawn_rows = list(generate(8, seed=1, families=("perimeter",)))
    monkeypatch.setattr(scanned, "draw_rows", lambda *_, **__: drawn_rows)
    plan = scanned.rehearsal_of(
        scanned.with_model_size(CARD_PLAN, {"width": 64, "layers": 1}), tmp_path
    )
    folder = scanned.start_folder(tmp_path, plan, 1)
    folder.parent.mkdir()
    scanned.build_start(folder, plan, 1)
    weights = load_file(folder / "model.safetensors")
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.bfloat16"}
    assert len(json.loads((folder / "build.json").read_text())["final_losses"]) == 2
    mtime_before = (folder / "model.safetensors").stat().st_mtime_ns
    scanned.build_start(folder, plan, 1)
    assert (folder / "model.safetensors").stat().st_mtime_ns == mtime_before, "what is there stays"


def test_a_gpu_learns_the_lessons_with_batched_windows(tmp_path, monkeypatch):
    """The tower batches its windows for a GPU: same loss, same files. A CPU has stock's way.

    Only the device's name is one of a GPU here; the lesson is computed on the CPU.
    """
    drawn_rows = list(generate(8, seed=1, families=("perimeter",)))
    monkeypatch.setattr(scanned, "draw_rows", lambda *_, **__: drawn_rows)
    plan = scanned.rehearsal_of(
        scanned.with_model_size(CARD_PLAN, {"width": 64, "layers": 1, "dtype": "float32"}),
        tmp_path,
    )
    attention_by_device = {}
    loss_by_device = {}

    def take_one_lesson(folder, start_plan, prepare, device):
        """Save the model after the first lesson of the first stage, as `train_and_save` would."""
        untrained = prepare(start_plan)
        block = untrained.model.model.visual.blocks[0]
        attention_by_device[device] = block.attn.config._attn_implementation
        loss = untrained.stages[0].loss_of(0)
        loss.backward()
        loss_by_device[device] = loss.item()
        untrained.model.save_pretrained(folder)

    monkeypatch.setattr("adora_vl.builtin.small_model.train_and_save", take_one_lesson)
    for device in ("cpu", "cuda"):
        scanned.build_start(tmp_path / device, plan, 1, device)
    assert attention_by_device == {"cpu": STOCK_ATTENTION, "cuda": BATCHED_ATTENTION}
    assert loss_by_device["cuda"] == pytest.approx(loss_by_device["cpu"], rel=1e-5)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "cuda" / name).read_bytes() == (tmp_path / "cpu" / name).read_bytes()
