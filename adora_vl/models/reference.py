"""The reference model of a KL term (`beta` above 0) is the policy as the run was given it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from peft import PeftConfig

# Initialisations of PEFT that change the base's weights to make up for the adapter's initial ones.
# The base without the adapter is then no longer the policy that the run starts from. A name may go
# on, as in `pissa_niter_4`.
_INITIALISATIONS_THAT_CHANGE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga", "orthogonal")


def check_adapter_start(peft_config: PeftConfig, beta: float, *, is_new: bool) -> None:
    """Raise `UserError` if a KL term's reference would not be the policy that the run starts from.

    The reference is the base without the adapter. So a new adapter has to change nothing at first,
    and its initialisation must not change the base.

    Args:
        peft_config: that of the adapter.
        beta: coefficient of the KL term; 0 needs no reference.
        is_new: whether the run makes the adapter. The reference of one that is trained further is
            a copy of it, which PEFT initialises in the same way before it gets the weights.
    """
    initialisation = getattr(peft_config, "init_lora_weights", True)
    changes_base = isinstance(initialisation, str) and initialisation.lower().startswith(
        _INITIALISATIONS_THAT_CHANGE_BASE
    )
    # False: both matrices are drawn, and neither is 0.
    is_random = initialisation is False and is_new
    if not beta or not (changes_base or is_random):
        return
    if changes_base:
        fault = "takes the adapter's start out of the base's weights"
    else:
        fault = "draws an adapter that changes the answers"
    raise UserError(
        f"init_lora_weights: {initialisation} with beta: {beta:g} {fault}, so the base, which is "
        "the reference, is not the policy that the run starts from; set it to true, or beta: 0"
    )


def check_can_be_copied(model: PreTrainedModel, beta: float) -> None:
    """Raise `UserError` for a model object that cannot be copied as the reference of a KL term.

    `beta`: coefficient of the term. The reference of a `PeftModel` is its base, so no copy is made.
    """
    # ZeRO-3 gives every parameter that it shards this attribute.
    is_sharded = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    if beta and is_sharded and not hasattr(model, "peft_config"):
        raise UserError(
            f"model: an object that DeepSpeed has divided cannot be copied for the reference of "
            f"beta: {beta:g}; save it and give the name of its folder, or set beta: 0"
        )


def copy_policy(model: PreTrainedModel, *_: Any, **__: Any) -> PreTrainedModel:
    """Return a frozen copy of a model object, as the reference of a KL term.

    It stands in for TRL's function that loads the reference from a folder, whose further arguments
    it ignores.
    """
    reference = copy.deepcopy(model)
    # An earlier trainer may have replaced methods of the object. Such a function would compute with
    # the weights of `model`, so each module gets the methods of its class back.
    for module in reference.modules():
        for name, value in list(vars(module).items()):
            replaces_method = callable(value) and hasattr(type(module), name)
            if replaces_method:
                del vars(module)[name]
    reference.requires_grad_(False)
    return reference.eval()
