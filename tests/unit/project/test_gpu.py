"""The command that accepts a GPU: what becomes of a check that goes wrong, and of figures."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adora_vl.models.precision import describe_wrong_buffers
from adora_vl.utils.files import GIB
from adora_vl.utils.launch import free_port, use_one_gpu
from benchmarks.gpu import (
    cards,
    checks,
    engine,
    lm_head,
    offload,
    precision,
    server,
    setting,
    step,
    streaming,
    vision,
)
from benchmarks.gpu.__main__ import main, warning_of_limits
from benchmarks.gpu.checks import GPUCheck
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.table import (
    CheckLine,
    CheckResult,
    at_least_line,
    at_most_line,
    exit_code,
    failed_line,
    skipped_line,
    table,
    verdict_line,
)
from tests.support.gpu_checks import (
    CHECKS_FOR_A_GPU_ENGINE,
    SMALL_CHECKS_ON_CPU,
    failed_lines,
    run_check_on_cpu,
)

slow = pytest.mark.slow  # starts processes, or computes: `make test` has what judges their figures

BROKEN_CHECKS_MODULE = "tests.unit.project.broken_gpu_checks"


@pytest.mark.parametrize("name", CHECKS_FOR_A_GPU_ENGINE)
def test_what_a_cpu_engine_lacks_is_skipped_with_its_reason(name):
    """The check has one line, which is skipped and says what a CPU engine lacks."""
    (line,) = run_check_on_cpu(name)
    assert line.verdict is CheckResult.SKIPPED
    assert line.note.startswith("a CPU engine has ")


def test_limits_that_add_up_to_more_than_the_time_are_named():
    """The limits are 5, 5 and 1 minutes; checks are surely done while their sum fits."""
    checks_of = [
        GPUCheck("one", "x", limit=300),
        GPUCheck("two", "x", limit=300),
        GPUCheck("three", "x", limit=60),
    ]
    assert warning_of_limits(checks_of, 11) == ""
    assert "add up to 11 min, and --minutes is 10: surely done are one, two;" in warning_of_limits(
        checks_of, 10
    )
    assert "surely done are none" in warning_of_limits(checks_of, 4)


LOGGED_STEPS = [
    {
        "grad_norm": 0.5,
        "adora/drift": 0.02,
        "seconds/rollout": 40.0,
        "seconds/policy": 30.0,
        "memory/rollout": 61.0,
        "memory/policy": 19.0,
    },
    {"grad_norm": 0.4, "adora/drift": 0.03, "seconds/policy": 25.0, "memory/policy": 20.0},
]


def test_a_step_of_a_recipe_is_laid_beside_its_prediction():
    """Seconds are summed and memory is the largest of the steps; a peak of 61 GiB over 60 fails."""
    card = Setting(full=True, device=torch.device("cuda"))
    # a prediction of 62.3 GiB, for 61 GiB that were measured
    line_by_name = {
        line.what: line for line in step.step_lines(LOGGED_STEPS, {"peak_bytes": 62.3 * GIB}, card)
    }
    assert failed_lines(list(line_by_name.values())) == []
    assert line_by_name["seconds by phase"].figure == "rollout 40.0, policy 55.0"
    assert line_by_name["memory, engine awake"].figure == "61 GiB"
    assert line_by_name["memory, policy step"].figure == "20 GiB"
    lines_over_prediction = list(step.step_lines(LOGGED_STEPS, {"peak_bytes": 60 * GIB}, card))
    assert [line.what for line in failed_lines(lines_over_prediction)] == ["memory, engine awake"]
    steps_without_figures = [
        {**entry, "memory/rollout": None, "grad_norm": 0.0} for entry in LOGGED_STEPS
    ]
    failing_lines = list(step.step_lines(steps_without_figures, {"peak_bytes": 62.3 * GIB}, card))
    assert [line.what for line in failed_lines(failing_lines)] == [
        "gradient norms",
        "memory, engine awake",
    ]


@slow
def test_frequencies_that_a_cast_has_rounded_fail(monkeypatch):
    """Without `restore_buffers` the check of rounding finds rounded rotary frequencies."""
    monkeypatch.setattr(precision, "restore_buffers", lambda model: None)
    checks = {line.what for line in failed_lines(run_check_on_cpu("rounding"))}
    assert "rotary frequencies" in checks
    assert "from float32 at token 1000" in checks


@slow
def test_a_check_that_would_not_notice_rounding_fails(monkeypatch):
    """The check also rounds on purpose, and fails where that makes no difference."""
    monkeypatch.setattr(precision, "round_rotary_frequencies", lambda model: model)
    assert [line.what for line in failed_lines(run_check_on_cpu("rounding"))] == [
        "rounded frequencies, seen at token 1000"
    ]


@slow
def test_a_head_that_is_off_by_a_hundredth_fails(monkeypatch):
    """A fused head with 1.01 times the log-probabilities fails all three lines."""
    real_function = lm_head.fused_head
    monkeypatch.setattr(lm_head, "fused_head", lambda *inputs: 1.01 * real_function(*inputs))
    assert len(failed_lines(run_check_on_cpu("lm_head"))) == 3


def test_a_card_without_room_for_a_plain_head_is_told_so(monkeypatch):
    """With 1 MiB free, the plain head is skipped."""
    monkeypatch.setattr(lm_head, "free_bytes", lambda setting: 2**20)
    (line,) = lm_head.run(replace(SMALL_CHECKS_ON_CPU, full=True))
    assert line.verdict is CheckResult.SKIPPED
    assert "does not fit" in line.note


@pytest.mark.parametrize(("gap", "verdict"), [(0.9, CheckResult.OK), (3.0, CheckResult.FAIL)])
def test_pinned_weights_are_judged_by_the_noise_of_two_unpinned_runs(gap, verdict):
    """0.9 times the distance of two equal runs is fine, and three times is not."""
    unpinned = torch.ones(100)
    # ten times 1e-3, which no rounding of a GPU's sums keeps to
    noise = torch.linspace(-0.01, 0.01, 100)
    assert (
        offload.same_weights(unpinned - gap * noise, unpinned, unpinned + noise).verdict is verdict
    )


def test_runs_without_any_noise_may_differ_by_a_rounding():
    """Equal weights are fine, and a difference of 1e-4 is not."""
    unpinned = torch.ones(100)
    assert offload.same_weights(unpinned, unpinned, unpinned).verdict is CheckResult.OK
    assert offload.same_weights(unpinned + 1e-4, unpinned, unpinned).verdict is CheckResult.FAIL


@slow
def test_weights_sent_without_their_adapters_fail(monkeypatch):
    """A sync that sends the bases alone is off from the merged weights in float64."""

    def parameters_without_adapters(model, gather, is_wanted):
        """Yield the base's weights under their names in the merged model."""
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                yield (
                    name.removeprefix("base_model.model.").replace(".base_layer", ""),
                    parameter.data,
                )

    monkeypatch.setattr(streaming, "merged_parameters", parameters_without_adapters)
    assert [line.what for line in failed_lines(run_check_on_cpu("lora_sync"))] == [
        "sent weights, from float64"
    ]


