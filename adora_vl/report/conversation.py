"""The turns of a rollout with calls as the page shows them, and where its calls look."""

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adora_vl.record.rollouts import IMAGES, ROLLOUTS, picture_size
from adora_vl.tools.calls import CallError, calls_in, read_call, without_calls
from adora_vl.tools.ours import OURS, View
from adora_vl.utils.files import leads_out

Json = dict[str, Any]
# The points of a call of ours, by the names of their coordinates; `zoom` has a region of two.
_POINTS = (("x", "y"), ("x1", "y1"), ("x2", "y2"), ("x3", "y3"))
_PLACEHOLDER = "<image>"


class TurnReader:
    """Reads the turns of recorded rollouts."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Take the folder of a run, and the settings of its record.

        The settings have the `view` of the model in a run with tools: records that were written
        before it was kept have none, and their calls are not drawn.
        """
        self._folder = folder
        view = settings.get("view")
        self._view = View(**view) if view else None
        self._sizes: dict[str, tuple[int, int] | None] = {}

    def turns(self, row: Mapping[str, Any]) -> list[Json] | None:
        """The turns of a recorded rollout; None in a run without tools.

        The calls of a turn are taken out of its text and put beside it. Each has its `text`, such
        as `zoom(0, 49, 7, 56)`, and where it looks: the name of the `picture`, and the `points` in
        shares of its width and height. What the policy wrote but cannot be read as a call stays in
        the text.
        """
        if row.get("turns") is None:
            return None
        pictures = list(row["images"] or [])
        turns = []
        for turn in row["turns"]:
            text = turn["text"] or ""
            calls: list[Json] = []
            if turn["by"] == "model":
                calls = [self._call(written, pictures) for written in calls_in(text)]
                text = without_calls(text)
            else:
                # stands for a picture, which the page shows
                text = "\n".join(line for line in text.splitlines() if line != _PLACEHOLDER)
            turns.append({**turn, "text": text, "calls": calls})
            pictures += turn["images"]
        return turns

    def _call(self, written: str, pictures: Sequence[str]) -> Json:
        try:
            name, arguments = read_call(written)
        except CallError:
            return {"text": written, "picture": None, "points": None}
        call: Json = {"text": spelled_call(name, arguments), "picture": None, "points": None}
        number = arguments.get("picture", 0)
        is_number = isinstance(number, int) and 0 <= number < len(pictures)
        if name in OURS and is_number and self._view is not None:
            points = self._points(arguments, pictures[number], self._view)
            if points:
                call |= {"picture": pictures[number], "points": points, "region": name == "zoom"}
        return call

    def _points(self, arguments: Json, picture: str, view: View) -> list[tuple[float, float]]:
        """The points of a call in shares of the picture; empty where they are not all within it."""
        size = self._size(picture)
        if size is None:
            return []
        try:
            width, height = view.scale_of(size)
        except ValueError:  # the processor would refuse a picture of this size
            return []
        points = []
        for x_name, y_name in _POINTS:
            x = arguments.get(x_name)
            y = arguments.get(y_name)
            if isinstance(x, int | float) and isinstance(y, int | float):
                points.append((round(x / width, 4), round(y / height, 4)))
        inside = all(0 <= share <= 1 for point in points for share in point)
        return points if inside else []

    def _size(self, picture: str) -> tuple[int, int] | None:
        """The size that a recorded picture had, in pixels; None where its file is not there."""
        if picture not in self._sizes:
            path = self._folder / ROLLOUTS / IMAGES / Path(picture).name
            is_ours = path.is_file() and not leads_out(self._folder, path)
            self._sizes[picture] = picture_size(path) if is_ours else None
        return self._sizes[picture]


def spelled_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as a person writes it, `zoom(0, 49, 7, 56)`.

    The arguments of a tool of ours stand in its order, those of another tool with their names.
    """
    order: list[str] = []
    if name in OURS:
        order = list(inspect.signature(OURS[name]).parameters)
    words: list[str] = []
    for parameter, value in arguments.items():
        text = json.dumps(value, ensure_ascii=False)
        is_in_place = len(words) < len(order) and order[len(words)] == parameter
        words.append(text if is_in_place else f"{parameter}={text}")
    return f"{name}({', '.join(words)})"
