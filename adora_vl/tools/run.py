"""The tools of a run, and how they answer a turn, within limits of time, number and size.

A tool may be code of the user. It may fail, hang, exit, fork or return anything, and each of these
becomes one line for the model. It gets copies of the pictures and random states of its own.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from adora_vl.config.blocks import ToolOptions
from adora_vl.data.images import (
    MAX_ASPECT_RATIO,
    PixelLimits,
    UnreadableImageError,
    size_to_store,
    upright_rgb_copy,
)
from adora_vl.data.prompts import (
    CONTROL_TOKENS,
    NO_CALLS_LEFT,
    find_control_token,
    tool_response,
)
from adora_vl.models.families import family_of, sees_images
from adora_vl.rewards.safe_call import copy_argument
from adora_vl.rollout.rollouts import Call
from adora_vl.rollout.turns import ToolAnswer
from adora_vl.tools.calls import (
    CallError,
    ToolCall,
    build_tool_schema,
    check_arguments,
    error_line,
    find_calls,
    read_call,
    replace_surrogates,
    run_limited,
)
from adora_vl.tools.environments import Environments
from adora_vl.tools.ours import BUILT_IN_TOOLS, View
from adora_vl.utils.call_guards import OverdueError
from adora_vl.utils.errors import UserError, describe_error, did_you_mean
from adora_vl.utils.own_files import (
    function_name,
    is_function,
    is_users_file,
    load_from_file,
    source_hash,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

AnswerPart = str | Image.Image
# The most calls of one turn that are answered. A single line answers all further calls.
CALLS_PER_TURN = 4
# The most parts of an answer. The limits on text and pictures would not stop many empty texts.
_MAX_ANSWER_PARTS = 10_000
_TOOLS_FOR_PICTURES = [
    tool for tool in BUILT_IN_TOOLS.values() if "view" in signature(tool).parameters
]


@dataclass(frozen=True)
class ToolSet:
    """The tools of a run."""

    # The tools by name. With environments, the methods of the first environment are among them. A
    # call in a rollout runs the method of the same name of that rollout's own environment.
    functions: Mapping[str, Callable[..., Any]]
    # The hash of each file or function of the user, by its path or name.
    hashes: Mapping[str, str] = field(default_factory=dict)
    environments: Environments | None = None

    def schemas(self, view: View | None) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools, which tell the model how to call them.

        `view`: what the model sees of a picture; None for a model that reads text alone.
        """
        text_by_placeholder = {"points": view.points} if view else {}
        return [
            build_tool_schema(name, tool, text_by_placeholder)
            for name, tool in self.functions.items()
        ]


def choose_tools(
    entries: Sequence[str | Callable[..., Any]], environments: Environments | None = None
) -> ToolSet:
    """Return the tools of a run by their entries in the config, and check their schemas.

    Args:
        entries: the key `tools`: names of built-in tools, `FILE.py:FUNCTION`, and functions.
        environments: the environments of the run, whose public methods become tools too.

    Raises `UserError` for an unknown entry, for a tool without a schema, and for two tools of the
    same name.
    """
    tools: list[_NamedTool] = []
    hashes: dict[str, str] = {}
    if environments is not None:
        hashes |= environments.hashes
    for entry in entries:
        tool = _find_tool(entry)
        if not is_function(tool.function):
            raise UserError(f"tools: {entry!r:.80} is no function")
        tools.append(tool)
        hashes |= tool.hashes
    if environments is not None:
        for name, method in environments.tools.items():
            tools.append(_NamedTool(name, label=name, function=method))
    functions: dict[str, Callable[..., Any]] = {}
    for tool in tools:
        if tool.name in functions:
            raise UserError(f"tools: two of them have the name {tool.name!r}; rename one of them")
        build_tool_schema(tool.label, tool.function)  # raises for a tool without a schema
        functions[tool.name] = tool.function
    return ToolSet(functions, hashes, environments)


class _NamedTool(NamedTuple):
    """A tool, and its names."""

    name: str  # the name by which a model calls it
    label: str  # the user's entry, for messages
    function: Any
    hashes: Mapping[str, str] = {}  # the hash of the user's file or function, by its path or name


