"""Finds and reads the problems of Geometry3K in the folders or zip files of its authors."""

from __future__ import annotations

import errno
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from adora_vl.conversion.pipeline import SplitRows
from adora_vl.conversion.problem import MAX_FILE_BYTES, RawProblem, RowError, can_encode_utf8
from adora_vl.geometry.logic_form import read_form_from_record
from adora_vl.utils.cli import read_json
from adora_vl.utils.errors import UserError
from data_prep.problem_text import mend_latex
from data_prep.solved_rows import fact_fields

# A file in the folder of a problem, such as `geometry3k/train/17/data.json`.
_PROBLEM_FILE_PATTERN = re.compile(r"(?:(?:.*/)?(?P<split>train|val|test)/|.*/)?\d+/[^/]*")
_AUTHORS_SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class ProblemFolder:
    """The folder of one problem, on the disk or in a zip file."""

    path: Path  # the folder, or the zip file
    folder_in_zip: str | None = None  # such as `train/17/`; None for a folder on the disk

    def __str__(self) -> str:
        return str(self.path) if self.folder_in_zip is None else f"{self.path}/{self.folder_in_zip}"

    @property
    def number(self) -> int:
        """The number of the problem, which is the name of its folder."""
        name = self.folder_in_zip or self.path.name
        return int(name.rstrip("/").rsplit("/", 1)[-1])

    def read(self, name: str) -> bytes:
        """Return the bytes of the file `name` in the folder of this problem.

        Raises `OSError`, also for a damaged or encrypted member of a zip file, and for a file that
        is too large.
        """
        if self.folder_in_zip is None:
            path = self.path / name
            if path.stat().st_size > MAX_FILE_BYTES:
                raise OSError(errno.EFBIG, f"it has over {MAX_FILE_BYTES} bytes", str(path))
            return path.read_bytes()
        member = self.folder_in_zip + name
        try:
            archive = _open_zip(self.path)
            if archive.getinfo(member).file_size > MAX_FILE_BYTES:
                raise OSError(errno.EFBIG, f"it unpacks to over {MAX_FILE_BYTES} bytes", member)
            return archive.read(member)
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "not in the zip file", member) from None
        # What `zipfile` raises for a damaged, encrypted or strangely compressed member.
        except (
            zipfile.BadZipFile,
            zlib.error,
            RuntimeError,
            NotImplementedError,
            EOFError,
        ) as error:
            raise OSError(errno.EIO, str(error), member) from error


def find_problem_folders(root: Path) -> dict[str, list[ProblemFolder]]:
    """Return the folders of all problems by the authors' splits `train`, `val` and `test`.

    The problems of a split are sorted by number, and a split without problems is left out. `root`
    is one zip file, or a folder with the folders `train`, `val` and `test` or with zip files. A
    split is read from the folder of its name, else from a zip file.

    Raises `UserError` for a bad zip file, for two zip files with the same split, and where `root`
    has no problem.
    """
    folders_by_split: dict[str, list[ProblemFolder]] = {}
    if root.is_file():
        folders_by_split = _folders_in_zip(root)
    elif root.is_dir():
        for split in _AUTHORS_SPLITS:
            paths = [path for path in root.glob(f"{split}/*/") if path.name.isdecimal()]
            if paths:
                folders_by_split[split] = [ProblemFolder(path) for path in paths]
        if len(folders_by_split) < len(_AUTHORS_SPLITS):
            # A folder goes before a zip file with the same split.
            folders_by_split = _folders_in_zips(sorted(root.glob("*.zip"))) | folders_by_split
    else:
        raise UserError(f"input: there is no file or folder {str(root)!r}")
    if not folders_by_split:
        raise UserError(
            f"input: {str(root)!r} has no problem folder such as train/0 with a data.json, and no "
            f"zip file with one; give the folder that holds {', '.join(_AUTHORS_SPLITS)}, or a zip file "
            "of it"
        )
    return {
        split: sorted(folders_by_split[split], key=lambda folder: (folder.number, str(folder)))
        for split in _AUTHORS_SPLITS
        if split in folders_by_split
    }


