"""What tests of a sabotage take for its sign."""

from __future__ import annotations

import pytest

from tests.integration.support import lost_image_features

SITE = "/site-packages/vllm/v1"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("RuntimeError: Encoder cache miss for 4f2c.", True),
        (
            "[rank0]: adora_vl.errors.EngineError: the engine failed in generate (RuntimeError: Encoder cache miss)",
            True,
        ),
        (
            f'  File "{SITE}/core/encoder_cache_manager.py", line 230, in allocate\n    assert a == b\nAssertionError',
            True,
        ),
        (f'[rank1]:   File "{SITE}/worker/gpu_model_runner.py", line 3, in _gather_mm_embeddings\nKeyError: "x"', True),
        ("INFO Encoder cache will be initialized with a budget of 4096 tokens\nValueError: Available memory", False),
        (
            f'  File "{SITE}/worker/cpu_worker.py", line 87, in init_device\nValueError: Available memory on node 0',
            False,
        ),
        ("RolloutError: step 1: the engine's log-probabilities are 4 nats per token from the trainer's", False),
    ],
)
def test_lost_features_are_told_from_other_failures(output, expected):
    assert lost_image_features(output) is expected
