"""Two machines for tests of `setup/ssh/train.sh`, played on this one.

Where network namespaces may be made, each machine is one, with a cable between them; else both are
names of this machine. They have names, disks and processes of their own, and are reached by `ssh`,
which is a script of ours.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from adora_vl.record.metrics import METRICS_FILE, read_metrics
from tests.support.launch import pids_marked_with
from tests.support.paths import REPOSITORY

_DEADLINE_S = 600  # for anything that a run does
_CABLE_INTERFACE = "cable0"  # the network interface of each machine
# The script that stands in for `ssh`: its arguments are an option, the name of a machine and a
# command, which one of the two scripts below runs.
_SSH_STAND_IN = """#!/bin/bash
shift 2  # -o BatchMode=yes
export TEST_MACHINE="$TEST_MARK-$1"
"""
_RUN_ON_THIS_MACHINE = 'exec setsid -w bash -c "$2"\n'
_RUN_IN_NAMESPACE = """
exec setsid -w ip netns exec "$1" unshare --uts --mount bash -c '
  hostname "$1" || exit
  if [ -d "$TEST_DISKS/$1" ]; then mount --bind "$TEST_DISKS/$1" "$TEST_OUTPUT" || exit; fi
  exec bash -c "$2"
' machine "$1" "$2"
"""


def _run_ip(*argv: str) -> bool:
    """Run the command `ip`, and tell whether it succeeded."""
    return subprocess.run(["ip", *argv], capture_output=True, check=False).returncode == 0


def namespaces() -> set[str]:
    """Return the names of this machine's network namespaces."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=False
    ).stdout
    return {line.split()[0] for line in listed.splitlines()}


def _remove_orphans() -> None:
    """Delete what killed test runs have left: a name has the id of the process that made it."""
    for name in namespaces():
        name_parts = re.fullmatch(r"(?:one|two)-(\d+)-[0-9a-f]{6}", name)
        if name_parts and not Path("/proc", name_parts[1]).exists():
            _run_ip("netns", "del", name)


class TwoMachines:
    """Two machines that see the same files.

    With namespaces, `disks` may hold a folder for a machine's name, which that machine sees at the
    place of `output_dir`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Every process of the test has it in its environment, so that it can be found and ended.
        self.mark = uuid.uuid4().hex
        self.hosts = [f"{name}-{os.getpid()}-{self.mark[:6]}" for name in ("one", "two")]
        self.disks = folder / "disks"
        may_make_namespaces = os.geteuid() == 0 and shutil.which("ip") is not None
        self.has_namespaces = may_make_namespaces and self._connect_namespaces()

    def _connect_namespaces(self) -> bool:
        """Make two namespaces with a cable between them, and tell whether that succeeded."""
        first, second = self.hosts
        _remove_orphans()
        has_succeeded = all(_run_ip("netns", "add", host) for host in self.hosts)
        cable = [
            "link",
            "add",
            _CABLE_INTERFACE,
            "netns",
            first,
            "type",
            "veth",
            "peer",
            "name",
            _CABLE_INTERFACE,
            "netns",
            second,
        ]
        has_succeeded = has_succeeded and _run_ip(*cable)
        for number, host in enumerate(self.hosts, 1):
            has_succeeded = has_succeeded and _run_ip(
                "-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", _CABLE_INTERFACE
            )
            has_succeeded = has_succeeded and all(
                _run_ip("-n", host, "link", "set", link, "up") for link in ("lo", _CABLE_INTERFACE)
            )
        return has_succeeded

    def __enter__(self) -> TwoMachines:
        self.folder.mkdir(parents=True, exist_ok=True)
        ssh = self.folder / "ssh"
        ssh.write_text(
            _SSH_STAND_IN + (_RUN_IN_NAMESPACE if self.has_namespaces else _RUN_ON_THIS_MACHINE)
        )
        ssh.chmod(0o755)
        return self

    def __exit__(self, *error: object) -> None:
        self.kill(self.mark)
        for host in self.hosts:
            _run_ip("netns", "del", host)

    @contextlib.contextmanager
    def running(
        self, config: str, output_dir: Path, argv: list[str]
    ) -> Iterator[subprocess.Popen[str]]:
        """Run `setup/ssh/train.sh` with a process on each machine inside the block.

        Args:
            config: the file of an accelerate config.
            output_dir: the run folder.
            argv: further arguments of the training command.
        """
        with socket.socket() as probe:  # free here, so most likely there
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "HOSTS": " ".join(self.hosts),
            "PROCESSES_PER_NODE": "1",
            "PORT": str(port),
            "MAIN_IP": "10.77.0.1" if self.has_namespaces else "127.0.0.1",
            "ACCELERATE_CONFIG": config,
            "LAUNCH": str(Path(sys.executable).parent / "accelerate"),
            "TEST_MARK": self.mark,
            "GRACE": "60",
            "ENVIRONMENT": f"GLOO_SOCKET_IFNAME={_CABLE_INTERFACE}" if self.has_namespaces else "",
            "TOKENIZERS_PARALLELISM": "false",
            "TEST_DISKS": str(self.disks),
            "TEST_OUTPUT": str(output_dir),
        }
        with (self.folder / "output.txt").open("w") as log:
            process = subprocess.Popen(
                ["bash", "setup/ssh/train.sh", *argv, "--output_dir", str(output_dir)],
                cwd=REPOSITORY,
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                self.kill(self.mark)
                process.wait()

    def wait_for_step(self, process: subprocess.Popen[str], output_dir: Path, step: int) -> None:
        """Wait until the run has logged the step.

        A run that ends or hangs before it fails the test.
        """
        end = time.monotonic() + _DEADLINE_S
        while not any(line["step"] >= step for line in read_metrics(output_dir / METRICS_FILE)):
            assert process.poll() is None, (
                f"ended with {process.returncode}:\n{self.output[-5000:]}"
            )
            assert time.monotonic() < end, (
                f"no step {step} within {_DEADLINE_S} s:\n{self.output[-3000:]}"
            )
            time.sleep(0.2)

    @property
    def output(self) -> str:
        """Return what both machines have printed since the last start."""
        return (self.folder / "output.txt").read_text(errors="replace")

    def kill_machine(self, number: int) -> None:
        """End every process of a machine, as a loss of its power does."""
        self.kill(f"TEST_MACHINE={self.mark}-{self.hosts[number]}")

    @staticmethod
    def kill(mark: str) -> None:
        """Send SIGKILL to every process that has the text `mark` in its environment."""
        for pid in pids_marked_with(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
