"""What `--overwrite_output_dir` replaces: put aside when the new run begins, deleted when it has a checkpoint.

output_dir/.replaced/    the old run's checkpoints, record and model, until then; an `mv` brings them back
"""

from __future__ import annotations

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


def holds_a_run(output_dir: Path) -> bool:
    """Whether there is work of a run in it that a new one would replace: a checkpoint, or a model that was finished."""
    return bool(checkpoints(output_dir)) or (output_dir / "trainer_state.json").is_file()


def set_aside(output_dir: Path) -> str | None:
    """Move the old run out of the new one's way, by renames. Returns where it is; None where there was none.

    It does not count any more: a new run that ends before its first checkpoint starts anew and does not go on from the
    old one. What such a run has left is dropped here, not the old one's. One process calls this.
    """
    aside = output_dir / ASIDE
    if any((checkpoint / MARK).is_file() for checkpoint in checkpoints(output_dir)):
        shutil.rmtree(aside, ignore_errors=True)  # of a run before this one, which a crash has left
    keep_older = aside.is_dir()
    target = output_dir / STAGING / "dropped" if keep_older else aside
    found = sorted({path for pattern in _OF_A_RUN for path in output_dir.glob(pattern)})
    for path in found:
        target.mkdir(parents=True, exist_ok=True)
        path.rename(target / path.name)
    if keep_older:
        shutil.rmtree(target, ignore_errors=True)
    return str(aside) if aside.is_dir() else None


def delete_aside(output_dir: Path) -> None:
    """The new run has what a start can go on from, so the old one goes."""
    shutil.rmtree(output_dir / ASIDE, ignore_errors=True)
