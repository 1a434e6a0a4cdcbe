"""Advantages by how much tokens depend on the image (VPPO): formulas, half black images, and what
the loss gets.
"""

import json
import math
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, Gemma3Config
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from trl import GRPOTrainer

from adora_vl.config.blocks import ExtensionOptions, VisualOptions
from adora_vl.config.checks import check_extensions, costs_of
from adora_vl.config.schema import parse
from adora_vl.dedup.image_store import ImageBanks
from adora_vl.dedup.policy_pass import _INPUTS, evaluating
from adora_vl.experimental import visual_tokens as module
from adora_vl.experimental.visual_tokens import (
    VisualDependency,
    black_patch,
    blackened,
    half_black,
    most_dependent,
    rollout_scale,
    visual_dependency,
)
from adora_vl.models.load import PRETRAINED
from adora_vl.training.generation import Generation
from adora_vl.types import Batch
from adora_vl.utils.errors import UserError
from tests.support.step_context import step_context
from tests.support.tiny_run import STEPS, train

NAN = math.nan
VISUAL = "--adora_extensions.visual_tokens"
CPU = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "x"]


# ------------------------------------------------------------------------------------- the formulas


def test_the_dependency_of_a_token_by_hand():
    """exp(d) - d - 1, with d the change of the log-probability, within 20, and the result within 10
    nats.
    """
    seen_BC = torch.tensor([[-0.5, -2.0, -0.1, -1.0]])
    blind_BC = torch.tensor([[-1.5, -2.0, -9.0, 99.0]])
    found = visual_dependency(seen_BC, blind_BC, torch.tensor([[1, 1, 1, 1]]))
    by_hand = [math.exp(-1) + 1 - 1, 0.0, math.exp(-8.9) + 8.9 - 1, 10.0]
    assert found[0].tolist() == pytest.approx(by_hand, abs=1e-6)
    assert visual_dependency(seen_BC, blind_BC, torch.tensor([[0, 1, 0, 0]])).tolist() == [
        [0, 0, 0, 0]
    ]


def test_the_most_dependent_tokens_by_hand():
    dependency_BC = torch.tensor(
        [[0.1, 0.4, 0.2, 0.3, 9.0], [0.5, 0.5, 0.5, 0.5, 0.5], [1.0, 2.0, 3.0, 4.0, 5.0]]
    )
    mask_BC = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    chosen = most_dependent(dependency_BC, mask_BC, 0.5)
    assert chosen.int().tolist() == [[0, 1, 0, 1, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    assert most_dependent(dependency_BC, mask_BC, 1.0).equal(mask_BC.bool())


@given(st.integers(0, 40), st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.7, 1.0]))
def test_a_share_of_a_rollout_is_rounded_up(tokens: int, share: float):
    """In tenths, where floats would round 0.4 x 5 up to 3."""
    mask_BC = (torch.arange(40) < tokens).int()[None]
    chosen = most_dependent(torch.rand(1, 40), mask_BC, share)
    assert int(chosen.sum()) == -(-round(10 * share) * tokens // 10)
    assert not (chosen & ~mask_BC.bool()).any()


def test_the_scale_of_rollouts_by_hand():
    """They lie at 0, 1/4 and 1 of the range, on average at 5/12, so the largest is 0.9 + 0.1 /
    (5/12) = 1.14.
    """
    all_N = torch.tensor([1.0, 2.0, 5.0, NAN])
    found = rollout_scale(all_N, all_N, 0.9)
    assert found.tolist() == pytest.approx([0.9, 0.9 + 0.24 / 4, 1.14, 1.0])
    alike = torch.tensor([0.3, 0.3, NAN])
    assert rollout_scale(alike, alike, 0.5).tolist() == [1, 1, 1]


@given(
    st.lists(st.floats(0, 10, width=32), min_size=1, max_size=12),
    st.floats(0, 1, width=32),
    st.integers(0, 11),
)
def test_the_mean_factor_is_one_and_no_rank_sees_another(
    values: list[float], smallest: float, cut: int
):
    all_N = torch.tensor(values, dtype=torch.float64)
    whole = rollout_scale(all_N, all_N, smallest)
    assert whole.mean().item() == pytest.approx(1.0)
    assert whole.min().item() >= min(smallest, 1.0) - 1e-9
    ranks = torch.cat([rollout_scale(part, all_N, smallest) for part in (all_N[:cut], all_N[cut:])])
    assert torch.equal(ranks, whole)


def test_one_rollout_that_stands_out_does_not_take_everything(subtests):
    """0.9 + 16 x 0.1 = 2.5 is the most, as in the authors' micro-batches of 16.

    Without a bound it would be 308.
    """
    for count in (16, 64, 512, 3072):
        with subtests.test(f"{count} rollouts"):
            all_N = torch.full((count,), 0.02)
            all_N[3] = 2.0
            found = rollout_scale(all_N, all_N, 0.9)
            assert found.max().item() == pytest.approx(2.5) and found.min().item() == pytest.approx(
                0.9
            )


# -------------------------------------------------------------------------------- half black images


def processor() -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 84)


