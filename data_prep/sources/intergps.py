r"""Geometry3K in the layout of lupantech/InterGPS: `{train,val,test}/{number}/data.json` and `img_diagram.png`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from adora_vl.errors import UserError
from data_prep.clean import RawProblem, RowError

_SPLITS = {"train": "train", "validation": "val", "test": "test"}  # ours: theirs
_ACCENTED = re.compile(
    r"\\(widehat|overarc|overline|overrightarrow|overleftrightarrow)\s+([A-Z]'?(?: ?[A-Z]'?)*)(?![A-Za-z'])"
)


def readable(text: str) -> str:
    r"""`m \widehat{A B}` for `m \widehat A B`, whose accent would stand over the A alone. All else stays as it is."""
    return _ACCENTED.sub(r"\\\1{\2}", text).strip()


class InterGPS:
    """The three folders. Raises `UserError` where none of them holds a problem."""

    def __init__(self, root: Path) -> None:
        self._folders = {split: _numbered(root / name) for split, name in _SPLITS.items()}
        self.sizes = {split: len(folders) for split, folders in self._folders.items() if folders}
        if not self.sizes:
            raise UserError(
                f"input: {str(root)!r} has no problem folder such as train/0 with a data.json; "
                f"give the folder that holds {', '.join(_SPLITS.values())}"
            )

    def problems(self, split: str) -> Iterator[Callable[[], RawProblem]]:
        """The problems in the order of their numbers."""
        return (partial(_read, folder, split) for folder in self._folders[split])


def _numbered(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(
        (path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()), key=lambda p: int(p.name)
    )


def _read(folder: Path, split: str) -> RawProblem:
    row_id = f"geometry3k/{split}/{folder.name}"
    path, diagram = folder / "data.json", folder / "img_diagram.png"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        picture = diagram.read_bytes()
    except OSError as error:
        raise RowError(row_id, f"{error.filename} cannot be read ({error.strerror})", "put the file there") from error
    except ValueError as error:
        raise RowError(row_id, f"{path} is not JSON ({error})", "download the problem again") from error
    if not isinstance(data, dict):
        raise RowError(row_id, f"{path} is not a JSON object but {data!r:.40}", "download the problem again")
    field = partial(_field, data, row_id, path)
    return RawProblem(
        id=row_id,
        split=split,
        source="geometry3k",
        origin=str(folder),
        images=(picture,),
        problem=readable(field("problem_text", str)),
        answer=field("answer", str),
        choices=tuple(field("choices", list)),
        goal=", ".join(field("problem_type_goal", list, [])),
        shapes=tuple(field("problem_type_graph", list, [])),
        solution=field("detailed_solution", str, "").strip(),
    )


def _field(
    data: dict[str, Any], row_id: str, path: Path, name: str, kind: type[str] | type[list[str]], default: Any = None
) -> Any:
    """`data[name]`, a text or a list of texts. Raises `RowError` where it is neither, or missing without a default."""
    value = data.get(name, default)
    if isinstance(value, kind) and all(isinstance(item, str) for item in value):
        return value
    expected = "a text" if kind is str else "a list of texts"
    found = f"{value!r:.60}" if name in data else "missing"
    raise RowError(row_id, f"{name!r} is {found}", f"make it {expected} in {path}")
