"""A client for OpenAI-compatible endpoints: evaluated models, judges of answers, and rewards.

It has concurrent calls, attempts with growing waits, a cache on disk, and a budget. A call that
fails raises `EndpointError`; it is never taken for an answer, and never stored. The key is read
from an environment variable and is shown nowhere.

The `openai` package is not used. Its retries count neither towards a budget nor for an answer of
the wrong form, so that the loop below would stay. It takes a second to import, and it sends to any
address what OPENAI_CUSTOM_HEADERS holds.
"""

import asyncio
import hashlib
import ipaddress
import json
import os
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import httpx

from adora_vl.utils.errors import SpokenError, UserError
from adora_vl.utils.files import KeptAnswers, written_to
from adora_vl.utils.secrets import masked_text, note_secret

_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
_REFUSED = (401, 403)
# What servers say of a prompt that has no room in the model's context, and of an answer for which
# there is none left.
_LONG_PROMPT = re.compile(
    r"context[ _](length|window|size)|too long|longer than|max_model_len", re.IGNORECASE
)
_LONG_ANSWER = re.compile(r"max_(completion_)?tokens|in the completion", re.IGNORECASE)
_LONGEST_WAIT_S = 60.0
# bytes that are read of what a server says about a refused call, and characters shown
_SAID = 4096
_SHOWN = 200
_LARGEST_REPLY = 32 * 2**20  # bytes; a million tokens of text are a quarter of it
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Endpoint:
    """`timeout_s` bounds a whole attempt, to the reply's last byte; `wait_s` doubles from one
    attempt to the next.
    """

    url: str  # such as http://localhost:8000/v1
    model: str
    key_variable: str = "OPENAI_API_KEY"  # of the environment; no key is sent where it is not set
    timeout_s: float = 60.0
    attempts: int = 4
    wait_s: float = 1.0
    workers: int = 8
    body: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request


@dataclass(frozen=True)
class Reply:
    """One answer of a model behind an endpoint, or of a local one.

    `finish_reason` is `stop` or `length`; with tools also `calls` or `room`, as a rollout's end.
    `n_tokens` counts the end token; both numbers of tokens are 0 where a server does not say them.
    `calls`: of tools, in order; None without.
    """

    text: str
    n_tokens: int
    finish_reason: str
    n_prompt_tokens: int
    calls: tuple[Mapping[str, Any], ...] | None = None
    thinking_opened: bool = False  # whether its prompt is known to end in `<think>`


class EndpointError(SpokenError):
    """One call gave no usable answer; `str` says why.

    `again`: whether another attempt may succeed. `refused`: the server takes no call with this key.
    `too_long`: nor with this prompt, which the model's context does not hold. `unreachable`: nobody
    answers at the address.
    """

    def __init__(
        self,
        reason: str,
        *,
        again: bool = True,
        wait_s: float = 0.0,
        refused: bool = False,
        too_long: bool = False,
        unreachable: bool = False,
    ) -> None:
        """Begin an error. `wait_s`: how long the server asks to wait before another attempt."""
        super().__init__(reason)
        self.again = again
        self.wait_s = wait_s
        self.refused = refused
        self.too_long = too_long
        self.unreachable = unreachable