@slow
def test_a_policy_merged_in_place_fails(monkeypatch):
    """A sync that merges the adapter into the policy has changed the policy."""
    real_function = streaming.send_weights

    def merge_in_place(policy, receiver):
        real_function(policy, receiver)
        policy.merge_adapter()

    monkeypatch.setattr(streaming, "send_weights", merge_in_place)
    assert "weights that a sync leaves alone" in {
        line.what for line in failed_lines(run_check_on_cpu("lora_sync"))
    }


@pytest.fixture(scope="module")
def lines_of_broken_checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[CheckLine]]:
    """Run checks of which all but one go wrong; return their lines by name."""
    broken_checks = [
        GPUCheck("killed", f"{BROKEN_CHECKS_MODULE}:killed", limit=300),
        GPUCheck("memory", f"{BROKEN_CHECKS_MODULE}:out_of_memory", limit=300),
        GPUCheck("hangs", f"{BROKEN_CHECKS_MODULE}:hangs", limit=1),
        GPUCheck("absent", f"{BROKEN_CHECKS_MODULE}:fine", limit=300, needs=("no_such_package",)),
        GPUCheck("fine", f"{BROKEN_CHECKS_MODULE}:fine", limit=300),
    ]
    output = tmp_path_factory.mktemp("gpu") / "result.json"
    assert main(["--size", "small", "--json", str(output)], broken_checks) == 1
    lines = [
        checks._parse_line(json.dumps(line)) for line in json.loads(output.read_text())["lines"]
    ]
    return {
        check.name: [line for line in lines if line.check == check.name] for check in broken_checks
    }


