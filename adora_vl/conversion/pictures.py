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

from adora_vl.conversion.chat import picture_in_part
from adora_vl.conversion.problem import MAX_FILE_BYTES, ROW_LOCATION
from adora_vl.data.images import UnreadableImageError, file_within, is_picture
from adora_vl.utils.cli import read_json, short_repr
from adora_vl.utils.errors import nearest_choice

_DATA_URL_PATTERN = re.compile(r"data:image(?:/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,", re.IGNORECASE)
_FILE_URL = "file://"
_WEB_ADDRESS_PATTERN = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_LONGEST_PATH = 1024  # a longer text is Base64
_PICTURE_SUFFIX_PATTERN = re.compile(
    r"\.(?:png|jpe?g|webp|gif|bmp|tiff?|heic|heif|avif)$", re.IGNORECASE
)
_BETWEEN_PATHS_PATTERN = re.compile(r"\s*[;|\n]\s*|\s*,\s*")
_MAX_COMPARED_NAMES = 200  # file names among which the nearest to a missing one is looked for
Download = Callable[[str], bytes]


class PictureError(ValueError):
    """A value of a table gives no picture.

    `reason` is the broken rule in one word, such as `file_missing`. `remedy` says what to do, where
    `ROW_LOCATION` stands for the place of the row.
    """

    def __init__(self, reason: str, why: str, remedy: str) -> None:
        super().__init__(why)
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True)
class ImageSource:
    """Where the paths of pictures in a table lead: to files on disk, or of a data set on the hub.

    Without folders there are no files on disk, as in a stream from the hub.
    """

    folder: Path | None = None  # where relative paths begin: the table's folder
    root: Path | None = None  # the folder that no path may lead out of: that of the input
    # Whether a path of another machine, `/home/ann/data/train/1.png`, leads to the file in `folder`
    # that has the longest end of this path, such as `train/1.png`.
    match_path_end: bool = False
    # The beginning of the paths of the data set's files on the hub, whose bytes `download` returns.
    hub_prefix: str = ""
    download: Download | None = None


def picture_bytes(value: object, source: ImageSource) -> bytes:
    """Return the encoded picture that a value of a table holds or names.

    `source` says where paths lead. These values are told apart, in this order:

    - bytes, also inside of a struct of `datasets` such as {"bytes": ..., "path": ...}
    - `data:image/png;base64,...`
    - `hf://datasets/...`, a file of the data set on the hub that is read
    - any other address in the web, which is refused: nothing is downloaded
    - a text of more than 1024 characters, which is Base64
    - a shorter text: Base64 if that decodes to a picture, else a path or a file URL

    Raises `PictureError` where the value gives no picture.
    """
    value = _unwrap_struct(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str) or not value.strip():
        raise PictureError(
            "no_image",
            f"is {short_repr(value)}",
            f"put the picture, or its path, into {ROW_LOCATION}",
        )
    text = value.strip()
    if text[:5].lower() == "data:":
        url_prefix = _DATA_URL_PATTERN.match(text)
        if not url_prefix:
            why = f"is {short_repr(text)}, not a data URL of an image"
            raise PictureError(
                "not_base64", why, f"write data:image/png;base64,... in {ROW_LOCATION}"
            )
        return _decode_base64(text[url_prefix.end() :], "has a data URL whose Base64 is broken")
    if source.hub_prefix and text.startswith(source.hub_prefix):
        assert source.download is not None
        try:
            return source.download(text)
        except Exception as error:  # of the hub's library, of the network, of the file system
            why = f"is {short_repr(text)}, which the hub does not give ({type(error).__name__})"
            raise PictureError("file_missing", why, f"check it in {ROW_LOCATION}") from error
    if _WEB_ADDRESS_PATTERN.match(text) and not text.lower().startswith(_FILE_URL):
        why = f"is the address {short_repr(text)}, and nothing is downloaded"
        raise PictureError("not_a_file", why, f"put the picture itself into {ROW_LOCATION}")
    if len(text) > _LONGEST_PATH:
        return _decode_base64(text, "is a text that is neither a path nor Base64")
    # A short text may be a path or the Base64 of a small drawing. An error of the decoding only
    # means that it is a path, so it is not shown.
    with suppress(PictureError):
        decoded = _decode_base64(text, why="")
        if is_picture(decoded):
            return decoded
    return _read_file(text, source)