def _folders_in_zips(paths: list[Path]) -> dict[str, list[ProblemFolder]]:
    """Return the folders of problems in several zip files by the authors' splits.

    Where several files have problems of a split, the file named after the split is read, such as
    `train.zip`.

    Raises `UserError` where several files have a split, and none of them is named after it.
    """
    folders_by_file = {path: _folders_in_zip(path) for path in paths}
    folders_by_split = {}
    for split in _AUTHORS_SPLITS:
        files_with_split = [path for path in paths if split in folders_by_file[path]]
        files_named_after_it = [path for path in files_with_split if path.stem == split]
        candidates = files_named_after_it or files_with_split
        if len(candidates) > 1:
            names = " and ".join(repr(str(path)) for path in candidates[:2])
            raise UserError(
                f"input: {names} both hold problems of {split!r}; give one of them with --input"
            )
        if candidates:
            folders_by_split[split] = folders_by_file[candidates[0]][split]
    return folders_by_split


def _folders_in_zip(path: Path) -> dict[str, list[ProblemFolder]]:
    """Return the folders of problems in a zip file by the authors' splits.

    The folder of a problem has a number for its name. For example:

        geometry3k.zip with geometry3k/train/17/data.json   problem 17 of train
        train.zip with 17/data.json                         problem 17 of train

    In the second case, without any folder of a split, the name of the zip file says the split.

    Raises `UserError` for a file that cannot be read, or whose problems belong to no split.
    """
    try:
        names = _open_zip(path).namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(
            f"input: {str(path)!r} is not a readable zip file ({error}); download it again"
        ) from error
    split_by_folder: dict[str, str] = {}
    folders_without_split: list[str] = []
    for name in names:
        match = _PROBLEM_FILE_PATTERN.fullmatch(name)
        if not match or name.startswith("__MACOSX/"):  # macOS adds such files to its archives
            continue
        folder = name[: name.rindex("/") + 1]
        split = match["split"]
        if split is not None:
            split_by_folder[folder] = split
        else:
            folders_without_split.append(folder)
    if not split_by_folder and folders_without_split:
        if path.stem not in _AUTHORS_SPLITS:
            raise UserError(
                f"input: the problems in {str(path)!r} are in no folder "
                f"{', '.join(_AUTHORS_SPLITS)}; call the file after its split, such as train.zip"
            )
        split_by_folder = dict.fromkeys(folders_without_split, path.stem)
    folders_by_split: dict[str, list[ProblemFolder]] = {}
    for folder, split in split_by_folder.items():
        folders_by_split.setdefault(split, []).append(ProblemFolder(path, folder_in_zip=folder))
    return folders_by_split


@lru_cache(maxsize=4)
def _open_zip(path: Path) -> zipfile.ZipFile:
    """Open a zip file, once in each process; it stays open until the process ends."""
    return zipfile.ZipFile(path)


# The files of a problem's diagram; in `point` every vertex has a letter.
FILE_BY_DIAGRAM = {"plain": "img_diagram.png", "point": "img_diagram_point.png"}
OUR_SPLIT_BY_AUTHORS_SPLIT = {"train": "train", "val": "validation", "test": "test"}


def rows_of_folders(root: Path, diagram: str = "plain") -> dict[str, SplitRows]:
    """Return by split the problems in the authors' folders or zip files, to be read one by one.

    `root` is a zip file, or the folder of the folders or zip files. `diagram` is a key of
    `FILE_BY_DIAGRAM`: the picture as printed, or with a letter at every vertex.

    Raises `UserError` where `find_problem_folders` does.
    """
    rows_by_split = {}
    for authors_split, folders in find_problem_folders(root).items():
        split = OUR_SPLIT_BY_AUTHORS_SPLIT[authors_split]
        read_folder = partial(_read_folder, split=split, diagram_file=FILE_BY_DIAGRAM[diagram])
        readers = [partial(read_folder, folder) for folder in folders]
        rows_by_split[split] = SplitRows.from_readers(readers)
    return rows_by_split


