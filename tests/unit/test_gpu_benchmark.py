"""The command that accepts a GPU: every check at the small size on a CPU, and what becomes of one that goes wrong."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import isolated, lm_head, offload, precision, streaming
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.catalogue import CHECKS, GPUCheck
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.table import Line, Verdict, at_least, at_most, exit_code, failed, holds, skipped, table

pytestmark = pytest.mark.slow

SMALL = Setting(full=False, device=torch.device("cpu"))
# In a process of its own: what needs a process group or an engine.
APART = ["zero3", "offload", "engine"]
HERE = [check.name for check in CHECKS if check.name not in {*APART, "deepspeed"}]
# As what DeepSpeed compiles, but without torch's headers, which take a minute.
SMALL_BUILD = """
import os, pathlib
from torch.utils.cpp_extension import load
source = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "small.cpp"
source.parent.mkdir(parents=True, exist_ok=True)
source.write_text('extern "C" int one() { return 1; }')
load("small", [str(source)], is_python_module=False)
"""
BROKEN = "tests.unit.gpu_benchmark_checks"


def check_named(name: str) -> GPUCheck:
    (check,) = [check for check in CHECKS if check.name == name]
    return check


def lines_of(name: str) -> list[Line]:
    return list(isolated.guarded(check_named(name), SMALL))


def failures(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line.verdict is Verdict.FAIL]


def nothing_wrong(lines: list[Line]) -> None:
    print(table(lines))
    assert failures(lines) == []
    assert any(line.verdict is Verdict.OK for line in lines)


@pytest.mark.parametrize("name", HERE)
def test_a_check_runs_on_a_cpu_and_finds_nothing_wrong(name):
    lines = lines_of(name)
    nothing_wrong(lines)
    assert all(line.note for line in lines), "each line says where its bound comes from, or why it was skipped"


@pytest.mark.parametrize("name", APART)
def test_a_check_runs_in_its_own_process_and_finds_nothing_wrong(name, monkeypatch):
    """With what DeepSpeed has compiled for other tests, which takes it most of a minute."""
    own = isolated._environment
    shared = {"TORCH_EXTENSIONS_DIR": os.environ["TORCH_EXTENSIONS_DIR"]}
    monkeypatch.setattr(isolated, "_environment", lambda folder: {**own(folder), **shared})
    nothing_wrong(isolated.run(replace(check_named(name), limit=580), "small"))


@pytest.fixture
def no_other_ninja(tmp_path, monkeypatch):
    """PATH has all of this system's programs but ninja, and the environment's own."""
    programs = tmp_path / "programs"
    programs.mkdir()
    folders = [Path(folder) for folder in os.defpath.split(os.pathsep)]
    found = [program for folder in folders if folder.is_dir() for program in folder.iterdir()]
    for name, program in {program.name: program for program in reversed(found)}.items():
        if name != "ninja":
            (programs / name).symlink_to(program)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{programs}")


def builds(monkeypatch: pytest.MonkeyPatch, prepare: str | None = None) -> dict[str, Verdict]:
    """By what was tried, how the check of the compiler judged it. `prepare`: instead of what training does first."""
    monkeypatch.setattr(offload, "_BUILD", SMALL_BUILD)
    if prepare is not None:
        monkeypatch.setattr(offload, "_PREPARE", prepare)
    return {line.what: line.verdict for line in lines_of("deepspeed")}


ON, OFF = (f"CPUAdam, the environment's bin {where} PATH" for where in ("on", "not on"))


@pytest.mark.usefixtures("no_other_ninja")
def test_the_compiler_is_found_with_and_without_the_environments_programs(monkeypatch):
    assert builds(monkeypatch) == {"import": Verdict.OK, ON: Verdict.OK, OFF: Verdict.OK}


@pytest.mark.usefixtures("no_other_ninja")
def test_a_build_that_does_not_find_ninja_fails(monkeypatch):
    assert builds(monkeypatch, prepare="pass") == {"import": Verdict.OK, ON: Verdict.OK, OFF: Verdict.FAIL}


def test_frequencies_that_a_cast_has_rounded_fail(monkeypatch):
    monkeypatch.setattr(precision, "restore_buffers", lambda model: [])
    what = {line.what for line in failures(lines_of("rounding"))}
    assert "rotary frequencies" in what and "from float32 at token 1000" in what


def test_a_check_that_would_not_notice_rounding_fails(monkeypatch):
    monkeypatch.setattr(precision, "with_rounded", lambda model: model)
    assert [line.what for line in failures(lines_of("rounding"))] == ["rounded frequencies, seen at token 1000"]


def test_a_head_that_is_off_by_a_hundredth_fails(monkeypatch):
    right = lm_head.fused
    monkeypatch.setattr(lm_head, "fused", lambda *inputs: 1.01 * right(*inputs))
    assert len(failures(lines_of("lm_head"))) == 3


def test_weights_sent_without_their_adapters_fail(monkeypatch):
    def unmerged(model, gather, wanted):
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                yield name.removeprefix("base_model.model.").replace(".base_layer", ""), parameter.data

    monkeypatch.setattr(streaming, "merged_parameters", unmerged)
    assert [line.what for line in failures(lines_of("lora_sync"))] == ["sent weights, from float64"]


def test_a_policy_merged_in_place_fails(monkeypatch):
    right = streaming.send

    def in_place(policy, receiver):
        right(policy, receiver)
        policy.merge_adapter()

    monkeypatch.setattr(streaming, "send", in_place)
    assert "weights that a sync leaves alone" in {line.what for line in failures(lines_of("lora_sync"))}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Line]]:
    """By name, the lines of checks of which all but one go wrong, as the command runs them."""
    checks = [
        GPUCheck("killed", f"{BROKEN}:killed", 300),
        GPUCheck("memory", f"{BROKEN}:out_of_memory", 300),
        GPUCheck("hangs", f"{BROKEN}:hangs", 1),
        GPUCheck("absent", f"{BROKEN}:fine", 300, ("no_such_package",)),
        GPUCheck("fine", f"{BROKEN}:fine", 300),
    ]
    output = tmp_path_factory.mktemp("gpu") / "result.json"
    assert main(["--size", "small", "--json", str(output)], checks) == 1
    lines = [isolated._read(json.dumps(line)) for line in json.loads(output.read_text())["lines"]]
    return {check.name: [line for line in lines if line.check == check.name] for check in checks}


def test_the_others_go_on_after_one_that_breaks(broken):
    assert [line.verdict for line in broken["fine"]] == [Verdict.OK]


@pytest.mark.parametrize(
    ("name", "reason"), [("killed", "SIGKILL"), ("memory", "OutOfMemoryError: tried to allocate 80 GiB")]
)
def test_what_was_found_stays_and_the_end_has_its_reason(broken, name, reason):
    found, end = broken[name]
    assert found.verdict is Verdict.OK and found.figure == "1 s"
    assert end.verdict is Verdict.FAIL and reason in end.note and "\n" not in end.note


def test_a_check_that_hangs_is_stopped(broken):
    assert "not done after 1 s" in broken["hangs"][-1].note


def test_what_needs_an_absent_package_is_skipped_and_says_which(broken):
    (line,) = broken["absent"]
    assert line.verdict is Verdict.SKIPPED and "no_such_package not installed" in line.note


def test_a_run_without_a_gpu_says_so_and_ends_well(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checks = [GPUCheck(name, f"{BROKEN}:fine", 300, ("no_such_package",)) for name in ("one", "two")]
    assert main(["--only", "one"], checks) == 0
    printed = capsys.readouterr()
    assert "accepts no GPU" in printed.out and "Left out: two" in printed.out
    assert "[1/1] one: 0 ok, 0 FAIL, 1 skipped" in printed.err


@pytest.mark.parametrize("words", [["--only", "nothing"], ["--json", "no/such/folder/x.json"], ["--size", "huge"]])
def test_wrong_input_ends_with_2(words):
    with pytest.raises(SystemExit) as ended:
        main(words, [])
    assert ended.value.code == 2


def test_a_figure_is_judged_against_its_bound():
    assert at_most("x", 1.0, 1.0, "", "").verdict is Verdict.OK
    assert at_most("x", 1.01, 1.0, "", "").verdict is Verdict.FAIL
    assert at_least("x", 0.99, 1.0, "", "").verdict is Verdict.FAIL
    assert at_most("x", math.nan, 1.0, "", "").verdict is Verdict.FAIL
    assert at_least("x", math.nan, 1.0, "", "").verdict is Verdict.FAIL


def test_the_exit_code_is_that_of_the_worst_line():
    fine, left, bad = holds("x", "1", "1", True, ""), skipped("y", "none here"), failed("z", "broke")
    assert exit_code([fine, left]) == 0
    assert exit_code([fine, bad, left]) == 1
    assert exit_code([]) == 1, "a table without a line accepts nothing"


def test_the_table_gives_the_reasons():
    printed = table([skipped("y", "none here", "3 s"), failed("z", "broke")])
    assert "3 s" in printed and "(none here)" in printed and "-> broke" in printed
    assert printed.endswith("0 ok, 1 FAIL, 1 skipped")


def test_without_vllm_and_deepspeed_every_check_that_needs_neither_can_be_imported():
    block = "import sys; sys.modules['vllm'] = sys.modules['deepspeed'] = None\n"
    loads = "from benchmarks.gpu.catalogue import CHECKS\n[check.load() for check in CHECKS]\n"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", block + loads],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