def processed(image: Image.Image) -> tuple[Tensor, Tensor]:
    output = processor()([image], return_tensors="pt")
    return output["pixel_values"], output["image_grid_thw"]


def drawing(seed: int = 0) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(seed).integers(1, 256, (56, 84, 3), dtype=np.uint8)
    )


def test_a_black_patch_is_what_the_processor_makes_of_black_pixels():
    pixels, _ = processed(Image.new("RGB", (84, 56)))
    assert torch.equal(pixels, black_patch(processor(), pixels.size(1)).expand_as(pixels))


def test_about_half_of_the_patches_are_black_and_the_others_are_untouched():
    pixels, _ = processed(drawing())
    black_D = black_patch(processor(), pixels.size(1))
    many = pixels.repeat(50, 1)
    found = blackened(many, black_D, "42/1/0")
    hidden_R = (found == black_D).all(dim=1)
    same_R = (found == many).all(dim=1)
    assert torch.equal(hidden_R, ~same_R)
    assert hidden_R.float().mean().item() == pytest.approx(
        0.5, abs=0.05
    )  # 3.5 standard deviations of 1,200 draws
    assert torch.equal(found, blackened(many, black_D, "42/1/0"))
    assert not torch.equal(found, blackened(many, black_D, "42/2/0"))


def test_references_to_a_bank_become_references_to_half_black_images():
    banks = ImageBanks()
    bank = banks.new("train")
    images = [processed(drawing(seed)) for seed in (0, 1)]
    held = [
        bank.hold(f"image{seed}", pixels, grid[0]) for seed, (pixels, grid) in enumerate(images)
    ]
    order = [0, 0, 1, 0]  # two rollouts of one image, one of another, and the first again
    batch = cast(
        "Batch",
        {
            "pixel_values": torch.cat([held[one] for one in order]),
            "image_grid_thw": torch.cat([images[one][1] for one in order]),
        },
    )
    with half_black(banks, processor(), batch, "42/1/0") as references:
        assert references is not None and references.shape == batch["pixel_values"].shape
        other = banks.of_training()
        assert other is banks.of(int(references[0])) is not bank and len(other) == 2
        starts = references.view(4, -1)[:, 0].tolist()
        assert starts[0] == starts[1] == starts[3] != starts[2], (
            "the rollouts of an image share one pass"
        )
        pixels, grids = other.pixels(starts[:1])
        assert torch.equal(
            pixels,
            blackened(images[0][0], black_patch(processor(), pixels.size(1)), "42/1/0/image0"),
        )
        assert torch.equal(grids, images[0][1])
    assert banks.of_training() is bank
    with pytest.raises(AssertionError, match="no bank"):
        banks.of(starts[0])
    assert banks.new("train").first > int(references.max()), "a number never means two patches"


