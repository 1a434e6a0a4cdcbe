"""What a run prints and leaves behind.

That is its log line, metrics, manifest, model cards, and the commands that come next.
"""

import json
import math
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Image as ImageFeature
from datasets import load_dataset

from adora_vl.advantage import METHODS, Adora, AdoraWeighting, Groups, weigh_groups
from adora_vl.checkpoint.run_files import read_run_manifest
from adora_vl.checkpoint.store import describe_checkpoint_damage
from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.blocks import ToolOptions
from adora_vl.data.dataset import PREPARED_BY
from adora_vl.export import main as export
from adora_vl.models.load import MERGED_FOLDER
from adora_vl.record import phases as phases_module
from adora_vl.record.card import model_card
from adora_vl.record.manifest import (
    TITLE_BY_METHOD,
    describe_recipe,
    describe_run,
    end_manifest,
    launch_command,
    mark_failed_on_error,
    python_command,
    shortest_program_path,
    write_manifest,
)
from adora_vl.record.metrics import (
    MetricsFile,
    lines_kept_by_resumed_run,
    log_entry_to_line,
    read_metrics,
)
from adora_vl.record.phases import PHASES, PhaseClock
from adora_vl.record.progress import ProgressLine, duration_text, no_signal_warning, progress_line
from adora_vl.record.rollout_metrics import TieNotice, adora_metrics
from adora_vl.record.summary import evaluate_command, metric_rows, summary_lines, view_command
from adora_vl.report.__main__ import main as view
from tests.support.stand_ins import trainer_state, training_config
from tests.support.tiny_run import TINY_RUN_STEPS, tiny_run_arguments


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let phases be timed by a clock that is set by hand."""
    clock = Clock()
    monkeypatch.setattr(phases_module, "perf_counter", clock)
    return clock


def test_every_second_belongs_to_one_phase_also_where_one_fails(clock):
    """Each `spend` has a power of two, so a sum says which of them are in it.

    Seconds of a phase inside another one count for the inner one alone.
    """
    phases = PhaseClock(print, sleep_mode=False, evaluates=False, memory=None)

    def spend(seconds: float) -> None:
        clock.now += seconds

    spend(1)  # loading data
    phases.enter_phase("policy")
    with phases.phase("rollout"):
        spend(2)
        with phases.phase("sync"):
            spend(4)
        spend(8)
    with phases.phase("grading"):
        spend(16)
    spend(32)
    phases.leave_phase()
    with phases.phase("rollout"):  # between two steps
        spend(64)
    assert phases.pop_seconds() == {
        "rollout": 2 + 8,
        "grading": 16,
        "policy": 32,
        "sync": 4,
        "other": 1 + 64,
    }
    # taken once, they are gone; a run without sleep mode or evaluation has no such phase
    usual_phases = ("rollout", "grading", "policy", "sync", "other")
    assert phases.pop_seconds() == dict.fromkeys(usual_phases, 0)
    all_phases = PhaseClock(print, sleep_mode=True, evaluates=True, memory=None)
    assert all_phases.pop_seconds() == dict.fromkeys(PHASES, 0)

    phases.enter_phase("policy")
    with pytest.raises(RuntimeError), phases.phase("grading"):
        clock.now += 1
        raise RuntimeError
    clock.now += 2
    phases.leave_phase()
    assert phases.pop_seconds()["grading"] == 1
    assert phases.pop_seconds()["policy"] == 0


def test_an_evaluation_is_a_phase_of_its_own_with_all_that_it_samples(clock):
    """All seconds of an evaluation count as `evaluation`, also the 4 of its weight sync."""
    phases = PhaseClock(print, sleep_mode=False, evaluates=True, memory=None)
    clock.now += 1  # saving a checkpoint
    with phases.evaluation():
        clock.now += 2
        with phases.phase("sync"):
            clock.now += 4
    seconds = phases.pop_seconds()
    assert seconds["evaluation"] == 6
    assert seconds["other"] == 1
    assert seconds["sync"] == 0


# The metrics of a step as the trainer logs them.
LOG_ENTRY = {
    "reward": 0.41234,
    "adora/pass_rate": 0.375,
    "adora/tds_share": 0.25,
    "completions/mean_length": 211.4,
    "adora/drift": 2.1e-6,
    "seconds/rollout": 12.34,
    "seconds/grading": 0.02,
    "seconds/policy": 7.5,
    "seconds/sync": 0.5,
    "seconds/other": 0.1,
    "grad_norm": 1.0,
}


def log_entry(step: int, has_signal: bool = False, **metrics: float) -> dict[str, float]:
    """Return an entry of the trainer's log; without signal all rewards of every group are equal."""
    return {
        "step": step,
        "reward": 0.0,
        "reward_std": 0.0,
        "frac_reward_zero_std": 0.0 if has_signal else 1.0,
        **metrics,
    }


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"adora/pass_rate": 0.0}, "no answer was right"),
        ({"adora/pass_rate": 1.0, "reward": 1.0}, "every answer was right"),
        ({"adora/pass_rate": 0.5, "reward": 0.25}, "every answer had the reward 0.25"),
        ({"adora/pass_rate": 0.5, "reward_std": 0.5}, "the answers to a problem are all alike"),
    ],
)
def test_a_run_that_cannot_learn_says_since_when_and_why(metrics, reason):
    """Steps 3 to 7 have no group whose rewards differ, so nothing can be learned from them."""
    first_entries = [log_entry(1), log_entry(2, has_signal=True)]
    history = [
        *first_entries,
        *(log_entry(step, **metrics) for step in range(3, 8)),
        {"step": 7, "eval_reward": 0.0},
    ]
    message = no_signal_warning(history)
    assert message is not None
    assert "in the last 5 steps" in message
    assert reason in message
    # The warning is the same if only every fifth step is logged.
    assert no_signal_warning([*first_entries, log_entry(7, **metrics)]) == message
    assert no_signal_warning(history[:-2]) is None, "four steps may be chance"
    assert no_signal_warning([*history, log_entry(8, has_signal=True)]) is None
    # A method such as DAPO with its penalty for long answers learns from equal rewards too.
    entry_with_signal = {**log_entry(8), "adora/signal_share": 0.25}
    assert no_signal_warning([*history, entry_with_signal]) is None
    assert no_signal_warning([]) is None


