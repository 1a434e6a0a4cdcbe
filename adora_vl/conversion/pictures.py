"""Reads the picture that a value of a table holds or names.

A value may be bytes, a data URL, Base64, or a path as any system spells it.
"""

import base64
import binascii
import os
import re
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from adora_vl.conversion.chat import picture_of
from adora_vl.conversion.problem import MAX_FILE_BYTES
from adora_vl.data.images import UnreadableImageError, file_within, is_picture
from adora_vl.utils.cli import read_json, shown
from adora_vl.utils.errors import nearest_choice

_DATA_URL = re.compile(r"data:image(?:/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,", re.IGNORECASE)
_FILE_URL = "file://"
_WEB = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_LONGEST_PATH = 1024  # a longer text is Base64
_ENDING = re.compile(r"\.(?:png|jpe?g|webp|gif|bmp|tiff?|heic|heif|avif)$", re.IGNORECASE)
_BETWEEN_PATHS = re.compile(r"\s*[;|\n]\s*|\s*,\s*")
_COMPARED = 200  # file names among which the nearest to a missing one is looked for
Fetch = Callable[[str], bytes]


class PictureError(ValueError):
    """A value gives no picture: `kind` is the broken rule in one word, `remedy` what to do."""

    def __init__(self, kind: str, why: str, remedy: str) -> None:
        super().__init__(why)
        self.kind = kind
        self.remedy = remedy


@dataclass(frozen=True)
class FileRoot:
    """Where the paths in a table lead.

    Without folders there are no files, as in a stream from the hub.
    """

    folder: Path | None = None  # where relative paths begin: the table's folder
    root: Path | None = None  # the folder that no path may lead out of: that of the input
    # A path of another machine leads to the file that has the longest end of this path.
    by_tail: bool = False
    # The beginning of the paths of the hub's own files, whose bytes `fetch` gets.
    stored: str = ""
    fetch: Fetch | None = None


def picture_bytes(value: object, files: FileRoot) -> bytes:
    """Return the encoded picture that a value of a table holds or names.

    `files` says where paths lead. These values are told apart, in this order:

    - bytes, also inside of a struct of `datasets` such as {"bytes": ..., "path": ...}
    - `data:image/png;base64,...`
    - `hf://datasets/...`, a file of the data set on the hub that is read
    - any other address in the web, which is refused: nothing is downloaded
    - a text of more than 1024 characters, which is Base64
    - a shorter text: Base64 if that decodes to a picture, else a path or a file URL

    Raises `PictureError` where the value gives no picture.
    """
    value = _unpacked(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str) or not value.strip():
        raise PictureError("no_image", f"is {shown(value)}", "put the picture, or its path, into")
    text = value.strip()
    if text[:5].lower() == "data:":
        head = _DATA_URL.match(text)
        if not head:
            why = f"is {shown(text)}, not a data URL of an image"
            raise PictureError("not_base64", why, "write data:image/png;base64,... in")
        return _from_base64(text[head.end() :], "has a data URL whose Base64 is broken")
    if files.stored and text.startswith(files.stored):
        assert files.fetch is not None
        try:
            return files.fetch(text)
        except (
            Exception
        ) as error:  # errors of the hub's library, of the network, of the file system
            why = f"is {shown(text)}, which the hub does not give ({type(error).__name__})"
            raise PictureError("file_missing", why, "check it in") from error
    if _WEB.match(text) and not text.lower().startswith(_FILE_URL):
        why = f"is the address {shown(text)}, and nothing is downloaded"
        raise PictureError("not_a_file", why, "put the picture itself into")
    if len(text) > _LONGEST_PATH:
        return _from_base64(text, "is a text that is neither a path nor Base64")
    # A short text may be a path or the Base64 of a small drawing. An error of the decoding only
    # means that it is a path, so it is not shown.
    with suppress(PictureError):
        decoded = _from_base64(text, why="")
        if is_picture(decoded):
            return decoded
    return _from_file(text, files)


