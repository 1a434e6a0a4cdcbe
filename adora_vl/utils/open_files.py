"""How many files a process may have open at once: the limit that `ulimit -n` shows."""

import errno
import resource

from adora_vl.utils.errors import UserError

# The engine's sockets and shared memory, connections to other ranks, files of data and checkpoints.
NEEDED_OPEN_FILES = 256
MORE_OPEN_FILES_REMEDY = (
    "`ulimit -n 1024` in a new shell allows more; where it is refused, the administrator can "
    "(nofile in /etc/security/limits.conf)"
)


def allow_needed_open_files() -> int:
    """Raise this process's limit of open files to what an engine needs, and return the limit.

    The limit of a shell is two: a soft one, which counts, and a hard one, up to which each process
    may raise it. So only a hard limit that is too low is left to the user.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return NEEDED_OPEN_FILES
    if soft_limit >= NEEDED_OPEN_FILES:
        return soft_limit
    allowed = NEEDED_OPEN_FILES
    if hard_limit != resource.RLIM_INFINITY:
        allowed = min(NEEDED_OPEN_FILES, hard_limit)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard_limit))
    return allowed


def check_open_files() -> None:
    """Raise `UserError` if this process may not open as many files as an engine needs."""
    limit = allow_needed_open_files()
    if limit < NEEDED_OPEN_FILES:
        raise UserError(
            f"open files: the limit is {limit} (ulimit -n), and vLLM or several processes open up "
            f"to {NEEDED_OPEN_FILES}; {MORE_OPEN_FILES_REMEDY}"
        )


def open_files_message(error: BaseException) -> str:
    """Return the error line where a process has reached its limit; empty for any other error."""
    if not isinstance(error, OSError) or error.errno != errno.EMFILE:
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"open files: all {limit} that are allowed (ulimit -n) are in use; {MORE_OPEN_FILES_REMEDY}"
    )
