"""Rollouts on distorted images: which see them, what they see, and that nothing compares engine and
trainer there.
"""

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import TrainerState
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from adora_vl.config.blocks import ExtensionOptions, NoiseOptions
from adora_vl.config.checks import check_config
from adora_vl.config.schema import parse
from adora_vl.dedup.image_store import ImageCache, effective_settings
from adora_vl.experimental.noisy_rollouts import (
    NoisyRollouts,
    as_seen,
    distorted,
    sigmoid_annealing,
    signal_share,
)
from adora_vl.rollout.importance import ImportanceRatio
from adora_vl.rollout.rollouts import DrawnProblem, Rollout, RolloutGroup, plan_requests
from adora_vl.training.generation import Generation
from adora_vl.training.guards import DriftGuard
from adora_vl.types import Batch, Row, compared_mask
from adora_vl.utils.errors import UserError
from tests.support.asks import asks_of
from tests.support.step_context import step_context

NAN = float("nan")
CPU = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "x"]
HALF = {"share": 0.5, "middle": 2 / 3}  # else the authors' choices


def drawing(seed: int = 0, size: tuple[int, int] = (56, 28)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def config(*arguments):
    return parse([*CPU, *arguments])[1]


def noisy_at(progress: float, log: dict[str, float] | None = None, **options: Any) -> NoisyRollouts:
    """At this share of the run."""
    state = TrainerState(global_step=round(progress * 600), max_steps=600)
    asked = ExtensionOptions(noisy_rollouts=NoiseOptions(**{**HALF, **options}))
    images: Any = SimpleNamespace(image_processor=None)
    return NoisyRollouts(
        step_context(log, state=state, num_generations=8, adora_extensions=asked), images
    )


def drawn(step: int = 0, place: int = 0) -> DrawnProblem:
    return DrawnProblem(5, f"train/{step}/0", place)


def part(place: int, members: int = 8, first: int = 0, step: int = 0) -> RolloutGroup:
    """A group, or the part of it that a rank has."""
    return RolloutGroup(drawn(step, place), Row(), 0, (Rollout(),) * members, first)


def test_the_annealing_of_the_repository_by_hand():
    """Its Geometry3K run: 60 generations, half of the strength at the 40th, steepness 30."""
    for generation, share in (
        (0, 1.0),
        (40, 0.5),
        (44, 1 / (1 + math.exp(2))),
        (36, 1 / (1 + math.exp(-2))),
    ):
        progress = generation / 60
        assert sigmoid_annealing(progress, middle=40 / 60, steepness=30) == pytest.approx(
            share, abs=1e-6
        )
    levels = [noisy_at(0).level(10 * step) for step in range(61)]
    assert (
        levels[0] == 499 and levels[40] == 250 and levels[-1] == 0
    )  # whole diffusion steps, rounded down
    assert levels == sorted(levels, reverse=True)
    assert noisy_at(0, schedule="constant").level(600) == 500


def test_however_steep_it_is_nothing_overflows(subtests):
    for steepness in [1e3, 1e300]:
        with subtests.test(f"{steepness}"):
            assert sigmoid_annealing(1.0, middle=0.0, steepness=steepness) == pytest.approx(
                0.0, abs=1e-300
            )
            assert sigmoid_annealing(0.0, middle=1.0, steepness=steepness) == 1.0


def test_how_much_of_the_image_is_left_by_hand():
    first = 1e-5 + (5e-3 - 1e-5) / (1 + math.exp(6))
    assert signal_share(0) == pytest.approx(math.sqrt(1 - first))
    shares = [signal_share(step) for step in range(0, 1000, 50)]
    assert shares == sorted(shares, reverse=True) and shares[-1] > 0
    # the variances before step 500 add up to about 0.5 x 1.0 x integral of the sigmoid: a^2 =
    # exp(-sum)
    variances = 1e-5 + (5e-3 - 1e-5) / (1 + np.exp(-np.linspace(-6, 6, 1000)))
    assert signal_share(500) == pytest.approx(math.exp(-variances[:501].sum() / 2), rel=1e-3)


def test_the_noise_has_the_strength_that_it_says():
    grey = Image.new("RGB", (200, 200), (128, 128, 128))
    step = 150  # weak enough that hardly a pixel is cut off
    share = signal_share(step)
    pixels = np.asarray(distorted(grey, "gaussian", step, seed=1)) / 255
    assert pixels.mean() == pytest.approx(share * 128 / 255, abs=0.005)
    assert pixels.std() == pytest.approx(math.sqrt(1 - share**2), rel=0.05)


def test_a_distorted_image_has_the_same_size_and_is_the_same_for_the_same_seed(subtests):
    for (kind, level), mode in product(
        [("gaussian", 300.0), ("rotate", 15.0)], ["RGB", "L", "P", "RGBA"]
    ):
        with subtests.test(f"{kind} {mode}"):
            image = as_seen(drawing().convert(mode), None)
            one, again, other = (distorted(image, kind, level, seed) for seed in (1, 1, 2))
            assert one.size == image.size == (56, 28) and one.mode == "RGB"
            assert (
                one.tobytes()
                == again.tobytes()
                != other.tobytes()
                != image.tobytes()
                != one.tobytes()
            )


def test_a_distorted_image_has_the_patches_of_the_clean_one(subtests):
    """Enlarged or made smaller by the processor's own limits, so that the prompts have the same
    image tokens.
    """
    for size in [(40, 30), (300, 200), (900, 33), (56, 84)]:
        with subtests.test(f"{size!r:.80}"):
            processor = Qwen2VLImageProcessor(min_pixels=12544, max_pixels=50176)
            image = drawing(size=size)
            noisy = distorted(as_seen(image, processor), "gaussian", 300.0, 1)
            clean, seen = (processor([one], return_tensors="pt") for one in (image, noisy))
            assert clean["image_grid_thw"].tolist() == seen["image_grid_thw"].tolist()
            assert noisy.size == tuple(
                (clean["image_grid_thw"][0, [2, 1]] * processor.patch_size).tolist()
            )


def test_the_last_rollouts_of_each_group_see_one_distorted_image_and_stay_one_request():
    noisy = noisy_at(0)
    images = [drawing()]
    seen = [other for place in (0, 1) for other in noisy.images_of(part(place), images)]
    assert [other is not None for other in seen] == [*[False] * 4, *[True] * 4] * 2
    one, another = (seen[place][0].tobytes() for place in (4, 12))
    assert images[0].tobytes() != one != another
    asks = asks_of([[1]] * 16, [other or images for other in seen], generations=8)
    assert [len(request) for request in plan_requests(asks)] == [4, 4, 4, 4]


def test_two_ranks_distort_what_one_does_and_another_step_distorts_otherwise():
    """A group may lie over both ranks; and one that goes on later sees the same image."""

    def looks(found: list[list[Any] | None]) -> list[bytes | None]:
        return [other[0].tobytes() if other else None for other in found]

    noisy = noisy_at(0.1, kind="rotate", schedule="constant")
    images = [drawing()]
    whole = looks(noisy.images_of(part(3), images))
    parts = [noisy.images_of(part(3, 5), images), noisy.images_of(part(3, 3, first=5), images)]
    assert [look for half in parts for look in looks(half)] == whole and whole[7] is not None
    assert looks(noisy.images_of(part(3, step=1), images))[7] != whole[7]


def test_the_neutral_settings_distort_nothing():
    for noisy, step in (
        (noisy_at(0, share=0.0), 0),
        (noisy_at(0, strength=0.0), 0),
        (noisy_at(0), 600),
    ):
        assert noisy.images_of(part(0, step=step), [drawing()]) == [None] * 8
    assert NoiseOptions().count(8) == 0


def test_the_noise_follows_the_progress_of_the_run():
    logged: dict[str, float] = {}
    noisy = noisy_at(0, logged)

    def logs(marks: list[bool], step: int) -> None:
        batch: Batch = {"distorted": torch.tensor(marks)}
        noisy.after_weighing(Generation([], "train", step, f"{step}/0", 0, 4, batch=batch))

    logs([False, True, True, True], 0)
    assert (
        logged == {"adora/noisy_share": 0.75, "adora/noise_level": 499.0}
        and noisy.level(0) == 499.0
    )
    logs([False] * 4, 400)
    assert (
        logged == {"adora/noisy_share": 0.0, "adora/noise_level": 250.0}
        and noisy.level(400) == 250.0
    )


def measured(distorted_rows):
    """The drift and the ratio of two rollouts, the second of which is 3 nats off, as the step
    measures them.
    """
    logged: dict[str, float] = {}
    context = step_context(
        logged,
        adora_max_drift=5.0,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=3.0,
    )
    logps = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]])
    sampling = torch.tensor([[-1.1, -2.1], [-4.0, -5.0]])
    rows = torch.tensor(distorted_rows)
    sampling[rows] = NAN  # as the engine returns them
    micro: Batch = {
        "completion_mask": torch.ones(2, 2),
        "sampling_per_token_logps": sampling,
        "distorted": rows,
    }
    DriftGuard(context).check(logps, sampling, compared_mask(micro), 0)
    figures = ImportanceRatio(context).complete(micro, logps)
    return micro["importance_sampling_ratio"], {**logged, **figures}


