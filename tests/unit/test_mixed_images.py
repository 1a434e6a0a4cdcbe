"""Rows with any number of images in one batch, each distinct image seen once, against each row alone, in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, distributed
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from adora_vl.config.speed import SpeedOptions
from adora_vl.dedup.image_bank import ImageBanks
from adora_vl.dedup.images import DistinctImages
from adora_vl.dedup.shared_vision import SharedVision
from adora_vl.dedup.without_images import has_images, with_image_columns
from adora_vl.rollout.environment import free_port
from tests.integration.support import REPOSITORY
from tests.unit.test_split_attention import BOUND, IMAGE, TEXT, VISION, VISION_BOUND, VOCABULARY, build

CPU = torch.device("cpu")
SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
# Transformers' linear attention computes in float32 whatever the model's dtype is, and the gradients of its decay are
# sums of small differences: 7e-8 and 1.6e-4 were measured, with and without sharing.
LINEAR_BOUND, DECAY_BOUND = 1e-6, 2e-3
GRIDS = torch.tensor([[1, 4, 6], [1, 2, 4], [1, 4, 6]])  # of three pictures: 6, 2 and 6 image tokens
# The pictures of each row: none, one, eight of which some come again, two, none.
ROWS: list[list[int]] = [[], [0], [1, 1, 2, 0, 1, 2, 2, 1], [2, 1], []]


def pictures() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(int(grid.prod()), 16, dtype=torch.float64, generator=generator) for grid in GRIDS]


def model_of(kind: str) -> Any:
    if kind != "qwen3_5":
        return build(kind)
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
    heads = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    layers = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "head_dim": 8}
    eye = {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 16}
    config = Qwen3_5Config(
        text_config={**TEXT, **heads, **layers, "rope_parameters": {**rope, "mrope_interleaved": True}},
        vision_config={**VISION, **eye}, image_token_id=IMAGE, vision_start_token_id=8, vision_end_token_id=9,
        video_token_id=6,
    )  # fmt: skip
    model = Qwen3_5ForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.double().train()


def bound_of(kind: str, name: str) -> float:
    if kind == "qwen3_5":
        return DECAY_BOUND if "linear_attn" in name else 10 * LINEAR_BOUND
    return VISION_BOUND if "visual." in name else BOUND


def tokens(shown: list[int], words: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(len(shown))
    images = [token for one in shown for token in [8, *[IMAGE] * int(GRIDS[one].prod() // 4), 9]]
    return torch.cat([torch.tensor(images).long(), torch.randint(10, VOCABULARY, (words,), generator=generator)])


def logps(model: Any, ids_BT: Tensor, mask_BT: Tensor, **images: Any) -> Tensor:
    """Of the last five tokens of each row."""
    given = {"mm_token_type_ids": (ids_BT == IMAGE).long(), **images} if images else {}
    scores = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False, **given).logits[:, :-1].log_softmax(-1)
    found: Tensor = scores.gather(-1, ids_BT[:, 1:, None])[..., 0][:, -5:]
    return found


def alone(model: Any, rows: list[list[int]]) -> Tensor:
    found = []
    for shown in rows:
        ids, images = tokens(shown)[None], {}
        if shown:
            pixels = torch.cat([pictures()[one] for one in shown])
            images = {"pixel_values": pixels, "image_grid_thw": GRIDS[shown]}
        found.append(logps(model, ids, torch.ones_like(ids), **images))
    return torch.cat(found)


def together(model: Any, vision: SharedVision, rows: list[list[int]]) -> Tensor:
    bank, longest = vision.banks.new("train"), max(len(tokens(shown)) for shown in rows)
    ids_BT = torch.stack([torch.cat([torch.zeros(longest - len(t)).long(), t]) for t in map(tokens, rows)])
    held = {one: bank.hold(str(one), pictures()[one], GRIDS[one]) for row in rows for one in row}
    columns: dict[str, Any] = {}
    if held:
        columns["pixel_values"] = torch.cat([held[one] for row in rows for one in row])
        columns["image_grid_thw"] = GRIDS[[one for row in rows for one in row]]
    columns = with_image_columns(columns, ids_BT)
    columns.pop("num_images", None)
    return logps(model, ids_BT, (ids_BT > 0).long(), **columns)


def gradients(model: Any, found: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weights = torch.linspace(-1, 2, found.numel(), dtype=torch.float64).view_as(found)
    (found.exp() * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", SEEING)
def test_a_batch_of_any_mix_is_as_its_rows_alone(kind, frozen):
    model, vision = model_of(kind), SharedVision(ImageBanks())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and "visual." in name))
    expected = alone(model, ROWS)
    reference = gradients(model, expected)
    assert vision.install(model)
    for share, seen in ((True, 3), (False, 11)):
        vision.share, vision.seen = share, 0
        found = together(model, vision, ROWS)
        assert vision.seen == seen, "of eleven pictures three are distinct"
        logps_bound = LINEAR_BOUND if kind == "qwen3_5" else BOUND
        assert (found - expected).abs().max() <= logps_bound * expected.abs().max()
        own = gradients(model, found)
        assert own.keys() == reference.keys() and any("visual." in name for name in own) is not frozen
        scale = max(tensor.norm() for tensor in reference.values())
        for name, gradient in reference.items():
            assert (own[name] - gradient).norm() <= bound_of(kind, name) * max(gradient.norm(), 1e-3 * scale), name


@pytest.mark.parametrize("kind", SEEING)
def test_rows_without_images_among_processes_that_have_them(kind, monkeypatch):
    """Alone the tower rests. With other processes it runs, and its gradients are there to be reduced, all zero."""
    model, vision = model_of(kind), SharedVision(ImageBanks())
    expected = alone(model, [[], []])
    reference = gradients(model, expected)
    vision.install(model)
    found = together(model, vision, [[], []])
    assert (found - expected).abs().max() <= LINEAR_BOUND * expected.abs().max()
    assert not any("visual." in name for name in gradients(model, found))
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    own = gradients(model, together(model, vision, [[], []]))
    assert own.keys() == {name for name, _ in model.named_parameters()}
    for name, gradient in own.items():
        right = reference.get(name, torch.zeros_like(gradient))
        assert (gradient - right).norm() <= bound_of(kind, name) * gradient.norm()


def one_of_two(kind: str, rank: int, port: int) -> None:
    """What a process of the test below does: its rows through torch's DistributedDataParallel, against both alone."""
    rows: tuple[list[list[int]], ...] = ([[0], [2, 1, 1]], [[], []])
    model, vision = model_of(kind), SharedVision(ImageBanks())
    each = [gradients(model, alone(model, of_rank)) for of_rank in rows]
    vision.install(model)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    # It raises in the next step, or waits for ever, if a parameter has no gradient on one process.
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        own = gradients(model, together(parallel, vision, rows[rank]))
    scale = max(tensor.norm() for tensor in own.values())
    for name, gradient in own.items():
        right = torch.stack([one.get(name, torch.zeros_like(gradient)) for one in each]).mean(dim=0)
        bound = bound_of(kind, name) * max(right.norm(), 1e-3 * scale)
        assert (gradient - right).norm() <= bound, name
    assert max(gradient.norm() for name, gradient in own.items() if "visual." in name) > 1e-3 * scale
    print(f"equal: {len(own)}")


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_two_processes_of_which_one_has_no_image_learn_what_one_does(kind):
    """Every gradient, of the vision tower too, is the mean of what the rows of both give alone."""
    port, environment = free_port(), {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    code = f"from tests.unit.test_mixed_images import one_of_two; one_of_two({kind!r}, %d, {port})"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    ranks = [subprocess.Popen([sys.executable, "-c", code % rank], **pipes) for rank in range(2)]
    try:
        said = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    names = sum(1 for _ in model_of(kind).named_parameters())
    assert [out.strip() for out, _ in said] == [f"equal: {names}"] * 2, said


@pytest.mark.parametrize("kind", SEEING)
def test_a_frozen_tower_runs_as_often_on_a_process_without_images(kind, monkeypatch):
    """Once a generation, like on the others: it gathers weights."""
    model, vision = model_of(kind), SharedVision(ImageBanks())
    model.model.visual.requires_grad_(False)
    calls: list[int] = []
    model.model.visual.register_forward_hook(lambda *_: calls.append(1))
    vision.install(model)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    generations: list[list[list[int]]] = [[[], []], [[], [0]]]
    for rows in generations:
        together(model, vision, rows)
        assert len(calls) == 1
        inner, bank = model.model, vision.banks.of_training()
        assert bank is not None and not bank.features_due
        none = torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long)
        assert inner.get_image_features(*none).pooler_output[0].shape == (0, 32)
        assert len(calls) == 1, "a later pass of the generation"
        calls.clear()


@pytest.mark.parametrize("kept", [True, False], ids=["images kept", "images not kept"])
def test_without_kept_images_a_frozen_tower_runs_in_every_pass(kept, monkeypatch):
    """As on the processes that have images: only kept images are known again, so only their features are."""
    model = model_of("qwen2_5_vl")
    model.model.visual.requires_grad_(False)
    calls: list[int] = []
    model.model.visual.register_forward_hook(lambda *_: calls.append(1))
    switches = SpeedOptions(adora_cache_images=kept)
    images = DistinctImages([model], SimpleNamespace(image_processor=Qwen2VLImageProcessor()), CPU, switches)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    none = torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long)
    with images.generation([], "train", further=False, processor=None):
        for _ in range(3):
            model.model.get_image_features(*none)
    assert len(calls) == (1 if kept else 3)


def test_a_data_set_tells_whether_it_has_images():
    features = {"images": [[b"x"], []], "problem": ["a", "b"]}
    assert has_images(Dataset.from_dict(features))
    assert not has_images(Dataset.from_dict({"images": [[], []], "problem": ["a", "b"]}))
    assert not has_images(Dataset.from_dict({"problem": ["a"]}))
    assert has_images([{"prompt": "x"}]), "of rows that are made on the way nothing is known"