@slow
def test_the_others_go_on_after_one_that_breaks(lines_of_broken_checks):
    """The check after four that went wrong has its line."""
    assert [line.verdict for line in lines_of_broken_checks["fine"]] == [CheckResult.OK]


@slow
def test_what_was_found_stays_and_the_end_has_its_reason(lines_of_broken_checks):
    """A check's lines from before its end are kept, and its last line says how it ended."""
    for name, reason in {
        "killed": "SIGKILL",
        "memory": "OutOfMemoryError: tried to allocate 80 GiB",
    }.items():
        result, last_line = lines_of_broken_checks[name]
        assert result.verdict is CheckResult.OK
        assert result.figure == "1 s"
        assert last_line.verdict is CheckResult.FAIL
        assert reason in last_line.note
        assert "\n" not in last_line.note
    assert "not done after 1 s" in lines_of_broken_checks["hangs"][-1].note
    (line,) = lines_of_broken_checks["absent"]
    assert line.verdict is CheckResult.SKIPPED
    assert "no_such_package not installed" in line.note


@slow
def test_what_the_time_cuts_off_is_named_with_its_reason(monkeypatch, capsys):
    """Three seconds are over during the second of three checks, and the third is not begun."""
    monkeypatch.setattr(checks, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_cut_off_whole = GPUCheck("late", f"{BROKEN_CHECKS_MODULE}:fine", limit=300)
    check_cut_off = GPUCheck("cut", f"{BROKEN_CHECKS_MODULE}:hangs", limit=300)
    skipped_check = GPUCheck(
        "first", f"{BROKEN_CHECKS_MODULE}:absent", limit=300, needs=("no_such_package",)
    )
    assert (
        main(
            ["--size", "small", "--minutes", "0.05"],
            [skipped_check, check_cut_off, check_cut_off_whole],
        )
        == 0
    ), "time is no failure"
    printed = capsys.readouterr().out
    assert "no_such_package not installed" in printed
    for name, missing in (("cut", "the rest of it"), ("late", "all of it")):
        (line,) = [line for line in printed.splitlines() if line.startswith(name)]
        assert missing in line
        assert f"the time for all checks was over: `--only {name}`" in line


@pytest.fixture
def handlers_that_do_nothing() -> Iterator[dict[signal.Signals, Callable[..., None]]]:
    """Replace the handlers of SIGTERM and SIGINT, so that neither ends the tests; return both."""
    handlers: dict[signal.Signals, Callable[..., None]] = {
        signal.SIGTERM: lambda *_: None,
        signal.SIGINT: lambda *_: None,
    }
    earlier_handlers = {
        number: signal.signal(number, handler) for number, handler in handlers.items()
    }
    yield handlers
    for number, handler in earlier_handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_command_prints_and_keeps_what_is_known(
    stop_signal, handlers_that_do_nothing, monkeypatch, tmp_path, capsys
):
    """The second of three checks is interrupted after a line: two lines, the reason, exit code 1.

    The file has the first check's line before the second check begins.
    """
    output = tmp_path / "result.json"
    names_in_file = []

    def names_of_json_lines() -> list[str]:
        return [line["check"] for line in json.loads(output.read_text())["lines"]]

    def run(check, *_):
        if check.name == "second":
            names_in_file.extend(names_of_json_lines())
        yield replace(verdict_line("x", f"{check.name} figure", "1", True, ""), check=check.name)
        if check.name == "second":
            signal.raise_signal(stop_signal)

    monkeypatch.setattr("benchmarks.gpu.__main__.run", run)
    three_checks = [GPUCheck(name, "x", limit=300) for name in ("first", "second", "third")]
    assert main(["--size", "small", "--json", str(output)], three_checks) == 1
    assert names_in_file == ["first"]
    assert names_of_json_lines() == ["first", "second", "second"]
    printed = capsys.readouterr().out
    assert "first figure" in printed
    assert "second figure" in printed
    assert "-> interrupted by SIGTERM or Ctrl-C; not begun: third" in printed
    assert {number: signal.getsignal(number) for number in handlers_that_do_nothing} == (
        handlers_that_do_nothing
    )


@slow
@pytest.mark.usefixtures("handlers_that_do_nothing")
def test_an_interrupted_command_ends_its_check_and_keeps_its_lines(tmp_path):
    """A check that hangs after its first line is killed at SIGTERM, and the line is kept."""
    output = tmp_path / "result.json"
    check = GPUCheck("cut", f"{BROKEN_CHECKS_MODULE}:interrupts_its_command", limit=300)
    assert main(["--size", "small", "--json", str(output)], [check]) == 1
    line, last_line = json.loads(output.read_text())["lines"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(line["figure"]), 0)
    assert last_line["check"] == "cut"
    assert last_line["note"] == "interrupted by SIGTERM or Ctrl-C"


def test_half_a_line_of_a_killed_check_is_left_out(tmp_path):
    """A killed process may leave a line without its end; the lines before it count."""
    line = verdict_line("x", "1", "1", True, "")
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(asdict(line)) + "\n" + '{"what": "y", "fig')
    assert checks._whole_lines(file) == [line]