def test_the_progress_line_has_the_metrics_that_are_there_and_the_time_left():
    """The line is built from an entry of the log, the step, `max_steps` and the seconds left.

    The accuracy stands in it where it differs from the pass rate.
    """
    assert progress_line(LOG_ENTRY, 40, 1000, 185.2) == (
        "step   40/1000  reward 0.412  pass 38%  TDS 25%  length 211  drift 2e-06 | "
        "20 s: rollout 12 grading 0.02 policy 7.50 sync 0.50 other 0.10 | 3m05s left"
    )
    assert (
        progress_line({"reward": 1.0, "adora/drift": None}, 1, 9, None) == "step 1/9  reward 1.000"
    )
    entry = {**LOG_ENTRY, "rewards/boxed_accuracy_reward/mean": 0.4}
    equal_to_pass_rate = {**entry, "grading/correct": 0.375000001}
    assert "accuracy" not in progress_line(equal_to_pass_rate, 40, 1000, 185.2)
    for entry_with_accuracy in (
        {**entry, "grading/correct": 0.25},  # as with a low adora_correct_above
        {**entry, "rewards/brevity/mean": 0.9, "grading/correct": 0.25},
    ):
        assert "  pass 38%  accuracy 25%  TDS 25%" in progress_line(
            entry_with_accuracy, 40, 1000, 185.2
        )
    assert metric_rows([entry_with_accuracy])[1:3] == [
        ("adora/pass_rate", "pass rate", "37.5%", "37.5%"),
        ("grading/correct", "accuracy", "25.0%", "25.0%"),
    ]
    seconds = {"seconds/rollout": 1.5, "seconds/grading": 0.001, "seconds/evaluation": 0.0}
    line_with_seconds = progress_line({"reward": 1.0, **seconds}, 1, 9, None)
    assert line_with_seconds.endswith(" | 1.50 s: rollout 1.50 grading 0.00")
    line_with_missing = progress_line({"reward": 1.0, "rewards/missing": 0.375}, 1, 9, None)
    assert line_with_missing == "step 1/9  reward 1.000  without reward 38%"
    assert (
        progress_line({"reward": 1.0, "rewards/missing": 0.0}, 1, 9, None)
        == "step 1/9  reward 1.000"
    )
    durations = {0.4: "0s", 59.4: "59s", 60: "1m00s", 7620: "2h07m", 97200: "1d03h"}  # by seconds
    assert {seconds: duration_text(seconds) for seconds in durations} == durations


def training_args(folder: Path) -> AdoraGRPOConfig:
    """Return the arguments that callbacks of Transformers get, with this output folder."""
    return training_config(output_dir=str(folder), disable_tqdm=False)


