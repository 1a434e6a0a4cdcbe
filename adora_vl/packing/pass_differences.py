"""What makes two forward passes over the same tokens differ: rounding of a dtype, and dropout."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def rounding_bound(dtype: torch.dtype) -> float:
    """Return how far two passes over the same tokens may differ by rounding alone.

    The number is the largest mean difference of log-probabilities, in nats: 1e-5 for float32, and
    0.05 for float16 and bfloat16.
    """
    return 1e-5 if torch.finfo(dtype).bits >= 32 else 0.05


def computing_dtype(accelerator: Accelerator, model: "PreTrainedModel") -> torch.dtype:
    """Return the dtype that the model's passes compute in: autocast's, else that of the weights."""
    device = accelerator.device.type
    with accelerator.autocast():
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


def has_dropout(model: nn.Module) -> bool:
    """Return whether the model has dropout, so that two passes over the same tokens differ."""
    config = getattr(model, "config", None)
    text_config = config.get_text_config() if config is not None else None
    # attention dropout is an argument of the kernel and no module
    if getattr(text_config, "attention_dropout", 0.0):
        return True
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode inside the block, so that it has no dropout.

    After the block it is in the mode that it was in before.
    """
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
