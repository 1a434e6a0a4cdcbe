"""Files that are there whole or not at all, and a line for the user where the disk refuses them."""

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

from adora_vl.utils.errors import RedactedError, UserError

_DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT)
# What safetensors and torch say when the disk is full: torch's writer says how far it came, and not
# why it came no further.
_DISK_FULL_PATTERN = re.compile(
    r"No space left|os error (28|122)\b|quota exceeded|unexpected pos \d+ vs "
    r"\d+|PytorchStreamWriter failed writing",
    re.IGNORECASE,
)
_PARTIAL_MARK = ".partial-"
GIB = 2**30
# The hidden name of what is written first: the final name, then 8 random bytes
_PARTIAL_NAME_PATTERN = re.compile(rf"\.(.+){_PARTIAL_MARK}[0-9a-f]{{16}}")
# What the hidden working folder of `replacing_folder` holds: the new folder, the old one, and the
# file by whose lock other processes know that the writing process lives
_NEW_NAME = "new"
_OLD_NAME = "old"
_LOCK_NAME = "lock"
# a client of NFS may not see another one's new file for this long (the default of `acdirmax`)
NFS_DELAY_S = 60.0


def cache_folder() -> Path:
    """Return the folder where this package keeps what may be deleted, such as hashes of files.

    It is `ADORA_VL_HOME` of the environment, or else `adora_vl` in the user's cache folder.
    """
    configured_folder = os.environ.get("ADORA_VL_HOME")
    if configured_folder:
        return Path(configured_folder)
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "adora_vl"


def escapes_folder(folder: Path, path: Path) -> bool:
    """Return whether a path below `folder` is outside of it once symbolic links are resolved.

    The link may be the path itself or a folder on the way. This guards what is read from a folder
    that somebody else made: a link in it could point to any file of this machine.
    """
    try:
        return not path.resolve().is_relative_to(folder.resolve())
    # `resolve` raises for links that lead to each other in a circle
    except (OSError, RuntimeError):
        return True


def refuse_escaping_links(key: str, folder: Path, *paths: Path) -> None:
    """Raise `UserError` for the first path below `folder` that is a link out of it.

    `key`: the option that names the folder, with which the message begins.
    """
    for path in paths:
        if escapes_folder(folder, path):
            raise UserError(
                f"{key}: {str(path)!r} is a link out of {str(folder)!r}, and what it leads to is "
                "not read; put the file itself there"
            )


@contextmanager
def replacing_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a hidden file beside `path` to write into, and rename it to `path` at the end.

    So `path` has its old content or all of the new one, never a part. If the code inside the `with`
    fails, the hidden file is removed. A `path` that is no file, such as /dev/stdout, is written to
    directly.

    Args:
        path: the file to replace or create.
        durable: whether to wait until the bytes are on the disk before the file gets its name.

    Raises:
        OSError: the file cannot be written.
    """
    is_special = path.is_relative_to("/dev") or (path.exists() and not path.is_file())
    if is_special:
        with path.open("wb") as file:
            yield file
        return
    partial = _hidden_neighbour(path)
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
    """Write a file that has its old content or all of the new one at any time.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


class JsonLinesCache:
    """A cache on disk of texts by key, such as a judge's answers or the hashes of files.

    Each entry is a JSON line `{"key": ..., "answer": ...}`. Several processes may add entries at
    once. A line that cannot be read is ignored. A killed process may leave half a line; the next
    entry then begins a new line, so it is not lost.
    """

    def __init__(self, file: Path) -> None:
        """Read the entries of `file`, which need not exist. Raises `OSError`, as `put` does."""
        self._file = file
        self._answer_by_key = dict[str, str]()
        content = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        for line in content.splitlines():
            # a line that is no such entry is skipped
            with suppress(ValueError, LookupError, TypeError, RecursionError):
                entry = json.loads(line)
                key = entry["key"]
                answer = entry["answer"]
                if isinstance(key, str) and isinstance(answer, str):
                    self._answer_by_key[key] = answer

    def get(self, key: str) -> str | None:
        """Return the text that is stored for a key; None where there is none."""
        return self._answer_by_key.get(key)

    def put(self, key: str, answer: str) -> None:
        """Store a text in the file, for this process and for later ones. Raises `OSError`."""
        self._answer_by_key[key] = answer
        line = json.dumps({"key": key, "answer": answer}).encode() + b"\n"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # A short line is appended in one write, so that lines of several processes never mix.
        with self._file.open("ab+") as file:
            is_empty = file.tell() == 0
            if not is_empty:
                # A killed process may have left half a line at the end. Then begin a new line.
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)