def _find_tool(entry: str | Callable[..., Any]) -> _NamedTool:
    """Return the tool that an entry of the key `tools` names. Raises `UserError` without one."""
    if not isinstance(entry, str):
        name = function_name(entry)
        return _NamedTool(name, label=name, function=entry, hashes={name: source_hash(entry)})
    if is_users_file(entry):
        user_function = load_from_file("tools", entry)
        return _NamedTool(
            user_function.function_or_class.__name__,
            label=entry,
            function=user_function.function_or_class,
            hashes={user_function.file: user_function.hash},
        )
    if entry in BUILT_IN_TOOLS:
        return _NamedTool(entry, label=entry, function=BUILT_IN_TOOLS[entry])
    names = ", ".join(BUILT_IN_TOOLS)
    raise UserError(
        f"tools: {entry!r} is none of {names}, nor "
        f"FILE.py:FUNCTION{did_you_mean(entry, BUILT_IN_TOOLS)}"
    )


def build_view(config: "PreTrainedConfig", pixels: PixelLimits) -> View | None:
    """Return the size and the coordinates in which a model sees pictures; None for a text model.

    Args:
        config: that of the model.
        pixels: the limits to which pictures are resized for the model.
    """
    if not sees_images(config):
        return None
    family = family_of(config)
    vision = family.vision if family is not None else None
    points_in_thousandths = vision is not None and vision.points_in_thousandths
    return View(
        low=pixels.min_pixels,
        high=pixels.max_pixels,
        unit=pixels.token_side,
        relative=points_in_thousandths,
    )


@dataclass(frozen=True)
class _CallOutcome:
    """What one call of a tool has returned, or the line that says why it failed."""

    name: str  # of the tool; empty where the call could not be read
    parts: Sequence[AnswerPart]
    failed: bool = False


def _number_pictures(parts: Sequence[AnswerPart], first: int) -> list[AnswerPart]:
    """Return an answer's texts and pictures with line breaks and picture numbers between them.

    The model names a picture by its number in later calls. For example, the text "sum" and a
    picture become "sum", "\\n", "Picture 2: " and the picture, if `first` is 2.

    Args:
        parts: the texts and pictures.
        first: the number of the first picture.
    """
    lines: list[AnswerPart] = []
    number = first
    for part in parts:
        if lines:
            lines.append("\n")
        if isinstance(part, Image.Image):
            lines += [f"Picture {number}: ", part]
            number += 1
        else:
            lines.append(part)
    return lines


def _call_record(outcome: _CallOutcome, call_text: str, *, seconds: float) -> Call:
    """Return the entry of a call for the run's record.

    For example, an outcome of the text "sum" and a picture has the text "sum" and, on the next
    line, "<image>".

    Args:
        outcome: what the tool has returned.
        call_text: the call as the model wrote it.
        seconds: how long it took.
    """
    texts = [part for part in outcome.parts if isinstance(part, str)]
    picture_count = len(outcome.parts) - len(texts)
    return Call(
        name=outcome.name,
        arguments=call_text,
        text="\n".join([*texts, *["<image>"] * picture_count]),
        seconds=seconds,
        failed=outcome.failed,
    )


