"""The files of docs/examples do what they say, as a run takes them."""

import json
import math
import runpy
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import TrainerState
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from adora_vl.advantage import AdvantagePipeline, Groups, Schedule, group_advantages
from adora_vl.config.batch_plan import batch_plan
from adora_vl.config.schema import parse
from adora_vl.packing.image_store import ImageBanks
from adora_vl.rollout.rollouts import DrawnProblem, Rollout, RolloutGroup, StepKey
from adora_vl.training.extensions import chosen_extensions
from adora_vl.training.generation import Generation
from adora_vl.types import Row
from tests.support.examples import EXAMPLES, entry, example
from tests.support.pictures import noise_picture
from tests.support.reward_groups import random_groups, weighed_by
from tests.support.stand_ins import Processes
from tests.support.step_context import step_context
from tests.support.tiny_run import STEPS, train

SIZE = (56, 28)


def advantages_of(method, rewards, lengths=None):
    """Return what a method by itself makes of these groups."""
    lengths = torch.ones_like(rewards) if lengths is None else lengths
    groups = Groups(rewards, lengths, lengths < 0)
    return method.apply(groups, torch.zeros_like(rewards), AdvantagePipeline({}))


def test_canon_compares_a_rollout_with_one_half_of_its_group():
    canon = example("canon.py:Canon")
    rewards = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    lengths = torch.tensor([[1, 2, 3, 4]])
    # The mean of the short ones is 1/2, that of the long ones 1.
    with_the_other_half = canon(measure="length", inter=Schedule(1.0))
    assert advantages_of(with_the_other_half, rewards, lengths).tolist() == [[0.0, -1.0, 0.5, 0.5]]
    with_its_own_half = canon(measure="length", inter=Schedule(0.0))
    assert advantages_of(with_its_own_half, rewards, lengths).tolist() == [[0.5, -0.5, 0.0, 0.0]]


def test_canon_halves_a_group_also_where_values_are_equal_or_missing():
    upper_half = example("canon.py:upper_half")
    tied = torch.tensor([[5.0, 5.0, 9.0, 1.0]])
    assert upper_half(tied).tolist() == [[0.5, 0.5, 1.0, 0.0]]
    missing = torch.tensor([[1.0, 2.0, math.nan]])
    assert upper_half(missing).tolist() == [[0.0, 1.0, 0.0]]


def test_canon_between_both_comparisons_is_stock():
    canon = example("canon.py:Canon")
    neutral = canon(inter=Schedule(0.5))
    groups = random_groups()
    stock = group_advantages(groups.rewards_PG, scale="none")
    assert torch.equal(weighed_by("canon", groups, neutral, "none"), stock)
    assert not torch.equal(weighed_by("canon", groups, canon(), "none"), stock)


def test_ngrpo_gives_groups_that_are_wrong_throughout_negative_advantages():
    """The paper's own case: one right of eight gets 2.47 from GRPO, and 1.76 from NGRPO."""
    ngrpo = example("ngrpo.py:Ngrpo")
    one_right = torch.tensor([[1.0] + [0.0] * 7])
    stock = group_advantages(one_right)[0]
    assert stock[:2].tolist() == pytest.approx([2.474, -0.354], abs=2e-3)
    ours = advantages_of(ngrpo(), one_right)[0]
    assert ours[:2].tolist() == pytest.approx([1.764, -0.504], abs=1e-3)
    # Wrong throughout: the mean is (0 + 0 + 1) / 3, the deviation sqrt(1 / 3).
    expected = -(1 / 3) / (math.sqrt(1 / 3) + 1e-4)
    all_wrong = torch.zeros(1, 2)
    assert advantages_of(ngrpo(), all_wrong).tolist() == [pytest.approx([expected] * 2)]
    all_right = torch.ones(1, 4)
    assert advantages_of(ngrpo(), all_right).tolist() == [[0.0] * 4]
    groups = random_groups()
    assert torch.equal(weighed_by("ngrpo", groups, ngrpo(virtual=0)), weighed_by("grpo", groups))


