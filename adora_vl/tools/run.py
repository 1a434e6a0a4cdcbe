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
from typing import TYPE_CHECKING, Any

from PIL import Image

from adora_vl.config.blocks import ToolOptions
from adora_vl.data.images import (
    MAX_ASPECT_RATIO,
    UnreadableImageError,
    size_within,
    upright_rgb_copy,
)
from adora_vl.data.prompt_lengths import ResizeLimits
from adora_vl.data.prompts import (
    CONTROL_TOKENS,
    NO_CALLS_LEFT,
    control_token_in,
    tool_response,
)
from adora_vl.models.families import family_of, sees_images
from adora_vl.rewards.safe_call import own_copy
from adora_vl.rollout.rollouts import Call
from adora_vl.rollout.turns import ToolAnswer
from adora_vl.tools.calls import (
    CallError,
    calls_in,
    check_arguments,
    clean,
    error_line,
    limited,
    read_call,
    schema_of,
)
from adora_vl.tools.environments import Environments
from adora_vl.tools.ours import OURS, View
from adora_vl.utils.errors import UserError, did_you_mean, in_one_line
from adora_vl.utils.own_files import (
    OverdueError,
    from_file,
    function_name,
    is_function,
    is_own,
    source_hash,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Part = str | Image.Image
# The calls of one turn that are answered; a single line answers all beyond them.
CALLS_PER_TURN = 4
_MAX_PARTS = 10_000  # of an answer; empty texts count in no further limit
_NEED_PICTURES = [tool for tool in OURS.values() if "view" in signature(tool).parameters]


@dataclass(frozen=True)
class ToolSet:
    """The tools of a run by name.

    `functions` includes the methods of the first environment, which stand for those of every
    environment. `hashes` has a hash of each file, or function, of the user.
    """

    functions: Mapping[str, Callable[..., Any]]
    hashes: Mapping[str, str] = field(default_factory=dict)
    environments: Environments | None = None

    def schemas(self, view: View | None) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools, as the model is told of them.

        `view` is that of a model that sees images, None for a model that reads text alone.
        """
        words = {"points": view.points} if view else {}
        return [schema_of(name, tool, words) for name, tool in self.functions.items()]


def choose_tools(
    entries: Sequence[str | Callable[..., Any]], environments: Environments | None = None
) -> ToolSet:
    """Return the tools of a run, and the methods of its environments.

    Args:
        entries: the key `tools`: names of our tools, `FILE.py:FUNCTION`, and functions.
        environments: those of the run, whose public methods become tools.

    Raises `UserError` for an unknown entry, for a tool without a schema, and for two tools of the
    same name.
    """
    tools = list[tuple[str, str, Any]]()  # name, label in messages, and the tool
    hashes = dict(environments.hashes) if environments is not None else {}
    for entry in entries:
        if not isinstance(entry, str):
            tool = entry
            name = function_name(entry)
            hashes[name] = source_hash(entry)
        elif is_own(entry):
            user_function = from_file("tools", entry)
            tool = user_function.value
            name = user_function.value.__name__
            hashes[user_function.file] = user_function.hash
        elif entry in OURS:
            tool = OURS[entry]
            name = entry
        else:
            names = ", ".join(OURS)
            raise UserError(
                f"tools: {entry!r} is none of {names}, nor "
                f"FILE.py:FUNCTION{did_you_mean(entry, OURS)}"
            )
        if not is_function(tool):
            raise UserError(f"tools: {entry!r:.80} is no function")
        tools.append((name, entry if isinstance(entry, str) else name, tool))
    functions: dict[str, Callable[..., Any]] = {}
    environment_tools = environments.tools if environments is not None else {}
    for name, label, tool in [
        *tools,
        *((name, name, tool) for name, tool in environment_tools.items()),
    ]:
        if name in functions:
            raise UserError(f"tools: two of them have the name {name!r}; rename one of them")
        schema_of(label, tool)
        functions[name] = tool
    return ToolSet(functions, hashes, environments)


def view_of(config: "PreTrainedConfig", pixels: ResizeLimits) -> View | None:
    """Return the view of a model of this Transformers config.

    None for a model that reads text alone. `pixels` are the limits within which the model sees a
    picture.
    """
    family = family_of(config)
    vision = family.vision if family is not None else None
    relative = vision is not None and vision.relative
    if not sees_images(config):
        return None
    return View(low=pixels.low, high=pixels.high, unit=pixels.unit, relative=relative)


@dataclass(frozen=True)
class _Outcome:
    """The result of one call; `name` is empty where it could not be read."""

    name: str
    parts: Sequence[Part]
    failed: bool = False


def _with_picture_numbers(parts: Sequence[Part], first: int) -> list[Part]:
    """Return the parts of an answer on lines of their own, with a number before each picture.

    `first` is the number of the first picture, by which a later call names it.
    """
    lines: list[Part] = []
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


class Toolbox:
    """Answers the calls of a run."""

    def __init__(
        self,
        chosen: ToolSet,
        options: ToolOptions,
        view: View | None,
        control_tokens: Sequence[str] = CONTROL_TOKENS,
    ) -> None:
        """Build the schemas of the tools.

        Args:
            chosen: the tools of the run.
            options: the limits of calls and answers.
            view: what the model sees of a picture, None for a model that reads text alone.
            control_tokens: the control tokens of the model, which no schema may contain.

        Raises `UserError` for a tool that the model cannot be told of, or that needs pictures where
        the model sees none.
        """
        self.chosen = chosen
        self.options = options
        self.view = view
        self.schemas = chosen.schemas(view)
        self._by_name = {schema["function"]["name"]: schema for schema in self.schemas}
        for name, schema in self._by_name.items():
            token = control_token_in(schema, control_tokens)
            if token is not None:
                raise UserError(
                    f"tools: {name!r} has the model's own token {token} in its docstring or hints, "
                    "which the model is told; remove it from the text"
                )
        self._has_warned = False
        for name, tool in chosen.functions.items():
            if view is None and tool in _NEED_PICTURES:
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
        """Answer a turn of the policy; None if the turn calls nothing.

        Args:
            text: the turn.
            images: the pictures of the problem, then those of earlier answers.
            seed: names the random numbers of the calls.
            last: whether no calls remain after this turn; the answer then says so.
            environment: that of the rollout, if it has one.
        """
        all_pictures = list(images)
        parts = list[Part]()
        calls = list[Call]()
        for number, call_text in enumerate(calls_in(text)):
            began = time.perf_counter()
            outcome = self._outcome(
                call_text,
                number=number,
                images=all_pictures,
                seed=f"{seed}/{number}",
                environment=environment,
            )
            if number > 0:
                parts.append("\n")
            parts += tool_response(_with_picture_numbers(outcome.parts, len(all_pictures)))
            pictures = [part for part in outcome.parts if isinstance(part, Image.Image)]
            all_pictures += pictures
            texts = [part for part in outcome.parts if isinstance(part, str)]
            calls.append(
                Call(
                    name=outcome.name,
                    arguments=call_text,
                    text="\n".join([*texts, *["<image>"] * len(pictures)]),
                    seconds=time.perf_counter() - began,
                    failed=outcome.failed,
                    span=-1,  # the rollout's segment is not known yet; `ToolLoop` puts it in
                )
            )
            # The first call beyond the limit was answered too, with the error that says so.
            if number >= CALLS_PER_TURN:
                break
        if not calls:
            return None
        if last:
            parts.append(f"\n{NO_CALLS_LEFT}")
        return ToolAnswer(tuple(parts), tuple(calls))

    def _outcome(
        self,
        call_text: str,
        *,
        number: int,
        images: Sequence[Image.Image],
        seed: str,
        environment: object,
    ) -> _Outcome:
        """Return the result of one call, from its text to the parts of its answer.

        Everything here follows from what a model wrote or a tool of the user returned, so every
        exception becomes a line for the model: a run that ended here would draw the same call again
        when it is resumed.
        """
        name = ""
        try:
            if number >= CALLS_PER_TURN:
                raise CallError(f"too many calls in a turn, at most {CALLS_PER_TURN}")
            name, arguments = read_call(call_text)
            parts = self._call(name, arguments, images, seed, environment)
            return _Outcome(name, parts)
        except KeyboardInterrupt:
            raise
        except CallError as error:
            reason = str(error)
        except OverdueError:
            reason = f"the tool took longer than {self.options.seconds:g} s"
            self._warn_late(name)
        except SystemExit:
            reason = "the tool called sys.exit"
        except BaseException as error:  # compiled code raises some that are no `Exception`
            reason = in_one_line(error)
        return _Outcome(name, [error_line(reason)], failed=True)

    def _call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        images: Sequence[Image.Image],
        seed: str,
        environment: object,
    ) -> list[Part]:
        """Call a tool, and return the parts of its result.

        Raises `CallError`, and whatever the tool raises.
        """
        if name not in self._by_name:
            raise CallError(f"no tool {name[:40]!r}; there are {', '.join(self._by_name)}")
        kwargs: dict[str, Any] = check_arguments(arguments, self._by_name[name])
        tool = self.chosen.functions[name]
        environments = self.chosen.environments
        if environments is not None and environment is not None and name in environments.tools:
            tool = getattr(environment, name)
        # A tool gets the pictures and the view only if it has parameters of these names.
        parameters = signature(tool).parameters
        hidden = {"images": images, "view": self.view}
        kwargs |= {key: value for key, value in hidden.items() if key in parameters}
        if OURS.get(name) is tool:
            try:
                return self._parts(tool(**kwargs), len(images))
            except ValueError as error:
                raise CallError(str(error)) from error
        # Code of the user gets copies, so that it cannot change what the run has.
        kwargs = {key: own_copy(value) for key, value in kwargs.items()}
        # The result may be lazy, or slow to convert: that counts as the tool's time too.
        with limited(f"tool {name}", self.options.seconds, seed):
            return self._parts(tool(**kwargs), len(images))

    def _warn_late(self, name: str) -> None:
        """Warn, once in a run, that a tool was stopped by its time limit."""
        if not self._has_warned:
            print(
                f"tools: {name} took longer than adora_tool_options.seconds: "
                f"{self.options.seconds:g}; a resumed run may differ, as it may be in time there",
                file=sys.stderr,
            )
        self._has_warned = True

    def _parts(self, result: object, before: int) -> list[Part]:
        """Return a tool's result as texts and pictures that the model's processor accepts.

        `before` is the number of pictures that the model has already. Raises `CallError`, and
        whatever an object of the user raises when it is read.
        """
        parts = list[Part]()
        length = 0
        pictures = 0
        values = result if isinstance(result, list | tuple) else [result]
        for value in values:
            part = self._part(value)
            parts.append(part)
            if isinstance(part, str):
                length += len(part)
            else:
                pictures += 1
            # The check is within the loop, since a list of a user's class may have no end.
            if length > self.options.max_text or len(parts) > _MAX_PARTS:
                raise CallError(
                    f"the tool's text has {length} characters, at most {self.options.max_text}"
                )
            if before + pictures > self.options.images:
                raise CallError(f"no further pictures, there are {before} of {self.options.images}")
        return parts or ["nothing"]

    def _part(self, value: object) -> Part:
        """Return one value of a result as text or picture; any JSON value becomes its text.

        Raises `CallError`.
        """
        if isinstance(value, Mapping):  # a part in TRL's form
            kind = value.get("type")
            if isinstance(kind, str) and kind in ("text", "image"):
                value = value.get(kind)
        if isinstance(value, Image.Image):
            return self._picture(value)
        if isinstance(value, str):
            return clean(value)
        try:
            if hasattr(value, "item"):  # a number of NumPy or torch
                value = value.item()
            return clean(json.dumps(value, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError):
            raise CallError(
                f"the tool returned a {type(value).__name__}, no text and no picture"
            ) from None

    def _picture(self, image: Image.Image) -> Image.Image:
        """Return a picture as the model can see it, resized within the limits.

        Raises `CallError`.
        """
        if self.view is None:
            raise CallError("the tool returned a picture, and the model reads text alone")
        try:
            image = upright_rgb_copy(image)
        except UnreadableImageError as error:
            if error.kind == "image_too_large":
                (width, height) = image.size
                raise CallError(
                    f"the tool's picture has {width} x {height} pixels, too many"
                ) from None
            raise CallError(f"the tool's picture cannot be read ({error})") from None
        (width, height) = image.size
        # A side has at least one image token, and the image processor refuses a narrow strip.
        unit = self.view.unit
        if min(width, height) < unit or max(width, height) >= MAX_ASPECT_RATIO * min(width, height):
            raise CallError(
                f"the tool's picture has {width} x {height} pixels; sides of at least {unit}"
            )
        try:
            size = size_within(
                width,
                height=height,
                min_pixels=None,
                max_pixels=self.options.max_pixels or self.view.high,
                unit=unit,
            )
        except ValueError as error:
            raise CallError(f"the picture has {width} x {height} pixels: {error}") from None
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)
