"""`adora_vl.train` with an observer: every process also writes down how far the engine is from the trainer by position.

The run itself is unchanged. Into `SLICE_DRIFT`, a folder, goes `rank-N.jsonl`: a line per comparison of a micro-batch,
with the absolute differences in nats at each place of the answer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from adora_vl.train import main


def observe(folder: Path) -> None:
    from adora_vl.guards import DriftGuard

    check = DriftGuard.check
    file = folder / f"rank-{os.environ.get('RANK', '0')}.jsonl"
    file.unlink(missing_ok=True)

    def observed(self: Any, logps_BC: Any, sampling_BC: Any, mask_BC: Any, step: int) -> None:
        gaps_BC = (logps_BC - sampling_BC).abs().float()
        columns = [gaps_BC[mask_BC[:, place].bool(), place].tolist() for place in range(gaps_BC.shape[1])]
        with file.open("a") as stream:
            stream.write(json.dumps({"step": step, "gaps": columns, "surprise": -sampling_BC.nanmean().item()}) + "\n")
        check(self, logps_BC, sampling_BC, mask_BC, step)

    DriftGuard.check = observed  # type: ignore[method-assign]


if __name__ == "__main__":
    from adora_vl.rollout.environment import prepare_engine_environment

    prepare_engine_environment()
    observe(Path(os.environ["SLICE_DRIFT"]))
    sys.exit(main())
