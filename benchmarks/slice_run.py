"""`adora_vl.train` with an observer: every process also writes down its memory, and how far the engine is from it.

The run itself is unchanged. Into the folder that `SLICE_SEEN` names goes `rank-N.jsonl`, a line per comparison of a
micro-batch with the absolute differences in nats at each place of the answer, and `rank-N.memory.json`, peaks in bytes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from adora_vl.train import main

SECONDS = 0.05


def memory(field: str) -> int:
    """A field of this process's status in bytes. `RssAnon` leaves out mapped files, such as weights that are read."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class ProcessPeak:
    """The most anonymous memory since the last `take`, looked at every 50 milliseconds."""

    def __init__(self) -> None:
        self._peak, self._end = 0, threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._end.wait(SECONDS):
            self._peak = max(self._peak, memory("RssAnon"))

    def take(self) -> int:
        peak, self._peak = max(self._peak, memory("RssAnon")), 0
        return peak


def observe(folder: Path, rank: str) -> None:
    from adora_vl.guards import DriftGuard
    from adora_vl.trainer import AdoraGRPOTrainer

    check, train, watch = DriftGuard.check, AdoraGRPOTrainer.train, ProcessPeak()
    libraries = memory("RssAnon")
    gaps_file = folder / f"rank-{rank}.jsonl"

    def checked(self: Any, logps_BC: Any, sampling_BC: Any, mask_BC: Any, step: int) -> None:
        gaps_BC = (logps_BC - sampling_BC).abs().float()
        columns = [gaps_BC[mask_BC[:, place].bool(), place].tolist() for place in range(gaps_BC.shape[1])]
        with gaps_file.open("a") as stream:
            stream.write(json.dumps({"step": step, "gaps": columns}) + "\n")
        check(self, logps_BC, sampling_BC, mask_BC, step)

    def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = watch.take()
        try:
            return train(self, *args, **kwargs)
        finally:
            peaks = {"libraries": libraries, "start": start, "training": watch.take(), "resident": memory("VmHWM")}
            (folder / f"rank-{rank}.memory.json").write_text(json.dumps(peaks))

    DriftGuard.check = checked  # type: ignore[method-assign]
    AdoraGRPOTrainer.train = trained


if __name__ == "__main__":
    from adora_vl.rollout.environment import prepare_engine_environment

    prepare_engine_environment()
    observe(Path(os.environ["SLICE_SEEN"]), os.environ.get("RANK", "0"))
    sys.exit(main())