def test_only_the_first_rank_speaks(tmp_path, capsys):
    """Ranks other than the first print no progress line and write no metrics file.

    Every callback is called on every rank, and each looks which one it is.
    """
    for callback in (ProgressLine(), MetricsFile()):
        callback.on_train_begin(
            training_args(tmp_path), trainer_state(0, is_first_rank=False), None
        )
        callback.on_step_end(training_args(tmp_path), trainer_state(1, is_first_rank=False), None)
        callback.on_log(
            training_args(tmp_path), trainer_state(1, is_first_rank=False), None, logs=LOG_ENTRY
        )
        callback.on_train_end(training_args(tmp_path), trainer_state(1, is_first_rank=False), None)
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_log_file_gets_lines_and_no_bar(tmp_path, capsys):
    """Standard output is no terminal here; entries of an evaluation have no line."""
    line = ProgressLine()
    line.on_train_begin(training_args(tmp_path), trainer_state(0), None)
    line.on_step_end(training_args(tmp_path), trainer_state(1), None)
    line.on_log(training_args(tmp_path), trainer_state(1), None, logs=LOG_ENTRY)
    line.on_log(
        training_args(tmp_path), trainer_state(1), None, logs={"eval_geometry3k_accuracy": 0.5}
    )
    line.on_train_end(training_args(tmp_path), trainer_state(1), None)
    out, err = capsys.readouterr()
    assert re.fullmatch(r"step  1/10  reward 0\.412 .* left\n", out)
    assert err == ""


def test_the_time_left_is_that_of_the_steps_left_at_the_pace_of_this_start(
    tmp_path, capsys, monkeypatch
):
    """A run resumes at step 4 of 10 and takes 10 seconds a step: after step 6, 40 are left.

    The seconds before its first step, such as those of the self-check, do not count.
    """
    seconds = iter(range(0, 99, 10))  # what the clock says at each call
    monkeypatch.setattr(
        "adora_vl.record.progress.time", SimpleNamespace(monotonic=lambda: next(seconds))
    )
    line = ProgressLine()
    line.on_train_begin(training_args(tmp_path), trainer_state(4), None)
    next(seconds)  # the self-check takes 10 seconds
    line.on_step_begin(training_args(tmp_path), trainer_state(4), None)
    for step in (5, 6):
        line.on_step_end(training_args(tmp_path), trainer_state(step), None)
    line.on_log(training_args(tmp_path), trainer_state(6), None, logs={"reward": 0.5})
    assert capsys.readouterr().out == "step  6/10  reward 0.500 | 40s left\n"


def test_metrics_are_appended_and_cut_back_to_the_resumed_step(tmp_path):
    """A run that resumes goes on with the lines up to its checkpoint, each of them once.

    Lines of later steps are removed, and so is the half line that a crash has left.
    """
    file = MetricsFile()
    file.on_train_begin(training_args(tmp_path), trainer_state(0), None)
    for step in range(1, 6):
        train_logs = {"reward": step / 10, "step_time": float(step)}
        file.on_log(training_args(tmp_path), trainer_state(step), None, logs=train_logs)
        file.on_log(
            training_args(tmp_path), trainer_state(step), None, logs={"eval_a_accuracy": 0.1}
        )
        file.on_log(
            training_args(tmp_path), trainer_state(step), None, logs={"eval_b_accuracy": 0.2}
        )
    path = tmp_path / "metrics.jsonl"
    lines_before_crash = read_metrics(path)
    with path.open("a") as stream:
        stream.write('{"step": 6, "kind": "tra')
    history = [{"step": step, "reward": step / 10} for step in (1, 2, 3)]
    resumed = trainer_state(3)
    resumed.log_history = history
    file.on_train_begin(training_args(tmp_path), resumed, None)
    lines_up_to_checkpoint = [line for line in lines_before_crash if line["step"] <= 3]
    assert sorted(read_metrics(path), key=str) == sorted(lines_up_to_checkpoint, key=str)

    file.on_log(training_args(tmp_path), trainer_state(4), None, logs={"reward": 0.4})
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4]
    file.on_train_begin(training_args(tmp_path), trainer_state(0), None)
    assert path.read_text() == ""  # a run from step 0 begins a new file


