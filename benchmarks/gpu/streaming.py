"""Checks what a LoRA policy sends to its engine.

The policy sends merged tensors, one at a time, into a receiver on the same card.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from adora_vl.rollout.weight_sync import merged_parameters
from adora_vl.utils.files import GIB
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.table import CheckLine, at_most_line, skipped_line, verdict_line
from benchmarks.measure import peak_bytes, run_seconds

# of our recipe
TARGETS = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
]


def run(setting: Setting) -> Iterator[CheckLine]:
    """Send an adapted model's weights to a receiver, and look at errors, memory and seconds."""
    model = setting.model(setting.config("3B", layers=36 if setting.full else 2), torch.bfloat16)
    base = dict(model.named_parameters())
    receiver = {name: torch.empty_like(parameter) for name, parameter in base.items()}
    before = {name: parameter.double().sum().item() for name, parameter in base.items()}
    targets = rf".*language_model.*\.({'|'.join(TARGETS)})"
    config = LoraConfig(r=64 if setting.full else 4, lora_alpha=128, target_modules=targets)
    policy = get_peft_model(model, config)
    # PEFT begins with B = 0, with which the adapter would change nothing.
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)

    peak = peak_bytes(setting.device, lambda: send_weights(policy, receiver))
    largest = max(parameter.numel() for name, parameter in base.items() if _is_adapted(name))
    # The layer's weight, the product B A and the scaled product, in float32. Beside them are the
    # merged weight of the layer before, in float32, and the bfloat16 tensor of it that was sent.
    bound = (4 + 4 + 4 + 4 + 2) * largest
    yield at_most_line(
        "memory beside the policy",
        value=peak / GIB,
        bound=1.1 * bound / GIB,
        unit="GiB",
        source="one layer at a time, in float32",
    )
    spent = run_seconds(setting.device, lambda: send_weights(policy, receiver))
    size = sum(tensor.nbytes for tensor in receiver.values())
    figure = f"{spent:.3g} s for {size / GIB:.3g} GiB"
    yield (
        at_most_line(
            "seconds of a sync",
            value=spent,
            bound=10,
            unit="s",
            source=f"ours: small beside a generation's; {figure}",
        )
        if setting.on_gpu
        else skipped_line("seconds of a sync", "seconds are judged on a GPU only", figure)
    )
    yield at_most_line(
        "sent weights, from float64",
        value=_sync_error(policy, receiver),
        bound=1.01 * 2**-8,
        unit="",
        source="one rounding to bfloat16, and float32's",
    )
    same = sum(parameter.double().sum().item() == before[name] for name, parameter in base.items())
    yield verdict_line(
        "weights that a sync leaves alone",
        f"{same} of {len(base)}",
        "all",
        same == len(base),
        "frozen base",
    )


def _is_adapted(name: str) -> bool:
    return "language_model" in name and name.removesuffix(".weight").endswith(tuple(TARGETS))


def send_weights(policy: PeftModel, receiver: dict[str, Tensor]) -> None:
    """Send weights as `sync_weights` does.

    Raises `KeyError` for a name that the engine would not know.
    """
    missing = set(receiver)
    for name, tensor in merged_parameters(policy, lambda _: nullcontext(), lambda _: True):
        receiver[name].copy_(tensor)
        missing.discard(name)
    assert not missing, f"never sent: {sorted(missing)[:3]}"


def _sync_error(policy: PeftModel, receiver: dict[str, Tensor]) -> float:
    """Return the largest relative error of an element in the sent weights, W + scaling * B A.

    About 14 adapted layers are compared, evenly spread over the model.
    """
    layers: dict[str, Any] = {
        name: module
        for name, module in policy.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }
    every = max(1, len(layers) // 14)
    worst = 0.0
    for name, layer in list(layers.items())[::every]:
        down = layer.lora_A["default"].weight.detach().double()
        up = layer.lora_B["default"].weight.detach().double()
        base = layer.base_layer.weight.detach().double()
        right = base + layer.scaling["default"] * up @ down
        sent = receiver[f"{name.removeprefix('base_model.model.')}.weight"].double()
        # Sums of products cancel in the smallest elements, whose error is large beside them. So no
        # element counts as smaller than a thousandth of the largest one.
        smallest = 1e-3 * float(right.abs().max())
        relative_errors = (sent - right).abs() / right.abs().clamp(min=smallest)
        worst = max(worst, float(relative_errors.max()))
    return worst
