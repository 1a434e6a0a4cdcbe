"""Earlier groups take the places of groups without signal: which, how many, with what, and again
after a resume.
"""

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

from adora_vl.config.blocks import RolloutOptions
from adora_vl.config.checks import check_filling, costs_of
from adora_vl.config.schema import parse
from adora_vl.dedup.image_store import ImageBanks
from adora_vl.rollout.rollouts import DrawnProblem, Rollout, RolloutGroup, Span
from adora_vl.training.policies import replayed
from adora_vl.training.pool_state import KeptGroup, PoolState
from adora_vl.training.replay import Replay
from adora_vl.types import Batch, Row
from adora_vl.utils.errors import UserError
from tests.support.step_context import step_context
from tests.support.tiny_run import STEPS, train
from tests.unit.training.test_micro_batches import image, rank_batch

CPU = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "x"]
SIZE = 2  # rollouts per group


class Run:
    """Generations of two groups with images, of which those with advantages have signal; the
    weighing is left out.
    """

    def __init__(self, capacity: int = 3) -> None:
        accelerator = SimpleNamespace(
            gather=lambda tensor: tensor, device=torch.device("cpu"), process_index=0
        )
        keys: dict[str, Any] = {
            "adora_rollouts": RolloutOptions(replay=capacity),
            "num_generations": SIZE,
        }
        self.banks = ImageBanks()
        self.log = dict[str, float]()
        self.kept = tuple[KeptGroup, ...]()
        context = step_context(self.log, accelerator=accelerator, **keys)
        self.replay = Replay(context, self.again, self.banks.more)

    def again(self, groups: Any) -> Batch:
        """Their columns: the number of the row is its letter, and its tokens are of the prompt too."""
        (group,) = groups
        bank = self.banks.more()
        assert bank is not None
        numbers = torch.tensor([[rollout.tokens[0]] for rollout in groups[0].rollouts])
        widest = max(len(rollout.tokens) for rollout in group.rollouts)
        letters = [
            bank.references(image(group.row["id"]), torch.Tensor.float, torch.device("cpu"))
        ] * SIZE
        return {
            "prompt_ids": numbers.expand(-1, 2),
            "prompt_mask": torch.ones(SIZE, 2, dtype=torch.long),
            "completion_ids": numbers.expand(-1, widest + 3).clone(),
            "completion_mask": torch.tensor([[1] * widest + [0] * 3] * SIZE),
            "sampling_per_token_logps": -numbers.expand(-1, widest + 3).float(),
            "pixel_values": torch.cat(letters),
            "image_grid_thw": torch.tensor([[1, 2, 2]] * SIZE),
            "num_images": [1] * SIZE,
        }

    def learned(
        self, images: str, advantages: list[float], step: int, completion: int = 2, first: int = 0
    ) -> Batch:
        batch = rank_batch(self.banks, images, completion, first)
        batch |= {
            "advantages": torch.tensor(advantages),
            "old_per_token_logps": -batch["completion_ids"].float() / 10,
        }
        batch["signal"] = batch["advantages"] != 0
        groups = []
        for row in range(0, len(images), SIZE):
            tokens = [
                (int(batch["completion_ids"][row + member, 0]),) * completion
                for member in range(SIZE)
            ]
            rollouts = tuple(
                Rollout((Span(own, (-1.0,) * completion, step),), "stop") for own in tokens
            )
            groups.append(
                RolloutGroup(
                    DrawnProblem(ord(images[row]), f"train/{step}/0", 0), Row(), step, rollouts
                )
            )
        fresh = self.replay.fresh(batch, groups, step)
        rows = lambda numbers: [{"id": chr(number)} for number in numbers]  # noqa: E731
        batch = self.replay.again(batch, self.kept, rows, step, str(step))
        self.kept = self.replay.kept(self.kept, fresh, batch["advantages"])
        return batch


def patches(banks: ImageBanks, batch: Batch) -> list[int]:
    """The letter of each row's image, by the content of its patches."""
    references = batch["pixel_values"].view(len(batch["prompt_ids"]), -1)
    return [int(banks.of(int(row[0])).pixels([int(row[0])])[0][0, 0]) for row in references]


def test_a_group_is_drawn_as_often_as_its_advantages_say():
    """Sums of 1 and 3: with alpha 1 three times as often, with alpha 0 as often, with alpha 2 nine
    times.
    """
    for alpha, share in ((0.0, 1 / 2), (1.0, 3 / 4), (2.0, 9 / 10)):
        counts = collections.Counter(
            replayed([1.0, 3.0], alpha, 1, f"{alpha}/{number}")[0] for number in range(2000)
        )
        assert counts[1] / 2000 == pytest.approx(share, abs=0.04)  # 3.5 standard deviations