class Toolbox:
    """Answers the tool calls that the policy writes in its turns.

    A call is JSON in a `<tool_call>` block, such as `{"name": "add", "arguments": {"a": 1}}`. The
    answer is texts and pictures, which the model gets in a turn of the user. Whatever goes wrong in
    a call or a tool becomes one line of such an answer. `view` is the size and the coordinates in
    which the model sees pictures.
    """

    def __init__(
        self,
        tool_set: ToolSet,
        options: ToolOptions,
        view: View | None,
        control_tokens: Sequence[str] = CONTROL_TOKENS,
    ) -> None:
        """Build the JSON schemas of the tools, and check that the model can use them.

        Args:
            tool_set: the tools of the run.
            options: the limits of calls and answers (`adora_tool_options`).
            view: the size and the coordinates in which the model sees pictures; None for a model
                that reads text alone.
            control_tokens: the control tokens of the model, which no schema may contain.

        Raises `UserError` for a schema with a control token, and for a tool that needs pictures
        where the model sees none.
        """
        self.tool_set = tool_set
        self.options = options
        self.view = view
        self.schemas = tool_set.schemas(view)
        self._schema_by_name = {schema["function"]["name"]: schema for schema in self.schemas}
        for name, schema in self._schema_by_name.items():
            token = find_control_token(schema, control_tokens)
            if token is not None:
                raise UserError(
                    f"tools: {name!r} has the model's own token {token} in its docstring or hints, "
                    "which the model is told; remove it from the text"
                )
        self._has_warned = False  # whether a time limit has stopped a tool, and a warning was given
        for name, tool in tool_set.functions.items():
            if view is None and tool in _TOOLS_FOR_PICTURES:
                raise UserError(f"tools: {name!r} needs a model that sees images; leave it out")

    def answer(
        self,
        text: str,
        images: Sequence[Image.Image],
        *,
        seed: str,
        last: bool,
        environment: object = None,
    ) -> ToolAnswer | None:
        """Run the calls in a turn of the policy, and return the answer to all of them.

        Args:
            text: the text of the turn.
            images: the pictures of the problem, then those of earlier answers.
            seed: a text from which the random numbers of the calls follow.
            last: whether no calls remain after this turn; the answer then says so.
            environment: the environment of the rollout, if it has one.

        Returns None if the turn calls nothing.
        """
        all_pictures = list(images)
        parts = list[AnswerPart]()
        calls = list[Call]()
        for number, call_text in enumerate(find_calls(text)):
            start_time = time.perf_counter()
            # Texts and pictures, or a line that says what went wrong.
            outcome = self._run_call(
                call_text,
                number=number,
                images=all_pictures,
                seed=f"{seed}/{number}",
                environment=environment,
            )
            seconds = time.perf_counter() - start_time
            calls.append(_call_record(outcome, call_text, seconds=seconds))
            if number > 0:
                parts.append("\n")
            # The answer to a call stands between `<tool_response>` and `</tool_response>`.
            parts += tool_response(_number_pictures(outcome.parts, len(all_pictures)))
            # A later call of this turn may use the pictures of this one.
            all_pictures += [part for part in outcome.parts if isinstance(part, Image.Image)]
            if number >= CALLS_PER_TURN:
                break  # this call was the first one too many, and got an error that says so
        if not calls:
            return None
        if last:
            parts.append(f"\n{NO_CALLS_LEFT}")
        return ToolAnswer(tuple(parts), tuple(calls))

    def _run_call(
        self,
        call_text: str,
        *,
        number: int,
        images: Sequence[Image.Image],
        seed: str,
        environment: object,
    ) -> _CallOutcome:
        """Read one call, run its tool, and return the result, or an error line for the model.

        Every exception becomes such a line, such as "Error: no tool 'add'". A run that ended here
        would end again when it is resumed, since the model would write the same call.

        Args:
            call_text: the call as the model wrote it.
            number: the number of the call in its turn, from 0.
            images: the pictures that the tool gets.
            seed: a text from which the tool's random numbers follow.
            environment: the environment of the rollout, if it has one.
        """
        name = ""
        try:
            if number >= CALLS_PER_TURN:
                raise CallError(f"too many calls in a turn, at most {CALLS_PER_TURN}")
            call = read_call(call_text)
            name = call.name
            parts = self._call_tool(call, images=images, seed=seed, environment=environment)
            return _CallOutcome(name, parts)
        except KeyboardInterrupt:
            raise
        except CallError as error:
            reason = str(error)
        except OverdueError:
            reason = f"the tool took longer than {self.options.seconds:g} s"
            self._warn_of_time_limit(name)
        except SystemExit:
            reason = "the tool called sys.exit"
        except BaseException as error:  # compiled code raises some that are no `Exception`
            reason = describe_error(error)
        return _CallOutcome(name, [error_line(reason)], failed=True)

    def _call_tool(
        self,
        call: ToolCall,
        *,
        images: Sequence[Image.Image],
        seed: str,
        environment: object,
    ) -> list[AnswerPart]:
        """Call a tool, and return the texts and pictures of its result.

        The arguments are those of `_run_call`. Raises `CallError` if the call is wrong, or if the
        result cannot be shown to the model. Errors of the tool itself are not caught.
        """
        name = call.name
        if name not in self._schema_by_name:
            raise CallError(f"no tool {name[:40]!r}; there are {', '.join(self._schema_by_name)}")
        kwargs: dict[str, Any] = check_arguments(call.arguments, self._schema_by_name[name])
        tool = self.tool_set.functions[name]
        environments = self.tool_set.environments
        if environments is not None and environment is not None and name in environments.tools:
            # `tool_set` has the method of the first environment; the rollout has its own.
            tool = getattr(environment, name)
        # A tool gets the pictures and the view only if it has parameters of these names.
        parameters = signature(tool).parameters
        hidden_arguments = {"images": images, "view": self.view}
        kwargs |= {key: value for key, value in hidden_arguments.items() if key in parameters}
        if BUILT_IN_TOOLS.get(name) is tool:
            try:
                return self._read_result(tool(**kwargs), len(images))
            except ValueError as error:
                raise CallError(str(error)) from error
        # Code of the user gets copies, so that it cannot change what the run has.
        kwargs = {key: copy_argument(value) for key, value in kwargs.items()}
        # The result is read inside the limit, since reading a lazy result runs code of the user
        # too.
        with run_limited(f"tool {name}", self.options.seconds, seed):
            return self._read_result(tool(**kwargs), len(images))

    def _warn_of_time_limit(self, name: str) -> None:
        """Print to standard error, once in a run, that a tool was stopped by its time limit."""
        if not self._has_warned:
            print(
                f"tools: {name} took longer than adora_tool_options.seconds: "
                f"{self.options.seconds:g}; a resumed run may differ, as it may be in time there",
                file=sys.stderr,
            )
        self._has_warned = True

    def _read_result(self, result: object, picture_count: int) -> list[AnswerPart]:
        """Return the result of a tool as texts and pictures that the model's processor accepts.

        For example, the result `["sum", 3]` becomes "sum" and "3". Raises `CallError` for a result
        beyond the limits of an answer. Errors of the user's objects are not caught.

        Args:
            result: what the tool has returned: a text, a picture, another value, or a list of them.
            picture_count: the number of pictures that the model has already.
        """
        parts = list[AnswerPart]()
        text_length = 0
        new_picture_count = 0
        values = result if isinstance(result, list | tuple) else [result]
        for value in values:
            part = self._read_value(value)
            parts.append(part)
            if isinstance(part, str):
                text_length += len(part)
            else:
                new_picture_count += 1
            # The limits are checked in the loop, since a list of a user's class may never end.
            if text_length > self.options.max_text or len(parts) > _MAX_ANSWER_PARTS:
                raise CallError(
                    f"the tool's text has {text_length} characters, at most {self.options.max_text}"
                )
            if picture_count + new_picture_count > self.options.images:
                raise CallError(
                    f"no further pictures, there are {picture_count} of {self.options.images}"
                )
        return parts or ["nothing"]

    def _read_value(self, value: object) -> AnswerPart:
        """Return one value of a tool's result as a text or a picture.

        A value that is neither becomes its JSON text, as 3 becomes "3". Raises `CallError` for a
        value that has none.
        """
        if isinstance(value, Mapping):
            # A mapping may be a part of a message in TRL's form: {"type": "text", "text": ...}.
            part_type = value.get("type")
            if isinstance(part_type, str) and part_type in ("text", "image"):
                value = value.get(part_type)
        if isinstance(value, Image.Image):
            return self._fit_picture(value)
        if isinstance(value, str):
            return replace_surrogates(value)
        try:
            if hasattr(value, "item"):  # a number of NumPy or torch
                value = value.item()
            return replace_surrogates(json.dumps(value, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError):
            raise CallError(
                f"the tool returned a {type(value).__name__}, no text and no picture"
            ) from None

    def _fit_picture(self, image: Image.Image) -> Image.Image:
        """Return a tool's picture upright, in RGB, and resized for the model.

        Raises `CallError` for a picture that cannot be read, or that the model cannot see.
        """
        if self.view is None:
            raise CallError("the tool returned a picture, and the model reads text alone")
        try:
            image = upright_rgb_copy(image)
        except UnreadableImageError as error:
            if error.reason == "image_too_large":
                (width, height) = image.size
                raise CallError(
                    f"the tool's picture has {width} x {height} pixels, too many"
                ) from None
            raise CallError(f"the tool's picture cannot be read ({error})") from None
        (width, height) = image.size
        # Each side must be as long as the side of an image token, and the image processor refuses a
        # narrow strip.
        token_side = self.view.unit
        shorter_side, longer_side = sorted((width, height))
        if shorter_side < token_side or longer_side >= MAX_ASPECT_RATIO * shorter_side:
            raise CallError(
                f"the tool's picture has {width} x {height} pixels; sides of at least {token_side}"
            )
        try:
            max_pixels = self.options.max_pixels or self.view.high
            limits = PixelLimits(max_pixels=max_pixels, token_side=token_side)
            size = size_to_store(width, height, limits)
        except ValueError as error:
            raise CallError(f"the picture has {width} x {height} pixels: {error}") from None
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)
