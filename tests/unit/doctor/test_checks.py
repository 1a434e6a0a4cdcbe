"""The doctor's checks that need no engine, each made to fail: right line, right remedy."""

import json
import shutil
import sysconfig
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from adora_vl.builtin.tiny_vl import build_config
from adora_vl.config.command import parse_command
from adora_vl.doctor import __main__ as doctor_command
from adora_vl.doctor import checks as checks_module
from adora_vl.doctor.checks import (
    check_builds,
    check_compilers,
    check_driver,
    check_golds,
    check_libraries,
    check_optional_libraries,
    check_rewards,
    check_room,
    check_torchvision,
    check_version,
    check_writable,
)
from adora_vl.doctor.engine import (
    FEATURES_CHECK,
    EngineChecker,
    check_features,
    run_engine_checks,
)
from adora_vl.doctor.weight_change import changeable_weight, choose_parameter
from adora_vl.models.families import freeze
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.rewards.choose import choose_rewards
from adora_vl.rollout.agreement import AGREEMENT_CHECK, DISTANT_CHECK, PROMPTS_CHECK
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.engine_and_policy import NamedPrompts
from adora_vl.rollout.importance import Drift
from adora_vl.utils.checks import Check, Status, failed, format_checks, is_healthy, passed, skipped
from adora_vl.utils.versions import installed_version

IMAGE_TOKEN = 12


def test_the_installed_stack_is_healthy():
    """No check of the versions fails for the packages that run this test."""
    assert is_healthy(
        [
            *check_libraries(),
            *check_optional_libraries(use_vllm=True, use_peft=True, use_deepspeed=True),
        ]
    )
    assert check_torchvision().status is Status.PASSED


def test_a_version_outside_of_its_range(subtests, monkeypatch):
    """A version of TRL out of its range fails the check, which names the command that mends it."""
    cases = [  # version, whether the run needs it, status, words of the remedy
        ("1.16.3", True, Status.PASSED, ""),
        ("1.16.0+cpu", True, Status.PASSED, ""),
        ("1.15.2", True, Status.FAILED, "pip install 'trl<1.17,>=1.16'"),
        ("1.17.0", True, Status.FAILED, "pip install 'trl<1.17,>=1.16'"),
        (None, True, Status.FAILED, "make setup"),
        (None, False, Status.SKIPPED, ""),
    ]
    for version, needed, status, remedy in cases:
        with subtests.test(f"{version!r:.80} {needed} {status}"):
            monkeypatch.setattr(checks_module, "installed_version", {"trl": version}.get)
            check = check_version("trl", needed=needed)
            assert check.status is status
            assert remedy in check.remedy


def test_either_build_of_vllm_is_looked_at(monkeypatch):
    """An old version of vLLM's GPU build fails its check; unused libraries are skipped."""
    only_gpu = {"vllm": "0.22.0"}.get
    monkeypatch.setattr(checks_module, "installed_version", only_gpu)
    monkeypatch.setattr("adora_vl.utils.versions.installed_version", only_gpu)
    check, *other_checks = check_optional_libraries(
        use_vllm=True, use_peft=False, use_deepspeed=False
    )
    assert check.status is Status.FAILED
    assert "vllm" in check.name
    assert "0.22.0" in check.detail
    assert {other_check.status for other_check in other_checks} == {Status.SKIPPED}


def test_builds_that_do_not_suit_the_machine(subtests):
    """The check of a GPU run fails without a GPU, or with a build of torch or vLLM for the CPU."""
    cases: list[Any] = [  # facts of the machine, status, words of the remedy
        ({"use_cpu": True, "gpus": 0, "cuda": None, "vllm_is_cpu_build": True}, Status.PASSED, ""),
        (
            {"use_cpu": False, "gpus": 1, "cuda": "13.0", "vllm_is_cpu_build": False},
            Status.PASSED,
            "",
        ),
        (
            {"use_cpu": False, "gpus": 0, "cuda": "13.0", "vllm_is_cpu_build": False},
            Status.FAILED,
            "nvidia-smi",
        ),
        (
            {"use_cpu": False, "gpus": 0, "cuda": None, "vllm_is_cpu_build": False},
            Status.FAILED,
            "CUDA build",
        ),
        (
            {"use_cpu": False, "gpus": 1, "cuda": "13.0", "vllm_is_cpu_build": True},
            Status.FAILED,
            "adora-vl[gpu]",
        ),
    ]
    for facts, status, remedy in cases:
        with subtests.test(f"{facts!r:.80}"):
            check = check_builds(use_vllm=True, **facts)
            assert check.status is status
            assert remedy in check.remedy