def _read_folder(folder: ProblemFolder, *, split: str, diagram_file: str) -> RawProblem:
    """Return the problem in a folder, from its `data.json` and its picture `diagram_file`.

    The facts of the diagram are in a third file, `logic_form.json`, which may be missing.

    Raises `RowError` for a file or a field that cannot be used. The error has the bytes that were
    read, for the quarantine of unusable rows.
    """
    row_id = f"geometry3k/{split}/{folder.number}"
    original_files: list[bytes] = []
    try:
        for name in ("data.json", diagram_file):
            original_files.append(folder.read(name))
    except OSError as error:
        raise RowError(
            row_id=row_id,
            reason="file_missing",
            wrong=f"{folder}/{name} cannot be read ({error.strerror})",
            remedy="put the file there",
            original_files=original_files,
        ) from error
    json_bytes, picture_bytes = original_files
    data = _read_data(json_bytes, folder=folder, row_id=row_id, original_files=original_files)
    problem = data.text("problem_text")
    # Without a readable logic form, which states the facts of the diagram, the row has no facts.
    form = None
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        form = read_form_from_record(read_json(folder.read("logic_form.json").decode("utf-8")))
    return RawProblem(
        id=row_id,
        split=split,
        source="geometry3k",
        origin=str(folder),
        images=(picture_bytes,),
        problem=mend_latex(problem),
        answer=data.text("answer"),
        choices=tuple(data.texts("choices")),
        goal=", ".join(data.texts("problem_type_goal", default=[])),
        shapes=tuple(data.texts("problem_type_graph", default=[])),
        solution=data.text("detailed_solution", default="").strip(),
        further_files=(json_bytes,),
        **fact_fields(form, problem, row_id),
    )


def _read_data(
    json_bytes: bytes, folder: ProblemFolder, row_id: str, original_files: Sequence[bytes]
) -> _ProblemData:
    """Return the fields of a problem's `data.json`.

    Args:
        json_bytes: the content of the file.
        folder: the folder that has it, for messages.
        row_id: the id of the row that the problem becomes.
        original_files: the bytes of the problem's files, which an error takes to the quarantine.

    Raises:
        RowError: the bytes are no object of JSON.
    """
    path = f"{folder}/data.json"
    row_error = partial(RowError, row_id, original_files=original_files)
    try:
        fields = read_json(json_bytes.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise row_error(
            reason="not_json",
            wrong=f"{path} is not JSON ({error})",
            remedy="download the problem again",
        ) from error
    if not isinstance(fields, dict):
        raise row_error(
            reason="not_json",
            wrong=f"{path} is not a JSON object but {fields!r:.40}",
            remedy="download the problem again",
        )
    return _ProblemData(fields, path=path, row_error=row_error)


@dataclass(frozen=True)
class _ProblemData:
    """The fields of a problem's `data.json`, whose types are checked when they are asked for."""

    fields: Mapping[str, Any]
    path: str  # of the file, for messages
    row_error: Callable[..., RowError]  # makes the error for this row

    def text(self, name: str, default: str | None = None) -> str:
        """Return a field that has to be a text.

        Raises `RowError` where it is none, or missing without a default.
        """
        value = self.fields.get(name, default)
        if isinstance(value, str) and can_encode_utf8(value):
            return value
        raise self._type_error(name, value, expected="a text")

    def texts(self, name: str, default: list[str] | None = None) -> list[str]:
        """Return a field that has to be a list of texts.

        Raises `RowError` where it is none, or missing without a default.
        """
        value = self.fields.get(name, default)
        is_list = isinstance(value, list)
        if is_list and all(isinstance(item, str) and can_encode_utf8(item) for item in value):
            texts: list[str] = value
            return texts
        raise self._type_error(name, value, expected="a list of texts")

    def _type_error(self, name: str, value: object, expected: str) -> RowError:
        """Return the error for a field that is missing or of another type than `expected`."""
        actual = f"{value!r:.60}" if name in self.fields else "missing"
        return self.row_error(
            reason="field_type",
            wrong=f"{name!r} is {actual}",
            remedy=f"make it {expected} in {self.path}",
            record=self.fields,
        )
