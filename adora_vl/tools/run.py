"""The tools of a run: which they are, and what they say to a turn, within limits of time, number
and size.

A tool is code of the user's. It may fail, hang, exit, fork or return anything, and each of these is
one line for the model; it gets views of the pictures, and draws from random states of its own.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from PIL import Image

from adora_vl.config.options import ToolOptions
from adora_vl.data.images import WIDEST, UnreadableImageError, as_shown, size_within
from adora_vl.data.prompt_lengths import Limits
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
    checked,
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

Part = str | Image.Image
_MOST_PARTS = 10_000  # of an answer; those without a character count nowhere else
_NEED_PICTURES = [tool for tool in OURS.values() if "view" in signature(tool).parameters]


@dataclass(frozen=True)
class ChosenTools:
    """A run's tools by name, with methods of the first of `environments`.

    `hashes`: of each file of the user's.
    """

    functions: Mapping[str, Callable[..., Any]]
    hashes: Mapping[str, str] = field(default_factory=dict)
    environments: Environments | None = None

    def schemas(self, view: View | None) -> list[dict[str, Any]]:
        """What the model is told of each.

        `view`: of a model that sees; None: of one that reads text alone.
        """
        words = {"points": view.points} if view else {}
        return [schema_of(name, tool, words) for name, tool in self.functions.items()]


def choose_tools(
    asked: Sequence[str | Callable[..., Any]], environments: Environments | None = None
) -> ChosenTools:
    """The key's tools: names of ours, `FILE.py:FUNCTION`, functions; and environments' methods.

    Raises `UserError`.
    """
    given = list[tuple[str, str, Any]]()  # name, how it is called in an error, and the tool
    hashes = dict(environments.hashes) if environments is not None else {}
    for entry in asked:
        if not isinstance(entry, str):
            tool = entry
            name = function_name(entry)
            hashes[name] = source_hash(entry)
        elif is_own(entry):
            own = from_file("tools", entry)
            tool = own.value
            name = own.value.__name__
            hashes[own.file] = own.hash
        elif entry in OURS:
            tool = OURS[entry]
            name = entry
        else:
            known = ", ".join(OURS)
            raise UserError(
                f"tools: {entry!r} is none of {known}, nor "
                f"FILE.py:FUNCTION{did_you_mean(entry, OURS)}"
            )
        if not is_function(tool):
            raise UserError(f"tools: {entry!r:.80} is no function")
        given.append((name, entry if isinstance(entry, str) else name, tool))
    found: dict[str, Callable[..., Any]] = {}
    inside = environments.tools if environments is not None else {}
    for name, shown, tool in [*given, *((name, name, tool) for name, tool in inside.items())]:
        if name in found:
            raise UserError(f"tools: two of them have the name {name!r}; rename one of them")
        schema_of(shown, tool)
        found[name] = tool
    return ChosenTools(found, hashes, environments)


def view_of(config: Any, pixels: Limits) -> View | None:
    """What a model of this Transformers config sees within these limits; None for one that reads
    text alone.
    """
    family = family_of(config)
    vision = family.vision if family is not None else None
    relative = vision is not None and vision.relative
    return (
        View(low=pixels.low, high=pixels.high, unit=pixels.unit, relative=relative)
        if sees_images(config)
        else None
    )


@dataclass(frozen=True)
class _Outcome:
    """What came of a call; `name` is empty where none could be read."""

    name: str
    parts: Sequence[Part]
    failed: bool = False


class Toolbox:
    """Answers the calls of a run."""

    def __init__(
        self,
        chosen: ChosenTools,
        options: ToolOptions,
        view: View | None,
        control_tokens: Sequence[str] = CONTROL_TOKENS,
    ) -> None:
        """`view`: what the model sees of a picture; None: it reads text alone.

        `control_tokens`: of the model. Raises `UserError` for a tool of which it cannot be told, or
        that needs pictures.
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
        self._said_late = False
        blind = next(
            (
                name
                for name, tool in chosen.functions.items()
                if view is None and tool in _NEED_PICTURES
            ),
            None,
        )
        if blind is not None:
            raise UserError(f"tools: {blind!r} needs a model that sees images; leave it out")

    def answer(
        self,
        text: str,
        images: Sequence[Image.Image],
        *,
        seed: str,
        last: bool,
        environment: Any = None,
    ) -> ToolAnswer | None:
        """What the tools say to a turn; None: it called nothing.

        `images`: the problem's, then those of tools. `seed`: names the random numbers. `last`:
        whether no calls are left. `environment`: the rollout's own.
        """
        shown = list(images)
        parts = list[Part]()
        calls = list[Call]()
        for number, written in enumerate(calls_in(text)):
            began = time.perf_counter()
            outcome = self._outcome(
                written,
                number=number,
                shown=shown,
                seed=f"{seed}/{number}",
                environment=environment,
            )
            pictures = [part for part in outcome.parts if isinstance(part, Image.Image)]
            words: list[Part] = []
            for part in outcome.parts:
                words += ["\n"] if words else []
                if isinstance(part, Image.Image):
                    words += [f"Picture {len(shown)}: ", part]
                    shown.append(part)
                else:
                    words.append(part)
            parts += [*(["\n"] if number else []), *tool_response(words)]
            texts = [part for part in outcome.parts if isinstance(part, str)]
            seconds = time.perf_counter() - began
            calls.append(
                Call(
                    name=outcome.name,
                    arguments=written,
                    text="\n".join([*texts, *["<image>"] * len(pictures)]),
                    seconds=seconds,
                    failed=outcome.failed,
                    span=-1,
                )
            )
            if number >= self.options.calls_per_turn:
                break  # one line for all that are too many
        if not calls:
            return None
        return ToolAnswer((*parts, *([f"\n{NO_CALLS_LEFT}"] if last else [])), tuple(calls))

    def _outcome(
        self,
        written: str,
        *,
        number: int,
        shown: Sequence[Image.Image],
        seed: str,
        environment: Any,
    ) -> _Outcome:
        """What comes of one call, from its text to the parts of its answer.

        Everything here follows from what a model wrote or a tool of the user's returned, so
        whatever is raised is a line for the model: a run that ended here would draw the same call
        again when it is resumed.
        """
        name = ""
        try:
            if number >= self.options.calls_per_turn:
                raise CallError(f"too many calls in a turn, at most {self.options.calls_per_turn}")
            name, arguments = read_call(written)
            parts = self._called(name, arguments, shown, seed, environment)
            return _Outcome(name, parts)
        except KeyboardInterrupt:
            raise
        except CallError as error:
            reason = str(error)
        except OverdueError:
            reason = f"the tool took longer than {self.options.seconds:g} s"
            self._say_late(name)
        except SystemExit:
            reason = "the tool called sys.exit"
        except BaseException as error:  # compiled code raises some that are no `Exception`
            reason = in_one_line(error)
        return _Outcome(name, [error_line(reason)], failed=True)

    def _called(
        self,
        name: str,
        arguments: Mapping[str, Any],
        images: Sequence[Image.Image],
        seed: str,
        environment: Any,
    ) -> list[Part]:
        """The parts of what a tool returned. Raises `CallError`, and what the tool raises."""
        if name not in self._by_name:
            raise CallError(f"no tool {name[:40]!r}; there are {', '.join(self._by_name)}")
        given: dict[str, Any] = checked(arguments, self._by_name[name])
        tool = self.chosen.functions[name]
        own = self.chosen.environments
        if own is not None and environment is not None and name in own.tools:
            tool = getattr(environment, name)
        hidden = {"images": images, "view": self.view}
        given |= {key: value for key, value in hidden.items() if key in signature(tool).parameters}
        if OURS.get(name) is tool:
            try:
                return self._parts(tool(**given), len(images))
            except ValueError as error:
                raise CallError(str(error)) from error
        given = {key: own_copy(value) for key, value in given.items()}
        # What is returned may be read late, or be slow to look at: that is the tool's time, too.
        with limited(f"tool {name}", self.options.seconds, seed):
            return self._parts(tool(**given), len(images))

    def _say_late(self, name: str) -> None:
        if not self._said_late:
            late = f"tools: {name} took longer than adora_tool_options.seconds"
            print(
                f"{late}: {self.options.seconds:g}; a resumed run may differ, as it may be in "
                "time there",
                file=sys.stderr,
            )
        self._said_late = True

    def _parts(self, result: Any, before: int) -> list[Part]:
        """A tool's result as text and pictures that the model's processor takes.

        Raises `CallError`, and what an object of somebody else's raises when it is looked at.
        """
        parts = list[Part]()
        length = 0
        pictures = 0
        listed = result if isinstance(result, list | tuple) else [result]
        for one in listed:
            part = self._part(one)
            parts.append(part)
            if isinstance(part, str):
                length += len(part)
            else:
                pictures += 1
            # Within the loop, since a list of somebody's class may have no end.
            if length > self.options.max_text or len(parts) > _MOST_PARTS:
                raise CallError(
                    f"the tool's text has {length} characters, at most {self.options.max_text}"
                )
            if before + pictures > self.options.images:
                raise CallError(f"no further pictures, there are {before} of {self.options.images}")
        return parts or ["nothing"]

    def _part(self, value: Any) -> Part:
        if isinstance(value, Mapping):  # TRL's parts
            kind = value.get("type")
            if isinstance(kind, str) and kind in ("text", "image"):
                value = value.get(kind)
        if isinstance(value, Image.Image):
            return self._picture(value)
        if isinstance(value, str):
            return clean(value)
        try:
            value = value.item() if hasattr(value, "item") else value
            return clean(json.dumps(value, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError):
            raise CallError(
                f"the tool returned a {type(value).__name__}, no text and no picture"
            ) from None

    def _picture(self, image: Image.Image) -> Image.Image:
        if self.view is None:
            raise CallError("the tool returned a picture, and the model reads text alone")
        try:
            image = as_shown(image)
        except UnreadableImageError as error:
            if error.kind == "image_too_large":
                (wide, high) = image.size
                raise CallError(
                    f"the tool's picture has {wide} x {high} pixels, too many"
                ) from None
            raise CallError(f"the tool's picture cannot be read ({error})") from None
        (wide, high) = image.size
        unit = self.view.unit
        if min(wide, high) < unit or max(wide, high) >= WIDEST * min(wide, high):
            raise CallError(
                f"the tool's picture has {wide} x {high} pixels; sides of at least {unit}"
            )
        try:
            size = size_within(
                wide,
                height=high,
                min_pixels=None,
                max_pixels=self.options.max_pixels or self.view.high,
                unit=unit,
            )
        except ValueError as error:
            raise CallError(f"the picture has {wide} x {high} pixels: {error}") from None
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)
