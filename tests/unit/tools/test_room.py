"""Limits within which a tool can never answer are refused; those with just enough room are not."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import adora_vl.builtin
from adora_vl.config.blocks import ToolOptions
from adora_vl.data.context_limit import ContextLimit
from adora_vl.models.load import load_processor
from adora_vl.rollout.turns import ToolLoop
from adora_vl.tools.ours import BUILT_IN_TOOLS, View
from adora_vl.tools.room import ConversationLimits, check_answer_limits
from adora_vl.tools.run import Toolbox, choose_tools
from adora_vl.utils.call_guards import OverdueError, backstop, deadline
from adora_vl.utils.errors import UserError

# pixels of the smallest and the largest picture, and the side of an image token
VIEW_OF_56_PIXELS = View(low=56 * 56, high=56 * 56, unit=28)


def context_of(
    tokens: int, name: str = "vllm_max_model_length", hint: str = "set it to"
) -> ContextLimit:
    """Return a limit of this many tokens of context; `hint` says how a user raises it."""
    return ContextLimit(
        tokens=tokens,
        completion_tokens=1000,
        name=f"{name}: {tokens}",
        raise_hint=hint,
        model_limit=None,
    )


LIMITS_WITH_ROOM = ConversationLimits(
    "max_completion_length",
    1000,
    context=context_of(tokens=2000),
    shortest_prompt=100,
    fewest_pictures=1,
)


@pytest.fixture(scope="module")
def processor() -> Any:
    """Load the processor of the tiny model that was made for the tool `zoom`."""
    return load_processor(str(Path(adora_vl.builtin.__file__).parent / "pretrained_zoom"), None)


def build_toolbox(*tools: Any, **options: Any) -> Toolbox:
    """Return a toolbox of these tools, or of all built-in ones, with options of the run."""
    return Toolbox(
        choose_tools(tools or [*BUILT_IN_TOOLS]), ToolOptions(**options), VIEW_OF_56_PIXELS
    )


def limits_except_for(**changed: Any) -> ConversationLimits:
    """Return the limits that leave room, with some of them changed."""
    return ConversationLimits(**{**vars(LIMITS_WITH_ROOM), **changed})


def return_picture() -> Image.Image:
    """Draw."""
    return Image.new("RGB", (56, 56))


@dataclass(kw_only=True)
class TooSmallLimit:
    """A limit within which a tool can never answer, and how its refusal begins."""

    tool: Any
    beginning_of_error: str
    options: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)


TOO_SMALL_LIMITS = {
    "pictures": TooSmallLimit(
        tool=return_picture,
        options={"images": 2},
        limits={"fewest_pictures": 3},
        beginning_of_error="adora_tool_options.images: 2 leaves no",
    ),
    "completion for a picture": TooSmallLimit(
        tool="zoom",
        limits={"max_completion": 10},
        beginning_of_error="max_completion_length: 10 leaves no room for an ans",
    ),
    "completion": TooSmallLimit(
        tool="calculate",
        limits={"max_completion": 40},
        beginning_of_error="max_completion_length: 40 leaves no room",
    ),
    "completion by another key": TooSmallLimit(
        tool="calculate",
        limits={"completion_key": "max_tokens", "max_completion": 9},
        beginning_of_error="max_tokens: 9 leaves no ro",
    ),
    "context": TooSmallLimit(
        tool="zoom",
        limits={"context": context_of(tokens=150)},
        beginning_of_error="vllm_max_model_length: 150 leaves no room for an answ",
    ),
    "context of a server": TooSmallLimit(
        tool="zoom",
        limits={
            "context": context_of(
                tokens=150, name="the vLLM server's --max-model-len", hint="start it with"
            )
        },
        beginning_of_error="the vLLM server's --max-model-len: 150 leaves no room for an answ",
    ),
    "turn": TooSmallLimit(
        tool="zoom",
        options={"turn_tokens": 5},
        beginning_of_error="adora_tool_options.turn_tokens: 5 is too short for",
    ),
    "text": TooSmallLimit(
        tool="measure",
        options={"max_text": 20},
        beginning_of_error="adora_tool_options.max_text: 20 is less than any",
    ),
}


@pytest.mark.parametrize("name", TOO_SMALL_LIMITS)
def test_a_limit_within_which_a_tool_can_never_answer_is_refused(processor, name):
    """The error names the key and its value, before the run begins."""
    case = TOO_SMALL_LIMITS[name]
    tools = build_toolbox(case.tool, **case.options)
    with pytest.raises(UserError) as refused:
        check_answer_limits(tools, processor, {}, limits_except_for(**case.limits))
    assert str(refused.value).startswith(case.beginning_of_error)


def test_limits_that_leave_room_are_taken(processor):
    """A limit that does not bound the tool, or is not known yet, raises nothing."""
    check_answer_limits(build_toolbox(), processor, {}, LIMITS_WITH_ROOM)
    check_answer_limits(build_toolbox("calculate", images=1), processor, {}, LIMITS_WITH_ROOM)
    check_answer_limits(
        build_toolbox("zoom", images=1), processor, {}, limits_except_for(fewest_pictures=None)
    )
    check_answer_limits(
        build_toolbox("zoom", images=1), processor, {}, limits_except_for(fewest_pictures=0)
    )
    check_answer_limits(build_toolbox("zoom"), None, {}, limits_except_for(max_completion=10))
    check_answer_limits(build_toolbox("measure", max_text=60), processor, {}, LIMITS_WITH_ROOM)


def test_the_smallest_limit_that_is_taken_holds_a_call_with_its_answer(processor):
    """The message names the smallest limit. It is taken, and one token less is not."""
    toolbox = build_toolbox("calculate")
    with pytest.raises(UserError, match="set it to [0-9]+ or more") as refused:
        check_answer_limits(toolbox, processor, {}, limits_except_for(max_completion=1))
    smallest_limit = int(str(refused.value).split("set it to ")[1].split()[0])
    check_answer_limits(toolbox, processor, {}, limits_except_for(max_completion=smallest_limit))
    with pytest.raises(UserError):
        check_answer_limits(
            toolbox, processor, {}, limits_except_for(max_completion=smallest_limit - 1)
        )

    # It holds the shortest call and an empty answer, and at most 16 tokens more.
    tool_loop = ToolLoop(
        tools=toolbox,
        processor=processor,
        chat_template_kwargs={},
        count_image_tokens=lambda image: 0,
        max_answers=3,
        decode=processor.tokenizer.decode,
    )
    call_text = '<tool_call>{"name": "calculate", "arguments": {"expression": ""}}'
    call_tokens = tool_loop.count_tokens(call_text) + 1
    empty_answer = tool_loop._answer_ids(
        ["<tool_response>\n\n</tool_response>"], image_lengths=[], last_turn=[-1]
    )
    assert tool_loop.empty_answer_length == len(empty_answer) - 1
    needed_tokens = call_tokens + tool_loop.empty_answer_length
    assert needed_tokens < smallest_limit <= needed_tokens + 16


@pytest.mark.parametrize("seconds", [0.001, 1e9])
def test_the_shortest_and_the_longest_time_of_a_call_are_what_the_timers_take(seconds):
    """Neither a thousandth of a second nor 31 years overflows a timer."""
    with suppress(OverdueError), backstop(seconds), deadline(seconds):
        pass
