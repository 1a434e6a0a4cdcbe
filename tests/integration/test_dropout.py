"""Dropout is for the pass that learns alone, and its random numbers depend on its micro-batch.

Passes that only compute log-probabilities have none, and a resumed run draws what the uninterrupted
one draws.
"""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import GenerationMixin

from adora_vl.packing.policy_pass import PolicyPass
from adora_vl.record.metrics import METRICS_FILE, read_metrics
from adora_vl.utils.seeding import seeded_by_key
from benchmarks.stand_in_server import FakeVLLMServer
from tests.support.stand_ins import training_config
from tests.support.tiny_run import train_tiny_run

LORA_KEYS = {"use_peft": "true", "lora_r": 8, "lora_target_modules": "all-linear"}


def keys_with_fake_server(server: FakeVLLMServer, folder: Path) -> dict[str, object]:
    """Return the keys of a run that samples on a fake vLLM server, with a reward of its own."""
    (folder / "mine.py").write_text(
        "def reward(completions, **_):\n"
        "    return [float(len(str(one)) % 9 == 0) for one in completions]\n"
    )
    return {
        "use_vllm": "true",
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "vllm_server_timeout": 0.1,
        "vllm_importance_sampling_mode": "token_truncate",
        "adora_weight_transfer": "file",
        "adora_max_drift": "null",
        "adora_self_check": "false",
        "adora_synthetic_rows": 24,
        "adora_reward": f"{folder}/mine.py:reward",
    }


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics that are of training steps."""
    return [line for line in read_metrics(run / METRICS_FILE) if "reward" in line]


@pytest.mark.slow
def test_a_lora_run_with_the_default_dropout_goes_on_to_the_bit(tmp_path):
    """A run that goes on from an earlier checkpoint draws the same dropout again.

    Its last checkpoint and its final weights are deleted; then it ends with the losses and the
    weights of the run that was not interrupted.
    """
    server = FakeVLLMServer(vocabulary=200, tokens=14, shortest=2)
    keys = {**keys_with_fake_server(server, tmp_path), **LORA_KEYS, "learning_rate": 1e-2}
    uninterrupted = train_tiny_run(tmp_path / "whole", **keys)
    adapter = json.loads((uninterrupted / "adapter_config.json").read_text())
    assert adapter["lora_dropout"] == 0.05
    resumed = Path(shutil.copytree(uninterrupted, tmp_path / "resumed"))
    shutil.rmtree(resumed / "checkpoint-4")
    for file in resumed.glob("*.safetensors"):
        file.unlink()
    server.start_again()
    train_tiny_run(resumed, **keys)
    server.close()
    losses = [[step["loss"] for step in read_steps(run)] for run in (uninterrupted, resumed)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    weights = [(run / "adapter_model.safetensors").read_bytes() for run in (uninterrupted, resumed)]
    assert weights[0] == weights[1]
    clipped = [step["clip_ratio/region_mean"] for step in read_steps(uninterrupted)]
    assert clipped == [0.0] * 4, "within one optimizer step the policy is the one that sampled"


@pytest.fixture
def dropout_policy() -> Any:
    """Return a model that is dropout alone, and `score(learns)`, the policy's pass over it."""
    model = nn.Dropout(0.5)
    model.train()

    def pass_by_stock_trl(
        model: nn.Module, ids_BS: Tensor, *_: object
    ) -> tuple[Tensor, None, None]:
        return model(torch.ones(ids_BS.shape)), None, None

    policy_pass = PolicyPass(
        pass_by_stock_trl,
        Accelerator(cpu=True),
        training_config(adora_stock_step=True),
        may_have_images=False,
        checkpointing_context=lambda size: nullcontext(),
    )

    def score(*, learns: bool) -> Tensor:
        ids_BS = torch.zeros(4, 50, dtype=torch.long)
        with torch.set_grad_enabled(learns):
            return policy_pass(model, ids_BS, ids_BS, 50)[0]

    return SimpleNamespace(score=score, model=model)


def test_scores_have_no_dropout_and_learning_has(dropout_policy):
    """The policy is dropout alone: passes without gradients return ones, others zeros too."""
    assert (dropout_policy.score(learns=False) == 1).all()
    assert dropout_policy.model.training, "the model goes on as it was"
    assert (dropout_policy.score(learns=True) == 0).any()


def test_what_is_drawn_follows_from_the_place_alone(dropout_policy):
    """Equal keys give equal dropout, whatever was drawn before.

    The run's own random state is untouched.
    """
    torch.manual_seed(0)
    run_state = torch.get_rng_state()

    def score_at(seed_name: str) -> Tensor:
        with seeded_by_key(seed_name):
            return dropout_policy.score(learns=True)

    scores = score_at("micro-batch/42/3/0/0")
    assert torch.equal(torch.get_rng_state(), run_state), "nothing is drawn from the run's state"
    torch.rand(7)
    assert torch.equal(score_at("micro-batch/42/3/0/0"), scores)
    for another_name in ("micro-batch/42/3/1/0", "micro-batch/42/3/0/1", "micro-batch/43/3/0/0"):
        assert not torch.equal(score_at(another_name), scores)


def test_the_policy_samples_without_dropout(tmp_path, monkeypatch):
    """A policy that samples by itself does so without dropout, as its log-probabilities show."""
    modes_while_sampling: list[bool] = []
    generate = GenerationMixin.generate

    def generate_and_record_mode(self: Any, *args: Any, **kwargs: Any) -> Any:
        modes_while_sampling.append(self.training)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", generate_and_record_mode)
    train_tiny_run(tmp_path / "run", **LORA_KEYS, max_steps=1, save_strategy="no")
    assert modes_while_sampling == [False]
