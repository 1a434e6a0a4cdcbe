"""A vision tower that sees each distinct image once gives the same features and gradients.

Rows refer to images by number, and `SharedVision` runs the tower once for each image. Further tests
are of a tower whose attention computes all windows of one size in one call.
"""

import os
import subprocess
import sys
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed
from transformers import Qwen2_5_VLConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

import adora_vl.packing.vision
from adora_vl.config.keys import AdoraKeys
from adora_vl.packing.image_store import ImageBanks
from adora_vl.packing.images import DistinctImages, with_image_columns
from adora_vl.packing.vision import SharedVision, run_tower, split_into_passes
from adora_vl.packing.vision_windows import (
    BATCHED_ATTENTION,
    batch_windows,
    sort_windows,
    window_arguments,
)
from adora_vl.utils.launch import free_port
from tests.support.paths import REPOSITORY
from tests.support.small_models import (
    FLOAT64_BOUND,
    IMAGE_TOKEN,
    SMALL_VOCABULARY,
    TEXT_CONFIG,
    VISION_BOUND,
    VISION_CONFIG,
    small_model,
)

VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
# Transformers' linear attention computes in float32 whatever the model's dtype is. Relative
# differences of 7e-8 were measured, with and without sharing.
LINEAR_BOUND = 1e-6
# The gradients of its decay are sums of small differences: 1.6e-4 was measured.
DECAY_BOUND = 2e-3
# The grids of three pictures in patches, of which four are an image token: 6, 2 and 6 tokens.
GRIDS = torch.tensor([[1, 4, 6], [1, 2, 4], [1, 4, 6]])
# The pictures of each row: none, one, eight of which some come again, two, none.
PICTURES_OF_ROWS: list[list[int]] = [[], [0], [1, 1, 2, 0, 1, 2, 2, 1], [2, 1], []]


