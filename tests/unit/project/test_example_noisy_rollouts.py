"""The example of noisy rollouts, and the reward of its recipe, do what their authors' code does."""

import math
import runpy
from itertools import product
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import TrainerState
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from adora_vl.config.batch_plan import build_batch_layout
from adora_vl.rollout.rollouts import DrawnProblem, Rollout, RolloutGroup, StepKey
from adora_vl.training.extensions import build_extensions
from adora_vl.types import Row
from tests.support.commands import parse
from tests.support.examples import EXAMPLES, generation_of_step, load_example, started_extension
from tests.support.pictures import noise_picture
from tests.support.step_context import step_context

PICTURE_SIZE = (56, 28)


def start_noisy_rollouts(
    progress: float, log: dict[str, float] | None = None, **options: Any
) -> Any:
    """Return NoisyRollouts, started at this share of a run of 600 steps."""
    state = TrainerState(global_step=round(progress * 600), max_steps=600)
    options = {"middle": 2 / 3, **options}
    keys = {"state": state, "num_generations": 8}
    return started_extension("noisy_rollouts.py:NoisyRollouts", log, keys=keys, **options)


def group_of_step(number: int, members: int = 8, first: int = 0, step: int = 0) -> RolloutGroup:
    """Return a group of a step, or the part of it that a rank has."""
    drawn_problem = DrawnProblem(
        row_number=5, key=StepKey(mode="train", step=step, micro=0), group_number=number
    )
    return RolloutGroup(
        problem=drawn_problem,
        row=Row(),
        start_generation=0,
        rollouts=(Rollout(),) * members,
        first_rollout_index=first,
    )


def test_noisy_rollouts_fade_as_in_the_authors_repository():
    """The distortion fades by a sigmoid over the run, as in the authors' run on Geometry3K.

    Their run has 60 generations, half of the strength at the 40th, and steepness 30.
    """
    sigmoid_annealing = load_example("noisy_rollouts.py:sigmoid_annealing")
    for generation, expected_share in (
        (0, 1.0),
        (40, 0.5),
        (44, 1 / (1 + math.exp(2))),
    ):
        factor = sigmoid_annealing(generation / 60, middle=40 / 60, steepness=30)
        assert factor == pytest.approx(expected_share, abs=1e-6)
    assert sigmoid_annealing(0.0, middle=1.0, steepness=1e300) == 1.0, "nothing overflows"
    # A run of 600 steps has ten in each generation. At its start the sigmoid is a little below 1.
    levels = [start_noisy_rollouts(progress=0).level(10 * generation) for generation in range(61)]
    assert (levels[0], levels[40], levels[-1]) == (499, 250, 0), "whole steps, rounded down"
    assert levels == sorted(levels, reverse=True)
    assert start_noisy_rollouts(progress=0, schedule="constant").level(600) == 500


def test_noise_has_the_share_of_a_picture_that_its_level_says():
    """Level 0 has the diffusion's first variance; a grey picture at 150 has share and noise."""
    signal_share = load_example("noisy_rollouts.py:signal_share")
    distort = load_example("noisy_rollouts.py:distorted")
    first_variance = 1e-5 + (5e-3 - 1e-5) / (1 + math.exp(6))
    assert signal_share(0) == pytest.approx(math.sqrt(1 - first_variance))
    grey = Image.new("RGB", (200, 200), (128, 128, 128))
    pixels = np.asarray(distort(grey, "gaussian", 150, seed=1)) / 255
    share = signal_share(150)  # weak enough that hardly a pixel is cut off
    assert pixels.mean() == pytest.approx(share * 128 / 255, abs=0.005)
    assert pixels.std() == pytest.approx(math.sqrt(1 - share**2), rel=0.05)


def test_the_last_rollouts_of_a_group_see_one_image_of_the_same_patches():
    """The last four of a group's eight rollouts see one and the same distorted image.

    That holds too if the group lies over two ranks. Another problem or step has another image.
    """
    extension = start_noisy_rollouts(progress=0)
    images = [noise_picture(0, PICTURE_SIZE)]
    group = extension.images_of(group_of_step(3), images)
    assert group[:4] == [None] * 4
    assert None not in group[4:]
    assert len({id(rollout_images) for rollout_images in group[4:]}) == 1, "they stay one request"
    on_first_rank = extension.images_of(group_of_step(3, members=5), images)
    on_second_rank = extension.images_of(group_of_step(3, members=3, first=5), images)
    assert pixels_of([*on_first_rank, *on_second_rank]) == pixels_of(group)
    of_another_problem = extension.images_of(group_of_step(4), images)
    of_another_step = extension.images_of(group_of_step(3, step=60), images)
    last_rollouts = pixels_of([group[7], of_another_problem[7], of_another_step[7]])
    assert len(set(last_rollouts)) == 3


