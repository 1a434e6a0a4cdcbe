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
_NUMBERED = re.compile(r"(?:.*/)?(?:(train|val|test)/)?(\d+)/[^/]*")


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


def places(root: Path, split: str) -> list[Place]:
    """The problems of the authors' split `train`, `val` or `test`, by number, from folders and zip files.

    `root`: the folder that holds `train/` or `train.zip`, or one zip file. Raises `UserError` for a bad zip file.
    """
    if root.is_file():
        found = _zipped(root, split)
    else:
        found = _folders(root / split) or (_zipped(path, split) if (path := root / f"{split}.zip").is_file() else [])
    return sorted(found, key=lambda place: (place.number, str(place)))


def _folders(folder: Path) -> list[Place]:
    if not folder.is_dir():
        return []
    return [Place(path) for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()]


def _zipped(path: Path, split: str) -> list[Place]:
    """The numbered folders of a zip file, below `split/` or, in `split.zip`, at the top."""
    try:
        names = _archive(path).namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"input: {str(path)!r} is not a readable zip file ({error}); download it again") from error
    folders = set()
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match and not name.startswith("__MACOSX/") and (match[1] or path.stem) == split:
            folders.add(name[: name.rindex("/") + 1])
    return [Place(path, folder) for folder in folders]


@lru_cache(maxsize=4)
def _archive(path: Path) -> zipfile.ZipFile:
    """Opened once in each process; it is closed with it."""
    return zipfile.ZipFile(path)
