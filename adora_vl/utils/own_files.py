"""Files of the user's: `FILE.py:NAME` in a key is loaded here, and known again by a hash of what it
imports beside it. Loading it has a deadline, may not leave a second process behind, and ends in one
line.
"""

import ast
import faulthandler
import hashlib
import importlib.util
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from adora_vl.utils.errors import UserError, did_you_mean, in_one_line
from adora_vl.utils.hashing import content_hash

LOAD_TIMEOUT_S = 60.0
# What a deadline may be: below, a call could not even begin; above, the timers of Python and of the
# system (2^63 nanoseconds, with the time of grace) raise an OverflowError.
SHORTEST_S = 0.001
LONGEST_S = 10**9
GRACE_S = 30.0  # so long after the deadline a call that Python cannot interrupt ends the process
_AGAIN_S = 1.0  # between signals, for a function that catches the first one
# The folders of this project. A user's own file may lie beside an `eval/` of his own, so they are
# known by where they lie; `adora_vl` is ours wherever the file lies.
_OURS = tuple(
    Path(__file__).resolve().parents[2] / name for name in ("adora_vl", "data_prep", "eval")
)
_beside: list[Path] = []  # the folder of this process's config


@dataclass(frozen=True)
class FromFile:
    """What an entry names.

    `file`: as the entry writes it. `hash`: of the file and its neighbours.
    """

    value: Any
    file: str
    hash: str


def is_own(entry: str) -> bool:
    """Return whether an entry names a file, and not one of ours."""
    return ".py:" in entry or entry.endswith(".py")


def own_name(entry: str) -> str:
    """Return what an entry names in its file: `brevity` of `my_rewards.py:brevity`."""
    return entry.rpartition(":")[2]


def is_function(value: object) -> bool:
    """Return whether a value is a function, and not a class."""
    return callable(value) and not inspect.isclass(value)


