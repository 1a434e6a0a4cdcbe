"""A worker process of the pool: `python -m adora_vl.rewards.worker PARENT_PID MEMORY_BYTES`; jobs on standard input.

It limits itself, so that it ends even if nobody is left to kill it: its memory, the processor time of each job, no
files, and it ends when its parent does. It needs sympy and nothing heavier, and starts in about half a second.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

from adora_vl.rewards.wire import ClosedError, pack, receive

_WATCH_S = 1.0
_CPU_SLACK_S = 1  # beyond the deadline; the pool kills by the clock, this is for when the pool is gone


def main(arguments: list[str]) -> int:
    """Announce readiness, then answer one job after the other until standard input closes."""
    parent, memory = (int(argument) for argument in arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the trainer ends its workers
        signal.signal(number, signal.SIG_IGN)
    output = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # whatever a library prints must not get between the messages
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(256 * 1024)  # counts as memory
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()

    from adora_vl.rewards.symbolic import compare

    # sympy imports the half of itself on first use: that belongs to the start, not to a job's deadline
    compare(("call", "sin", ("num", "30")), ("root", 2, ("sum", (1, ("num", "2")), (1, ("unknown", "x")))))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # after the imports, which may write byte code
    os.write(output, pack("ready"))
    try:
        while True:
            job = receive(0)
            _limit_cpu(job["seconds"])
            answer = _answer(compare, job)
            os.write(output, pack(answer))
            if answer == "memory":
                return 1
    except (ClosedError, BrokenPipeError):
        return 0


def _answer(compare: Any, job: dict[str, Any]) -> str:
    try:
        return str(compare(job["answer"], job["gold"]))
    except MemoryError:
        return "memory"
    except Exception:  # whatever sympy makes of an odd expression is an answer too, not the end of the worker
        return "undecided"


def _limit_cpu(seconds: float) -> None:
    """SIGXCPU ends the process when this job has had its deadline's processor time and some more."""
    used = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + seconds) + _CPU_SLACK_S, hard))


def _end_with(parent: int) -> None:
    """End this process when its parent is gone.

    Not PR_SET_PDEATHSIG, which fires when the *thread* that started the worker ends. A closed standard input is not
    enough: during a job nobody reads it, and a forked child of the trainer may hold its other end.
    """
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
