"""TRL's GPU kernels of the language-model head give float64's log-probabilities.

They run in Triton's interpreter, so no GPU is needed.
"""

import json
import os
import subprocess
import sys

import pytest

# Relative distances of log-probabilities and of gradients. In bfloat16 logits are rounded to 2**-9,
# as in TRL's tiles.
LOGP_AND_GRADIENT_BOUNDS = {"float32": (1e-7, 5e-7), "bfloat16": (1e-3, 8e-3)}

_DISTANCE_SCRIPT = """
import json, torch
from trl.kernels import chunked_logprob as head

head._use_triton = lambda device: True
found = [type(head._forward_kernel).__name__, type(head._backward_kernel).__name__]
share_N = torch.linspace(-1, 1, 37, dtype=torch.float64)
for dtype in ("float32", "bfloat16"):
    for temperature, asked in ((1.0, 1), (0.7, 2), (1.3, 2)):
        drawn, results = torch.Generator().manual_seed(1), []
        hidden_NH = torch.randn(37, 64, generator=drawn).to(getattr(torch, dtype))
        weight_VH = (0.2 * torch.randn(1000, 64, generator=drawn)).to(hidden_NH.dtype)
        target_N = torch.randint(1000, (37,), generator=drawn)
        for kind in (hidden_NH.dtype, torch.float64):
            h, w = (part.to(kind, copy=True).requires_grad_() for part in (hidden_NH, weight_VH))
            logps_NV = (h @ w.T / temperature).log_softmax(-1)
            out = logps_NV.gather(1, target_N[:, None])[:, 0], -(logps_NV.exp() * logps_NV).sum(-1)
            if kind != torch.float64:
                names = ("log_probs", "entropy")[:asked]
                out = head.ChunkedLogProbFunction.apply(h, w, None, target_N, temperature, 384, None, 1.0, names)
            (out[0] * share_N + (out[1] * share_N.flip(0) if asked == 2 else 0)).sum().backward()
            results.append((out[0].detach(), h.grad, w.grad))
        found.append([dtype, *(float((a.double() - b).norm() / b.norm()) for a, b in zip(*results))])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_kernels_of_a_gpu_are_as_float64(subtests):
    """The kernels run line by line; what a GPU's compiler makes of them is not shown."""
    pytest.importorskip(
        "triton.runtime.interpreter", reason="Triton's interpreter is not installed"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    completed = subprocess.run(
        [sys.executable, "-c", _DISTANCE_SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert completed.returncode == 0, completed.stderr[-2000:]
    forward, backward, *cases = json.loads(completed.stdout.splitlines()[-1])
    assert forward == backward == "InterpretedFunction"
    assert len(cases) == 6
    for number, (dtype, logp_distance, *gradient_distances) in enumerate(cases):
        with subtests.test(number):
            logp_bound, gradient_bound = LOGP_AND_GRADIENT_BOUNDS[dtype]
            assert logp_distance <= logp_bound
            assert max(gradient_distances) <= gradient_bound