def function_name(function: Any) -> str:
    """Return the name of a function or, below `partial`, of the function inside."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def source_hash(function: Any) -> str:
    """Return a hash of a function's own text, or of a builtin's name.

    The hash is of the function and not of its file, since the file may be the script that says how
    long to train.
    """
    while isinstance(function, partial):
        function = function.func
    text = function_name(function)
    named = inspect.isroutine(function) or inspect.isclass(function)
    with suppress(OSError, TypeError):
        text = inspect.getsource(function if named else type(function))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def search_files_beside(config: Path | None) -> None:
    """Look for files beside this config first, from now on.

    `config` is the one that the process was started with; None is none.
    """
    _beside[:] = [config.parent] if config else []


def from_file(
    key: str, entry: str, noun: str = "function", fits: Callable[[Any], bool] = is_function
) -> FromFile:
    """Load what `FILE.py:NAME` in `key` stands for.

    The file is looked for beside the config, then in the working directory. Raises `UserError` for
    a file that does not exist or fails, with the line that failed, and for a name that it does not
    have.

    Args:
        key: the key that has the entry, for messages.
        entry: `FILE.py:NAME`.
        noun: what the value has to be, in one word for messages, such as `function`.
        fits: whether a value is that.
    """
    path = _find(key, entry, noun)
    # Before the file is read: what changes from now on is another one at the next start.
    known_by = content_hash(with_neighbours(path))
    name = own_name(entry)
    module = _module(f"{key}: {entry!r}", path, name)
    loaded = getattr(module, name, None)
    if loaded is None:

        def came(value: object) -> bool:  # by an import
            return (
                inspect.isroutine(value) or inspect.isclass(value)
            ) and value.__module__ != module.__name__

        names = [
            name
            for name, value in vars(module).items()
            if fits(value) and not (name.startswith("_") or came(value))
        ]
        contents = f"it has {', '.join(names)}" if names else f"it has no {noun}"
        raise UserError(
            f"{key}: {entry!r}: no {noun} {name!r} there; {contents}{did_you_mean(name, names)}"
        )
    if not fits(loaded):
        raise UserError(
            f"{key}: {entry!r}: {name} is no {noun} (it is of type {type(loaded).__name__})"
        )
    return FromFile(loaded, entry.rpartition(":")[0], known_by)


def _find(key: str, entry: str, noun: str) -> Path:
    """Return the file of an entry, beside the config or in the working directory.

    Raises `UserError` for an entry that is no `FILE.py:NAME`, and where there is no such file.
    """
    name, colon, object_name = entry.rpartition(":")
    if not colon or not object_name.isidentifier():
        raise UserError(
            f"{key}: {entry!r} names no {noun}; write FILE.py:{noun.upper()}, with a name in the "
            "file"
        )
    folders = dict.fromkeys(folder.resolve() for folder in (*_beside, Path.cwd()))
    for folder in folders:
        path = (folder / Path(name).expanduser()).resolve()
        if path.is_file():
            return path
    searched = " or in ".join(repr(str(folder)) for folder in folders)
    raise UserError(f"{key}: {entry!r}: there is no file {name!r} in {searched}")


def with_neighbours(path: Path) -> set[Path]:
    """Return a file and the modules beside it that it imports, and those that these import.

    Modules in packages below it count too, and imports inside a function. The standard library's
    `modulefinder` ends in an error for a package without `__init__.py`.
    """
    root = path.parent
    files = set[Path]()
    pending = [path]
    while pending:
        file = pending.pop()
        if file in files or not file.is_file():
            continue
        is_ours = any(file.is_relative_to(folder) for folder in _OURS)
        if is_ours and file != path:
            continue
        files.add(file)
        for name in _imported(file, file.parent.relative_to(root).parts):
            for module_path in (root.joinpath(*name[:end]) for end in range(1, len(name) + 1)):
                pending += [
                    module_path.with_name(f"{module_path.name}.py"),
                    module_path / "__init__.py",
                ]
    return files


def _imported(file: Path, package: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the names that a file of `package` imports, each in its parts.

    `from a.b import c` gives `a.b.c`, which may be a module or not.
    """
    names: list[tuple[str, ...]] = []
    with suppress(SyntaxError, ValueError):  # loading the file says what is wrong
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names += [tuple(alias.name.split(".")) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                parents = package[: len(package) + 1 - node.level] if node.level else ()
                names += [
                    (*parents, *filter(None, (node.module or "").split(".")), alias.name)
                    for alias in node.names
                ]
    return [name for name in names if name[0] != "adora_vl"]


def _module(where: str, path: Path, object_name: str) -> ModuleType:
    """Load a file of the user's as a module, once in a process, and return it.

    Raises `UserError` where it fails, with the line that failed.
    """
    name = f"adora_own_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:  # so that two functions of one file share its globals
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # at the end: files beside it can be imported, and hide nothing installed
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        with (
            back_in(Path.cwd()),
            deadline(LOAD_TIMEOUT_S),
            in_one_process(f"{path.name}:{object_name}"),
        ):
            spec.loader.exec_module(module)
    except (Exception, SystemExit, OverdueError) as error:
        del sys.modules[name]
        _refuse(where, path, error)
    return module


def _refuse(where: str, path: Path, error: BaseException) -> NoReturn:
    """Raise the `UserError` for a file that failed, with the last of its lines in the traceback."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    line = (
        error.lineno
        if isinstance(error, SyntaxError) and error.filename == str(path)
        else lines[-1:]
    )
    at = f"line {line[0] if isinstance(line, list) else line}: " if line else ""
    raise UserError(f"{where} cannot be loaded: {at}{in_one_line(error)}") from None


class OverdueError(BaseException):
    """The deadline has passed.

    It is not an `Exception`, since a reward function may catch those.
    """

    def __str__(self) -> str:
        return "it did not return before the deadline"


@contextmanager
def in_one_process(label: str) -> Iterator[None]:
    """End a process that the block has forked and that leaves it, as it would be a second run.

    This is the innermost of a call's blocks: `backstop` would wait for a thread that a forked
    process does not have. `label`: begins the line that is written then.
    """
    pid = os.getpid()
    try:
        yield
    except SystemExit as error:
        if os.getpid() != pid:
            os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))
        raise
    finally:
        if os.getpid() != pid:
            line = (
                f"{label}: it forked a process that did not end in it (os._exit); that process "
                "was ended\n"
            )
            os.write(2, line.encode())  # the buffers of sys.stderr are the first process's
            os._exit(1)


@contextmanager
def back_in(folder: Path) -> Iterator[None]:
    """Makes `folder` the working directory again when the block ends: paths of the run start there."""
    try:
        yield
    finally:
        os.chdir(folder)


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raise `OverdueError` inside the block after `seconds`, wherever Python code runs or waits.

    None is no deadline. A signal can only interrupt the main thread; in other threads nothing is
    raised.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def overdue(*_: object) -> None:
        raise OverdueError

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, overdue)
    remaining_s, interval = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining_s:  # someone else's timer goes on
            signal.setitimer(
                signal.ITIMER_REAL, max(remaining_s - (time.monotonic() - began), 1e-3), interval
            )


_guarded: list[float] = []  # the calls under `backstop`, one in another


@contextmanager
def backstop(seconds: float | None) -> Iterator[None]:
    """Ends the process, with a traceback, if a call is long overdue: compiled code hears no signal."""
    if seconds is None:
        yield
        return
    if not _guarded and sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=sys.__stderr__)
    _guarded.append(seconds)
    try:
        yield
    finally:
        _guarded.pop()
        if not _guarded:
            faulthandler.cancel_dump_traceback_later()