def pixels_of(images_of_rollouts: list[Any]) -> list[bytes | None]:
    """Return the bytes of each rollout's only image, or None where it sees the row's own."""
    return [images and images[0].tobytes() for images in images_of_rollouts]


def test_without_a_share_or_strength_no_rollout_sees_noise():
    """No share of the group, or no strength, leaves every rollout the row's image."""
    images = [noise_picture(0, PICTURE_SIZE)]
    for extension in (
        start_noisy_rollouts(progress=0, share=0.0),
        start_noisy_rollouts(progress=0, strength=0.0),
    ):
        assert extension.images_of(group_of_step(0), images) == [None] * 8


def test_the_level_of_the_noise_is_logged():
    """At step 400 of 600 it is half of 500."""
    log: dict[str, float] = {}
    start_noisy_rollouts(progress=0, log=log).after_weighing(generation_of_step(400), {}, None)
    assert log == {"noisy_rollouts/level": 250.0}


def test_a_noisy_picture_has_the_patches_of_the_clean_one():
    """A distorted picture has the grid of patches of the clean one, whatever its size and mode.

    Sizes are below, inside and beside the processor's bounds.
    """
    distort = load_example("noisy_rollouts.py:distorted")
    show_as_seen = load_example("noisy_rollouts.py:as_seen")
    processor = Qwen2VLImageProcessor(min_pixels=12544, max_pixels=50176)
    for size, mode in product([(40, 30), (300, 200), (900, 33)], ["RGB", "L", "P", "RGBA"]):
        image = noise_picture(0, size).convert(mode)
        noisy_image = distort(show_as_seen(image, processor), "gaussian", 300.0, 1)
        clean_inputs = processor([image.convert("RGB")], return_tensors="pt")
        noisy_inputs = processor([noisy_image], return_tensors="pt")
        assert noisy_inputs["image_grid_thw"].tolist() == clean_inputs["image_grid_thw"].tolist()


def test_the_recipe_of_noisy_rollouts_is_that_of_its_repository():
    """The recipe learns from 512 prompts of 6 clean and 6 distorted rollouts in 4 steps."""
    arguments = ["--config", str(EXAMPLES / "noisy_7b_geo3k.yaml"), "--use_cpu", "true"]
    script, config, _ = parse([*arguments, "--bf16", "false"])
    assert script.adora_system_prompt.startswith("You FIRST think")
    assert config.reward_weights == [0.9, 0.1]
    plan = build_batch_layout(config, 8)
    assert plan.prompts_per_generation == 512
    assert plan.updates_per_generation == 4
    assert plan.optimizer_batch == 128 * 12
    assert config.save_steps == 2101 // 512 * 4
    extension: Any = build_extensions(config)["NoisyRollouts"]
    assert extension.count(config.num_generations) == 6
    for generation in (1, 20, 35, 39, 41, 45, 60):  # a generation as it is counted there
        published_level = int(500 * (1 - 1 / (1 + math.exp(-30 * (generation / 60 - 40 / 60)))))
        extension.start(step_context(state=TrainerState(max_steps=60)), None)
        assert extension.level(generation - 1) == published_level, generation


def test_the_reward_of_the_recipe_wants_thinking_and_then_a_box():
    """Thinking first, closed, and then a closed box; a prompt may have opened the thinking."""
    reward = runpy.run_path(str(EXAMPLES / "think_and_box.py"))["think_and_box"]
    reward_by_response = {
        r"<think>a</think> \boxed{4}": 1.0,
        "<think>a</think>\n\\boxed{4} m": 1.0,
        r"<think>a</think> 4": 0.0,
        r"<think>\boxed{4}</think> 4": 0.0,
        r"so <think>a</think> \boxed{4}": 0.0,
        r"<think>a</think> \boxed{4": 0.0,
    }
    answers = [[{"role": "assistant", "content": text}] for text in reward_by_response]
    assert reward(answers) == list(reward_by_response.values())
    opened_thinking = [[{"role": "assistant", "content": r"a</think> \boxed{4}"}]] * 2
    assert reward(opened_thinking, thinking_opened=[True, False]) == [1.0, 0.0]