def test_pixels_without_a_bank_are_blackened_alike_for_copies_of_an_image():
    pixels, grid = processed(drawing())
    batch = cast(
        "Batch", {"pixel_values": pixels.repeat(2, 1), "image_grid_thw": grid.repeat(2, 1)}
    )
    with half_black(ImageBanks(), processor(), batch, "x") as found:
        assert found is not None
        first, second = found.split(len(pixels))
        assert torch.equal(first, second) and not torch.equal(first, pixels)


def test_a_rank_without_images_passes_what_it_has(subtests):
    empty: Batch = {"pixel_values": torch.zeros(0, 1), "image_grid_thw": torch.zeros(0, 3)}
    for columns in (Batch(), empty):
        with (
            subtests.test(f"{list(columns)}"),
            half_black(ImageBanks(), processor(), columns, "x") as found,
        ):
            assert found is columns.get("pixel_values")


def test_a_processor_of_another_kind_is_refused_in_one_line():
    with pytest.raises(
        UserError, match="adora_extensions.visual_tokens: SimpleNamespace does not cut"
    ):
        black_patch(SimpleNamespace(), 10)


# ------------------------------------------------------------------------------- weights of a batch


def weigher(
    log: dict[str, float],
    policy_logps: Any,
    gather: Any = lambda tensor: tensor,
    *,
    share: float,
    smallest: float,
    has_dropout: bool = False,
) -> VisualDependency:
    images: Any = SimpleNamespace(
        banks=ImageBanks(), image_processor=processor(), shown=True, knows_patches=True
    )
    context = step_context(
        log,
        accelerator=SimpleNamespace(gather=gather),
        policy_logps=policy_logps,
        adora_extensions=ExtensionOptions(visual_tokens=VisualOptions(share, smallest)),
    )
    return VisualDependency(context, images, has_dropout=has_dropout)


def batch_of(images: list[int], **more: Any) -> Batch:
    ones = torch.ones(len(images), 4, dtype=torch.long)
    own = {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": ones,
        "completion_mask": ones,
        "advantages": torch.tensor([1.0, -2.0, 3.0]),
        "num_images": images,
    }
    return cast("Batch", {**own, **more})


def passes(*found: Tensor) -> Any:
    """The policy's passes, one after the other; the last is that with half of the images black."""
    left = list(found)
    return lambda batch, pixels=None: left.pop(0)


ALL = torch.ones(3, dtype=torch.bool)  # every group has signal
SEEN = torch.zeros(3, 4)
BLIND = torch.tensor([[-1.0, 0, -2, 0], [0, 0, 0, -1], [-3, -3, -3, -3]])


def test_what_a_batch_learns_from_by_hand():
    """The first rollout depends on its image most, the third has none."""
    log: dict[str, float] = {}
    batch = batch_of([1, 1, 0])
    weigher(log, passes(SEEN, BLIND), share=0.5, smallest=0.9).weigh(batch, ALL, "x")
    one = math.exp(-1)
    two = math.exp(-2) + 1
    assert batch["visual_dependency"].tolist() == pytest.approx(
        [(one + two) / 4, one / 4, NAN], nan_ok=True
    )
    # two rollouts, at 0 and 1 of the range: 0.9 and 0.9 + 0.1 / 0.5
    assert batch["visual_scale"].tolist() == pytest.approx([1.1, 0.9, 1.0])
    advantages = [[1.1, 0, 1.1, 0], [-1.8, 0, 0, -1.8], [3, 3, 3, 3]]  # of 1, -2 and 3
    assert [row.tolist() for row in batch["advantages"]] == [
        pytest.approx(row) for row in advantages
    ]
    assert log == pytest.approx(
        {"adora/visual_dependency": (2 * one + two) / 8, "adora/visual_tokens": 8 / 12}
    )


def test_the_pass_for_the_old_log_probabilities_is_not_made_twice():
    batch = batch_of([1, 1, 1], old_per_token_logps=SEEN)
    weigher({}, passes(BLIND), share=0.5, smallest=1.0).weigh(batch, ALL, "x")
    assert batch["advantages"][0].tolist() == [1, 0, 1, 0]


