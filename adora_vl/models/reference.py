"""The reference model of a KL term (`beta` above 0) is the policy as the run was given it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from peft import PeftConfig

# Initialisations of PEFT that take an adapter's start out of the base's weights, so that the base
# without the adapter is no longer the policy's start. Names may go on, as `pissa_niter_4` does.
_CHANGE_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga", "orthogonal")


def check_adapter_start(peft_config: PeftConfig, beta: float, *, is_new: bool) -> None:
    """Raise `UserError` for an adapter of whose start a run would have no reference.

    `is_new`: whether the run makes the adapter. Its reference is the base without the adapter; that
    of an adapter that goes on is a copy, which PEFT makes by the same initialisation first.
    """
    start = getattr(peft_config, "init_lora_weights", True)
    changes_base = isinstance(start, str) and start.lower().startswith(_CHANGE_THE_BASE)
    is_drawn = start is False and is_new
    if not beta or not (changes_base or is_drawn):
        return
    if changes_base:
        why = "takes the adapter's start out of the base's weights"
    else:
        why = "draws an adapter that changes the answers"
    raise UserError(
        f"init_lora_weights: {start} with beta: {beta:g} {why}, so the base, which is the "
        "reference, is not the policy that the run starts from; set it to true, or beta: 0"
    )


def check_copied(model: PreTrainedModel, beta: float) -> None:
    """Raise `UserError` for a model object that cannot be copied as the reference."""
    is_divided = any(hasattr(parameter, "ds_id") for parameter in model.parameters())  # ZeRO-3
    if beta and is_divided and not hasattr(model, "peft_config"):
        raise UserError(
            f"model: an object that DeepSpeed has divided cannot be copied for the reference of "
            f"beta: {beta:g}; save it and give the name of its folder, or set beta: 0"
        )


def copied_policy(model: PreTrainedModel, *_: Any, **__: Any) -> PreTrainedModel:
    """Return a copy of a model object, with nothing of what has been put upon it, as a reference.

    A trainer before may have left functions on the object, which would compute with its weights
    instead of the copy's. Further arguments are those of TRL's function that reads a folder.
    """
    copied = copy.deepcopy(model)
    for module in copied.modules():
        for name, value in list(vars(module).items()):
            if callable(value) and hasattr(type(module), name):
                del vars(module)[name]
    copied.requires_grad_(False)
    return copied.eval()
