"""What TRL and Transformers hold in memory during a training, but do not save in a checkpoint.

It is the reference model that `sync_ref_model` moves, and the sums of losses behind the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adora_vl.checkpoint.store import MANIFEST_FILE, manifest_of
from adora_vl.utils.errors import RunError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFERENCE_FOLDER = "reference"  # the folder in a checkpoint
_MAX_FILE_BYTES = 2 * 2**30  # how much of a reference model is held in host memory at a time
_LOSSES_KEY = "losses"  # the key in the manifest


def save_tensors(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write named tensors into safetensors files in a folder, about 2 GiB each.

    The tensors are copied to the CPU one by one, so that host memory holds no more than one file.
    """
    file_number = 1
    tensors_of_file: dict[str, Tensor] = {}
    for name, tensor in tensors:
        tensors_of_file[name] = tensor.detach().to("cpu", copy=True).contiguous()
        file_bytes = sum(copied.nbytes for copied in tensors_of_file.values())
        if file_bytes >= _MAX_FILE_BYTES:
            save_file(tensors_of_file, folder / f"model-{file_number:05}.safetensors")
            file_number += 1
            tensors_of_file = {}
    if tensors_of_file:
        save_file(tensors_of_file, folder / f"model-{file_number:05}.safetensors")


class MovingReference:
    """Saves and loads the reference model that TRL moves towards the policy (`sync_ref_model`).

    TRL itself does not save it. Collective: all ranks call every method together.
    """

    def __init__(self, model: PreTrainedModel, *, moves: bool, is_main: bool, zero3: bool) -> None:
        """Hold TRL's reference model.

        Args:
            model: The reference model, unwrapped; None in a run without one.
            moves: Whether TRL moves it towards the policy. Otherwise it is the base model, and
                needs no saving.
            is_main: Whether this is rank 0.
            zero3: Whether DeepSpeed divides its weights over the ranks.
        """
        self.model = model
        self.moves = moves and model is not None
        self.is_main = is_main
        self.zero3 = zero3

    def _gather(self, parameter: Any, *, is_written: bool = False) -> AbstractContextManager[Any]:
        """Return a context in which a parameter is whole on this rank, also under ZeRO-3.

        `is_written`: whether rank 0 writes the parameter, so that DeepSpeed divides it again.
        """
        if not self.zero3:
            return nullcontext()
        import deepspeed

        writing_rank = 0 if is_written else None
        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=writing_rank)  # type: ignore[no-any-return]

    def save(self, checkpoint: Path) -> None:
        """Write the reference model into a checkpoint, if it moves."""
        if not self.moves:
            return

        def whole_parameters() -> Iterator[tuple[str, Tensor]]:
            for name, parameter in self.model.named_parameters():
                with self._gather(parameter):
                    yield name, parameter.data

        if not self.is_main:
            # Gathering is collective, so that other ranks go through the parameters too.
            for _ in whole_parameters():
                pass
            return
        (checkpoint / REFERENCE_FOLDER).mkdir(parents=True, exist_ok=True)
        save_tensors(whole_parameters(), checkpoint / REFERENCE_FOLDER)

    def load(self, checkpoint: Path) -> None:
        """Load the reference model from a checkpoint.

        Raises `UserError` for a checkpoint without one, `RunError` for one of another model.
        """
        files = sorted((checkpoint / REFERENCE_FOLDER).glob("*.safetensors"))
        if self.moves and not files:
            raise UserError(
                f"resume_from_checkpoint: {str(checkpoint)!r} has no reference model, which "
                "sync_ref_model: true moves at every sync; begin a new run from its weights "
                "(python -m adora_vl.export)"
            )
        if not files or self.model is None:
            return
        # Even if TRL does not move it any more, it differs from the base model, so that it has to
        # be saved again.
        self.moves = True
        remaining_parameters = dict(self.model.named_parameters())
        for file in files:
            with safe_open(file, framework="pt") as saved:
                for name in saved.keys():  # noqa: SIM118  # it is no mapping
                    parameter = remaining_parameters.pop(name, None)
                    if parameter is None:
                        raise RunError(f"{file}: this reference model has no {name}")
                    with self._gather(parameter, is_written=True), torch.no_grad():
                        # Under ZeRO-3 DeepSpeed takes what rank 0 writes.
                        if self.is_main or not self.zero3:
                            parameter.copy_(saved.get_tensor(name))
        if remaining_parameters:
            raise RunError(
                f"{checkpoint / REFERENCE_FOLDER}: {next(iter(remaining_parameters))} of the "
                "reference "
                "model is missing"
            )


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """The sums of losses on one rank, behind the metrics `loss` and `train_loss` of the log.

    Transformers sets them to 0 whenever a process starts, but divides by the steps of the whole
    run. So a checkpoint has them.

    `logged_sum`: of the steps up to the last log. `last_log_step`: the step of that log.
    `unlogged_sum`: of the steps since then, a tensor of shape ().
    """

    logged_sum: float
    last_log_step: int
    unlogged_sum: Tensor

    def facts(self) -> dict[str, Any]:
        """Return the sums as an entry for the facts that a checkpoint's manifest will have.

        `with_all_ranks` replaces it before the manifest is written.
        """
        return {_LOSSES_KEY: self}

    @staticmethod
    def with_all_ranks(facts: dict[str, Any]) -> dict[str, Any]:
        """Return the facts for a manifest, with the loss sums of all ranks instead of this rank's.

        Collective. The value of this rank's tensor is read only here, where a checkpoint is
        written: reading it earlier would have to wait for the GPU.
        """
        sums = facts.get(_LOSSES_KEY)
        if sums is None:
            return facts
        unlogged_sums = gather_object([float(sums.unlogged_sum)])
        losses = {"logged": sums.logged_sum, "since": sums.last_log_step, "rest": unlogged_sums}
        return {**facts, _LOSSES_KEY: losses}


