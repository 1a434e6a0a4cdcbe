"""What `--overwrite_output_dir` replaces is put aside when the new run begins, and deleted at its first checkpoint.

output_dir/.replaced/    the old run's checkpoints, record and model, until then; an `mv` brings them back
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from adora_vl.checkpoint.store import MARK, STAGING, checkpoints

ASIDE = ".replaced"
# What a run writes into its folder. Anything else there is the user's and stays.
_OF_A_RUN = (
    "checkpoint-*", "completions", "rollouts", "merged", "metrics.jsonl", "manifest.json", "stopped.json",
    "trainer_state.json", "training_args.bin", "README.md", "config.json", "generation_config.json", "adapter_*",
    "*.safetensors", "*.safetensors.index.json", "*processor_config.json", "tokenizer*", "chat_template*", "vocab.json",
    "merges.txt", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip

_MADE_BY_TRL = "completions"  # once, when the trainer is built: before the old run is put aside


def holds_a_run(output_dir: Path) -> bool:
    """Whether the folder holds work that a new run would replace: a checkpoint or a finished model."""
    return bool(checkpoints(output_dir)) or (output_dir / "trainer_state.json").is_file()


def of_a_run(output_dir: Path) -> list[Path]:
    """What is in the folder under the names of what a run writes."""
    return sorted({path for pattern in _OF_A_RUN for path in output_dir.glob(pattern)})


def foreign(output_dir: Path) -> Path | None:
    """A file or folder that a run would write over, in a folder that holds no run: a model, data, a project.

    An empty folder is none: TRL makes one for its tables before anything of the run is written.
    """
    found = [path for path in of_a_run(output_dir) if not path.is_dir() or any(path.iterdir())]
    return found[0] if found and not holds_a_run(output_dir) and not _begun(output_dir) else None


def _begun(output_dir: Path) -> bool:
    """Whether a training command has begun here, even if it came to no checkpoint."""
    try:
        manifest = json.loads((output_dir / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("made_by") == "adora_vl.train"


def set_aside(output_dir: Path) -> str | None:
    """Move the old run out of the way by renaming. Returns where it is now, or None if there was no run.

    No start resumes from the run that was put aside, even if the new run ends before its first checkpoint. What such an
    unfinished run has left is deleted by the next call; the old run is kept. One process calls this.
    """
    aside = output_dir / ASIDE
    if any((checkpoint / MARK).is_file() for checkpoint in checkpoints(output_dir)):
        shutil.rmtree(aside, ignore_errors=True)  # an earlier run, which a crash has left here
    keep_older = aside.is_dir()
    target = output_dir / STAGING / "dropped" if keep_older else aside
    for path in of_a_run(output_dir):
        target.mkdir(parents=True, exist_ok=True)
        path.rename(target / path.name)
        if path.name == _MADE_BY_TRL:
            path.mkdir()
    if keep_older:
        shutil.rmtree(target, ignore_errors=True)
    return str(aside) if aside.is_dir() else None


def delete_aside(output_dir: Path) -> None:
    """Delete the old run. Called when the new one has a checkpoint to resume from."""
    shutil.rmtree(output_dir / ASIDE, ignore_errors=True)
