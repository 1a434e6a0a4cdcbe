"""A vLLM server: the recipe's path for three generations, with a sync before each, by files and by
NCCL.

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

from adora_vl.utils.launch import find_cpu_build, free_port
from benchmarks.gpu.cards import CARDS
from benchmarks.gpu.engine import COLD, GENERATIONS, arguments, generations, recipe_words
from benchmarks.gpu.setting import WRONG_BUILD, Setting
from benchmarks.gpu.table import Line, failed, skipped

_LOOPBACK = "127.0.0.1"
_LENGTH = "2048"  # of `arguments`


def run(setting: Setting) -> Iterator[Line]:
    if setting.on_gpu and find_cpu_build():
        yield WRONG_BUILD
        return
    card_count = torch.cuda.device_count() if setting.on_gpu else 0
    first, second = cards(os.environ, card_count)
    yield from _synced(setting, way="file", trainer=first, server=second)
    if card_count < CARDS:
        yield skipped("weights by nccl", f"NCCL needs {CARDS} cards, here is {card_count}")
        return
    yield from _synced(setting, way="nccl", trainer=first, server=second)


def _synced(setting: Setting, way: str, trainer: str, server: str) -> Iterator[Line]:
    """Three generations. `trainer`, `server`: the cards on which each is."""
    title = f"weights by {way}, {GENERATIONS} generations"
    dtype = "bfloat16" if setting.on_gpu else "float32"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = free_port()
        words = [
            *arguments(setting, dtype, folder),
            *recipe_words(setting, folder),
            "--vllm_mode",
            "server",
        ]
        words += [
            "--vllm_server_base_url",
            f"http://{_LOOPBACK}:{port}",
            "--adora_weight_transfer",
            way,
        ]
        words += ["--vllm_enable_sleep_mode", "false"]
        address = {"VLLM_HOST_IP": _LOOPBACK}  # where NCCL's weights are handed over
        server_environment = {
            "VLLM_SERVER_DEV_MODE": "1",
            "CUDA_VISIBLE_DEVICES": server,
            **address,
        }
        try:
            with serving(
                server_words(folder / "model", port=port, way=way, dtype=dtype),
                environment=server_environment,
                port=port,
                seconds=COLD[setting.on_gpu],
            ):
                trainer_environment = {"CUDA_VISIBLE_DEVICES": trainer, **address}
                yield from generations(
                    title, words, dtype, folder / "run-server", trainer_environment
                )
        except ServerError as error:
            yield failed(title, str(error))


def cards(environment: Mapping[str, str], found: int) -> tuple[str, str]:
    """The cards of trainer and server, by the names that `CUDA_VISIBLE_DEVICES` has for them: the
    same if it is the only one.
    """
    named = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")]
    return named[0], named[1 if found >= CARDS else 0]


def server_words(model: Path, port: int, way: str, dtype: str) -> list[str]:
    """What is started in Python's place for `-m`."""
    keys = {
        "model": model,
        "host": _LOOPBACK,
        "port": port,
        "generation-config": "vllm",
        "dtype": dtype,
        "max-model-len": _LENGTH,
        "gpu-memory-utilization": 0.3,
        "logprobs-mode": "raw_logprobs",
    }
    named = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    if way == "nccl":
        named += ["--weight-transfer-config", '{"backend": "nccl"}']
    if find_cpu_build():
        # it cannot read a prompt with a seed in parts
        named += [
            "--enforce-eager",
            "--no-enable-chunked-prefill",
        ]
    return ["vllm.entrypoints.openai.api_server", *named, "--enable-scale-out"]


class ServerError(Exception):
    """The server ended, or did not answer in time; the message has its last line."""


@contextmanager
def serving(
    words: Sequence[str], environment: Mapping[str, str], port: int, seconds: float
) -> Iterator[None]:
    """Inside, the module answers to `/health`; at the end it is ended. Raises `ServerError`."""
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
        )
        try:
            end = time.monotonic() + seconds
            while not _healthy(port):
                if server.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    last = log.read().decode(errors="replace").strip().splitlines()[-1:] or [
                        "no output"
                    ]
                    outcome = (
                        f"exit code {server.returncode}"
                        if server.returncode is not None
                        else f"after {seconds:g} s"
                    )
                    raise ServerError(f"the server does not answer, {outcome}: {last[0][:300]}")
                time.sleep(0.2)
            yield
        finally:
            server.kill()  # what it has started ends with the group of this check
            server.wait()


def _healthy(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://{_LOOPBACK}:{port}/health", timeout=5).close()
    except OSError:
        return False
    return True
