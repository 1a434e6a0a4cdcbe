"""One generation: sampled once, changed by hooks alone, refilled, learned from in several steps, and gone on with."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerState

from adora_vl import experimental, trainer
from adora_vl.checkpoint.store import MANIFEST, load_of_rank
from adora_vl.config.blocks import RolloutOptions
from adora_vl.dedup.image_store import ImageBanks
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.training.dynamic_sampling import DynamicSampling
from adora_vl.training.generation import Generation
from adora_vl.training.micro_batches import MicroBatcher
from adora_vl.training.policies import further_rows
from adora_vl.training.unfinished import FILES, UnfinishedGeneration
from adora_vl.types import Batch, Row
from adora_vl.utils.errors import UserError
from benchmarks.kill_and_resume import facts
from tests.support.step_context import step_context
from tests.support.tiny_run import STEPS, train
from tests.unit.data.test_prefetch import recorded
from tests.unit.training.test_micro_batches import rank_batch

# Two optimizer steps a generation; in the second one the policy has moved by more than the largest ratio allowed.
TWO_STEPS: dict[str, Any] = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "adora_max_ratio": 1.01}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, object]]]:
    """A run with a method that does nothing, and the hooks of it that were called, also when it was resumed."""
    called: list[tuple[str, object]] = []

    class Watches(experimental.Extension):
        def before_sampling(self, generation):
            assert not generation.batch and generation.scores is None
            called.append(("sampling", generation.where))

        def before_weighing(self, generation):
            assert generation.batch["signal"].shape == (len(generation.rows),) and generation.scores is not None
            called.append(("before", generation.where))

        def after_weighing(self, generation):
            assert generation.batch["advantages"].shape == (len(generation.rows),) and not generation.micro_batches
            called.append(("after", generation.where))

        def on_exploded_ratio(self):
            called.append(("exploded", None))

        def save(self, folder):
            called.append(("save", folder.name))

        def load(self, checkpoint):
            called.append(("load", checkpoint.name))

    torch.backends.cuda.enable_cudnn_sdp(True)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(trainer, "extensions", lambda *_, **__: [Watches()])
        folder = train(tmp_path_factory.mktemp("watched") / "run", **TWO_STEPS)
        shutil.rmtree(folder / f"checkpoint-{STEPS}")
        train(folder, **TWO_STEPS)
    return folder, called


def test_the_hooks_are_called_in_the_order_of_a_step(watched):
    def generation(step: int) -> list[tuple[str, object]]:
        hooks: list[tuple[str, object]] = [(hook, f"train/{step}/0") for hook in ("sampling", "before", "after")]
        return [*hooks, ("exploded", None), ("save", f"checkpoint-{step + 2}")]

    assert watched[1] == [*generation(0), *generation(2), ("load", "checkpoint-2"), *generation(2)]


def test_a_micro_batch_that_is_asked_for_twice_is_the_same(watched, tmp_path, monkeypatch):
    """Else a second call would sample again, and on some ranks only."""
    prepare, asked = AdoraGRPOTrainer._prepare_inputs, []

    def twice(self: Any, rows: Any) -> Any:
        first, step = prepare(self, rows), self._step
        assert prepare(self, rows) is first and self._step == step
        held = self._generation
        assert held.micro_batches and not held.rows and not held.batch, "only what is learned from is held"
        asked.append(step)
        return first

    monkeypatch.setattr(AdoraGRPOTrainer, "_prepare_inputs", twice)
    again = train(tmp_path / "adora", **TWO_STEPS)
    assert asked and recorded(again) == recorded(watched[0])


@pytest.mark.usefixtures("watched")
def test_a_run_keeps_cudnn_and_its_plan_for_every_shape_out_of_attention():
    assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()


def test_between_two_generations_there_is_nothing_to_keep(watched):
    assert not list(watched[0].glob("checkpoint-*/generation-*"))


def test_the_trainer_names_no_experimental_method():
    names = {path.stem for path in Path(experimental.__file__).parent.glob("*.py")} - {"__init__"}
    source = ast.unparse(ast.parse(Path(trainer.__file__).read_text()))
    assert names and [name for name in names if name in source] == []


def test_a_further_batch_has_a_name_of_its_own():
    generation = Generation.restored(0, [])
    generation.key = "3/1"
    assert generation.where == "train/3/1"
    generation.attempt = 2
    assert generation.where == "train/3/1/2"


def test_each_rank_gets_the_values_of_its_own_rows():
    generation = Generation.restored(0, [])
    generation.rows = [{}, {}, {}]
    own = [generation.of_rank(torch.arange(9), rank).tolist() for rank in range(3)]
    assert own == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


# ------------------------------------------------------------------------- DAPO's dynamic sampling


class Problems:
    """A data set of so many rows, which are their numbers."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return list(indices)


