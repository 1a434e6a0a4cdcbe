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

from adora_vl.config.blocks import ToolOptions
from adora_vl.data.images import MAX_DECODED_PIXELS, WIDEST, size_within
from adora_vl.data.prompt_lengths import Limits
from adora_vl.data.prompts import NO_CALLS_LEFT, tool_response
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
    return View(pixels.low, pixels.high, pixels.unit, relative) if sees_images(config) else None


class Toolbox:
    """Answers the calls of a run."""

    def __init__(self, chosen: ChosenTools, options: ToolOptions, view: View | None) -> None:
        """`view`: what the model sees of a picture; None: it reads text alone."""
        self.chosen = chosen
        self.options = options
        self.view = view
        self.schemas = chosen.schemas(view)
        self._by_name = {schema["function"]["name"]: schema for schema in self.schemas}
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
            failed = False
            name = ""
            try:
                if number >= self.options.calls_per_turn:
                    raise CallError(
                        f"too many calls in a turn, at most {self.options.calls_per_turn}"
                    )
                name, arguments = read_call(written)
                said = self._parts(
                    self._called(name, arguments, shown, f"{seed}/{number}", environment),
                    len(shown),
                )
            except CallError as error:
                failed = True
                said = [error_line(str(error))]
            pictures = [part for part in said if isinstance(part, Image.Image)]
            words: list[Part] = []
            for part in said:
                words += ["\n"] if words else []
                if isinstance(part, Image.Image):
                    words += [f"Picture {len(shown)}: ", part]
                    shown.append(part)
                else:
                    words.append(part)
            parts += [*(["\n"] if number else []), *tool_response(words)]
            said_text = "\n".join(
                [*(part for part in said if isinstance(part, str)), *["<image>"] * len(pictures)]
            )
            calls.append(Call(name, written, said_text, time.perf_counter() - began, failed, -1))
            if number >= self.options.calls_per_turn:
                break  # one line for all that are too many
        if not calls:
            return None
        return ToolAnswer((*parts, *([f"\n{NO_CALLS_LEFT}"] if last else [])), tuple(calls))

    def _called(
        self,
        name: str,
        arguments: Mapping[str, Any],
        images: Sequence[Image.Image],
        seed: str,
        environment: Any,
    ) -> Any:
        """What a tool returned. Raises `CallError`."""
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
                return tool(**given)
            except ValueError as error:
                raise CallError(str(error)) from error
        seconds = self.options.seconds
        given = {key: own_copy(value) for key, value in given.items()}
        try:
            with limited(f"tool {name}", seconds, seed):
                return tool(**given)
        except KeyboardInterrupt:
            raise
        except OverdueError:
            if not self._said_late:
                late = f"tools: {name} took longer than adora_tool_options.seconds: {seconds:g}"
                print(
                    f"{late}; a resumed run may differ, as it may be in time there", file=sys.stderr
                )
            self._said_late = True
            raise CallError(f"the tool took longer than {seconds:g} s") from None
        except SystemExit:
            raise CallError("the tool called sys.exit") from None
        except BaseException as error:
            raise CallError(in_one_line(error)) from None

    def _parts(self, result: Any, before: int) -> list[Part]:
        """A tool's result as text and pictures that the model's processor takes.

        Raises `CallError`.
        """
        found = [
            self._part(one) for one in (result if isinstance(result, list | tuple) else [result])
        ]
        length = sum(len(part) for part in found if isinstance(part, str))
        if length > self.options.max_text:
            raise CallError(
                f"the tool's text has {length} characters, at most {self.options.max_text}"
            )
        if before + sum(isinstance(part, Image.Image) for part in found) > self.options.images:
            raise CallError(f"no further pictures, there are {before} of {self.options.images}")
        return found or ["nothing"]

    def _part(self, value: Any) -> Part:
        if isinstance(value, Mapping) and value.get("type") in ("text", "image"):  # TRL's parts
            value = value.get(value["type"])
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
        (wide, high) = image.size
        unit = self.view.unit
        if wide * high > MAX_DECODED_PIXELS:
            raise CallError(f"the tool's picture has {wide} x {high} pixels, too many")
        if min(wide, high) < unit or max(wide, high) >= WIDEST * min(wide, high):
            raise CallError(
                f"the tool's picture has {wide} x {high} pixels; sides of at least {unit}"
            )
        try:
            image.load()
            image = image.convert("RGB")
        except Exception as error:  # what Pillow raises for a file that it reads late
            raise CallError(f"the tool's picture cannot be read ({in_one_line(error)})") from None
        try:
            size = size_within(wide, high, None, self.options.max_pixels or self.view.high, unit)
        except ValueError as error:
            raise CallError(f"the picture has {wide} x {high} pixels: {error}") from None
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)
