"""Locks that a killed build left behind.

DeepSpeed compiles an operator when a run first needs it, and torch guards the build with an empty file named `lock`
(`torch.utils.file_baton`). A build that is killed leaves the file, and every later run on the machine waits for it
without end and without a word.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# A lock without a builder on this machine may be held on another machine that shares the home folder, or by a build
# that has not called ninja yet. Either writes to its folder sooner than this.
PATIENCE_S = 180.0


def builds_folder() -> Path:
    """Where torch compiles extensions, as `torch.utils.cpp_extension` finds it, without the seconds of importing it."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch_extensions"


def _works_in(folder: Path) -> bool:
    """Whether a process of this machine compiles there: ninja and its compilers run in the folder of the build."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.samefile(folder):
                return True
        except OSError:
            continue  # it has ended, or is another user's
    return False


def _quiet_for_s(folder: Path) -> float:
    """Seconds since something in the folder was last written."""
    times = [folder.stat().st_mtime]
    for file in folder.iterdir():
        try:
            times.append(file.stat().st_mtime)
        except FileNotFoundError:
            continue  # a compiler's temporary file
    return time.time() - max(times)


def is_left_behind(lock: Path, *, works_in: Callable[[Path], bool] = _works_in) -> bool | None:
    """True for a lock whose build was killed, False for one that is held or gone, None while that cannot be told."""
    try:
        quiet_s = _quiet_for_s(lock.parent)
    except OSError:
        return False
    if not lock.exists() or works_in(lock.parent):
        return False
    return True if quiet_s > PATIENCE_S else None


def release_killed_builds(*, sleep: Callable[[float], None] = time.sleep) -> None:
    """Remove the locks of killed builds; wait while one may still be held. Says so in one line on the first rank.

    The first rank of a machine removes. The others wait until it has, because torch would take a lock that vanishes for
    a build that is done.
    """
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    folder = builds_folder()
    for lock in sorted({*folder.glob("*/lock"), *folder.glob("*/*/lock")}):
        said = False
        while (left := is_left_behind(lock)) is not False:
            if left and first:
                lock.unlink(missing_ok=True)
                print(f"removed {lock}: the build that it guarded was killed", file=sys.stderr, flush=True)
                break
            if first and not said:
                print(
                    f"waiting up to {PATIENCE_S:.0f} s for a build of {lock.parent.name}, which another machine may be "
                    f"making (if none is: rm {lock})",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
                said = True
            sleep(0.5)
