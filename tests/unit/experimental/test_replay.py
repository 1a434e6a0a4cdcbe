"""Earlier groups take the places of groups without signal: which, how many, with what, and again after a resume."""

from __future__ import annotations

import collections
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from trl import GRPOTrainer

from adora_vl.checkpoint.store import load_of_rank
from adora_vl.config.blocks import RolloutOptions
from adora_vl.config.checks import check_filling, costs_of
from adora_vl.config.schema import parse
from adora_vl.dedup.image_store import ImageBanks, ImageCache
from adora_vl.experimental.replay import FILES, Kept, SampleReplay
from adora_vl.rollout.rollouts import SamplingRequest
from adora_vl.training.generation import Generation
from adora_vl.training.policies import replayed
from adora_vl.types import Batch
from adora_vl.utils.errors import UserError
from tests.support.step_context import step_context
from tests.support.tiny_run import STEPS, train
from tests.unit.training.test_micro_batches import rank_batch

CPU = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "x"]
SIZE = 2  # rollouts per group


def replay(banks: ImageBanks, log: dict[str, float] | None = None, capacity: int = 3) -> SampleReplay:
    accelerator = SimpleNamespace(gather=lambda tensor: tensor, device=torch.device("cpu"), process_index=0)
    keys: dict[str, Any] = {"adora_rollouts": RolloutOptions(replay=capacity), "num_generations": SIZE}
    images: Any = SimpleNamespace(banks=banks, shown=True, cache=ImageCache(0))
    return SampleReplay(step_context(log, accelerator=accelerator, **keys), images)


def generation(banks: ImageBanks, images: str, advantages: list[float], completion: int = 2, first: int = 0) -> Batch:
    batch = rank_batch(banks, images, completion, first)
    batch["advantages"] = torch.tensor(advantages)
    batch["old_per_token_logps"] = -batch["completion_ids"].float() / 10
    return batch


def learned(one: SampleReplay, batch: Batch, step: int, place: str) -> Batch:
    """A step's batch as it is learned from. The weighing is left out: groups with advantages have signal."""
    now = Generation([], "train", step, place, 0, SIZE, SamplingRequest())
    now.batch = {**batch, "signal": batch["advantages"] != 0}
    one.before_weighing(now)
    one.after_weighing(now)
    return now.batch


def patches(banks: ImageBanks, batch: Batch) -> list[int]:
    """The letter of each row's image, by the content of its patches."""
    references = batch["pixel_values"].view(len(batch["prompt_ids"]), -1)
    return [int(banks.of(int(row[0])).pixels([int(row[0])])[0][0, 0]) for row in references]


# ---------------------------------------------------------------------------------------------------------- which ones


def test_a_group_is_drawn_as_often_as_its_advantages_say():
    """Sums of 1 and 3: with alpha 1 three times as often, with alpha 0 as often, with alpha 2 nine times."""
    for alpha, share in ((0.0, 1 / 2), (1.0, 3 / 4), (2.0, 9 / 10)):
        counts = collections.Counter(replayed([1.0, 3.0], alpha, 1, f"{alpha}/{number}")[0] for number in range(2000))
        assert counts[1] / 2000 == pytest.approx(share, abs=0.04)  # 3.5 standard deviations


@given(st.lists(st.floats(1e-3, 1e30), max_size=9), st.floats(0, 8), st.integers(0, 12))
def test_no_group_is_drawn_twice_and_a_place_draws_the_same_again(sizes, alpha, count):
    found = replayed(sizes, alpha, count, "42/7/0")
    assert len(found) == len(set(found)) == min(count, len(sizes)) and set(found) <= set(range(len(sizes)))
    assert found == replayed(sizes, alpha, count, "42/7/0")


# ----------------------------------------------------------------------------------------------------- one generation


def test_earlier_groups_take_the_places_of_groups_without_signal():
    log: dict[str, float] = {}
    banks = ImageBanks()
    one = replay(banks, log)
    first = learned(one, generation(banks, "aabb", [1.0, -1.0, 0.0, 0.0]), 0, "0")
    assert first["advantages"].tolist() == [1, -1, 0, 0] and log["adora/replayed_groups"] == 0
    second = generation(banks, "ccdd", [0.0, 0.0, 2.0, -2.0], completion=3, first=10)
    found = learned(one, second, 4, "4")
    assert found["advantages"].tolist() == [1, -1, 2, -2]
    assert found["prompt_ids"][:, 0].tolist() == [0, 1, 12, 13], "the rows of the first group came back"
    assert found["completion_ids"].tolist() == [[0, 0, 99], [1, 1, 99], [12] * 3, [13] * 3]
    assert found["completion_mask"].sum(dim=1).tolist() == [2, 2, 3, 3]
    old = found["old_per_token_logps"]
    assert old[1].tolist() == pytest.approx([-0.1, -0.1, 0]), "as the policy of then saw them"
    assert patches(banks, found) == [ord(letter) for letter in "aadd"], "with their images"
    assert log == {"adora/replayed_groups": 0.5, "adora/replay_age": 4.0}


