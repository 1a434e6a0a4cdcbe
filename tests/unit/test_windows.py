"""The windows of the vision tower in few calls: the same features and gradients as Transformers' call per window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from adora_vl.dedup.batched_windows import BATCHED, batch_windows, by_size

pytestmark = pytest.mark.slow


def tower(attention: str = "sdpa") -> Any:
    """Three blocks, the middle one of full attention, with the real windows of 112 pixels."""
    config = Qwen2_5_VLVisionConfig(
        depth=3, hidden_size=32, num_heads=2, intermediate_size=24, out_hidden_size=16, window_size=112,
        fullatt_block_indexes=[1],
    )  # fmt: skip
    config._attn_implementation = attention
    torch.manual_seed(0)
    return Qwen2_5_VisionTransformerPretrainedModel(config).double()


def looked_at(eye: Any, pixels: Tensor, grids: Tensor) -> list[Tensor]:
    """The features, and every gradient of a loss that no two features enter alike."""
    given = pixels.clone().requires_grad_()
    features = eye(given, grid_thw=grids).pooler_output
    eye.zero_grad()
    (features * torch.linspace(0.5, 1.5, features.numel(), dtype=features.dtype).view_as(features)).sum().backward()
    return [features.detach(), given.grad, *(parameter.grad for parameter in eye.parameters())]


SIDES = st.integers(1, 13).map(lambda tokens: 2 * tokens)  # patches; 8 make a whole window
GRIDS = st.lists(st.tuples(st.sampled_from([1, 1, 2]), SIDES, SIDES), min_size=1, max_size=4)


@given(GRIDS)
@settings(max_examples=25, deadline=None)
def test_features_and_gradients_are_those_of_the_loop(grids):
    eye, sizes = tower(), torch.tensor(grids)
    pixels = torch.randn(int(sizes.prod(dim=1).sum()), 1176, dtype=torch.float64)
    assert eye.config._attn_implementation == "sdpa"
    loop = looked_at(eye, pixels, sizes)
    assert batch_windows(eye, True)
    batched = looked_at(eye, pixels, sizes)
    assert not batch_windows(eye, False) and eye.config._attn_implementation == "sdpa"
    for one, other in zip(loop, batched, strict=True):
        assert (one - other).norm() <= 1e-12 * max(one.norm(), 1e-3)


@given(st.lists(st.sampled_from([64, 32, 16, 4]), min_size=1, max_size=30))
def test_every_patch_has_its_place_and_its_way_back(lengths):
    sizes, order, back = by_size(tuple(lengths), torch.device("cpu"))
    assert sum(size * windows for size, windows in sizes) == sum(lengths) and len(sizes) == len(set(lengths))
    if order is not None and back is not None:
        assert torch.equal(order[back], torch.arange(sum(lengths)))


def test_one_call_per_size_and_block_whatever_the_number_of_windows(monkeypatch):
    calls: list[int] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def counted(query: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        calls.append(len(query))
        return attention(query, *arguments, **keywords)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    eye, grids = tower(), torch.tensor([[1, 24, 20], [1, 24, 20]])  # 3 x 3 windows per image, 3 of them of 8 x 4
    pixels = torch.randn(2 * 480, 1176, dtype=torch.float64)
    eye(pixels, grid_thw=grids)
    assert calls == [1] * (18 + 2 + 18)
    calls.clear()
    batch_windows(eye, True)
    eye(pixels, grid_thw=grids)
    assert calls == [12, 6, 2, 12, 6]


def test_an_order_made_without_gradients_serves_a_pass_with_them():
    eye, grids = tower(), torch.tensor([[1, 14, 22]])
    batch_windows(eye, True)
    pixels = torch.randn(308, 1176, dtype=torch.float64)
    with torch.inference_mode():
        eye(pixels, grid_thw=grids)
    assert looked_at(eye, pixels, grids)[1].abs().sum() > 0


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_another_attention_stays_as_it_is(attention):
    eye = tower()
    eye.config._attn_implementation = attention
    assert not batch_windows(eye, True) and eye.config._attn_implementation == attention


def test_a_tower_of_another_kind_stays_as_it_is():
    config = Qwen2VLVisionConfig(depth=1, embed_dim=32, num_heads=2, hidden_size=16)
    config._attn_implementation = "sdpa"
    eye = Qwen2VisionTransformerPretrainedModel(config)
    assert not batch_windows(eye, True) and eye.config._attn_implementation == "sdpa"


def test_the_name_is_in_no_saved_model(tmp_path):
    eye = tower()
    batch_windows(eye, True)
    Qwen2_5_VLConfig(vision_config=eye.config.to_dict()).save_pretrained(tmp_path)
    eye.save_pretrained(tmp_path / "eye")
    saved = [path.read_text() for path in tmp_path.rglob("config.json")]
    assert len(saved) == 2 and not any(BATCHED in text for text in saved)


def test_another_tower_can_be_built_from_its_configuration():
    """With the implementation's name in it Transformers looks for a kernel of that name, and stops."""
    eye = tower()
    assert batch_windows(eye, True)
    assert all(block.attn.config._attn_implementation == BATCHED for block in eye.blocks)
    assert type(eye)(eye.config).config._attn_implementation == "sdpa"
