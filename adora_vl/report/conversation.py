"""The turns of a rollout with tools as the page shows them, and where its calls look."""

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adora_vl.data.prompts import IMAGE_PLACEHOLDER
from adora_vl.record.diagrams import read_original_size
from adora_vl.record.record_files import IMAGES_FOLDER, ROLLOUTS_FOLDER
from adora_vl.tools.calls import CallError, find_calls, read_call, remove_calls
from adora_vl.tools.ours import BUILT_IN_TOOLS, View
from adora_vl.utils.files import escapes_folder

Json = dict[str, Any]
# The arguments of this package's tools that are points of a picture, x and y of each; the two
# points of `zoom` are corners of a region
_POINT_ARGUMENTS = (("x", "y"), ("x1", "y1"), ("x2", "y2"), ("x3", "y3"))


class TurnReader:
    """Reads the turns of recorded rollouts."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Create the reader for the folder of a run and the settings of its record.

        In a run with tools the settings have `view`, the size at which the model sees a picture,
        so that what its calls point at can be drawn into the picture.
        """
        self._folder = folder
        view = settings.get("view")
        self._view = View(**view) if view else None
        self._size_by_picture: dict[str, tuple[int, int] | None] = {}

    def turns(self, row: Mapping[str, Any]) -> list[Json] | None:
        """Return the turns of a recorded rollout for the page; None in a run without tools.

        The calls of a model's turn are taken out of its `text` and put beside it, in `calls`, as
        `_call_to_json` writes them.

        Args:
            row: the recorded row of the rollout.
        """
        if row.get("turns") is None:
            return None
        # The pictures that a call may name by their index: the problem's, then those of tools.
        pictures = list(row["images"] or [])
        turns = []
        for turn in row["turns"]:
            text = turn["text"] or ""
            calls: list[Json] = []
            if turn["by"] == "model":
                calls = [self._call_to_json(call_text, pictures) for call_text in find_calls(text)]
                text = remove_calls(text)
            else:
                # a line of the placeholder stands for a picture, which the page shows instead
                lines = [line for line in text.splitlines() if line != IMAGE_PLACEHOLDER]
                text = "\n".join(lines)
            turns.append({**turn, "text": text, "calls": calls})
            pictures += turn["images"]
        return turns

    def _call_to_json(self, call_text: str, pictures: Sequence[str]) -> Json:
        """Return a call of a tool for the page: its text, and the points of a picture it looks at.

        An example is `{"text": "zoom(0, 49, 7, 56)", "picture": "a.png", "points": [(0.0, 0.5),
        (0.1, 0.6)], "region": True}`. The points are in shares of the picture's width and height,
        and `region` says whether they are corners of a region. A call without points has None for
        the picture and the points, and no `region`.

        Args:
            call_text: what the model wrote. It is shown as it is where it cannot be read as a call.
            pictures: the names of the pictures that the rollout has so far.
        """
        try:
            name, arguments = read_call(call_text)
        except CallError:
            return {"text": call_text, "picture": None, "points": None}
        call: Json = {"text": format_call(name, arguments), "picture": None, "points": None}
        # only the tools of this package have arguments whose meaning is known here
        if name not in BUILT_IN_TOOLS or self._view is None:
            return call
        picture_index = arguments.get("picture", 0)
        if isinstance(picture_index, int) and 0 <= picture_index < len(pictures):
            picture = pictures[picture_index]
            points = self._relative_points(arguments, picture, self._view)
            if points:
                call |= {"picture": picture, "points": points, "region": name == "zoom"}
        return call

    def _relative_points(
        self, arguments: Json, picture: str, view: View
    ) -> list[tuple[float, float]]:
        """Return the points that a call names, x and y in shares of the picture's width and height.

        Args:
            arguments: the arguments of the call. Coordinates are in the units that the model sees.
            picture: the name of the picture.
            view: the size at which the model sees a picture, from which the units follow.

        Returns:
            the points; empty where one lies outside of the picture, or its size is not known.
        """
        size = self._read_size(picture)
        if size is None:
            return []
        try:
            max_x, max_y = view.largest_coordinates(size)
        except ValueError:  # the processor would refuse a picture of this size
            return []
        points = []
        for x_name, y_name in _POINT_ARGUMENTS:
            x = arguments.get(x_name)
            y = arguments.get(y_name)
            if isinstance(x, int | float) and isinstance(y, int | float):
                points.append((round(x / max_x, 4), round(y / max_y, 4)))
        are_inside = all(0 <= x <= 1 and 0 <= y <= 1 for x, y in points)
        return points if are_inside else []

    def _read_size(self, picture: str) -> tuple[int, int] | None:
        """Return the width and height that a recorded picture had when the model saw it, in pixels.

        None where its file is missing or damaged. A link out of the run's folder is not followed.
        """
        if picture not in self._size_by_picture:
            path = self._folder / ROLLOUTS_FOLDER / IMAGES_FOLDER / Path(picture).name
            is_in_run = path.is_file() and not escapes_folder(self._folder, path)
            self._size_by_picture[picture] = read_original_size(path) if is_in_run else None
        return self._size_by_picture[picture]


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call of a tool as Python code, such as `zoom(0, 49, 7, 56)`.

    For a tool of this package, arguments that stand in the order of its parameters have no names.
    For any other tool all arguments have names, such as `search(query="circle")`, since the
    parameters are not known.
    """
    parameters: list[str] = []
    if name in BUILT_IN_TOOLS:
        parameters = list(inspect.signature(BUILT_IN_TOOLS[name]).parameters)
    argument_texts: list[str] = []
    for position, (argument, value) in enumerate(arguments.items()):
        value_text = json.dumps(value, ensure_ascii=False)
        is_in_order = position < len(parameters) and parameters[position] == argument
        argument_texts.append(value_text if is_in_order else f"{argument}={value_text}")
    return f"{name}({', '.join(argument_texts)})"
