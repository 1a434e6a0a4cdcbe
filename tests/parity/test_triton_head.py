"""TRL's kernels of the language-model head for a card give float64's log-probabilities, by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.core
# Relative distances of log-probabilities and of gradients. In bfloat16 logits are rounded to 2**-9, as in TRL's tiles.
BOUNDS = {"float32": (1e-7, 5e-7), "bfloat16": (1e-3, 8e-3)}
CASES = [(1.0, False), (0.7, True), (1.3, True)]  # temperature, entropy

_DISTANCES = """
import json, sys
import torch
from trl.kernels import chunked_logprob

chunked_logprob._use_triton = lambda device: True
launched = []
for name in ("_forward_kernel", "_backward_kernel"):
    kernel = getattr(chunked_logprob, name)
    def run(grid, kernel=kernel, name=name):
        launched.append(name)
        return kernel[grid]
    setattr(chunked_logprob, name, type("Counted", (), {"__getitem__": staticmethod(run)})())

def results(exact, dtype, temperature, entropy):
    drawn = torch.Generator().manual_seed(1)
    hidden_NH = torch.randn(37, 64, generator=drawn).to(dtype)
    weight_VH = (0.2 * torch.randn(1000, 64, generator=drawn)).to(dtype)
    target_N = torch.randint(1000, (37,), generator=drawn)
    hidden_NH, weight_VH = (t.to(torch.float64 if exact else dtype).requires_grad_() for t in (hidden_NH, weight_VH))
    if exact:
        logps_NV = (hidden_NH @ weight_VH.T / temperature).log_softmax(-1)
        out = logps_NV.gather(1, target_N[:, None])[:, 0], -(logps_NV.exp() * logps_NV).sum(-1)
    else:
        asked = ("log_probs", "entropy") if entropy else ("log_probs",)
        out = chunked_logprob.ChunkedLogProbFunction.apply(
            hidden_NH, weight_VH, None, target_N, temperature, 384, None, 1.0, asked
        )
    share_N = torch.linspace(-1, 1, 37, dtype=torch.float64)
    (out[0] * share_N + (out[1] * share_N.flip(0) if entropy else 0)).sum().backward()
    return out[0].detach(), hidden_NH.grad, weight_VH.grad

found = []
for dtype, *case in json.loads(sys.argv[1]):
    launched.clear()
    pairs = zip(*(results(exact, getattr(torch, dtype), *case) for exact in (False, True)))
    found.append([sorted(set(launched)), *(float((a.double() - b).norm() / b.norm()) for a, b in pairs)])
print(json.dumps(found))
"""


def test_the_kernels_of_a_card_are_as_float64(subtests):
    """The kernels themselves, line by line; what a GPU's compiler makes of them is not shown."""
    pytest.importorskip("triton.runtime.interpreter", reason="Triton's interpreter is not installed")
    cases = [(dtype, *case) for dtype in BOUNDS for case in CASES]
    command = [sys.executable, "-c", _DISTANCES, json.dumps(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for case, (launched, logps, *gradients) in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        with subtests.test(case=case):
            assert launched == ["_backward_kernel", "_forward_kernel"]
            assert logps <= BOUNDS[case[0]][0] and max(gradients) <= BOUNDS[case[0]][1]
