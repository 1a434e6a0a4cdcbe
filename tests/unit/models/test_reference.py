"""The reference of a KL term is the policy that the run starts from, or the run does not begin."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoHaConfig, LoraConfig, PeftConfig
from PIL import Image
from transformers import AutoModelForImageTextToText

from adora_vl import AdoraGRPOConfig, AdoraGRPOTrainer
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.models.reference import check_adapter_start, check_can_be_copied, copy_policy
from adora_vl.training.guards import ReferenceGuard
from adora_vl.types import Batch
from adora_vl.utils.errors import SharedUserError, UserError
from tests.support.step_context import step_context

TARGET_MODULES = ["q_proj", "v_proj"]
# Initialisations of an adapter that change the base's weights.
INITIALISATIONS_THAT_CHANGE_BASE = (
    "pissa",
    "pissa_niter_4",
    "olora",
    "corda",
    "loftq",
    "lora_ga",
    "orthogonal",
)


def lora_config_with(initialisation: bool | str) -> Any:
    """Return a config of LoRA with this initialisation."""
    config = LoraConfig(r=2, target_modules=TARGET_MODULES)
    config.init_lora_weights = initialisation  # as an argument some would need further settings
    return config


def load_tiny_model() -> Any:
    """Load the shipped tiny model."""
    return AutoModelForImageTextToText.from_pretrained(PRETRAINED_FOLDER, dtype=torch.float32)


def build_trainer(folder: Path, model: Any = None, peft_config: PeftConfig | None = None) -> Any:
    """Build a trainer as a notebook does.

    It has two steps with a KL term, and a reward that tells answers apart.
    """
    args = AdoraGRPOConfig(
        str(folder),
        beta=0.1,
        max_steps=2,
        learning_rate=1e-3,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    row = {
        "prompt": [{"role": "user", "content": "Which is longer?"}],
        "images": [Image.new("RGB", (56, 56), "gray")],
    }
    return AdoraGRPOTrainer(
        str(PRETRAINED_FOLDER) if model is None else model,
        reward_funcs=lambda completions, **_: [float(n % 2) for n in range(len(completions))],
        args=args,
        train_dataset=Dataset.from_list([row] * 8),
        peft_config=peft_config,
    )


@pytest.mark.parametrize("initialisation", INITIALISATIONS_THAT_CHANGE_BASE)
def test_an_adapter_that_starts_out_of_the_base_has_no_reference(initialisation):
    """With a KL term these initialisations are refused, for a new adapter and for a loaded one."""
    for is_new in (True, False):
        message = f"^init_lora_weights: {initialisation} with beta: 0.1 .* beta: 0"
        with pytest.raises(UserError, match=message):
            check_adapter_start(lora_config_with(initialisation), beta=0.1, is_new=is_new)
    check_adapter_start(
        lora_config_with(initialisation), beta=0.0, is_new=True
    )  # there is no KL term


def test_an_adapter_that_changes_nothing_at_first_has_one():
    """A random initialisation is taken only if the adapter was loaded, and is its own reference."""
    for initialisation in (True, "gaussian", "eva", "mica"):
        check_adapter_start(lora_config_with(initialisation), beta=0.1, is_new=True)
    check_adapter_start(None, beta=0.1, is_new=True)  # a run without an adapter
    with pytest.raises(UserError, match="init_lora_weights: False with beta: 0.1 draws"):
        check_adapter_start(lora_config_with(initialisation=False), beta=0.1, is_new=True)
    check_adapter_start(
        lora_config_with(initialisation=False), beta=0.1, is_new=False
    )  # the reference is a copy of the adapter


def test_it_is_refused_before_a_weight_is_loaded(tmp_path, no_weights):
    """The fixture `no_weights` fails the test if a weight is loaded."""
    with pytest.raises(UserError, match="init_lora_weights: pissa with beta: 0.1"):
        build_trainer(tmp_path / "run", peft_config=lora_config_with(initialisation="pissa"))


def test_the_reference_of_an_object_is_a_copy_of_it_and_not_of_its_folder(tmp_path):
    """The reference of a model object is a copy of its weights as they are, so KL begins at 0.

    The object may have been fine-tuned or averaged in the notebook before.
    """
    fine_tuned_model = load_tiny_model()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in fine_tuned_model.model.language_model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    trainer = build_trainer(tmp_path / "run", fine_tuned_model)
    trainer.train()
    kl = [line["kl"] for line in trainer.state.log_history if "kl" in line]
    assert kl[0] == 0
    assert kl[1] > 0
    weights = zip(trainer.model.parameters(), trainer.ref_model.parameters(), strict=True)
    assert any(
        not torch.equal(policy_weight, reference_weight)
        for policy_weight, reference_weight in weights
    )


def test_a_copy_computes_with_its_own_weights_whatever_a_trainer_before_has_put_there():
    """The copy has no replaced `forward`, is frozen, and does not follow the model's weights."""
    model = load_tiny_model()
    embeddings = model.get_input_embeddings()
    model.forward = lambda **_: embeddings.weight.sum()  # as a fused head of a trainer before
    reference = copy_policy(model, "a folder", dtype=torch.bfloat16)
    assert "forward" not in vars(reference)
    assert not reference.training
    assert reference.dtype == torch.float32
    assert not any(weight.requires_grad for weight in reference.parameters())
    values_before = reference.get_input_embeddings().weight.clone()
    with torch.no_grad():
        embeddings.weight.add_(1)
    assert torch.equal(reference.get_input_embeddings().weight, values_before)