def started(name: str, log: dict[str, float] | None = None, **options: Any) -> Any:
    """Return an extension as a trainer starts it; `images` and `keys` are the context's."""
    images = options.pop("images", SimpleNamespace(image_processor=None))
    keys = options.pop("keys", {})
    extension = example(name)(**options)
    extension.start(step_context(log, **keys), images)
    return extension


def noisy_at(progress: float, log: dict[str, float] | None = None, **options: Any) -> Any:
    """NoisyRollouts at this share of a run of 600 steps."""
    state = TrainerState(global_step=round(progress * 600), max_steps=600)
    options = {"middle": 2 / 3, **options}
    keys = {"state": state, "num_generations": 8}
    return started("noisy_rollouts.py:NoisyRollouts", log, keys=keys, **options)


def part(number: int, members: int = 8, first: int = 0, step: int = 0) -> RolloutGroup:
    """Return a group, or the part of it that a rank has."""
    drawn = DrawnProblem(row_number=5, key=StepKey(mode="train", step=step, micro=0), slot=number)
    return RolloutGroup(
        problem=drawn,
        row=Row(),
        began=0,
        rollouts=(Rollout(),) * members,
        first_member=first,
    )


def at_step(step: int) -> Generation:
    return Generation(key=StepKey(mode="train", step=step, micro=0), group_size=4)


def test_noisy_rollouts_fade_as_in_the_authors_repository():
    """Their Geometry3K run has 60 generations, half of the strength at the 40th, and steepness 30."""
    annealing = example("noisy_rollouts.py:sigmoid_annealing")
    for generation, share in (
        (0, 1.0),
        (40, 0.5),
        (44, 1 / (1 + math.exp(2))),
    ):
        factor = annealing(generation / 60, middle=40 / 60, steepness=30)
        assert factor == pytest.approx(share, abs=1e-6)
    assert annealing(0.0, middle=1.0, steepness=1e300) == 1.0, "nothing overflows"
    levels = [noisy_at(0).level(10 * step) for step in range(61)]
    assert (levels[0], levels[40], levels[-1]) == (499, 250, 0), "whole steps, rounded down"
    assert levels == sorted(levels, reverse=True)
    assert noisy_at(0, schedule="constant").level(600) == 500


def test_noise_has_the_share_of_a_picture_that_its_level_says():
    signal_share = example("noisy_rollouts.py:signal_share")
    distorted = example("noisy_rollouts.py:distorted")
    first_variance = 1e-5 + (5e-3 - 1e-5) / (1 + math.exp(6))
    assert signal_share(0) == pytest.approx(math.sqrt(1 - first_variance))
    grey = Image.new("RGB", (200, 200), (128, 128, 128))
    pixels = np.asarray(distorted(grey, "gaussian", 150, seed=1)) / 255
    share = signal_share(150)  # weak enough that hardly a pixel is cut off
    assert pixels.mean() == pytest.approx(share * 128 / 255, abs=0.005)
    assert pixels.std() == pytest.approx(math.sqrt(1 - share**2), rel=0.05)


def test_the_last_rollouts_of_a_group_see_one_image_of_the_same_patches():
    """A group may lie over two ranks; another problem and another step see another image."""
    noisy = noisy_at(0)
    images = [noise_picture(0, SIZE)]
    group = noisy.images_of(part(3), images)
    assert group[:4] == [None] * 4
    assert None not in group[4:]
    assert len({id(rollout_images) for rollout_images in group[4:]}) == 1, "they stay one request"
    on_first_rank = noisy.images_of(part(3, 5), images)
    on_second_rank = noisy.images_of(part(3, 3, first=5), images)
    assert pixels_of([*on_first_rank, *on_second_rank]) == pixels_of(group)
    of_another_problem = noisy.images_of(part(4), images)
    of_another_step = noisy.images_of(part(3, step=60), images)
    last_rollouts = pixels_of([group[7], of_another_problem[7], of_another_step[7]])
    assert len(set(last_rollouts)) == 3