def test_neither_drift_nor_ratio_looks_at_distorted_rollouts():
    ratio, logged = measured([False, True])
    assert ratio[1].tolist() == [1.0, 1.0] and ratio[0].tolist() == pytest.approx(
        [math.exp(0.1)] * 2
    )
    assert logged["adora/drift"] == pytest.approx(0.1, abs=1e-6)
    assert logged["sampling/importance_sampling_ratio/mean"] == pytest.approx(math.exp(0.1))
    assert logged["sampling/importance_sampling_ratio/min"] == pytest.approx(math.exp(0.1))
    assert measured([False, False])[1]["adora/drift"] == pytest.approx(
        1.55
    )  # so that the lines above can fail


def test_a_micro_batch_of_distorted_rollouts_alone_is_no_drift():
    """Without a mask an engine that scored nothing counts as infinitely far away, and would stop
    the run.
    """
    _, logged = measured([True, True])
    assert "adora/drift" not in logged


def test_the_cache_of_images_does_not_keep_what_is_seen_once():
    processor = Qwen2VLImageProcessor(min_pixels=784, max_pixels=3136)
    cache = ImageCache(2**20)
    settings = effective_settings(processor, {})
    image = drawing()
    clean = cache.get(processor, image, settings)
    held = cache.bytes_held
    noisy = cache.get(processor, distorted(image, "gaussian", 300.0, 1), settings)
    assert noisy.grid_3.tolist() == clean.grid_3.tolist() and not torch.equal(
        noisy.patches_RD, clean.patches_RD
    )
    assert cache.bytes_held == held and cache.get(processor, image, settings) is clean


