"""A checkpoint is whole or does not count.

A run goes on from the newest whole one of the same run, or says why not.
"""

import contextlib
import os
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from adora_vl.checkpoint import store
from adora_vl.checkpoint.fingerprint import compute_fingerprint, fingerprint_differences
from adora_vl.checkpoint.run_files import OLD_RUN_FOLDER
from adora_vl.checkpoint.universal import (
    _RestoreParameterGroups,
    expect_universal_checkpoint,
    load_shards,
    refusing_pickled_code,
    write_universal,
)
from adora_vl.checkpoint.writer import CheckpointWriter
from adora_vl.config.blocks import RolloutOptions
from adora_vl.config.keys import AdoraKeys, AdoraScriptArguments
from adora_vl.data.dataloader import EpochRepeatSampler
from adora_vl.utils.errors import RunError, UserError
from adora_vl.utils.seeding import rollout_seed
from tests.support.checkpoints import FINGERPRINT, start_of_run, write_checkpoint
from tests.support.stand_ins import FakeAccelerator, training_config


def flip_a_byte(path: Path) -> None:
    """Change one bit of the byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


DAMAGES = {  # what damages a checkpoint, and the reason for which it is skipped
    "truncated": (
        lambda checkpoint: (checkpoint / "model.safetensors").write_bytes(b"short"),
        "model.safetensors has 5 bytes instead of",
    ),
    "flipped byte": (
        lambda checkpoint: flip_a_byte(checkpoint / "model.safetensors"),
        "model.safetensors is damaged",
    ),
    "flipped byte in a shard": (
        lambda checkpoint: flip_a_byte(checkpoint / "global_step" / "shard.pt"),
        "global_step/shard.pt is damaged",
    ),
    "missing file": (
        lambda checkpoint: (checkpoint / "global_step" / "shard.pt").unlink(),
        "global_step/shard.pt is missing",
    ),
    "missing mark": (
        lambda checkpoint: (checkpoint / store.COMPLETE_FILE).unlink(),
        "it was never finished (complete is missing)",
    ),
    "missing manifest": (
        lambda checkpoint: (checkpoint / store.MANIFEST_FILE).unlink(),
        "it was never finished (manifest.json is missing)",
    ),
    "edited manifest": (
        lambda checkpoint: flip_a_byte(checkpoint / store.MANIFEST_FILE),
        "manifest.json is not the one that was finished",
    ),
    "empty mark": (
        lambda checkpoint: (checkpoint / store.COMPLETE_FILE).write_text(""),
        "manifest.json is not the one that was finished",
    ),
}


def test_a_damaged_checkpoint_is_skipped_with_its_reason(tmp_path):
    """A run goes on from the older checkpoint if the newest is damaged, and a note says how.

    A damaged checkpoint that `resume_from_checkpoint` names is refused.
    """
    for name, (damage, reason) in DAMAGES.items():
        older = write_checkpoint(tmp_path / name, 10)
        newer = write_checkpoint(tmp_path / name, 20)
        assert store.describe_checkpoint_damage(newer) is None
        damage(newer)
        assert reason in str(store.describe_checkpoint_damage(newer)), name
        start = start_of_run(tmp_path / name)
        assert start.checkpoint == str(older), name
        assert start.notes[0].startswith(f"skipped {newer}: "), name
        assert reason in start.notes[0], name
        with pytest.raises(UserError, match="is not whole|is no checkpoint folder"):
            start_of_run(tmp_path / name, resume_from=str(newer))


def test_nothing_but_damaged_ones_is_refused_with_the_remedy(tmp_path):
    """A folder whose only checkpoint is damaged is refused, unless the run is to be replaced."""
    (write_checkpoint(tmp_path, 10) / store.COMPLETE_FILE).unlink()
    with pytest.raises(
        UserError, match=r"no checkpoint .* is whole; skipped .*--overwrite_output_dir true"
    ):
        start_of_run(tmp_path, resume_from="auto")
    start = start_of_run(tmp_path, resume_from="auto", overwrite=True)
    assert start.checkpoint is None
    assert start.replaces_old_run


def test_another_run_in_the_folder_is_refused_by_the_name_of_the_difference(tmp_path):
    """A run with other settings than the checkpoint's is refused, with the first difference.

    `FINGERPRINT`, with which the checkpoint is written, has the factor 0.1. If
    `resume_from_checkpoint` names the checkpoint, the run goes on from it, and a note says what has
    changed.
    """
    write_checkpoint(tmp_path, 10)
    with pytest.raises(
        UserError, match=r"of another run: adora_method.adora.factor: 0.1 -> 0.2 \(and 1 more\)"
    ):
        start_of_run(tmp_path, fingerprint={"adora_method.adora.factor": "0.2", "dataset": "xyz"})
    start = start_of_run(
        tmp_path,
        resume_from=str(tmp_path / "checkpoint-10"),
        fingerprint={**FINGERPRINT, "adora_method.adora.factor": "0.2"},
    )
    assert start.notes[1] == "changed since then: adora_method.adora.factor: 0.1 -> 0.2"


# the fingerprint of a run with DeepSpeed on 2 processes
SHARDED = {**FINGERPRINT, "processes": "2", "sharding": "zero3"}


def test_shards_of_another_world_are_refused_with_the_command_that_would_work(tmp_path):
    """A checkpoint of ZeRO-3 on 2 processes is refused with 1 process or without sharding.

    The error names the command that converts it; a universal checkpoint is taken on any number of
    processes.
    """
    checkpoint = write_checkpoint(tmp_path, 10, SHARDED)
    for resume_from in (None, str(checkpoint)):
        with pytest.raises(
            UserError, match=rf"by 2 processes and this run has 1; .* {checkpoint} OUT --universal"
        ):
            start_of_run(
                tmp_path, resume_from=resume_from, fingerprint={**SHARDED, "processes": "1"}
            )
        with pytest.raises(
            UserError,
            match=r"with sharding zero3 and this run has none; .* --model_name_or_path OUT",
        ):
            start_of_run(
                tmp_path, resume_from=resume_from, fingerprint={**SHARDED, "sharding": "none"}
            )
    universal = write_checkpoint(tmp_path / "universal", 10, SHARDED)
    (universal / "latest_universal").write_text("global_step")
    assert start_of_run(
        tmp_path, resume_from=str(universal), fingerprint={**SHARDED, "processes": "1"}
    ).notes[1:] == ["changed since then: processes: 2 -> 1"]


def test_only_shards_are_converted_and_only_deepspeed_reads_the_result(tmp_path):
    """A checkpoint without ZeRO has no shards to convert; a run without it reads no conversion."""
    checkpoint = write_checkpoint(tmp_path, 10)
    # DeepSpeed's shards lie in this folder, so without it the checkpoint is one without ZeRO.
    (checkpoint / "global_step").rename(checkpoint / "other")
    with pytest.raises(UserError, match="has no shards of DeepSpeed, so it needs no conversion"):
        write_universal(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="a universal checkpoint needs DeepSpeed"):
        expect_universal_checkpoint(SimpleNamespace(is_deepspeed_enabled=False))


class Code:
    """An object whose pickle asks for a call of `os.mkdir`, when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_strangers_checkpoint_is_run_by_deepspeed(tmp_path, monkeypatch):
    """A checkpoint whose pickles call `os.mkdir` is refused by the conversion and by a resume.

    Neither makes the folder, although the caller passes `weights_only=False` and an environment
    variable asks for the same.
    """
    checkpoint = tmp_path / "checkpoint-1"
    trace_of_code = tmp_path / "ran"
    names = ("mp_rank_00_model", "zero_pp_rank_0_mp_rank_00_optim")
    (checkpoint / "global_step1").mkdir(parents=True)
    for name in names:
        torch.save(
            {"optimizer_state_dict": Code(trace_of_code)},
            checkpoint / "global_step1" / f"{name}_states.pt",
        )
    (checkpoint / "latest").write_text("global_step1")
    store.mark_checkpoint_complete(checkpoint, {"step": 1, "fingerprint": {}})
    engine = SimpleNamespace(
        load_checkpoint=lambda *_, **__: torch.load(
            checkpoint / "global_step1" / f"{names[0]}_states.pt", weights_only=False
        )
    )
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for load in (
        lambda: write_universal(checkpoint, tmp_path / "out"),
        lambda: load_shards(engine, str(checkpoint)),
    ):
        with pytest.raises(
            UserError, match=r"'.*checkpoint-1' asks for posix.mkdir, which no run has written"
        ):
            load()
    assert not trace_of_code.exists()
    assert not (tmp_path / "out").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"


