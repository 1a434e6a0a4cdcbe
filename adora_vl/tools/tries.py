"""Calls each tool of the user twice before a run, in the same state.

A tool that answers in two ways uses a source that the run does not control, and a resumed run would
not repeat its answers.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from adora_vl.rollout.turns import CALL_TAG, ToolAnswer
from adora_vl.tools.ours import BUILT_IN_TOOLS
from adora_vl.tools.room import shortest_value
from adora_vl.tools.run import Toolbox

_PLAIN_VALUE_BY_JSON_TYPE = {
    "integer": 1,
    "number": 1.0,
    "string": "a",
    "boolean": False,
    "array": [],
    "object": {},
}
_MAX_SHOWN_CHARS = 40  # of an answer


def nondeterminism_warnings(
    toolbox: Toolbox, images: Sequence[Image.Image] = (), environments: Sequence[Any] = ()
) -> list[str]:
    """Call each tool of the user twice, and return a warning for each that gives two answers.

    Such a tool is not deterministic, so a resumed run could differ. The arguments of the calls are
    made up from the tool's schema. If the tool refuses them, nothing is known and nothing returned.

    Args:
        toolbox: the tools of the run.
        images: the pictures of a problem.
        environments: two environments that were reset alike, for tools that are their methods.
            Without them these tools are skipped.
    """
    lines = []
    environments_of_run = toolbox.tool_set.environments
    for schema in toolbox.schemas:
        function_schema = schema["function"]
        name = function_schema["name"]
        is_method = environments_of_run is not None and name in environments_of_run.tools
        is_built_in = BUILT_IN_TOOLS.get(name) is toolbox.tool_set.functions[name]
        lacks_environment = is_method and not environments
        if is_built_in or lacks_environment:
            continue
        environment_pair = environments if is_method else (None, None)
        answers = _different_answers(
            toolbox,
            function_schema=function_schema,
            images=images,
            environments=environment_pair,
        )
        if answers is not None:
            first, second = answers
            lines.append(
                f"tools: {name!r} answers the same call in two ways ({first} and "
                f"{second}), so a resumed run may differ; draw from random, numpy.random or "
                "torch, whose states are set for each call, and not from "
                "numpy.random.default_rng() without a seed, the clock or the machine"
            )
    return lines


def _different_answers(
    toolbox: Toolbox,
    function_schema: Mapping[str, Any],
    images: Sequence[Image.Image],
    environments: Sequence[Any],
) -> tuple[str, str] | None:
    """Make the same call of a tool twice, and return both answers if they differ, else None.

    Made-up calls are tried until the tool accepts one. The answers are the beginnings of their
    texts, for a message.

    Args:
        toolbox: the tools of the run.
        function_schema: the schema of the tool.
        images: the pictures that the tool gets.
        environments: the environment of the first and of the second call, or None for both.
    """
    for arguments in _trial_arguments(function_schema["parameters"]):
        call = json.dumps({"name": function_schema["name"], "arguments": arguments})
        text = f"{CALL_TAG}{call}"
        first = toolbox.answer(text, images, seed="try", last=False, environment=environments[0])
        second = toolbox.answer(text, images, seed="try", last=False, environment=environments[1])
        assert first is not None, "the text has a call"
        assert second is not None, "the text has a call"
        if not _are_same_answers(first, second):
            return _shorten(first), _shorten(second)
        if not first.calls[0].failed:
            return None
    return None


def _trial_arguments(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make up arguments that fit the schema of a tool's parameters.

    For example, for a required integer `n` and string `s` the result is
    [{"n": 1, "s": "a"}, {"n": 0, "s": ""}]: first plain values, then the shortest ones. If both are
    equal, there is only one set.
    """
    properties = parameters["properties"]
    required = parameters.get("required", ())
    plain_arguments = dict[str, Any]()
    for name in required:
        schema = properties[name]
        json_type = schema.get("type")
        is_single_type = isinstance(json_type, str) and json_type in _PLAIN_VALUE_BY_JSON_TYPE
        if is_single_type and not schema.get("enum"):
            plain_arguments[name] = _PLAIN_VALUE_BY_JSON_TYPE[json_type]
        else:
            plain_arguments[name] = shortest_value(schema)
    shortest_arguments = {name: shortest_value(properties[name]) for name in required}
    if plain_arguments == shortest_arguments:
        return [plain_arguments]
    return [plain_arguments, shortest_arguments]


def _are_same_answers(first: ToolAnswer, second: ToolAnswer) -> bool:
    """Return whether two answers have the same texts and pictures."""
    return [_comparable_content(part) for part in first.parts] == [
        _comparable_content(part) for part in second.parts
    ]


def _comparable_content(part: str | Image.Image) -> object:
    """Return what is compared of a part: a text, or the size and pixels of a picture."""
    return part if isinstance(part, str) else (part.size, part.tobytes())


def _shorten(answer: ToolAnswer) -> str:
    """Return the beginning of the text of an answer, on one line."""
    text = " ".join(answer.calls[0].text.split())
    return f"{text[:_MAX_SHOWN_CHARS]!r}"