def test_only_as_many_groups_are_kept_as_fit_and_the_newest():
    banks = ImageBanks()
    one = replay(banks, capacity=3)
    for step in range(4):
        learned(one, generation(banks, "aabb", [1.0, -1.0, 3.0, -3.0], first=10 * step), step, str(step))
    assert [(kept.step, kept.size) for kept in one.kept] == [(2, 6), (3, 2), (3, 6)]


def test_what_a_generation_is_learned_from_is_replaced_before_it_is_divided():
    banks = ImageBanks()
    one = replay(banks)
    for step, (images, advantages) in enumerate((("aabb", [1.0, -1.0, 1.0, -1.0]), ("ccdd", [0.0] * 4))):
        batch = generation(banks, images, advantages)
        del batch["old_per_token_logps"]
        one.policy_logps = lambda batch, pixels=None: batch["completion_ids"] / 100
        batch = learned(one, batch, step, f"{step}/0")
    assert batch["advantages"].tolist() == [1, -1, 1, -1]
    assert torch.equal(batch["old_per_token_logps"], batch["completion_ids"] / 100), "of the policy of then"
    assert batch["rollout_number"].tolist() == [-1] * 4, "the record of this step has other rollouts"


def test_a_generation_does_not_replay_itself():
    banks = ImageBanks()
    one = replay(banks)
    found = learned(one, generation(banks, "aabb", [1.0, -1.0, 0.0, 0.0]), 0, "0")
    assert patches(banks, found) == [ord(letter) for letter in "aabb"]


def test_groups_with_other_columns_wait():
    """Of a generation without images, say: rows of one batch have the same columns."""
    banks = ImageBanks()
    one = replay(banks)
    learned(one, generation(banks, "aabb", [1.0, -1.0, 0.0, 0.0]), 0, "0")
    batch = generation(banks, "ccdd", [0.0] * 4)
    del batch["sampling_per_token_logps"]
    assert learned(one, batch, 1, "1")["advantages"].tolist() == [0] * 4
    assert learned(one, generation(banks, "eeff", [0.0] * 4), 2, "2")["advantages"].tolist() == [1, -1, 0, 0]


def test_a_rank_that_replays_nothing_still_takes_part_in_the_vision_passes():
    """The gathered sums say that another rank has new images."""
    banks = ImageBanks()
    one = replay(banks)
    one.accelerator.gather = lambda tensor: tensor + torch.tensor([2, 4, 2]) if tensor.ndim == 2 else tensor
    batch = generation(banks, "aabb", [1.0, -1.0, 1.0, -1.0])
    bank = banks.of_training()
    assert bank is not None
    bank.features_due = False
    learned(one, batch, 0, "0")
    assert bank.features_due


def test_after_a_resume_the_same_groups_are_there(tmp_path):
    first, second = ImageBanks(), ImageBanks()
    one, other = replay(first), replay(second)
    learned(one, generation(first, "aabb", [1.0, -1.0, 3.0, -3.0]), 0, "0")
    one.save(tmp_path / "new")
    assert load_of_rank(tmp_path / "new", FILES, 0)
    other.load(tmp_path / "new")
    whole = learned(one, generation(first, "ccdd", [0.0] * 4), 5, "5")
    resumed = learned(other, generation(second, "ccdd", [0.0] * 4), 5, "5")
    assert torch.equal(whole["prompt_ids"], resumed["prompt_ids"]) and resumed["advantages"].all()
    assert sorted(patches(second, resumed)) == [97, 97, 98, 98] and patches(first, whole) == patches(second, resumed)
    other.load(tmp_path)
    assert other.kept == [], "a checkpoint without replays, or of fewer processes"


def test_padding_is_not_kept():
    banks = ImageBanks()
    one = replay(banks)
    batch = generation(banks, "aabb", [1.0, -1.0, 0.0, 0.0], completion=9)
    batch["completion_mask"][:2, 4:] = 0
    learned(one, batch, 0, "0")
    assert one.kept[0].packed["completion_ids"].shape == (2, 4)


def test_two_processes_draw_differently():
    places = [replayed([1.0] * 9, 1.0, 3, f"42/7/0/{rank}") for rank in range(4)]
    assert len({tuple(sorted(found)) for found in places}) > 1


def test_after_a_ratio_that_exploded_nothing_is_replayed_again():
    banks = ImageBanks()
    one = replay(banks)
    learned(one, generation(banks, "aabb", [1.0, -1.0, 0.0, 0.0]), 0, "0")
    one.on_exploded_ratio()
    assert learned(one, generation(banks, "ccdd", [0.0] * 4), 1, "1")["advantages"].tolist() == [0] * 4


def test_what_it_costs_is_said():
    config = parse([*CPU, "--adora_rollouts.replay", "4"])[1]
    memory, clip = costs_of(config)
    assert "up to 4 groups and their images per process" in memory and "without TRL's delta" in clip
    config.delta = 10.0
    assert costs_of(config) == [memory]
    config.adora_rollouts = RolloutOptions()
    assert costs_of(config) == []