def test_what_deepspeed_itself_writes_is_read_without_code(tmp_path):
    """A file with the classes that DeepSpeed's checkpoints have is read where code is refused."""
    address = fragment_address(3, 1)
    scaler = DynamicLossScaler(
        init_scale=4.0,  # comes back as `cur_scale`
        scale_window=1000,
        min_scale=1.0,
        delayed_shift=2,
        consecutive_hysteresis=False,
    )
    content = {
        "stage": ZeroStageEnum(3),
        "loss_scaler": scaler,
        "mapping": [{"w": address}],
        "static": LossScaler(1.0),
    }
    torch.save(content, tmp_path / "states.pt")
    with refusing_pickled_code(tmp_path):
        loaded = torch.load(tmp_path / "states.pt", weights_only=False)
    assert loaded["stage"] == 3
    assert loaded["mapping"][0]["w"] == address
    assert loaded["loss_scaler"].cur_scale == 4.0


class AskForAttribute:
    """Is pickled as a call of `getattr`, as early versions of Python 3.11 pickle enumerations."""

    def __init__(self, owner: object, name: str) -> None:
        self._arguments = (owner, name)

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, self._arguments


def test_a_stage_that_an_early_python_3_11_has_pickled_is_read_and_no_other_attribute(tmp_path):
    """Debian's Python 3.11.2 pickles `ZeroStageEnum(3)` as `getattr(ZeroStageEnum, "weights")`."""
    torch.save({"stage": AskForAttribute(ZeroStageEnum, "weights")}, tmp_path / "states.pt")
    with refusing_pickled_code(tmp_path):
        loaded = torch.load(tmp_path / "states.pt", weights_only=False)
    assert loaded["stage"] is ZeroStageEnum(3)

    for owner, name in ((ZeroStageEnum, "__members__"), (LossScaler, "backward")):
        torch.save({"stage": AskForAttribute(owner, name)}, tmp_path / "states.pt")
        with (
            pytest.raises(UserError, match=r"asks for builtins\.getattr, which no run has written"),
            refusing_pickled_code(tmp_path),
        ):
            torch.load(tmp_path / "states.pt", weights_only=False)


