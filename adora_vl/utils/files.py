"""Files that are there whole or not at all, and one line for the user where the disk refuses them."""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

from adora_vl.utils.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What safetensors and torch make of those: torch's writer says how far it came, and not why it came
# no further.
_FULL_WORDS = re.compile(
    r"No space left|os error (28|122)\b|quota exceeded|unexpected pos \d+ vs "
    r"\d+|PytorchStreamWriter failed writing",
    re.IGNORECASE,
)
_PARTIAL = ".partial-"
GIB = 2**30
_PARTIAL_NAME = re.compile(rf"\.(.+){_PARTIAL}[0-9a-f]{{16}}")  # hidden, and 8 random bytes
# in the hidden neighbour of a folder
_NEW = "new"
_OLD = "old"
_LOCK = "lock"
# a client of NFS may not see another one's new file for this long (the default of `acdirmax`)
NFS_DELAY_S = 60.0


def cache_folder() -> Path:
    """Return `ADORA_VL_HOME`, or `adora_vl` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ADORA_VL_HOME") or Path(cache) / "adora_vl")


def leads_out(folder: Path, path: Path) -> bool:
    """Return whether a path below `folder` leads out of it by a link.

    The link may be the path itself or one on the way. A folder from elsewhere must not show any
    file of this machine.
    """
    try:
        return not path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return True


def refuse_links_out(key: str, folder: Path, *paths: Path) -> None:
    """Raise `UserError` for the first path that leads out of `folder`."""
    for path in paths:
        if leads_out(folder, path):
            raise UserError(
                f"{key}: {str(path)!r} is a link out of {str(folder)!r}, and what it leads to is "
                "not read; put the file itself there"
            )


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a hidden neighbour of `path` to write into, which is renamed over `path` at the end.

    Whatever goes wrong, the neighbour is removed and what was at `path` stays. Unless `durable` is
    false, the bytes are on the disk before the file gets its name. What is no file, such as
    /dev/stdout, is written to as it is. Raises `OSError`.
    """
    if path.is_relative_to("/dev") or (path.exists() and not path.is_file()):
        with path.open("wb") as file:
            yield file
        return
    partial = _neighbour(path)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a whole file with `replacing`. Raises `OSError`."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


class KeptAnswers:
    """Answers by key, a JSON line each, to which several processes may add at once.

    A line that cannot be read is ignored; one that a killed process tore does not take the next one
    with it.
    """

    def __init__(self, file: Path) -> None:
        """Read the answers of `file`. Raises `OSError`, as `put` does."""
        self._file = file
        self._answers = dict[str, str]()
        content = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        for line in content.splitlines():
            with suppress(ValueError, LookupError, TypeError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry["key"], str) and isinstance(entry["answer"], str):
                    self._answers[entry["key"]] = entry["answer"]

    def get(self, key: str) -> str | None:
        """Return the answer of a key, None without one."""
        return self._answers.get(key)

    def put(self, key: str, answer: str) -> None:
        """Store an answer, also for other processes. Raises `OSError`."""
        self._answers[key] = answer
        line = json.dumps({"key": key, "answer": answer}).encode() + b"\n"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab+") as file:  # one write of a short line: whole, whoever is first
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)


def appears(path: Path, patience_s: float = NFS_DELAY_S) -> bool:
    """Wait for a file that another machine has written on a shared disk.

    Returns whether it is there after `patience_s` at the latest.
    """
    end = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(0.2)
        with suppress(OSError):  # reading the folder makes a client of NFS ask the server again
            next(path.parent.iterdir(), None)
    return True


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder, hidden beside `folder`, which takes its place when the block ends.

    The old folder is deleted after that. Whatever goes wrong, the new one is removed and the old
    one stays. The files are on the disk before the folder gets its name. Two renames make the
    exchange: where a process is killed between them, the next `replacing_folder` (or
    `recover_folder`, or `remove_partial`) gives the old folder its name back. Raises `OSError`.
    """
    recover_folder(folder)
    beside, lock = locked_folder(lambda: _neighbour(folder))
    try:
        new = beside / _NEW
        new.mkdir()
        yield new
        usual_modes(new)
        for path in (*new.rglob("*"), new):
            flush(path)
        put_in_place(new, folder, beside / _OLD)
    finally:
        _settle(beside, folder)
        if lock is not None:
            os.close(lock)


def usual_modes(folder: Path) -> None:
    """Give the weights in `folder` a new file's mode: stock safetensors (0.8) lets their owner
    alone read them.
    """
    probe = _neighbour(folder / "mode")
    with suppress(OSError):  # not on every file system
        probe.touch()
        mode = probe.stat().st_mode
        probe.unlink()
        for path in folder.glob("*.safetensors"):
            path.chmod(mode & 0o777)


def put_in_place(new: Path, folder: Path, old: Path) -> None:
    """Rename `new` to `folder`, and what stands there before that to `old`, in the same file
    system.
    """
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    flush(folder.parent)


def flush(path: Path) -> None:
    """Have the kernel write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def recover_folder(folder: Path) -> None:
    """Undo what killed processes left of replacing `folder`.

    What a living process is writing stays.
    """
    partial_paths = sorted(folder.parent.glob(f".{escape(folder.name)}{_PARTIAL}*"))
    for beside in abandoned(path for path in partial_paths if is_partial(path) and path.is_dir()):
        _settle(beside, folder)