def test_an_object_that_deepspeed_has_divided_is_refused_with_a_reference():
    """A model whose weights are in parts cannot be copied; without a KL term it need not be."""
    model: Any = torch.nn.Linear(2, 2)
    check_can_be_copied(model, beta=0.1)
    model.weight.ds_id = 0  # as zero.Init leaves it
    check_can_be_copied(model, beta=0.0)
    with pytest.raises(UserError, match="DeepSpeed has divided .* beta: 0.1"):
        check_can_be_copied(model, beta=0.1)


def test_an_adapter_of_another_kind_that_does_not_start_at_the_reference_ends_the_run(tmp_path):
    """With a KL term an adapter that changes answers from the start is refused before an update.

    No key of a LoHa config tells that it changes answers, so that is measured.
    """
    random_adapter = LoHaConfig(
        r=4,
        alpha=64,
        target_modules=TARGET_MODULES,
        init_weights=False,
    )
    trainer = build_trainer(tmp_path / "run", peft_config=random_adapter)
    values_before = [weight.clone() for weight in trainer.model.parameters()]
    with pytest.raises(UserError, match=r"^beta: 0\.1: the policy starts .* nats per token from"):
        trainer.train()
    values_after = trainer.model.parameters()
    assert all(torch.equal(old, new) for old, new in zip(values_before, values_after, strict=True))


def reference_guard(**keys: Any) -> ReferenceGuard:
    """Return the guard that compares the policy with its reference, for a run with these keys."""
    return ReferenceGuard(step_context(per_device_train_batch_size=2, **keys), rounding=1e-5)


def test_policy_and_reference_are_compared_once_and_only_before_an_update():
    """The first micro-batch is compared once, with a KL term, and NaN is a difference too."""
    batch: Batch = {
        "completion_ids": torch.zeros(4, 3, dtype=torch.long),
        "completion_mask": torch.tensor([[1, 1, 0]] * 4),
        "ref_per_token_logps": torch.full((4, 3), -1.0),
    }
    rows_per_pass: list[int] = []

    def policy_logps(batch: Batch, pixels: Any = None) -> torch.Tensor:
        """Note how many rows are passed, and return log-probabilities of which one is 1e-4 off."""
        rows_per_pass.append(len(batch["completion_ids"]))
        return batch["ref_per_token_logps"] + torch.tensor([1e-4, 0.0, 9.0])  # the last is padding

    guard = reference_guard(beta=0.1)
    assert guard.needs_check(0)
    assert not guard.needs_check(1)
    guard.check(batch, policy_logps)
    assert rows_per_pass == [2], "the rows of a micro-batch are enough"
    assert not guard.needs_check(0)
    assert not reference_guard(beta=0.0).needs_check(0)
    for old_logp in (-1.01, float("nan")):
        with pytest.raises(SharedUserError, match="nats per token from its reference"):
            reference_guard(beta=0.1).check(
                {**batch, "old_per_token_logps": torch.full((4, 3), old_logp)}, policy_logps
            )
