"""What libraries hold in memory at a step and save nowhere.

It is a reference model that moves, and the sums of losses.
"""

from collections import deque
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

from adora_vl.checkpoint.store import MANIFEST, facts_of
from adora_vl.utils.errors import RunError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFERENCE = "reference"  # the folder in a checkpoint
_FILE_BYTES = 2 * 2**30  # how much of a reference model is held in host memory at a time
_LOSSES = "losses"  # the key in the manifest


def save_tensors(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write named tensors into files that are a little larger than `_FILE_BYTES`.

    The tensors are copied one by one, so that no more than one file of them is in host memory.
    """
    file_number = 1
    tensors_of_file: dict[str, Tensor] = {}
    for name, tensor in tensors:
        tensors_of_file[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(copied.nbytes for copied in tensors_of_file.values()) >= _FILE_BYTES:
            save_file(tensors_of_file, folder / f"model-{file_number:05}.safetensors")
            file_number += 1
            tensors_of_file = {}
    if tensors_of_file:
        save_file(tensors_of_file, folder / f"model-{file_number:05}.safetensors")


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


@dataclass(frozen=True)
class LossSums:
    """The sums behind the figures `loss` and `train_loss`.

    Transformers sets them to 0 at every start, but divides them by the steps since the first.
    """

    logged: float  # of the steps up to the last log
    since: int  # the step of the last log
    # of the steps since, (): of this rank; a list has those of all ranks
    rest: Tensor | list[float]

    @staticmethod
    def of_all_ranks(facts: dict[str, Any]) -> dict[str, Any]:
        """Return a manifest's facts with the sums of all ranks in place of this rank's. Collective.

        The value of a rank's tensor is waited for here, where a checkpoint is written, and not at
        the beginning of the step that the facts are of.
        """
        sums = facts.get(_LOSSES)
        if sums is None:
            return facts
        rest_by_rank = gather_object([float(sums.rest)])
        return {
            **facts,
            _LOSSES: {"logged": sums.logged, "since": sums.since, "rest": rest_by_rank},
        }

    def facts(self) -> dict[str, Any]:
        """Return the sums as a fact for the manifest, which `of_all_ranks` completes."""
        return {_LOSSES: self}

    def of_rank(self, rank: int, ranks: int) -> float:
        """Return the rest that a rank goes on from.

        With another number of ranks than the checkpoint's each one gets the mean, whose sum over
        the ranks is the same.
        """
        assert isinstance(self.rest, list)
        if len(self.rest) == ranks:
            return self.rest[rank]
        return sum(self.rest) / len(self.rest)


class RestoreLossSums(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Gives a resumed run the sums of losses of its checkpoint, once the training has begun."""

    def __init__(self, put: Callable[[LossSums], None]) -> None:
        """Build the callback. `put` writes the sums into the trainer."""
        self._put = put
        self._sums: LossSums | None = None

    def load(self, checkpoint: Path) -> None:
        """Read the sums from a checkpoint of ours."""
        self._sums = None
        if not (checkpoint / MANIFEST).is_file():
            return
        sums = facts_of(checkpoint).get(_LOSSES)
        if sums is not None:
            self._sums = LossSums(**sums)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the sums that `load` has read.

        Transformers has just set its own to 0.
        """
        sums = self._sums
        self._sums = None
        if sums is not None:
            self._put(sums)
