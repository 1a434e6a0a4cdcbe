"""Reads shards of webdataset.

A shard is a tar. The files that have one name before the first dot are a row, and their endings are
its columns.
"""

import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from adora_vl.conversion.problem import MAX_FILE_BYTES, ROW_LOCATION
from adora_vl.conversion.records import BadRecord
from adora_vl.utils.cli import read_json

KEY_COLUMN = "__key__"  # the column with the name of a row, as webdataset calls it
_PICTURE_SUFFIXES = ("png", "jpg", "jpeg", "webp", "bmp", "gif")
_TEXT_SUFFIXES = ("txt", "text", "cls", "json")


def read_shard(path: Path) -> Iterator[tuple[str, dict[str, Any] | BadRecord]]:
    """Yield the rows of a shard of webdataset, each with its position, such as `sample 0001`."""
    with tarfile.open(path, "r:") as shard:
        files = (member for member in shard if member.isfile() and not _is_hidden(member.name))
        for key, members in groupby(files, key=lambda member: _sample_key(member.name)):
            yield f"sample {key}", _read_sample(shard, key, list(members))


def _is_hidden(name: str) -> bool:
    """Return whether a file is hidden, as those are that macOS adds to a tar."""
    return PurePosixPath(name).name.startswith(".")


def _sample_key(name: str) -> str:
    """Return the name of the row that a file belongs to: `0001` for `0001.left.png`.

    It is the path up to the first dot of the file's name.
    """
    path = PurePosixPath(name)
    return str(path.with_name(path.name.partition(".")[0]))


def _read_sample(
    shard: tarfile.TarFile, key: str, members: list[tarfile.TarInfo]
) -> dict[str, Any] | BadRecord:
    """Return a row by its columns, from its files in a shard; other files are left out.

    For example, `0001.png` and `0001.json` give {"__key__": "0001", "png": {"bytes": ...}, "json":
    {...}}. Returns a bad record for a file that is too large, or cannot be read.

    Args:
        shard: the tar.
        key: the name of the row.
        members: the files of the row.
    """
    row: dict[str, Any] = {KEY_COLUMN: key}
    for member in members:
        # `0001.left.png` is the column `left.png` of the row `0001`, a picture.
        column = PurePosixPath(member.name).name.partition(".")[2].lower()
        suffix = column.rpartition(".")[2]
        if suffix not in (*_PICTURE_SUFFIXES, *_TEXT_SUFFIXES):
            continue
        if member.size > MAX_FILE_BYTES:
            wrong = f"{member.name!r} has over {MAX_FILE_BYTES} bytes"
            return BadRecord(
                reason="file_too_large", wrong=wrong, remedy=f"shrink it in {ROW_LOCATION}"
            )
        stream = shard.extractfile(member)
        content = stream.read() if stream else b""
        if suffix in _PICTURE_SUFFIXES:
            row[column] = {"bytes": content}
            continue
        try:
            text = content.decode("utf-8")
            row[column] = read_json(text) if suffix == "json" else text.strip()
        except (ValueError, RecursionError) as error:
            wrong = f"{member.name!r} cannot be read ({error!s:.200})"
            return BadRecord(
                reason="not_json",
                wrong=wrong,
                remedy=f"mend it in {ROW_LOCATION}",
                original=content,
            )
    return row
