"""A model that vLLM serves on loopback gives the evaluators the answers that it gives when it is loaded here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from adora_vl.models.tiny.build import PRETRAINED
from data_prep.cli import main as data_prep
from eval.command import main
from eval.geometry3k.benchmark import BENCHMARK

pytestmark = pytest.mark.slow


@pytest.fixture
def served(tmp_path):
    """The address of a server of the tiny model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(PRETRAINED), "--served-model-name",
        "mine", "--host", "127.0.0.1", "--port", str(port), "--generation-config", "vllm", "--dtype", "float32",
        "--max-model-len", "512", "--gpu-memory-utilization", "0.2", "--enforce-eager",
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", server, seconds=400)
            yield f"http://127.0.0.1:{port}/v1"
        except TimeoutError:
            pytest.fail((tmp_path / "server.log").read_text()[-3000:])
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
    openai = ["--engine", "openai", "--base-url", served, "--model", "mine"]
    loaded = ["--engine", "transformers", "--model", "tiny"]
    answers = []
    for name, words in (("served", openai), ("loaded", loaded)):
        assert main(BENCHMARK, [*common, *words, "--output", str(tmp_path / name)]) == 0
        lines = (tmp_path / name / "predictions.jsonl").read_text().splitlines()
        kept = ("pid", "response", "n_tokens", "n_prompt_tokens", "finish_reason")
        answers.append([{key: row[key] for key in kept} for row in map(json.loads, lines)])
    assert answers[0] == answers[1]
