"""A vLLM server of the tiny model on loopback, started as `docs/rollouts.md` says."""

import json
import os
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.utils.launch import free_port
from tests.support.forked_python import PythonProcess


class RunningVLLMServer:
    """A vLLM server in a process of its own, which starts when the object is made.

    It is started with the options of `docs/rollouts.md`, but for the limits of pixels, which the
    tiny model's processor has.
    """

    def __init__(self, log: Path, model: str, *argv: str) -> None:
        self.port = free_port()
        self._log = log
        self._argv = ["--model", model, *argv]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = self._start()

    def _start(self) -> PythonProcess:
        """Start vLLM's command with the server's log, and return the process."""
        argv = [
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--port",
            str(self.port),
            "--host",
            "127.0.0.1",
            "--served-model-name",
            "mine",
            "--generation-config",
            "vllm",
            "--max-model-len",
            "512",
            "--gpu-memory-utilization",
            "0.1",
            "--enforce-eager",
            "--enable-scale-out",
            "--no-enable-chunked-prefill",
            "--logprobs-mode",
            "raw_logprobs",
            "--enable-lora",
            "--max-lora-rank",
            "8",
            "--enable-tower-connector-lora",
            *self._argv,
        ]
        quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        switches = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        env = {**os.environ, **quiet, **switches, "VLLM_CPU_KVCACHE_SPACE": "1"}
        return PythonProcess(argv, env, stdout=self._log, stderr=self._log, starts_session=True)

    def wait(self, seconds: float = 400) -> None:
        """Wait until the server answers.

        Raises `TimeoutError` with the end of its log.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            try:
                # The address is loopback.
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()  # noqa: S310
                return
            except OSError:
                time.sleep(0.5)
        raise TimeoutError(f"{self.url} does not answer\n{self._log.read_text()[-3000:]}")

    def post(self, path: str, body: dict[str, Any]) -> None:
        """Send a POST request with a JSON body; an HTTP error raises."""
        request = urllib.request.Request(  # noqa: S310  # loopback
            f"{self.url}/{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=60).close()  # noqa: S310

    def restore_weights(self) -> None:
        """Load the tiny model's own weights again, whatever weights a test has sent."""
        self.post(
            "collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(PRETRAINED_FOLDER)}},
        )
        self.post("reset_prefix_cache", {})
        self.post("reset_encoder_cache", {})

    def end(self) -> None:
        """End the process, and wait for it."""
        self._process.terminate()
        self._process.wait(60)


@contextmanager
def vllm_server(
    folder: Path, model: str = str(PRETRAINED_FOLDER), argv: Sequence[str] = ("--dtype", "float32")
) -> Iterator[RunningVLLMServer]:
    """Start a server of `model`, and yield it once it answers; it ends with the block.

    Its log is `server.log` in `folder`. `argv`: further options of vLLM's command.
    """
    server = RunningVLLMServer(folder / "server.log", model, *argv)
    try:
        server.wait()
        yield server
    finally:
        server.end()