@dataclass(frozen=True, kw_only=True)
class SavedLossSums:
    """The sums of losses of all ranks, as a checkpoint has them.

    `logged_sum` and `last_log_step`: as in `LossSums`. `unlogged_sums`: the sum of the steps since
    the last log, of each rank.
    """

    logged_sum: float
    last_log_step: int
    unlogged_sums: list[float]

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> SavedLossSums | None:
        """Read the sums from a checkpoint; None if it has none, as one that only TRL has written."""
        if not (checkpoint / MANIFEST_FILE).is_file():
            return None
        losses = manifest_of(checkpoint).get(_LOSSES_KEY)
        if losses is None:
            return None
        return cls(
            logged_sum=losses["logged"],
            last_log_step=losses["since"],
            unlogged_sums=losses["rest"],
        )

    def unlogged_sum_of(self, rank: int, ranks: int) -> float:
        """Return the sum of the steps since the last log with which a rank goes on.

        If the checkpoint has another number of ranks, each rank gets the mean of its sums: the log
        has the mean over the ranks, which stays the same.
        """
        if len(self.unlogged_sums) == ranks:
            return self.unlogged_sums[rank]
        return sum(self.unlogged_sums) / len(self.unlogged_sums)


class RestoreLossSums(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Gives a resumed run the sums of losses of its checkpoint, once the training has begun."""

    def __init__(self, put: Callable[[SavedLossSums], None]) -> None:
        """Build the callback. `put` writes the sums into the trainer."""
        self._put = put
        # The sums of the checkpoint, between `load` and the beginning of the training; else None.
        self._sums: SavedLossSums | None = None

    def load(self, checkpoint: Path) -> None:
        """Read the sums from a checkpoint, for `on_train_begin`."""
        self._sums = SavedLossSums.of_checkpoint(checkpoint)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the sums that `load` has read into the trainer, and forget them.

        It cannot be done earlier, since Transformers has just set its own sums to 0.
        """
        sums = self._sums
        self._sums = None
        if sums is not None:
            self._put(sums)
