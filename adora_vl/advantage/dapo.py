"""The parts of DAPO that concern advantages. Its loss, clip-higher and overlong filtering are keys of TRL.

Source: arXiv 2503.14476, section 3.2 (dynamic sampling) and 3.4 (soft overlong punishment).
"""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """The term that is added to the reward (equation 13): 0 up to `max_length - cache` tokens, then falling to -1 at
    `max_length`.
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"overlong_cache: {cache} must be above 0 and at most max_completion_length: {max_length}")
    return ((max_length - cache - lengths.to(torch.float32)) / cache).clamp(-1.0, 0.0)


def drop_constant(advantages: Tensor, tokens: Tensor, constant: Tensor) -> Tensor:
    """Scale the advantages so that TRL's token mean is taken over the groups that have a signal.

    DAPO samples until a batch is full of groups that are neither all right nor all wrong. Here the dropped groups are
    not replaced: the batch becomes smaller, and the mean is taken over the tokens that are left.

    Args:
        advantages: (P, G). Those of constant groups are 0.
        tokens: (P, G), number of tokens that the loss counts.
        constant: (P,), bool: the group has no signal.

    Returns:
        (P, G).
    """
    left = torch.where(constant[:, None], 0.0, tokens.to(torch.float32)).sum()
    return advantages * (tokens.sum() / left) if bool(left > 0) else advantages