def test_smallest_and_largest_are_those_of_all_ranks():
    def gather(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, torch.tensor([10.0])]) if tensor.ndim == 1 else tensor

    batch = batch_of([1, 1, 0])
    weigher({}, passes(SEEN, BLIND), gather, share=1.0, smallest=0.9).weigh(batch, ALL, "x")
    assert batch["visual_scale"][0] < 1, "another rank's rollout depends on its image far more"
    assert batch["advantages"].bool().all()


def test_only_groups_with_signal_are_compared():
    """The first rollout depends on its image most, but nothing is learned from it."""
    batch = batch_of([1, 1, 1])
    weigher({}, passes(SEEN, BLIND), share=1.0, smallest=0.5).weigh(
        batch, torch.tensor([False, True, True]), "x"
    )
    assert batch["visual_scale"].tolist() == pytest.approx([1.0, 0.5, 1.5])
    assert batch["visual_dependency"].gt(0).all(), "of all of them it is recorded"


def test_a_generation_is_weighed_by_the_live_rollouts_of_its_rank():
    every = torch.tensor([True, True, True, False, True, True])  # of two ranks
    advantages: Any = SimpleNamespace(live_B=every)
    generation = Generation(
        [{}, {}, {}], "train", 0, "0/0", 0, 3, batch=batch_of([1, 1, 1]), advantages=advantages
    )
    one = weigher({}, passes(SEEN, BLIND), share=1.0, smallest=0.5)
    one.accelerator.process_index = 1
    one.after_weighing(generation)
    assert generation.batch["visual_scale"].tolist() == pytest.approx([1.0, 0.5, 1.5])
    assert generation.batch["advantages"].shape == (3, 4)


def test_a_pass_with_dropout_is_not_compared_with_one_without():
    batch = batch_of([1, 1, 1], old_per_token_logps=torch.full((3, 4), -7.0))
    weigher({}, passes(SEEN, BLIND), share=0.5, smallest=1.0, has_dropout=True).weigh(
        batch, ALL, "x"
    )
    assert batch["advantages"][0].tolist() == [1, 0, 1, 0]


def test_compared_passes_have_no_dropout_and_training_goes_on_with_it():
    for training in (True, False):
        model = torch.nn.Sequential(torch.nn.Dropout(0.5)).train(training)
        with pytest.raises(KeyError), evaluating(model):
            assert not any(module.training for module in model.modules())
            raise KeyError
        assert all(module.training is training for module in model.modules())


def test_every_image_argument_of_a_pass_is_handed_on():
    """TRL's own, by its signature: one that TRL adds has to be handed on too."""
    parameters = set(signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    others = {"self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"}
    ours = {"tool_mask"}  # of a batch of TRL's too, but its passes do not ask for it
    assert parameters - others - {"compute_entropy", "compute_aux_loss"} | ours == set(_INPUTS)


def test_tokens_of_tools_and_padding_are_neither_weighed_nor_counted():
    tools = torch.tensor([[0, 1, 1, 1]] * 3)
    batch = batch_of([1, 1, 1], tool_mask=tools)
    weigher({}, passes(SEEN, BLIND), share=0.3, smallest=1.0).weigh(batch, ALL, "x")
    assert batch["advantages"][0].tolist() == [0, 0, 1, 0], (
        "one of three, and not the tool's, which depends most"
    )


# ----------------------------------------------------------------------------- keys, and a real run


def test_losses_that_take_one_advantage_per_rollout_are_refused(subtests):
    tokens = [f"{VISUAL}.share", "0.4"]
    scale = [f"{VISUAL}.scale_min", "0.9"]
    cases = [
        ([*tokens, "--loss_type", "vespo"], "visual_tokens.share: 0.4 .* loss_type: vespo"),
        (
            [*scale, "--off_policy_mask_threshold", "0.5"],
            "visual_tokens.scale_min: 0.9 .* off_policy_mask_threshold: 0.5",
        ),
    ]
    for arguments, said in cases:
        with subtests.test(said):
            config = parse([*CPU, *arguments])[1]
            with pytest.raises(UserError, match=said):
                check_extensions(config)
            config.adora_extensions = ExtensionOptions()
            check_extensions(config, AutoConfig.from_pretrained(PRETRAINED))
            assert not costs_of(config)


def test_a_family_whose_patches_are_not_known_is_refused():
    config = parse([*CPU, f"{VISUAL}.scale_min", "0.9"])[1]
    with pytest.raises(UserError, match="visual_tokens.scale_min: 0.9 .* and gemma3 is none"):
        check_extensions(config, Gemma3Config())
    assert "half of every image black" in costs_of(config)[0]


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[pd.DataFrame, dict[tuple[int, int], Tensor], Path]]:
    """The real training command; of each row the advantages that stock TRL's loss gets, for each of
    its tokens.
    """
    of_the_loss: dict[tuple[int, int], Tensor] = {}
    stock = GRPOTrainer._compute_loss

    def noted(self: Any, model: Any, inputs: Any) -> Any:
        for number, row_C, mask_C in zip(
            inputs["rollout_number"].tolist(),
            inputs["advantages"],
            inputs["completion_mask"],
            strict=True,
        ):
            of_the_loss[self.state.global_step + 1, number] = row_C[mask_C.bool()]
        return stock(self, model, inputs)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(GRPOTrainer, "_compute_loss", noted)
        settings = {
            "adora_extensions": "{visual_tokens: {share: 0.4, scale_min: 0.8}}",
            "save_strategy": "no",
        }
        folder = train(tmp_path_factory.mktemp("visual") / "run", **settings)
    rollouts = pd.read_parquet(folder / "rollouts").sort_values(["step", "group", "rollout"])
    yield rollouts.reset_index(drop=True), of_the_loss, folder