def _unpacked(value: Any) -> Any:
    """Return the bytes, path or address in a struct such as `{"bytes": ..., "path": ...}`.

    Any other value is returned as it is.
    """
    for _ in range(2):  # the value of a struct may be a struct itself
        if isinstance(value, dict):
            value = value["bytes"] if value.get("bytes") is not None else picture_of(value)
    return value


def listed_pictures(value: object) -> list[Any]:
    """Return the pictures of a cell as a list.

    A cell may be a list, a list in JSON, or paths with `;`, `,`, `|` or line breaks between them:
    `a.png; b.png` is two pictures. It is a list of paths only if each of them ends as a picture
    does, so that `a, b.png` is one path. Any other cell is one picture too.
    """
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            items = read_json(value)
            return items if isinstance(items, list) else [value]
    if isinstance(value, str) and len(value) <= _LONGEST_PATH and value[:5].lower() != "data:":
        paths = [path for path in _BETWEEN_PATHS.split(value.strip()) if path]
        if len(paths) > 1 and all(map(_ENDING.search, paths)):
            return paths
    return [value]


def _path_in(value: object) -> str:
    """Return the path that a text or a struct holds; an empty text where there is none."""
    name = value
    if isinstance(value, dict) and value.get("bytes") is None:
        name = picture_of(value)
    if not isinstance(name, str) or len(name) > _LONGEST_PATH:
        return ""
    is_data_url = name[:5].lower() == "data:"
    return "" if is_data_url else name.strip()


def named_files(value: object, files: FileRoot) -> list[Path]:
    """Return the files inside the input's folder that the value of an images column names."""
    paths = []
    for item in listed_pictures(value):
        with suppress(PictureError, OSError):
            name = _path_in(item)
            if name:
                paths.append(located(name, files))
    return paths


def other_spelling(value: object, files: FileRoot) -> str:
    """Return the right path of a file whose path in the table is spelt in another way.

    For example, `Images/A.PNG` gives `images/a.png` where only this file exists. The text is empty
    for a path that is right, and for a value that is no path.
    """
    with suppress(PictureError, OSError):
        name = _path_in(value)
        if name and files.folder and not _inside(name, files).exists():
            path = located(name, files)
            if path.is_file():
                return os.path.relpath(path, files.folder)
    return ""