def wait_until_visible(path: Path) -> bool:
    """Wait for a file that another machine wrote on a shared disk; return whether it is there.

    Waiting ends after `NFS_DELAY_S` seconds, since NFS may hide a new file for so long.
    """
    deadline = time.monotonic() + NFS_DELAY_S
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)
        with suppress(OSError):  # reading the folder makes a client of NFS ask the server again
            next(path.parent.iterdir(), None)
    return True


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a new, empty folder to write into, which replaces `folder` when the block ends.

    The old folder is deleted after that. If the code inside the `with` fails, the new folder is
    removed and the old one stays. The files are on the disk before the folder gets its name.

    The exchange takes two renames. If a process is killed between them, the next call of
    `replacing_folder`, `recover_folder` or `remove_partial` gives the old folder its name back.

    Raises:
        OSError: the folder cannot be written.
    """
    recover_folder(folder)
    # the hidden folder beside `folder` that holds the new folder, and the old one before it is
    # deleted
    working_folder, lock = create_locked_folder(lambda: _hidden_neighbour(folder))
    try:
        new_folder = working_folder / _NEW_NAME
        new_folder.mkdir()
        yield new_folder
        set_default_file_modes(new_folder)
        for path in (*new_folder.rglob("*"), new_folder):
            flush_to_disk(path)
        swap_folders(new_folder, folder, old_path=working_folder / _OLD_NAME)
    finally:
        _finish_exchange(working_folder, folder)
        if lock is not None:
            os.close(lock)


def set_default_file_modes(folder: Path) -> None:
    """Give the safetensors files in `folder` the file mode of any new file, such as 644.

    Stock safetensors (0.8) gives them the mode 600, so that their owner alone can read them.
    """
    # An empty file is created, to see which mode the umask gives to a new file.
    probe = _hidden_neighbour(folder / "mode")
    with suppress(OSError):  # not every file system has access rights
        probe.touch()
        mode = probe.stat().st_mode
        probe.unlink()
        for path in folder.glob("*.safetensors"):
            path.chmod(mode & 0o777)


def swap_folders(new_folder: Path, folder: Path, old_path: Path) -> None:
    """Rename `folder`, if it exists, to `old_path`, and then `new_folder` to `folder`.

    All three are in the same file system, where a rename is atomic.
    """
    if folder.exists():
        folder.rename(old_path)
    new_folder.rename(folder)
    flush_to_disk(folder.parent)


def flush_to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's list of files, are on the disk (`fsync`)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def recover_folder(folder: Path) -> None:
    """Remove what killed processes left behind when they wrote `folder` with `replacing_folder`.

    If such a process had moved the old folder away, it gets its name back. What a process is still
    writing stays.
    """
    partial_paths = sorted(folder.parent.glob(f".{escape(folder.name)}{_PARTIAL_MARK}*"))
    working_folders = [path for path in partial_paths if is_partial(path) and path.is_dir()]
    for working_folder in abandoned_folders(working_folders):
        _finish_exchange(working_folder, folder)


def abandoned_folders(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the folders whose process is gone, so that the caller can remove them.

    `folders`: folders that `create_locked_folder` has made. The lock of a folder is held while it
    is yielded, so that no other process removes it too.
    """
    for folder in folders:
        try:
            lock = _take_lock(folder, os.O_RDWR)
        # The folder's process lives and holds the lock, or has removed the folder meanwhile.
        except OSError:
            continue
        yield folder
        os.close(lock)