def test_a_torchvision_for_another_torch(monkeypatch):
    """A torchvision whose import fails is reported with the error's words and a remedy."""

    def fail_to_import(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(checks_module, "import_module", fail_to_import)
    check = check_torchvision()
    assert check.status is Status.FAILED
    assert "nms" in check.detail
    assert "make setup" in check.remedy


def test_what_a_run_compiles_with(subtests, tmp_path, monkeypatch):
    """A missing compiler fails the check if DeepSpeed or Triton is used and needs it.

    DeepSpeed needs ninja and a C++ compiler, Triton a C compiler and Python's headers.
    """
    headers = tmp_path / "Python.h"
    headers.touch()
    # programs that are missing, whether DeepSpeed and Triton are used, status, words of the remedy
    cases: list[Any] = [
        ((), True, False, Status.PASSED, ""),
        (("ninja",), True, False, Status.FAILED, "pip install ninja"),
        (("c++", "g++"), True, False, Status.FAILED, "apt-get install g++"),
        (("c++", "gcc"), True, False, Status.PASSED, ""),
        (("ninja", "c++", "g++"), False, False, Status.SKIPPED, ""),
        (("ninja", "c++", "g++", "gcc"), False, True, Status.PASSED, ""),
        (("gcc", "clang"), False, True, Status.FAILED, "apt-get install gcc"),
    ]
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    all_programs = ("ninja", "c++", "g++", "gcc", "clang", "mycc")
    for missing, deepspeed, triton, status, remedy in cases:
        with subtests.test(f"{missing} {deepspeed} {triton}"):
            programs = {name: f"/bin/{name}" for name in all_programs if name not in missing}
            monkeypatch.setattr(shutil, "which", programs.get)
            check = check_compilers(deepspeed=deepspeed, triton=triton)
            assert check.status is status
            assert remedy in check.remedy

    # the compiler that the variable CC names is the one that Triton takes
    path_by_program = {name: f"/bin/{name}" for name in all_programs}
    monkeypatch.setattr(shutil, "which", path_by_program.get)
    monkeypatch.setenv("CC", "mycc -m64")
    check_on_gpu = check_compilers(deepspeed=False, triton=True)
    assert "/bin/mycc" in check_on_gpu.detail
    assert "gcc" not in check_on_gpu.detail

    headers.unlink()
    check_without_headers = check_compilers(deepspeed=False, triton=True)
    assert check_without_headers.status is Status.FAILED
    assert "Python's headers" in check_without_headers.remedy


def test_a_driver_that_is_too_old_for_torch(subtests):
    """CUDA 13 needs a driver of branch 580; without CUDA or a driver the check is skipped."""
    cases = [  # CUDA version of torch, version of the driver, status
        (None, None, Status.SKIPPED),
        ("13.0", None, Status.SKIPPED),
        ("13.0", "570.133.20", Status.FAILED),
        ("13.0", "580.65.06", Status.PASSED),
        ("13.2", "600.1", Status.PASSED),
    ]
    for cuda, driver, status in cases:
        with subtests.test(f"{cuda} {driver}"):
            assert check_driver(cuda=cuda, driver=driver).status is status


def gold_row(answer: object, choices: list[str] | None = None) -> dict[str, object]:
    """Return a data set's row with this gold answer, as the checks of golds and rewards read it."""
    return {"id": "geometry/7", "answer": answer, "choices": choices}


def test_golds_that_can_be_graded_and_broken_ones(subtests):
    """A gold that the grader cannot read fails the check, and the line names its row."""
    for answer in ["60", "2\\sqrt{221}", "\\frac{39}{4}", "100\\pi", "A"]:
        with subtests.test(answer):
            choices = ["30", "60", "90", "120"] if answer == "A" else None
            assert (
                check_golds([gold_row(answer, choices)] * 8, rounding=False).status is Status.PASSED
            )
    for unreadable in ["\\frac{", "", None, "x = ", "see the figure \\sqrt{"]:
        with subtests.test(f"{unreadable!r:.80}"):
            check = check_golds([gold_row("60"), gold_row(unreadable)], rounding=False)
            assert check.status is Status.FAILED
            assert "geometry/7" in check.detail
            assert "python -m data_prep" in check.remedy


def test_a_grader_that_accepts_anything(monkeypatch):
    """A grader that accepts a wrong number fails the check of the golds.

    The check has it grade 918273.645, which is no gold.
    """
    monkeypatch.setattr(
        "adora_vl.doctor.checks.grade",
        lambda *_, **__: SimpleNamespace(verdict="correct", reason="same_number"),
    )
    check = check_golds([gold_row("60")], rounding=False)
    assert check.status is Status.FAILED
    assert "918273.645 is accepted" in check.detail


def test_a_reward_that_cannot_tell_right_from_wrong(subtests):
    """A correct answer must get more than `adora_correct_above`, and a wrong one must not."""
    cases = [  # preset rewards, their weights, `adora_correct_above`, status
        (["boxed_accuracy"], None, 0.5, Status.PASSED),
        # what a wrong answer in a box gets is not above it
        (["boxed_accuracy"], None, 0.1, Status.PASSED),
        (["accuracy", "format"], [0.9, 0.1], 0.5, Status.PASSED),
        # a wrong answer in a box gets 1.0
        (["accuracy", "format"], None, 0.5, Status.FAILED),
        (["boxed_accuracy"], None, 1.0, Status.FAILED),
        (["format"], None, 0.5, Status.FAILED),
    ]
    for presets, weights, reward_of_correct, status in cases:
        with subtests.test(f"{presets!r:.80} {weights!r:.80} {reward_of_correct}"):
            check = check_rewards(
                [gold_row("60"), gold_row("5")],
                choose_rewards(presets).functions,
                weights,
                reward_of_correct,
            )
            assert check.status is status
            assert status is Status.PASSED or "adora_correct_above" in check.remedy


def test_a_reward_that_does_not_apply_to_a_row_adds_nothing_to_its_sum():
    """True steps are measured where a row has a figure; an answer in a box has none."""
    rows = [{**gold_row("60"), "figure": None}, {**gold_row("5"), "figure": None}]
    functions = choose_rewards(["accuracy", "steps"]).functions
    assert check_rewards(rows, functions, [1.0, 0.2], 0.5).status is Status.PASSED


def test_a_folder_that_cannot_be_written(tmp_path):
    """An output folder below a file fails the check; a new one passes, and is not left behind."""
    assert check_writable(tmp_path / "a" / "b").status is Status.PASSED
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    (tmp_path / "file").write_text("")
    check = check_writable(tmp_path / "file" / "run")
    assert check.status is Status.FAILED
    assert "output_dir" in check.remedy


def test_a_disk_without_room_fails_with_the_remedy(tmp_path):
    """A run that needs 1 MB fits on this disk, and one that needs 10¹⁸ bytes does not."""
    checkpoint_bytes = 10**5
    checkpoints = 2
    small_run = check_room(tmp_path / "run", 10**6, checkpoint_bytes, checkpoints)
    assert small_run.status is Status.PASSED
    check = check_room(tmp_path / "run", 10**18, checkpoint_bytes, checkpoints)
    assert check.status is Status.FAILED
    assert "save_total_limit" in check.remedy
    assert "2 checkpoints" in check.detail


def prompts_of_token_ids(*ids: list[int], grids: list[list[int]] | None = None) -> NamedPrompts:
    """Return prompts, a row for each list of token ids.

    An image has 4×4 patches unless `grids` says otherwise.
    """
    grid = torch.tensor(grids or [[1, 4, 4]] * len(ids))
    names = [f"row {n}" for n in range(len(ids))]
    images = [[None]] * len(ids)
    return NamedPrompts([], list(ids), images, {"image_grid_thw": grid}, names)


def checker_of(engine: object, *, vllm_mode: str = "colocate") -> EngineChecker:
    """Return a checker of one prompt with an image; engine and policy are stand-ins."""
    pair: Any = SimpleNamespace(
        engine=engine,
        config=SimpleNamespace(vllm_mode=vllm_mode),
        processor=SimpleNamespace(image_token_id=IMAGE_TOKEN),
    )
    models = {"policy": SmallEngine(), "reference": None}
    return EngineChecker(pair, prompts_of_token_ids([1, *[IMAGE_TOKEN] * 4, 2]), models=models)


def test_a_row_whose_image_tokens_are_not_as_many_as_its_features_fails():
    """A row with fewer image tokens in its prompt than its image has features fails the check.

    4×4 patches, merged 2×2, are 4 features.
    """
    assert (
        check_features(
            prompts_of_token_ids([1, *[IMAGE_TOKEN] * 4, 2]), IMAGE_TOKEN, merge_size=2
        ).status
        is Status.PASSED
    )
    check = check_features(
        prompts_of_token_ids([1, *[IMAGE_TOKEN] * 4, 2], [1, IMAGE_TOKEN, 2]),
        IMAGE_TOKEN,
        merge_size=2,
    )
    assert check.status is Status.FAILED
    assert check.name == FEATURES_CHECK
    assert "row 1: 1 image tokens in the prompt, 4 features" in check.detail
    assert "max_pixels" in check.remedy


def test_without_a_colocated_engine_only_the_prompts_are_looked_at(subtests):
    """Without an engine in this process its eight checks are skipped, each with the reason.

    The checks of image features and of the models' buffers need none, and pass.
    """
    for engine, why in [
        (None, "samples itself"),
        (SimpleNamespace(), "server"),
    ]:
        with subtests.test(why):
            checks = run_engine_checks(checker_of(engine, vllm_mode="server"), merge_size=2)
            assert [check.status for check in checks] == [
                *[Status.PASSED] * 2,
                *[Status.SKIPPED] * 8,
            ]
            assert all(why in check.detail for check in checks[2:])


def test_after_an_error_the_rest_is_skipped_and_not_hidden(monkeypatch):
    """A check that raises has failed, with the error's words; those after it are skipped.

    The agreement checks before it pass, by stand-ins.
    """
    monkeypatch.setattr(
        EngineChecker,
        "check_agreement",
        lambda self: [passed(PROMPTS_CHECK, "2"), passed(AGREEMENT_CHECK, "1e-06")],
    )
    monkeypatch.setattr(
        EngineChecker, "check_distant_agreement", lambda self: passed(DISTANT_CHECK, "1e-06")
    )

    def raise_error(self: EngineChecker, *, vision: bool) -> Check:
        raise RuntimeError("Encoder cache miss")

    monkeypatch.setattr(EngineChecker, "check_after_change", raise_error)
    checks = run_engine_checks(checker_of(SimpleNamespace(model_runner="V1")), merge_size=2)
    # from the check of distant positions on; the one after it is replaced by `raise_error`
    assert [check.status for check in checks[5:]] == [
        Status.PASSED,
        Status.FAILED,
        *[Status.SKIPPED] * 3,
    ]
    assert "Encoder cache miss" in checks[6].detail
    assert checks[6].remedy


def test_the_engine_is_put_to_sleep_before_it_is_compared(monkeypatch):
    """The check of sleep mode puts the engine to sleep, compares it, and fails on a large drift.

    Sleep mode needs a GPU, so the engine and the comparison are stand-ins.
    """
    monkeypatch.setattr(EngineChecker, "bound", 0.01)  # nats between engine and policy
    for mean, status in ((1e-6, Status.PASSED), (2.0, Status.FAILED)):
        events: list[object] = []
        llm = SimpleNamespace(sleep=lambda level, events=events: events.append(level))
        generation = object.__new__(AdoraVLLMGeneration)
        generation.__dict__.update(enable_sleep_mode=True, _llm_weights_sleeping=False, llm=llm)

        def compare(
            self: EngineChecker, check_name: str, events: Any = events, mean: float = mean
        ) -> Any:
            events.append(check_name)
            return Drift(mean, mean)

        monkeypatch.setattr(EngineChecker, "compare", compare)
        check = checker_of(generation).check_after_sleep()
        assert events == [2, "sleep"], "put to sleep at level 2, and then compared"
        assert generation._llm_weights_sleeping
        assert check.status is status
        assert status is Status.PASSED or "vllm_enable_sleep_mode: false" in check.remedy


class SmallEngine(torch.nn.Module):
    """Stands for a vision-language model: a projector and two decoder layers, a matrix each."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = torch.nn.ModuleDict({"merger": torch.nn.Linear(4, 4)})
        self.model = torch.nn.ModuleDict(
            {"layers": torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])}
        )


def test_a_changed_weight_comes_back_to_the_bit():
    """A weight is changed from its first value each time, and restored exactly after an error."""
    model = SmallEngine()
    weights_before = {name: p.detach().clone() for name, p in model.named_parameters()}
    name, parameter = choose_parameter(model, vision=False)
    assert name == "model.layers.1.weight"
    with pytest.raises(RuntimeError, match="inside"), changeable_weight(parameter) as change:
        change(0.3)
        changed_by_0_3 = parameter.detach().clone()
        change(3.0)
        change(0.3)
        assert torch.equal(parameter, changed_by_0_3)
        assert not torch.equal(parameter, weights_before[name])
        raise RuntimeError("inside")
    assert all(torch.equal(p, weights_before[name]) for name, p in model.named_parameters())

    # LoRA's second factor is zero at the start, and no factor would change it
    lora_second_factor = torch.nn.Parameter(torch.zeros(2, 8))
    with changeable_weight(lora_second_factor) as change:
        change(1.0)
        assert lora_second_factor.abs().sum() > 0
    assert lora_second_factor.abs().sum() == 0


def test_what_sees_is_changed_where_its_embeddings_come_from(subtests):
    """The weight that is changed to test the vision is the projector's last matrix.

    It is none of Qwen3-VL's deepstack mergers: ten times the weight of those moved no answer of a
    fresh model by 0.1 nats. With a frozen projector it is in the last block, and with all of vision
    frozen there is none.
    """
    for kind, last_layer in [  # model type, and the projector's last matrix
        ("qwen2_5_vl", "mlp.2"),
        ("qwen3_vl", "linear_fc2"),
        ("qwen3_5", "linear_fc2"),
    ]:
        with subtests.test(kind):
            config = build_config(AutoTokenizer.from_pretrained(PRETRAINED_FOLDER), kind)
            with torch.device("meta"):
                model = AutoModelForImageTextToText.from_config(config)
            assert (
                choose_parameter(model, vision=True)[0]
                == f"model.visual.merger.{last_layer}.weight"
            )
            freeze(model, ["projector"])
            last_block = "model.visual.blocks.2."
            assert choose_parameter(model, vision=True)[0].startswith(last_block)
    model = SmallEngine()
    model.visual.requires_grad_(False)
    assert choose_parameter(model, vision=True) is None


def test_the_table_has_the_remedy_below_the_failure():
    """The last line of the table counts; a failure cannot be made without a remedy."""
    lines = format_checks(
        [passed("a", "good"), failed("bb", "bad", "mend it"), skipped("c", "no sleep mode")]
    ).splitlines()
    assert lines[0].split() == ["ok", "a", "good"]
    assert lines[1].split()[0] == "FAIL"
    assert lines[2].strip() == "-> mend it"
    assert lines[-1] == "1 passed, 1 skipped, 1 failed"
    with pytest.raises(AssertionError, match="without a remedy"):
        failed("x", "bad", "")


def test_the_exit_code_and_the_json_say_whether_a_check_failed(monkeypatch, tmp_path, capsys):
    """The command ends with 1 if a check has failed, and writes the checks as JSON."""
    # a check has a name and a detail, and a failed one a remedy too
    for checks, code in (
        ([passed("a", "b")], 0),
        ([failed("a", "b", "c")], 1),
    ):
        monkeypatch.setattr(doctor_command, "diagnose", lambda words, checks=checks: checks)
        assert (
            doctor_command.main(
                ["--model_name_or_path", "tiny", "--json", str(tmp_path / "d.json")]
            )
            == code
        )
        assert json.loads((tmp_path / "d.json").read_text())[0]["status"] == checks[0].status
        assert f"{'1 failed' if code else '1 passed'}" in capsys.readouterr().out


def test_a_version_out_of_range_ends_the_doctor_before_anything_is_loaded(monkeypatch):
    """With TRL 9.9, only the version is reported: the run is not read and no model is loaded."""
    monkeypatch.setattr(
        checks_module,
        "installed_version",
        lambda name: "9.9" if name == "trl" else installed_version(name),
    )
    for step in ("request.request_from_command", "run_checks.run_checks"):
        monkeypatch.setattr(
            f"adora_vl.preflight.{step}", lambda *_, **__: pytest.fail("looked at the run")
        )
    checks = doctor_command.diagnose(
        parse_command(["--use_cpu", "true", "--bf16", "false", "--model_name_or_path", "tiny"])
    )
    assert [check.name for check in checks if check.status is Status.FAILED] == ["version of trl"]