def test_lines_that_the_file_lacks_come_from_the_history_of_the_checkpoint():
    """A resumed run adds lines that its metrics file lacks from the checkpoint's log.

    Transformers saves the entries of the log with a checkpoint, in the order of the log.
    """
    history = [
        {"step": 1, "eval_a": 0.5},
        {"step": 1, "reward": 0.1},
        {"step": 2, "reward": 0.2},
        {"step": 2, "eval_reward": 1.0},
        {"step": 4, "reward": 0.4},
    ]
    # The line with which a run ends is dropped, since the resumed run goes on.
    end_line = log_entry_to_line({"train_runtime": 9.0}, 3, "then")
    lines = lines_kept_by_resumed_run(
        [log_entry_to_line({"reward": 0.25}, 2, "then"), end_line], history, 3
    )
    assert [(line["step"], line["kind"]) for line in lines] == [
        (1, "eval"),
        (1, "train"),
        (2, "train"),
        (2, "eval"),
    ], "in the order of the log"
    assert lines[2]["reward"] == 0.25
    assert lines[2]["time"] == "then"  # the file's own line comes first


def test_metrics_that_are_not_finite_are_null():
    """JSON has no NaN; texts stay, and what is no number becomes a text."""
    line = log_entry_to_line(
        {
            "reward": 1.0,
            "grad_norm": math.nan,
            "kl": math.inf,
            "note": "x",
            "off": None,
            "odd": [1],
        },
        1,
        "",
    )
    assert line["grad_norm"] is None
    assert line["kl"] is None
    assert line["note"] == "x"
    assert line["off"] is None
    assert line["odd"] == "[1]"
    assert log_entry_to_line({"train_runtime": 1.0, "reward": 1.0}, 1, None)["kind"] == "end"


ADORA_METHOD = {"adora": {"mode": "attenuation", "factor": 0.1}}
# A key of configs of today that changes no recipe; older runs do not have it.
NEUTRAL_KEYS: dict[str, Any] = {"adora_extensions": {}}


CONFIG_AND_RECIPE: list[tuple[dict[str, Any], str]] = [
    ({}, "ADORA attenuation, factor 0.1"),
    ({"adora_method": {"grpo": {}}}, "GRPO"),
    ({"adora_method": {"dapo": {}, **ADORA_METHOD}}, "DAPO + ADORA attenuation, factor 0.1"),
    ({"adora_method": {"dapo": {}, "adora": {"mode": "off"}}, "loss_type": "dapo"}, "DAPO"),
    ({"adora_method": {"adora": {"mode": "off"}}}, "GRPO"),
    (
        {"adora_method": {"my.py:mine": {}, "adora": {"factor": 0.5}}},
        "mine + ADORA attenuation, factor 0.5",
    ),
    (
        {"adora_method": {"adora": {"assign": "random"}}},
        "ADORA attenuation, factor 0.1, assign random",
    ),
    (
        {
            "adora_method": {
                "adora": {"factor": {"start": 0.5, "end": 0.1, "shape": "cosine", "steps": [0, 9]}}
            }
        },
        "ADORA attenuation, factor 0.5 to 0.1",
    ),
    (
        {"adora_method": {"adora": {"steps": [0, 30]}}},
        "ADORA attenuation, factor 0.1, steps [0, 30]",
    ),
    ({"adora_method": {"grpo": {}}, "loss_type": "sapo"}, "GRPO, SAPO loss"),
    (
        {"adora_method": {"grpo": {}}, "adora_extensions": {"noisy.py:Noisy": {"share": 0.5}}},
        "GRPO, extension Noisy",
    ),
    (
        {
            "adora_method": {"docs/rrb.py:Rrb": {}},
            "adora_extensions": {"a.py:One": {}, "b.py:Two": {}},
        },
        "Rrb, extension One, extension Two",
    ),
]


def test_a_recipe_names_what_was_done():
    """The manifest of a run names its methods, and whatever makes it another experiment."""
    for neutral_keys in (NEUTRAL_KEYS, {}):  # older runs have no such keys
        for config, recipe in CONFIG_AND_RECIPE:
            keys = {"adora_method": ADORA_METHOD, **neutral_keys, **config}
            assert describe_recipe(keys) == recipe
    assert TITLE_BY_METHOD.keys() == METHODS.keys() - {"adora"}


