"""A model that a real vLLM server serves on this machine.

It gives the evaluators the answers of the loaded model, and samples rollouts for the trainer, whose
weights it reads from files (`vllm_mode: server`).
"""

import json
import sys
import uuid
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from trl import ModelConfig

from adora_vl.data.context_limit import server_context_length
from adora_vl.models.four_bit import four_bit_folder
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.record.metrics import METRICS_FILE, read_metrics
from adora_vl.rollout import turns
from adora_vl.rollout.server import Server
from adora_vl.rollout.server_pool import ServerPool
from adora_vl.synthetic.generate import generate
from adora_vl.train import main as train_main
from adora_vl.utils.launch import free_port
from data_prep.cli import main as data_prep
from eval.command import main
from eval.geometry3k import BENCHMARK
from tests.support.launch import accelerate_launch, command_lines_marked_with, run_command
from tests.support.parity import DrawnPictureTools
from tests.support.stand_ins import training_config
from tests.support.tiny_run import tiny_run_arguments, train_tiny_run
from tests.support.vllm_server import vllm_server

pytestmark = pytest.mark.slow
# Groups without signal move nothing: the entropy moves the weights, far enough to be seen where
# they do not arrive.
KEYS_THAT_MOVE_WEIGHTS = {"entropy_coef": 1.0, "learning_rate": 1e-2}
LORA_KEYS = {"use_peft": "true", "lora_r": 4, "lora_target_modules": "q_proj,up_proj"}
# nats per token in float32; weights that do not arrive are more than 1e-2 away after a step
ROUNDING_DRIFT = 1e-5


