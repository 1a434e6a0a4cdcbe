"""Refuses limits within which a tool can never answer, before anything is sampled.

Without this check each call would be an error, or end its rollout, and nothing would say so.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from PIL import Image

from adora_vl.data.images import model_size
from adora_vl.rollout.turns import CALL, MIN_TOKENS_LEFT, ToolLoop
from adora_vl.tools.ours import OURS, SHORTEST_TEXT
from adora_vl.tools.run import Toolbox
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_SHORTEST = {"integer": 0, "number": 0, "string": "", "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True)
class Room:
    """The limits of a conversation; None where a limit is unknown."""

    key: str
    """The key of the run that sets `completion`."""
    completion: int
    """The most tokens that a completion may have."""
    context: int | None = None
    """The most tokens that prompt and completion may have together."""
    prompt: int | None = None
    """The tokens of the shortest prompt."""
    pictures: int | None = None
    """The number of pictures of the problem with the fewest."""


def refuse_no_room(
    toolbox: Toolbox,
    processor: "ProcessorMixin | PreTrainedTokenizerBase | None",
    template: Mapping[str, Any],
    room: Room,
) -> None:
    """Raise `UserError` where a limit is below the minimum that a tool needs.

    Args:
        toolbox: the tools of the run.
        processor: that of the model, or a tokenizer; None if it is not available, and then no
            tokens are counted.
        template: arguments of the chat template.
        room: the limits of a conversation.
    """
    for name, tool in toolbox.chosen.functions.items():
        _refuse_no_pictures(toolbox, name=name, tool=tool, room=room)
        _refuse_no_text(toolbox, name, tool)
    if processor is None:
        return
    turns = ToolLoop(
        tools=toolbox,
        processor=processor,
        template=template,
        tokens_of=lambda image: 0,
        max_answers=None,
        decode=str,
    )
    for schema in toolbox.schemas:
        _refuse_no_tokens(toolbox, turns=turns, function=schema["function"], room=room)


def _refuse_no_pictures(toolbox: Toolbox, name: str, tool: Callable[..., Any], room: Room) -> None:
    """Raise `UserError` where a tool that shows pictures may show none."""
    images = toolbox.options.images
    max_pixels = toolbox.options.max_pixels
    if not _shows_a_picture(tool) or toolbox.view is None:
        return
    if room.pictures is not None and images <= room.pictures:
        raise UserError(
            f"adora_tool_options.images: {images} leaves no picture for {name}, since each problem "
            f"has {room.pictures} or more of them; set it to {room.pictures + 1} or more"
        )
    unit = toolbox.view.unit
    if max_pixels is not None and max_pixels < unit**2:
        raise UserError(
            f"adora_tool_options.max_pixels: {max_pixels} holds no picture that {name} could show, "
            f"as an image token of this model has {unit} x {unit} pixels; set it to {unit**2} or more"
        )


def _shows_a_picture(tool: Callable[..., Any]) -> bool:
    """Return whether the type hints of a tool say that it always returns a picture."""
    try:
        returned = get_type_hints(tool).get("return")
    except Exception:  # names of a file of the user's that only a type checker knows
        return False
    return isinstance(returned, type) and issubclass(returned, Image.Image)


def _refuse_no_text(toolbox: Toolbox, name: str, tool: Callable[..., Any]) -> None:
    """Raise `UserError` where every answer of a tool is over the limit of text."""
    max_text = toolbox.options.max_text
    shortest = SHORTEST_TEXT.get(name, 0) if OURS.get(name) is tool else 0
    if max_text < shortest:
        raise UserError(
            f"adora_tool_options.max_text: {max_text} is less than any answer of {name} has, "
            f"{shortest} characters; set it to {shortest} or more"
        )


def _refuse_no_tokens(
    toolbox: Toolbox, turns: ToolLoop, function: Mapping[str, Any], room: Room
) -> None:
    """Raise `UserError` where the shortest call of a tool and its answer do not fit."""
    name = function["name"]
    call = _shortest_call(turns, function)
    # The template's own tokens around an answer, and the smallest picture if the tool shows one.
    answer = turns.empty_answer_length + _shortest_picture(toolbox, toolbox.chosen.functions[name])
    needed = call + answer + MIN_TOKENS_LEFT
    parts = (
        f"{name}, whose shortest call takes {call} tokens and the answer to it {answer}, and "
        f"{MIN_TOKENS_LEFT} have to be left behind it"
    )
    turn_tokens = toolbox.options.turn_tokens
    if turn_tokens is not None and turn_tokens < call:
        raise UserError(
            f"adora_tool_options.turn_tokens: {turn_tokens} is too short for a call of {name}, "
            f"which takes {call} tokens or more; raise it"
        )
    if room.completion < needed:
        raise UserError(
            f"{room.key}: {room.completion} leaves no room for an answer of {parts}; set it to "
            f"{needed} or more"
        )
    # What the engine holds is known only where vLLM samples, the prompt where the data are known.
    if room.context is None or room.prompt is None:
        return
    if room.context - room.prompt < needed:
        raise UserError(
            f"vllm_max_model_length: {room.context} leaves no room for an answer of {parts}, "
            f"where the shortest prompt has {room.prompt}; set it to {room.prompt + needed} or more"
        )


def _shortest_call(turns: ToolLoop, function: Mapping[str, Any]) -> int:
    """Return the tokens of the shortest call that the schema allows, in its shortest spelling.

    The closing mark is not counted, since a model may omit it.
    """
    parameters = function["parameters"]
    properties = parameters["properties"]
    required = parameters.get("required", ())
    arguments = {name: shortest_value(properties[name]) for name in required}
    call = {"name": function["name"], "arguments": arguments}
    plain = json.dumps(call)
    without_spaces = json.dumps(call, separators=(",", ":"))
    # Which spelling takes fewest tokens depends on the tokenizer.
    spellings = [plain, f"\n{plain}", without_spaces]
    end_of_turn = 1
    return min(turns.count(f"{CALL}{text}") for text in spellings) + end_of_turn


def shortest_value(schema: Mapping[str, Any]) -> Any:
    """Return a value of as few characters as the schema of an argument allows."""
    if schema.get("enum"):
        return min(schema["enum"], key=lambda value: len(str(value)))
    kinds = schema.get("type", "string")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    return _SHORTEST.get(kind)


def _shortest_picture(toolbox: Toolbox, tool: Callable[..., Any]) -> int:
    """Return the tokens of the smallest picture that a tool can show.

    It is 0 for a tool that may show none.
    """
    view = toolbox.view
    if view is None or not _shows_a_picture(tool):
        return 0
    (width, height) = model_size(
        view.unit, height=view.unit, unit=view.unit, min_pixels=view.low, max_pixels=view.high
    )
    return width // view.unit * (height // view.unit)
