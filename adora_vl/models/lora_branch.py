"""How the branch of an adapter is computed: in which order with its base, and in which dtype.

The order: gradient checkpointing computes a layer again only until it has every tensor that the
backward pass reads. Stock PEFT adds the adapter's branch after the base product, and the branch
keeps tensors, so the base product is computed again though nobody reads it. With the branch first
the base product is the last operation, and is left out: a quarter of a recomputed layer's work.

The dtype: stock PEFT casts the input of an adapter to float32, which its weights have, and autocast
casts it back for the product. Both casts are exact, so they change no number. But each adapter
writes and reads its input twice more, and keeps a copy of its own for the backward pass, where the
adapters of `q_proj`, `k_proj` and `v_proj` could share one tensor.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from adora_vl.models.families import LANGUAGE_MODEL, component_of
from adora_vl.utils import compat
from adora_vl.utils.versions import installed_version, is_tested, tested_versions

if TYPE_CHECKING:
    from peft.tuners.lora.layer import Linear

_LAST_PRODUCT_NAME = "down_proj"  # of a decoder layer, in every family


def untested_peft_notes() -> list[str]:
    """Return a note, of one line, if an installed PEFT is none of the tested versions.

    Its layers are not changed then: `forward_branch_first` repeats what the tested versions do, and
    another one may do more.
    """
    peft_version = installed_version("peft")
    if peft_version is None or is_tested("peft", peft_version):
        return []
    return [
        f"peft {peft_version} is installed, and an adapter's products are computed in its way: a "
        f"step takes longer; pip install 'peft{tested_versions()['peft']}'"
    ]


def compute_branches_first(model: nn.Module) -> None:
    """Compute the adapter's branch before the base product in the last product of each layer.

    Gradient checkpointing then need not compute that base product again. The layers are those of
    the language model that have a plain adapter on a weight that is not quantised. With a PEFT that
    was not tested none is changed, of which `untested_peft_notes` tell.
    """
    if untested_peft_notes():
        return
    from peft.tuners.lora.layer import Linear

    for name, module in model.named_modules():
        is_last = name.endswith(_LAST_PRODUCT_NAME) and component_of(name) == LANGUAGE_MODEL
        # A subclass, such as that of a base in 4 bits, has a forward of its own.
        if is_last and type(module) is Linear:
            compat.LORA_PRODUCT.install(partial(forward_branch_first, module), on=module)


def forward_branch_first(layer: "Linear", x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Compute an adapted layer like PEFT's `Linear.forward`, with the adapter's branch first.

    Stock PEFT computes the base product first. The sum is the same. If there is not just one plain
    adapter (but several, a merged, disabled or DoRA one, or further arguments), PEFT computes it.
    """
    active_names = layer.active_adapters
    name = active_names[0] if len(active_names) == 1 else None
    is_plain = name in layer.lora_A and name not in layer.lora_variant
    is_at_work = not layer.disable_adapters and not layer.merged
    if args or kwargs or not is_at_work or not is_plain:
        peft_output: Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return peft_output
    lora_A = layer.lora_A[name]
    inputs = layer._cast_input_dtype(x, lora_A.weight.dtype)
    low_rank_values = lora_A(layer.lora_dropout[name](inputs))
    branch = layer.lora_B[name](low_rank_values) * layer.scaling[name]
    base_product = layer.base_layer(x)
    output: Tensor = (base_product + branch).to(base_product.dtype)
    return output


def leave_casts_to_autocast(model: nn.Module) -> None:
    """Let plain adapters leave their inputs as they are where autocast casts to their dtype.

    PEFT's layers over a base in 4 bits do so. An adapter's outputs and gradients stay the same to
    the bit. With a PEFT that was not tested no layer is changed, of which `untested_peft_notes`
    tell.
    """
    if untested_peft_notes():
        return
    from peft.tuners.lora.layer import Linear

    for module in model.modules():
        if type(module) is Linear and not module.lora_variant:
            compat.LORA_INPUT.install(partial(input_for_adapter, module), on=module)


def input_for_adapter(layer: "Linear", x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the input of an adapter's first product like PEFT's `_cast_input_dtype`.

    Stock PEFT always casts it to `dtype`, that of the adapter's weights. Here an input that has
    autocast's dtype stays as it is, because autocast would cast it back.
    """
    device_type = x.device.type
    is_autocast = torch.is_autocast_enabled(device_type)
    if is_autocast and x.dtype == torch.get_autocast_dtype(device_type):
        return x
    cast_input: Tensor = type(layer)._cast_input_dtype(layer, x, dtype)
    return cast_input