def pictures() -> list[Tensor]:
    """Return the pixels of the three pictures, each (patches, 16)."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(int(grid.prod()), 16, dtype=torch.float64, generator=generator)
        for grid in GRIDS
    ]


def small_model_of(model_type: str) -> Any:
    """Return a small model of a family in float64, with random weights, by its `model_type`."""
    if model_type != "qwen3_5":
        return small_model(model_type)
    torch.manual_seed(0)
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 1.0,
    }
    heads = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    layers = {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "head_dim": 8,
    }
    vision = {
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 24,
        "num_position_embeddings": 16,
    }
    config = Qwen3_5Config(
        text_config={
            **TEXT_CONFIG,
            **heads,
            **layers,
            "rope_parameters": {**rope, "mrope_interleaved": True},
        },
        vision_config={**VISION_CONFIG, **vision},
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=8,
        vision_end_token_id=9,
        video_token_id=6,
    )
    model = Qwen3_5ForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.double().train()


def gradient_bound(model_type: str, name: str) -> float:
    """Return how far a gradient may be off by rounding, relative to its norm.

    `model_type`: that of the model. `name`: that of the parameter.
    """
    if model_type == "qwen3_5":
        return DECAY_BOUND if "linear_attn" in name else 10 * LINEAR_BOUND
    return VISION_BOUND if "visual." in name else FLOAT64_BOUND


def token_ids(pictures_of_row: list[int]) -> Tensor:
    """Return the token ids of a row: the image tokens of its pictures, and then seven words."""
    generator = torch.Generator().manual_seed(len(pictures_of_row))
    image_ids: list[int] = []
    for number in pictures_of_row:
        token_count = int(GRIDS[number].prod() // 4)
        image_ids += [8, *[IMAGE_TOKEN] * token_count, 9]  # between a start and an end token
    word_ids = torch.randint(10, SMALL_VOCABULARY, (7,), generator=generator)
    return torch.cat([torch.tensor(image_ids).long(), word_ids])


def logps(model: Any, ids_BT: Tensor, mask_BT: Tensor, **images: Any) -> Tensor:
    """Return the log-probabilities of the last five tokens of each row, (B, 5).

    `images`: the images' columns by name.
    """
    image_columns = {}
    if images:
        image_columns = {"mm_token_type_ids": (ids_BT == IMAGE_TOKEN).long(), **images}
    output = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False, **image_columns)
    all_logps = output.logits[:, :-1].log_softmax(-1)
    next_tokens = ids_BT[:, 1:, None]
    token_logps: Tensor = all_logps.gather(-1, next_tokens)[..., 0]
    return token_logps[:, -5:]


def logps_of_separate_rows(model: Any, rows: list[list[int]]) -> Tensor:
    """Return log-probabilities from a pass for each row, with pixels, (B, 5).

    `rows`: the numbers of the pictures of each row.
    """
    row_logps = []
    for pictures_of_row in rows:
        ids = token_ids(pictures_of_row)[None]
        images = {}
        if pictures_of_row:
            pixels = torch.cat([pictures()[number] for number in pictures_of_row])
            images = {"pixel_values": pixels, "image_grid_thw": GRIDS[pictures_of_row]}
        row_logps.append(logps(model, ids, torch.ones_like(ids), **images))
    return torch.cat(row_logps)


def logps_of_shared_batch(model: Any, vision: SharedVision, rows: list[list[int]]) -> Tensor:
    """Return log-probabilities from one pass over all rows, with patch numbers of pictures, (B, 5).

    `rows`: the numbers of the pictures of each row. `vision`: has been installed in the model.
    """
    bank = vision.banks.new("train")
    ids_of_rows = [token_ids(pictures_of_row) for pictures_of_row in rows]
    longest = max(len(ids) for ids in ids_of_rows)
    padded_rows = []
    for ids in ids_of_rows:
        padding = torch.zeros(longest - len(ids)).long()
        padded_rows.append(torch.cat([padding, ids]))
    ids_BT = torch.stack(padded_rows)
    all_numbers = [number for pictures_of_row in rows for number in pictures_of_row]
    patch_numbers = []
    for number in all_numbers:
        patch_numbers.append(bank.store(str(number), pictures()[number], GRIDS[number]))
    columns: dict[str, Any] = {}
    if patch_numbers:
        columns["pixel_values"] = torch.cat(patch_numbers)
        columns["image_grid_thw"] = GRIDS[all_numbers]
    columns = with_image_columns(columns, ids_BT)
    columns.pop("num_images", None)
    return logps(model, ids_BT, (ids_BT > 0).long(), **columns)


def gradients(model: Any, row_logps: Tensor) -> dict[str, Tensor]:
    """Return the gradients, by parameter, of a loss in which every token has its own weight."""
    model.zero_grad()
    weights = torch.linspace(-1, 2, row_logps.numel(), dtype=torch.float64).view_as(row_logps)
    (row_logps.exp() * weights).sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_pixels_meet_grids_on_their_own_device() -> None:
    """A packed pass has its grids on the CPU, and pixels on the device if no bank stores them."""
    model = small_model_of("qwen2_5_vl")
    devices = []
    model.model.get_image_features = lambda pixels, grids, **kwargs: devices.append(grids.device)
    assert SharedVision(ImageBanks()).install(model)
    model.model.get_image_features(torch.empty(24, 16, device="meta"), GRIDS[:1])
    assert devices == [torch.device("meta")]


def test_a_batch_of_any_mix_is_as_its_rows_alone(subtests):
    """Rows with no, one and several images give what a separate pass for each row gives.

    That holds for every family, and for a vision tower that is trained or frozen.
    """
    for model_type, frozen in product(VISION_FAMILIES, (False, True)):
        with subtests.test(f"{model_type} {'frozen' if frozen else 'trained'}"):
            assert_as_separate_rows(model_type, frozen)


def assert_as_separate_rows(model_type: str, frozen: bool) -> None:
    """Assert that a batch with patch numbers gives what separate rows with pixels give.

    `frozen`: whether the vision tower is not trained.
    """
    model = small_model_of(model_type)
    vision = SharedVision(ImageBanks())
    if frozen:
        model.model.visual.requires_grad_(False)
    expected = logps_of_separate_rows(model, PICTURES_OF_ROWS)
    reference = gradients(model, expected)
    assert vision.install(model)
    for shares, image_passes in ((True, 3), (False, 11)):
        vision.shares_images = shares
        vision.image_passes = 0
        row_logps = logps_of_shared_batch(model, vision, PICTURES_OF_ROWS)
        assert vision.image_passes == image_passes, "of eleven pictures three are distinct"
        logps_bound = LINEAR_BOUND if model_type == "qwen3_5" else FLOAT64_BOUND
        assert (row_logps - expected).abs().max() <= logps_bound * expected.abs().max()
        shared_gradients = gradients(model, row_logps)
        assert shared_gradients.keys() == reference.keys()
        assert any("visual." in name for name in shared_gradients) is not frozen
        largest_norm = max(tensor.norm() for tensor in reference.values())
        for name, gradient in reference.items():
            # A gradient that is next to nothing is compared with a thousandth of the largest.
            scale = max(gradient.norm(), 1e-3 * largest_norm)
            gap = (shared_gradients[name] - gradient).norm()
            assert gap <= gradient_bound(model_type, name) * scale, name


@pytest.fixture
def two_processes(monkeypatch):
    """Let `torch.distributed` say that there are two processes, of which the other is done."""
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    # the other one has no more passes
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor, op: None)


def test_rows_without_images_leave_the_tower_at_rest(subtests):
    """Without any image in the batch of a single process, the vision tower gets no gradients.

    It does not run then.
    """
    for model_type in VISION_FAMILIES:
        with subtests.test(model_type):
            model = small_model_of(model_type)
            vision = SharedVision(ImageBanks())
            expected = logps_of_separate_rows(model, [[], []])
            vision.install(model)
            row_logps = logps_of_shared_batch(model, vision, [[], []])
            assert (row_logps - expected).abs().max() <= LINEAR_BOUND * expected.abs().max()
            assert not any("visual." in name for name in gradients(model, row_logps))


def test_rows_without_images_among_processes_that_have_them(two_processes, subtests):
    """A process without images also has a gradient for each weight of the vision tower: 0.

    It is reduced with those of the processes that have images, so the tower runs there too.
    """
    for model_type in VISION_FAMILIES:
        with subtests.test(model_type):
            model = small_model_of(model_type)
            vision = SharedVision(ImageBanks())
            reference = gradients(model, logps_of_separate_rows(model, [[], []]))
            vision.install(model)
            text_gradients = gradients(model, logps_of_shared_batch(model, vision, [[], []]))
            assert text_gradients.keys() == {name for name, _ in model.named_parameters()}
            for name, gradient in text_gradients.items():
                right = reference.get(name, torch.zeros_like(gradient))
                assert (gradient - right).norm() <= gradient_bound(
                    model_type, name
                ) * gradient.norm()


def one_of_two(rank: int, port: int) -> None:
    """Run one of two processes, which learn from two rows each in DistributedDataParallel.

    The gradients that the two have in common are compared with the mean of two others: those of the
    rows of each process in separate passes.
    """
    # For each process the pictures of each row. The second process has none.
    rows_of_ranks: tuple[list[list[int]], ...] = ([[0], [2, 1, 1]], [[], []])
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    for model_type in FAMILIES_IN_PARALLEL:
        model = small_model_of(model_type)
        vision = SharedVision(ImageBanks())
        gradients_of_ranks = []
        for rows in rows_of_ranks:
            gradients_of_ranks.append(gradients(model, logps_of_separate_rows(model, rows)))
        vision.install(model)
        # It raises in the next step, or waits for ever, if a parameter has no gradient on one
        # process.
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        for _ in range(2):
            logps = logps_of_shared_batch(parallel, vision, rows_of_ranks[rank])
            rank_gradients = gradients(model, logps)
        largest_norm = max(tensor.norm() for tensor in rank_gradients.values())
        largest_vision_norm = 0.0
        for name, gradient in rank_gradients.items():
            no_gradient = torch.zeros_like(gradient)
            separate = [by_name.get(name, no_gradient) for by_name in gradients_of_ranks]
            expected = torch.stack(separate).mean(dim=0)
            bound = gradient_bound(model_type, name) * max(expected.norm(), 1e-3 * largest_norm)
            assert (gradient - expected).norm() <= bound, name
            if "visual." in name:
                largest_vision_norm = max(largest_vision_norm, float(gradient.norm()))
        assert largest_vision_norm > 1e-3 * largest_norm, "the vision tower learns too"
        print(f"{model_type} {len(rank_gradients)}")


FAMILIES_IN_PARALLEL = ("qwen2_5_vl", "qwen3_vl")


@pytest.mark.slow
def test_two_processes_of_which_one_has_no_image_learn_what_one_does():
    """Every gradient, also of the vision tower, is the mean over both processes.

    Each process prints a line for each model: its name and the number of its gradients.
    """
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    code = f"from tests.unit.packing.test_shared_vision import one_of_two; one_of_two(%d, {free_port()})"
    process_options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": environment,
    }
    ranks = [
        subprocess.Popen([sys.executable, "-c", code % rank], **process_options)
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    expected_lines = []
    for model_type in FAMILIES_IN_PARALLEL:
        parameter_count = len(list(small_model_of(model_type).named_parameters()))
        expected_lines.append(f"{model_type} {parameter_count}")
    for stdout, _ in outputs:
        assert stdout.splitlines() == expected_lines, outputs


def count_passes(tower: Any) -> list[int]:
    """Return a list that grows by one with each pass of the tower."""
    calls: list[int] = []
    tower.register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_a_frozen_tower_runs_as_often_on_a_process_without_images(two_processes, subtests):
    """A frozen vision tower runs once a generation on each process, with or without images.

    Its pass gathers weights, so every process has to make it. The first generation has no image on
    this process, and the second has one.
    """
    for model_type in VISION_FAMILIES:
        with subtests.test(model_type):
            model = small_model_of(model_type)
            vision = SharedVision(ImageBanks())
            model.model.visual.requires_grad_(False)
            calls = count_passes(model.model.visual)
            vision.install(model)
            generations: list[list[list[int]]] = [[[], []], [[], [0]]]
            for rows in generations:
                logps_of_shared_batch(model, vision, rows)
                assert len(calls) == 1
                bank = vision.banks.of_training()
                assert bank is not None
                assert not bank.may_have_new_images
                no_images = torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long)
                assert model.model.get_image_features(*no_images).pooler_output[0].shape == (0, 32)
                assert len(calls) == 1, "a later pass of the generation"
                calls.clear()


def test_images_are_divided_into_passes_by_their_patches():
    """A pass of the tower gets as many images as have at most so many patches, at least one.

    The arguments are each image's first patch, its number of patches, and the most of a pass.
    """
    assert split_into_passes([0, 7, 9, 30], [7, 2, 21, 4], 9) == [[0, 7], [9], [30]], (
        "a larger one has a pass of its own"
    )
    assert split_into_passes([0, 7], [7, 2], 100) == [[0, 7]]
    assert split_into_passes([], [], 9) == []


def test_a_frozen_tower_in_several_passes_gives_the_same_features(monkeypatch, subtests):
    """The features of images are the same from one pass of the tower and from three.

    With room for all patches there is one pass, and with room for one patch each image has its own.
    """
    for model_type in VISION_FAMILIES:
        with subtests.test(model_type):
            rows = [[0], [1, 0], [], [2]]
            results = []
            for limit in (16_000, 1):
                monkeypatch.setattr(adora_vl.packing.vision, "PATCHES_PER_PASS", limit)
                model = small_model_of(model_type)
                vision = SharedVision(ImageBanks())
                model.model.visual.requires_grad_(False)
                calls = count_passes(model.model.visual)
                vision.install(model)
                results.append(logps_of_shared_batch(model, vision, rows))
                assert len(calls) == (1 if limit > 1 else 3)
                assert vision.image_passes == 3
            assert (results[0] - results[1]).abs().max() <= LINEAR_BOUND * results[0].abs().max()


def test_a_frozen_tower_makes_as_many_passes_as_on_the_process_with_the_most(
    two_processes, monkeypatch, subtests
):
    """Both processes make as many passes of a frozen tower as the one that needs more.

    The other process needs four passes, and this one none, one or three. All its features are right
    nevertheless.
    """
    monkeypatch.setattr(adora_vl.packing.vision, "PATCHES_PER_PASS", 1)
    monkeypatch.setattr(
        distributed, "all_reduce", lambda passes, op: passes.fill_(max(4, int(passes)))
    )
    batches: list[list[list[int]]] = [[[]], [[0]], [[0], [1, 2]]]
    for rows in batches:
        with subtests.test(str(rows)):
            model = small_model_of("qwen2_5_vl")
            vision = SharedVision(ImageBanks())
            expected = logps_of_separate_rows(model, rows)
            model.model.visual.requires_grad_(False)
            calls = count_passes(model.model.visual)
            vision.install(model)
            row_logps = logps_of_shared_batch(model, vision, rows)
            assert len(calls) == 4
            assert row_logps.shape == expected.shape
            assert (row_logps - expected).abs().max() <= FLOAT64_BOUND * expected.abs().max()


class TextReader(SimpleNamespace):
    """A fake processor that reads every text as one token."""

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] for _ in text]}


def test_without_kept_images_a_frozen_tower_runs_in_every_pass(two_processes, subtests):
    """A frozen tower runs once a generation if images are kept, else in each of its passes.

    Only an image that is kept is known again, so only then are its features computed once. This
    process has no image, and makes as many passes of the tower as those with images do.
    """
    for keeps_images in (True, False):
        with subtests.test(f"images kept: {keeps_images}"):
            model = small_model_of("qwen2_5_vl")
            model.model.visual.requires_grad_(False)
            calls = count_passes(model.model.visual)
            switches: Any = AdoraKeys(adora_stock_step=[] if keeps_images else ["cache_images"])
            switches.chat_template_kwargs = None
            processor: Any = TextReader(image_processor=Qwen2VLImageProcessor())
            rows: Any = [{"prompt": "a text"}]
            images = DistinctImages(
                [model], processor, torch.device("cpu"), switches, Dataset.from_dict({})
            )
            no_images = torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long)
            images.prompts(rows, "train", refill=False)
            for _ in range(3):
                model.model.get_image_features(*no_images)
            assert len(calls) == (1 if keeps_images else 3)


def test_unshared_passes_ask_no_other_process(two_processes, monkeypatch):
    """A pass without sharing runs the tower once, with or without images, and reduces nothing.

    A frozen tower's pass gathers weights, which is recorded as "weights".
    """
    collectives: list[str] = []
    monkeypatch.setattr(
        distributed, "all_reduce", lambda tensor, op: collectives.append("all_reduce")
    )
    collectives_of_process = []
    for pictures_of_row in ([0], []):
        model = small_model_of("qwen2_5_vl")
        vision = SharedVision(ImageBanks())
        model.model.visual.requires_grad_(False)
        model.model.visual.register_forward_hook(lambda *_: collectives.append("weights"))
        vision.install(model)
        vision.banks.new("train").store("of the generation", pictures()[1], GRIDS[1])
        # Zero rows come first, so that there is something to join without a picture.
        no_pixels = torch.zeros(0, 16, dtype=torch.float64)
        pixels = torch.cat([no_pixels, *[pictures()[number] for number in pictures_of_row]])
        with vision.without_sharing():
            model.model.get_image_features(pixels, GRIDS[pictures_of_row])
        collectives_of_process.append([*collectives])
        collectives.clear()
    assert collectives_of_process == [["weights"], ["weights"]]


def small_tower() -> Any:
    """Return a vision tower of three blocks, the middle one of full attention.

    The others attend in windows of 112 pixels a side, as the published models do.
    """
    config = Qwen2_5_VLVisionConfig(
        depth=3,
        hidden_size=32,
        num_heads=2,
        intermediate_size=24,
        out_hidden_size=16,
        window_size=112,
        fullatt_block_indexes=[1],
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return Qwen2_5_VisionTransformerPretrainedModel(config).double()


def features_and_gradients(tower: Any, pixels: Tensor, grids: Tensor) -> list[Tensor]:
    """Return the features, and the gradients of a loss in which each feature has its own weight.

    The gradients are those of the pixels and of each parameter.
    """
    pixels_in = pixels.clone().requires_grad_()
    features = tower(pixels_in, grid_thw=grids).pooler_output
    tower.zero_grad()
    weights = torch.linspace(0.5, 1.5, features.numel(), dtype=features.dtype).view_as(features)
    (features * weights).sum().backward()
    parameter_gradients = [parameter.grad for parameter in tower.parameters()]
    return [features.detach(), pixels_in.grad, *parameter_gradients]


# An image's side in patches. Whole windows have 8 patches a side, and an image token has 2.
SIDES = st.integers(1, 13).map(lambda tokens: 2 * tokens)
# (frames, height, width) of each image, in patches
SIZES = st.lists(st.tuples(st.sampled_from([1, 1, 2]), SIDES, SIDES), min_size=1, max_size=4)


@pytest.mark.slow
@given(SIZES)
@settings(max_examples=25)
def test_features_and_gradients_are_those_of_the_loop(grids):
    """The vision tower gives the same with one attention call for all windows of one size.

    The stock tower loops over the windows.
    """
    tower = small_tower()
    sizes = torch.tensor(grids)
    pixels = torch.randn(int(sizes.prod(dim=1).sum()), 1176, dtype=torch.float64)
    assert tower.config._attn_implementation == "sdpa"
    loop = features_and_gradients(tower, pixels, sizes)
    assert batch_windows(tower, True)
    batched = features_and_gradients(tower, pixels, sizes)
    assert not batch_windows(tower, False)
    assert tower.config._attn_implementation == "sdpa"
    for loop_tensor, batched_tensor in zip(loop, batched, strict=True):
        assert (loop_tensor - batched_tensor).norm() <= 1e-12 * max(loop_tensor.norm(), 1e-3)


@given(st.lists(st.sampled_from([64, 32, 16, 4]), min_size=1, max_size=30))
def test_every_patch_has_its_place_and_its_way_back(lengths):
    """Sorting windows by their size loses no patch, and the inverse order undoes it.

    `lengths`: the patches of each window.
    """
    windows = sort_windows(tuple(lengths), torch.device("cpu"))
    patch_count = sum(size * count for size, count in windows.count_by_size.items())
    assert patch_count == sum(lengths)
    assert len(windows.count_by_size) == len(set(lengths))
    if windows.order is not None:
        restored = windows.order[windows.inverse_order]
        assert torch.equal(restored, torch.arange(sum(lengths)))


def test_one_call_per_size_and_block_whatever_the_number_of_windows(monkeypatch):
    """Attention is called once for each size of windows in a block, where the stock tower loops."""
    batch_sizes: list[int] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def record_batch_size(query: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        batch_sizes.append(len(query))
        return attention(query, *arguments, **keywords)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record_batch_size)
    # Two images of 24 x 20 patches have 3 x 3 windows each: six of 8 x 8 patches, three of 8 x 4.
    tower = small_tower()
    grids = torch.tensor([[1, 24, 20], [1, 24, 20]])
    pixels = torch.randn(2 * 480, 1176, dtype=torch.float64)
    tower(pixels, grid_thw=grids)
    # A call for each of 18 windows, for each of 2 images in the middle block, and for 18 windows.
    assert batch_sizes == [1] * (18 + 2 + 18)
    batch_sizes.clear()
    batch_windows(tower, True)
    tower(pixels, grid_thw=grids)
    # The large and the small windows of both images, the two images, and the windows again.
    assert batch_sizes == [12, 6, 2, 12, 6]


@given(SIZES)
@settings(max_examples=10)
def test_bounds_from_the_host_change_no_bit(grids):
    """Features are equal to the bit if the tower gets the bounds of its windows as arguments.

    The stock tower computes them on its device and reads them back; here the CPU computes them.
    """
    tower = small_tower()
    sizes = torch.tensor(grids)
    pixels = torch.randn(int(sizes.prod(dim=1).sum()), 1176, dtype=torch.float64)
    bounds = {
        name.removeprefix("image_"): value
        for name, value in window_arguments(tower, sizes, "cpu").items()
    }
    for batched in (False, True):
        batch_windows(tower, batched)
        stock = tower(pixels, grid_thw=sizes).pooler_output
        ours = tower(pixels, grid_thw=sizes, **bounds).pooler_output
        assert torch.equal(stock, ours)


def test_a_tower_on_a_device_reads_nothing_back(subtests):
    """The bounds of windows are known to the host, so nothing waits for the GPU.

    The meta device has no values: whatever would wait for one raises an error there.
    """
    for batched, trained in product((False, True), (False, True)):
        with subtests.test(f"{batched=} {trained=}"):
            model = small_model("qwen2_5_vl")
            vision = SharedVision(ImageBanks())
            model.to("meta").model.visual.requires_grad_(trained)
            original = model.model.get_image_features
            vision.install(model)
            vision.switch_batched_windows(on=batched)
            bank = vision.banks.new("train")
            starts = [
                int(bank.store(str(number), pixels.to("meta"), GRIDS[number])[0])
                for number, pixels in enumerate(pictures())
            ]
            output = vision._run_on_images(
                bank,
                starts,
                partial(run_tower, model.model.visual, original, {}, torch.device("meta")),
            )
            assert [len(features) for features in output.pooler_output] == [6, 2, 6]
            with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
                original(torch.cat([pixels.to("meta") for pixels in pictures()]), GRIDS.to("meta"))


def test_flash_attention_gets_its_bounds_on_the_device():
    """The bounds of windows are on the tower's device for flash attention, and on the CPU for sdpa.

    Flash attention's kernel reads them there; sdpa reads them on the host. 480 patches are the most
    of an image, 24 x 20, and 64 are the most of a window, 8 x 8.
    """
    tower = small_tower()
    tower.config._attn_implementation = "flash_attention_2"
    bounds_by_name = window_arguments(tower, torch.tensor([[1, 24, 20], [1, 8, 10]]), "meta")
    on_device = {
        name
        for name, value in bounds_by_name.items()
        if isinstance(value, Tensor) and value.is_meta
    }
    bounds = {"image_cu_seqlens", "image_cu_window_seqlens"}

    assert on_device == {*bounds, "image_window_index", "image_position_ids"}
    assert bounds_by_name["image_max_seqlen"] == 480
    assert bounds_by_name["image_max_window_seqlen"] == 64
    tower.config._attn_implementation = "sdpa"
    bounds_by_name = window_arguments(tower, torch.tensor([[1, 24, 20]]), "meta")
    assert all(bounds_by_name[name].device.type == "cpu" for name in bounds)


def test_an_order_made_without_gradients_serves_a_pass_with_them():
    """The order of windows is cached under inference mode, and used in a pass with gradients."""
    tower = small_tower()
    grids = torch.tensor([[1, 14, 22]])
    batch_windows(tower, True)
    pixels = torch.randn(308, 1176, dtype=torch.float64)
    with torch.inference_mode():
        tower(pixels, grid_thw=grids)
    assert features_and_gradients(tower, pixels, grids)[1].abs().sum() > 0


def test_another_tower_and_another_attention_stay_as_they_are(subtests):
    """Batched windows are for the tower of Qwen2.5-VL with sdpa alone."""
    config = Qwen2VLVisionConfig(
        depth=1,
        embed_dim=32,
        num_heads=2,
        hidden_size=16,
    )
    older_tower = Qwen2VisionTransformerPretrainedModel(config)
    for attention, tower in (
        ("eager", small_tower()),
        ("flash_attention_2", small_tower()),
        ("sdpa", older_tower),
    ):
        with subtests.test(attention):
            tower.config._attn_implementation = attention
            assert not batch_windows(tower, True)
            assert tower.config._attn_implementation == attention


def test_the_name_is_in_no_saved_model(tmp_path):
    """A saved configuration does not name the attention that batches windows.

    Nobody without this package could load a model with that name.
    """
    tower = small_tower()
    batch_windows(tower, True)
    Qwen2_5_VLConfig(vision_config=tower.config.to_dict()).save_pretrained(tmp_path)
    tower.save_pretrained(tmp_path / "eye")
    saved = [path.read_text() for path in tmp_path.rglob("config.json")]
    assert len(saved) == 2
    assert not any(BATCHED_ATTENTION in text for text in saved)


def test_another_tower_can_be_built_from_its_configuration():
    """The configuration of a tower with batched windows still says "sdpa", so it builds another.

    Only the configurations of the blocks' attention name ours. Transformers would look for a kernel
    of that name, and stop.
    """
    tower = small_tower()
    assert batch_windows(tower, True)
    assert all(
        block.attn.config._attn_implementation == BATCHED_ATTENTION for block in tower.blocks
    )
    assert type(tower)(tower.config).config._attn_implementation == "sdpa"
