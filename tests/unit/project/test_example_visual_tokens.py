"""The example of visual tokens weighs a batch by how much its tokens depend on the image."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from adora_vl.packing.image_store import ImageBanks
from tests.support.examples import (
    example_entry,
    generation_of_step,
    load_example,
    started_extension,
)
from tests.support.pictures import noise_picture
from tests.support.stand_ins import FakeAccelerator
from tests.support.tiny_run import TINY_RUN_STEPS, train_tiny_run


def test_visual_tokens_weigh_a_batch_by_hand():
    """The half of the tokens that depends most on the image keeps its advantage, times a factor.

    The first rollout depends on its image most, so its factor is the largest. The third has no
    image, and stays as it is.
    """
    seen_BC = torch.zeros(3, 4)
    blind_BC = torch.tensor([[-1.0, 0, -2, 0], [0, 0, 0, -1], [-3, -3, -3, -3]])
    passes = [seen_BC, blind_BC]
    log: dict[str, float] = {}
    keys = {
        "accelerator": FakeAccelerator(),
        "policy_logps": lambda batch, pixels=None: passes.pop(0),
    }
    processor = Qwen2VLImageProcessor()
    images = SimpleNamespace(banks=ImageBanks(), image_processor=processor, may_be_shown=True)
    extension = started_extension(
        "visual_tokens.py:VisualTokens",
        log,
        keys=keys,
        images=images,
        share=0.5,
    )
    ones = torch.ones(3, 4, dtype=torch.long)
    batch: Any = {"completion_mask": ones, "advantages": torch.tensor([1.0, -2.0, 3.0])}
    batch["num_images"] = [1, 1, 0]
    advantages: Any = SimpleNamespace(has_signal_N=torch.ones(3, dtype=torch.bool))
    extension.after_weighing(generation_of_step(0), batch, advantages)
    # Two rollouts, at 0 and 1 of the range: 0.9 and 0.9 + 0.1 / 0.5.
    expected = [
        [1.1, 0, 1.1, 0],
        [-1.8, 0, 0, -1.8],
        [3, 3, 3, 3],
    ]
    assert [row.tolist() for row in batch["advantages"]] == [pytest.approx(row) for row in expected]
    # A token that lost n nats depends on the image by exp(-n) + n - 1: two lost one nat, one two.
    of_one_nat = math.exp(-1)
    of_two_nats = math.exp(-2) + 1
    assert log == pytest.approx(
        {
            "visual_tokens/dependency": (2 * of_one_nat + of_two_nats) / 8,
            "visual_tokens/share": 8 / 12,
        }
    )


def test_a_rollout_is_scaled_by_its_place_among_those_with_an_image():
    """The rollouts that depend most and least on their image have factors as far from 1.

    A rollout without an image (NaN) has the factor 1. A single one far ahead is bounded.
    """
    rollout_scale = load_example("visual_tokens.py:rollout_scale")
    dependencies = torch.tensor([math.nan, 0.1, 0.3])
    assert rollout_scale(dependencies, dependencies, 0.5).tolist() == pytest.approx([1.0, 0.5, 1.5])
    one_far_dependency = torch.full((200,), 0.02)
    one_far_dependency[3] = 2.0
    assert rollout_scale(one_far_dependency, one_far_dependency, 0.9).max().item() == pytest.approx(
        2.5
    ), "however far one is"


def test_half_of_every_image_is_black_alike_for_the_rollouts_of_a_group():
    """Patches are hidden by the group's key, in pixels as in patch numbers."""
    half_black = load_example("visual_tokens.py:half_black")
    blackened = load_example("visual_tokens.py:blackened")
    black_patch = load_example("visual_tokens.py:black_patch")
    processor = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 84)
    first_inputs = processor([noise_picture(0, (84, 56))], return_tensors="pt")
    second_inputs = processor([noise_picture(1, (84, 56))], return_tensors="pt")
    first_patches = first_inputs["pixel_values"]
    second_patches = second_inputs["pixel_values"]
    black_D = black_patch(processor, first_patches.size(1))
    black = processor([Image.new("RGB", (84, 56))], return_tensors="pt")["pixel_values"]
    assert torch.equal(black, black_D.expand_as(black))
    hidden_R = (blackened(first_patches.repeat(50, 1), black_D, "42") == black_D).all(dim=1)
    # 0.05 is 3.5 standard deviations of 1,200 draws.
    assert hidden_R.float().mean().item() == pytest.approx(0.5, abs=0.05)
    # A batch with the pixels themselves: both rollouts see the same half.
    grid = first_inputs["image_grid_thw"]
    pixels: Any = {"pixel_values": first_patches.repeat(2, 1), "image_grid_thw": grid.repeat(2, 1)}
    with half_black(ImageBanks(), processor, pixels, "x") as pixels_now:
        assert torch.equal(*pixels_now.split(len(first_patches)))
        assert not torch.equal(pixels_now[: len(first_patches)], first_patches)
    # A batch with the patch numbers of stored images, as in a training.
    banks = ImageBanks()
    bank = banks.new("train")
    references_by_image = [
        bank.store(f"image{n}", pixels, grid[0])
        for n, pixels in enumerate((first_patches, second_patches))
    ]
    image_order = [0, 0, 1, 0]  # two rollouts of one image, one of another, and the first again
    references: Any = {
        "pixel_values": torch.cat(
            [references_by_image[image_number] for image_number in image_order]
        ),
        "image_grid_thw": grid.repeat(4, 1),
    }
    with half_black(banks, processor, references, "42/1/0") as pixels_now:
        training_bank = banks.of_training()
        assert training_bank is banks.of(int(pixels_now[0])) is not bank
        assert len(training_bank) == 2
        starts = pixels_now.view(4, -1)[:, 0].tolist()
        assert starts[0] == starts[1] == starts[3] != starts[2], "an image is passed once"
        assert torch.equal(
            training_bank.pixels(starts[:1])[0], blackened(first_patches, black_D, "42/1/0/image0")
        )
    assert banks.of_training() is bank
    # A batch without images.
    text_batch: Any = {}
    with half_black(banks, processor, text_batch, "x") as pixels_now:
        assert pixels_now is None


@pytest.mark.slow
def test_a_run_learns_from_the_tokens_that_depend_on_the_image(tmp_path):
    """The logged share is at least that of the option, and the dependency is positive."""
    extension = f"{{{example_entry('visual_tokens.py:VisualTokens')}: {{share: 0.4}}}}"
    keys = {"adora_extensions": extension, "save_strategy": "no"}
    folder = train_tiny_run(tmp_path / "run", **keys)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "visual_tokens/share" in line]
    assert len(steps) == TINY_RUN_STEPS
    for line in steps:
        assert 0.4 <= line["visual_tokens/share"] < 0.45
        assert line["visual_tokens/dependency"] > 0
