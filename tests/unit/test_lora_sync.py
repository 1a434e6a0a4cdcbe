"""What a LoRA policy sends to its engine."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model

from adora_vl.models.components import COMPONENTS, component_of
from adora_vl.models.tiny.architecture import DEFAULT_FAMILY, TINY_FAMILIES, build_model
from adora_vl.models.tiny.processor import build_processor
from adora_vl.rollout.lora import can_merge, merged_parameters


def policy(dtype, family=DEFAULT_FAMILY, targets=("q_proj", "up_proj", "fc1"), **options):
    model = build_model(build_processor(["Find x."]).tokenizer, family=family).to(dtype)
    names = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    config = LoraConfig(r=4, target_modules=list(targets), **options)
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model, names


def sent(model, wanted=lambda name: True):
    return {name: tensor.clone() for name, tensor in merged_parameters(model, lambda _: nullcontext(), wanted)}


def test_after_the_first_sync_only_what_an_adapter_touches_goes():
    model, original = policy(torch.float32, modules_to_save=["lm_head"])
    names = [name for name, _ in merged_parameters(model, lambda _: nullcontext(), lambda _: True, changed_only=True)]
    adapted = {name for name in original if name.endswith(("q_proj.weight", "up_proj.weight"))}
    assert set(names) == adapted | {"lm_head.weight"}


def test_it_is_what_peft_would_merge_under_the_models_own_names():
    model, original = policy(torch.float32)
    tensors = sent(model)
    assert tensors.keys() == original.keys()
    merged = dict(model.merge_and_unload().named_parameters())
    for name, tensor in tensors.items():
        # the same sums of four products, added once in float32
        assert torch.allclose(tensor, merged[name], atol=1e-6), name
    changed = {name for name in tensors if not torch.equal(tensors[name], original[name])}
    assert changed == {name for name in original if name.endswith(("q_proj.weight", "up_proj.weight"))}


@pytest.mark.parametrize("family", [kind for kind in TINY_FAMILIES if kind != DEFAULT_FAMILY])
def test_every_part_of_another_family_is_sent_merged(family):
    """Their towers and mergers have other layers: `linear_fc1` and `linear_fc2`."""
    model, original = policy(torch.float32, family, targets=("q_proj", "down_proj", "linear_fc2"))
    tensors = sent(model)
    assert tensors.keys() == original.keys()
    changed = {name for name in tensors if not torch.equal(tensors[name], original[name])}
    ends = ("q_proj.weight", "down_proj.weight", "linear_fc2.weight")
    assert changed == {name for name in original if name.endswith(ends)}
    assert {component_of(name) for name in changed} == set(COMPONENTS)
    merged = dict(model.merge_and_unload().named_parameters())
    assert all(torch.allclose(tensors[name], merged[name], atol=1e-6) for name in changed)


def test_twenty_syncs_leave_bfloat16_weights_as_they_were():
    model, original = policy(torch.bfloat16)
    first = sent(model)
    for _ in range(20):
        again = sent(model)
    assert all(torch.equal(first[name], again[name]) for name in first)
    base = {n.replace(".base_layer", "").removeprefix("base_model.model."): p for n, p in model.named_parameters()}
    assert all(torch.equal(base[name], tensor) for name, tensor in original.items())
    assert first["lm_head.weight"].dtype == torch.bfloat16


def test_a_part_that_is_not_wanted_is_neither_merged_nor_sent():
    model, original = policy(torch.float32)
    tensors = sent(model, lambda name: "visual" not in name)
    assert tensors.keys() == {name for name in original if "visual" not in name}


@pytest.mark.parametrize(("options", "plain"), [({}, True), ({"use_dora": True}, False)])
def test_dora_is_left_to_peft(options, plain):
    assert can_merge(policy(torch.float32, **options)[0]) is plain
