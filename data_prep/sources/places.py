"""Numbered problem folders on the disk or inside a zip file, read in the same way."""

from __future__ import annotations

import re
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from adora_vl.errors import UserError

MAX_FILE_BYTES = 64 * 1024**2  # of one file: a small zip file can unpack to terabytes
_NUMBERED = re.compile(r"(?:(?:.*/)?(train|val|test)/|.*/)?(\d+)/[^/]*")
_SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Place:
    """One problem's folder: `path`, or the folder `inside` the zip file `path`."""

    path: Path
    inside: str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.inside is None else f"{self.path}/{self.inside}"

    @property
    def number(self) -> int:
        return int((self.inside or self.path.name).rstrip("/").rsplit("/", 1)[-1])

    def read(self, name: str) -> bytes:
        """The bytes of a file. Raises `OSError`, also for a damaged or encrypted member of a zip file."""
        if self.inside is None:
            path = self.path / name
            if path.stat().st_size > MAX_FILE_BYTES:
                raise OSError(27, f"it has over {MAX_FILE_BYTES} bytes", str(path))
            return path.read_bytes()
        member = self.inside + name
        try:
            archive = _archive(self.path)
            if archive.getinfo(member).file_size > MAX_FILE_BYTES:
                raise OSError(27, f"it unpacks to over {MAX_FILE_BYTES} bytes", member)
            return archive.read(member)
        except KeyError:
            raise FileNotFoundError(2, "not in the zip file", member) from None
        except (zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, EOFError) as error:
            raise OSError(5, str(error), member) from error


def places(root: Path) -> dict[str, list[Place]]:
    """The problems of the authors' splits `train`, `val` and `test`, by number; a split without any is left out.

    `root`: one zip file, or a folder with folders `train/` ... or zip files of any name, whose splits are those of the
    folders inside. A split is read from its folder, else from the zip file of its name, else from the only one that has
    it. Raises `UserError` for a bad zip file, for two that have one split, and where `root` holds no problem.
    """
    if root.is_file():
        found = _zipped(root)
    elif root.is_dir():
        found = {split: folders for split in _SPLITS if (folders := _folders(root / split))}
        if len(found) < len(_SPLITS):
            found = _from_zips(sorted(root.glob("*.zip"))) | found
    else:
        raise UserError(f"input: there is no file or folder {str(root)!r}")
    if not found:
        raise UserError(
            f"input: {str(root)!r} has no problem folder such as train/0 with a data.json, and no zip file with one; "
            f"give the folder that holds {', '.join(_SPLITS)}, or a zip file of it"
        )
    return {split: sorted(found[split], key=lambda place: (place.number, str(place))) for split in found}


def _from_zips(paths: list[Path]) -> dict[str, list[Place]]:
    """The problems of several zip files."""
    held = {path: _zipped(path) for path in paths}
    found = {}
    for split in _SPLITS:
        having = [path for path in paths if split in held[path]]
        named = [path for path in having if path.stem == split] or having
        if len(named) > 1:
            names = " and ".join(repr(str(path)) for path in named[:2])
            raise UserError(f"input: {names} both hold problems of {split!r}; give one of them with --input")
        if named:
            found[split] = held[named[0]][split]
    return found


def _folders(folder: Path) -> list[Place]:
    """The numbered folders directly in `folder`; none if it does not exist."""
    if not folder.is_dir():
        return []
    return [Place(path) for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()]


def _zipped(path: Path) -> dict[str, list[Place]]:
    """The numbered folders of a zip file by the split folder above them; where none has one, by the file's own name."""
    try:
        names = _archive(path).namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"input: {str(path)!r} is not a readable zip file ({error}); download it again") from error
    folders: dict[str, str | None] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match and not name.startswith("__MACOSX/"):
            folders[name[: name.rindex("/") + 1]] = match[1]
    within = {folder: split for folder, split in folders.items() if split}
    if not within and folders:
        if path.stem not in _SPLITS:
            raise UserError(
                f"input: the problems in {str(path)!r} are in no folder {', '.join(_SPLITS)}; "
                "call the file after its split, such as train.zip"
            )
        within = dict.fromkeys(folders, path.stem)
    return {
        split: [Place(path, folder) for folder, its in within.items() if its == split]
        for split in _SPLITS
        if split in within.values()
    }


@lru_cache(maxsize=4)
def _archive(path: Path) -> zipfile.ZipFile:
    """Opened once in each process; it is closed with it."""
    return zipfile.ZipFile(path)