def test_images_that_cannot_be_kept_once_are_refused():
    images: Any = SimpleNamespace(shown=True, cache=None)
    with pytest.raises(UserError, match="adora_rollouts.replay: 4 needs an image processor"):
        SampleReplay(step_context(adora_rollouts=RolloutOptions(replay=4)), images)


def test_a_smaller_capacity_keeps_the_newest_of_a_checkpoint(tmp_path):
    banks = ImageBanks()
    one = replay(banks)
    one.kept = [Kept({}, (), float(step), step) for step in range(3)]
    one.save(tmp_path)
    small = replay(banks, capacity=1)
    small.load(tmp_path)
    assert [kept.step for kept in small.kept] == [2]


# ------------------------------------------------------------------------------------------------ keys, and a real run


def test_what_it_does_not_go_with_is_said_in_one_line(subtests):
    cases = [
        (["--per_device_train_batch_size", "4"], "adora_rollouts.replay: 4 needs whole groups"),
        (["--loss_type", "bnpo"], "adora_rollouts.replay: 4 does not go with loss_type: bnpo"),
        (["--top_entropy_quantile", "0.2"], "adora_rollouts.replay: 4 does not go with top_entropy_quantile: 0.2"),
        (["--adora_stock_step", "cache_images"], "adora_rollouts.replay: 4 does not go with adora_stock_step"),
        (["--sync_ref_model", "true"], "adora_rollouts.replay: 4 does not go with sync_ref_model"),
    ]
    for arguments, said in cases:
        with subtests.test(said):
            config = parse([*CPU, "--adora_rollouts.replay", "4", "--num_generations", "4", *arguments])[1]
            config.num_generations, config.steps_per_generation = 8, 1
            with pytest.raises(UserError, match=said):
                check_filling(config)
            config.adora_rollouts = RolloutOptions()
            check_filling(config)


def lines(folder: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "reward" in entry]


SETTINGS = {"adora_rollouts.replay": 6, "lr_scheduler_type": "constant"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[tuple[int, ...], Tensor]]]:
    """The real training command. Of each step, by its tokens, what the loss got as a row's old log-probabilities."""
    of_the_loss: dict[int, dict[tuple[int, ...], Tensor]] = collections.defaultdict(dict)
    stock = GRPOTrainer._compute_loss

    def noted(self: Any, model: Any, inputs: Any) -> Any:
        for prompt, completion, mask, old in zip(
            *(inputs[name] for name in ("prompt_ids", "completion_ids", "completion_mask", "old_per_token_logps")),
            strict=True,
        ):
            text = (*prompt[prompt != self._tokenizer.pad_token_id].tolist(), *completion[mask.bool()].tolist())
            of_the_loss[self.state.global_step + 1][text] = old[mask.bool()]
        return stock(self, model, inputs)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(GRPOTrainer, "_compute_loss", noted)
        folder = train(tmp_path_factory.mktemp("replay") / "whole", **SETTINGS)
    return folder, of_the_loss


@pytest.mark.slow
def test_a_run_learns_again_from_earlier_groups_with_the_log_probabilities_of_then(whole):
    folder, of_the_loss = whole
    steps = lines(folder)
    assert steps[0]["adora/replayed_groups"] == 0 and "adora/replay_age" not in steps[0]
    again = 0
    for step in range(2, STEPS + 1):
        earlier: dict[tuple[int, ...], Tensor] = {}
        for before in range(1, step):
            earlier |= of_the_loss[before]
        same = [text for text, old in of_the_loss[step].items() if text in earlier and torch.equal(old, earlier[text])]
        assert bool(same) is (steps[step - 1]["adora/replayed_groups"] > 0)
        again += len(same)
    assert again >= 8, "the tiny model has groups without signal in most steps"


@pytest.mark.slow
def test_a_resumed_run_replays_the_same_groups(whole, tmp_path):
    folder, _ = whole
    part = shutil.copytree(folder, tmp_path / "part")
    shutil.rmtree(part / f"checkpoint-{STEPS}")
    assert (part / "checkpoint-2" / "replay-00000.pt").is_file()
    train(part, **SETTINGS)
    assert (part / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    for one, other in zip(lines(part), lines(folder), strict=True):
        assert one["adora/replayed_groups"] == other["adora/replayed_groups"]
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])


@pytest.mark.slow
def test_a_ratio_that_exploded_ends_the_replay_of_what_was_kept(tmp_path):
    """Step 2 learns again from step 1's groups and is skipped; step 3 has none left and is not."""
    folder = train(tmp_path / "run", **SETTINGS, adora_max_ratio=1.0001, max_steps=3, save_strategy="no")
    first, second, third = lines(folder)
    assert second["adora/replayed_groups"] > 0 == first["adora/replayed_groups"] == third["adora/replayed_groups"]
    assert [entry["adora/skipped_steps"] for entry in (first, second, third)] == [0, 1, 0]