def groups(first: int, live: list[bool], tokens: int = 1) -> Batch:
    """Groups of two rollouts with numbers from `first` on."""
    numbers = first + torch.arange(2 * len(live))
    signal = torch.tensor([[alive, alive] for alive in live]).flatten()
    wide = numbers[:, None].expand(-1, tokens).clone()
    ones = torch.ones_like(wide)
    return {"prompt_ids": wide[:, :1], "prompt_mask": ones[:, :1], "completion_ids": wide, "completion_mask": ones,
            "signal": signal, "num_items_in_batch": torch.tensor(-1)}  # fmt: skip


def resampled(tries: int, further: list[Batch]) -> tuple[Batch, list[tuple[list[Any], int]], dict[str, float]]:
    """Three groups of which the first has signal, refilled from these batches: the result, what was asked, the log."""
    asked: list[tuple[list[Any], int]] = []
    log: dict[str, float] = {}

    def collect(rows: list[Row], attempt: int) -> Batch:
        asked.append((list(rows), attempt))
        return further[attempt - 1]

    resample = DynamicSampling(step_context(log, adora_rollouts=RolloutOptions(tries), num_generations=2, seed=7))
    return resample(groups(0, [True, False, False]), collect, Problems(50), "3/0"), asked, log


def test_groups_without_signal_are_replaced_by_further_problems_until_all_have_signal():
    found, asked, log = resampled(4, [groups(100, [False, True, False], tokens=3), groups(200, [True] * 3)])
    assert found["prompt_ids"].flatten().tolist() == [0, 1, 102, 103, 200, 201]
    assert found["signal"].all()
    assert found["completion_mask"].sum(dim=1).tolist() == [1, 1, 3, 3, 1, 1]
    assert [attempt for _, attempt in asked] == [1, 2], "no more than is needed"
    for rows, attempt in asked:
        wanted = further_rows(50, 3, f"7/3/0/{attempt}/0")
        assert rows == [row for row in wanted for _ in range(2)], "each problem as often as a group has rollouts"
    assert log == {"adora/further_batches": 1.0, "adora/refilled_groups": 2 / 3}


def test_dynamic_sampling_gives_up_after_its_tries_and_is_off_with_none():
    dead = groups(100, [False] * 3)
    found, asked, log = resampled(2, [dead, dead])
    assert len(asked) == 2 and found["prompt_ids"].flatten().tolist() == list(range(6))
    assert log["adora/refilled_groups"] == 0
    found, asked, log = resampled(0, [])
    assert not asked and not log and found["num_items_in_batch"] == -1


def test_a_further_batch_with_other_columns_replaces_nothing():
    """Rows with images beside rows without any."""
    other = {**groups(100, [True] * 3), "num_images": [1] * 6}
    found, _, _ = resampled(1, [cast("Batch", other)])
    assert found["prompt_ids"].flatten().tolist() == list(range(6))


def test_further_problems_are_the_same_ones_after_a_resume_and_others_elsewhere():
    assert further_rows(100, 4, "0/7/1/0") == further_rows(100, 4, "0/7/1/0")
    assert further_rows(100, 4, "0/7/1/0") != further_rows(100, 4, "0/7/1/1")
    assert sorted(further_rows(2, 3, "a")) in ([0, 0, 1], [0, 1, 1])


# ------------------------------------------------------------------------- a stop within a generation


KEYS: dict[str, Any] = {
    "num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
}  # fmt: skip


def letters_of(banks: ImageBanks, micro: Batch) -> list[str]:
    """What stands in the first patch of each row's image."""
    starts = micro["pixel_values"].view(len(micro["prompt_ids"]), -1)[:, 0].tolist()
    return [chr(int(banks.of(start).pixels([start])[0][0, 0])) for start in starts]


def test_what_is_left_of_a_generation_comes_back_with_its_images(tmp_path, subtests):
    for iterations, left in ((1, [False, False, False, True]), (2, [False, True, False, True])):
        with subtests.test(f"num_iterations {iterations}"):
            keys, folder = {**KEYS, "num_iterations": iterations}, tmp_path / str(iterations)
            before, after = ImageBanks(), ImageBanks()
            context = step_context(**keys)
            batch = rank_batch(before, "ababcdcd", 2, 0)
            micro_batches = MicroBatcher(context, before, every_row_counts=False).split(batch, "5/0")
            micro_step = 4 * 5 * iterations + 3  # the third micro-batch of the sixth generation is done
            facts = UnfinishedGeneration(context, before).save(folder, micro_step, micro_batches, "a table")
            (folder / MANIFEST).write_text(json.dumps({"step": 1, **facts}))
            rank_batch(after, "xyz", 2, 0)  # so that its patches have other numbers
            found = UnfinishedGeneration(context, after).load(folder)
            assert found is not None and (found[0], found[2]) == (micro_step, "a table")
            assert [bool(micro) for micro in found[1]] == left
            for micro, again in zip(micro_batches, found[1], strict=True):
                if again:
                    assert letters_of(after, again) == letters_of(before, micro) != []
                    for name in ("prompt_ids", "advantages", "completion_mask", "rollout_number"):
                        assert torch.equal(again[name], micro[name])


