"""Limits within which a tool can never answer are refused, and those with just enough room are not."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import adora_vl.builtin
from adora_vl.config.blocks import ToolOptions
from adora_vl.models.load import load_processor
from adora_vl.rollout.turns import ToolLoop
from adora_vl.tools.ours import OURS, View
from adora_vl.tools.room import Room, refuse_no_room
from adora_vl.tools.run import Toolbox, choose_tools
from adora_vl.utils.errors import UserError
from adora_vl.utils.own_files import OverdueError, backstop, deadline

VIEW = View(3136, 3136, 28)
ENOUGH = Room(
    "max_completion_length",
    1000,
    context=2000,
    prompt=100,
    pictures=1,
)


@pytest.fixture(scope="module")
def processor() -> Any:
    return load_processor(str(Path(adora_vl.builtin.__file__).parent / "pretrained_zoom"), None)


def toolbox(*tools: Any, **options: Any) -> Toolbox:
    return Toolbox(choose_tools(tools or [*OURS]), ToolOptions(**options), VIEW)


def room(**changed: Any) -> Room:
    return Room(**{**vars(ENOUGH), **changed})


def drawing() -> Image.Image:
    """Draw."""
    return Image.new("RGB", (56, 56))


@pytest.mark.parametrize(
    ("tools", "options", "changed", "line"),
    [
        ([drawing], {"images": 2}, {"pictures": 3}, "adora_tool_options.images: 2 leaves no"),
        (["zoom"], {}, {"completion": 10}, "max_completion_length: 10 leaves no room for an ans"),
        (["calculate"], {}, {"completion": 40}, "max_completion_length: 40 leaves no room"),
        (["calculate"], {}, {"key": "max_tokens", "completion": 9}, "max_tokens: 9 leaves no ro"),
        (["zoom"], {}, {"context": 150}, "vllm_max_model_length: 150 leaves no room for an answ"),
        (["zoom"], {"turn_tokens": 5}, {}, "adora_tool_options.turn_tokens: 5 is too short for"),
        (["measure"], {"max_text": 20}, {}, "adora_tool_options.max_text: 20 is less than any"),
    ],
)
def test_a_limit_within_which_a_tool_can_never_answer_is_refused(
    processor, tools, options, changed, line
):
    with pytest.raises(UserError) as refused:
        refuse_no_room(toolbox(*tools, **options), processor, {}, room(**changed))
    assert str(refused.value).startswith(line)


def test_limits_that_leave_room_are_taken(processor):
    refuse_no_room(toolbox(), processor, {}, ENOUGH)
    refuse_no_room(toolbox("calculate", images=1), processor, {}, ENOUGH)
    refuse_no_room(toolbox("zoom", images=1), processor, {}, room(pictures=None))
    refuse_no_room(toolbox("zoom", images=1), processor, {}, room(pictures=0))
    refuse_no_room(toolbox("zoom"), None, {}, room(completion=10))
    refuse_no_room(toolbox("measure", max_text=60), processor, {}, ENOUGH)


def test_the_smallest_limit_that_is_taken_holds_a_call_with_its_answer(processor):
    box = toolbox("calculate")
    with pytest.raises(UserError, match="set it to [0-9]+ or more") as refused:
        refuse_no_room(box, processor, {}, room(completion=1))
    smallest = int(str(refused.value).split("set it to ")[1].split()[0])
    refuse_no_room(box, processor, {}, room(completion=smallest))
    with pytest.raises(UserError):
        refuse_no_room(box, processor, {}, room(completion=smallest - 1))
    turns = ToolLoop(box, processor, {}, lambda image: 0, 3, processor.tokenizer.decode)
    call = turns.count('<tool_call>{"name": "calculate", "arguments": {"expression": ""}}') + 1
    assert turns.around == len(turns._ids(["<tool_response>\n\n</tool_response>"], [], [-1])) - 1
    assert call + turns.around < smallest <= call + turns.around + 16


@pytest.mark.parametrize("seconds", [0.001, 1e9])
def test_the_shortest_and_the_longest_time_of_a_call_are_what_the_timers_take(seconds):
    with suppress(OverdueError), backstop(seconds), deadline(seconds):
        pass
