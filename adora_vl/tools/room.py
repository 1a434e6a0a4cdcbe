"""Refuses limits within which a tool can never answer, before anything is sampled.

Without this check each call would be an error, or end its rollout, and nothing would say so.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from PIL import Image

from adora_vl.data.context_limit import ContextLimit
from adora_vl.data.images import model_size
from adora_vl.rollout.turns import CALL_TAG, MIN_TOKENS_LEFT, ToolLoop
from adora_vl.tools.ours import BUILT_IN_TOOLS, SHORTEST_ANSWER_CHARS
from adora_vl.tools.run import Toolbox
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_SHORTEST_VALUE_BY_JSON_TYPE = {
    "integer": 0,
    "number": 0,
    "string": "",
    "boolean": True,
    "array": [],
    "object": {},
}


@dataclass(frozen=True)
class ConversationLimits:
    """The limits of a conversation with tools; None where a limit is unknown."""

    completion_key: str
    """The key of the config that sets `max_completion`."""
    max_completion: int
    """The largest number of tokens of a completion."""
    context: ContextLimit | None = None
    """The engine's limit on prompt and completion together."""
    shortest_prompt: int | None = None
    """The number of tokens of the shortest prompt."""
    fewest_pictures: int | None = None
    """The number of pictures of the problem that has the fewest."""


def check_answer_limits(
    toolbox: Toolbox,
    processor: "ProcessorMixin | PreTrainedTokenizerBase | None",
    chat_template_kwargs: Mapping[str, Any],
    limits: ConversationLimits,
) -> None:
    """Raise `UserError` if some tool can never answer within the limits of a conversation.

    The shortest call of each tool and its shortest possible answer have to fit.

    Args:
        toolbox: the tools of the run.
        processor: the model's processor or tokenizer; None if it is not available, and then no
            tokens are counted.
        chat_template_kwargs: further arguments of the chat template.
        limits: the limits of a conversation.
    """
    for name, tool in toolbox.tool_set.functions.items():
        _check_picture_limits(toolbox, name=name, tool=tool, limits=limits)
        _check_text_limit(toolbox, name, tool)
    if processor is None:
        return
    # The loop only counts the tokens of texts here. Its settings for pictures and sampling are not
    # read.
    tool_loop = ToolLoop(
        tools=toolbox,
        processor=processor,
        chat_template_kwargs=chat_template_kwargs,
        count_image_tokens=lambda image: 0,
        max_answers=None,
        decode=str,
    )
    for schema in toolbox.schemas:
        _check_token_limits(
            toolbox, tool_loop=tool_loop, function_schema=schema["function"], limits=limits
        )


def _check_picture_limits(
    toolbox: Toolbox, name: str, tool: Callable[..., Any], limits: ConversationLimits
) -> None:
    """Raise `UserError` if the limits on pictures forbid every picture that a tool could return.

    Args:
        toolbox: the tools of the run, with the limits of their answers.
        name: the name of the tool.
        tool: its function.
        limits: the limits of a conversation.
    """
    if not _returns_a_picture(tool) or toolbox.view is None:
        return
    # The limit counts the problem's own pictures too.
    max_pictures = toolbox.options.images
    fewest_pictures = limits.fewest_pictures
    if fewest_pictures is not None and max_pictures <= fewest_pictures:
        raise UserError(
            f"adora_tool_options.images: {max_pictures} leaves no picture for {name}, since each problem "
            f"has {fewest_pictures} or more of them; set it to {fewest_pictures + 1} or more"
        )
    max_pixels = toolbox.options.max_pixels
    unit = toolbox.view.unit  # the side of an image token in pixels
    if max_pixels is not None and max_pixels < unit**2:
        raise UserError(
            f"adora_tool_options.max_pixels: {max_pixels} holds no picture that {name} could show, "
            f"as an image token of this model has {unit} x {unit} pixels; set it to {unit**2} or "
            "more"
        )


def _returns_a_picture(tool: Callable[..., Any]) -> bool:
    """Return whether the type hints of a tool say that it always returns a picture."""
    try:
        return_type = get_type_hints(tool).get("return")
    # A hint in the user's file may name a class that is imported for type checks alone.
    except Exception:
        return False
    return isinstance(return_type, type) and issubclass(return_type, Image.Image)


def _check_text_limit(toolbox: Toolbox, name: str, tool: Callable[..., Any]) -> None:
    """Raise `UserError` if every answer of a built-in tool is longer than the limit of text.

    A tool of the user is not checked, since the length of its answers is unknown. It may have the
    name of a built-in tool.

    Args:
        toolbox: the tools of the run, with the limits of their answers.
        name: the name of the tool.
        tool: its function.
    """
    max_text = toolbox.options.max_text
    is_built_in = BUILT_IN_TOOLS.get(name) is tool
    shortest_answer = SHORTEST_ANSWER_CHARS.get(name, 0) if is_built_in else 0
    if max_text < shortest_answer:
        raise UserError(
            f"adora_tool_options.max_text: {max_text} is less than any answer of {name} has, "
            f"{shortest_answer} characters; set it to {shortest_answer} or more"
        )


