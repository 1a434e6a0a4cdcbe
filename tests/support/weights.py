"""How far the weights of two models are from each other."""

import torch


def mean_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The mean difference of two models' weights."""
    return sum((one[name] - other[name]).abs().sum().item() for name in one) / sum(
        t.numel() for t in one.values()
    )