@given(st.lists(st.floats(1e-3, 1e30), max_size=9), st.floats(0, 8), st.integers(0, 12))
def test_no_group_is_drawn_twice_and_a_place_draws_the_same_again(sizes, alpha, count):
    found = replayed(sizes, alpha, count, "42/7/0")
    assert len(found) == len(set(found)) == min(count, len(sizes)) and set(found) <= set(
        range(len(sizes))
    )
    assert found == replayed(sizes, alpha, count, "42/7/0")


def test_earlier_groups_take_the_places_of_groups_without_signal():
    one = Run()
    first = one.learned("aabb", [1.0, -1.0, 0.0, 0.0], 0)
    assert first["advantages"].tolist() == [1, -1, 0, 0] and one.log["adora/replayed_groups"] == 0
    found = one.learned("ccdd", [0.0, 0.0, 2.0, -2.0], 4, completion=3, first=10)
    assert found["advantages"].tolist() == [1, -1, 2, -2]
    assert found["prompt_ids"][:, 0].tolist() == [0, 1, 12, 13], (
        "the rows of the first group came back"
    )
    assert found["completion_ids"].tolist() == [[0, 0, 99], [1, 1, 99], [12] * 3, [13] * 3]
    assert found["completion_mask"].sum(dim=1).tolist() == [2, 2, 3, 3]
    old = found["old_per_token_logps"]
    assert old[1].tolist() == pytest.approx([-0.1, -0.1, 0]), "as the policy of then saw them"
    assert patches(one.banks, found) == [ord(letter) for letter in "aadd"], "with their images"
    assert found["rollout_number"].tolist() == [-1, -1, 12, 13], (
        "the record of this step has other rollouts"
    )
    assert one.log == {"adora/replayed_groups": 0.5, "adora/replay_age": 4.0}


def test_only_as_many_groups_are_kept_as_fit_and_the_newest_and_never_pixels():
    one = Run(capacity=3)
    for step in range(4):
        one.learned("aabb", [1.0, -1.0, 3.0, -3.0], step, first=10 * step)
    assert [(kept.step, kept.size) for kept in one.kept] == [(2, 6), (3, 2), (3, 6)]
    assert all("pixel_values" not in kept.columns and not kept.group.row for kept in one.kept)


def test_groups_with_other_columns_wait():
    one = Run()
    one.learned("aabb", [1.0, -1.0, 0.0, 0.0], 0)
    one.kept[0].columns["another"] = torch.zeros(SIZE)
    assert not one.learned("ccdd", [0.0] * 4, 1)["advantages"].any()


def test_a_rank_that_replays_nothing_still_takes_part_in_the_vision_passes():
    """The gathered sums say that another rank has new images."""
    one = Run()
    one.learned("aabb", [1.0, -1.0, 1.0, -1.0], 0)
    one.replay.accelerator.gather = lambda tensor: tensor + torch.tensor([2, 4, 2])
    asked: list[bool] = []
    one.replay.more_images = lambda: asked.append(True)
    one.learned("aabb", [1.0, -1.0, 1.0, -1.0], 1)
    assert asked


def test_after_a_resume_the_same_groups_are_there(tmp_path):
    one, other = Run(), Run()
    one.learned("aabb", [1.0, -1.0, 3.0, -3.0], 0)
    PoolState(kept=one.kept).save(tmp_path, 0)
    other.kept = PoolState.load(tmp_path, 0, 1).kept
    whole, resumed = (run.learned("ccdd", [0.0] * 4, 5) for run in (one, other))
    assert torch.equal(whole["prompt_ids"], resumed["prompt_ids"]) and resumed["advantages"].all()
    assert patches(other.banks, resumed) == patches(one.banks, whole) and {
        *patches(one.banks, whole)
    } == {97, 98}


def test_a_checkpoint_has_few_bytes_of_a_token_that_is_kept(tmp_path):
    """A token, and its log-probabilities by the engine, the policy and the ratio of the two, of 4
    bytes each.
    """
    spans = (Span((7,) * 20_000, (-0.5,) * 20_000, 3),)
    group = RolloutGroup(
        DrawnProblem(2, "train/3/0", 1), Row(), 3, (Rollout(spans, "stop"),) * SIZE
    )
    columns = {
        name: torch.zeros(SIZE, 20_000)
        for name in ("old_per_token_logps", "importance_sampling_ratio")
    }
    PoolState(kept=(KeptGroup(group, columns, 1.0, 3),)).save(tmp_path, 0)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 16.5 * SIZE * 20_000