@pytest.fixture(scope="module")
def running_server(tmp_path_factory):
    """Start a vLLM server of the tiny model."""
    with vllm_server(tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture
def fresh_server(running_server):
    """Give the server the tiny model's own weights back, and return it."""
    running_server.restore_weights()
    return running_server


def file_sync_keys(server, **overrides):
    """Return the keys of three steps whose weights reach the server by files."""
    return {
        "use_vllm": "true",
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "max_steps": 3,
        "adora_weight_transfer": "file",
        "save_strategy": "no",
        **KEYS_THAT_MOVE_WEIGHTS,
        **overrides,
    }


def read_drifts(output_dir):
    """Return the drift of each step, in nats per token."""
    return [
        step["adora/drift"]
        for step in read_metrics(output_dir / METRICS_FILE)
        if "adora/drift" in step
    ]


def test_a_served_model_answers_as_the_loaded_one(tmp_path, fresh_server):
    """An evaluation by a server gives the same answers and counts of tokens."""
    code = data_prep(
        ["synthetic", "--output", str(tmp_path / "data"), "--rows", "8", "--test-rows", "8"]
    )
    assert code == 0
    common = ["run", "--data", str(tmp_path / "data"), "--max-tokens", "32"]
    openai = ["--engine", "openai", "--base-url", f"{fresh_server.url}/v1", "--model", "mine"]
    loaded = ["--engine", "transformers", "--model", "tiny"]
    answers = []
    for name, argv in (("served", openai), ("loaded", loaded)):
        assert main(BENCHMARK, [*common, *argv, "--output", str(tmp_path / name)]) == 0
        lines = (tmp_path / name / "predictions.jsonl").read_text().splitlines()
        columns = ("pid", "response", "n_tokens", "n_prompt_tokens", "finish_reason")
        answers.append([{key: row[key] for key in columns} for row in map(json.loads, lines)])
    assert answers[0] == answers[1]


def test_a_server_learns_with_the_trainer_from_images_of_several_sizes(tmp_path, fresh_server):
    """The drift stays at rounding in all steps, and no weight file is left behind."""
    (tmp_path / "pics").mkdir()
    lines = []
    for number, row in enumerate(generate(16, split="train", seed=5, size=56, families=())):
        image = row["images"][0].resize((56 + 28 * (number % 3), 56 + 28 * (number % 2)))
        image.save(tmp_path / "pics" / f"{number}.png")
        lines.append(
            json.dumps({"q": row["problem"], "a": row["answer"], "i": f"pics/{number}.png"})
        )
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    address = training_config(vllm_server_base_url=f"http://127.0.0.1:9,{fresh_server.url}")

    assert server_context_length(address) == 512, (
        "what the prompts of the training are held against"
    )
    columns = json.dumps({"problem": "q", "answer": "a", "images": "i"})
    output_dir = train_tiny_run(
        tmp_path / "out",
        **file_sync_keys(fresh_server, dataset_name=tmp_path, adora_columns=columns),
    )
    assert len(read_drifts(output_dir)) == 3
    assert max(read_drifts(output_dir)) < ROUNDING_DRIFT
    rollouts = pq.read_table(output_dir / "rollouts").to_pylist()
    assert len(rollouts) == 48
    assert len({row["completion"] for row in rollouts}) > 8
    assert not (output_dir / ".weights").exists(), "no weights are left behind"


def test_a_server_samples_turns_with_the_pictures_of_tools(tmp_path, fresh_server, monkeypatch):
    """Tools answer every turn, with pictures of several sizes, and the drift stays at rounding."""
    monkeypatch.setattr(turns, "CALL_TAG", "")
    draws = DrawnPictureTools()
    longer = {"max_completion_length": 160, "vllm_max_model_length": 512}
    with draws.in_trainers():
        output_dir = train_tiny_run(tmp_path / "out", **file_sync_keys(fresh_server, **longer))
    assert len(read_drifts(output_dir)) == 3
    assert max(read_drifts(output_dir)) <= ROUNDING_DRIFT
    assert any(seed.endswith("/1") for seed in draws.seeds), "a second turn was answered"


def test_an_adapter_reaches_the_server_alone_or_merged_and_seeds_decide_what_it_samples(
    tmp_path, fresh_server, monkeypatch
):
    """The adapter alone is a fiftieth of the weights, and two equal runs sample the same."""
    lora = file_sync_keys(fresh_server, adora_weight_transfer=tmp_path / "shared", **LORA_KEYS)
    completions_of_runs = []
    megabytes_sent = []
    for name in ("alone", "again", "merged"):
        if name == "merged":
            monkeypatch.setattr(ServerPool, "all_have_lora", lambda servers: False)
        output_dir = train_tiny_run(tmp_path / name, **lora)
        assert len(read_drifts(output_dir)) == 3
        assert max(read_drifts(output_dir)) < ROUNDING_DRIFT
        completions_of_runs.append(
            pq.read_table(output_dir / "rollouts").column("completion").to_pylist()
        )
        megabytes_sent.append(
            max(
                step["adora/sync_mb"]
                for step in read_metrics(output_dir / METRICS_FILE)
                if "adora/sync_mb" in step
            )
        )
    alone, again, _ = completions_of_runs

    assert alone == again
    assert len(set(alone)) > 8
    sent_alone, sent_again, sent_merged = megabytes_sent
    assert sent_alone == sent_again
    assert sent_alone < sent_merged / 50
    fresh_server.restore_weights()


def test_a_server_that_still_has_the_adapter_before_stops_the_run(
    tmp_path, fresh_server, monkeypatch, capsys
):
    """A run ends when its server ignores the second adapter, as the drift of that step tells."""
    stock_read = Server.read_adapter
    folders = []

    def read_first_adapter_only(server, folder):
        folders.append(folder)
        if len(folders) == 1:
            stock_read(server, folder)

    monkeypatch.setattr(Server, "read_adapter", read_first_adapter_only)
    argv = tiny_run_arguments(
        tmp_path / "out", **file_sync_keys(fresh_server, adora_max_drift=1e-3, **LORA_KEYS)
    )
    assert train_main(argv) == 1
    assert len(folders) == 2
    assert "adora_max_drift" in capsys.readouterr().err


def test_a_server_of_the_base_in_4_bits_samples_by_the_adapter(tmp_path, monkeypatch):
    """Server and trainer round the same base in 4 bits, so the drift is small."""
    monkeypatch.setenv("ADORA_VL_HOME", str(tmp_path / "home"))
    base = four_bit_folder(str(PRETRAINED_FOLDER), "main", ModelConfig(use_bnb_nested_quant=True))
    four_bit_keys = {
        "load_in_4bit": "true",
        "use_bnb_nested_quant": "true",
        "dtype": "bfloat16",
        **LORA_KEYS,
    }
    with vllm_server(tmp_path, base, ("--dtype", "bfloat16")) as server:
        output_dir = train_tiny_run(tmp_path / "out", **file_sync_keys(server, **four_bit_keys))
    assert len(read_drifts(output_dir)) == 3
    assert max(read_drifts(output_dir)) < 0.05


def test_one_step_ahead_the_server_agrees_with_the_weights_that_sample(tmp_path, fresh_server):
    """The drift stays at rounding although the policy is a step away from the weights that sampled.

    The run has two processes with ZeRO-3.
    """
    ahead = file_sync_keys(
        fresh_server, per_device_train_batch_size=8, adora_rollouts="{ahead: 1}", max_steps=4
    )
    accelerate_launch(
        "cpu_zero3", "-m", "adora_vl.train", *tiny_run_arguments(tmp_path / "out", **ahead)
    )
    steps = [
        step for step in read_metrics(tmp_path / "out" / METRICS_FILE) if "adora/drift" in step
    ]

    assert len(steps) == 4
    assert max(step["adora/drift"] for step in steps) < ROUNDING_DRIFT
    policy_gaps = [step["sampling/sampling_logp_difference/mean"] for step in steps]
    assert policy_gaps[0] < ROUNDING_DRIFT
    assert min(policy_gaps[1:]) > 1e-2
    assert [step["adora/staleness"] for step in steps] == [0, 1, 1, 1]


def test_the_script_for_one_machine_starts_and_ends_its_servers(tmp_path):
    """The run agrees with the servers, and no process of the script is left."""
    argv = tiny_run_arguments(
        tmp_path / "out",
        max_steps=2,
        save_strategy="no",
        adora_rollouts="{ahead: 1}",
        use_vllm="true",
        **KEYS_THAT_MOVE_WEIGHTS,
    )
    port = free_port()
    mark = uuid.uuid4().hex
    environment = {
        "SERVER_GPUS": "none",
        "TRAINER_GPUS": "none",
        "SERVER_PORT": str(port),
        "TEST_MARK": mark,
        "ACCELERATE_CONFIG": "configs/accelerate/cpu.yaml",
        "PYTHON": sys.executable,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "LAUNCH": str(Path(sys.executable).parent / "accelerate"),
        "SERVER_OPTIONS": "--dtype float32 --max-model-len 512 --gpu-memory-utilization 0.1 --enforce-eager",
    }
    run_command(
        ["bash", "setup/servers.sh", str(PRETRAINED_FOLDER), *argv], environment=environment
    )

    assert max(read_drifts(tmp_path / "out")) < ROUNDING_DRIFT
    assert command_lines_marked_with(mark) == []


@pytest.mark.parametrize("adapter_keys", [{}, LORA_KEYS], ids=["all", "adapter"])
def test_shards_of_two_processes_reach_the_server_whole(tmp_path, fresh_server, adapter_keys):
    """Under ZeRO-3 weights or adapter are gathered before they are sent."""
    argv = tiny_run_arguments(
        tmp_path / "out",
        **file_sync_keys(fresh_server, per_device_train_batch_size=8, **adapter_keys),
    )
    accelerate_launch("cpu_zero3", "-m", "adora_vl.train", *argv)
    assert len(read_drifts(tmp_path / "out")) == 3
    assert max(read_drifts(tmp_path / "out")) < ROUNDING_DRIFT
