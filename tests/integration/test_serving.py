"""A model that vLLM serves on loopback gives the evaluators the answers that it gives when it is loaded here, and
samples rollouts for the trainer (`vllm_mode: server`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request

import pyarrow.parquet as pq
import pytest
from trl.generation.vllm_client import VLLMClient

from adora_vl.models.tiny.build import PRETRAINED
from adora_vl.rollout.environment import free_port
from adora_vl.rollout_log.metrics_file import METRICS, read_metrics
from data_prep.cli import main as data_prep
from eval.command import main
from eval.geometry3k.benchmark import BENCHMARK
from tests.tiny_run import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The port of a server of the tiny model, started as `docs/rollouts.md` says. Left out are the carrier of weights,
    which needs a GPU, and the limits of pixels, which the processor of the tiny model has.
    """
    log_file = tmp_path_factory.mktemp("served") / "server.log"
    port = free_port()
    words = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(PRETRAINED), "--served-model-name",
        "mine", "--host", "127.0.0.1", "--port", str(port), "--generation-config", "vllm", "--dtype", "float32",
        "--max-model-len", "512", "--gpu-memory-utilization", "0.2", "--enforce-eager", "--enable-scale-out",
        "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment = {**os.environ, **quiet, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with log_file.open("wb") as log:
        server = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", server, seconds=400)
            yield port
        except TimeoutError:
            pytest.fail(log_file.read_text()[-3000:])
        finally:
            server.terminate()
            server.wait(60)


def _wait_for(url: str, server: subprocess.Popen[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()  # noqa: S310  # loopback
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(f"{url} does not answer")


def test_a_served_model_answers_as_the_loaded_one(tmp_path, served):
    assert data_prep(["synthetic", "--output", str(tmp_path / "data"), "--rows", "8", "--test-rows", "8"]) == 0
    common = ["run", "--data", str(tmp_path / "data"), "--max-tokens", "32"]
    openai = ["--engine", "openai", "--base-url", f"http://127.0.0.1:{served}/v1", "--model", "mine"]
    loaded = ["--engine", "transformers", "--model", "tiny"]
    answers = []
    for name, words in (("served", openai), ("loaded", loaded)):
        assert main(BENCHMARK, [*common, *words, "--output", str(tmp_path / name)]) == 0
        lines = (tmp_path / name / "predictions.jsonl").read_text().splitlines()
        kept = ("pid", "response", "n_tokens", "n_prompt_tokens", "finish_reason")
        answers.append([{key: row[key] for key in kept} for row in map(json.loads, lines)])
    assert answers[0] == answers[1]


def test_a_server_samples_rollouts_on_images_for_the_trainer(tmp_path, served, monkeypatch):
    """All but the transfer of weights, which needs NCCL and thus GPUs on both sides: none arrives at this server. So it
    agrees with the trainer until the first update, and the drift shows that it does not afterwards.
    """
    offered: list[int] = []
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda client, device: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", lambda client, facts, tensors: offered.append(len(facts)))
    out = train(
        tmp_path / "out", use_vllm="true", vllm_mode="server", vllm_server_port=served, max_steps=2,
        adora_max_drift="null", save_strategy="no",
        # a server draws its own seeds, and groups without signal move nothing: the entropy moves the weights
        entropy_coef=1.0, learning_rate=1e-2,
    )  # fmt: skip
    steps = [step for step in read_metrics(out / METRICS) if "adora/drift" in step]
    assert steps[0]["adora/drift"] < 1e-4 < 1e-2 < steps[1]["adora/drift"]
    assert len(offered) == 2 and offered[0] == offered[1] > 50, "every tensor, before each generation"
    rollouts = pq.read_table(out / "rollouts").to_pylist()
    assert len(rollouts) == 32 and len({row["completion"] for row in rollouts}) > 8
