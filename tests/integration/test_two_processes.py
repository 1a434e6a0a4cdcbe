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

from adora_vl.checkpoint.store import (
    COMPLETE_FILE,
    MANIFEST_FILE,
    describe_checkpoint_damage,
    list_checkpoints,
    publish_checkpoint,
)
from adora_vl.checkpoint.trl_state import REFERENCE_FOLDER
from adora_vl.export import main as export
from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from benchmarks.kill_and_resume import comparable_results
from tests.support.endpoint_server import EndpointServer, Reply, ReplyFunction, completion_reply
from tests.support.launch import (
    accelerate_launch,
    cli_arguments,
    command_lines_marked_with,
    run_command,
)
from tests.support.parity import run_parity
from tests.support.tiny_run import read_training_log
from tests.support.weights import mean_weight_difference

pytestmark = pytest.mark.slow
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where Linux shows the names of shm_open
SMOKE_RUN_ARGUMENTS = cli_arguments(
    config="configs/train/smoke_cpu.yaml",
    adora_synthetic_rows=64,
    num_generations=4,
    logging_steps=1,
    save_steps=1,
    save_total_limit=4,
    beta="0.1",
    sync_ref_model="true",
    ref_model_sync_steps=1,
)
BATCH_OF_TWO_PROCESSES = ["--per_device_train_batch_size", "8"]
BATCH_OF_ONE_PROCESS = ["--per_device_train_batch_size", "16"]


@pytest.fixture(scope="module")
def drift_stopped_run(tmp_path_factory):
    """Train on two processes until a guard stops the run before step 3.

    Step 2 has a NaN on one rank, and at step 3 one rank's engine has lost the weights. Returns the
    output folder, the finished process, and the command lines of the processes that still run.
    """
    output_dir = tmp_path_factory.mktemp("two") / "out"
    mark = uuid.uuid4().hex
    completed = accelerate_launch(
        "cpu_zero3",
        "-m",
        "tests.integration.faulty",
        *SMOKE_RUN_ARGUMENTS,
        *BATCH_OF_TWO_PROCESSES,
        "--output_dir",
        str(output_dir),
        "--max_steps",
        "5",
        environment={"FAULTS": "nan:2:1,drift:3:1", "TEST_MARK": mark},
        check=False,
    )
    assert completed.returncode == 1, completed.stderr[-3000:]
    return output_dir, completed, command_lines_marked_with(mark)


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(drift_stopped_run):
    """Step 2 changes no weight, and the log says that it was skipped."""
    output_dir, _, _ = drift_stopped_run
    assert [
        entry["adora/skipped_steps"] for entry in read_training_log(output_dir / "checkpoint-2")
    ] == [
        0,
        1,
    ]
    first = load_file(output_dir / "checkpoint-1" / "model.safetensors")
    second = load_file(output_dir / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    shipped = load_file(PRETRAINED_FOLDER / "model.safetensors")
    assert any(not torch.equal(first[name], shipped[name]) for name in first)


def test_all_ranks_stop_together_over_drift_with_a_whole_checkpoint(drift_stopped_run):
    """The drift of one rank stops both, with one error line and whole checkpoints.

    No process is left running.
    """
    output_dir, completed, processes = drift_stopped_run
    assert completed.stderr.count("error: step 3: the engine's log-probabilities are") == 1
    assert f"go on with --resume_from_checkpoint {output_dir / 'checkpoint-2'}" in completed.stderr
    assert "Traceback (most recent call last)" not in completed.stderr.split("error: step 3")[0]
    assert [path.name for path in list_checkpoints(output_dir)] == ["checkpoint-2", "checkpoint-1"]
    assert [describe_checkpoint_damage(path) for path in list_checkpoints(output_dir)] == [
        None,
        None,
    ]
    assert processes == []


@pytest.fixture(scope="module")
def resumed_folder(drift_stopped_run):
    """Give the same command again, to the end of step 3, and then once more.

    The second time nothing is left to train, and the final weights are written again. Returns the
    output folder.
    """
    output_dir, _, _ = drift_stopped_run
    command = ["-m", "adora_vl.train", *SMOKE_RUN_ARGUMENTS, *BATCH_OF_TWO_PROCESSES]
    command += ["--output_dir", str(output_dir), "--max_steps", "3"]
    accelerate_launch("cpu_zero3", *command)
    final_weights = (output_dir / "model.safetensors").read_bytes()
    (
        output_dir / "model.safetensors"
    ).unlink()  # as if the run had been killed after its last checkpoint
    completed = accelerate_launch("cpu_zero3", *command)
    assert "checkpoint-3 is the last step: nothing left to train" in completed.stdout
    assert (output_dir / "model.safetensors").read_bytes() == final_weights
    return output_dir


@pytest.mark.core
def test_a_second_start_goes_on_where_the_first_one_ended(resumed_folder):
    """After steps 1 and 2 comes step 3, and the reference model goes on from checkpoint-2's.

    After each step TRL mixes 0.6 of the policy into the reference (its default).
    """
    steps = read_training_log(resumed_folder)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["adora/drift"] < 1e-3 for step in steps)
    with (
        safe_open(resumed_folder / "model.safetensors", framework="pt") as saved,
        safe_open(PRETRAINED_FOLDER / "model.safetensors", framework="pt") as shipped,
    ):
        saved_shapes = {
            name: saved.get_slice(name).get_shape()
            for name in saved.keys()  # noqa: SIM118
        }
        shipped_shapes = {
            name: shipped.get_slice(name).get_shape()
            for name in shipped.keys()  # noqa: SIM118
        }
        policy_head = saved.get_tensor("lm_head.weight")
        shipped_head = shipped.get_tensor("lm_head.weight")
    assert saved_shapes == shipped_shapes
    reference_at_2 = load_reference_head(resumed_folder / "checkpoint-2")
    reference_at_3 = load_reference_head(resumed_folder / "checkpoint-3")
    assert not torch.equal(reference_at_2, shipped_head), "the reference has not moved before"
    mixup = 0.6
    expected = (1 - mixup) * reference_at_2 + mixup * policy_head
    # a rounding of weights below 1
    assert torch.allclose(reference_at_3, expected, rtol=0, atol=1e-7)


