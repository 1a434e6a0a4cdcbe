"""LoRA weights for the engine: merged copies, never a merge in place.

Merging an adapter into bfloat16 weights and subtracting it again does not give the same weights. After a few hundred
syncs the frozen base has drifted, and with it the reference policy, which is the base without its adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

Gather = Callable[[Iterable[nn.Parameter]], AbstractContextManager[Any]]


def _adapted_layers(model: Any) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def can_merge(model: Any) -> bool:
    """Whether every adapter is plain LoRA, `W + B A`. DoRA and other adapters are left to peft's own merging."""
    from peft.tuners.lora import LoraLayer

    return all(
        isinstance(layer, LoraLayer) and not any(layer.use_dora.get(name) for name in layer.active_adapters)
        for layer in _adapted_layers(model).values()
    )


def merged_parameters(
    model: Any, gather: Gather, wanted: Callable[[str], bool], changed_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yields `(Transformers name, tensor)` of a `PeftModel`, one tensor at a time. Adapters are added in float32 to a
    copy, so the model itself is not changed.

    `gather` makes sharded parameters whole, so every rank has to iterate. `changed_only`: leave out tensors that have
    no adapter and are not trained.
    """
    layers = _adapted_layers(model)
    for name, parameter in model.named_parameters():
        plain = (
            name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".modules_to_save.default", "")
        )
        if model.prefix in name or ".original_module." in name or not wanted(plain):
            continue
        owner, _, kind = name.rpartition(".base_layer.")
        layer: Any = layers.get(owner) if kind == "weight" else None
        adapters = [a for a in layer.active_adapters if a in layer.lora_A] if layer is not None else []
        if changed_only and not adapters and not parameter.requires_grad:
            continue
        factors = [p for a in adapters for p in (*layer.lora_A[a].parameters(), *layer.lora_B[a].parameters())]
        with gather([parameter, *factors]):
            tensor = parameter.data
            if adapters:
                delta = sum(layer.get_delta_weight(adapter).float() for adapter in adapters)
                tensor = (tensor.float() + delta).to(tensor.dtype)
            yield plain, tensor.detach()
