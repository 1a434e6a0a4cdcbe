"""Checkpoints as a run leaves them, without a run."""

import json
from pathlib import Path

from adora_vl.checkpoint import store

FINGERPRINT = {"adora_method.adora.factor": "0.1", "dataset": "abc"}


def write_checkpoint(
    output_dir: Path, step: int, fingerprint: dict[str, str] = FINGERPRINT
) -> Path:
    """Write `checkpoint-STEP` into `output_dir` as a run does, and return its folder.

    It has a model, a file in a subfolder and the trainer's state. `fingerprint`: the settings and
    data by which a resumed run is recognised.
    """
    staged = output_dir / store.STAGING_FOLDER / f"checkpoint-{step}"
    (staged / "global_step").mkdir(parents=True)
    (staged / "model.safetensors").write_bytes(bytes(range(256)) * 20)
    (staged / "global_step" / "shard.pt").write_bytes(b"shard" * step)
    (staged / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    final = output_dir / f"checkpoint-{step}"
    store.publish_checkpoint(
        staged, final, {"step": step, "fingerprint": fingerprint}, written_files=()
    )
    return final