def load_reference_head(checkpoint: Path) -> torch.Tensor:
    """Load the head's weight of the reference model that a checkpoint has."""
    return load_file(checkpoint / REFERENCE_FOLDER / "model-00001.safetensors")["lm_head.weight"]


@pytest.mark.core
def test_one_process_goes_on_with_the_steps_of_two(resumed_folder, tmp_path):
    """One process takes step 3 as two do: the rollouts are the same, and the weights nearly.

    The weights differ by the order of sums alone. A wrong step of Adam would show, as the
    difference is compared with how far step 3 moved the weights.
    """
    checkpoint = resumed_folder / "checkpoint-2"
    argv = [
        "-m",
        "adora_vl.train",
        *SMOKE_RUN_ARGUMENTS,
        *BATCH_OF_ONE_PROCESS,
        "--max_steps",
        "3",
    ]
    argv += ["--output_dir", str(tmp_path / "out"), "--resume_from_checkpoint"]
    assert export([str(checkpoint), str(tmp_path / "whole"), "--universal"]) == 0
    accelerate_launch("cpu_zero3", "--num_processes", "1", *argv, str(tmp_path / "whole"))
    step_of_one_process = read_training_log(tmp_path / "out")[-1]
    step_of_two_processes = read_training_log(resumed_folder)[-1]
    for name in ("reward", "completions/mean_length", "adora/weight_mean"):
        assert step_of_one_process[name] == pytest.approx(step_of_two_processes[name])
    assert step_of_one_process["grad_norm"] == pytest.approx(
        step_of_two_processes["grad_norm"], rel=1e-3
    )
    weights_of_one_process = load_file(tmp_path / "out" / "model.safetensors")
    weights_of_two_processes = load_file(resumed_folder / "model.safetensors")
    weights_at_2 = load_file(checkpoint / "model.safetensors")
    movement_of_step_3 = mean_weight_difference(weights_of_two_processes, weights_at_2)
    difference = mean_weight_difference(weights_of_one_process, weights_of_two_processes)
    assert difference < 1e-4 * movement_of_step_3


@pytest.mark.core
def test_shards_alone_are_gathered_into_the_same_weights(resumed_folder, tmp_path):
    """ZeRO-3 saves no model.safetensors where zero3_save_16bit_model is off; shards suffice."""
    bare = tmp_path / "staged" / "checkpoint-3"
    ignored = shutil.ignore_patterns(MANIFEST_FILE, COMPLETE_FILE, "model.safetensors")
    shutil.copytree(resumed_folder / "checkpoint-3", bare, ignore=ignored)
    publish_checkpoint(bare, tmp_path / "checkpoint-3", {"step": 3}, written_files=())
    assert export([str(tmp_path / "checkpoint-3"), str(tmp_path / "model")]) == 0
    gathered = load_file(tmp_path / "model" / "model.safetensors")
    saved = load_file(resumed_folder / "checkpoint-3" / "model.safetensors")
    assert gathered.keys() == saved.keys()
    assert all(torch.equal(gathered[name], saved[name]) for name in saved)
    assert (tmp_path / "model" / "processor_config.json").is_file()


