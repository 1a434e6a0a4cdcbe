"""Calls each tool of the user twice before a run, in the same state.

A tool that answers in two ways uses a source that the run does not control, and a resumed run would
not repeat its answers.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from adora_vl.rollout.turns import CALL, ToolAnswer
from adora_vl.tools.ours import BUILT_IN_TOOLS
from adora_vl.tools.room import shortest_value
from adora_vl.tools.run import Toolbox

_PLAIN = {"integer": 1, "number": 1.0, "string": "a", "boolean": False, "array": [], "object": {}}
_SHOWN = 40  # characters of an answer


def unsteady_tools(
    toolbox: Toolbox, images: Sequence[Image.Image] = (), environments: Sequence[Any] = ()
) -> list[str]:
    """Return a line for each tool that answers the same call in two ways.

    The arguments are invented from its schema, so a tool may refuse all of them; it then gets no
    line.

    Args:
        toolbox: the tools of the run.
        images: the pictures of a problem.
        environments: two environments that were reset alike, for tools that are their methods; with
            none these tools are skipped.
    """
    lines = []
    environments_of_run = toolbox.chosen.environments
    for schema in toolbox.schemas:
        function = schema["function"]
        name = function["name"]
        is_method = environments_of_run is not None and name in environments_of_run.tools
        is_built_in = BUILT_IN_TOOLS.get(name) is toolbox.chosen.functions[name]
        lacks_environment = is_method and not environments
        if is_built_in or lacks_environment:
            continue
        pair = environments if is_method else (None, None)
        answers = _two_answers(toolbox, function=function, images=images, environments=pair)
        if answers is not None:
            lines.append(
                f"tools: {name!r} answers the same call in two ways ({answers[0]} and "
                f"{answers[1]}), so a resumed run may differ; draw from random, numpy.random or "
                "torch, whose states are set for each call, and not from "
                "numpy.random.default_rng() without a seed, the clock or the machine"
            )
    return lines


def _two_answers(
    toolbox: Toolbox,
    function: Mapping[str, Any],
    images: Sequence[Image.Image],
    environments: Sequence[Any],
) -> tuple[str, str] | None:
    """Return both answers to the first call that a tool answers in two ways.

    None without such a call. Calls are tried until one does not fail; the rest is not tried.
    """
    for arguments in _trial_arguments(function["parameters"]):
        call = json.dumps({"name": function["name"], "arguments": arguments})
        text = f"{CALL}{call}"
        first = toolbox.answer(text, images, seed="try", last=False, environment=environments[0])
        second = toolbox.answer(text, images, seed="try", last=False, environment=environments[1])
        assert first is not None, "the text has a call"
        assert second is not None, "the text has a call"
        if not _same(first, second):
            return _in_short(first), _in_short(second)
        if not first.calls[0].failed:
            return None
    return None


def _trial_arguments(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return sets of arguments in the order in which they are tried.

    Plain values come first, then the shortest ones.
    """
    properties = parameters["properties"]
    required = parameters.get("required", ())
    plain = dict[str, Any]()
    for name in required:
        schema = properties[name]
        kind = schema.get("type")
        has_plain = not schema.get("enum") and isinstance(kind, str) and kind in _PLAIN
        plain[name] = _PLAIN[kind] if has_plain else shortest_value(schema)
    shortest = {name: shortest_value(properties[name]) for name in required}
    return [plain] if plain == shortest else [plain, shortest]


def _same(first: ToolAnswer, second: ToolAnswer) -> bool:
    """Return whether two answers have the same texts and pictures."""
    return [_content(part) for part in first.parts] == [_content(part) for part in second.parts]


def _content(part: str | Image.Image) -> object:
    """Return what is compared of a part: a text, or the size and pixels of a picture."""
    return part if isinstance(part, str) else (part.size, part.tobytes())


def _in_short(answer: ToolAnswer) -> str:
    """Return the beginning of the text of an answer, on one line."""
    text = " ".join(answer.calls[0].text.split())
    return f"{text[:_SHOWN]!r}"