def _unwrap_struct(value: Any) -> Any:
    """Return the bytes, path or address in a struct such as `{"bytes": ..., "path": ...}`.

    Any other value is returned as it is.
    """
    for _ in range(2):  # the value of a struct may be a struct itself
        if isinstance(value, dict):
            value = value["bytes"] if value.get("bytes") is not None else picture_in_part(value)
    return value


def pictures_in_cell(value: object) -> list[Any]:
    """Return the pictures of a cell as a list; each is a path, an address or bytes.

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
    if isinstance(value, str):
        paths = [path for path in _BETWEEN_PATHS_PATTERN.split(_path_of_picture(value)) if path]
        if len(paths) > 1 and all(map(_PICTURE_SUFFIX_PATTERN.search, paths)):
            return paths
    return [value]


def _path_of_picture(value: object) -> str:
    """Return the path in a text or in a struct `{"path": ...}`; an empty text where there is none.

    A long text or a data URL is a picture itself, and no path.
    """
    path = value
    if isinstance(value, dict) and value.get("bytes") is None:
        path = picture_in_part(value)
    if not isinstance(path, str) or len(path) > _LONGEST_PATH:
        return ""
    is_data_url = path[:5].lower() == "data:"
    return "" if is_data_url else path.strip()


def files_named_in_cell(value: object, source: ImageSource) -> list[Path]:
    """Return the files that the value of an images column names.

    Pictures that are no files, and paths out of the input's folder, are left out.
    """
    files = []
    for picture in pictures_in_cell(value):
        with suppress(PictureError, OSError):
            path = _path_of_picture(picture)
            if path:
                files.append(resolve_path(path, source))
    return files


def corrected_path(value: object, source: ImageSource) -> str:
    """Return the right path of a file whose path in the table is spelt in another way.

    For example, `Images/A.PNG` gives `images/a.png` where only this file exists. The text is empty
    for a path that is right, and for a value that is no path.
    """
    with suppress(PictureError, OSError):
        path = _path_of_picture(value)
        if path and source.folder and not _path_in_root(path, source).exists():
            file = resolve_path(path, source)
            if file.is_file():
                return os.path.relpath(file, source.folder)
    return ""


def _decode_base64(text: str, why: str) -> bytes:
    """Return the bytes of a text in Base64.

    Raises `PictureError` for another text; its message begins with `why`.
    """
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(
            "not_base64", f"{why} ({error})", f"encode the picture again in {ROW_LOCATION}"
        ) from error


def _path_in_root(name: str, source: ImageSource) -> Path:
    """Return the file that a path or file URL in a table leads to, whether or not it exists.

    Raises `PictureError` where that is not inside the input's folder, `source.root`.
    """
    if source.folder is None or source.root is None:
        raise PictureError(
            "not_a_file",
            f"is the path {short_repr(name)}, and there are no files",
            f"put the bytes into {ROW_LOCATION}",
        )
    path = unquote(name[len(_FILE_URL) :]) if name.lower().startswith(_FILE_URL) else name
    is_absolute = _ABSOLUTE_PATH_PATTERN.match(path) is not None
    # An absolute path to another place may come from the machine on which the table was made.
    leads_elsewhere = is_absolute and not Path(path).is_relative_to(source.root)
    if leads_elsewhere and source.match_path_end:
        path = _longest_existing_end(path, source.folder) or path
    if Path(path).is_absolute():
        path = os.path.relpath(path, source.folder)
    try:
        return file_within(source.folder, path, source.root)
    except UnreadableImageError as error:
        wrong = f"which is none ({error.__cause__})"
        remedy = f"correct it in {ROW_LOCATION}"
        if error.reason == "path_outside":
            wrong = "which leads out of the input's folder"
            remedy = f"put the picture into it, and its path into {ROW_LOCATION}"
            if leads_elsewhere:
                remedy = (
                    "name the folder that has the end of the path, with --image-dir DIR, for "
                    f"{ROW_LOCATION}"
                )
        raise PictureError(
            error.reason, f"is the path {short_repr(name)}, {wrong}", remedy
        ) from error


_ABSOLUTE_PATH_PATTERN = re.compile(r"/|[A-Za-z]:[\\/]")  # of any system


def _longest_existing_end(path: str, folder: Path) -> str:
    """Return the longest end of a path that is a file in `folder`; empty where none is.

    For example, `/home/ann/data/train/1.png` gives `train/1.png` where `folder` has that file.
    """
    names = [name for name in path.replace("\\", "/").split("/") if name not in ("", ".", "..")]
    for start in range(len(names)):
        path_end = "/".join(names[start:])
        if (folder / path_end).is_file():
            return path_end
    return ""


def resolve_path(name: str, source: ImageSource) -> Path:
    r"""Return the file that a path in a table means, also where the table spells it otherwise.

    Other spellings are `a\b.PNG` of `a/b.png`, `a%20b.png` of `a b.png`, and an ä that is stored as
    two characters, a and its dots. Where no file fits, the path itself is returned.

    Raises `PictureError` where the path leads out of the input, or several files fit.
    """
    literal_path = _path_in_root(name, source)
    folder = source.folder
    if literal_path.exists() or folder is None:
        return literal_path
    try:
        unquoted_path = _path_in_root(unquote(name).replace("\\", "/"), source)
    except PictureError:
        return literal_path
    # All existing paths, relative to the folder, that fit the first components of the path. They
    # are made longer by one component at a time.
    matches = [Path()]
    for component in Path(os.path.relpath(unquoted_path, folder)).parts:
        longer_matches = []
        for path in matches:
            spellings = [".."]
            if component != "..":
                # The names in the folder that differ from the component in their spelling alone.
                spellings = _names_by_folded_name(folder / path).get(_fold_name(component), [])
            longer_matches += [path / spelling for spelling in spellings]
        matches = longer_matches
    if len(matches) > 1:
        choices = " or ".join(repr(str(path)) for path in matches)
        raise PictureError(
            "file_missing",
            f"is {short_repr(name)}, which may be {choices}",
            f"name one of them in {ROW_LOCATION}",
        )
    return _path_in_root(str(matches[0]), source) if matches else literal_path


def _names_by_folded_name(folder: Path) -> dict[str, list[str]]:
    """Return the names in a folder by their folded form: {"a.png": ["A.PNG", "a.png"]}.

    Returns {} where the folder cannot be read.
    """
    try:
        return _list_folder(folder, folder.stat().st_mtime_ns)
    except OSError:
        return {}


@lru_cache(maxsize=32)
def _list_folder(folder: Path, modified_ns: int) -> dict[str, list[str]]:
    """Return the names in a folder by their folded form; `modified_ns` renews the cached result."""
    names_by_folded_name: dict[str, list[str]] = {}
    for path in folder.iterdir():
        names_by_folded_name.setdefault(_fold_name(path.name), []).append(path.name)
    return names_by_folded_name


def _fold_name(name: str) -> str:
    """Return a name without its upper case, and with composed characters, to compare spellings."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _read_file(name: str, source: ImageSource) -> bytes:
    """Return the bytes of the file that a path in a table leads to.

    Raises `PictureError` where there is no file that can be read.
    """
    file = resolve_path(name, source)
    try:
        if not file.is_file():  # a folder, a pipe, a device
            hint = _missing_file_hint(file, source.folder)
            why = f"is {short_repr(name)}, where there is no file{hint}"
            raise PictureError("file_missing", why, f"put the file there for {ROW_LOCATION}")
        if file.stat().st_size > MAX_FILE_BYTES:
            raise PictureError(
                "file_too_large",
                f"is {short_repr(name)} of over {MAX_FILE_BYTES} bytes",
                f"shrink it for {ROW_LOCATION}",
            )
        return file.read_bytes()
    except OSError as error:
        why = f"is {short_repr(name)}, which cannot be read ({error.strerror})"
        raise PictureError("file_missing", why, f"make it readable for {ROW_LOCATION}") from error


def _missing_file_hint(file: Path, folder: Path | None) -> str:
    """Return the end of an error message, such as ` (did you mean '1.png'?)` for a missing `l.png`.

    It proposes a file of the same name in another folder beside the table, or else a file with a
    similar name in the same folder. The text is empty where there is neither. `folder` is the
    folder of the table.
    """
    assert folder is not None, "a row whose picture is a path comes from a table in a folder"
    file_name = _fold_name(file.name)
    for folder_name in _first_names_in(folder):  # a file among them has no names in it
        other_folder = folder / folder_name
        if file_name in _names_by_folded_name(other_folder):
            if other_folder != file.parent:
                return f" (there is one in {folder_name!r}: --image-dir {other_folder})"
            break  # the same folder, where the file has another spelling
    similar_name = nearest_choice(file.name, _first_names_in(file.parent))
    return f" (did you mean {similar_name!r}?)" if similar_name else ""


def _first_names_in(folder: Path) -> list[str]:
    """Return the first names in a folder, sorted; with all of them a comparison would take long."""
    all_names: list[str] = []
    for names in _names_by_folded_name(folder).values():
        all_names += names
    return sorted(all_names)[:_MAX_COMPARED_NAMES]