def test_the_metrics_of_a_batch_by_hand():
    """Four groups of two rollouts: one right, both right, none right, one right and one cut off."""
    rewards = torch.tensor([[1.0, 0.1], [1.0, 1.0], [0.1, 0.0], [1.0, 0.1]])
    lengths = torch.tensor([[9, 5], [4, 4], [7, 7], [6, 100]])
    metrics = adora_metrics(weigh_groups(Groups(rewards, lengths, lengths >= 100)))
    assert metrics == pytest.approx(
        {
            "tds_share": 0.5,  # all correct, and every wrong one truncated
            "weight_mean": (1 + 0.1 + 1 + 0.1) / 4,
            "no_correct_share": 0.25,
            "all_correct_share": 0.25,
            "wrong_all_truncated_share": 0.25,
            "length_correct": (9 + 4 + 4 + 6) / 4,
            "length_wrong": (5 + 7 + 7 + 100) / 4,
            "pass_rate": (0.5 + 1 + 0 + 0.5) / 4,
            # of the one TDS group with right and wrong answers, whose wrong one was truncated
            "ties": 0.0,
        }
    )
    group_without_right = Groups(rewards[2:3], lengths[2:3], lengths[2:3] >= 100)
    metrics_without_right = adora_metrics(weigh_groups(group_without_right))
    assert math.isnan(metrics_without_right["length_correct"]), "TRL leaves NaN out of its log"


def make_weighting(*lengths: list[int], **options: Any) -> AdoraWeighting:
    """The weights of groups of a right and two wrong rollouts; each entry has their lengths."""
    lengths_PG = torch.tensor(lengths)
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0]] * len(lengths))
    return weigh_groups(Groups(rewards_PG, lengths_PG, lengths_PG >= 100), Adora(**options))


def test_ties_are_counted_among_the_groups_that_the_length_marks():
    """A tie is a right rollout as long as the mean of the wrong ones, as in 6 against 5 and 7."""
    lengths = torch.tensor(
        [[6, 6, 6], [6, 5, 7], [5, 9, 9], [5, 6, 9], [9, 5, 5], [4, 4, 4], [7, 7, 7]]
    )
    # in the first five groups the first rollout is right, then all are right, then all wrong
    rewards = torch.tensor([[1.0, 0.0, 0.0]] * 5 + [[1.0] * 3, [0.1, 0.0, 0.0]])
    weighting = weigh_groups(Groups(rewards, lengths, lengths >= 100))
    assert weighting.tds_P.tolist() == [True, True, True, True, False, True, False]
    # Two ties and two that are shorter. The one that is longer is not marked, and all right or all
    # wrong is no contest.
    assert adora_metrics(weighting)["ties"] == 2 / 4
    share_without_tds_group = adora_metrics(make_weighting([9, 5, 5]))["ties"]
    assert math.isnan(share_without_tds_group), "TRL leaves NaN out of its log"


def test_a_run_says_once_that_many_attenuated_groups_are_ties(capsys):
    """Once 60 groups were attenuated, a tenth of them or more that are ties is worth a line."""
    tie = [6, 6, 6]  # the lengths of a right rollout and of two wrong ones
    shorter = [5, 9, 9]

    def printed_by_notice(*generations: AdoraWeighting, prints: bool = True, **options: Any) -> str:
        notice = TieNotice(Adora(**options), prints=prints)
        for weighting in generations:
            notice.count(weighting)
        return capsys.readouterr().err

    # generations of 30 groups each
    often = make_weighting(*[tie] * 4, *[shorter] * 26)
    seldom = make_weighting(*[tie] * 2, *[shorter] * 28)
    assert printed_by_notice(often) == "", "30 groups are too few to say anything"
    line = printed_by_notice(often, often, often)
    assert line.count("\n") == 1
    assert line.startswith("8 of 60 attenuated groups are ties")
    assert "adora.ties: keep" in line
    assert printed_by_notice(seldom, seldom, seldom) == "", "fewer than a tenth"
    for silent in ({"mode": "off"}, {"factor": 1.0}, {"prints": False}):
        assert printed_by_notice(often, often, **silent) == "", silent


def test_the_summary_compares_the_first_and_the_last_fifth(tmp_path):
    """The run took 90 seconds, and its model is in the folder `merged`."""
    config = AdoraGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    steps = [{"step": step, "reward": step / 10, "adora/drift": 1e-6} for step in range(10)]
    end = {"train_runtime": 1.0}

    text = "\n".join(summary_lines([*steps, end], config, tmp_path / "merged", seconds=90))

    assert "Trained 9 steps in 1m30s" in text
    # means of the first two and of the last two entries: 0.0 and 0.1, 0.8 and 0.9
    assert "reward                     0.050       0.850" in text
    assert "engine drift" in text
    assert "TDS" not in text  # only what was logged
    assert f"--model {tmp_path / 'merged'} " in text
    assert "Trained 0 steps" in "\n".join(summary_lines([], config, tmp_path, seconds=1))

    # A run shorter than its logging interval: `Trainer` then logs once, and everything stands in
    # that entry.
    history = [
        {"step": 2, "train_runtime": 1.0, "reward": 0.25},
        {"step": 2, "eval_reward": 0.75},
    ]
    text = "\n".join(summary_lines(history, config, tmp_path / "merged", seconds=90))
    assert "Trained 2 steps" in text
    assert "reward                     0.250       0.250" in text
    assert "0.75" not in text