def test_after_a_universal_checkpoint_every_group_has_its_own_step_and_decay():
    """After a universal checkpoint each parameter group has its own Adam step and weight decay.

    DeepSpeed's loading gives all groups one step tensor, which each group then advances, and the
    first group's weight decay. The two groups here are in that state.
    """
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [weight], "weight_decay": 0.1} for weight in weights])
    shared = torch.tensor(4.0)
    for weight in weights:
        optimizer.state[weight] = {
            "step": shared,
            "exp_avg": torch.zeros(2),
            "exp_avg_sq": torch.zeros(2),
        }
        weight.grad = torch.ones(2)
    _RestoreParameterGroups().on_train_begin(
        training_config(weight_decay=0.1), None, None, optimizer=optimizer
    )
    optimizer.step()

    # with one tensor for both groups the steps would be 6 and 6
    assert [optimizer.state[weight]["step"].item() for weight in weights] == [5, 5]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_the_words_of_resume_from_checkpoint(tmp_path):
    """`resume_from_checkpoint: true` is refused without a checkpoint, and false with one.

    With auto, or without the key, a run resumes if there is a checkpoint.
    """
    assert start_of_run(tmp_path / "new").checkpoint is None
    with pytest.raises(UserError, match="true, but"):
        start_of_run(tmp_path / "new", resume_from="true")
    newest = write_checkpoint(tmp_path, 10)
    for word in (None, "auto", "true", True):
        assert start_of_run(tmp_path, resume_from=word).checkpoint == str(newest)
    with pytest.raises(UserError, match="false, but .* holds checkpoint-10"):
        start_of_run(tmp_path, resume_from="false")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("", "^resume_from_checkpoint: '' names no checkpoint; name its folder, or write auto$"),
        ("..", r"'\.\.' is no checkpoint folder \(no trainer_state.json\); name one, such as"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused_with_a_remedy(tmp_path, word, message):
    with pytest.raises(UserError, match=message):
        start_of_run(tmp_path, resume_from=word)


def test_differences_name_what_a_person_sets_first():
    """A difference is a line `KEY: BEFORE -> NOW`; keys of ours come before those of TRL."""
    fingerprint_before = {"beta": "0", "adora_correct_above": "1", "gone": "1"}
    now = {"beta": "1", "adora_correct_above": "2", "new": "3"}
    expected = [
        "adora_correct_above: 1 -> 2",
        "beta: 0 -> 1",
        "gone: 1 -> not set",
        "new: not set -> 3",
    ]
    assert fingerprint_differences(fingerprint_before, now) == expected


def test_model_and_data_are_known_by_what_is_in_them_and_not_by_their_path(tmp_path):
    """A moved model or data folder keeps its fingerprint; one whose file has other bytes does not.

    The other bytes have the same number, so that the size does not give them away.
    """

    def fingerprint_of_folder(home: Path) -> dict[str, str]:
        model = str(home / "model")
        return compute_fingerprint(
            AdoraKeys(), data=[home / "data"], model=model, revision="main", processes=1
        )

    home = tmp_path / "here"
    files = {
        "model/config.json": b"{}",
        "model/model.safetensors": b"12",
        "data/manifest.json": b"{}",
    }
    for name, content in {**files, "data/data/train-0.parquet": b"12"}.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(content)
    fingerprint_before = fingerprint_of_folder(home)
    moved_folder = home.rename(tmp_path / "there")
    assert fingerprint_differences(fingerprint_before, fingerprint_of_folder(moved_folder)) == []
    for key, name in (
        ("dataset", "data/data/train-0.parquet"),
        ("model", "model/model.safetensors"),
    ):
        (moved_folder / name).write_bytes(b"13")
        (line,) = fingerprint_differences(fingerprint_before, fingerprint_of_folder(moved_folder))
        assert line.startswith(f"{key}: ")
        (moved_folder / name).write_bytes(b"12")


def test_a_reward_function_that_was_edited_is_another_run():
    """A reward function whose file has another hash makes another fingerprint, which names it."""

    def fingerprint_with_hash(digest: str) -> dict[str, str]:
        code_hashes = {"reward my_rewards.py": digest}
        return compute_fingerprint(
            AdoraKeys(), data=["d"], model="m", revision="r", processes=1, code_hashes=code_hashes
        )

    assert fingerprint_differences(fingerprint_with_hash("1a"), fingerprint_with_hash("1a")) == []
    assert fingerprint_differences(fingerprint_with_hash("1a"), fingerprint_with_hash("2b")) == [
        "reward my_rewards.py: 1a -> 2b"
    ]


def test_arguments_of_the_model_s_loading_count_where_they_change_the_model():
    """A token of the hub may change in the middle of a run, and the number of layers may not."""

    def fingerprint_with_arguments(arguments: object) -> dict[str, str]:
        config = training_config(model_init_kwargs=arguments)
        return compute_fingerprint(config, data=["d"], model="m", revision="r", processes=1)

    without_arguments = fingerprint_with_arguments(None)
    loading = {"token": "t", "device_map": "auto", "dtype": "float32", "use_cache": False}
    assert fingerprint_differences(without_arguments, fingerprint_with_arguments(loading)) == []
    other_model = fingerprint_with_arguments({"num_hidden_layers": 2, "rope": {"theta": 1}})
    assert fingerprint_differences(without_arguments, other_model) == [
        "model_init_kwargs.num_hidden_layers: not set -> 2",
        "model_init_kwargs.rope.theta: not set -> 1",
    ]


def test_a_judge_that_has_moved_is_the_same_run():
    """Its address and the number of calls at once do not change what it says; its model does."""

    def fingerprint_with_judge(**options: Any) -> dict[str, str]:
        """Return the fingerprint of a run with a judge, whose options are these."""
        judge = {"base_url": "http://a:8123/v1", "model": "j", **options}
        keys = AdoraScriptArguments(adora_reward=["accuracy", {"judge": judge}])
        return compute_fingerprint(
            keys,
            data=["d"],
            model="m",
            revision="r",
            processes=1,
        )

    fingerprint_before = fingerprint_with_judge()
    assert (
        fingerprint_differences(
            fingerprint_before, fingerprint_with_judge(base_url="http://b:8124/v1", concurrency=4)
        )
        == []
    )
    for changed_options in (
        {"model": "k"},
        {"instruction": "Judge."},
        {"max_tokens": 9},
        {"budget": 9},
    ):
        (line,) = fingerprint_differences(
            fingerprint_before, fingerprint_with_judge(**changed_options)
        )
        assert line.startswith("adora_reward: ")


def test_a_reward_by_its_other_name_is_the_same_run():
    """A reward counts as the same under `adora`, another name of `boxed_accuracy`."""

    def fingerprint_with_rewards(*rewards: str | dict[str, Any]) -> dict[str, str]:
        keys = AdoraScriptArguments(adora_reward=[*rewards])
        return compute_fingerprint(keys, data=["d"], model="m", revision="r", processes=1)

    now = fingerprint_with_rewards("boxed_accuracy")
    assert fingerprint_with_rewards("adora") == now
    assert fingerprint_differences(now, fingerprint_with_rewards("accuracy")) == [
        'adora_reward: ["boxed_accuracy"] -> ["accuracy"]'
    ]
    rounding = {"rounding": True}
    assert fingerprint_with_rewards({"adora": rounding}) == fingerprint_with_rewards(
        {"boxed_accuracy": rounding}
    )


def test_rotation_keeps_the_newest_whole_ones_and_touches_nothing_unfinished(tmp_path):
    """With a limit of two, the two newest whole checkpoints stay, and an unfinished one as well.

    checkpoint-10 is unfinished. Without a limit nothing is deleted.
    """
    for step in (5, 10, 15, 20):
        write_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-10" / store.COMPLETE_FILE).unlink()
    store.delete_old_checkpoints(tmp_path, 2)
    assert [path.name for path in store.list_checkpoints(tmp_path)] == [
        "checkpoint-20",
        "checkpoint-15",
        "checkpoint-10",
    ]
    store.delete_old_checkpoints(tmp_path, None)
    assert len(store.list_checkpoints(tmp_path)) == 3


def test_nothing_older_goes_before_the_new_checkpoint_is_whole(tmp_path):
    """Older checkpoints stay when a save fails on a full disk, and go when the next save succeeds.

    They are checkpoint-10 of this run, and checkpoint-3 of the run that it replaces. The writer
    keeps one checkpoint.
    """
    write_checkpoint(tmp_path / OLD_RUN_FOLDER, 3)  # of the run that this one replaces
    older = write_checkpoint(tmp_path, 10)
    accelerator: Any = FakeAccelerator()
    writer = CheckpointWriter(tmp_path, max_checkpoints=1, accelerator=accelerator)

    def save(folder: Path) -> dict[str, object]:
        assert store.describe_checkpoint_damage(older) is None
        assert store.list_checkpoints(tmp_path / OLD_RUN_FOLDER)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
        return {"fingerprint": FINGERPRINT}

    def on_a_full_disk(folder: Path) -> dict[str, object]:
        save(folder)
        raise OSError("No space left on device")

    with pytest.raises(
        RunError, match=r"checkpoint-20 could not .* \(no space left.*older checkpoints are as"
    ) as full:
        writer.write(20, on_a_full_disk)
    assert full.value.__cause__ is None, "a cause would be printed as a traceback"
    assert list((tmp_path / store.STAGING_FOLDER).iterdir()) == []
    assert store.describe_checkpoint_damage(older) is None
    assert store.list_checkpoints(tmp_path / OLD_RUN_FOLDER)
    assert writer.last_saved_step is None
    writer.write(20, save)
    assert store.find_newest_valid_checkpoint(tmp_path)[0] == tmp_path / "checkpoint-20"
    assert writer.last_saved_step == 20
    assert len(store.list_checkpoints(tmp_path)) == 1
    assert not (tmp_path / OLD_RUN_FOLDER).exists()


def test_a_damaged_folder_of_the_same_step_is_replaced(tmp_path):
    """`write_checkpoint` saves as a run does: in a hidden folder first."""
    flip_a_byte(write_checkpoint(tmp_path, 10) / "model.safetensors")
    assert store.describe_checkpoint_damage(write_checkpoint(tmp_path, 10)) is None
    assert list((tmp_path / store.STAGING_FOLDER).iterdir()) == []


def test_a_crash_while_saving_leaves_the_older_checkpoint_valid(tmp_path, monkeypatch):
    """A crash in any file operation of a save leaves the new checkpoint whole, or not there at all.

    One of three functions crashes after 0 to 5 successful calls. A run goes on from the newest
    whole checkpoint.
    """
    older = write_checkpoint(tmp_path, 10)
    newer = tmp_path / "checkpoint-20"
    for name, successful_calls in product(
        ("replace_file", "hash_files", "flush_to_disk"), range(6)
    ):
        function = getattr(store, name)
        calls_left = iter(range(successful_calls))

        def crash_later(*arguments, calls_left=calls_left, function=function):
            if next(calls_left, None) is None:
                raise KeyboardInterrupt
            return function(*arguments)

        monkeypatch.setattr(store, name, crash_later)
        with contextlib.suppress(KeyboardInterrupt):
            write_checkpoint(tmp_path, 20)
        monkeypatch.setattr(store, name, function)

        newest, skipped = store.find_newest_valid_checkpoint(tmp_path)
        assert newest == (newer if newer.exists() else older)
        assert skipped == []
        store.clear_staging(tmp_path)


def test_an_epoch_has_its_own_order_however_the_run_came_there():
    """The order of an epoch is the same in a run that begins with it, as a resumed run does.

    A run that resumes in epoch 1 has not drawn epoch 0.
    """

    def order(*epochs: int) -> list[list[int]]:
        sampler = EpochRepeatSampler(range(40), mini_repeat_count=2, batch_size=4, seed=7)
        orders = []
        for epoch in epochs:
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        return orders

    assert order(0, 1, 2)[1:] == order(1, 2)
    assert len({tuple(rows) for rows in order(0, 1, 2)}) == 3
    assert sorted(set(order(1)[0])) == list(range(40))


def test_rows_that_are_not_shuffled_all_have_their_turn():
    """Without shuffling, rows that fill no generation of an epoch begin the next epoch.

    An epoch of 11 rows has two generations of 4 rows, so 11 epochs give each row 8 turns.
    """
    sampler = EpochRepeatSampler(
        range(11),
        mini_repeat_count=2,
        batch_size=4,
        repeat_count=3,
        shuffle=False,
    )
    drawn_rows = []
    for epoch in range(11):
        sampler.set_epoch(epoch)
        order = list(sampler)
        assert len(order) == len(sampler)
        drawn_rows += order
    # a generation is 4 rows with 2 rollouts each, and comes 3 times
    generations = [
        drawn_rows[first : first + 4 * 2] for first in range(0, len(drawn_rows), 4 * 2 * 3)
    ]
    rows = [row for generation in generations for row in generation[::2]]
    assert rows == [*range(11)] * 8, "in the order of the data set, eleven epochs of eight rows"


def test_every_rollout_has_its_own_seed_and_the_same_one_again():
    """Each rollout has a seed of its own, which is the same whenever it is asked for.

    It is made of the run's seed, the generation, the group and the rollout's number in it.
    """
    all_coordinates = [
        (run, f"train/{step}/{micro}", group, member)
        for run, step, micro, group, member in product((0, 1), (0, 1), (0, 1), (0, 9), (0, 7))
    ]
    seeds = [rollout_seed(*coordinates) for coordinates in all_coordinates]
    assert len(set(seeds)) == len(all_coordinates)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [rollout_seed(*coordinates) for coordinates in all_coordinates]


def test_a_key_of_partial_rollouts_differs_only_where_there_is_a_budget():
    """Keys of `adora_rollouts` are in the fingerprint only if `budget` is set.

    So a run without a budget goes on from a checkpoint that was saved before these keys existed.
    """

    def fingerprint_with_budget(budget: int | None, staleness: int = 4) -> dict[str, str]:
        """Return the fingerprint of a run with this budget of tokens, None for none."""
        keys = AdoraKeys(adora_rollouts=RolloutOptions(budget=budget, staleness=staleness))
        return compute_fingerprint(
            keys,
            data=["d"],
            model="m",
            revision="r",
            processes=1,
        )

    assert (
        fingerprint_differences(
            fingerprint_with_budget(None), fingerprint_with_budget(None, staleness=2)
        )
        == []
    )
    assert "adora_rollouts.budget" not in fingerprint_with_budget(None)
    assert (
        len(fingerprint_differences(fingerprint_with_budget(None), fingerprint_with_budget(9))) == 2
    )
    assert fingerprint_differences(
        fingerprint_with_budget(9), fingerprint_with_budget(9, staleness=2)
    ) == ["adora_rollouts.staleness: 4 -> 2"]
