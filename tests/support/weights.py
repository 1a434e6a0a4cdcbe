"""How far the weights of two models are from each other."""

import torch


def mean_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The mean difference of two models' weights."""
    return sum((first[name] - second[name]).abs().sum().item() for name in first) / sum(
        t.numel() for t in first.values()
    )