TYPED_ACCELERATE = shortest_program_path(str(Path(sys.executable).with_name("accelerate")))
LAUNCH_WORDS = [
    "/venv/bin/accelerate",
    "launch",
    "--config_file",
    "c.yaml",
    "-m",
    "adora_vl.train",
    "--config",
    "y y.yaml",
]


PARENT_WORDS_AND_COMMAND = [
    (
        ["/venv/bin/python", *LAUNCH_WORDS],
        "accelerate launch --config_file c.yaml -m adora_vl.train --config 'y y.yaml'",
    ),
    (
        ["python", "-m", "accelerate.commands.launch", "-m", "adora_vl.train"],
        f"{TYPED_ACCELERATE} launch -m adora_vl.train",
    ),
    (
        ["python", *LAUNCH_WORDS[:4], "my_script.py"],
        f"{python_command()} -m adora_vl.train --seed 1",
    ),
    (["bash"], f"{python_command()} -m adora_vl.train --seed 1"),
    (
        ["python", *LAUNCH_WORDS[:6], "--hub_token", "hf_x", "--api_secret=s", "--seed", "1"],
        "accelerate launch --config_file c.yaml -m adora_vl.train --hub_token ... "
        "--api_secret=... --seed 1",
    ),
]


def test_the_command_that_started_a_run(monkeypatch):
    """The command of a run is read from its parent process, with dots in place of secrets.

    The parent is `accelerate launch`, or is a script or a shell.
    """
    commands = []
    for started, _ in PARENT_WORDS_AND_COMMAND:
        command_line = "\0".join(started).encode() + b"\0"
        monkeypatch.setattr(Path, "read_bytes", lambda path, content=command_line: content)
        commands.append(launch_command(["--seed", "1"]))
    assert commands == [command for _, command in PARENT_WORDS_AND_COMMAND]

    def fail_to_read(path: Path) -> bytes:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_bytes", fail_to_read)
    assert launch_command(["--seed", "1"]) == f"{python_command()} -m adora_vl.train --seed 1"


def test_the_commands_after_a_run(tmp_path):
    """An evaluation takes the run's own data, if it has a test split."""
    command = f"{python_command()} -m eval.problems run --model m --data DATA --output o"
    assert evaluate_command(Path("m"), str(tmp_path), Path("o"), max_tokens=40) == command
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test-00000-of-00001.parquet").touch()
    words = (
        f"{python_command()} -m eval.problems run --model m --data {tmp_path} --output o "
        "--max-tokens 40"
    )
    assert evaluate_command(Path("m"), str(tmp_path), Path("o"), max_tokens=40) == words
    (tmp_path / "manifest.json").write_text(
        json.dumps({"made_by": PREPARED_BY, "source": "knights"})
    )
    assert evaluate_command(Path("m"), str(tmp_path), Path("o"), max_tokens=40) == words.replace(
        "problems", "knights"
    )
    assert view_command(Path("a b"), Path("c")) == f"{python_command()} -m adora_vl.report 'a b' c"


def test_an_adapter_alone_is_to_be_merged_before_it_is_evaluated(tmp_path):
    """A run with LoRA leaves the adapter alone under ZeRO-3; otherwise the training merges it."""
    config = AdoraGRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        max_steps=10,
    )
    (tmp_path / "adapter_config.json").touch()
    *_, merge, evaluate = summary_lines([], config, tmp_path, seconds=1)
    assert (
        merge
        == f"Merge it      {python_command()} -m adora_vl.export {tmp_path} {tmp_path / MERGED_FOLDER}"
    )
    assert evaluate.startswith("Evaluate it")
    assert f"--model {tmp_path} " in evaluate
    (tmp_path / "config.json").touch()
    assert not any(
        line.startswith("Merge it") for line in summary_lines([], config, tmp_path, seconds=1)
    )


