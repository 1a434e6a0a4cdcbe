"""DeepSpeed's universal checkpoints, which any number of processes can load.

In a usual checkpoint of DeepSpeed each process has a shard of its own. In a universal one each
parameter is whole, with its optimizer state.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle  # for its error alone
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adora_vl.checkpoint.store import (
    COMPLETE_FILE,
    MANIFEST_FILE,
    mark_checkpoint_complete,
    read_checkpoint_manifest,
)
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replacing_folder

if TYPE_CHECKING:
    from transformers import Trainer

# DeepSpeed's own name; holds the name of the folder beside it
LATEST_UNIVERSAL_FILE = "latest_universal"
_SHARD_FOLDER_PATTERN = "global_step*"
# environment variables that torch reads when it unpickles
_WEIGHTS_ONLY_VARIABLE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_ALSO_CODE_VARIABLE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@contextlib.contextmanager
def refusing_pickled_code(checkpoint: Path | str) -> Iterator[None]:
    """Inside the `with` block, keep `torch.load` from running code that a checkpoint contains.

    DeepSpeed unpickles its checkpoints, and a pickle may run any code. Inside the block a pickle
    can only contain tensors, plain values and the classes that checkpoints of DeepSpeed 0.19 have,
    even if a caller passes `weights_only=False`.

    `checkpoint`: the checkpoint, for the error. Raises `UserError` for a file that contains more.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    stage_by_name = ZeroStageEnum.__members__

    def zero_stage(enumeration: object, name: str) -> ZeroStageEnum:
        """Return the stage of ZeRO that a pickle asks `getattr` for; refuse everything else."""
        if enumeration is not ZeroStageEnum or name not in stage_by_name:
            raise pickle.UnpicklingError("GLOBAL builtins.getattr is used for more than a stage")
        return stage_by_name[name]

    values_before = {
        name: os.environ.pop(name, None) for name in (_WEIGHTS_ONLY_VARIABLE, _ALSO_CODE_VARIABLE)
    }
    os.environ[_WEIGHTS_ONLY_VARIABLE] = "1"
    try:
        allowed_globals = [
            LossScaler,
            DynamicLossScaler,
            ZeroStageEnum,
            fragment_address,
            # Early versions of Python 3.11, such as Debian's 3.11.2, pickle a member of an
            # enumeration as `getattr(ZeroStageEnum, "weights")`.
            (zero_stage, "builtins.getattr"),
        ]
        with torch.serialization.safe_globals(allowed_globals):
            yield
    except pickle.UnpicklingError as error:
        # torch's error names the class or function that the pickle asks for.
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        name = match[1] if match else "more than tensors"
        raise UserError(
            f"checkpoint: {str(checkpoint)!r} asks for {name}, which no run has written, and which "
            "may run a stranger's code; use a checkpoint of your own"
        ) from error
    finally:
        del os.environ[_WEIGHTS_ONLY_VARIABLE]
        for name, value in values_before.items():
            if value is not None:
                os.environ[name] = value


def load_shards(engine: Any, checkpoint: str, **options: Any) -> None:
    """Load a checkpoint into a DeepSpeed engine as Transformers does, but run no code from it."""
    from transformers.integrations.deepspeed import deepspeed_load_checkpoint

    with refusing_pickled_code(checkpoint):
        deepspeed_load_checkpoint(engine, checkpoint, **options)


def is_universal(checkpoint: Path) -> bool:
    """Return whether a DeepSpeed checkpoint can be loaded by any number of processes."""
    return (checkpoint / LATEST_UNIVERSAL_FILE).is_file()


def shard_folder_of(checkpoint: Path) -> Path | None:
    """Return the folder in a checkpoint with DeepSpeed's shards, one or more files of each rank.

    None for a checkpoint without DeepSpeed, and for a universal one.
    """
    shard_folders = sorted(checkpoint.glob(_SHARD_FOLDER_PATTERN))
    if is_universal(checkpoint) or not shard_folders:
        return None
    return shard_folders[0]


def write_universal(checkpoint: Path, output: Path) -> None:
    """Convert a DeepSpeed checkpoint to one that any number of processes can load.

    Args:
        checkpoint: A checkpoint with a shard for each process.
        output: The folder to write. It appears when it is complete.

    Raises `UserError` if there are no shards to convert, or if they contain code.
    """
    shards = shard_folder_of(checkpoint)
    if shards is None:
        raise UserError(
            f"RUN: {str(checkpoint)!r} has no shards of DeepSpeed, so it needs no conversion; "
            f"go on from it with --resume_from_checkpoint {checkpoint}"
        )
    from deepspeed.checkpoint.ds_to_universal import main as convert

    with replacing_folder(output) as staged:
        # Everything is copied but the shards, and the manifest and the mark, which are written
        # anew.
        left_out = shutil.ignore_patterns(
            _SHARD_FOLDER_PATTERN, MANIFEST_FILE, COMPLETE_FILE, "latest", "zero_to_*.py"
        )
        shutil.copytree(checkpoint, staged, ignore=left_out, dirs_exist_ok=True)
        universal_folder = staged / f"{shards.name}_universal"
        universal_folder.mkdir()
        options = argparse.Namespace(
            input_folder=str(shards),
            output_folder=str(universal_folder),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        # The converter unpickles the shards. Even a checkpoint with the right hashes may be a
        # stranger's, so no code in it may run.
        with contextlib.redirect_stdout(sys.stderr), refusing_pickled_code(checkpoint):
            convert(options)
        metadata = {
            key: value
            for key, value in read_checkpoint_manifest(checkpoint).items()
            if key != "files"
        }
        mark_checkpoint_complete(staged, metadata)


def expect_universal_checkpoint(trainer: Trainer) -> None:
    """Configure DeepSpeed to load a universal checkpoint, before `trainer.train` loads it.

    Raises `UserError` for a run without DeepSpeed.
    """
    if not trainer.is_deepspeed_enabled:
        raise UserError(
            "resume_from_checkpoint: a universal checkpoint needs DeepSpeed, also for one process: "
            "accelerate launch --num_processes 1 with the config of before"
        )
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
    config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
    trainer.add_callback(_RestoreParameterGroups())


# Transformers is untyped to mypy.
class _RestoreParameterGroups(TrainerCallback):  # type: ignore[misc]
    """Corrects two faults of DeepSpeed 0.19 when ZeRO-3 loads a universal checkpoint.

    Every group of parameters gets the first group's weight decay, so norms and biases would decay
    too. (Transformers makes two groups: with decay, and without.) And all groups share one tensor
    as their Adam step, which each of them advances.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Give each group of parameters its own weight decay and Adam step again.

        DeepSpeed has given all groups the same when it loaded the checkpoint.
        """
        # Transformers puts the parameters with weight decay into the first group.
        for number, group in enumerate(optimizer.param_groups):
            group["weight_decay"] = args.weight_decay if number == 0 else 0.0
        for adam_state in optimizer.state.values():
            if isinstance(adam_state.get("step"), torch.Tensor):
                adam_state["step"] = adam_state["step"].clone()