def create_locked_folder(random_path: Callable[[], Path]) -> tuple[Path, int | None]:
    """Create a folder and lock a file in it, by which other processes see that this one is alive.

    Args:
        random_path: returns a random path for the folder, another one at each call.

    Returns:
        the folder, and the descriptor of the locked file in it, which the caller closes. The
        descriptor is None on a file system without locks; there nobody removes what a process left
        behind.
    """
    while True:
        folder = random_path()
        folder.mkdir(parents=True)
        try:
            lock = _take_lock(folder, os.O_RDWR | os.O_CREAT)
        # Another process has found this folder before it was locked, took it for an abandoned one,
        # and has locked it to remove it.
        except BlockingIOError:
            continue
        except OSError:
            return folder, None
        # That process may also have removed the folder already. Then another path is tried.
        if (folder / _LOCK_NAME).exists():
            return folder, lock
        os.close(lock)


def _take_lock(folder: Path, flags: int) -> int:
    """Lock the lock file in a folder, and return its descriptor, by which the lock is held.

    The kernel drops the lock when the process ends, however it ends.

    Args:
        folder: the folder.
        flags: how the file is opened, as `os.open` takes it.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: there is no such file, or the file system has no locks.
    """
    lock = os.open(folder / _LOCK_NAME, flags)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _finish_exchange(working_folder: Path, folder: Path) -> None:
    """Remove the working folder of a `replacing_folder`, whether that succeeded or not.

    The old folder gets its name back if the new one has not taken it. `working_folder`: the hidden
    folder beside `folder`, with `new` and `old` in it.
    """
    old_folder = working_folder / _OLD_NAME
    if old_folder.exists() and not folder.exists():
        old_folder.rename(folder)
    shutil.rmtree(working_folder, ignore_errors=True)


def _hidden_neighbour(path: Path) -> Path:
    """Return a hidden name beside `path` that no other process has."""
    # not named after the process: two machines that share a disk may have processes of equal number
    return path.with_name(f".{path.name}{_PARTIAL_MARK}{token_hex(8)}")


def is_partial(path: Path) -> bool:
    """Return whether a path has the hidden name under which files and folders are written first."""
    return _PARTIAL_NAME_PATTERN.fullmatch(path.name) is not None


def remove_partial(folder: Path) -> None:
    """Remove the half-written files and folders in `folder` that killed processes left behind.

    A folder that such a process was replacing gets its name back. Call this only where nobody else
    writes at the same time: it does not look for living processes.
    """
    for path in folder.glob(f".*{_PARTIAL_MARK}*"):
        match = _PARTIAL_NAME_PATTERN.fullmatch(path.name)
        if match is None:
            continue
        if path.is_dir():
            final_name = match[1]
            _finish_exchange(path, folder / final_name)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def naming_write_errors(option: str, path: Path) -> Iterator[None]:
    """Turn an error of writing inside the block into a `UserError` that says what to do.

    `option` names what the user can change, and `path` is what is written to, for the message.
    """
    try:
        yield
    except RedactedError:  # it says already what is wrong
        raise
    # Where the disk is full, safetensors and torch raise errors that are no `OSError`.
    except Exception as error:
        if isinstance(error, OSError) or disk_is_full(error):
            raise unwritable_error(option, path, error) from error
        raise


def unwritable_error(option: str, path: Path, error: Exception) -> UserError:
    """Return the `UserError` for a path that could not be written to.

    Args:
        option: what the user can change, with which the message begins.
        path: what was written to.
        error: why that failed.
    """
    remedy = "choose another place"
    if disk_is_full(error):
        remedy = f"free some space, or {remedy}"
    reason = getattr(error, "strerror", "") or error
    return UserError(f"{option}: {str(path)!r} cannot be written ({reason}); {remedy}")