def test_training_longer_is_offered_where_it_is_a_continuation(tmp_path):
    """A linear schedule has ended at 0, and without a checkpoint there is nothing to go on from."""
    for schedule, has_checkpoint, is_offered in (
        ("constant", False, False),
        ("constant", True, True),
        ("linear", True, False),
    ):
        keys: dict[str, Any] = {
            "use_cpu": True,
            "bf16": False,
            "max_steps": 10,
            "lr_scheduler_type": schedule,
        }
        config = AdoraGRPOConfig(output_dir=str(tmp_path), **keys)
        if has_checkpoint:
            (tmp_path / "checkpoint-10").mkdir(exist_ok=True)
        for command in ("CMD", "CMD --max_steps 10", "CMD --max_steps=10"):
            lines = summary_lines(
                [{"step": 10, "reward": 1.0}], config, tmp_path, seconds=1, command=command
            )
            offers = [line for line in lines if line.startswith("Train longer")]
            expected_offers = ["Train longer  CMD --max_steps 20"] if is_offered else []
            assert offers == expected_offers, (schedule, has_checkpoint, command)


def test_the_manifest_of_a_real_run(adora_run, resumed_run):
    """`adora_run` is a finished run; `resumed_run` was stopped at step 2 and went on."""
    manifest = read_run_manifest(adora_run)
    assert manifest["status"] == "finished"
    assert manifest["steps"] == TINY_RUN_STEPS
    assert manifest["finished"]
    assert manifest["config"]["adora_method"]["adora"]["mode"] == "attenuation"
    assert manifest["config"]["learning_rate"] == 1e-3
    assert manifest["data"]["rows"] == 32
    assert len(manifest["data"]["fingerprint"]) == 32
    assert manifest["data"]["source"] == "synthetic"
    assert {"torch", "trl", "python"} <= manifest["versions"].keys()
    assert manifest["command"].startswith(f"{python_command()} -m adora_vl.train --config ")
    assert not [key for key in manifest["config"] if key.endswith("token")]
    assert len(manifest["starts"]) == 1
    assert manifest["starts"][0]["checkpoint"] is None
    facts = describe_run(manifest)
    assert facts["recipe"] == "ADORA attenuation, factor 0.1"
    assert facts["status"] == f"finished at step {TINY_RUN_STEPS}"

    starts = read_run_manifest(resumed_run.folder)["starts"]
    assert [start["checkpoint"] for start in starts] == [
        None,
        str(resumed_run.folder / "checkpoint-2"),
    ]


def test_a_manifest_of_somebody_else_is_not_read(tmp_path):
    """A `manifest.json` that no training wrote is not read; prepared data has such a file too."""
    (tmp_path / "manifest.json").write_text('{"made_by": "data_prep"}')
    assert read_run_manifest(tmp_path) == {}
    assert describe_run({}) == {}
    manifest = {
        "made_by": "adora_vl.train",
        "status": "running",
        "starts": [{"time": "t", "checkpoint": "c"}],
    }
    write_manifest(manifest, tmp_path)
    end_manifest(manifest, tmp_path, "stopped", 3)
    assert read_run_manifest(tmp_path)["starts"] == [{"time": "t", "checkpoint": "c"}]


def test_a_run_that_fails_says_so(tmp_path):
    """The manifest of a failed run has its step, here 7, and the first line of the error.

    Ranks other than the first write nothing.
    """
    manifest = {
        "made_by": "adora_vl.train",
        "status": "running",
        "starts": [{"time": "t", "checkpoint": None}],
    }
    with (
        pytest.raises(ValueError),
        mark_failed_on_error(manifest, tmp_path, lambda: 7, is_main=True),
    ):
        raise ValueError("the cause\nand more")
    written = read_run_manifest(tmp_path)
    assert written["status"] == "failed"
    assert written["steps"] == 7
    assert written["error"] == "ValueError: the cause"
    with (
        pytest.raises(ValueError),
        mark_failed_on_error(manifest, tmp_path / "other", lambda: 7, is_main=False),
    ):
        raise ValueError
    assert not (tmp_path / "other").exists()