def pixels_of(images_of_rollouts: list[Any]) -> list[bytes | None]:
    """Return the bytes of each rollout's only image, or None where it sees the row's own."""
    return [images and images[0].tobytes() for images in images_of_rollouts]


def test_without_a_share_or_strength_no_rollout_sees_noise():
    images = [noise_picture(0, SIZE)]
    for noisy in (noisy_at(0, share=0.0), noisy_at(0, strength=0.0)):
        assert noisy.images_of(part(0), images) == [None] * 8


def test_the_level_of_the_noise_is_logged():
    log: dict[str, float] = {}
    noisy_at(0, log).after_weighing(at_step(400), {}, None)
    assert log == {"noisy_rollouts/level": 250.0}


def test_a_noisy_picture_has_the_patches_of_the_clean_one():
    distorted = example("noisy_rollouts.py:distorted")
    as_seen = example("noisy_rollouts.py:as_seen")
    processor = Qwen2VLImageProcessor(min_pixels=12544, max_pixels=50176)
    for size, mode in product([(40, 30), (300, 200), (900, 33)], ["RGB", "L", "P", "RGBA"]):
        image = noise_picture(0, size).convert(mode)
        noisy_image = distorted(as_seen(image, processor), "gaussian", 300.0, 1)
        clean = processor([image.convert("RGB")], return_tensors="pt")
        noisy = processor([noisy_image], return_tensors="pt")
        assert noisy["image_grid_thw"].tolist() == clean["image_grid_thw"].tolist()


def test_the_recipe_of_noisy_rollouts_is_that_of_its_repository():
    """The recipe learns from 512 prompts of 6 clean and 6 distorted rollouts in 4 steps."""
    words = ["--config", str(EXAMPLES / "noisy_7b_geo3k.yaml"), "--use_cpu", "true"]
    script, config, _ = parse([*words, "--bf16", "false"])
    assert script.adora_system_prompt.startswith("You FIRST think")
    assert config.reward_weights == [0.9, 0.1]
    plan = batch_plan(config, 8)
    assert plan.prompts_per_generation == 512
    assert plan.updates_per_generation == 4
    assert plan.optimizer_batch == 128 * 12
    assert config.save_steps == 2101 // 512 * 4
    noisy: Any = chosen_extensions(config)["NoisyRollouts"]
    assert noisy.count(config.num_generations) == 6
    for number in (1, 20, 35, 39, 41, 45, 60):  # a generation as it is counted there
        published_level = int(500 * (1 - 1 / (1 + math.exp(-30 * (number / 60 - 40 / 60)))))
        noisy.start(step_context(state=TrainerState(max_steps=60)), None)
        assert noisy.level(number - 1) == published_level, number


def test_the_reward_of_the_recipe_wants_thinking_and_then_a_box():
    reward = runpy.run_path(str(EXAMPLES / "think_and_box.py"))["think_and_box"]
    forms = {
        r"<think>a</think> \boxed{4}": 1.0,
        "<think>a</think>\n\\boxed{4} m": 1.0,
        r"<think>a</think> 4": 0.0,
        r"<think>\boxed{4}</think> 4": 0.0,
        r"so <think>a</think> \boxed{4}": 0.0,
        r"<think>a</think> \boxed{4": 0.0,
    }
    answers = [[{"role": "assistant", "content": text}] for text in forms]
    assert reward(answers) == list(forms.values())
    begun = [[{"role": "assistant", "content": r"a</think> \boxed{4}"}]] * 2
    assert reward(begun, thinking_opened=[True, False]) == [1.0, 0.0]