@slow
def test_what_one_check_has_compiled_serves_the_next_unless_it_is_half_done(capsys):
    """A check uses what an earlier one has compiled, but not a build that was killed.

    DeepSpeed compiles most of a minute; a lock that stayed would let every later check wait without
    end.
    """
    two_checks = [
        GPUCheck(name, f"{BROKEN_CHECKS_MODULE}:{name}", limit=300)
        for name in ("killed_while_it_compiles", "finds_compiled")
    ]
    assert main(["--size", "small"], two_checks) == 1
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("finds_compiled")
    ]
    assert "finished" in line
    assert "half" not in line


def test_a_check_for_two_cards_sees_both(monkeypatch, subtests):
    """A check sees as many of the user's cards as it is for, and one card by default."""
    monkeypatch.setattr("adora_vl.utils.launch.prepare_engine_environment", use_one_gpu)
    monkeypatch.setenv("WORLD_SIZE", "1")
    for count, visible_cards, expected in (
        (1, None, "0"),
        (1, "3,5", "3"),
        (2, "3,5", "3,5"),
        (2, None, None),
        (2, "", ""),
    ):
        with subtests.test(f"{count} of {visible_cards}"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(visible_cards))
            if visible_cards is None:
                monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
            checks.prepare_environment(count)
            assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected


@slow
def test_the_process_of_a_check_knows_for_how_many_cards_it_is(monkeypatch, tmp_path):
    """Its line repeats CUDA_VISIBLE_DEVICES as the process has it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    check = GPUCheck("two", f"{BROKEN_CHECKS_MODULE}:visible", limit=300, cards=2)
    (line,) = list(checks.run(check, "small", tmp_path))
    assert line.note == "3,5"


def test_a_run_without_a_gpu_says_so_and_ends_well(capsys, monkeypatch):
    """Skipped checks are exit code 0, and what `--only` leaves out is named."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    two_checks = [
        GPUCheck(name, f"{BROKEN_CHECKS_MODULE}:fine", limit=300, needs=("no_such_package",))
        for name in ("one", "two")
    ]
    assert main(["--only", "one"], two_checks) == 0
    printed = capsys.readouterr()
    assert "accepts no GPU" in printed.out
    assert "Left out: two" in printed.out
    assert "[1/1] one: 0 ok, 0 FAIL, 1 skipped" in printed.err


def test_wrong_input_ends_with_2():
    """Unknown checks and sizes, a missing folder and no time are refused."""
    for arguments in (
        ["--only", "nothing"],
        ["--json", "no/such/folder/x.json"],
        ["--size", "huge"],
        ["--minutes", "0"],
    ):
        with pytest.raises(SystemExit) as exit_error:
            main(arguments, [])
        assert exit_error.value.code == 2, arguments