def test_two_processes_draw_differently():
    places = [replayed([1.0] * 9, 1.0, 3, f"42/7/0/{rank}") for rank in range(4)]
    assert len({tuple(sorted(found)) for found in places}) > 1


def test_what_it_costs_is_said():
    config = parse([*CPU, "--adora_rollouts.replay", "4"])[1]
    memory, clip = costs_of(config)
    assert (
        "up to 4 groups per process, in memory and every checkpoint" in memory
        and "without TRL's delta" in clip
    )
    config.delta = 10.0
    assert costs_of(config) == [memory]
    config.adora_rollouts = RolloutOptions()
    assert costs_of(config) == []


def test_what_it_does_not_go_with_is_said_in_one_line(subtests):
    cases = [
        (["--per_device_train_batch_size", "4"], "adora_rollouts.replay: 4 needs whole groups"),
        (["--loss_type", "bnpo"], "adora_rollouts.replay: 4 does not go with loss_type: bnpo"),
        (
            ["--top_entropy_quantile", "0.2"],
            "adora_rollouts.replay: 4 does not go with top_entropy_quantile: 0.2",
        ),
        (["--sync_ref_model", "true"], "adora_rollouts.replay: 4 does not go with sync_ref_model"),
    ]
    for arguments, said in cases:
        with subtests.test(said):
            config = parse(
                [*CPU, "--adora_rollouts.replay", "4", "--num_generations", "4", *arguments]
            )[1]
            config.num_generations = 8
            config.steps_per_generation = 1
            with pytest.raises(UserError, match=said):
                check_filling(config)
            config.adora_rollouts = RolloutOptions()
            check_filling(config)


def lines(folder: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "reward" in entry]


SETTINGS = {"adora_rollouts.replay": 6, "lr_scheduler_type": "constant"}


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[int, dict[tuple[int, ...], Tensor]]]:
    """The real training command.

    Of each step, by its tokens, what the loss got as a row's old log-probabilities.
    """
    of_the_loss: dict[int, dict[tuple[int, ...], Tensor]] = collections.defaultdict(dict)
    stock = GRPOTrainer._compute_loss

    def noted(self: Any, model: Any, inputs: Any) -> Any:
        for prompt, completion, mask, old in zip(
            *(
                inputs[name]
                for name in (
                    "prompt_ids",
                    "completion_ids",
                    "completion_mask",
                    "old_per_token_logps",
                )
            ),
            strict=True,
        ):
            text = (
                *prompt[prompt != self._tokenizer.pad_token_id].tolist(),
                *completion[mask.bool()].tolist(),
            )
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
        same = [
            text
            for text, old in of_the_loss[step].items()
            if text in earlier and torch.equal(old, earlier[text])
        ]
        assert bool(same) is (steps[step - 1]["adora/replayed_groups"] > 0)
        again += len(same)
    assert again >= 8, "the tiny model has groups without signal in most steps"


@pytest.mark.slow
def test_a_resumed_run_replays_the_same_groups(whole, tmp_path):
    folder, _ = whole
    part = shutil.copytree(folder, tmp_path / "part")
    shutil.rmtree(part / f"checkpoint-{STEPS}")
    assert (part / "checkpoint-2" / "pool-00000.pt").is_file()
    train(part, **SETTINGS)
    assert (part / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    for one, other in zip(lines(part), lines(folder), strict=True):
        assert one["adora/replayed_groups"] == other["adora/replayed_groups"]
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])


@pytest.mark.slow
def test_a_ratio_that_exploded_ends_the_replay_of_what_was_kept(tmp_path):
    """Step 2 learns again from step 1's groups and is skipped; step 3 has none left and is not."""
    folder = train(
        tmp_path / "run", **SETTINGS, adora_max_ratio=1.0001, max_steps=3, save_strategy="no"
    )
    first, second, third = lines(folder)
    assert (
        second["adora/replayed_groups"]
        > 0
        == first["adora/replayed_groups"]
        == third["adora/replayed_groups"]
    )
    assert [entry["adora/skipped_steps"] for entry in (first, second, third)] == [0, 1, 0]
