"""Checkpoints as a run leaves them, without a run."""

import json
from collections.abc import Sequence
from pathlib import Path

from adora_vl.checkpoint import store
from adora_vl.checkpoint.resume import InputFolder, StartPoint, choose_start_point

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


def start_of_run(
    output_dir: Path,
    *,
    resume_from: object = None,
    overwrite: bool = False,
    fingerprint: dict[str, str] = FINGERPRINT,
    input_folders: Sequence[InputFolder] = (),
) -> StartPoint:
    """Return where a run starts, by default one with the fingerprint of `write_checkpoint`.

    Args:
        output_dir: the run's folder.
        resume_from: the key `resume_from_checkpoint`.
        overwrite: the key `overwrite_output_dir`.
        fingerprint: the settings and data of the run.
        input_folders: the folders that the run reads.
    """
    return choose_start_point(
        output_dir,
        resume_from_checkpoint=resume_from,
        overwrite=overwrite,
        run_fingerprint=fingerprint,
        input_folders=input_folders,
    )
