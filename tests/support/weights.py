"""How far the weights of two models are from each other."""

import torch


def mean_weight_difference(
    first_weights: dict[str, torch.Tensor], second_weights: dict[str, torch.Tensor]
) -> float:
    """Return the mean absolute difference of two models' weights, which have the same names."""
    total_difference = 0.0
    total_count = 0
    for name, first_weight in first_weights.items():
        difference = first_weight - second_weights[name]
        total_difference += difference.abs().sum().item()
        total_count += first_weight.numel()
    return total_difference / total_count