KEYS_OF_THREE_STEPS_A_GENERATION = {
    "config": "configs/train/smoke_cpu.yaml",
    "use_vllm": "false",
    "logging_steps": 1,
    "save_total_limit": 9,
    "num_generations": 4,
    "max_completion_length": 28,
    "adora_synthetic_rows": 32,
    "learning_rate": 1e-3,
    "save_steps": 1,
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "steps_per_generation": 4,
}


def train_and_read_results(folder: Path) -> dict:
    """Train three steps from one generation on two processes, or go on where the folder's run is.

    Returns what two equal runs have in common: figures, rollouts, tables and weights.
    """
    argv = cli_arguments(**{**KEYS_OF_THREE_STEPS_A_GENERATION, "output_dir": folder})
    accelerate_launch("cpu_zero3", "-m", "adora_vl.train", *argv)
    return comparable_results(folder)


def test_each_rank_goes_on_with_its_own_rollouts(tmp_path):
    """A run that resumes within a generation ends with the results of one that did not stop.

    The checkpoint within the generation has a file of each rank.
    """
    uninterrupted = train_and_read_results(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run" / "checkpoint-2").glob("generation-*")} == {
        "generation-00000.pt",
        "generation-00001.pt",
    }
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    resumed = train_and_read_results(tmp_path / "run")
    # One generation serves all three steps: its record stands once, TRL's table once a step.
    assert list(uninterrupted["steps"]) == [1, 2, 3]
    assert list(uninterrupted["rollouts"]) == ["step 1"]
    assert len(uninterrupted["tables"]) == 3
    assert resumed == uninterrupted