def disk_is_full(error: BaseException | None) -> bool:
    """Return whether writing failed because the disk is full.

    Libraries wrap the system's error, or raise one of their own. So the error and all errors that
    it was raised from are examined, by their code and by their words.
    """
    while error is not None:
        has_full_code = isinstance(error, OSError) and error.errno in _DISK_FULL_CODES
        if has_full_code or _DISK_FULL_PATTERN.search(str(error)) is not None:
            return True
        error = error.__cause__ or error.__context__
    return False


def path_problem(path: str) -> str:
    """Return why a text cannot be a path of any file, such as `File name too long`.

    It is empty for a path that can be looked up, whether there is something or not.
    """
    try:
        # A byte of the command line that is no UTF-8 becomes a character that cannot be encoded.
        # PyArrow could not open such a path, nor could a JSON file or the screen show it.
        path.encode()
        os.stat(path)  # noqa: PTH116  # pathlib hides some of these errors, and raises others
    except UnicodeEncodeError:
        return "it is not UTF-8"
    except ValueError:
        return "a null character is in it"
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return str(error.strerror)
    return ""


def refuse_dangling(option: str, path: Path) -> None:
    """Raise `UserError` where a path, or one of its parents, is a symbolic link to nothing.

    `option`: the option that names the path, with which the message begins.
    """
    for part in (path, *path.parents):
        # These are functions of `os`, since pathlib raises an error for a name that is too long.
        is_dangling = os.path.islink(part) and not os.path.exists(part)  # noqa: PTH110, PTH114
        if is_dangling:
            link = f"{str(part)!r} is a link to {str(part.readlink())!r}, which is not there"
            raise UserError(f"{option}: {link}; make that, or remove the link")


def closest_existing(path: Path) -> Path:
    """Return the path itself if it exists, or else the closest of its parents that does."""
    candidates = (path, *path.absolute().parents)
    # the root exists always
    return next(candidate for candidate in candidates if candidate.exists())


def check_folder(option: str, folder: Path) -> None:
    """Raise `UserError` where a folder could not be made or written into, without making it.

    If the folder does not exist, the innermost folder on the way to it that exists is checked.

    `option`: what the user can change, with which the message begins.
    """
    refuse_dangling(option, folder)
    with naming_write_errors(option, folder):
        existing = closest_existing(folder)
        if not existing.is_dir():
            raise UserError(
                f"{option}: {str(existing)!r} is a file, and a folder is needed; choose another "
                "place"
            )
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))


def check_json_output(option: str, path: Path, kind: str, is_ours: Callable[[Any], bool]) -> None:
    """Raise `UserError` where a command must not write its JSON file to a path.

    That is a path that cannot be written to, or a file of the user's. A file that this command
    wrote earlier may be replaced, and so may an empty one.

    Args:
        option: the option that names the file, with which the message begins.
        path: the file.
        kind: what the command writes, in words for the message, such as `a table of the doctor`.
        is_ours: returns whether the content of a JSON file is what this command writes. It may
            raise where the content has another form.
    """
    check_folder(option, path.parent)
    # Something else than a file or a folder, such as /dev/stdout, is written to directly.
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    if is_special or not path.exists():
        return
    try:
        content = path.read_bytes()
        may_be_replaced = not content or is_ours(json.loads(content))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        may_be_replaced = False
    if not may_be_replaced:
        raise UserError(f"{option}: {str(path)!r} is there and not {kind}; choose another name")


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where the file has none that can be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def make_output_folder(folder: Path) -> None:
    """Make the folder of `--output`, with all folders on the way to it, unless it exists.

    Raises `UserError` where it cannot be made or written into.
    """
    check_folder("output", folder)
    with naming_write_errors("output", folder):
        folder.mkdir(parents=True, exist_ok=True)
