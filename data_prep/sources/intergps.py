r"""Geometry3K in the layout of lupantech/InterGPS: `{train,val,test}/{number}/data.json` and `img_diagram.png`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.clean_row import RawProblem, RowError
from data_prep.sources.latex import readable
from data_prep.sources.places import Place, places

DIAGRAMS = {"plain": "img_diagram.png", "point": "img_diagram_point.png"}  # point: with every vertex lettered
_SPLITS = {"train": "train", "validation": "val", "test": "test"}  # ours: theirs


class InterGPS:
    """Folders or zip files. Raises `UserError` where none of them holds a problem."""

    revision: str | None = None

    def __init__(self, root: Path, diagram: str = "plain") -> None:
        self._diagram = DIAGRAMS[diagram]
        found = places(root)
        self._places = {split: found[name] for split, name in _SPLITS.items() if name in found}
        self.sizes = {split: len(held) for split, held in self._places.items()}

    def problems(self, split: str) -> Iterator[Callable[[], RawProblem]]:
        """The problems in the order of their numbers."""
        return (partial(_read, place, split, self._diagram) for place in self._places[split])


def _read(place: Place, split: str, diagram: str) -> RawProblem:
    """Read one problem. Raises `RowError`, with the original bytes, if a file or a field is not usable."""
    row_id = f"geometry3k/{split}/{place.number}"
    originals: list[bytes] = []
    try:
        for name in ("data.json", diagram):
            originals.append(place.read(name))
    except OSError as error:
        wrong = f"{place}/{name} cannot be read ({error.strerror})"
        raise RowError(row_id, "file_missing", wrong, "put the file there", originals=originals) from error
    refuse = partial(RowError, row_id, originals=originals)
    try:
        data = json.loads(originals[0].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise refuse("not_json", f"{place}/data.json is not JSON ({error})", "download the problem again") from error
    if not isinstance(data, dict):
        wrong = f"{place}/data.json is not a JSON object but {data!r:.40}"
        raise refuse("not_json", wrong, "download the problem again")
    field = partial(_field, data, refuse, f"{place}/data.json")
    return RawProblem(
        id=row_id,
        split=split,
        source="geometry3k",
        origin=str(place),
        images=(originals[1],),
        problem=readable(field("problem_text", str)),
        answer=field("answer", str),
        choices=tuple(field("choices", list)),
        goal=", ".join(field("problem_type_goal", list, [])),
        shapes=tuple(field("problem_type_graph", list, [])),
        solution=field("detailed_solution", str, "").strip(),
        other_files=(originals[0],),
    )


def _field(
    data: dict[str, Any],
    refuse: Callable[..., RowError],
    path: str,
    name: str,
    kind: type[str] | type[list[str]],
    default: Any = None,
) -> Any:
    """`data[name]`, a text or a list of texts. Raises `RowError` where it is neither, or missing without a default."""
    value = data.get(name, default)
    if isinstance(value, kind) and all(isinstance(item, str) and _is_text(item) for item in value):
        return value
    expected = "a text" if kind is str else "a list of texts"
    found = f"{value!r:.60}" if name in data else "missing"
    raise refuse("field_type", f"{name!r} is {found}", f"make it {expected} in {path}", record=data)


def _is_text(value: str) -> bool:
    """Whether it can be stored: JSON can spell half of a surrogate pair, which is no character."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