def test_a_figure_is_judged_against_its_bound():
    """The bound itself is fine, and NaN never is."""
    assert at_most_line("x", 1.0, 1.0, "", "").verdict is CheckResult.OK
    assert at_most_line("x", 1.01, 1.0, "", "").verdict is CheckResult.FAIL
    assert at_least_line("x", 0.99, 1.0, "", "").verdict is CheckResult.FAIL
    assert at_most_line("x", math.nan, 1.0, "", "").verdict is CheckResult.FAIL
    assert at_least_line("x", math.nan, 1.0, "", "").verdict is CheckResult.FAIL


def test_the_table_gives_the_reasons_and_the_exit_code_is_that_of_its_worst_line():
    """Skipped lines are no failure; a failed line, or no line at all, is exit code 1."""
    passed_line = verdict_line("x", "1", "1", True, "")
    skipped = skipped_line("y", "none here", "3 s")
    failed = failed_line("z", "broke")
    assert exit_code([passed_line, skipped]) == 0
    assert exit_code([passed_line, failed, skipped]) == 1
    assert exit_code([]) == 1, "a table without a line accepts nothing"
    printed = table([skipped, failed])
    assert "3 s" in printed
    assert "(none here)" in printed
    assert "-> broke" in printed
    assert printed.endswith("0 ok, 1 FAIL, 1 skipped")


@pytest.mark.parametrize(
    ("card_gib", "verdict"), [(22, CheckResult.SKIPPED), (80, CheckResult.FAIL)]
)
def test_what_a_smaller_card_has_no_room_for_is_left_out_and_the_next_goes_on(
    monkeypatch, card_gib, verdict
):
    """Out of memory is a skip on a card of 22 GiB, and a failure on one of 80 GiB."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(total_memory=card_gib * 2**30),
    )

    def lines():
        yield verdict_line("first", "1", "1", True, "")
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    results = list(
        setting.lines_while_memory_lasts(
            replace(SMALL_CHECKS_ON_CPU, device=torch.device("cuda", 0)), "7B", lines()
        )
    )
    assert [line.verdict for line in results] == [CheckResult.OK, verdict]
    assert results[1].what == "7B: the rest"
    assert "GiB" in results[1].note


def test_the_reference_of_the_vision_tower_has_the_frequencies_of_its_config(monkeypatch):
    """None of the three towers and their references has a rounded buffer."""
    towers: list[torch.nn.Module] = []

    def note_towers(setting, name, tower, exact, **inputs):
        towers.extend((tower, exact))
        yield skipped_line(name, "a test")

    monkeypatch.setattr(vision, "_image", note_towers)
    assert len(list(vision.run(SMALL_CHECKS_ON_CPU))) == 3
    assert len(towers) == 6
    assert [describe_wrong_buffers(tower) for tower in towers] == [[]] * 6


HEALTHY_SERVER = """
import sys, http.server
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


