"""The record of the rollouts is right, bounded, and whole after a crash.

After a resume it has no rollout twice.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from adora_vl.advantage import Groups
from adora_vl.advantage.adora import weigh_groups
from adora_vl.record import record_files, rollouts
from adora_vl.record import recorder as recorder_module
from adora_vl.record.diagrams import DiagramStore
from adora_vl.record.metrics import METRICS_FILE, MetricsLine, read_metrics
from adora_vl.record.recorder import Recorder
from adora_vl.record.rollout_metrics import tool_metrics
from adora_vl.rewards.completion import completion_text
from adora_vl.rollout.importance import rollout_drift
from adora_vl.rollout.rollouts import Call, FinishReason, Picture, Rollout, Segment
from adora_vl.training.advantages import GroupAssessment
from adora_vl.training.rollout_facts import weighted_sum
from tests.support.facts import facts_without_unrewarded, rollout_facts
from tests.support.stand_ins import FakeAccelerator, trainer_state
from tests.support.step_context import step_context
from tests.support.tiny_run import TINY_RUN_STEPS, train_tiny_run

NAN = float("nan")


def columns_of_step(step: int, count: int = 4, **changed: list[Any]) -> dict[str, list[Any]]:
    """Return the columns of a record with `count` rollouts of one step."""
    columns: dict[str, list[Any]] = {
        "step": [step] * count,
        "id": [f"p{step}"] * count,
        "completion": [f"answer {number}" for number in range(count)],
    }
    return {**columns, **changed}


def write_step(
    folder: Path, step: int, settings: dict[str, object] | None = None
) -> record_files.RecordFile:
    """Write a file of the record with the four rollouts of one step.

    `settings` are stored as metadata of the file, under the key `adora_vl`.
    """
    columns = columns_of_step(step)
    table = rollouts.make_table(columns, settings or {})
    return record_files.write_record_file(folder, table, first_step=step, last_step=step)


def read_record(folder: Path) -> pa.Table:
    """Every row of a record, as the report reads it."""
    parts = record_files.list_record_files(folder)
    return record_files.read_record_files(parts)


def recorded_steps(folder: Path) -> list[int]:
    """Return the step of each recorded rollout, in the order of the rows."""
    table = read_record(folder)
    return table["step"].to_pylist()


def four_rollouts_of(steps: Iterable[int]) -> list[int]:
    """Return what `recorded_steps` has to give if each step has its four rollouts once."""
    expected: list[int] = []
    for step in steps:
        expected += [step] * 4
    return expected


def test_the_criteria_of_groups_by_hand():
    """Three groups of three rollouts; the last rollout of the third group was cut off at 50 tokens.

    A column has one value for each rollout: the group's share of right rollouts, its longest right
    one, and the mean length of its finished wrong ones. A rollout without a reward (NaN) counts as
    wrong.
    """
    rewards = torch.tensor([[1.0, 0.1, 0.0], [0.0, NAN, 0.0], [1.0, 1.0, 0.1]])
    lengths = torch.tensor([[9.0, 5.0, 8.0], [1.0, 2.0, 3.0], [4.0, 6.0, 50.0]])
    groups = Groups(rewards, lengths, lengths >= 50)
    columns = rollouts.criteria_columns(groups)
    # one value per rollout, and the three rollouts of a group have the same one
    column_lengths = {name: len(column) for name, column in columns.items()}
    value_of_group = {name: column[::3] for name, column in columns.items()}
    assert column_lengths == {"pass_rate": 9, "longest_right": 9, "mean_wrong": 9}
    assert value_of_group["pass_rate"] == pytest.approx([1 / 3, 0, 2 / 3])
    assert value_of_group["longest_right"] == pytest.approx([9, NAN, 6], nan_ok=True)
    assert value_of_group["mean_wrong"] == pytest.approx([6.5, 2, NAN], nan_ok=True)


def test_a_reward_is_the_weighted_sum_of_the_parts_that_are_there():
    """NaN is a reward function that did not score; where none did, the sum is NaN too."""
    rewards_BF = torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN]])
    weights_F = torch.tensor([1.0, 0.5])
    sums = weighted_sum(rewards_BF, weights_F).tolist()
    assert sums == pytest.approx([1.0 * 1 + 2.0 * 0.5, 2.0 * 0.5, NAN], nan_ok=True)


def test_the_drift_of_a_rollout_is_its_largest_gap_where_both_sides_have_a_figure():
    """The engine has no log-probability where it says NaN, and a masked token does not count."""
    trainer_logps = torch.tensor([[1.0, 2.0, 9.0], [1.0, 1.0, 1.0]])
    engine_logps = torch.tensor([[1.5, NAN, 0.0], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    drifts = rollout_drift(trainer_logps, engine_logps, mask).tolist()
    assert drifts == pytest.approx([0.5, NAN], nan_ok=True)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("a", "a"),
        ([{"role": "user", "content": "a"}], "a"),
        ([{"content": "x"}, {"content": [{"type": "image"}, {"type": "text", "text": "b"}]}], "b"),
        ([], ""),
    ],
)
def test_the_text_of_a_message_in_every_form(message, text):
    assert completion_text(message) == text


def test_a_figure_that_is_not_there_is_null():
    """NaN, None and a column without values all become null in the table."""
    columns = columns_of_step(
        1,
        count=2,
        drift=[NAN, 0.5],
        extracted=[None, "7"],
        tds=[],
    )
    columns["reward/x"] = [1.0, None]
    table = rollouts.make_table(columns, {"k": 1})
    assert table["drift"].to_pylist() == [None, 0.5]
    assert table["reward/x"].to_pylist() == [1.0, None]
    assert table["tds"].to_pylist() == [None, None]
    assert b"adora_vl" in table.schema.metadata


def test_generations_of_one_step_are_numbered_through(tmp_path):
    """Two generations of two groups each are recorded in one step: groups 0 to 3."""
    record = rollouts.RolloutStore(tmp_path, 1, {})
    record.start(0)
    record.add(columns_of_step(1), group_size=2)
    record.add(columns_of_step(1), group_size=2)
    record.flush(1)
    table = read_record(record.folder)
    group_numbers = table["group"].to_pylist()
    numbers_in_group = table["rollout"].to_pylist()
    assert group_numbers == [0, 0, 1, 1, 2, 2, 3, 3]
    assert numbers_in_group == [0, 1, 0, 1, 0, 1, 0, 1]
    record.flush(2)  # a step whose rollouts are those of the one before
    assert len(record_files.list_record_files(record.folder)) == 1


def test_many_small_files_become_one_and_nothing_is_lost_or_twice(tmp_path):
    """A hundred steps write a file each, and the record merges small ones as it goes."""
    record = rollouts.RolloutStore(tmp_path, 1, {})
    record.start(0)
    for step in range(1, 101):
        record.add(columns_of_step(step), group_size=4)
        record.flush(step)
    files = record_files.list_record_files(record.folder)
    assert len(files) < 40
    assert recorded_steps(record.folder) == four_rollouts_of(range(1, 101))


def crash(*_: object, **__: object) -> None:
    """Stands for a process that is killed at this place."""
    raise KeyboardInterrupt


def test_a_crash_between_a_merge_and_its_deletions_leaves_nothing_twice(tmp_path, monkeypatch):
    """The merged file is written, and none of the small ones is deleted yet."""
    for step in range(1, 33):
        write_step(tmp_path, step)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", crash)
        record_files.merge_small_record_files(tmp_path)
    files = list(tmp_path.glob("*.parquet"))
    # the 32 small ones and the merged one
    assert len(files) == 33
    assert recorded_steps(tmp_path) == four_rollouts_of(range(1, 33))
    record_files.delete_steps_after(tmp_path, 32)
    files = list(tmp_path.iterdir())
    assert len(files) == 1


def test_a_crash_while_writing_leaves_only_whole_files(tmp_path, monkeypatch):
    """A write of step 2 that dies half-way leaves the four rollouts of step 1."""
    write_step(tmp_path, 1)

    def dies(table, stream, **_):
        stream.write(b"PAR1 half a file")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pq, "write_table", dies)
        write_step(tmp_path, 2)
    assert recorded_steps(tmp_path) == [1, 1, 1, 1]
    record_files.delete_steps_after(tmp_path, 1)
    file_names = [path.name for path in tmp_path.iterdir()]
    assert file_names == ["rollouts-00000001-00000001.parquet"]


def test_a_resume_cuts_at_its_step_also_inside_a_merged_file(tmp_path):
    """A run of 40 steps resumes from each of these steps, so later rollouts are deleted."""
    for step in (3, 20, 32, 40):
        folder = tmp_path / str(step)
        folder.mkdir()
        for number in range(1, 41):
            write_step(folder, number, settings={"num_generations": 4})
            record_files.merge_small_record_files(folder)
        record_files.delete_steps_after(folder, step)
        newest_file = record_files.list_record_files(folder)[-1]
        metadata = read_record(folder).schema.metadata
        assert recorded_steps(folder) == four_rollouts_of(range(1, step + 1))
        assert newest_file.last_step == step
        assert b"adora_vl" in metadata  # the settings are still there
        # a start at 0 deletes the record, and what is no part of it stays
        notes = folder / "notes.txt"
        notes.write_text("somebody else's")
        record_files.delete_steps_after(folder, 0)
        assert list(folder.iterdir()) == [notes]


def test_the_oldest_go_when_the_bound_is_reached(tmp_path):
    """Ten files of a step each are cut to those that fit, and at least the newest."""
    for number in range(1, 11):
        write_step(tmp_path, number)
    oldest_file = record_files.list_record_files(tmp_path)[0].path
    file_bytes = oldest_file.stat().st_size
    # room for three files
    record_files.delete_oldest_record_files(tmp_path, 3.5 * file_bytes)
    assert recorded_steps(tmp_path) == four_rollouts_of([8, 9, 10])
    # room for none: the newest one stays
    record_files.delete_oldest_record_files(tmp_path, 1)
    assert recorded_steps(tmp_path) == four_rollouts_of([10])


def test_rollouts_and_diagrams_have_half_of_the_room_each(tmp_path):
    """Half of a limit of seven files has room for three files of rollouts, the newest ones."""
    (tmp_path / "one").mkdir()
    part = write_step(tmp_path / "one", 1)
    file_bytes = part.path.stat().st_size
    limit_gb = 7 * file_bytes / 1e9
    record = rollouts.RolloutStore(tmp_path, limit_gb, {})
    record.start(0)
    for step in range(1, 10):
        record.add(columns_of_step(step), group_size=4)
        record.flush(step)
    assert recorded_steps(record.folder) == four_rollouts_of([7, 8, 9])
    assert record.diagrams.limit_bytes == pytest.approx(3.5 * file_bytes)


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path, monkeypatch, capsys):
    """A write that fails, as on a full disk, is a warning, after which nothing is recorded."""
    record = rollouts.RolloutStore(tmp_path, 1, {})
    record.start(0)
    record.add(columns_of_step(1), group_size=4)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    record.flush(1)
    warning = capsys.readouterr().err
    assert record.failure_reason
    assert "step 1: the rollouts are no longer recorded" in warning


def scored_rollouts(
    rows: list[Any], ranks: int, rollouts: list[Rollout] | None = None
) -> tuple[Any, Any]:
    """Return groups of two rollouts as they are built, and as they are scored.

    All rollouts are right and 3 tokens long. Every one of `ranks` ranks has the same `rows`.
    """
    count = ranks * len(rows)
    rewards_NF = torch.ones(count, 1)
    lengths_N = torch.full((count,), 3.0)
    rewards_PG = rewards_NF.view(-1, 2)
    lengths_PG = lengths_N.view(-1, 2)
    is_truncated_PG = lengths_PG > 9
    groups = Groups(rewards_PG, lengths_PG, is_truncated_PG)
    assessment = GroupAssessment(
        groups=groups,
        weighting=weigh_groups(groups),
        trl_advantages_PG=groups.rewards_PG,
        has_signal_P=torch.ones(len(groups.rewards_PG), dtype=torch.bool),
        equal_reward_share=0.0,
        num_ranks=ranks,
    )
    facts = facts_without_unrewarded(rewards_NF, generations=2, length_N=lengths_N)
    built = SimpleNamespace(rows=rows, rollouts=rollouts or [])
    return built, SimpleNamespace(batch={}, facts=facts, assessment=assessment)


def test_a_rollout_with_tools_is_recorded_as_a_conversation(tmp_path):
    """Segments of the model and of tools become turns, with the call that a tool answered."""
    context = step_context(output_dir=str(tmp_path))
    recorder = Recorder(context, decode=lambda tokens: f"said {[*tokens]}")
    recorder.record.start(0)
    image = Image.new("RGB", (8, 8))
    call = Call(
        name="zoom",
        arguments="{}",
        text="Picture",
        seconds=0.5,
        failed=False,
        segment_number=1,
    )
    asks = Segment(tokens=(1, 2), logps=(0.0, 0.0), step=0)
    reply = Segment(tokens=(5, 6, 7), logps=None, step=0)
    answers = Segment(tokens=(3,), logps=(0.0,), step=0)
    with_tool = Rollout(
        segments=(asks, reply, answers),
        finish_reason=FinishReason.STOP,
        pictures=(Picture(digest="x", image=image, segment_number=1),),
        calls=(call,),
    )
    without_tool = Rollout(segments=(asks,), finish_reason=FinishReason.STOP)
    row = {"id": 7, "problem": "?", "prompt": "?"}
    built, scored = scored_rollouts([row, row], ranks=1, rollouts=[with_tool, without_tool])
    table = {"completion": ["so 3", "so 3"], "extra": {}}

    recorder.add(0, built, scored, table, ["accuracy"])
    recorder.record.flush(1)

    first, second = read_record(recorder.record.folder).to_pylist()
    assert first["calls"] == 1
    assert second["calls"] == 0
    assert len(second["turns"]) == 1
    columns = ("by", "text", "tokens", "seconds")
    turns = [tuple(turn[name] for name in columns) for turn in first["turns"]]
    assert turns == [
        ("model", "said [1, 2]", 2, 0.0),
        ("tool", "Picture", 3, 0.5),
        ("model", "said [3]", 1, 0.0),
    ]
    (image_name,) = first["turns"][1]["images"]
    image_file = recorder.record.folder / "_images" / image_name
    assert image_file.is_file()


def test_what_a_call_gains_is_counted_within_groups_that_have_both():
    """Three groups of two; in the first the rollout that called a tool is right, the other wrong.

    So calls gain 1 in `tool_gain`. The other two groups have no rollout with a call beside one
    without, with another reward.
    """
    rewards_PG = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    facts = rollout_facts(
        rewards_PG.view(-1, 1),
        tool_calls_N=torch.tensor([1.0, 0, 2, 1, 0, 0]),
        failed_calls_N=torch.tensor([0.0, 0, 1, 0, 0, 0]),
        tool_seconds_N=torch.tensor([0.5, 0, 0.5, 0, 0, 0]),
        unanswered_N=torch.tensor([False, False, False, True, False, False]),
    )
    metrics = tool_metrics(rewards_PG, facts)
    assert metrics["adora/tool_gain"] == 1
    assert metrics["adora/called"] == 3 / 6  # rollouts with a call
    assert metrics["adora/tools_s"] == 0.5 + 0.5
    assert metrics["tools/failure_frequency"] == 1 / 4  # of the calls
    assert metrics["tools/call_frequency"] == pytest.approx(4 / 6)
    assert "adora/tool_gain" not in tool_metrics(rewards_PG[1:], facts.select(range(2, 6)))


def test_a_problem_is_recorded_with_its_choices(tmp_path):
    """Rows without choices, and with an empty list of them, have null."""
    recorder = Recorder(step_context(output_dir=str(tmp_path)))
    recorder.record.start(0)
    problem = {
        "id": 7,
        "problem": "Which?",
        "answer": "B",
        "choices": ["3", "4"],
        "prompt": "Which?\nChoices: ...",
    }
    no_choices = {**problem, "choices": None}
    empty_choices = {**problem, "choices": []}
    built, scored = scored_rollouts([problem, problem, no_choices, empty_choices], ranks=1)
    table = {"completion": ["so B"] * 4, "extra": {}}

    recorder.add(0, built, scored, table, ["accuracy"])
    recorder.record.flush(1)

    records = read_record(recorder.record.folder).to_pylist()
    recorded_choices = [row["choices"] for row in records]
    assert recorded_choices == [["3", "4"], ["3", "4"], None, None]
    for row in records:
        assert row["id"] == "7"
        assert row["problem"] == "Which?"
        assert row["answer"] == "B"
        assert row["images"] == []


def test_drift_that_the_policys_pass_finds_stands_beside_its_own_rollout(tmp_path, monkeypatch):
    """A rank may measure the drift of a rollout that another rank has sampled and recorded.

    With two ranks the rollouts of this rank have the numbers 0 and 2, those of the other one 1 and
    3. The other rank measures its own two and number 0.
    """
    # What the other rank sends at each call of `gather_object`: first the values of its rollouts,
    # which are the same as this rank's (None), and at the end of the step the drift that it
    # measured.
    drift_by_number = {1: 10.5, 3: 10.25, 0: 0.75}
    sent_by_other_rank = iter([None, [drift_by_number]])

    def gather_object(local: list[Any]) -> list[Any]:
        sent = next(sent_by_other_rank)
        return [*local, *(local if sent is None else sent)]

    monkeypatch.setattr(recorder_module, "gather_object", gather_object)
    ranks = FakeAccelerator(num_processes=2, gather=lambda local: torch.cat([local, local + 10]))
    recorder = Recorder(step_context(output_dir=str(tmp_path), accelerator=ranks))
    recorder.record.start(0)
    numbers = recorder.number_next_rollouts(2)
    drawn_rows = [{"id": "a", "problem": "Which?", "prompt": "Which?"}] * 2
    built, scored = scored_rollouts(drawn_rows, ranks=2)
    table = {"completion": ["so B"] * 4, "extra": {}}
    recorder.add(0, built, scored, table, ["accuracy"])
    # the second rollout of this rank, with a difference of 0.25 in its only token
    micro_batch: Any = {
        "rollout_number": numbers[1:],
        "completion_mask": torch.ones(1, 1),
        "sampling_per_token_logps": torch.zeros(1, 1),
    }
    policy_logps_BC = torch.tensor([[0.25]])
    recorder.add_measured_drift(micro_batch, policy_logps_BC)
    recorder.on_step_end(None, trainer_state(1), None)
    record = read_record(recorder.record.folder)
    assert record["drift"].to_pylist() == [0.75, 0.25, 10.5, 10.25]


def test_a_diagram_is_stored_once_and_small(tmp_path):
    """A picture is stored with at most 512 pixels a side, under a name made from its content."""
    wide = Image.effect_noise((1000, 100), 50).convert("RGB")
    folder = tmp_path / "images"
    diagrams = DiagramStore(folder, limit_bytes=1e9)

    names = diagrams.store("a", [wide])
    names_of_copy = diagrams.store("b", [wide.copy()])
    names_of_known_row = diagrams.store("a", [])
    names_of_turned = diagrams.store(None, [wide.rotate(90)])

    assert names_of_copy == names
    assert names_of_known_row == names
    assert names_of_turned != names
    assert diagrams.store("c", []) == []  # a row that nobody knows, without a picture
    with Image.open(folder / names[0]) as stored:
        assert stored.size == (512, 51)

    # a folder that is full gets no more
    full = DiagramStore(folder, limit_bytes=1)
    (name,) = full.store("d", [Image.new("RGB", (9, 9))])
    unwritten = folder / name
    assert not unwritten.exists()


def test_a_diagram_is_named_while_another_rank_finishes_its_own_file(tmp_path):
    """The other rank's hidden file may be renamed after the folder was listed.

    A link that leads nowhere stands for it: it is listed, but has no size.
    """
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / ".written-by-another-rank").symlink_to(tmp_path / "gone")
    diagrams = DiagramStore(folder, limit_bytes=1e9)
    (name,) = diagrams.store("a", [Image.new("RGB", (9, 9))])
    assert (folder / name).is_file()


def test_a_real_run_records_what_its_metrics_say(adora_run):
    """A step has 4 groups of 4 rollouts, whose means are the metrics of its line."""
    table = read_record(adora_run / "rollouts").to_pandas()
    line_by_step: dict[int, MetricsLine] = {}
    for line in read_metrics(adora_run / "metrics.jsonl"):
        if line["kind"] == "train":
            line_by_step[line["step"]] = line
    all_steps = list(range(1, TINY_RUN_STEPS + 1))
    assert table["step"].is_monotonic_increasing
    assert table["step"].unique().tolist() == all_steps
    assert sorted(line_by_step) == all_steps
    for step, rollouts_of_step in table.groupby("step"):
        assert len(rollouts_of_step) == 4 * 4
        check_step(rollouts_of_step, line_by_step[step])
    assert (table["reward/boxed_accuracy_reward"] == table["reward"]).all()
    images_folder = adora_run / "rollouts" / "_images"
    for image_names in table["images"]:
        (image_name,) = image_names
        assert (images_folder / image_name).is_file()


def test_metrics_of_a_refilled_step_are_over_all_its_rollouts(tmp_path):
    """Metrics of a step whose groups were refilled are means over all its rollouts.

    Means of the batches' means would differ, as the further batches have fewer groups.
    """
    run = train_tiny_run(tmp_path / "run", adora_rollouts="{refill: 2}", max_steps=3, save_steps=3)
    table = read_record(run / "rollouts").to_pandas()
    batches_by_groups: dict[int, float] = {}
    for line in read_metrics(run / "metrics.jsonl"):
        if line["kind"] != "train":
            continue
        rollouts_of_step = table.groupby("step").get_group(line["step"])
        rewards = rollouts_of_step["reward"]
        assert line["reward"] == pytest.approx(rewards.mean(), abs=1e-6)
        assert line["reward_std"] == pytest.approx(rewards.std(), abs=1e-6)
        is_correct = rollouts_of_step["verdict"] == "correct"
        assert line["grading/correct"] == pytest.approx(is_correct.mean())
        assert line["completions/max_length"] == rollouts_of_step["length"].max()
        group_count = rollouts_of_step["group"].nunique()
        batches_by_groups[group_count] = line["adora/further_batches"]
    first_batch_alone = batches_by_groups.pop(4, 0)
    assert first_batch_alone == 0
    assert batches_by_groups, "no step was refilled"
    assert min(batches_by_groups.values()) > 0


def check_step(rollouts_of_step: pd.DataFrame, line: MetricsLine) -> None:
    """Compare the rollouts of one step with its line in the metrics."""
    groups = rollouts_of_step.groupby("group")
    assert len(groups) == 4
    assert groups["id"].nunique().eq(1).all()
    assert groups["weight"].nunique().eq(1).all()
    is_correct = rollouts_of_step["verdict"] == "correct"
    # float32: a mean of 16 numbers up to 1 is off by 16 x 6e-8 at most, in any order
    bound = 1e-6
    reward = rollouts_of_step["reward"].mean()
    pass_rate = groups["pass_rate"].first().mean()
    assert reward == pytest.approx(line["reward"], abs=bound)
    assert pass_rate == pytest.approx(line["adora/pass_rate"], abs=bound)
    tds_share = groups["tds"].first().mean()
    mean_weight = groups["weight"].first().mean()
    mean_length = rollouts_of_step["length"].mean()
    assert tds_share == pytest.approx(line["adora/tds_share"])
    assert mean_weight == pytest.approx(line["adora/weight_mean"])
    assert mean_length == pytest.approx(line["completions/mean_length"])
    assert is_correct.mean() == pytest.approx(line["grading/correct"])
    for phase in ("rollout", "grading", "policy", "sync", "other"):
        assert f"seconds/{phase}" in line
    assert line["seconds/rollout"] > 0
    assert line["seconds/policy"] > 0


def metrics_of_steps(run: Path) -> list[tuple[Any, ...]]:
    """The step, kind, loss and reward of each line that a run has logged, without the times."""
    return [
        (line["step"], line["kind"], line.get("loss"), line.get("reward"))
        for line in read_metrics(run / METRICS_FILE)
    ]


@pytest.mark.slow
@pytest.mark.core
def test_a_run_that_went_on_has_every_step_once(adora_run, resumed_run, tmp_path):
    """A resumed run has the rollouts and figures of an uninterrupted one, each step once.

    Two further steps are recorded too; with `adora_record_gb: 0` the last two are not.
    """
    uninterrupted = read_record(adora_run / "rollouts").to_pandas()
    resumed = read_record(resumed_run.folder / "rollouts").to_pandas()
    pd.testing.assert_frame_equal(resumed, uninterrupted)
    # as a stranger reads it
    by_pandas = pd.read_parquet(resumed_run.folder / "rollouts")
    pd.testing.assert_frame_equal(by_pandas, uninterrupted)
    assert metrics_of_steps(resumed_run.folder) == metrics_of_steps(adora_run)
    longer = shutil.copytree(resumed_run.folder, tmp_path / "out")
    train_tiny_run(longer, max_steps=TINY_RUN_STEPS + 2, adora_record_gb=1)
    steps_with_record = sorted(set(recorded_steps(longer / "rollouts")))
    assert steps_with_record == [1, 2, 3, 4, 5, 6]
    train_tiny_run(longer, max_steps=TINY_RUN_STEPS + 4, adora_record_gb=0)
    steps_after_run_without = sorted(set(recorded_steps(longer / "rollouts")))
    assert steps_after_run_without == steps_with_record, "0 records nothing"
