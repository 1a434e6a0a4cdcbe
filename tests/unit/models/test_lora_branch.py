"""A layer with an adapter: the same values as PEFT's, with less computed again and fewer copies."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from adora_vl.models import lora_branch
from adora_vl.models.lora_branch import (
    compute_branches_first,
    leave_casts_to_autocast,
    untested_peft_notes,
)
from tests.support.small_models import TEXT_CONFIG

TOKEN_IDS = torch.arange(34).view(2, 17) % TEXT_CONFIG["vocab_size"]
LORA_RANK = 4
THREE_LAYER_CONFIG = {**TEXT_CONFIG, "num_hidden_layers": 3}


def policy_with_adapter(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return a language model with an adapter that changes its answers."""
    torch.manual_seed(2)
    model = Qwen2ForCausalLM(Qwen2Config(**THREE_LAYER_CONFIG, use_cache=False)).to(dtype)
    settings = {"r": LORA_RANK, "target_modules": ["q_proj", "up_proj", "down_proj"], **options}
    model = get_peft_model(model, LoraConfig(**settings)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def count_changed_layers(model: torch.nn.Module) -> int:
    """Return how many layers have a forward of their own in place of their class's."""
    return sum("forward" in vars(module) for module in model.modules())


def outputs_and_gradients(model: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the gradients of a pass."""
    torch.manual_seed(3)
    loss = model(input_ids=TOKEN_IDS, labels=TOKEN_IDS).loss
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return loss.detach(), list(gradients)


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")
def test_outputs_and_gradients_are_those_of_peft(subtests):
    """The loss is equal to the bit, and the gradients to twelve digits, for each option of LoRA."""
    cases: dict[str, dict[str, Any]] = {
        "float64": {},
        "dropout": {"lora_dropout": 0.3},
        "rslora": {"use_rslora": True},
        "bias": {"lora_bias": True},
    }
    for name, options in cases.items():
        with subtests.test(name):
            stock_policy = policy_with_adapter(**options)
            changed_policy = copy.deepcopy(stock_policy)
            compute_branches_first(changed_policy)
            assert count_changed_layers(changed_policy) == 3
            loss, gradients = outputs_and_gradients(changed_policy)
            stock_loss, stock_gradients = outputs_and_gradients(stock_policy)
            assert torch.equal(loss, stock_loss)
            for gradient, stock_gradient in zip(gradients, stock_gradients, strict=True):
                torch.testing.assert_close(gradient, stock_gradient, rtol=1e-12, atol=1e-14)


def test_bfloat16_has_the_dtype_and_the_sum_of_peft():
    """A layer's output in bfloat16 is PEFT's to the bit."""
    stock_policy = policy_with_adapter(torch.bfloat16)
    changed_policy = copy.deepcopy(stock_policy)
    compute_branches_first(changed_policy)
    layers = [
        model.base_model.model.model.layers[0].mlp.down_proj
        for model in (stock_policy, changed_policy)
    ]
    values = torch.randn(5, THREE_LAYER_CONFIG["intermediate_size"], dtype=torch.bfloat16)
    results = [layer(values) for layer in layers]
    assert results[1].dtype == torch.bfloat16
    assert torch.equal(*results)


def test_the_base_product_is_not_computed_again():
    """The backward pass lacks one product a layer, for the small one of the adapter's rank."""
    stock_policy = policy_with_adapter()
    changed_policy = copy.deepcopy(stock_policy)
    compute_branches_first(changed_policy)
    flops = []
    for model in (stock_policy, changed_policy):
        with FlopCounterMode(display=False) as counter:
            outputs_and_gradients(model)
        flops.append(counter.get_total_flops())
    # a multiplication and an addition for each pair of numbers, in one layer
    base_product_flops = (
        2
        * TOKEN_IDS.numel()
        * THREE_LAYER_CONFIG["intermediate_size"]
        * THREE_LAYER_CONFIG["hidden_size"]
    )
    branch_product_flops = 2 * TOKEN_IDS.numel() * LORA_RANK * THREE_LAYER_CONFIG["hidden_size"]
    assert flops[0] - flops[1] == 3 * (base_product_flops - branch_product_flops)


def test_what_is_no_plain_adapter_stays_with_peft(subtests):
    """DoRA, adapters that are switched off or merged, and other layers are left alone."""
    with subtests.test("DoRA"):
        stock_policy = policy_with_adapter(use_dora=True)
        changed_policy = copy.deepcopy(stock_policy)
        compute_branches_first(changed_policy)
        assert torch.equal(
            outputs_and_gradients(changed_policy)[0], outputs_and_gradients(stock_policy)[0]
        )
    with subtests.test("switched off and merged"):
        changed_policy = policy_with_adapter(torch.float32)
        compute_branches_first(changed_policy)
        with changed_policy.disable_adapter():
            logits_without_adapter = changed_policy(input_ids=TOKEN_IDS).logits
        logits_with_adapter = changed_policy(input_ids=TOKEN_IDS).logits
        assert not torch.allclose(logits_without_adapter, logits_with_adapter)
        changed_policy.merge_adapter()
        torch.testing.assert_close(changed_policy(input_ids=TOKEN_IDS).logits, logits_with_adapter)
    with subtests.test("another projection"):
        changed_policy = policy_with_adapter(target_modules=["q_proj"])
        compute_branches_first(changed_policy)
        assert count_changed_layers(changed_policy) == 0


def test_a_copy_computes_with_its_own_weights():
    """Zeroed weights of a deep copy change the copy's logits and not the original's."""
    changed_policy = policy_with_adapter()
    compute_branches_first(changed_policy)
    copied = copy.deepcopy(changed_policy)
    logits_before = changed_policy(input_ids=TOKEN_IDS).logits
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(changed_policy(input_ids=TOKEN_IDS).logits, logits_before)
    assert copied(input_ids=TOKEN_IDS).logits.abs().max() == 0


@pytest.mark.parametrize("peft_version", ["0.20.1", "0.22.0", "1.0"])
def test_another_version_of_peft_keeps_its_way(peft_version, monkeypatch):
    """An untested version of PEFT is left as it is, and a note says which one was tested."""
    assert untested_peft_notes() == []
    monkeypatch.setattr(lora_branch, "installed_version", lambda name: peft_version)
    policy = policy_with_adapter()
    compute_branches_first(policy)
    leave_casts_to_autocast(policy)
    assert count_changed_layers(policy) == 0
    assert not any("_cast_input_dtype" in vars(module) for module in policy.modules())
    (note,) = untested_peft_notes()
    assert note.startswith(f"peft {peft_version} is installed")
    assert note.endswith("pip install 'peft<0.22,>=0.21'")


def bfloat16_policies(
    projections: Sequence[str] = ("q_proj", "up_proj", "down_proj"), use_dora: bool = False
) -> tuple[Any, Any]:
    """Return two equal policies with a base in bfloat16 and adapters in float32.

    The second one leaves casts to autocast.
    """
    stock_policy = policy_with_adapter(
        torch.bfloat16, target_modules=list(projections), use_dora=use_dora
    )
    for name, parameter in stock_policy.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    changed_policy = copy.deepcopy(stock_policy)
    leave_casts_to_autocast(changed_policy)
    return stock_policy, changed_policy


def test_without_casts_autocast_gives_the_same_bits(subtests):
    """Loss and gradients in bfloat16 are PEFT's to the bit, also with branches first."""
    for is_branch_first in (False, True):
        with subtests.test(f"branch first: {is_branch_first}"):
            policies = bfloat16_policies()
            if is_branch_first:
                for policy in policies:
                    compute_branches_first(policy)
            with torch.autocast("cpu", torch.bfloat16):
                stock_loss, stock_gradients = outputs_and_gradients(policies[0])
                loss, gradients = outputs_and_gradients(policies[1])
            assert torch.equal(loss, stock_loss)
            assert gradients
            for gradient, stock_gradient in zip(gradients, stock_gradients, strict=True):
                assert gradient.abs().max() > 0
                assert torch.equal(gradient, stock_gradient)


def count_saved_inputs(policy: torch.nn.Module, projections: Sequence[str]) -> int:
    """Return how many tensors of the input's shape these projections of one input save."""
    attention = policy.get_submodule("base_model.model.model.layers.0.self_attn")
    values = torch.randn(5, THREE_LAYER_CONFIG["hidden_size"], dtype=torch.bfloat16)
    addresses: set[int] = set()

    def note_address(tensor: Tensor) -> Tensor:
        """Note where a saved tensor of the input's shape lies."""
        if tensor.shape == values.shape:
            addresses.add(tensor.data_ptr())
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(note_address, lambda tensor: tensor),
    ):
        # Kept, so that no memory is used twice
        outputs = [attention.get_submodule(name)(values) for name in projections]
    assert len(outputs) == len(projections)
    return len(addresses)


def test_adapters_of_one_input_save_one_tensor():
    """Three projections of one input save it once for the backward pass, and PEFT three times."""
    projections = ["q_proj", "k_proj", "v_proj"]
    policies = bfloat16_policies(projections)
    assert [count_saved_inputs(policy, projections) for policy in policies] == [3, 1]


def test_without_autocast_inputs_are_cast(subtests):
    """Where no autocast is, a layer casts its input as PEFT does; DoRA's layers are left alone."""
    with subtests.test("no autocast"):
        stock_policy, changed_policy = bfloat16_policies()
        with torch.no_grad():
            logits = changed_policy(input_ids=TOKEN_IDS).logits
            assert torch.equal(logits, stock_policy(input_ids=TOKEN_IDS).logits)
    with subtests.test("DoRA"):
        _, changed_policy = bfloat16_policies(use_dora=True)
        assert not any("_cast_input_dtype" in vars(module) for module in changed_policy.modules())