def test_a_server_is_waited_for_and_ended_and_one_that_dies_is_named(tmp_path, monkeypatch):
    """A healthy server runs inside the block alone; the other's last words are in the error."""
    (tmp_path / "healthy.py").write_text(HEALTHY_SERVER)
    (tmp_path / "dies.py").write_text("raise SystemExit('no NCCL here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    port = free_port()
    with server.running_server(["healthy", str(port)], {}, port, seconds=60):
        assert server._is_healthy(port)
    assert not server._is_healthy(port)
    with (
        pytest.raises(server.ServerError, match="exit code 1: no NCCL here"),
        server.running_server(["dies"], {}, port, 60),
    ):
        pass


def test_the_server_is_started_as_the_page_says():
    """The GPU check starts vLLM's server with the options that `docs/rollouts.md` names.

    Trainer and server get the first two cards, or both the same one if there is one alone.
    """
    page = (Path(__file__).parents[3] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    command = page.split("vllm serve MODEL --host", 1)[1].split("```")[0]
    options_of_page = {word for word in command.split() if word.startswith("--")} - {
        "--mm-processor-kwargs"
    }
    options = {
        transport: set(server.server_arguments(Path("model"), 1, transport, "bfloat16"))
        for transport in ("file", "nccl")
    }
    assert len(options_of_page) > 3
    assert options_of_page <= options["file"]
    (transfer_option,) = {
        word for word in options["nccl"] - options["file"] if word.startswith("--")
    }
    assert f"`{transfer_option} " in page
    assert transfer_option not in command
    environment = {"CUDA_VISIBLE_DEVICES": "3, 5,6"}
    assert server.cards(environment, 3) == ("3", "5")
    assert server.cards(environment, 1) == ("3", "3")
    assert server.cards({}, 2) == ("0", "1")
    assert server.cards({}, 1) == ("0", "0")


def pretend_card(monkeypatch: pytest.MonkeyPatch, free_gib_in_turn: list[float]) -> Setting:
    """Return a card that has so many GiB free, one number after the other."""
    free_gib = iter(free_gib_in_turn)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (int(next(free_gib) * 2**30), 80 * 2**30)
    )
    return Setting(full=True, device=torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("leak", "verdict"), [(0.0, CheckResult.OK), (0.001, CheckResult.OK), (0.5, CheckResult.FAIL)]
)
def test_sleeps_that_lose_memory_fail(monkeypatch, leak, verdict):
    """A sleep may lose 0.001 GiB, and not half a GiB."""
    sleeps: list[int] = []
    setting = pretend_card(
        monkeypatch, [60 - leak * sleep for sleep in range(engine.NUMBER_OF_SLEEPS)]
    )
    assert engine.sleep_memory_line(setting, lambda: sleeps.append(1)).verdict is verdict
    assert len(sleeps) == engine.NUMBER_OF_SLEEPS
    assert (
        engine.sleep_memory_line(SMALL_CHECKS_ON_CPU, lambda: None).verdict is CheckResult.SKIPPED
    )


def test_one_cold_engine_that_hangs_is_stopped(tmp_path, monkeypatch):
    """A module that never ends is stopped after its second, and its check has failed."""
    (tmp_path / "stuck.py").write_text("import threading; threading.Event().wait()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert engine.run_module(["stuck"], {}, seconds=1) == "not done after 1 s; stopped"
    monkeypatch.setattr(engine, "run_module", lambda *_: "not done after 1 s; stopped")
    (line,) = engine.doctor_lines(SMALL_CHECKS_ON_CPU, "float32", tmp_path)
    assert line.verdict is CheckResult.FAIL
    assert "not done after 1 s" in line.note


def test_one_card_is_told_what_two_would_show(monkeypatch):
    """The checks of NCCL are skipped on one card."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(server, "has_vllm_cpu_build", lambda: False)
    monkeypatch.setattr(
        server,
        "_server_lines",
        lambda setting, way, **_: iter([verdict_line(way, "1", "1", True, "")]),
    )
    for check, lines_before in ((cards, 0), (server, 1)):
        *results, line = check.run(Setting(full=True, device=torch.device("cuda", 0)))
        assert line.verdict is CheckResult.SKIPPED
        assert "NCCL needs 2 cards, here is 1" in line.note
        assert len(results) == lines_before, "weights go by files to a server on the same card"


@pytest.mark.parametrize(
    ("module", "verdict"),
    [("no_such_package.part", CheckResult.SKIPPED), ("adora_vl.no_such", CheckResult.FAIL)],
)
def test_a_package_that_is_not_here_is_named_and_no_failure(tmp_path, monkeypatch, module, verdict):
    """A foreign package that is missing is a skip; a module of ours is a failure."""
    (tmp_path / "needs_it.py").write_text(f"import {module}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "needs_it", raising=False)
    (line,) = checks.lines_until_error(
        GPUCheck("x", "needs_it:run", limit=300), SMALL_CHECKS_ON_CPU
    )
    assert line.verdict is verdict
    assert module.split(".")[0] in line.note
    assert verdict is CheckResult.FAIL or line.note == "no_such_package not installed"


@slow
def test_without_vllm_and_deepspeed_every_check_that_needs_neither_can_be_imported():
    """A process in which neither can be imported loads all checks."""
    block = "import sys; sys.modules['vllm'] = sys.modules['deepspeed'] = None\n"
    loads = "from benchmarks.gpu.checks import CHECKS\n[check.load() for check in CHECKS]\n"
    root = Path(__file__).parents[3]
    process = subprocess.run(
        [sys.executable, "-c", block + loads],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
