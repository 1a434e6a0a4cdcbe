"""The families of errors: the user's mistakes (exit code 2), and a run that must not or cannot go
on (exit code 1).
"""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

from adora_vl.utils.secrets import masked_text


class SpokenError(Exception):
    """An error whose words people read, on the screen and in files: it has no secrets in them."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*(masked_text(word) if isinstance(word, str) else word for word in words))


class UserError(SpokenError, ValueError):
    """The input is wrong: one line that names the key or row, its value and what would be right.

    Exit code 2.
    """


def refuse(*faults: tuple[object, str]) -> None:
    """Raise `UserError` with the words of the first fault that holds."""
    for holds, words in faults:
        if holds:
            raise UserError(words)


class SharedUserError(UserError):
    """A `UserError` that all ranks raise together, so that only the first rank prints it."""


class RolloutError(SpokenError, RuntimeError):
    """Engine and trainer do not see the same thing: learning from these rollouts would be learning
    from noise.
    """


class EngineError(RolloutError):
    """The engine itself failed; its own error is the cause."""


class NoServerError(RolloutError):
    """No vLLM server is left to ask, or to give weights to. All ranks raise it together."""


class RunError(SpokenError, RuntimeError):
    """The run cannot go on; the message says why, and from where it can."""


class DiskFullError(RunError):
    """The disk is full.

    A rank may find that alone, and the traceback of what could not be written says no more.
    """


# What gloo, NCCL and torch's store say in a collective call where a process on the other side is
# gone. There is no type of its own for it: gloo raises a plain RuntimeError.
_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection was likely closed|remote process "
    r"exit|Application timeout|"
    r"Timed out waiting \d+ms|Read (error|timeout) \[|failed to (recv|send)|Socket Timeout",
    re.IGNORECASE,
)


def lost_contact(error: BaseException) -> str:
    """Return what to say where a collective call failed because another process is gone.

    The text is empty for any other error.
    """
    if not isinstance(error, RuntimeError) or _LOST.search(str(error)) is None:
        return ""
    why = in_one_line(error)
    return (
        "another process has ended, or its machine cannot be reached; its own last lines say "
        f"why ({why})"
    )


def in_one_line(error: BaseException) -> str:
    """Type and first line of an error, as in the last line of a traceback."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # a class of somebody's, whose own words fail
        lines = []
    if type(error).__name__ == "ValidationError" and hasattr(error, "errors"):
        lines = [str(error.errors()[0]["msg"])]  # pydantic's first line only counts the errors
    lines = [masked_text(line) for line in lines[:1]]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class TranslatedErrors:
    """A context in which an error is raised again as another one.

    This is a class because `contextlib.contextmanager` would let a StopIteration through as it is:
    it takes a RuntimeError with that cause for Python's own (PEP 479), and most of our errors are
    RuntimeErrors.
    """

    def __init__(self, translated: Callable[[Exception], Exception | None]) -> None:
        """Create the context.

        `translated` returns the error to raise, whose `__cause__` is kept; None keeps the original
        one.
        """
        self._translated = translated

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Raise the translation of the block's error, if it has one."""
        if not isinstance(error, Exception):
            return
        raised = self._translated(error)
        if raised is not None:
            raise raised from raised.__cause__


def engine_call(name: str) -> TranslatedErrors:
    """Turn an error of the engine inside the block into an `EngineError` of one line.

    Our own errors stay as they are.
    """

    def translated(error: Exception) -> Exception | None:
        """Return the `EngineError` of an error that is not one of ours."""
        if isinstance(error, RolloutError | RunError | UserError):
            return None
        failed = EngineError(f"the engine failed in {name} ({in_one_line(error)})")
        failed.__cause__ = error
        return failed

    return TranslatedErrors(translated)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest of `choices`, else an empty string."""
    close = nearest(word, choices)
    return f"; did you mean '{close}'?" if close else ""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the closest of `choices`; None where nothing is close."""
    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)), None)
