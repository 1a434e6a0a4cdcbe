"""DeepSpeed checkpoints for another number of processes.

In these each parameter is whole, with its optimizer state.
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

from adora_vl.checkpoint.store import MANIFEST, MARK, facts_of, seal
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replacing_folder

if TYPE_CHECKING:
    from transformers import Trainer

LATEST = "latest_universal"  # DeepSpeed's own name; holds the name of the folder beside it
_SHARDS = "global_step*"
# environment variables that torch reads when it unpickles
_FORCE_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_FORCE_ALSO_CODE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@contextlib.contextmanager
def without_code(checkpoint: Path | str) -> Iterator[None]:
    """Keep unpickling from running code inside the block, whatever a caller asks for.

    It makes tensors, plain values and the classes that checkpoints of DeepSpeed 0.19 have. Raises
    `UserError` for a file that asks for more.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = {name: os.environ.pop(name, None) for name in (_FORCE_WEIGHTS_ONLY, _FORCE_ALSO_CODE)}
    os.environ[_FORCE_WEIGHTS_ONLY] = "1"
    try:
        with torch.serialization.safe_globals(
            [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
        ):
            yield
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        name = match[1] if match else "more than tensors"
        raise UserError(
            f"checkpoint: {str(checkpoint)!r} asks for {name}, which no run has written, and which "
            "may run a stranger's code; use a checkpoint of your own"
        ) from error
    finally:
        del os.environ[_FORCE_WEIGHTS_ONLY]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def load_shards(engine: Any, checkpoint: str, **options: Any) -> None:
    """Load a checkpoint of DeepSpeed as Transformers does, but `without_code`."""
    from transformers.integrations.deepspeed import deepspeed_load_checkpoint

    with without_code(checkpoint):
        deepspeed_load_checkpoint(engine, checkpoint, **options)


def is_universal(checkpoint: Path) -> bool:
    """Return whether a checkpoint can be loaded by any number of processes."""
    return (checkpoint / LATEST).is_file()


def shards_of(checkpoint: Path) -> Path | None:
    """Return the folder with DeepSpeed's file of each rank.

    None for a checkpoint without DeepSpeed, or a universal one.
    """
    shard_folders = sorted(checkpoint.glob(_SHARDS))
    if is_universal(checkpoint) or not shard_folders:
        return None
    return shard_folders[0]


def write_universal(checkpoint: Path, output: Path) -> None:
    """Write a whole checkpoint with the content of `checkpoint`, for any number of processes.

    DeepSpeed's converter reads the shards with pickle, hence `without_code`: hashes say that a
    checkpoint is whole, and not who made it.

    Args:
        checkpoint: one that DeepSpeed has written.
        output: the folder to write, complete or not at all.

    Raises `UserError` where there are no shards to convert, or they ask for code.
    """
    shards = shards_of(checkpoint)
    if shards is None:
        remedy = f"go on from it with --resume_from_checkpoint {checkpoint}"
        raise UserError(
            f"RUN: {str(checkpoint)!r} has no shards of DeepSpeed, so it needs no conversion; "
            f"{remedy}"
        )
    from deepspeed.checkpoint.ds_to_universal import main as convert

    with replacing_folder(output) as staged:
        left_out = shutil.ignore_patterns(_SHARDS, MANIFEST, MARK, "latest", "zero_to_*.py")
        shutil.copytree(checkpoint, staged, ignore=left_out, dirs_exist_ok=True)
        target = staged / f"{shards.name}_universal"
        target.mkdir()
        options = argparse.Namespace(
            input_folder=str(shards),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        with contextlib.redirect_stdout(sys.stderr), without_code(checkpoint):
            convert(options)
        facts = {key: value for key, value in facts_of(checkpoint).items() if key != "files"}
        seal(staged, facts)


def expect_universal(trainer: Trainer) -> None:
    """Have DeepSpeed read the universal folder.

    Call it before `trainer.train`. Raises `UserError` without it.
    """
    launch = "accelerate launch --num_processes 1 with the config of before"
    needs = (
        "resume_from_checkpoint: a universal checkpoint needs DeepSpeed, also for one process: "
        f"{launch}"
    )
    if not trainer.is_deepspeed_enabled:
        raise UserError(needs)
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
    config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
    trainer.add_callback(_GroupsAsBefore())


class _GroupsAsBefore(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Corrects what DeepSpeed 0.19 mixes up when ZeRO-3 loads a universal checkpoint.

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
        """Restore weight decay and Adam steps of each group before the first step."""
        for number, group in enumerate(optimizer.param_groups):
            group["weight_decay"] = args.weight_decay if number == 0 else 0.0
        for moments in optimizer.state.values():
            if isinstance(moments.get("step"), torch.Tensor):
                moments["step"] = moments["step"].clone()
