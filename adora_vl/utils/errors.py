"""The families of errors of this project.

They are the user's mistakes (exit code 2), and a run that must not or cannot go on (exit code 1).
"""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

from adora_vl.utils.secrets import redact_secrets

# Longer than any path that somebody types: a value that was pasted into the wrong key
_LONG_WORD_PATTERN = re.compile(r"\S{500,}")


def _without_long_words(text: str) -> str:
    """Return a text in which each word of 500 characters or more keeps its first and last 60."""
    return _LONG_WORD_PATTERN.sub(lambda word: f"{word[0][:60]}...{word[0][-60:]}", text)


class RedactedError(Exception):
    """An error whose message people read, on the screen and in files.

    Secrets in it are hidden, and a word that nobody would read to its end is cut.
    """

    def __init__(self, *words: Any) -> None:
        shown_words = [
            _without_long_words(redact_secrets(word)) if isinstance(word, str) else word
            for word in words
        ]
        super().__init__(*shown_words)


class UserError(RedactedError, ValueError):
    """The input is wrong: one line that names the key or row, its value and what would be right.

    Exit code 2.
    """


class SharedUserError(UserError):
    """A `UserError` that all ranks raise together, so that only the first rank prints it."""


class RolloutError(RedactedError, RuntimeError):
    """Engine and trainer do not see the same model or prompts.

    To learn from such rollouts would be to learn from noise.
    """


class EngineError(RolloutError):
    """The engine itself failed; its own error is the cause."""


class NoServerError(RolloutError):
    """No vLLM server is left to ask, or to give weights to. All ranks raise it together."""


class RunError(RedactedError, RuntimeError):
    """The run cannot go on; the message says why, and from where it can."""


class DiskFullError(RunError):
    """The disk is full.

    A rank may find that alone, and the traceback of what could not be written says no more.
    """


# What gloo, NCCL and torch's store say in a collective call where a process on the other side is
# gone. There is no type of its own for it: gloo raises a plain RuntimeError.
_LOST_CONTACT_PATTERN = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection was likely closed|remote process "
    r"exit|Application timeout|"
    r"Timed out waiting \d+ms|Read (error|timeout) \[|failed to (recv|send)|Socket Timeout",
    re.IGNORECASE,
)


def lost_contact_message(error: BaseException) -> str:
    """Return the error line for a collective call that failed because another process is gone.

    It is empty for any other error.
    """
    if not isinstance(error, RuntimeError) or _LOST_CONTACT_PATTERN.search(str(error)) is None:
        return ""
    why = describe_error(error)
    return (
        "another process has ended, or its machine cannot be reached; its own last lines say "
        f"why ({why})"
    )


def describe_error(error: BaseException) -> str:
    """Return type and first line of an error, as at the end of a traceback, without secrets."""
    type_name = type(error).__name__
    try:
        lines = str(error).strip().splitlines()
    # The error may be of a class of the user's, whose `__str__` raises an error itself.
    except Exception:
        lines = []
    # The first line of pydantic's text only counts the errors, so the first error is shown.
    if type_name == "ValidationError" and hasattr(error, "errors"):
        lines = [str(error.errors()[0]["msg"])]
    return f"{type_name}: {redact_secrets(lines[0])}" if lines else type_name


class TranslatedErrors:
    """A context manager that raises an error of its block again as another error.

    This is a class because `contextlib.contextmanager` would let a StopIteration through as it is:
    it takes a RuntimeError with that cause for Python's own (PEP 479), and most of our errors are
    RuntimeErrors.
    """

    def __init__(self, translate: Callable[[Exception], Exception | None]) -> None:
        """Create the context manager.

        `translate`: returns the error to raise in place of the block's error, with the `__cause__`
        that it is to have; None where the block's error is raised as it is.
        """
        self._translate = translate

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Raise the translation of the block's error, if it has one."""
        if not isinstance(error, Exception):
            return
        translation = self._translate(error)
        if translation is not None:
            # Without `from`, the traceback would show the block's error in place of the cause.
            raise translation from translation.__cause__


def engine_call(name: str) -> TranslatedErrors:
    """Return a context manager that turns errors of the engine into `EngineError`s of one line.

    Errors of this package are raised as they are.

    `name`: the call of the engine inside the block, for the message.
    """

    def translate(error: Exception) -> Exception | None:
        """Return the `EngineError` for an error that is not of this package."""
        if isinstance(error, RolloutError | RunError | UserError):
            return None
        engine_error = EngineError(f"the engine failed in {name} ({describe_error(error)})")
        engine_error.__cause__ = error
        return engine_error

    return TranslatedErrors(translate)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest of `choices`, else an empty string."""
    closest = nearest_choice(word, choices)
    return f"; did you mean '{closest}'?" if closest is not None else ""


def nearest_choice(word: str, choices: Iterable[str], min_similarity: float = 0.6) -> str | None:
    """Return the choice that is spelled most like `word`; None where none is similar.

    `min_similarity`: from 0 to 1, as Python's `difflib` measures it.
    """
    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=min_similarity)
    return matches[0] if matches else None