NOISE = "--adora_extensions.noisy_rollouts"
ENGINE = ["--use_vllm", "true", "--vllm_mode", "colocate", f"{NOISE}.share", "0.5"]


def test_keys_become_settings():
    ours = config(*ENGINE, f"{NOISE}.kind", "rotate")
    check_config(ours)
    options = ours.adora_extensions.noisy_rollouts
    assert (
        options.count(8) == 4
        and options == NoiseOptions(0.5, "rotate")
        and options.at_first == 15.0
    )


def test_what_does_not_fit_is_named(subtests):
    cases = [
        (
            [f"{NOISE}.share", "0.3", *ENGINE[:4]],
            "0.3 of num_generations: 8 is 2.4 rollouts.*such as 0.5",
        ),
        (
            [f"{NOISE}.share", "0.5"],
            "needs use_vllm: true, where a rollout can see another image than its group",
        ),
        ([*ENGINE, f"{NOISE}.strength", "1000"], "at most 999 diffusion steps"),
        ([*ENGINE, f"{NOISE}.kind", "rotate", f"{NOISE}.strength", "200"], "at most 180 degrees"),
        ([f"{NOISE}.share", "1"], "noisy_rollouts.share: .*below 1"),
        ([*ENGINE, f"{NOISE}.kind", "blur"], "noisy_rollouts.kind: .*'blur'"),
    ]
    for arguments, message in cases:
        with subtests.test(f"{arguments!r:.80}"), pytest.raises(UserError, match=message):
            check_config(config(*arguments))
