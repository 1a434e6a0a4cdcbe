"""The ratio of policy to engine, in the modes of TRL."""

from __future__ import annotations

import math

import pytest
import torch

from adora_vl.rollout.importance import importance_ratio

RATIOS = {
    "token_truncate": [[2.0, 0.5, 1.0], [1.0, 0.25, 1.0]],
    "token_mask": [[0.0, 0.5, 1.0], [1.0, 0.25, 1.0]],
    "sequence_truncate": [[2.0], [0.25]],
    "sequence_mask": [[0.0], [0.25]],
}


@pytest.mark.parametrize("mode", RATIOS)
def test_the_importance_ratio_by_hand(mode):
    """Row 0 is 8, 0.5, (masked): its product is 4. Row 1 is (no score), 0.25, 1."""
    log = torch.log(torch.tensor([[8.0, 0.5, 9.0], [5.0, 0.25, 1.0]]))
    sampling = torch.tensor([[0.0, 0, 0], [math.nan, 0, 0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    ratio = importance_ratio(log, sampling, mask, mode=mode, clip_min=None, clip_max=2.0)
    assert torch.allclose(ratio, torch.tensor(RATIOS[mode]))
