"""Two processes: bad steps, a stop in order, going on as before and with another number of them, a
judge's key that ends, and an engine that lies on both.
"""

import json
import re
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from adora_vl.checkpoint.store import MANIFEST, MARK, checkpoints, problem_of, publish
from adora_vl.checkpoint.trl_state import REFERENCE
from adora_vl.export import main as export
from adora_vl.models.load import PRETRAINED, load_processor
from benchmarks.kill_and_resume import facts
from tests.support.endpoint_server import Answer, Reply, Server, completion
from tests.support.launch import launch, processes_with, run
from tests.support.parity import run_parity
from tests.support.tiny_run import training_log
from tests.support.weights import mean_difference

pytestmark = pytest.mark.slow
RUN = [
    "--config",
    "configs/train/smoke_cpu.yaml",
    "--adora_synthetic_rows",
    "64",
    "--num_generations",
    "4",
    "--logging_steps",
    "1",
    "--save_steps",
    "1",
    "--save_total_limit",
    "4",
    "--beta",
    "0.1",
    "--sync_ref_model",
    "true",
    "--ref_model_sync_steps",
    "1",
]
TWO = ["--per_device_train_batch_size", "8"]
ONE = ["--per_device_train_batch_size", "16"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Step 2 has a NaN on one rank, and before step 3 one rank's engine has lost the weights.

    What came of it.
    """
    out = tmp_path_factory.mktemp("two") / "out"
    mark = uuid.uuid4().hex
    done = launch(
        "cpu_zero3",
        "-m",
        "tests.integration.faulty",
        *RUN,
        *TWO,
        "--output_dir",
        str(out),
        "--max_steps",
        "5",
        environment={"FAULTS": "nan:2:1,drift:3:1", "TEST_MARK": mark},
        check=False,
    )
    assert done.returncode == 1, done.stderr[-3000:]
    return out, done, processes_with(mark)


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(stopped):
    out, _, _ = stopped
    assert [entry["adora/skipped_steps"] for entry in training_log(out / "checkpoint-2")] == [0, 1]
    first = load_file(out / "checkpoint-1" / "model.safetensors")
    second = load_file(out / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    shipped = load_file(PRETRAINED / "model.safetensors")
    assert any(not torch.equal(first[name], shipped[name]) for name in first)


def test_all_ranks_stop_together_over_drift_with_a_whole_checkpoint(stopped):
    out, done, processes = stopped
    assert done.stderr.count("error: step 3: the engine's log-probabilities are") == 1
    assert f"go on with --resume_from_checkpoint {out / 'checkpoint-2'}" in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr.split("error: step 3")[0]
    assert [path.name for path in checkpoints(out)] == ["checkpoint-2", "checkpoint-1"]
    assert [problem_of(path) for path in checkpoints(out)] == [None, None]
    assert processes == []


@pytest.fixture(scope="module")
def resumed(stopped):
    """The same command again, to the end of step 3, and then once more."""
    out, _, _ = stopped
    words = ["-m", "adora_vl.train", *RUN, *TWO, "--output_dir", str(out), "--max_steps", "3"]
    launch("cpu_zero3", *words)
    before = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").unlink()  # as if the run had been killed after its last checkpoint
    done = launch("cpu_zero3", *words)
    assert "checkpoint-3 is the last step: nothing left to train" in done.stdout
    assert (out / "model.safetensors").read_bytes() == before
    return out


@pytest.mark.core
def test_a_second_start_goes_on_where_the_first_one_ended(resumed):
    steps = training_log(resumed)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["adora/drift"] < 1e-3 for step in steps)
    with (
        safe_open(resumed / "model.safetensors", framework="pt") as saved,
        safe_open(PRETRAINED / "model.safetensors", "pt") as shipped,
    ):
        shapes = {name: saved.get_slice(name).get_shape() for name in saved.keys()}  # noqa: SIM118
        assert shapes == {name: shipped.get_slice(name).get_shape() for name in shipped.keys()}  # noqa: SIM118
        before = load_file(resumed / "checkpoint-2" / REFERENCE / "model-00001.safetensors")[
            "lm_head.weight"
        ]
        now = load_file(resumed / "checkpoint-3" / REFERENCE / "model-00001.safetensors")[
            "lm_head.weight"
        ]
        moved = 0.4 * before + 0.6 * saved.get_tensor("lm_head.weight")  # TRL's default mixup
        assert not torch.equal(before, shipped.get_tensor("lm_head.weight")), (
            "the reference has not moved before"
        )
        assert torch.allclose(now, moved, rtol=0, atol=1e-7)  # a rounding of weights below 1


@pytest.mark.core
def test_one_process_goes_on_with_the_steps_of_two(resumed, tmp_path):
    """Same rollouts, and weights that differ by the order of sums only; a wrong Adam step would
    show.
    """
    second = resumed / "checkpoint-2"
    words = ["-m", "adora_vl.train", *RUN, *ONE, "--max_steps", "3"]
    words += ["--output_dir", str(tmp_path / "out"), "--resume_from_checkpoint"]
    assert export([str(second), str(tmp_path / "whole"), "--universal"]) == 0
    launch("cpu_zero3", "--num_processes", "1", *words, str(tmp_path / "whole"))
    ours = training_log(tmp_path / "out")[-1]
    theirs = training_log(resumed)[-1]
    for name in ("reward", "completions/mean_length", "adora/weight_mean"):
        assert ours[name] == pytest.approx(theirs[name])
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    of_one_process = load_file(tmp_path / "out" / "model.safetensors")
    of_two_processes = load_file(resumed / "model.safetensors")
    before = load_file(second / "model.safetensors")
    assert mean_difference(of_one_process, of_two_processes) < 1e-4 * mean_difference(
        of_two_processes, before
    )


@pytest.mark.core
def test_shards_alone_are_gathered_into_the_same_weights(resumed, tmp_path):
    """ZeRO-3 saves no model.safetensors where zero3_save_16bit_model is off; shards suffice."""
    bare = tmp_path / "staged" / "checkpoint-3"
    ignored = shutil.ignore_patterns(MANIFEST, MARK, "model.safetensors")
    shutil.copytree(resumed / "checkpoint-3", bare, ignore=ignored)
    publish(bare, tmp_path / "checkpoint-3", {"step": 3})
    assert export([str(tmp_path / "checkpoint-3"), str(tmp_path / "model")]) == 0
    gathered = load_file(tmp_path / "model" / "model.safetensors")
    saved = load_file(resumed / "checkpoint-3" / "model.safetensors")
    assert gathered.keys() == saved.keys()
    assert all(torch.equal(gathered[name], saved[name]) for name in saved)
    assert (tmp_path / "model" / "processor_config.json").is_file()


WITHIN = {
    "save_steps": 1,
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "steps_per_generation": 4,
}
WITHIN_RUN = {
    "config": "configs/train/smoke_cpu.yaml",
    "use_vllm": "false",
    "logging_steps": 1,
    "save_total_limit": 9,
    "num_generations": 4,
    "max_completion_length": 28,
    "adora_synthetic_rows": 32,
    "learning_rate": 1e-3,
    **WITHIN,
}


def trained(folder: Path) -> dict:
    words = [
        word
        for key, value in {**WITHIN_RUN, "output_dir": folder}.items()
        for word in (f"--{key}", str(value))
    ]
    launch("cpu_zero3", "-m", "adora_vl.train", *words)
    return facts(folder)


def test_each_rank_goes_on_with_its_own_rollouts(tmp_path):
    uninterrupted = trained(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run" / "checkpoint-2").glob("generation-*")} == {
        "generation-00000.pt",
        "generation-00001.pt",
    }
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    again = trained(tmp_path / "run")
    # One generation serves all three steps: its record stands once, TRL's table once a step.
    assert list(uninterrupted["steps"]) == [1, 2, 3]
    assert list(uninterrupted["rollouts"]) == ["step 1"]
    assert len(uninterrupted["tables"]) == 3
    assert again == uninterrupted


# One call of each process before the run, 16 in the first step where no two replies are alike, and
# some of the second
ANSWERED = 25


def ends(_: dict[str, Any], call: int) -> Reply:
    return completion("<score>0.5</score>") if call <= ANSWERED else (401, b"the key has ended")


def test_a_key_that_ends_stops_all_processes_with_one_line(
    tmp_path: Path, serve: Callable[[Answer], Server]
) -> None:
    """Chance decides which of the two processes meets the refusal first."""
    server = serve(ends)
    options = json.dumps({"judge": {"base_url": server.url, "model": "j", "concurrency": 1}})
    done = launch(
        "cpu_zero3",
        "-m",
        "adora_vl.train",
        "--config",
        "configs/train/smoke_cpu.yaml",
        "--use_vllm",
        "false",
        "--max_steps",
        "9",
        "--logging_steps",
        "1",
        "--save_steps",
        "1",
        "--per_device_train_batch_size",
        "8",
        "--num_generations",
        "4",
        "--max_completion_length",
        "32",
        "--adora_synthetic_rows",
        "32",
        "--output_dir",
        str(tmp_path / "out"),
        "--adora_reward",
        "accuracy",
        options,
        check=False,
    )
    (line,) = re.findall(r"^error.*$", done.stderr, flags=re.MULTILINE)
    newest, *_ = checkpoints(tmp_path / "out")
    assert re.fullmatch(
        r"error: step \d: adora_reward: judge: \S+ refuses the key in ADORA_VL_JUDGE_KEY for the "
        r"model 'j' \(HTTP 401: "
        r"the key has ended .*\); set ADORA_VL_JUDGE_KEY to .*, and go on with "
        rf"--resume_from_checkpoint {newest}",
        line,
    )
    assert problem_of(newest) is None
    assert "2" in re.findall(r"exitcode +: (\S+)", done.stderr), (
        "the launcher may end the other before it ends itself"
    )


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model has three attention heads, which two processes cannot share.

    This one is not trained.
    """
    folder = tmp_path_factory.mktemp("model")
    config = Qwen2_5_VLConfig.from_pretrained(PRETRAINED)
    text = config.text_config
    text.hidden_size = 128
    text.num_attention_heads = 4
    text.num_key_value_heads = 2
    config.vision_config.out_hidden_size = 128
    config.vision_config.num_heads = 4
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    load_processor(str(PRETRAINED)).save_pretrained(folder)
    return folder


def test_zero_2_of_the_shipped_config_trains_in_bfloat16(tmp_path: Path) -> None:
    out = tmp_path / "out"
    launch(
        "zero2",
        "--cpu",
        "--num_processes",
        "2",
        "-m",
        "adora_vl.train",
        *RUN,
        *TWO,
        "--output_dir",
        str(out),
        "--use_vllm",
        "false",
        "--bf16",
        "true",
        "--dtype",
        "bfloat16",
        "--max_steps",
        "2",
        "--learning_rate",
        "1e-3",
        "--max_completion_length",
        "24",
    )
    assert max(entry["grad_norm"] for entry in training_log(out)) > 0
    trained = load_file(out / "model.safetensors")
    start = load_file(PRETRAINED / "model.safetensors")
    assert {weights.dtype for weights in trained.values()} == {torch.bfloat16}
    moved = [name for name in start if not torch.equal(trained[name], start[name].bfloat16())]
    assert len(moved) > len(start) / 2


def test_a_divided_engine_samples_what_a_whole_one_samples(four_heads, tmp_path):
    samples = []
    shared = [set(Path("/dev/shm").glob("*cpushm*"))]
    for config, parts in (("cpu", 1), ("cpu_zero3", 2)):
        out = tmp_path / config
        launch(
            config,
            "-m",
            "adora_vl.train",
            "--config",
            "configs/train/smoke_cpu.yaml",
            "--model_name_or_path",
            str(four_heads),
            "--output_dir",
            str(out),
            "--adora_synthetic_rows",
            "64",
            "--per_device_train_batch_size",
            str(32 // parts),
            "--max_steps",
            "1",
            "--logging_steps",
            "1",
            "--save_strategy",
            "no",
            "--vllm_tensor_parallel_size",
            str(parts),
        )
        rows = pq.read_table(out / "rollouts").to_pylist()
        samples.append(
            {(row["group"], row["rollout"]): (row["id"], row["completion"]) for row in rows}
        )
        first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
        # 2e-7 was measured; processors round differently by small factors, not by 50
        assert first["step"] == 1
        assert first["adora/drift"] < 1e-5
    assert samples[0] == samples[1]
    assert len(samples[0]) == 32
    assert len(set(samples[0].values())) > 16, "the rollouts of a problem differ"
    shared.append(set(Path("/dev/shm").glob("*cpushm*")))
    assert shared[0] == shared[1], "what a run leaves there keeps the next from starting"


def test_a_divided_engine_goes_on_with_paused_answers_after_a_kill_and_with_turns(
    four_heads, tmp_path
):
    keys = [
        "--model_name_or_path",
        str(four_heads),
        "--vllm_tensor_parallel_size",
        "2",
        "--adora_rollouts.budget",
        "9",
    ]
    command = [
        sys.executable,
        "-m",
        "benchmarks.kill_and_resume",
        "--processes",
        "2",
        "--output",
        str(tmp_path),
    ]
    assert (
        "weights: all equal"
        in run([*command, "--steps", "4", "--kills", "backward:4", "--", *keys]).stdout
    )
    (rollouts,) = tmp_path.glob("*/killed/rollouts")
    assert max(pq.read_table(rollouts)["segments"].to_pylist()) > 1
    words = [
        "per_device_train_batch_size=8",
        "num_generations=4",
        "max_steps=2",
        "vllm_tensor_parallel_size=2",
    ]
    result = run_parity(tmp_path, "cpu_zero3", "--mixed", "--tools", *words, model=four_heads)
    assert max(result["gaps"]) < 1e-5
    assert max(result["turns"]) > 1