def test_every_saved_model_has_its_card_and_stays_whole(adora_run, tmp_path):
    """Checkpoints, the final model and an export have a card, with the metrics up to their step.

    A checkpoint with a card still counts as undamaged.
    """
    final = (adora_run / "README.md").read_text()
    early = (adora_run / "checkpoint-2" / "README.md").read_text()
    assert "# builtin/pretrained, 4 steps of ADORA attenuation, factor 0.1" in final
    assert "# builtin/pretrained, 2 steps of" in early
    assert describe_checkpoint_damage(adora_run / "checkpoint-2") is None
    assert '| adora_method | {"adora": {"mode": "attenuation", "factor": 0.1, ' in final
    assert "| learning_rate | 0.001 |" in final
    assert f"| fingerprint | {read_run_manifest(adora_run)['data']['fingerprint']} |" in final
    assert re.search(r"\| pass rate \| [\d.]+% \| [\d.]+% \|", final)
    assert "| trl | 1." in final
    assert str(adora_run.parent) not in final, "a path of this machine"
    assert export([str(adora_run / "checkpoint-2"), str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "README.md").read_text() == early


def test_the_code_of_the_card_runs(adora_run, monkeypatch, capsys, tmp_path):
    """The card's code answers when it is run in the model's folder, on a picture put there.

    A stranger copies it out of the card.
    """
    out = shutil.copytree(
        adora_run, tmp_path / "model", ignore=shutil.ignore_patterns("checkpoint-*", "rollouts")
    )
    files = f"{read_run_manifest(adora_run)['data']['folder']}/data/train-*.parquet"
    row = load_dataset("parquet", data_files=files)["train"]
    row.cast_column("images", [ImageFeature()])[0]["images"][0].save(out / "diagram.png")

    (code,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.S)
    monkeypatch.chdir(out)
    (tmp_path / "card.py").write_text(code)
    runpy.run_path(str(tmp_path / "card.py"))
    assert r"\boxed" in capsys.readouterr().out


def test_a_card_without_facts_one_of_an_adapter_and_one_of_a_text_only_policy():
    """A card says what is not known, how to export an adapter, and how to load a text-only policy.

    It is written from the manifest, the entries of the log and the step. Of a path to the input,
    only the last name is shown.
    """
    card = model_card({}, [], 0)
    assert "Nothing was logged before this was saved." in card
    assert "Not recorded." in card
    assert "base_model" not in card
    config = {"adora_method": {"grpo": {}}, "adora_reward": ["a|b"], "use_peft": True}
    model = {"name": "Qwen/Qwen2.5-VL-7B-Instruct"}
    data = {"folder": "data/geometry3k", "input": "/home/me/raw"}
    card = model_card({"model": model, "config": config, "data": data}, [], 7)
    assert 'base_model: "Qwen/Qwen2.5-VL-7B-Instruct"' in card
    assert "python -m adora_vl.export" in card
    assert "7 steps of GRPO\n" in card
    assert '| adora_reward | ["a\\|b"] |' in card
    assert "```python" in card
    assert "| dataset | data/geometry3k |" in card
    assert "| input | raw |" in card
    assert "/home" not in card

    card = model_card({"model": {"sees_images": False}}, [], 1)
    assert "AutoModelForCausalLM" in card
    assert "pipeline_tag: text-generation" in card
    assert "image" not in card
    assert "diagram" not in card


def test_the_summary_of_a_real_run_names_files_and_commands_that_exist(resumed_run, tmp_path):
    """The printed words are used as they are, such as the command that writes the page."""
    named = r"^(Model|Metrics|Rollouts|View it|Evaluate it|Train longer) +(.*)$"
    words = dict(re.findall(named, resumed_run.printed, re.M))
    for name in ("Model", "Metrics", "Rollouts"):
        assert Path(words[name].split("  (")[0]).exists(), name
    assert view([*words["View it"].split()[3:], "--output", str(tmp_path / "page.html")]) == 0
    folder = re.search(r"--data (\S+)", words["Evaluate it"])
    assert folder
    assert json.loads((Path(folder[1]) / "manifest.json").read_text())["made_by"] == "data_prep"
    first_words = " ".join(tiny_run_arguments(resumed_run.folder))
    expected = first_words.replace(f" --max_steps {TINY_RUN_STEPS}", "")
    expected += f" --max_steps {2 * TINY_RUN_STEPS}"
    assert words["Train longer"] == f"{python_command()} -m adora_vl.train {expected}"


def test_a_run_with_tools_is_evaluated_with_them(tmp_path):
    """The proposed command has the run's tools and their options."""
    config = AdoraGRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        max_steps=10,
        tools=["zoom"],
        max_tool_calling_iterations=2,
        adora_tool_options=ToolOptions(images=3),
    )
    lines = summary_lines([], config, tmp_path, seconds=1)
    [evaluate] = [line for line in lines if line.startswith("Evaluate it")]
    assert evaluate.endswith(
        "--tools zoom --max-tool-calling-iterations 2 --tool-options '{images: 3}'"
    )
