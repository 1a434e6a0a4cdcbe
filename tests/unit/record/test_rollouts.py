"""The record of the rollouts: right, whole after a crash, nothing twice after a resume, and
bounded.
"""

import shutil
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
from adora_vl.record import recorder as recorder_module
from adora_vl.record import rollouts
from adora_vl.record.metrics import METRICS, read_metrics
from adora_vl.record.recorder import Recorder
from adora_vl.record.rollout_figures import tool_figures
from adora_vl.rewards.completion import completion_text
from adora_vl.rollout.importance import rollout_drift
from adora_vl.rollout.rollouts import Call, FinishReason, Picture, Rollout, Segment
from adora_vl.training.advantages import JudgedGroups
from adora_vl.training.rollout_facts import weighted_sum
from tests.support.facts import counted_facts, rollout_facts
from tests.support.stand_ins import Processes, state_of
from tests.support.step_context import step_context
from tests.support.tiny_run import STEPS, train

NAN = float("nan")


def rows(step: int, count: int = 4, **changed: Any) -> dict[str, list[Any]]:
    columns = {
        "step": [step] * count,
        "id": [f"p{step}"] * count,
        "completion": [f"answer {i}" for i in range(count)],
    }
    return {**columns, **changed}


def recorded(folder: Path) -> pa.Table:
    return rollouts.read_parts(rollouts.parts(folder))


def steps(folder: Path) -> list[int]:
    return recorded(folder)["step"].to_pylist()


def test_the_criteria_of_groups_by_hand():
    rewards = torch.tensor([[1.0, 0.1, 0.0], [0.0, NAN, 0.0], [1.0, 1.0, 0.1]])
    lengths = torch.tensor([[9.0, 5.0, 8.0], [1.0, 2.0, 3.0], [4.0, 6.0, 50.0]])
    columns = rollouts.criteria_columns(Groups(rewards, lengths, lengths >= 50))
    assert columns["pass_rate"][::3] == pytest.approx([1 / 3, 0, 2 / 3])
    assert columns["longest_right"][::3] == pytest.approx([9, NAN, 6], nan_ok=True)
    assert columns["mean_wrong"][::3] == pytest.approx([6.5, 2, NAN], nan_ok=True)
    assert [len(column) for column in columns.values()] == [9, 9, 9]


def test_a_reward_is_the_weighted_sum_of_the_parts_that_are_there():
    parts_BF = torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN]])
    weights_F = torch.tensor([1.0, 0.5])
    rewards = weighted_sum(parts_BF, weights_F).tolist()
    assert rewards == pytest.approx([2, 1, NAN], nan_ok=True)


