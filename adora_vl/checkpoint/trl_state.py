"""What libraries hold in memory at a step and save nowhere: a reference model that moves, and the
sums of losses.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adora_vl.checkpoint.store import MANIFEST, facts_of
from adora_vl.utils.errors import RunError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFERENCE = "reference"  # the folder in a checkpoint
_FILE_BYTES = 2 * 2**30  # what is held in memory at a time
_LOSSES = "losses"  # the key in the manifest


def save_tensors(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write named tensors into files that are a little larger than `_FILE_BYTES`.

    The tensors are copied one by one, so that no more than one file of them is in host memory.
    """
    files: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors:
        files[-1][name] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(saved.nbytes for saved in files[-1].values()) >= _FILE_BYTES:
            save_file(files[-1], folder / f"model-{len(files):05}.safetensors")
            files[-1:] = [{}, {}]
    if files[-1]:
        save_file(files[-1], folder / f"model-{len(files):05}.safetensors")


class MovingReference:
    """The reference model of `sync_ref_model`, which TRL moves towards the policy but never saves.

    Collective: all ranks call every method together.
    """

    def __init__(
        self, model: "PreTrainedModel", *, moves: bool, is_main: bool, zero3: bool
    ) -> None:
        """Hold TRL's reference model.

        `model`: unwrapped, or None. `moves`: whether it is synced; one that is not is the base
        model, and needs no saving. `is_main`: whether this is rank 0. `zero3`: whether its weights
        are divided over the ranks.
        """
        self.model = model
        self.moves = moves and model is not None
        self.is_main = is_main
        self.zero3 = zero3

    def _whole(self, parameter: Any, *, changes: bool = False) -> AbstractContextManager[Any]:
        """Return a context in which a parameter is whole, for writing where it `changes`."""
        if not self.zero3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if changes else None)  # type: ignore[no-any-return]

    def save(self, checkpoint: Path) -> None:
        """Write the reference model into a checkpoint, if it moves."""
        if not self.moves:
            return

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, parameter in self.model.named_parameters():
                with self._whole(parameter):
                    yield name, parameter.data

        if not self.is_main:
            deque(tensors(), maxlen=0)
            return
        (checkpoint / REFERENCE).mkdir(parents=True, exist_ok=True)
        save_tensors(tensors(), checkpoint / REFERENCE)

    def load(self, checkpoint: Path) -> None:
        """Load the reference model from a checkpoint.

        Raises `UserError` for a checkpoint without one, `RunError` for one of another model.
        """
        files = sorted((checkpoint / REFERENCE).glob("*.safetensors"))
        lacks = (
            f"resume_from_checkpoint: {str(checkpoint)!r} has no reference model, which "
            "sync_ref_model: true moves"
        )
        if self.moves and not files:
            raise UserError(
                f"{lacks} at every sync; begin a new run from its weights (python -m "
                "adora_vl.export)"
            )
        if not files or self.model is None:
            return
        # Even if it is not synced any more, it is not the base model, so it has to be saved again.
        self.moves = True
        parameters = dict(self.model.named_parameters())
        for file in files:
            with safe_open(file, framework="pt") as saved:
                for name in saved.keys():  # noqa: SIM118  # it is no mapping
                    parameter = parameters.pop(name, None)
                    if parameter is None:
                        raise RunError(f"{file}: this reference model has no {name}")
                    with self._whole(parameter, changes=True), torch.no_grad():
                        if self.is_main or not self.zero3:
                            parameter.copy_(saved.get_tensor(name))
        if parameters:
            raise RunError(
                f"{checkpoint / REFERENCE}: {next(iter(parameters))} of the reference model is "
                "missing"
            )


class Losses(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """The sums behind the figures `loss` and `train_loss`, for runs that resume.

    Transformers sets them to 0 at every start, but divides them by the steps since the first.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._before: dict[str, Any] | None = None

    def now(self) -> dict[str, Any]:
        """Return the sums for the manifest, those of this rank alone until `of_all_ranks`."""
        trainer = self.trainer
        # the attribute exists once the training has begun
        if not hasattr(trainer, "_tr_loss"):
            return {}
        since = trainer._globalstep_last_logged
        # It stays a tensor until it is written, because its value would have to wait for the device.
        rest = trainer._tr_loss.detach().clone()
        return {_LOSSES: {"logged": trainer._total_loss_scalar, "since": since, "rest": rest}}

    @staticmethod
    def of_all_ranks(facts: dict[str, Any]) -> dict[str, Any]:
        """Return `facts` with the sums of all ranks in place of this rank's. Collective."""
        losses = facts.get(_LOSSES)
        if losses is None:
            return facts
        rest_by_rank = gather_object([float(losses["rest"])])
        return {**facts, _LOSSES: {**losses, "rest": rest_by_rank}}

    def load(self, checkpoint: Path) -> None:
        """Read the sums from a checkpoint of ours; they are restored when the training begins."""
        self._before = None
        if (checkpoint / MANIFEST).is_file():
            self._before = facts_of(checkpoint).get(_LOSSES)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the sums that `load` has read."""
        before = self._before
        self._before = None
        if before is None:
            return
        rest = before["rest"]
        trainer = self.trainer
        # With another number of ranks each one gets the mean, whose sum over ranks is the same.
        if len(rest) == trainer.accelerator.num_processes:
            rest_of_rank = rest[trainer.accelerator.process_index]
        else:
            rest_of_rank = sum(rest) / len(rest)
        trainer._tr_loss += rest_of_rank
        trainer._total_loss_scalar = before["logged"]
        trainer._globalstep_last_logged = before["since"]
