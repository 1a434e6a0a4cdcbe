"""What a run needs from outside Python: programs on PATH, one GPU a process, a driver that is new enough."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from adora_vl.doctor.machine import check_compilers, check_driver
from adora_vl.doctor.result import Status
from adora_vl.errors import RunError
from adora_vl.rollout.environment import free_port, put_own_programs_on_path, use_one_gpu


@pytest.mark.parametrize("path", ["/usr/bin:/bin", "", None])
def test_programs_of_an_environment_that_was_not_activated_are_found(monkeypatch, tmp_path, path):
    """DeepSpeed asks for `ninja` by name, as this child process does for a program beside the interpreter."""
    program = tmp_path / "bin" / "ninja"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho own ninja\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program.parent / "python"))
    monkeypatch.delenv("PATH") if path is None else monkeypatch.setenv("PATH", path)
    for _ in range(2):  # the engine's environment may be prepared more than once
        put_own_programs_on_path()
    assert subprocess.run(["ninja"], capture_output=True, text=True, check=True).stdout == "own ninja\n"
    assert os.environ["PATH"].split(os.pathsep).count(str(program.parent)) == 1


@pytest.mark.parametrize(
    ("visible", "processes", "taken"),
    [(None, "1", "0"), ("3", "1", "3"), ("2,3", "1", "2"), ("", "1", ""), ("2,3", "2", "2,3"), (None, "4", None)],
)
def test_a_single_process_takes_the_first_gpu_that_the_user_shows_it(monkeypatch, visible, processes, taken):
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    use_one_gpu()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == taken


def test_no_accelerate_config_overrides_the_users_choice_of_a_gpu(repository: Path):
    for file in (repository / "configs" / "accelerate").glob("*.yaml"):
        assert "gpu_ids" not in yaml.safe_load(file.read_text()), file.name


@pytest.mark.parametrize(
    ("missing", "needed", "status", "remedy"),
    [
        ((), True, Status.PASSED, ""),
        (("ninja",), True, Status.FAILED, "pip install ninja"),
        (("c++", "g++"), True, Status.FAILED, "apt-get install g++"),
        (("c++",), True, Status.PASSED, ""),
        (("ninja", "c++", "g++"), False, Status.SKIPPED, ""),
    ],
)
def test_programs_that_deepspeed_compiles_with(missing, needed, status, remedy):
    check = check_compilers(needed=needed, find=lambda name: None if name in missing else f"/bin/{name}")
    assert check.status is status and remedy in check.remedy


@pytest.mark.parametrize(
    ("cuda", "driver", "status"),
    [
        (None, None, Status.SKIPPED),
        ("13.0", None, Status.SKIPPED),
        ("13.0", "570.133.20", Status.FAILED),
        ("13.0", "580.65.06", Status.PASSED),
        ("13.2", "600.1", Status.PASSED),
    ],
)
def test_a_driver_that_is_too_old_for_torch(cuda, driver, status):
    assert check_driver(cuda=cuda, driver=driver).status is status


def test_a_port_is_free_and_no_connection_will_be_given_it(monkeypatch):
    ports = {free_port() for _ in range(20)}
    ends = Path("/proc/sys/net/ipv4/ip_local_port_range")
    low = int(ends.read_text().split()[0]) if ends.exists() else 32_768
    assert len(ports) > 10 and max(ports) < low
    with socket.socket() as taken, socket.socket() as other:
        taken.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        used, free = taken.getsockname()[1], other.getsockname()[1]
        other.close()
        monkeypatch.setattr(random.SystemRandom, "sample", lambda self, ports, count: [used, free])
        assert free_port() == free
        monkeypatch.setattr(random.SystemRandom, "sample", lambda self, ports, count: [used])
        with pytest.raises(RunError, match="set MASTER_PORT to one that is"):
            free_port()