def test_the_drift_of_a_rollout_is_its_largest_gap_where_both_sides_have_a_figure():
    trainer = torch.tensor([[1.0, 2.0, 9.0], [1.0, 1.0, 1.0]])
    engine = torch.tensor([[1.5, NAN, 0.0], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    drifts = rollout_drift(trainer, engine, mask).tolist()
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
    columns = rows(
        1,
        2,
        drift=[NAN, 0.5],
        extracted=[None, "7"],
        tds=[],
    )
    columns["reward/x"] = [1.0, None]
    table = rollouts.as_table(columns, {"k": 1})
    assert table["drift"].to_pylist() == [None, 0.5]
    assert table["reward/x"].to_pylist() == [1.0, None]
    assert table["tds"].to_pylist() == [None, None]
    assert b"adora_vl" in table.schema.metadata


def test_generations_of_one_step_are_numbered_through(tmp_path):
    record = rollouts.Record(tmp_path, 1, {})
    record.start(0)
    record.add(rows(1), generations=2)
    record.add(rows(1), generations=2)
    record.flush(1)
    table = recorded(record.folder)
    assert table["group"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert table["rollout"].to_pylist() == [0, 1] * 4
    record.flush(2)  # a step whose rollouts are those of the one before
    assert len(rollouts.parts(record.folder)) == 1


def test_many_small_files_become_one_and_nothing_is_lost_or_twice(tmp_path):
    record = rollouts.Record(tmp_path, 1, {})
    record.start(0)
    for step in range(1, 101):
        record.add(rows(step), generations=4)
        record.flush(step)
    assert len(rollouts.parts(record.folder)) < 40
    assert steps(record.folder) == [step for step in range(1, 101) for _ in range(4)]


def crash(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_crash_between_a_merge_and_its_deletions_leaves_nothing_twice(tmp_path, monkeypatch):
    for step in range(1, 33):
        rollouts.write_part(tmp_path, rollouts.as_table(rows(step), {}), step, step)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", crash)
        rollouts.merge_small(tmp_path)
    assert len(list(tmp_path.glob("*.parquet"))) == 33
    assert steps(tmp_path) == [step for step in range(1, 33) for _ in range(4)]
    rollouts.cut_after(tmp_path, 32)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_crash_while_writing_leaves_only_whole_files(tmp_path, monkeypatch):
    rollouts.write_part(tmp_path, rollouts.as_table(rows(1), {}), 1, 1)

    def dies(table, stream, **_):
        stream.write(b"PAR1 half a file")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pq, "write_table", dies)
        rollouts.write_part(tmp_path, rollouts.as_table(rows(2), {}), 2, 2)
    assert steps(tmp_path) == [1] * 4
    rollouts.cut_after(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts-00000001-00000001.parquet"]


def test_a_resume_cuts_at_its_step_also_inside_a_merged_file(tmp_path):
    for step in (3, 20, 32, 40):
        folder = tmp_path / str(step)
        folder.mkdir()
        for number in range(1, 41):
            rollouts.write_part(
                folder, rollouts.as_table(rows(number), {"kept": 1}), number, number
            )
            rollouts.merge_small(folder)
        rollouts.cut_after(folder, step)
        assert steps(folder) == [number for number in range(1, step + 1) for _ in range(4)]
        assert rollouts.parts(folder)[-1].last == step
        assert b"adora_vl" in recorded(folder).schema.metadata
        (folder / "notes.txt").write_text("somebody else's")
        rollouts.cut_after(folder, 0)
        assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_the_oldest_go_when_the_bound_is_reached(tmp_path):
    for number in range(1, 11):
        rollouts.write_part(tmp_path, rollouts.as_table(rows(number), {}), number, number)
    size = rollouts.parts(tmp_path)[0].path.stat().st_size
    rollouts.rotate(tmp_path, 3.5 * size)
    assert sorted(set(steps(tmp_path))) == [8, 9, 10]
    rollouts.rotate(tmp_path, 1)
    assert sorted(set(steps(tmp_path))) == [10]


def test_rollouts_and_diagrams_have_half_of_the_room_each(tmp_path):
    (tmp_path / "one").mkdir()
    part = rollouts.write_part(tmp_path / "one", rollouts.as_table(rows(1), {}), 1, 1)
    size = part.path.stat().st_size
    record = rollouts.Record(tmp_path, 7 * size / 1e9, {})
    record.start(0)
    for step in range(1, 10):
        record.add(rows(step), generations=4)
        record.flush(step)
    assert sorted(set(steps(record.folder))) == [7, 8, 9]
    assert record.diagrams.limit_bytes == pytest.approx(3.5 * size)


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path, monkeypatch, capsys):
    record = rollouts.Record(tmp_path, 1, {})
    record.start(0)
    record.add(rows(1), generations=4)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    record.flush(1)
    assert record.failed
    assert "step 1: the rollouts are no longer recorded" in capsys.readouterr().err


def scored_rollouts(
    rows: list[Any], ranks: int, rollouts: list[Rollout] | None = None
) -> tuple[Any, Any]:
    """Built and scored groups of two; every rank has these rows."""
    count = ranks * len(rows)
    rewards_NF = torch.ones(count, 1)
    lengths_N = torch.full((count,), 3.0)
    groups = Groups(rewards_NF.view(-1, 2), lengths_N.view(-1, 2), lengths_N.view(-1, 2) > 9)
    judged = JudgedGroups(
        groups=groups,
        weighting=weigh_groups(groups),
        raw_PG=groups.rewards_PG,
        signal_P=torch.ones(len(groups.rewards_PG), dtype=torch.bool),
        equal_reward_share=0.0,
        ranks=ranks,
    )
    facts = counted_facts(rewards_NF, 2, length_N=lengths_N)
    built = SimpleNamespace(rows=rows, rollouts=rollouts or [])
    return built, SimpleNamespace(batch={}, facts=facts, judged=judged)


def test_a_rollout_with_tools_is_recorded_as_a_conversation(tmp_path):
    recorder = Recorder(
        step_context(output_dir=str(tmp_path)), decode=lambda tokens: f"said {[*tokens]}"
    )
    recorder.record.start(0)
    image = Image.new("RGB", (8, 8))
    call = Call(
        name="zoom",
        arguments="{}",
        text="Picture",
        seconds=0.5,
        failed=False,
        span=1,
    )
    spans = (
        Segment(tokens=(1, 2), logps=(0.0, 0.0), step=0),
        Segment(tokens=(5, 6, 7), logps=None, step=0),
        Segment(tokens=(3,), logps=(0.0,), step=0),
    )
    looked = Rollout(
        segments=spans,
        finish_reason=FinishReason.STOP,
        pictures=(Picture(digest="x", image=image, span=1),),
        calls=(call,),
    )
    rollouts = [looked, Rollout(segments=spans[:1], finish_reason=FinishReason.STOP)]
    built, scored = scored_rollouts(
        [{"id": 7, "problem": "?", "prompt": "?"}] * 2, 1, rollouts=rollouts
    )
    recorder.add(0, built, scored, {"completion": ["so 3"] * 2, "extra": {}}, ["accuracy"])
    recorder.record.flush(1)
    first, second = recorded(recorder.record.folder).to_pylist()
    assert first["calls"] == 1
    assert second["calls"] == 0
    assert len(second["turns"]) == 1
    turns = [(turn["by"], turn["text"], turn["tokens"], turn["seconds"]) for turn in first["turns"]]
    assert turns == [
        ("model", "said [1, 2]", 2, 0.0),
        ("tool", "Picture", 3, 0.5),
        ("model", "said [3]", 1, 0.0),
    ]
    assert (recorder.record.folder / "_images" / first["turns"][1]["images"][0]).is_file()


def test_what_a_call_gains_is_counted_within_groups_that_have_both():
    rewards_PG = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    facts = rollout_facts(
        rewards_PG.view(-1, 1),
        calls_N=torch.tensor([1.0, 0, 2, 1, 0, 0]),
        failed_calls_N=torch.tensor([0.0, 0, 1, 0, 0, 0]),
        tool_seconds_N=torch.tensor([0.5, 0, 0.5, 0, 0, 0]),
        unanswered_N=torch.tensor([False, False, False, True, False, False]),
    )
    figures = tool_figures(rewards_PG, facts)
    assert figures["adora/tool_gain"] == 1
    assert figures["adora/called"] == 0.5
    assert figures["adora/tools_s"] == 1
    assert figures["tools/failure_frequency"] == 0.25
    assert figures["tools/call_frequency"] == pytest.approx(4 / 6)
    assert "adora/tool_gain" not in tool_figures(rewards_PG[1:], facts.selected(range(2, 6)))


def test_a_problem_is_recorded_with_its_choices(tmp_path):
    recorder = Recorder(step_context(output_dir=str(tmp_path)))
    recorder.record.start(0)
    problem = {
        "id": 7,
        "problem": "Which?",
        "answer": "B",
        "choices": ["3", "4"],
        "prompt": "Which?\nChoices: ...",
    }
    changes: list[dict[str, Any]] = [{}, {}, {"choices": None}, {"choices": []}]
    rows = [{**problem, **changed} for changed in changes]
    built, scored = scored_rollouts(rows, 1)
    recorder.add(0, built, scored, {"completion": ["so B"] * 4, "extra": {}}, ["accuracy"])
    recorder.record.flush(1)
    records = recorded(recorder.record.folder).to_pylist()
    assert [row["choices"] for row in records] == [["3", "4"], ["3", "4"], None, None]
    for row in records:
        assert row["id"] == "7"
        assert row["problem"] == "Which?"
        assert row["answer"] == "B"
        assert row["images"] == []


def test_drift_that_the_policys_pass_finds_stands_beside_its_own_rollout(tmp_path, monkeypatch):
    """Two ranks record their rollouts one after the other.

    The other rank measures one of this rank's too.
    """
    # The first call gathers the rows, which are alike on both ranks; the second one the drifts.
    from_other_rank = iter([[], [{1: 10.5, 3: 10.25, 0: 0.75}]])

    def gather_object(local: list[Any]) -> list[Any]:
        return [*local, *(next(from_other_rank) or local)]

    monkeypatch.setattr(recorder_module, "gather_object", gather_object)
    ranks = Processes(num_processes=2, gather=lambda local: torch.cat([local, local + 10]))
    recorder = Recorder(step_context(output_dir=str(tmp_path), accelerator=ranks))
    recorder.record.start(0)
    numbers = recorder.number(2)
    drawn_rows = [{"id": "a", "problem": "Which?", "prompt": "Which?"}] * 2
    built, scored = scored_rollouts(drawn_rows, 2)
    recorder.add(0, built, scored, {"completion": ["so B"] * 4, "extra": {}}, ["accuracy"])
    learned: Any = {"rollout_number": numbers[1:], "completion_mask": torch.ones(1, 1)}
    learned["sampling_per_token_logps"] = torch.zeros(1, 1)
    recorder.measured(learned, torch.tensor([[0.25]]))
    recorder.on_step_end(None, state_of(1), None)
    assert recorded(recorder.record.folder)["drift"].to_pylist() == [0.75, 0.25, 10.5, 10.25]


def test_a_diagram_is_stored_once_and_small(tmp_path):
    wide = Image.effect_noise((1000, 100), 50).convert("RGB")
    diagrams = rollouts.Diagrams(tmp_path / "images", 1e9)
    names = diagrams.keep("a", [wide])
    assert diagrams.keep("b", [wide.copy()]) == names == diagrams.keep("a", [])
    assert diagrams.keep("c", []) == []
    assert diagrams.keep(None, [wide.rotate(90)]) != names
    with Image.open(tmp_path / "images" / names[0]) as stored:
        assert stored.size == (512, 51)
    full = rollouts.Diagrams(tmp_path / "images", 1)
    (name,) = full.keep("d", [Image.new("RGB", (9, 9))])
    assert not (tmp_path / "images" / name).exists()


def test_a_real_run_records_what_its_metrics_say(adora_run):
    table = recorded(adora_run / "rollouts").to_pandas()
    assert table["step"].tolist() == [step for step in range(1, STEPS + 1) for _ in range(16)]
    metrics = {
        line["step"]: line
        for line in read_metrics(adora_run / "metrics.jsonl")
        if line["kind"] == "train"
    }
    assert sorted(metrics) == list(range(1, STEPS + 1))
    for step, of_step in table.groupby("step"):
        groups = of_step.groupby("group")
        assert len(groups) == 4
        assert groups["id"].nunique().eq(1).all()
        assert (groups["weight"].nunique() == 1).all()
        # float32: a mean of 16 numbers up to 1 is off by 16 x 6e-8 at most, in any order
        line = metrics[step]
        assert of_step["reward"].mean() == pytest.approx(line["reward"], abs=1e-6)
        assert groups["pass_rate"].first().mean() == pytest.approx(
            line["adora/pass_rate"], abs=1e-6
        )
        assert groups["tds"].first().mean() == pytest.approx(line["adora/tds_share"])
        assert groups["weight"].first().mean() == pytest.approx(line["adora/weight_mean"])
        assert of_step["length"].mean() == pytest.approx(line["completions/mean_length"])
        assert (of_step["verdict"] == "correct").mean() == pytest.approx(line["grading/correct"])
        assert {
            f"seconds/{phase}" for phase in ("rollout", "grading", "policy", "sync", "other")
        } <= line.keys()
        assert line["seconds/rollout"] > 0
        assert line["seconds/policy"] > 0
    uneven = table.groupby(["step", "group"])["reward"].transform("nunique") > 1
    assert uneven.any()
    # one float32 product of a number below 4: 2.4e-7 at most
    weighted = table["advantage_raw"] * table["weight"]
    assert table.loc[uneven, "advantage"].tolist() == pytest.approx(
        weighted[uneven].tolist(), abs=1e-6
    )
    assert (table.loc[~uneven, "advantage"] == 0).all()
    assert (table["reward/adora_reward"] == table["reward"]).all()
    for names in table["images"]:
        assert len(names) == 1
        assert (adora_run / "rollouts" / "_images" / names[0]).is_file()


def figures_of_steps(run: Path) -> list[tuple[Any, ...]]:
    """Read what a run has logged of each step, without the times."""
    return [
        (line["step"], line["kind"], line.get("loss"), line.get("reward"))
        for line in read_metrics(run / METRICS)
    ]


@pytest.mark.slow
@pytest.mark.core
def test_a_run_that_went_on_has_every_step_once(adora_run, resumed_run, tmp_path):
    """Figures and rollouts of each step are the same; then every second generation is recorded."""
    uninterrupted = recorded(adora_run / "rollouts").to_pandas()
    again = recorded(resumed_run.folder / "rollouts").to_pandas()
    pd.testing.assert_frame_equal(again, uninterrupted)
    # as a stranger reads it
    pd.testing.assert_frame_equal(pd.read_parquet(resumed_run.folder / "rollouts"), uninterrupted)
    assert figures_of_steps(resumed_run.folder) == figures_of_steps(adora_run)
    longer = shutil.copytree(resumed_run.folder, tmp_path / "out")
    train(longer, max_steps=STEPS + 2, adora_record_gb=1)
    assert sorted(set(steps(longer / "rollouts"))) == [1, 2, 3, 4, 5, 6]
    train(longer, max_steps=STEPS + 4, adora_record_gb=0)
    assert sorted(set(steps(longer / "rollouts"))) == [1, 2, 3, 4, 5, 6], "0 records nothing"
