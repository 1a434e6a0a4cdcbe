"""The launcher, which started this process: how it stops its children, and what happens when it is gone.

`accelerate launch` starts a single process directly. On SIGTERM it then dies and leaves its child alone. It starts
several processes through torch's elastic launcher, which passes the signal on, waits, and kills what is left.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping

_WATCH_S = 1.0
_SHUTDOWN_TIMEOUT = "shutdown_timeout"  # torchrun's option, which accelerate takes from `deepspeed_config` of its file
_SHUTDOWN_VARIABLES = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT")
TOO_SHORT = (
    "The launcher kills all processes 30 seconds after SIGTERM, Ctrl-C or SIGHUP, before a checkpoint is saved: start "
    "it as `TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600 accelerate launch ...` (seconds)"
)


def under_elastic(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torch's elastic launcher started this process. It passes SIGTERM, SIGINT and SIGHUP on."""
    return "TORCHELASTIC_RUN_ID" in environment


def under_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `accelerate launch` or `torchrun` started this process. A shell with nohup is no launcher."""
    return under_elastic(environment) or "ACCELERATE_DYNAMO_MODE" in environment


def kills_too_early(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher waits only torch's default of 30 seconds after a signal, as far as its children can know."""
    if not under_elastic(environment) or any(name in environment for name in _SHUTDOWN_VARIABLES):
        return False
    return _SHUTDOWN_TIMEOUT not in environment.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")


def watch_launcher() -> None:
    """Send this process SIGHUP when its launcher is gone, as the system does when a terminal is gone.

    Before the training, SIGHUP ends the process; during the training, the run is saved first. Without a launcher
    nothing is watched: a process under nohup outlives its shell. PR_SET_PDEATHSIG is not used, because it fires when a
    *thread* of the parent ends.
    """
    if under_launcher():
        threading.Thread(target=_hang_up_without, args=(os.getppid(),), name="launcher-watch", daemon=True).start()


def _hang_up_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup was put before the launcher
    os.kill(os.getpid(), signal.SIGTERM if ignored else signal.SIGHUP)
