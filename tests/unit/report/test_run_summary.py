"""What a page says of a run in sentences, and how it reads the calls of a conversation."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adora_vl.record.diagrams import DiagramStore, read_original_size
from adora_vl.record.record_files import list_record_files
from adora_vl.record.rollouts import RolloutStore
from adora_vl.report.conversation import TurnReader, format_call
from adora_vl.report.run_summary import summarise_run
from adora_vl.report.run_view import load_run
from tests.support.recorded_runs import (
    ADORA_SETTINGS,
    VIEW_LIMITS,
    turns_with_one_zoom,
    write_recorded_run,
)


def summary_from(folder: Path, steps: list[list[dict[str, Any]]]) -> list[str]:
    """Return the story of a run, whose record is written into `folder`.

    `steps`: for each step its groups of two rollouts, as `rollout_pair` returns them.
    """
    record = RolloutStore(folder, limit_gb=1, settings=ADORA_SETTINGS)
    record.start(0)
    for step, groups in enumerate(steps, 1):
        columns: dict[str, list[Any]] = {}
        for group in groups:
            for position in range(2):
                rollout = rollout_row(group, position, step)
                for name, value in rollout.items():
                    columns.setdefault(name, []).append(value)
        record.add(columns, 2)
        record.flush(step)
    return summarise_run(list_record_files(record.folder))


def rollout_row(group: dict[str, Any], position: int, step: int) -> dict[str, Any]:
    """Return the recorded row of one of the two rollouts of a group (`rollout_pair`)."""
    row: dict[str, Any] = {
        "step": step,
        "tds": False,
        "weight": 1.0,
        "id": "p",
    }
    for name, values in group.items():
        row[name] = values[position]
    row.setdefault("advantage", row["advantage_raw"] * row["weight"])
    return row


def rollout_pair(
    *,
    rewards: tuple[float, float],
    weight: float = 1.0,
    lengths: tuple[int, int] = (10, 10),
) -> dict[str, Any]:
    """Return a group of a right rollout and a wrong one: two values for each column."""
    mean_reward = sum(rewards) / 2
    is_attenuated = weight < 1
    return {
        "verdict": ("correct", "wrong"),
        "reward": rewards,
        "weight": (weight, weight),
        "tds": (is_attenuated, is_attenuated),
        "advantage_raw": [reward - mean_reward for reward in rewards],
        "length": lengths,
    }


def test_signal_and_weights_are_those_of_the_groups_whose_rewards_differ(tmp_path: Path) -> None:
    """Three of four groups have a signal, and one of the three is weighted by 0.1."""
    no_signal = rollout_pair(rewards=(1.0, 1.0), weight=0.1)
    full_weight = rollout_pair(rewards=(1.0, 0.0))
    tenth_weight = rollout_pair(rewards=(1.0, 0.0), weight=0.1)
    step = [no_signal, full_weight, full_weight, tenth_weight]
    signal, weights = summary_from(tmp_path, [step])
    assert signal.startswith("Signal: 3 of 4 recorded groups (75 %) ")
    # The sums of |advantage| are 1, 1 and 1: 1 of 3. With the weights 1, 1 and 0.1: 0.1 of 2.1.
    assert weights == (
        "Weights: 1 of these groups (33 %) were attenuated. They held 33 % of all |advantage| "
        "before the weights and 5 % after."
    )


def test_a_group_that_the_loss_did_not_get_has_no_part_in_the_weights(tmp_path: Path) -> None:
    """`refill` samples more groups with signal than it needs, and records those too."""
    learned = rollout_pair(rewards=(1.0, 0.0))
    attenuated = rollout_pair(rewards=(1.0, 0.0), weight=0.5)
    not_needed = {**attenuated, "advantage": (0.0, 0.0)}
    signal, weights = summary_from(tmp_path, [[learned, attenuated, not_needed, not_needed]])
    assert signal == (
        "Signal: 4 of 4 recorded groups (100 %) have rewards that differ, and only these are "
        "learned from, but for 2 that were left out."
    )
    assert weights == (
        "Weights: 1 of these groups (50 %) were attenuated. They held 50 % of all |advantage| "
        "before the weights and 33 % after."
    )


def test_a_method_that_learns_from_equal_rewards_is_believed(tmp_path: Path) -> None:
    """A group with equal rewards but unequal advantages counts as learned from.

    DAPO's penalty for long answers gives such a group advantages, and so may a user's method.
    """
    equal = rollout_pair(rewards=(1.0, 1.0))
    penalized = {**equal, "advantage": (0.7, -0.7)}
    rounding_error = {**equal, "advantage": (5e-4, 5e-4)}
    signal, _ = summary_from(tmp_path, [[penalized, rounding_error, equal]])
    assert signal == (
        "Signal: 0 of 3 recorded groups (0 %) have rewards that differ. The run's method learned "
        "from 1 of the others too."
    )


def test_a_run_without_signal_or_weights_says_so(tmp_path: Path) -> None:
    """Groups have signal if their rewards differ, and weights if a method of the run gives some."""
    no_signal = rollout_pair(rewards=(1.0, 1.0))
    [signal] = summary_from(tmp_path / "none", [[no_signal]])
    assert signal.startswith("Signal: none of 1 recorded group has rewards that differ")
    full_weight = rollout_pair(rewards=(1.0, 0.0))
    [_, weights] = summary_from(tmp_path / "plain", [[full_weight]])
    assert weights == "Weights: all are 1. ADORA's criteria would mark 0 of these groups (0 %)."
    assert summarise_run([]) == []
    amplified = rollout_pair(rewards=(1.0, 0.0), weight=2.0)
    attenuated = rollout_pair(rewards=(1.0, 0.0), weight=0.5)
    [_, weights] = summary_from(tmp_path / "both", [[amplified, attenuated]])
    assert "1 of these groups (50 %) were attenuated" in weights
    assert "1 of these groups (50 %) were amplified" in weights


def test_a_length_changes_only_where_the_groups_agree(tmp_path: Path) -> None:
    """Two steps of two groups: the lengths of a right and a wrong rollout, as in (10, 10).

    Right rollouts have 10 and 12 tokens, then 40 and 42. Wrong ones have 10 and 90, then 20 and 95,
    which may be chance.
    """
    early = [
        rollout_pair(rewards=(1.0, 0.0), lengths=(10, 10)),
        rollout_pair(rewards=(1.0, 0.0), lengths=(12, 90)),
    ]
    late_groups = [
        rollout_pair(rewards=(1.0, 0.0), lengths=(40, 20)),
        rollout_pair(rewards=(1.0, 0.0), lengths=(42, 95)),
    ]
    *_, lengths = summary_from(tmp_path, [early, late_groups])
    assert lengths == (
        "Length: from the first to the last fifth of the steps, right answers became longer "
        "(11 → 41 tokens) and wrong ones kept their length (50 → 58 tokens, within noise)."
    )


def test_lengths_that_are_equal_in_all_groups_have_no_interval(tmp_path: Path) -> None:
    """A change of length between groups that are all alike is told without an interval.

    Its interval would have the width 0.
    """
    early = [rollout_pair(rewards=(1.0, 0.0), lengths=(10, 64))] * 2
    late_groups = [rollout_pair(rewards=(1.0, 0.0), lengths=(12, 64))] * 2
    *_, lengths = summary_from(tmp_path, [early, late_groups])
    assert lengths == (
        "Length: from the first to the last fifth of the steps, right answers changed "
        "(10 → 12 tokens, without an interval, as the groups of a fifth are all alike) and wrong "
        "ones kept their length (64 → 64 tokens)."
    )


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("zoom", {"x1": 0, "y1": 49, "x2": 7, "y2": 56}, "zoom(0, 49, 7, 56)"),
        ("zoom", {"x1": 0, "y1": 1, "x2": 2, "y2": 3, "picture": 1}, "zoom(0, 1, 2, 3, 1)"),
        ("mark", {"label": "A", "x": 1.5}, 'mark(label="A", x=1.5)'),
        ("grid", {"lines": 3}, "grid(lines=3)"),
        ("calculate", {"expression": "2^3"}, 'calculate("2^3")'),
    ],
)
def test_a_call_is_spelled_as_a_person_would(
    name: str, arguments: dict[str, Any], expected: str
) -> None:
    """Arguments of our tools have no names where they stand in order; those of others have."""
    assert format_call(name, arguments) == expected


def test_where_a_call_looks_is_in_shares_of_the_picture_as_it_was(tmp_path: Path) -> None:
    """The points of a call are shares of the picture at the size that the model saw.

    The stored picture may be smaller: here 512 x 256, of 2000 x 1000.
    """
    diagrams = DiagramStore(tmp_path / "rollouts" / "_images", limit_bytes=1e9)
    picture = Image.new("RGB", (2000, 1000))
    [stored_name] = diagrams.store("p", [picture])
    stored_path = diagrams.folder / stored_name
    assert read_original_size(stored_path) == (2000, 1000)
    assert Image.open(stored_path).size == (512, 256)
    call_texts = [
        zoom_call('{"x1": 500, "y1": 250, "x2": 1000, "y2": 1000}'),
        zoom_call('{"x1": 0, "y1": 0, "x2": 5000, "y2": 5000}'),
        zoom_call('{"x1": 0, "y1": 0, "x2": 1, "y2": 1, "picture": 7}'),
        "<tool_call>{broken</tool_call>",
    ]
    row = {
        "images": [stored_name],
        "turns": [model_turn(text) for text in call_texts],
    }
    view = {"low": 400, "high": 10_000_000, "unit": 20, "relative": False}

    reader = TurnReader(tmp_path, {"view": view})
    calls = tool_calls(reader, row)
    assert calls[0]["points"] == [(0.25, 0.25), (0.5, 1.0)]
    assert calls[0]["picture"] == stored_name
    # Out of the picture, of a picture that is not there, and no JSON.
    assert [call["points"] for call in calls[1:]] == [None, None, None]
    assert calls[-1]["text"] == "{broken"
    assert reader.turns({"turns": None}) is None

    # Numbers of 0 to 1000, whatever the size.
    relative_view = {**view, "relative": True}
    relative_calls = tool_calls(TurnReader(tmp_path, {"view": relative_view}), row)
    assert relative_calls[0]["points"] == [(0.5, 0.25), (1.0, 1.0)]

    unplaced_calls = tool_calls(TurnReader(tmp_path, {}), row)
    assert unplaced_calls[0]["points"] is None


def zoom_call(arguments: str) -> str:
    """Return the text of a call of `zoom` with arguments in JSON."""
    return f'<tool_call>{{"name": "zoom", "arguments": {arguments}}}</tool_call>'


def model_turn(text: str) -> dict[str, Any]:
    """Return the record of a turn of the model."""
    return {
        "images": [],
        "seconds": 0.0,
        "failed": False,
        "tokens": 1,
        "by": "model",
        "text": text,
    }


def tool_calls(reader: TurnReader, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the calls in all turns of a rollout, in order."""
    turns = reader.turns(row)
    assert turns is not None
    return [call for turn in turns for call in turn["calls"]]


def test_a_page_has_no_placeholder_and_no_raw_call(tmp_path: Path) -> None:
    """A problem with an image and a zoom is shown without the placeholder and the call's text.

    Its summary has two lines, and none on a change in length, since the run has one step.
    """
    settings = {**ADORA_SETTINGS, "view": VIEW_LIMITS}
    run = write_recorded_run(
        tmp_path / "run",
        step_count=1,
        settings=settings,
        turns=turns_with_one_zoom(),
        problem="<image>\nFind x.",
    )
    view = load_run(run, 100)
    assert {problem["problem"] for problem in view.problems.values()} == {"Find x."}
    assert "tool_call" not in str(view.groups)
    assert "<image>" not in str(view.groups)
    assert len(view.summary) == 2
