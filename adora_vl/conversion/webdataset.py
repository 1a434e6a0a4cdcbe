"""Reads shards of webdataset.

A shard is a tar. The files that have one name before the first dot are a row, and their endings are
its columns.
"""

import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from adora_vl.conversion.problem import MAX_FILE_BYTES
from adora_vl.conversion.records import BadRecord
from adora_vl.utils.cli import read_json

KEY = "__key__"  # the column with the name of a row, as webdataset calls it
_PICTURES = ("png", "jpg", "jpeg", "webp", "bmp", "gif")
_TEXTS = ("txt", "text", "cls", "json")


def samples(path: Path) -> Iterator[tuple[str, dict[str, Any] | BadRecord]]:
    """Yield the rows of a shard with their positions, one at a time."""
    with tarfile.open(path, "r:") as shard:
        files = (member for member in shard if member.isfile() and not _hidden(member.name))
        for key, members in groupby(files, key=lambda member: _key(member.name)):
            yield f"sample {key}", _row(shard, key, list(members))


def _hidden(name: str) -> bool:
    """Return whether a file is hidden, as those are that macOS adds to a tar."""
    return PurePosixPath(name).name.startswith(".")


def _key(name: str) -> str:
    """Return the name of the row that a file belongs to: its path up to the name's first dot."""
    path = PurePosixPath(name)
    return str(path.with_name(path.name.partition(".")[0]))


def _row(
    shard: tarfile.TarFile, key: str, members: list[tarfile.TarInfo]
) -> dict[str, Any] | BadRecord:
    """Read the files of one row; files of unknown kinds are left out."""
    row: dict[str, Any] = {KEY: key}
    for member in members:
        # `0001.left.png` is the column `left.png` of the row `0001`, a picture.
        column = PurePosixPath(member.name).name.partition(".")[2].lower()
        kind = column.rpartition(".")[2]
        if kind not in (*_PICTURES, *_TEXTS):
            continue
        if member.size > MAX_FILE_BYTES:
            wrong = f"{member.name!r} has over {MAX_FILE_BYTES} bytes"
            return BadRecord("file_too_large", wrong, "shrink it in")
        stream = shard.extractfile(member)
        content = stream.read() if stream else b""
        if kind in _PICTURES:
            row[column] = {"bytes": content}
            continue
        try:
            text = content.decode("utf-8")
            row[column] = read_json(text) if kind == "json" else text.strip()
        except (ValueError, RecursionError) as error:
            wrong = f"{member.name!r} cannot be read ({error!s:.200})"
            return BadRecord("not_json", wrong, "mend it in", content)
    return row
