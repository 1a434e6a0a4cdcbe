"""Freezing by name, on the real model class."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adora_vl.errors import UserError
from adora_vl.models.components import COMPONENTS, component_of, freeze, trainable_components
from adora_vl.models.tiny.architecture import build_model
from adora_vl.models.tiny.processor import build_processor


@pytest.fixture
def model():
    return build_model(build_processor(["Find x."]).tokenizer)


@pytest.mark.parametrize("component", COMPONENTS)
def test_one_key_freezes_one_part_and_no_other(model, component):
    before = {name for name, p in model.named_parameters() if p.requires_grad}
    count = freeze(model, [component])[component]
    frozen = before - {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(frozen) == count > 0
    assert {component_of(name) for name in frozen} == {component}
    assert trainable_components(model) == frozenset(COMPONENTS) - {component}


def test_the_parts_cover_the_model_and_the_projector_is_the_merger(model):
    names = [name for name, _ in model.named_parameters()]
    assert {component_of(name) for name in names} == set(COMPONENTS)
    assert all("merger" in name for name in names if component_of(name) == "projector")
    assert component_of("lm_head.weight") == "language_model"
    assert component_of("base_model.model.model.visual.blocks.0.mlp.up_proj.lora_A.default.weight") == "vision_tower"


def test_a_key_that_matches_nothing_is_an_error():
    text_only = nn.Module()
    text_only.lm_head = nn.Linear(2, 2)
    with pytest.raises(UserError, match="adora_freeze_vision_tower: true.*no parameter"):
        freeze(text_only, ["vision_tower"])


def test_the_tiny_model_is_untied_small_and_reproducible(model):
    again = build_model(build_processor(["Find x."]).tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 1.2e6


def test_building_leaves_the_callers_random_state_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    build_model(build_processor(["Find x."]).tokenizer)
    assert torch.equal(torch.rand(3), expected)
