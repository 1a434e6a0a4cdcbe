"""Loads functions and classes from files of the user's, which a key names as `FILE.py:NAME`.

A file is known again by a hash of it and of what it imports beside it. A file that fails, or does
not return in time, ends in one line.
"""

import ast
import dis
import hashlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from adora_vl.utils.call_guards import (
    OverdueError,
    deadline,
    ending_forked_children,
    restoring_working_directory,
)
from adora_vl.utils.errors import UserError, describe_error, did_you_mean
from adora_vl.utils.hashing import content_hash
from adora_vl.utils.interrupts import PROJECT_FOLDERS

LOAD_TIMEOUT_S = 60.0
# The folder of the config that this process was started with, as the only entry; empty without one
_config_folders: list[Path] = []


@dataclass(frozen=True)
class LoadedObject:
    """The function or class that an entry `FILE.py:NAME` of a key names."""

    function_or_class: Any
    """What has that name in the file."""
    file: str
    """The file, as the entry writes it."""
    hash: str
    """Hash of the file and of the modules beside it that it imports."""


def is_users_file(entry: str) -> bool:
    """Return whether an entry of a key is `FILE.py:NAME` or `FILE.py`, a file of the user's."""
    return ".py:" in entry or entry.endswith(".py")


def name_without_file(entry: str) -> str:
    """Return what an entry names in its file: `brevity` of `my_rewards.py:brevity`."""
    return entry.rpartition(":")[2]


def is_function(value: object) -> bool:
    """Return whether a value is a function, and not a class."""
    return callable(value) and not inspect.isclass(value)