def test_processes_without_deepspeed_go_on_as_if_nothing_had_happened(tmp_path):
    """Also without DeepSpeed a run of two processes that resumes ends as one that did not stop.

    Each process has all weights then, and reads the whole state of the optimizer.
    """
    argv = cli_arguments(**{**KEYS_OF_THREE_STEPS_A_GENERATION, "output_dir": tmp_path / "run"})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "adora_vl.train", *argv]
    run_command(command)
    uninterrupted = comparable_results(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    run_command(command)
    assert comparable_results(tmp_path / "run") == uninterrupted


# One call of each process before the run, 16 in the first step where no two replies are alike, and
# some of the second
ANSWERS_BEFORE_REFUSAL = 25


def refuse_key_after_some_answers(_: dict[str, Any], call: int) -> Reply:
    """Answer as a judge until the key ends. `call`: the number of the request, from 1."""
    if call <= ANSWERS_BEFORE_REFUSAL:
        return completion_reply("<score>0.5</score>")
    return 401, b"the key has ended"


def test_a_key_that_ends_stops_all_processes_with_one_line(
    tmp_path: Path, start_server: Callable[[ReplyFunction], EndpointServer]
) -> None:
    """A judge that refuses its key in the middle of a run ends both processes with one error line.

    Chance decides which of the two processes meets the refusal first.
    """
    server = start_server(refuse_key_after_some_answers)
    options = json.dumps({"judge": {"base_url": server.url, "model": "j", "concurrency": 1}})
    completed = accelerate_launch(
        "cpu_zero3",
        "-m",
        "adora_vl.train",
        *cli_arguments(
            config="configs/train/smoke_cpu.yaml",
            use_vllm="false",
            max_steps=9,
            logging_steps=1,
            save_steps=1,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=32,
            adora_synthetic_rows=32,
            output_dir=tmp_path / "out",
        ),
        "--adora_reward",
        "accuracy",
        options,
        check=False,
    )
    (line,) = re.findall(r"^error.*$", completed.stderr, flags=re.MULTILINE)
    newest, *_ = list_checkpoints(tmp_path / "out")

    assert re.fullmatch(
        r"error: step \d: adora_reward: judge: \S+ refuses the key in ADORA_VL_JUDGE_KEY for the "
        r"model 'j' \(HTTP 401: "
        r"the key has ended .*\); set ADORA_VL_JUDGE_KEY to .*, and go on with "
        rf"--resume_from_checkpoint {newest}",
        line,
    )
    assert describe_checkpoint_damage(newest) is None
    assert "2" in re.findall(r"exitcode +: (\S+)", completed.stderr), (
        "the launcher may end the other before it ends itself"
    )


@pytest.fixture(scope="module")
def model_with_four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with random weights and four attention heads, which two processes can share.

    The shipped one has three.
    """
    folder = tmp_path_factory.mktemp("model")
    config = Qwen2_5_VLConfig.from_pretrained(PRETRAINED_FOLDER)
    text = config.text_config
    text.hidden_size = 128
    text.num_attention_heads = 4
    text.num_key_value_heads = 2
    config.vision_config.out_hidden_size = 128
    config.vision_config.num_heads = 4
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    load_processor(str(PRETRAINED_FOLDER)).save_pretrained(folder)
    return folder


def test_zero_2_of_the_shipped_config_trains_in_bfloat16(tmp_path: Path) -> None:
    """Under ZeRO-2 gradients are not 0, and most of the weights have moved, in their own dtype."""
    output_dir = tmp_path / "out"
    accelerate_launch(
        "zero2",
        "--cpu",
        "--num_processes",
        "2",
        "-m",
        "adora_vl.train",
        *SMOKE_RUN_ARGUMENTS,
        *BATCH_OF_TWO_PROCESSES,
        *cli_arguments(
            output_dir=output_dir,
            use_vllm="false",
            bf16="true",
            dtype="bfloat16",
            max_steps=2,
            learning_rate="1e-3",
            max_completion_length=24,
        ),
    )
    assert max(entry["grad_norm"] for entry in read_training_log(output_dir)) > 0
    trained_weights = load_file(output_dir / "model.safetensors")
    shipped_weights = load_file(PRETRAINED_FOLDER / "model.safetensors")
    assert {weight.dtype for weight in trained_weights.values()} == {torch.bfloat16}
    moved_names = [
        name
        for name, weight in shipped_weights.items()
        if not torch.equal(trained_weights[name], weight.bfloat16())
    ]
    assert len(moved_names) > len(shipped_weights) / 2


def test_a_divided_engine_samples_what_a_whole_one_samples(model_with_four_heads, tmp_path):
    """An engine that two processes share gives each rollout the same tokens."""
    completions_by_run = []
    shared_memory_before = set(SHARED_MEMORY.glob("*cpushm*"))
    for config, processes in (("cpu", 1), ("cpu_zero3", 2)):
        output_dir = tmp_path / config
        accelerate_launch(
            config,
            "-m",
            "adora_vl.train",
            *cli_arguments(
                config="configs/train/smoke_cpu.yaml",
                model_name_or_path=model_with_four_heads,
                output_dir=output_dir,
                adora_synthetic_rows=64,
                per_device_train_batch_size=32 // processes,
                max_steps=1,
                logging_steps=1,
                save_strategy="no",
                vllm_tensor_parallel_size=processes,
            ),
        )
        rollouts = pq.read_table(output_dir / "rollouts").to_pylist()
        completions_by_run.append(
            {
                (rollout["group"], rollout["rollout"]): (rollout["id"], rollout["completion"])
                for rollout in rollouts
            }
        )
        first_step = json.loads((output_dir / "metrics.jsonl").read_text().splitlines()[0])
        assert first_step["step"] == 1
        # 2e-7 was measured; processors round differently by small factors, not by 50
        assert first_step["adora/drift"] < 1e-5
    of_whole_engine, of_divided_engine = completions_by_run
    assert of_whole_engine == of_divided_engine
    assert len(of_whole_engine) == 32
    assert len(set(of_whole_engine.values())) > 16, "the rollouts of a problem differ"
    shared_memory_after = set(SHARED_MEMORY.glob("*cpushm*"))
    assert shared_memory_before == shared_memory_after, (
        "what a run leaves there keeps the next from starting"
    )


def test_a_divided_engine_goes_on_with_paused_answers_after_a_kill_and_with_turns(
    model_with_four_heads, tmp_path
):
    """An engine that two processes share works with a token budget and with tools.

    Answers that the budget has paused go on after a kill. Tools make answers of several turns.
    """
    keys = [
        "--model_name_or_path",
        str(model_with_four_heads),
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
        in run_command([*command, "--steps", "4", "--kills", "backward:4", "--", *keys]).stdout
    )
    (rollouts,) = tmp_path.glob("*/killed/rollouts")
    assert max(pq.read_table(rollouts)["segments"].to_pylist()) > 1
    argv = [
        "per_device_train_batch_size=8",
        "num_generations=4",
        "max_steps=2",
        "vllm_tensor_parallel_size=2",
    ]
    result = run_parity(
        tmp_path, "cpu_zero3", "--mixed", "--tools", *argv, model=model_with_four_heads
    )
    assert max(result["gaps"]) < 1e-5
    assert max(result["turns"]) > 1