def _check_token_limits(
    toolbox: Toolbox,
    tool_loop: ToolLoop,
    function_schema: Mapping[str, Any],
    limits: ConversationLimits,
) -> None:
    """Raise `UserError` if the shortest call of a tool and its shortest answer do not fit.

    They have to fit into a turn, into a completion, and into the engine's context, and leave
    `MIN_TOKENS_LEFT` tokens for what the policy says then.

    Args:
        toolbox: the tools of the run.
        tool_loop: counts tokens with the model's tokenizer and chat template.
        function_schema: the schema of the tool.
        limits: the limits of a conversation.
    """
    name = function_schema["name"]
    call_length = _shortest_call_tokens(tool_loop, function_schema)
    picture_tokens = _fewest_picture_tokens(toolbox, toolbox.tool_set.functions[name])
    answer_length = tool_loop.empty_answer_length + picture_tokens
    needed_tokens = call_length + answer_length + MIN_TOKENS_LEFT
    need_in_words = (
        f"{name}, whose shortest call takes {call_length} tokens and the answer to it "
        f"{answer_length}, and {MIN_TOKENS_LEFT} have to be left behind it"
    )
    turn_limit = toolbox.options.turn_tokens  # the largest number of tokens of a turn
    if turn_limit is not None and turn_limit < call_length:
        raise UserError(
            f"adora_tool_options.turn_tokens: {turn_limit} is too short for a call of {name}, which "
            f"takes {call_length} tokens or more; raise it"
        )
    if limits.max_completion < needed_tokens:
        raise UserError(
            f"{limits.completion_key}: {limits.max_completion} leaves no room for an answer of "
            f"{need_in_words}; set it to {needed_tokens} or more"
        )
    # The context is known only if vLLM samples, and the shortest prompt only if the data are known.
    if limits.context is None or limits.shortest_prompt is None:
        return
    if limits.context.tokens - limits.shortest_prompt < needed_tokens:
        # The model's own limit cannot be raised.
        remedy = limits.context.raise_hint or "choose a model that takes"
        raise UserError(
            f"{limits.context.name} leaves no room for an answer of {need_in_words}, where the "
            f"shortest prompt has {limits.shortest_prompt}; {remedy} "
            f"{limits.shortest_prompt + needed_tokens} or more"
        )


def _shortest_call_tokens(tool_loop: ToolLoop, function_schema: Mapping[str, Any]) -> int:
    """Return the number of tokens of the shortest call that the schema of a tool allows.

    For example, the shortest call of `calculate` without spaces is

        <tool_call>{"name":"calculate","arguments":{"expression":""}}

    The mark `</tool_call>` is not counted, since a model may omit it.
    """
    parameters = function_schema["parameters"]
    properties = parameters["properties"]
    required = parameters.get("required", ())
    arguments = {name: shortest_value(properties[name]) for name in required}
    call = {"name": function_schema["name"], "arguments": arguments}
    with_spaces = json.dumps(call)
    without_spaces = json.dumps(call, separators=(",", ":"))
    # The spaces in the JSON change the number of tokens, and which spelling takes the fewest
    # depends on the tokenizer.
    spellings = [with_spaces, f"\n{with_spaces}", without_spaces]
    fewest_tokens = min(tool_loop.count_tokens(f"{CALL_TAG}{text}") for text in spellings)
    return fewest_tokens + 1  # with the token that ends the turn


def shortest_value(schema: Mapping[str, Any]) -> Any:
    """Return a value of as few characters as the schema of an argument allows.

    For example, it is 0 for an integer, and "no" for a string that is one of "maybe" and "no".
    """
    if schema.get("enum"):
        return min(schema["enum"], key=lambda value: len(str(value)))
    type_or_types = schema.get("type", "string")
    json_type = type_or_types if isinstance(type_or_types, str) else type_or_types[0]
    return _SHORTEST_VALUE_BY_JSON_TYPE.get(json_type)


def _fewest_picture_tokens(toolbox: Toolbox, tool: Callable[..., Any]) -> int:
    """Return the number of image tokens of the smallest picture that a tool can return.

    It is 0 for a tool that may return anything else, and for a model that sees no images. For
    example, with an image token of 28 x 28 pixels and at least 3,136 pixels a picture has 4.
    """
    view = toolbox.view
    if view is None or not _returns_a_picture(tool):
        return 0
    # The smallest picture has the size of one image token. The model enlarges it to the fewest
    # pixels that it accepts.
    token_side = view.unit
    width, height = model_size(token_side, token_side, view.limits)
    return (width // token_side) * (height // token_side)
