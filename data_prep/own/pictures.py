"""The bytes of an image that a table names or holds. A path never leads out of the input's folder."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.sources.places import MAX_FILE_BYTES

_DATA_URL = re.compile(r"data:image/[\w.+-]+(?:;[\w=.+-]+)*;base64,", re.IGNORECASE)
_WEB = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_LONGEST_PATH = 1024  # a longer text is Base64
Fetch = Callable[[str], bytes]


class PictureError(ValueError):
    """There are no bytes. `kind`: the rule in one word; `remedy`: what to do."""

    def __init__(self, kind: str, why: str, remedy: str) -> None:
        super().__init__(why)
        self.kind, self.remedy = kind, remedy


@dataclass(frozen=True)
class Surroundings:
    """Where paths of a table lead: `folder` is the table's own, `root` the input's, which no path leaves.

    `None` for both: there are no files, as in a stream from the hub. `stored`: where the hub's own files begin, whose
    bytes `fetch` gets.
    """

    folder: Path | None = None
    root: Path | None = None
    stored: str = ""
    fetch: Fetch | None = None


def picture_bytes(value: Any, place: Surroundings) -> bytes:
    """The encoded picture of a value: bytes, `{"bytes": ..., "path": ...}`, a data URL, Base64, or a path.

    Raises `PictureError`.
    """
    if isinstance(value, dict):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str) or not value.strip():
        raise PictureError("no_image", f"is {_shown(value)}", "put the picture, or its path, into")
    text = value.strip()
    if text[:5].lower() == "data:":
        return _of_data_url(text)
    if place.stored and text.startswith(place.stored):
        assert place.fetch is not None
        try:
            return place.fetch(text)
        except Exception as error:  # the hub's library raises its own, the network's and the file system's
            why = f"is {_shown(text)}, which the hub does not give ({type(error).__name__})"
            raise PictureError("file_missing", why, "check it in") from error
    if _WEB.match(text):
        raise PictureError(
            "not_a_file", f"is the address {_shown(text)}, and nothing is downloaded", "put the picture itself into"
        )
    if len(text) > _LONGEST_PATH:
        return _of_base64(text, "is a text that is neither a path nor Base64")
    return _of_file(text, place)


def named_files(value: Any, place: Surroundings) -> list[Path]:
    """The files inside the input's folder that the value of an images column names."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    found = []
    for item in value if isinstance(value, list) else [value]:
        name = item.get("path") if isinstance(item, dict) and item.get("bytes") is None else item
        if isinstance(name, str) and len(name) <= _LONGEST_PATH and name[:5].lower() != "data:":
            with suppress(PictureError):
                found.append(_inside(name.strip(), place))
    return found


def _of_data_url(text: str) -> bytes:
    head = _DATA_URL.match(text)
    if not head:
        why = f"is {_shown(text)}, not a data URL of an image"
        raise PictureError("not_base64", why, "write data:image/png;base64,... in")
    return _of_base64(text[head.end() :], "has a data URL whose Base64 is broken")


def _of_base64(text: str, why: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError("not_base64", f"{why} ({error})", "encode the picture again in") from error


def _inside(name: str, place: Surroundings) -> Path:
    """The file that a path leads to. Raises `PictureError` where that is not in the input's folder."""
    if place.folder is None or place.root is None:
        raise PictureError("not_a_file", f"is the path {_shown(name)}, and there are no files", "put the bytes into")
    try:
        file = (place.folder / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a null byte
        raise PictureError("file_missing", f"is {_shown(name)}, no path ({error})", "correct it in") from error
    if Path(name).is_absolute() or not file.is_relative_to(place.root):
        wrong = f"is the path {_shown(name)}, which leads out of the input's folder"
        raise PictureError("path_outside", wrong, "put the picture into the folder, and its path into")
    return file


def _of_file(name: str, place: Surroundings) -> bytes:
    file = _inside(name, place)
    try:
        if not file.is_file():  # a folder, a pipe, a device
            raise PictureError("file_missing", f"is {_shown(name)}, where there is no file", "put the file there for")
        if file.stat().st_size > MAX_FILE_BYTES:
            raise PictureError("file_too_large", f"is {_shown(name)} of over {MAX_FILE_BYTES} bytes", "shrink it for")
        return file.read_bytes()
    except OSError as error:
        why = f"is {_shown(name)}, which cannot be read ({error.strerror})"
        raise PictureError("file_missing", why, "make it readable for") from error


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
