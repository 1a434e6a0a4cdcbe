"""What files hold, as a short name that is another one where any byte is, whatever their sizes and
times say.
"""

import hashlib
import os
import re
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import xxhash

from adora_vl.utils.files import GIB, KeptAnswers, cache_folder

_REMEMBERED_BYTES = 2**14  # a smaller file is read again as fast as it is looked up
# a change within the grain of a file system's clock (up to 2 s) may leave the time as it is
_SETTLED_NS = 5 * 10**9
_SAID_BYTES = 4 * GIB
_HASH = re.compile(r"[0-9a-f]{32}")


def content_hash(files: Iterable[Path]) -> str:
    """Hash the names of files, without their folders, and all of their bytes.

    Returns 32 hexadecimal digits. XXH3 with 128 bits is five times as fast as SHA-256, and no
    defence against somebody who wants two files to look alike. A file is not read again while its
    `_state` is the same: device, inode, size, and the times of the last change of its content and
    of its inode, of which nobody can set the latter. Raises `OSError`.
    """
    paths = sorted(files)
    new = sum(path.stat().st_size for path in paths if _memory().get(_state(path.stat())) is None)
    if new >= _SAID_BYTES and os.environ.get("RANK", "0") == "0":
        print(
            f"reading {new / 1e9:.1f} GB in {paths[0].parent}, to know a change of it",
            file=sys.stderr,
            flush=True,
        )
    digest = xxhash.xxh3_128()
    for path in paths:
        digest.update(os.fsencode(path.name) + f"\0{_of(path)}\0".encode())
    return digest.hexdigest()


def _of(path: Path) -> str:
    """Return the hash of one file's bytes, from memory where the file has not changed.

    A hash is remembered only if the file did not change while it was read, nor so shortly before
    that its times may not show the change.
    """
    with path.open("rb", buffering=0) as file:
        # of the open file: a client of NFS asks the server when it opens one
        before = os.fstat(file.fileno())
        remembered = _memory().get(_state(before))
        if remembered is not None and _HASH.fullmatch(remembered):
            return remembered
        began = time.time_ns()
        file_hash = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        unchanged = _state(os.fstat(file.fileno())) == _state(before)
    settled = began - max(before.st_mtime_ns, before.st_ctime_ns) > _SETTLED_NS
    if settled and unchanged and before.st_size >= _REMEMBERED_BYTES:
        with suppress(OSError):  # this process remembers it all the same
            _memory().put(_state(before), file_hash)
    return file_hash


def _state(stat: os.stat_result) -> str:
    """Return what identifies a file's content without reading it, as text."""
    return f"{stat.st_dev}/{stat.st_ino}/{stat.st_size}/{stat.st_mtime_ns}/{stat.st_ctime_ns}"


def _memory() -> KeptAnswers:
    """Return the hashes of files that any process of this user has read before.

    They are in `content.jsonl` in the cache folder, which may be deleted.
    """
    return _kept(cache_folder() / "content.jsonl")


@cache
def _kept(file: Path) -> KeptAnswers:
    """Return the stored hashes; without a place on the disk this process has its own."""
    try:
        return KeptAnswers(file)
    except OSError:  # without a place on the disk each process remembers for itself
        return KeptAnswers(Path(os.devnull))


def file_sha256(path: Path) -> str:
    """Return SHA-256 of a file in hexadecimal, as people check it with other programs.

    Raises `OSError`.
    """
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