def test_visual_tokens_weigh_a_batch_by_hand():
    """The first rollout depends on its image most, and the third has none."""
    seen_BC = torch.zeros(3, 4)
    blind_BC = torch.tensor([[-1.0, 0, -2, 0], [0, 0, 0, -1], [-3, -3, -3, -3]])
    passes = [seen_BC, blind_BC]
    log: dict[str, float] = {}
    keys = {
        "accelerator": Processes(),
        "policy_logps": lambda batch, pixels=None: passes.pop(0),
    }
    processor = Qwen2VLImageProcessor()
    images = SimpleNamespace(banks=ImageBanks(), image_processor=processor, shown=True)
    visual = started(
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
    visual.after_weighing(at_step(0), batch, advantages)
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
    scale = example("visual_tokens.py:rollout_scale")
    dependencies = torch.tensor([math.nan, 0.1, 0.3])
    assert scale(dependencies, dependencies, 0.5).tolist() == pytest.approx([1.0, 0.5, 1.5])
    far = torch.full((200,), 0.02)
    far[3] = 2.0
    assert scale(far, far, 0.9).max().item() == pytest.approx(2.5), "however far one is"


def test_half_of_every_image_is_black_alike_for_the_rollouts_of_a_group():
    half_black = example("visual_tokens.py:half_black")
    blackened = example("visual_tokens.py:blackened")
    black_patch = example("visual_tokens.py:black_patch")
    processor = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 84)
    first_inputs = processor([noise_picture(0, (84, 56))], return_tensors="pt")
    second_inputs = processor([noise_picture(1, (84, 56))], return_tensors="pt")
    first = first_inputs["pixel_values"]
    second = second_inputs["pixel_values"]
    black_D = black_patch(processor, first.size(1))
    black = processor([Image.new("RGB", (84, 56))], return_tensors="pt")["pixel_values"]
    assert torch.equal(black, black_D.expand_as(black))
    hidden_R = (blackened(first.repeat(50, 1), black_D, "42") == black_D).all(dim=1)
    # 0.05 is 3.5 standard deviations of 1,200 draws.
    assert hidden_R.float().mean().item() == pytest.approx(0.5, abs=0.05)
    grid = first_inputs["image_grid_thw"]
    pixels: Any = {"pixel_values": first.repeat(2, 1), "image_grid_thw": grid.repeat(2, 1)}
    with half_black(ImageBanks(), processor, pixels, "x") as pixels_now:
        assert torch.equal(*pixels_now.split(len(first)))
        assert not torch.equal(pixels_now[: len(first)], first)
    banks = ImageBanks()
    bank = banks.new("train")
    references_of = [
        bank.store(f"image{n}", pixels, grid[0]) for n, pixels in enumerate((first, second))
    ]
    order = [0, 0, 1, 0]  # two rollouts of one image, one of another, and the first again
    references: Any = {
        "pixel_values": torch.cat([references_of[number] for number in order]),
        "image_grid_thw": grid.repeat(4, 1),
    }
    with half_black(banks, processor, references, "42/1/0") as pixels_now:
        training_bank = banks.of_training()
        assert training_bank is banks.of(int(pixels_now[0])) is not bank
        assert len(training_bank) == 2
        starts = pixels_now.view(4, -1)[:, 0].tolist()
        assert starts[0] == starts[1] == starts[3] != starts[2], "an image is passed once"
        assert torch.equal(
            training_bank.pixels(starts[:1])[0], blackened(first, black_D, "42/1/0/image0")
        )
    assert banks.of_training() is bank
    nothing: Any = {}
    with half_black(banks, processor, nothing, "x") as pixels_now:
        assert pixels_now is None


@pytest.mark.slow
def test_a_run_learns_from_the_tokens_that_depend_on_the_image(tmp_path):
    extension = f"{{{entry('visual_tokens.py:VisualTokens')}: {{share: 0.4}}}}"
    keys = {"adora_extensions": extension, "save_strategy": "no"}
    folder = train(tmp_path / "run", **keys)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "visual_tokens/share" in line]
    assert len(steps) == STEPS
    for line in steps:
        assert 0.4 <= line["visual_tokens/share"] < 0.45
        assert line["visual_tokens/dependency"] > 0
