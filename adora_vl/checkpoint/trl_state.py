"""What TRL and Transformers hold in memory during a training, but do not save in a checkpoint.

It is the reference model that `sync_ref_model` moves, and the sums of losses behind the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.serialization import STORAGE
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adora_vl.checkpoint.store import MANIFEST_FILE, read_checkpoint_manifest
from adora_vl.models.load import GatherParameters, gathered_parameters
from adora_vl.utils.errors import RunError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

REFERENCE_FOLDER = "reference"  # the folder in a checkpoint
_MAX_FILE_BYTES = 2 * 2**30  # how much of a reference model is held in host memory at a time
LOSSES_KEY = "losses"  # the key in the manifest


@cache
def load_to_numbered_cpus() -> None:
    """Let `torch.load` take a numbered CPU, such as `cpu:0`, for its `map_location`.

    Of several processes without DeepSpeed each loads the optimizer's state to its own device
    (`Trainer._load_optimizer_and_scheduler`). On a CPU accelerate numbers that device, and torch
    restores nothing to `cpu:0`. Here the storage stays where it was read, which is on the CPU.
    """

    def restore(storage: STORAGE, location: str) -> STORAGE | None:
        return storage if location.startswith("cpu:") else None

    # torch asks the registered functions in the order of their numbers, and its own come first. No
    # storage is saved under such a location, so the function that would name it returns None.
    torch.serialization.register_package(1000, lambda storage: None, restore)


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


class SyncedReferenceModel:
    """Saves and loads the reference model that TRL moves towards the policy (`sync_ref_model`).

    TRL itself does not save it. Collective: all ranks call every method together.
    """

    def __init__(
        self, model: PreTrainedModel, *, moves: bool, is_main: bool, gather: GatherParameters
    ) -> None:
        """Hold TRL's reference model.

        Args:
            model: The reference model, unwrapped; None in a run without one.
            moves: Whether TRL moves it towards the policy. Otherwise it is the base model, and
                needs no saving.
            is_main: Whether this is rank 0.
            gather: A context manager in which parameters that ZeRO-3 shards can be read whole.
        """
        self.model = model
        self.moves = moves and model is not None
        self.is_main = is_main
        self.gather = gather

    def save(self, checkpoint: Path) -> None:
        """Write the reference model into a checkpoint, if it moves."""
        if not self.moves:
            return

        def whole_parameters() -> Iterator[tuple[str, Tensor]]:
            """Yield each parameter by name, gathered from all ranks. Collective."""
            for name, parameter in self.model.named_parameters():
                with self.gather([parameter]):
                    yield name, parameter.data

        if not self.is_main:  # this rank writes nothing, but takes part in the gathering
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
        # This reference model differs from the base model, even if TRL does not move it any more.
        # So it has to be saved again.
        self.moves = True
        remaining_parameters = dict(self.model.named_parameters())
        for file in files:
            with safe_open(file, framework="pt") as saved:
                for name in saved.keys():  # noqa: SIM118  # it is no mapping
                    parameter = remaining_parameters.pop(name, None)
                    if parameter is None:
                        raise RunError(f"{file}: this reference model has no {name}")
                    with gathered_parameters([parameter]), torch.no_grad():
                        parameter.copy_(saved.get_tensor(name))
        if remaining_parameters:
            raise RunError(
                f"{checkpoint / REFERENCE_FOLDER}: {next(iter(remaining_parameters))} of the "
                "reference model is missing"
            )


class LossSums(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Saves and restores the sums of losses behind the metrics `loss` and `train_loss` of the log.

    Transformers sets them to 0 whenever a process starts, but divides by the steps of the whole
    run.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Hold the trainer, whose sums are read and written."""
        self._trainer = trainer
        # What `load` has read, until the training begins; else None.
        self._loaded: dict[str, Any] | None = None

    def metadata(self) -> dict[str, Any]:
        """Return the sums of this rank for the manifest of a checkpoint; none before the training.

        `with_all_ranks` replaces them by the sums of all ranks before the manifest is written.
        """
        trainer = self._trainer
        if not hasattr(trainer, "_tr_loss"):
            return {}
        sums = {
            "logged": trainer._total_loss_scalar,  # of the steps up to the last log
            "since": trainer._globalstep_last_logged,  # the step of that log
            # The sum over the steps since then. It stays a tensor until it is written, since
            # reading its value waits for the device.
            "rest": trainer._tr_loss.detach().clone(),
        }
        return {LOSSES_KEY: sums}

    @staticmethod
    def with_all_ranks(metadata: dict[str, Any]) -> dict[str, Any]:
        """Return the metadata for a manifest, with the sums since the last log of all ranks.

        Collective. `metadata`: what the manifest says of the run, with the sums of this rank.
        """
        sums = metadata.get(LOSSES_KEY)
        if sums is None:
            return metadata
        sum_of_rank = float(sums["rest"])
        sums_of_ranks = gather_object([sum_of_rank])
        return {**metadata, LOSSES_KEY: {**sums, "rest": sums_of_ranks}}

    def load(self, checkpoint: Path) -> None:
        """Read the sums from a checkpoint, for `on_train_begin`.

        A checkpoint that only TRL has written has none.
        """
        if (checkpoint / MANIFEST_FILE).is_file():
            self._loaded = read_checkpoint_manifest(checkpoint).get(LOSSES_KEY)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let Transformers go on from the sums that `load` has read.

        It cannot be done earlier, since Transformers has just set its own sums to 0.
        """
        sums = self._loaded
        self._loaded = None
        if sums is None:
            return
        trainer = self._trainer
        rank = trainer.accelerator.process_index
        ranks = trainer.accelerator.num_processes
        unlogged_sums = sums["rest"]  # of the steps since the last log, by rank
        trainer._tr_loss += _unlogged_loss_sum_for_rank(unlogged_sums, rank, ranks)
        trainer._total_loss_scalar = sums["logged"]
        trainer._globalstep_last_logged = sums["since"]


def _unlogged_loss_sum_for_rank(sums: Sequence[float], rank: int, ranks: int) -> float:
    """Return the sum of losses since the last log with which a rank goes on.

    With as many ranks as before, each rank goes on with its own sum. With another number, each rank
    gets the mean of the sums, so that the mean over the ranks, which is logged, stays the same. For
    example, sums of (1, 3) give 2 to each of three ranks.

    `sums`: the sums of the checkpoint's ranks.
    """
    if len(sums) == ranks:
        return sums[rank]
    return sum(sums) / len(sums)
