"""How a command ends at Ctrl-C, or without files left to open, if its `main` does not catch it."""

import sys
from pathlib import Path
from types import TracebackType

from adora_vl.utils.open_files import open_files_message

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
EXIT_FAILED = 1
# The folders of this project. Its code is known by where it lies, since a user may have packages
# and folders of these names.
PROJECT_FOLDERS = tuple(
    Path(__file__).resolve().parents[2] / name for name in ("adora_vl", "data_prep", "eval")
)
_INSTALLED_COMMAND = "adora-vl"


def _runs_command_of_ours() -> bool:
    """Return whether this process runs a command of this project, and not a script of the user's.

    That is `adora-vl`, or `python -m` with one of our modules.
    """
    main_module = sys.modules["__main__"]
    # It is None for a script, such as the installed command `adora-vl`.
    spec = getattr(main_module, "__spec__", None)
    if spec is None:
        return Path(getattr(main_module, "__file__", "")).name == _INSTALLED_COMMAND
    file = Path(spec.origin or "").resolve()
    return any(file.is_relative_to(folder) for folder in PROJECT_FOLDERS)


def install_interrupt_hook() -> None:
    """Let Ctrl-C end a command of this project in one line, and not in a traceback.

    Each command catches Ctrl-C in its `main`. This is for the seconds before that, in which Python
    imports the command. A limit of open files that is reached anywhere is one line too. A process
    that runs anything else keeps its `sys.excepthook`.
    """
    earlier_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print one line for such an end of a command of ours; call the earlier hook for others."""
        open_files_line = open_files_message(error)
        is_interrupt = issubclass(kind, KeyboardInterrupt)
        is_one_line = is_interrupt or open_files_line != ""
        if not is_one_line or not _runs_command_of_ours():
            earlier_hook(kind, error, trace)
            return
        # If the hook raises SystemExit, Python ends with its exit code.
        if open_files_line:
            print(f"error: {open_files_line}", file=sys.stderr)
            raise SystemExit(EXIT_FAILED)
        print("interrupted", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED)

    sys.excepthook = hook