def function_name(function: Any) -> str:
    """Return the name of a function; for a `partial`, that of the function that it calls."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def source_hash(function: Any) -> str:
    """Return a hash of a function's source, which differs when the user has changed the function.

    The rest of its file is not hashed: it may be the script that starts the training, with settings
    that may change. A function without source, such as a builtin, is hashed by its name. Values
    that are bound to the function, such as the arguments of a `partial`, are hashed too.
    """
    bound_values = _bound_values(function)
    while isinstance(function, partial):
        function = function.func
    text = function_name(function)
    has_definition = inspect.isroutine(function) or inspect.isclass(function)
    # An object that can be called has no source, but its class has.
    definition = function if has_definition else type(function)
    with suppress(OSError, TypeError):
        text = inspect.getsource(definition)
    if bound_values:
        # A value that refers to itself has no text.
        with suppress(ValueError, RecursionError):
            text += json.dumps(bound_values, default=_type_name, skipkeys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _bound_values(function: object) -> list[object]:
    """Return the values that a function uses and that its source does not show.

    They are the arguments of a `partial`, the fields of a frozen dataclass with `__call__`, and the
    texts and numbers that an inner function reads from its outer function. Values that may change
    during the run, such as a count of calls, are left out. For example, `partial(f, 2, low=1)`
    gives 2 and ("low", 1).
    """
    values: list[object] = []
    # the arguments of `partial`
    while isinstance(function, partial):
        values += [*function.args, *sorted(function.keywords.items())]
        function = function.func

    # The fields of a dataclass with `__call__`. Only those of a frozen one cannot change. A class
    # itself has no values.
    if is_dataclass(function) and not isinstance(function, type):
        parameters = getattr(function, "__dataclass_params__", None)
        if getattr(parameters, "frozen", False):
            for field in fields(function):
                values.append([field.name, getattr(function, field.name)])

    # The outer function's texts and numbers that an inner function reads and never assigns. Python
    # keeps the outer function's variables in cells, in the order of `co_freevars`.
    code = getattr(function, "__code__", None)
    names = getattr(code, "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    assigned_names = _assigned_outer_names(code) if isinstance(code, CodeType) else set()
    for name, cell in zip(names, cells, strict=True):
        if name in assigned_names:
            continue
        # A variable that has no value yet has an empty cell, which raises when it is read.
        with suppress(ValueError):
            if isinstance(cell.cell_contents, str | int | float):
                values.append([name, cell.cell_contents])
    return values


def _assigned_outer_names(code: CodeType) -> set[str]:
    """Return the variables of outer functions that an inner function assigns (`nonlocal`).

    `code`: the code of the inner function. Functions that are defined in it are searched too.
    """
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname == "STORE_DEREF"
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _assigned_outer_names(constant)
    return names & set(code.co_freevars)


def _type_name(value: object) -> str:
    """Return the name of the type of a value that has no plain text, for `json.dumps`."""
    return type(value).__qualname__


def search_files_beside(config: Path | None) -> None:
    """Let `load_from_file` look for files beside the config first, from now on.

    `config`: the config file that the process was started with; None without one.
    """
    _config_folders[:] = [config.parent] if config else []


def load_from_file(
    key: str, entry: str, noun: str = "function", fits: Callable[[Any], bool] = is_function
) -> LoadedObject:
    """Load the function or class of the user's that an entry `FILE.py:NAME` of a key names.

    The file is looked for beside the config, then in the working directory.

    Args:
        key: the key that has the entry, for messages.
        entry: `FILE.py:NAME`.
        noun: the kind of value that NAME has to be, in one word for messages.
        fits: returns whether a value is of that kind.

    Raises:
        UserError: the file does not exist, fails while it is loaded (the message has the line), or
            has no value of that name and kind.
    """
    path = _find_file(key, entry, noun)
    # The hash is taken before the file is loaded. If the file changes in between, the next start
    # sees another hash, and not the same hash for other code.
    files_hash = content_hash(file_with_local_imports(path))
    file, _, name = entry.rpartition(":")
    module = _load_module(f"{key}: {entry!r}", path, name)
    value = getattr(module, name, None)
    if value is None:
        names = _fitting_names(module, fits)
        contents = f"it has {', '.join(names)}" if names else f"it has no {noun}"
        raise UserError(
            f"{key}: {entry!r}: no {noun} {name!r} there; {contents}{did_you_mean(name, names)}"
        )
    if not fits(value):
        raise UserError(
            f"{key}: {entry!r}: {name} is no {noun} (it is of type {type(value).__name__})"
        )
    return LoadedObject(function_or_class=value, file=file, hash=files_hash)


def _fitting_names(module: ModuleType, fits: Callable[[Any], bool]) -> list[str]:
    """Return the names of a module's values for which `fits` returns True, to suggest them.

    Private names are left out, and so are functions and classes that the module has imported.
    """
    names = []
    for name, value in vars(module).items():
        has_module = inspect.isroutine(value) or inspect.isclass(value)
        is_imported = has_module and value.__module__ != module.__name__
        if fits(value) and not name.startswith("_") and not is_imported:
            names.append(name)
    return names


def _find_file(key: str, entry: str, noun: str) -> Path:
    """Return the path of the file that an entry names.

    It is looked for beside the config, then in the working directory.

    Args:
        key: the key that has the entry, for messages.
        entry: `FILE.py:NAME`.
        noun: what NAME has to be, in one word for messages, such as `function`.

    Raises:
        UserError: the entry has another form, or there is no such file.
    """
    file, colon, object_name = entry.rpartition(":")
    if colon == "" or not object_name.isidentifier():
        raise UserError(
            f"{key}: {entry!r} names no {noun}; write FILE.py:{noun.upper()}, with a name in the "
            "file"
        )
    # each folder once: the config may lie in the working directory
    folders = dict.fromkeys(folder.resolve() for folder in (*_config_folders, Path.cwd()))
    for folder in folders:
        path = (folder / Path(file).expanduser()).resolve()
        if path.is_file():
            return path
    searched = " or in ".join(repr(str(folder)) for folder in folders)
    raise UserError(f"{key}: {entry!r}: there is no file {file!r} in {searched}")


def file_with_local_imports(path: Path) -> set[Path]:
    """Return a Python file and all files beside it that it imports, directly or indirectly.

    The content of these files decides what the file does, so they are hashed together. Modules in
    packages below its folder count too, and imports inside a function. The standard library's
    `modulefinder` is not used, since it fails for a package without `__init__.py`.
    """
    root = path.parent
    files = set[Path]()
    pending = [path]
    while pending:
        file = pending.pop()
        # Most names are those of installed modules, which have no file beside this one.
        if file in files or not file.is_file():
            continue
        # this project's own modules have a version, and are no part of the user's code
        is_of_project = any(file.is_relative_to(folder) for folder in PROJECT_FOLDERS)
        if is_of_project and file != path:
            continue
        files.add(file)
        package = file.parent.relative_to(root).parts
        for name_parts in _imported_names(file, package):
            # `import a.b.c` loads the modules a, a.b and a.b.c
            for end in range(1, len(name_parts) + 1):
                module_path = root.joinpath(*name_parts[:end])
                pending.append(module_path.with_name(f"{module_path.name}.py"))
                pending.append(module_path / "__init__.py")
    return files


def _imported_names(file: Path, package: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the dotted names that a Python file imports, each as a tuple of its parts.

    `from a.b import c` gives `("a", "b", "c")`, whether `c` is a module or a name in `a.b`.

    Args:
        file: the file. One with a syntax error imports nothing; loading it says what is wrong.
        package: the names of the packages that the file lies in, which relative imports start from.
    """
    names: list[tuple[str, ...]] = []
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names += [tuple(alias.name.split(".")) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                # The level counts the dots before the name. One dot is the file's own package, and
                # each further dot is the package around it, which has one part less.
                is_relative = node.level > 0
                parents = package[: len(package) - (node.level - 1)] if is_relative else ()
                module_parts = node.module.split(".") if node.module else []
                names += [(*parents, *module_parts, alias.name) for alias in node.names]
    return [name_parts for name_parts in names if name_parts[0] != "adora_vl"]


def _load_module(key_and_entry: str, path: Path, object_name: str) -> ModuleType:
    """Load a file of the user's as a module, once in a process, and return the module.

    Args:
        key_and_entry: the key and its entry, with which an error message begins.
        path: the file.
        object_name: NAME of the entry, for a line about a process that the file forks.

    Raises:
        UserError: the file fails; the message has the line of the file that failed.
    """
    path_hash = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"adora_own_{path.stem}_{path_hash}"
    # once, so that two functions of one file share its globals
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The file may import those beside it. Their folder comes last, so that they hide no library.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        with (
            restoring_working_directory(Path.cwd()),
            deadline(LOAD_TIMEOUT_S),
            ending_forked_children(f"{path.name}:{object_name}"),
        ):
            spec.loader.exec_module(module)
    except (Exception, SystemExit, OverdueError) as error:
        del sys.modules[name]
        line_number = _failed_line(path, error)
        line_text = f"line {line_number}: " if line_number is not None else ""
        raise UserError(
            f"{key_and_entry} cannot be loaded: {line_text}{describe_error(error)}"
        ) from None
    return module


def _failed_line(path: Path, error: BaseException) -> int | None:
    """Return the number of the line in a user's file that an error came from.

    It is the line of a syntax error, or the innermost line of the file in the traceback. None where
    the traceback has no line of the file.
    """
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or None  # 0 for an error of the file as a whole
    line_numbers = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    return line_numbers[-1] if line_numbers else None