def _from_base64(text: str, why: str) -> bytes:
    """Decode Base64, or raise `PictureError`, whose message begins with `why`."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(
            "not_base64", f"{why} ({error})", "encode the picture again in"
        ) from error


def _inside(name: str, files: FileRoot) -> Path:
    """Return the file that a path or file URL leads to, whether or not it exists.

    Raises `PictureError` where that is not inside the input's folder.
    """
    if files.folder is None or files.root is None:
        raise PictureError(
            "not_a_file", f"is the path {shown(name)}, and there are no files", "put the bytes into"
        )
    path = unquote(name[len(_FILE_URL) :]) if name.lower().startswith(_FILE_URL) else name
    is_absolute = _ABSOLUTE_PATH.match(path) is not None
    # An absolute path to another place may come from the machine on which the table was made.
    leads_elsewhere = is_absolute and not Path(path).is_relative_to(files.root)
    if leads_elsewhere and files.by_tail:
        path = _longest_tail(path, files.folder) or path
    if Path(path).is_absolute():
        path = os.path.relpath(path, files.folder)
    try:
        return file_within(files.folder, path, files.root)
    except UnreadableImageError as error:
        wrong = f"which is none ({error.__cause__})"
        remedy = "correct it in"
        if error.kind == "path_outside":
            wrong = "which leads out of the input's folder"
            remedy = "put the picture into it, and its path into"
            if leads_elsewhere:
                remedy = "name the folder that has the end of the path, with --image-dir DIR, for"
        raise PictureError(error.kind, f"is the path {shown(name)}, {wrong}", remedy) from error


_ABSOLUTE_PATH = re.compile(r"/|[A-Za-z]:[\\/]")  # of any system


def _longest_tail(path: str, folder: Path) -> str:
    """Return the longest end of a path that is a file in `folder`; empty where none is.

    For example, `/home/ann/data/train/1.png` gives `train/1.png` where `folder` has that file.
    """
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    tails = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((tail for tail in tails if (folder / tail).is_file()), "")


def located(name: str, files: FileRoot) -> Path:
    r"""Return the file that a path of a table means, also where the table spells it otherwise.

    Other spellings are `a\b.PNG` of `a/b.png`, `a%20b.png` of `a b.png`, and an ä that is stored as
    two characters, a and its dots. Where no file fits, the path itself is returned.

    Raises `PictureError` where the path leads out of the input, or several files fit.
    """
    literal_path = _inside(name, files)
    folder = files.folder
    if literal_path.exists() or folder is None:
        return literal_path
    try:
        unquoted_path = _inside(unquote(name).replace("\\", "/"), files)
    except PictureError:
        return literal_path
    # All existing paths that fit the components so far, relative to the folder.
    matches = [Path()]
    for component in Path(os.path.relpath(unquoted_path, folder)).parts:
        longer_matches = []
        for path in matches:
            children = [".."]
            if component != "..":
                # The names in the folder that differ from the component in their spelling alone.
                children = _names_in(folder / path).get(_folded(component), [])
            longer_matches += [path / child for child in children]
        matches = longer_matches
    if len(matches) > 1:
        choices = " or ".join(repr(str(path)) for path in matches)
        raise PictureError(
            "file_missing", f"is {shown(name)}, which may be {choices}", "name one of them in"
        )
    return _inside(str(matches[0]), files) if matches else literal_path


def _names_in(folder: Path) -> dict[str, list[str]]:
    """Return the names in a folder by their folded spelling; none where it cannot be read."""
    try:
        return _listed(folder, folder.stat().st_mtime_ns)
    except OSError:
        return {}


@lru_cache(maxsize=32)
def _listed(folder: Path, modified_ns: int) -> dict[str, list[str]]:
    """Return the names in a folder by their folded spelling; read anew when it was modified."""
    names: dict[str, list[str]] = {}
    for path in folder.iterdir():
        names.setdefault(_folded(path.name), []).append(path.name)
    return names


def _folded(name: str) -> str:
    """Return a name in small letters and composed characters, so that its spellings are equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _from_file(name: str, files: FileRoot) -> bytes:
    """Read the file of a path, or raise `PictureError` where there is none that can be read."""
    file = located(name, files)
    try:
        if not file.is_file():  # a folder, a pipe, a device
            why = f"is {shown(name)}, where there is no file{_near(file, files.folder)}"
            raise PictureError("file_missing", why, "put the file there for")
        if file.stat().st_size > MAX_FILE_BYTES:
            raise PictureError(
                "file_too_large",
                f"is {shown(name)} of over {MAX_FILE_BYTES} bytes",
                "shrink it for",
            )
        return file.read_bytes()
    except OSError as error:
        why = f"is {shown(name)}, which cannot be read ({error.strerror})"
        raise PictureError("file_missing", why, "make it readable for") from error


def _near(file: Path, folder: Path | None) -> str:
    """Return the end of an error message, which proposes where a missing file may be.

    The proposal is a file of the same name in another folder beside the table, or else a file with
    a similar name in the same folder. The text is empty where there is neither. `folder` is the
    folder of the table.
    """
    assert folder is not None, "without files there is no path"
    file_name = _folded(file.name)
    for folder_name in _some_names(folder):
        other_folder = folder / folder_name
        if file_name in _names_in(other_folder):
            if other_folder != file.parent:
                return f" (there is one in {folder_name!r}: --image-dir {other_folder})"
            break  # the same folder, where the file has another spelling
    similar_name = nearest_choice(file.name, _some_names(file.parent))
    return f" (did you mean {similar_name!r}?)" if similar_name else ""


def _some_names(folder: Path) -> list[str]:
    """Return the first names in a folder, in their order."""
    return sorted(name for names in _names_in(folder).values() for name in names)[:_COMPARED]
