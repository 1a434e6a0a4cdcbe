"""What a page says of a run in sentences, and how it reads the calls of a conversation."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adora_vl.record.rollouts import Diagrams, Record, parts, picture_size
from adora_vl.report.conversation import TurnReader, spelled_call
from adora_vl.report.run_view import load_run
from adora_vl.report.story import story_of
from tests.support.recorded_runs import SETTINGS, VIEW, looked_turns, write_run


def story_from(folder: Path, steps: list[list[dict[str, Any]]]) -> list[str]:
    """The story of a run with these groups of two rollouts in each step."""
    record = Record(folder, 1, SETTINGS)
    record.start(0)
    for step, groups in enumerate(steps, 1):
        rows: dict[str, list[Any]] = {}
        for group in groups:
            for position in range(2):
                row: dict[str, Any] = {"step": step, "tds": False, "weight": 1.0, "id": "p"}
                row |= {name: values[position] for name, values in group.items()}
                row["advantage"] = row["advantage_raw"] * row["weight"]
                for name, value in row.items():
                    rows.setdefault(name, []).append(value)
        record.add(rows, 2)
        record.flush(step)
    return story_of(parts(record.folder))


def pair(
    *, rewards: tuple[float, float], weight: float = 1.0, lengths: tuple[int, int] = (10, 10)
) -> dict[str, Any]:
    """A group of a right rollout and a wrong one."""
    middle = sum(rewards) / 2
    return {
        "verdict": ("correct", "wrong"),
        "reward": rewards,
        "weight": (weight, weight),
        "tds": (weight < 1, weight < 1),
        "advantage_raw": [reward - middle for reward in rewards],
        "length": lengths,
    }


def test_signal_and_weights_are_those_of_the_groups_whose_rewards_differ(tmp_path: Path) -> None:
    equal = pair(rewards=(1.0, 1.0), weight=0.1)
    full = pair(rewards=(1.0, 0.0))
    tenth = pair(rewards=(1.0, 0.0), weight=0.1)
    signal, weights = story_from(tmp_path, [[equal, full, full, tenth]])
    assert signal.startswith("Signal: 3 of 4 recorded groups (75 %) ")
    # 1 of 3 in |advantage|; then 0.1 of 2.1
    assert weights == (
        "Weights: 1 of these groups (33 %) were attenuated. They held 33 % of all |advantage| "
        "before the weights and 5 % after."
    )


def test_a_run_without_signal_or_weights_says_so(tmp_path: Path) -> None:
    [signal] = story_from(tmp_path / "none", [[pair(rewards=(1.0, 1.0))]])
    assert signal.startswith("Signal: none of 1 recorded group has rewards that differ")
    [_, weights] = story_from(tmp_path / "plain", [[pair(rewards=(1.0, 0.0))]])
    assert weights == "Weights: all are 1. ADORA's criteria would mark 0 of these groups (0 %)."
    assert story_of([]) == []
    [_, weights] = story_from(
        tmp_path / "both",
        [[pair(rewards=(1.0, 0.0), weight=2.0), pair(rewards=(1.0, 0.0), weight=0.5)]],
    )
    assert "1 of these groups (50 %) were attenuated" in weights
    assert "1 of these groups (50 %) were amplified" in weights


def test_a_length_changes_only_where_the_groups_agree(tmp_path: Path) -> None:
    early = [
        pair(rewards=(1.0, 0.0), lengths=(10, 10)),
        pair(rewards=(1.0, 0.0), lengths=(12, 90)),
    ]
    late = [
        pair(rewards=(1.0, 0.0), lengths=(40, 20)),
        pair(rewards=(1.0, 0.0), lengths=(42, 95)),
    ]
    *_, lengths = story_from(tmp_path, [early, late])
    assert lengths == (
        "Length: from the first to the last fifth of the steps, right answers became longer "
        "(11 → 41 tokens) and wrong ones kept their length (50 → 58 tokens, within noise)."
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
    assert spelled_call(name, arguments) == expected


def test_where_a_call_looks_is_in_shares_of_the_picture_as_it_was(tmp_path: Path) -> None:
    """Also of a picture that was stored smaller, and of the pictures that tools have shown."""
    diagrams = Diagrams(tmp_path / "rollouts" / "_images", 1e9)
    [large] = diagrams.keep("p", [Image.new("RGB", (2000, 1000))])
    assert picture_size(diagrams.folder / large) == (2000, 1000)
    assert Image.open(diagrams.folder / large).size == (512, 256)
    view = {"low": 400, "high": 10_000_000, "unit": 20, "relative": False}
    turn_reader = TurnReader(tmp_path, {"view": view})
    call = '<tool_call>{{"name": "zoom", "arguments": {}}}</tool_call>'
    turn = {"images": [], "seconds": 0.0, "failed": False, "tokens": 1, "by": "model"}
    texts = [
        call.format('{"x1": 500, "y1": 250, "x2": 1000, "y2": 1000}'),
        call.format('{"x1": 0, "y1": 0, "x2": 5000, "y2": 5000}'),
        call.format('{"x1": 0, "y1": 0, "x2": 1, "y2": 1, "picture": 7}'),
        "<tool_call>{broken</tool_call>",
    ]
    row = {"images": [large], "turns": [{**turn, "text": text} for text in texts]}
    turns = turn_reader.turns(row)
    assert turns is not None
    calls = [call for turn in turns for call in turn["calls"]]
    assert calls[0]["points"] == [(0.25, 0.25), (0.5, 1.0)]
    assert calls[0]["picture"] == large
    assert [call["points"] for call in calls[1:]] == [None, None, None]
    assert calls[-1]["text"] == "{broken"
    relative = TurnReader(tmp_path, {"view": {**view, "relative": True}}).turns(row)
    assert relative is not None
    assert relative[0]["calls"][0]["points"] == [(0.5, 0.25), (1.0, 1.0)]
    unplaced = TurnReader(tmp_path, {}).turns(row)
    assert unplaced is not None
    assert unplaced[0]["calls"][0]["points"] is None
    assert turn_reader.turns({"turns": None}) is None


def test_a_page_has_no_placehunplaced_and_no_raw_call(tmp_path: Path) -> None:
    settings = {**SETTINGS, "view": VIEW}
    run = write_run(
        tmp_path / "run", 1, settings=settings, turns=looked_turns(), problem="<image>\nFind x."
    )
    view = load_run(run, 100)
    assert {problem["problem"] for problem in view.problems.values()} == {"Find x."}
    assert "tool_call" not in str(view.groups)
    assert "<image>" not in str(view.groups)
    assert len(view.story) == 2, "one step has no change in length"