def abandoned(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield those folders of `locked_folder` whose process is gone."""
    for folder in folders:
        try:
            lock = _lock(folder, os.O_RDWR)
        except OSError:  # its process lives, or has gone on in the meantime
            continue
        yield folder
        os.close(lock)


def locked_folder(new_name: Callable[[], Path]) -> tuple[Path, int | None]:
    """Create a folder with a random name, and take the lock in it, which is returned open.

    By the lock all other processes know that this one lives. It is None on a file system that has
    no locks; there nobody removes what a process left behind.
    """
    while True:
        folder = new_name()
        folder.mkdir(parents=True)
        try:
            lock = _lock(folder, os.O_RDWR | os.O_CREAT)
        except BlockingIOError:  # `abandoned` had it first
            continue
        except OSError:
            return folder, None
        if (folder / _LOCK).exists():
            return folder, lock
        os.close(lock)


def _lock(beside: Path, flags: int) -> int:
    """Return the open, locked file in a hidden folder; the kernel drops the lock of a dead process.

    Raises `OSError`.
    """
    lock = os.open(beside / _LOCK, flags)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _settle(beside: Path, folder: Path) -> None:
    """Give the old folder its name back where no new one has it, and remove the rest."""
    old = beside / _OLD
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(beside, ignore_errors=True)


def _neighbour(path: Path) -> Path:
    """Return a hidden name beside `path` that no other process has."""
    # not named after the process: two machines that share a disk may have processes of equal number
    return path.with_name(f".{path.name}{_PARTIAL}{token_hex(8)}")


def is_partial(path: Path) -> bool:
    """Return whether the name is that of what `replacing` and `replacing_folder` write first."""
    return _PARTIAL_NAME.fullmatch(path.name) is not None


def remove_partial(folder: Path) -> None:
    """Remove what killed processes left in `folder` of files and folders that they were replacing.

    Call it where nobody else writes at the same time.
    """
    for path in folder.glob(f".*{_PARTIAL}*"):
        named = _PARTIAL_NAME.fullmatch(path.name)
        if named and path.is_dir():
            _settle(path, folder / named[1])
        elif named:
            path.unlink(missing_ok=True)


@contextmanager
def written_to(option: str, path: Path) -> Iterator[None]:
    """An `OSError` inside the block is the user's to mend: the option, the path, the reason, what
    to do.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(option, path, error) from error


def unwritable(option: str, path: Path, error: Exception) -> UserError:
    """Return the error of a place that could not be written to."""
    remedy = (
        "free some space, or choose another place"
        if disk_is_full(error)
        else "choose another place"
    )
    return UserError(
        f"{option}: {str(path)!r} cannot be written ({getattr(error, 'strerror', '') or error}); "
        f"{remedy}"
    )


def disk_is_full(error: BaseException | None) -> bool:
    """Return whether an error of writing, or one that it came from, is that of a full disk."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in _FULL) or _FULL_WORDS.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def refuse_dangling(option: str, path: Path) -> None:
    """Raise `UserError` where `path` is, or lies in, a link to something that is not there."""
    for part in (path, *path.parents):
        if os.path.islink(part) and not os.path.exists(part):  # noqa: PTH110, PTH114  # no error for too long a name
            leads = f"{str(part)!r} is a link to {str(part.readlink())!r}, which is not there"
            raise UserError(f"{option}: {leads}; make that, or remove the link")


def check_folder(option: str, folder: Path) -> None:
    """Raise `UserError` where a folder can be neither made nor written into, without making it."""
    refuse_dangling(option, folder)
    with written_to(option, folder):
        existing = next(
            parent for parent in (folder, *folder.absolute().parents) if parent.exists()
        )
        is_file = (
            f"{option}: {str(existing)!r} is a file, and a folder is needed; choose another place"
        )
        if not existing.is_dir():
            raise UserError(is_file)
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))


def check_json(option: str, path: Path, kind: str, is_ours: Callable[[Any], bool]) -> None:
    """Raise `UserError` where a JSON file cannot be written, or would replace anything but our own.

    `kind`: what the file should be, in words. `is_ours`: whether the content of such a file is what
    this command writes.
    """
    check_folder(option, path.parent)
    # /dev/stdout is written to as it is
    if not path.exists() or not (path.is_file() or path.is_dir()):
        return
    try:
        content = path.read_bytes()
        fine = not content or is_ours(json.loads(content))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        fine = False
    if not fine:
        raise UserError(f"{option}: {str(path)!r} is there and not {kind}; choose another name")


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} where none can be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def make_folder(option: str, folder: Path) -> None:
    """Make a folder that may be there already.

    Raises `UserError` where it cannot be made, or not be written into.
    """
    check_folder(option, folder)
    with written_to(option, folder):
        folder.mkdir(parents=True, exist_ok=True)