def check_url(name: str, url: str) -> str:
    """Return an http address without credentials in it.

    Raises `UserError`, in which `name` stands for the option.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        sound = parts.scheme in ("http", "https") and host != b"" and parts.port != 0
    except ValueError:  # brackets without an end, a port that is no number, a name that no host has
        sound = False
    if not sound or not url.isprintable() or " " in url:
        address = url.rpartition("@")[2]  # before it a key may stand
        raise UserError(
            f"{name}: {address!r:.80} is no http address; give one such as http://localhost:8000/v1"
        )
    if parts.username or parts.password or parts.query:
        raise UserError(
            f"{name}: an address with a key in it would be shown; put the key into the environment"
        )
    return url.rstrip("/")


class ChatClient:
    """Asks an endpoint, from several threads at once."""

    def __init__(
        self, endpoint: Endpoint, *, cache: Path | None = None, budget: int | None = None
    ) -> None:
        """Create the client, and read the answers of before.

        Args:
            endpoint: where calls go, and with which model.
            cache: a file of earlier answers, by the request; None for no cache.
            budget: the largest number of calls, each attempt one; None for any.

        Raises `UserError` for a cache that cannot be read.
        """
        self._fields = {"model": endpoint.model, **endpoint.body}
        self.endpoint = endpoint
        self.budget = budget
        self.calls = 0
        self._lock = threading.Lock()
        self._file = cache
        self._answers = None
        if cache is not None:
            with written_to("judge_cache", cache):
                self._answers = KeptAnswers(cache)

    def cached(self, messages: Messages) -> str | None:
        """Return the answer to these messages that is on the disk, None without one."""
        return None if self._answers is None else self._answers.get(self._key(messages))

    def _key(self, messages: Messages) -> str:
        """Return the key of a request in the cache."""
        # Not the address: the same model on another port or node gives the same answers.
        request = [self._fields, list(messages)]
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def ask(self, messages: Messages, read: Callable[[str], str]) -> str:
        """Return what `read` makes of the answer, which `cached` gives from now on.

        `read` may raise `EndpointError` for an answer of the wrong form, which is then asked for
        again, unless it was cut off at the limit on its tokens.
        """

        def asked() -> str:
            """Return what `read` makes of one reply."""
            reply = self._call(messages, {})
            try:
                return read(reply.text)
            except EndpointError as error:
                if reply.finish_reason != "length":
                    raise
                # The next attempt would end at the same limit.
                cut = f"{error}; it was cut off at the limit on its tokens"
                raise EndpointError(cut, again=False) from error

        answer: str = self._patiently(asked)
        if self._answers is not None and self._file is not None:
            with written_to("judge_cache", self._file):
                self._answers.put(self._key(messages), answer)
        return answer

    def chat(self, messages: Messages, **body: Any) -> Reply:
        """Return one answer with its counts, never from the cache.

        `body`: fields of this request. Raises `EndpointError`.
        """
        answer: Reply = self._patiently(lambda: self._call(messages, body))
        return answer

    def each(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Return the result of `function` for each item, in order.

        As many calls run at once as there are workers. Their threads are daemons, so that after
        Ctrl-C nobody waits for the calls under way: with their further attempts they may take many
        minutes.
        """

        def named() -> None:
            threading.current_thread().name = "endpoint"

        with ThreadPool(self.endpoint.workers, named) as threads:
            return threads.map(function, items, chunksize=1)

    def _patiently(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call, which is tried several times.

        The wait between two attempts doubles, and is at least what the server asks for. Raises
        `EndpointError` after the last attempt, and for an error that another attempt cannot mend.
        """
        wait = self.endpoint.wait_s
        for attempt in range(1, self.endpoint.attempts + 1):
            try:
                return call()
            except EndpointError as error:
                if attempt == self.endpoint.attempts or not error.again:
                    why = f"{error} (attempt {attempt})"
                    raise EndpointError(
                        why,
                        refused=error.refused,
                        too_long=error.too_long,
                        unreachable=error.unreachable,
                    ) from error
                time.sleep(min(max(wait, error.wait_s), _LONGEST_WAIT_S))
            wait *= 2
        raise AssertionError("at least one attempt")

    def _call(self, messages: Messages, body: Mapping[str, Any]) -> Reply:
        """Make one call, which counts towards the budget. Raises `EndpointError`."""
        with self._lock:
            if self.budget is not None and self.calls >= self.budget:
                raise EndpointError(f"the budget of {self.budget} calls is used up", again=False)
            self.calls += 1
        # Fields of the one call take precedence over those of the endpoint.
        content = json.dumps({**self._fields, "messages": list(messages), **body}).encode()
        received = self._post(content)
        try:
            reply = json.loads(received)
            choice = reply["choices"][0]
            usage = reply.get("usage") or {}
            return Reply(
                text=_text_of(choice),
                n_tokens=_count(usage.get("completion_tokens")),
                finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
                n_prompt_tokens=_count(usage.get("prompt_tokens")),
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise EndpointError("the reply is not a chat completion") from error

    def _post(self, content: bytes) -> bytes:
        """Send a request with the key, and return the body of the reply.

        Raises `EndpointError`, which says whether another attempt may help, how long to wait for
        it, whether the key was refused, and whether the prompt is too long.
        """
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(self.endpoint.key_variable, "").strip()
        if not (key.isascii() and key.isprintable()):  # the library's own error would show it
            wrong = (
                "has a character that no header can hold, such as a line break; set it to the "
                "key alone"
            )
            raise EndpointError(
                f"the key in {self.endpoint.key_variable} {wrong}", again=False, refused=True
            )
        if key:
            note_secret(key)
            headers["Authorization"] = f"Bearer {key}"
        address = f"{self.endpoint.url.rstrip('/')}/chat/completions"
        try:
            status, reply_headers, received = fetch(
                address, timeout_s=self.endpoint.timeout_s, content=content, headers=headers
            )
        except (
            OSError,
            httpx.HTTPError,
            httpx.InvalidURL,
            ValueError,
        ) as error:  # no connection, too late, no HTTP
            is_unreachable = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise EndpointError(
                f"{type(error).__name__}: {error}", unreachable=is_unreachable
            ) from error
        if httpx.codes.is_success(status):
            return received
        again = status in _RETRIED
        why = "" if again else _in_a_line(received, key)
        if status == httpx.codes.NOT_FOUND:  # an address that goes on too far, or not far enough
            why = f" at {address}{why}"
        raise EndpointError(
            f"HTTP {status}{why}",
            again=again,
            wait_s=_seconds(reply_headers.get("Retry-After")),
            refused=status in _REFUSED,
            too_long=bool(_LONG_PROMPT.search(why)) and not _LONG_ANSWER.search(why),
        )


Headers = Mapping[str, str]
Exchanged = tuple[int, Headers, bytes]  # status, headers and body


def fetch(
    address: str, timeout_s: float, content: bytes | None = None, headers: Headers | None = None
) -> Exchanged:
    """Return status, headers and body of one exchange, a GET where there is no `content`.

    All of it ends after `timeout_s`. The proxy of the environment is used, but not for this machine
    itself, and no redirect is followed: the key goes to the address that the user named. Raises
    what httpx raises, `OSError`, and `EndpointError` for a body without end.
    """
    exchange = partial(
        asyncio.run, _exchange(address, timeout_s=timeout_s, content=content, headers=headers)
    )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return exchange()
    with ThreadPool(1) as threads:  # a notebook runs a loop on this one
        return threads.apply(exchange)


async def _exchange(
    address: str, timeout_s: float, content: bytes | None, headers: Headers | None
) -> Exchanged:
    """Make one HTTP exchange within `timeout_s`.

    The body of an error is read only as far as it is shown. Raises `EndpointError` for a body
    without end, `TimeoutError`, and what httpx raises.
    """
    received = bytearray()
    asking = httpx.AsyncClient(verify=_trusted(), trust_env=not is_here(address), timeout=None)  # noqa: S113  # below
    method = "GET" if content is None else "POST"
    try:
        call = asking.stream(method, address, content=content, headers=headers)
        async with asyncio.timeout(timeout_s), asking, call as reply:
            async for part in reply.aiter_bytes():
                received += part
                if not reply.is_success and len(received) > _SAID:
                    break
                if len(received) > _LARGEST_REPLY:
                    raise EndpointError(
                        f"the reply is larger than {_LARGEST_REPLY / 2**20:g} MiB", again=False
                    )
    except TimeoutError:
        raise TimeoutError("the call took too long") from None
    return reply.status_code, reply.headers, bytes(received)


@cache
def _trusted() -> ssl.SSLContext:
    """Return the certificates of this machine, read once."""
    return ssl.create_default_context()


def is_here(address: str) -> bool:
    """Return whether an address leads to this machine itself, where no proxy can lead."""
    host = (urllib.parse.urlsplit(address).hostname or "").lower()
    try:
        ip_address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return ip_address.is_loopback or ip_address.is_unspecified


def _text_of(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice in a reply.

    A server with a reasoning parser sends null where the model came to no text behind its thinking:
    that is an empty answer. Raises `EndpointError` where null stands for something else, a refusal
    or a call of a tool, and `LookupError` where there is no content.
    """
    message = choice["message"]
    text = message["content"]
    if isinstance(text, str):
        return text
    reason = choice.get("finish_reason")
    is_thinking = any(message.get(key) for key in ("reasoning_content", "reasoning"))
    asks_something_else = any(message.get(key) for key in ("refusal", "tool_calls"))
    if text is None and not asks_something_else and (reason == "length" or is_thinking):
        return ""
    raise EndpointError(f"the reply has no text (its finish_reason is {reason!r})")


def _count(value: object) -> int:
    """Return a number of tokens as a server says it; 0 for what is none."""
    return int(value) if isinstance(value, int | float) and 0 < value < 2**53 else 0


def _in_a_line(received: bytes, key: str) -> str:
    """Return what the server says about a call that it refuses, without the key, in one line."""
    text = received[:_SAID].decode(errors="replace")
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    text = masked_text(text, key)
    return f": {text[:_SHOWN]}" if text else ""


def _seconds(retry_after: str | None) -> float:
    """Return the seconds that the server asks to wait for."""
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:  # a date
        return 0.0