def test_a_checkpoint_between_generations_keeps_none_and_other_sizes_are_refused(tmp_path):
    banks = ImageBanks()
    one = UnfinishedGeneration(step_context(**KEYS), banks)
    micro_batches: list[Batch] = [{}, rank_batch(banks, "ab", 2, 0), {}, rank_batch(banks, "cd", 2, 0)]
    assert one.save(tmp_path, 8, micro_batches, "") == {} and not list(tmp_path.iterdir())
    (tmp_path / MANIFEST).write_text(json.dumps({"step": 4}))
    assert one.load(tmp_path) is None
    (tmp_path / MANIFEST).write_text(json.dumps({"step": 4, **one.save(tmp_path, 7, micro_batches, "")}))
    other = UnfinishedGeneration(step_context(**{**KEYS, "per_device_train_batch_size": 2}), ImageBanks())
    with pytest.raises(UserError, match=r"per_device_train_batch_size: 4, now 2; set it as before"):
        other.load(tmp_path)


def test_a_generation_that_nothing_was_learned_from_leaves_no_trace_in_a_checkpoint():
    state = TrainerState()
    one = UnfinishedGeneration(step_context(state=state), ImageBanks())
    now = {"metrics": {"reward": [1.0]}}
    assert one.facts(4, now) is now, "none has begun"
    state.num_input_tokens_seen = 100
    one.begins(4, {"metrics": {}})
    state.num_input_tokens_seen = 900  # it was sampled
    assert one.facts(5, now) is now and state.num_input_tokens_seen == 900
    assert one.facts(4, now) == {"metrics": {}} and state.num_input_tokens_seen == 100


CYCLE, SAVED, LAST = 4, 3, 7
RUNS: dict[str, dict[str, Any]] = {
    "one optimizer step a micro-batch": {"per_device_train_batch_size": 8, "steps_per_generation": CYCLE},
    # two micro-batches per step, every rollout twice, and features of a frozen tower that are kept for a generation
    "rollouts learned from twice": {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
        "num_iterations": 2, "adora_freeze": "vision_tower,projector",
    },
    "stock's work": {
        "per_device_train_batch_size": 8, "steps_per_generation": CYCLE,
        "adora_stock_step": "cache_images,share_vision,share_prompt,skip_zero_signal",
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=RUNS)
def whole(request, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A run of two generations that is saved within each of them."""
    settings = {**RUNS[request.param], "save_steps": SAVED, "max_steps": LAST, "log_completions": "true"}
    return train(tmp_path_factory.mktemp("whole") / "run", **settings), settings


def lines(run: Path) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, (run / "metrics.jsonl").open()) if line["kind"] == "train"]


@pytest.mark.slow
def test_rollouts_are_sampled_once_a_generation_and_clipping_acts_after_the_first_step(whole):
    steps = lines(whole[0])
    assert [step["step"] for step in steps] == list(range(1, LAST + 1))
    assert [step["step"] for step in steps if "reward" in step] == [1, 1 + CYCLE]
    # The old log-probabilities are those of the policy that sampled: the ratios are 1 up to float32's rounding before
    # its first update, and not after it.
    for step in steps:
        if step["step"] % CYCLE == 1:
            assert step["adora/ratio_max"] == pytest.approx(1, abs=1e-4) and step["clip_ratio/region_mean"] == 0
    assert max(step["adora/ratio_max"] for step in steps) > 1.2
    assert max(step["clip_ratio/region_mean"] for step in steps) > 0


@pytest.mark.slow
@pytest.mark.core
def test_a_run_that_stopped_within_a_generation_goes_on_to_the_bit(whole, tmp_path):
    run, settings = whole
    assert load_of_rank(run / f"checkpoint-{SAVED}", FILES, 0)
    again = shutil.copytree(run, tmp_path / "again")
    for step in (2 * SAVED, LAST):
        shutil.rmtree(again / f"checkpoint-{step}")
    train(again, **settings)
    assert {name: facts(again)[name] for name in ("steps", "rollouts")} == {
        name: facts(run)[name] for name in ("steps", "rollouts")
    }
    before, after = (load_file(folder / "model.safetensors") for folder in (run, again))
    assert all(torch.equal(before[name], after[name]) for name in before)