@pytest.mark.slow
def test_the_loss_gets_the_recorded_advantage_on_two_fifths_of_the_tokens(run):
    rollouts, of_the_loss, _ = run
    numbers = rollouts.groupby("step").cumcount()
    recorded = {
        (step, n): row
        for step, n, (_, row) in zip(rollouts["step"], numbers, rollouts.iterrows(), strict=True)
    }
    assert len(of_the_loss) >= 8
    for place, tokens_C in of_the_loss.items():
        row = recorded[place]
        applied = torch.tensor(row["advantage"]) * torch.tensor(row["visual_scale"])
        learned = tokens_C != 0
        assert len(tokens_C) == row["length"]
        assert int(learned.sum()) == (
            math.ceil(0.4 * row["length"] - 1e-9) if row["advantage"] else 0
        )
        torch.testing.assert_close(
            tokens_C[learned].double(), applied.double().expand(int(learned.sum()))
        )


@pytest.mark.slow
def test_a_run_says_how_much_its_rollouts_depend_on_their_images(run):
    rollouts, _, folder = run
    assert rollouts["visual_dependency"].gt(0).all() and rollouts[
        "visual_scale"
    ].min() == pytest.approx(0.8)
    live = rollouts.groupby(["step", "group"])["advantage"].transform(
        lambda group: group.ne(0).any()
    )
    assert rollouts[live].groupby("step")["visual_scale"].mean().tolist() == pytest.approx(
        [1.0] * STEPS, abs=1e-5
    )
    assert rollouts[~live]["visual_scale"].eq(1).all()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "adora/visual_tokens" in line]
    assert len(steps) == STEPS
    for line in steps:
        assert 0.4 <= line["adora/visual_tokens"] < 0.45
        assert line["adora/visual_dependency"] > 0


@pytest.mark.slow
def test_without_the_black_patches_nothing_depends_on_the_image(tmp_path, monkeypatch):
    """What is measured is the image, not a difference between two passes."""
    monkeypatch.setattr(module, "BLACK_SHARE", 0.0)
    folder = train(
        tmp_path / "run",
        max_steps=1,
        save_strategy="no",
        adora_extensions="{visual_tokens: {share: 0.4}}",
    )
    rollouts = pd.read_parquet(folder / "rollouts")
    assert (
        rollouts["visual_dependency"].abs().max() < 1e-9
    )  # (1e-5)^2 / 2, for log-probabilities in float32
