"""Checks of a vLLM server: three generations of the recipe, synced by files and by NCCL.

The first sync sends everything, and the later ones rely on it, so a fault shows from the second
generation on. Files need one card, or none; NCCL needs a second one for the server.
`docs/rollouts.md` has the same server for people.
"""

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from adora_vl.utils.launch import free_port, has_vllm_cpu_build
from benchmarks.gpu.cards import NUMBER_OF_CARDS
from benchmarks.gpu.engine import (
    ENGINE_START_SECONDS,
    GENERATIONS_TRAINED,
    generation_lines,
    recipe_arguments,
    train_arguments,
)
from benchmarks.gpu.setting import WRONG_BUILD, Setting
from benchmarks.gpu.table import CheckLine, failed_line, skipped_line

_LOOPBACK = "127.0.0.1"
_MAX_MODEL_LENGTH = "2048"  # as `train_arguments` has it


def run(setting: Setting) -> Iterator[CheckLine]:
    """Train against a server, with weights by files, and by NCCL where there is a second card."""
    if setting.on_gpu and has_vllm_cpu_build():
        yield WRONG_BUILD
        return
    card_count = torch.cuda.device_count() if setting.on_gpu else 0
    trainer_card, server_card = cards(os.environ, card_count)
    yield from _server_lines(setting, way="file", trainer=trainer_card, server=server_card)
    if card_count < NUMBER_OF_CARDS:
        yield skipped_line(
            "weights by nccl", f"NCCL needs {NUMBER_OF_CARDS} cards, here is {card_count}"
        )
        return
    yield from _server_lines(setting, way="nccl", trainer=trainer_card, server=server_card)


def _server_lines(setting: Setting, way: str, trainer: str, server: str) -> Iterator[CheckLine]:
    """Train three generations against a server, on the cards `trainer` and `server`.

    These are values of CUDA_VISIBLE_DEVICES. `way` is how weights go to the server: `file` or
    `nccl`.
    """
    title = f"weights by {way}, {GENERATIONS_TRAINED} generations"
    dtype = "bfloat16" if setting.on_gpu else "float32"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = free_port()
        arguments = [
            *train_arguments(setting, dtype, folder),
            *recipe_arguments(setting, folder),
            "--vllm_mode",
            "server",
        ]
        arguments += [
            "--vllm_server_base_url",
            f"http://{_LOOPBACK}:{port}",
            "--adora_weight_transfer",
            way,
        ]
        arguments += ["--vllm_enable_sleep_mode", "false"]
        address = {"VLLM_HOST_IP": _LOOPBACK}  # where NCCL's weights are handed over
        server_environment = {
            "VLLM_SERVER_DEV_MODE": "1",
            "CUDA_VISIBLE_DEVICES": server,
            **address,
        }
        try:
            with running_server(
                server_arguments(folder / "model", port=port, way=way, dtype=dtype),
                environment=server_environment,
                port=port,
                seconds=ENGINE_START_SECONDS[setting.on_gpu],
            ):
                trainer_environment = {"CUDA_VISIBLE_DEVICES": trainer, **address}
                yield from generation_lines(
                    title, arguments, dtype, folder / "run-server", trainer_environment
                )
        except ServerError as error:
            yield failed_line(title, str(error))


def cards(environment: Mapping[str, str], card_count: int) -> tuple[str, str]:
    """Return the cards of trainer and server, by the names in `CUDA_VISIBLE_DEVICES`.

    Both are the same card if it is the only one.
    """
    card_names = [
        name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    ]
    server_index = 1 if card_count >= NUMBER_OF_CARDS else 0
    return card_names[0], card_names[server_index]


def server_arguments(model: Path, port: int, way: str, dtype: str) -> list[str]:
    """Return the module of the server and its options, which follow `python -m`."""
    keys = {
        "model": model,
        "host": _LOOPBACK,
        "port": port,
        "generation-config": "vllm",
        "dtype": dtype,
        "max-model-len": _MAX_MODEL_LENGTH,
        "gpu-memory-utilization": 0.3,
        "logprobs-mode": "raw_logprobs",
    }
    options = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    if way == "nccl":
        options += ["--weight-transfer-config", '{"backend": "nccl"}']
    if has_vllm_cpu_build():
        # It cannot read a prompt with a seed in parts
        options += [
            "--enforce-eager",
            "--no-enable-chunked-prefill",
        ]
    return ["vllm.entrypoints.openai.api_server", *options, "--enable-scale-out"]


class ServerError(Exception):
    """The server ended, or did not answer in time; the message has its last line."""


@contextmanager
def running_server(
    arguments: Sequence[str], environment: Mapping[str, str], port: int, seconds: float
) -> Iterator[None]:
    """Run a server inside the block, where it answers to `/health`, and end it after.

    Raises `ServerError` where it ends, or does not answer within `seconds`.
    """
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
        )
        try:
            deadline = time.monotonic() + seconds
            while not _is_healthy(port):
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    printed_lines = log.read().decode(errors="replace").strip().splitlines()
                    last_line = printed_lines[-1] if printed_lines else "no output"
                    outcome = (
                        f"exit code {server.returncode}"
                        if server.returncode is not None
                        else f"after {seconds:g} s"
                    )
                    raise ServerError(f"the server does not answer, {outcome}: {last_line[:300]}")
                time.sleep(0.2)
            yield
        finally:
            server.kill()  # what it has started ends with the group of this check
            server.wait()


def _is_healthy(port: int) -> bool:
    """Return whether the server at a port answers to `/health`."""
    try:
        urllib.request.urlopen(f"http://{_LOOPBACK}:{port}/health", timeout=5).close()
    except OSError:
        return False
    return True
