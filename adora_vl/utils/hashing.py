"""Hashes of the content of files, so that a change of any byte is noticed."""

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

from adora_vl.utils.files import GIB, JsonLinesCache, cache_folder

# A smaller file is read again as fast as it is looked up
_MIN_REMEMBERED_BYTES = 2**14
# A file system's clock may be as coarse as 2 s: a second change within that leaves the time as it
# is, so only a file that is older than this is known by its time
_MIN_AGE_NS = 5 * 10**9
# A line announces that so many bytes or more are being read, since it takes long
_ANNOUNCED_BYTES = 4 * GIB
_HASH_PATTERN = re.compile(r"[0-9a-f]{32}")


def content_hash(files: Iterable[Path]) -> str:
    """Return one hash of the names of files, without their folders, and of all of their bytes.

    It has 32 hexadecimal digits. XXH3 with 128 bits is five times as fast as SHA-256. It does not
    defend against somebody who wants two files to look alike. A line on stderr announces that many
    bytes are read.

    The hash of a file is remembered on the disk. The file is not read again while its `_file_state`
    is the same: device, inode, size, and the times at which content and inode were last changed. A
    program can set the time of the content (`touch`), but not the time of the inode.

    Raises:
        OSError: a file cannot be read.
    """
    paths = sorted(files)
    unread_sizes = [
        path.stat().st_size
        for path in paths
        if _remembered_hashes().get(_file_state(path.stat())) is None
    ]
    unread_bytes = sum(unread_sizes)
    if unread_bytes >= _ANNOUNCED_BYTES and os.environ.get("RANK", "0") == "0":
        print(
            f"reading {unread_bytes / 1e9:.1f} GB in {paths[0].parent}, to know a change of it",
            file=sys.stderr,
            flush=True,
        )
    digest = xxhash.xxh3_128()
    for path in paths:
        # zero bytes keep name and hash apart, as neither can have one
        digest.update(os.fsencode(path.name) + f"\0{_file_hash(path)}\0".encode())
    return digest.hexdigest()


def _file_hash(path: Path) -> str:
    """Return the hash of a file's bytes, which is remembered until the file changes.

    A new hash is remembered only if the file did not change while it was read. It must not have
    changed shortly before either: the file system's clock might then give a second change the same
    time, and nobody would notice it.
    """
    with path.open("rb", buffering=0) as file:
        # The state is that of the open file: an NFS client asks the server when it opens a file.
        stat_before = os.fstat(file.fileno())
        remembered_hash = _remembered_hashes().get(_file_state(stat_before))
        if remembered_hash is not None and _HASH_PATTERN.fullmatch(remembered_hash):
            return remembered_hash
        begin_ns = time.time_ns()
        file_hash = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        is_unchanged = _file_state(os.fstat(file.fileno())) == _file_state(stat_before)
    last_change_ns = max(stat_before.st_mtime_ns, stat_before.st_ctime_ns)
    is_old_enough = begin_ns - last_change_ns > _MIN_AGE_NS
    is_worth_it = stat_before.st_size >= _MIN_REMEMBERED_BYTES
    if is_old_enough and is_unchanged and is_worth_it:
        with suppress(OSError):  # this process remembers it all the same
            _remembered_hashes().put(_file_state(stat_before), file_hash)
    return file_hash


def _file_state(stat: os.stat_result) -> str:
    """Return as text what changes whenever a file's content does: device, inode, size and times."""
    return f"{stat.st_dev}/{stat.st_ino}/{stat.st_size}/{stat.st_mtime_ns}/{stat.st_ctime_ns}"


def _remembered_hashes() -> JsonLinesCache:
    """Return the hashes of files that any process of this user has read before.

    They are in `content.jsonl` in the cache folder, which may be deleted.
    """
    return _hashes_in_file(cache_folder() / "content.jsonl")


@cache
def _hashes_in_file(file: Path) -> JsonLinesCache:
    """Return the hashes that are stored in a file, which is read once in a process."""
    try:
        return JsonLinesCache(file)
    # Without a file that can be read, each process remembers hashes for itself.
    except OSError:
        return JsonLinesCache(Path(os.devnull))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits, which people can check by `sha256sum`.

    Raises `OSError`.
    """
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
