"""A client for OpenAI-compatible endpoints: evaluated models, judges of answers, and rewards.

It has concurrent calls, attempts with growing waits, a cache on disk, and a budget. A call that
fails raises `EndpointError`; it is never taken for an answer, and never stored. The key is read
from an environment variable and is shown nowhere.

The `openai` package is not used. Its retries count neither towards a budget nor for an answer of
the wrong form, so that the loop below would stay. It takes a second to import, and it sends to any
address what OPENAI_CUSTOM_HEADERS holds.
"""

import hashlib
import json
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from adora_vl.utils.cli import printable
from adora_vl.utils.daemon_threads import run_on_daemon_threads
from adora_vl.utils.errors import RedactedError, UserError
from adora_vl.utils.files import JsonLinesCache, naming_write_errors
from adora_vl.utils.http_client import (
    MAX_ERROR_BYTES,
    HttpClient,
    ReplyTooLargeError,
    fetch_reply,
)
from adora_vl.utils.secrets import redact_secrets, register_secret

# HTTP status codes after which another attempt may succeed
_RETRIED_CODES = (408, 409, 425, 429, 500, 502, 503, 504)
# What servers say of a prompt that has no room in the model's context, and of an answer for which
# there is none left.
_PROMPT_TOO_LONG_PATTERN = re.compile(
    r"context[ _](length|window|size)|too long|longer than|max_model_len", re.IGNORECASE
)
_ANSWER_TOO_LONG_PATTERN = re.compile(r"max_(completion_)?tokens|in the completion", re.IGNORECASE)
_MAX_WAIT_S = 60.0
_MAX_LIST_WAIT_S = 10.0  # for a server's list of its models
# So many calls in a row that the server forbids mean that the key has ended, and not that its
# moderation dislikes their prompts: a prompt may be sent once for each rollout of its group.
_MAX_FORBIDDEN_CALLS = 32
_MAX_SHOWN_CHARACTERS = 200  # of what a server says about a refused call
# What asking a server for the list of its models raises: there is no connection, no list, or a list
# in another form.
_NO_LIST_ERRORS = (
    OSError,
    httpx.HTTPError,
    httpx.InvalidURL,
    RedactedError,
    ValueError,
    LookupError,
    TypeError,
    RecursionError,
)
# These servers take what a request does not say from the model's own generation config: a penalty
# of 1.05 of Qwen2.5-VL, which also falls on the words of the prompt, or a `top_k` of 1 of Qwen2-VL.
# They are told to change and filter nothing. Other servers may refuse fields that OpenAI does not
# have.
SERVERS_WITH_MODEL_DEFAULTS = ("vllm", "sglang")
NEUTRAL_SAMPLING_FIELDS: Mapping[str, float] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
Messages = Sequence[Mapping[str, Any]]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Endpoint:
    """Where calls go, and how often and how long they are tried."""

    url: str
    """Such as http://localhost:8000/v1."""
    model: str
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; no key is sent where it is not set."""
    timeout_s: float = 60.0
    """The limit of a whole attempt, to the reply's last byte."""
    attempts: int = 4
    wait_s: float = 1.0
    """The wait after the first attempt; it doubles from one attempt to the next."""
    workers: int = 8
    """How many calls run at once."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request."""


@dataclass(frozen=True)
class Reply:
    """One answer of a model behind an endpoint, or of a local one.

    `n_tokens`: tokens of the answer, its end token among them. Both numbers of tokens are 0 where
    a server does not say them. `finish_reason`: what ended the answer, `stop` or `length`; with
    tools also `calls` or `room`, as for a rollout. `calls`: the calls of tools in order; None for
    an answer without tools.
    """

    text: str
    n_tokens: int
    finish_reason: str
    n_prompt_tokens: int
    calls: tuple[Mapping[str, Any], ...] | None = None
    thinking_opened: bool = False  # whether its prompt is known to end in `<think>`


class EndpointError(RedactedError):
    """A call that gave no usable answer; the text of the error says why.

    The attributes say what follows from it; see `__init__`.
    """

    def __init__(
        self,
        reason: str,
        *,
        may_retry: bool = True,
        wait_s: float = 0.0,
        key_refused: bool = False,
        prompt_too_long: bool = False,
        is_unreachable: bool = False,
        not_found: bool = False,
    ) -> None:
        """Create the error.

        Args:
            reason: why there is no answer.
            may_retry: whether another attempt may succeed.
            wait_s: how long the server asks to wait before another attempt.
            key_refused: whether the server accepts no call with this key.
            prompt_too_long: whether the model's context does not hold the prompt.
            is_unreachable: whether nobody answers at the address.
            not_found: whether the server does not know the address, or not the model.
        """
        super().__init__(reason)
        self.may_retry = may_retry
        self.wait_s = wait_s
        self.key_refused = key_refused
        self.prompt_too_long = prompt_too_long
        self.is_unreachable = is_unreachable
        self.not_found = not_found

    def remedy(self, key_variable: str) -> str:
        """Return the end of an error line, which says where the user may look for the cause.

        `key_variable`: the environment variable that holds the key.
        """
        if self.is_unreachable:
            return "is a server there?"
        if self.not_found:
            return "look at the address and at the name of the model"
        return f"the key is read from {key_variable}"


def check_url(name: str, url: str) -> str:
    """Check an http address, and return it without its last slash.

    Args:
        name: the option that has the address, with which the message begins.
        url: the address.

    Raises:
        UserError: it is no http address, or has credentials in it.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        is_http_address = parts.scheme in ("http", "https") and host != b"" and parts.port != 0
    # The address has a bracket without an end, a port that is no number, or an impossible name.
    except ValueError:
        is_http_address = False
    if not is_http_address or not url.isprintable() or " " in url:
        _, _, address = url.rpartition("@")  # what stands before it may be a key
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
        """Create the client, and read the answers that earlier runs have stored.

        Args:
            endpoint: where calls go, and with which model.
            cache: the file of stored answers; None for no cache.
            budget: the largest number of calls, where each attempt counts as one; None for no
                limit.

        Raises:
            UserError: the cache cannot be read.
        """
        self._fields = {"model": endpoint.model, **endpoint.body}
        self.endpoint = endpoint
        self._http = HttpClient(f"{endpoint.url.rstrip('/')}/chat/completions")
        self.budget = budget
        # how many calls were made; several threads count them under the lock
        self.call_count = 0
        self._lock = threading.Lock()
        # The fields that `ask` adds to a request; None until the server was asked which program it
        # is.
        self._neutral_sampling: dict[str, float] | None = None
        self._neutral_sampling_lock = threading.Lock()
        self._has_answered = False
        # how many calls the server has forbidden (HTTP 403) since its last answer
        self._forbidden_calls = 0
        # The error of a call after which no other can succeed: a refused key, or no server.
        self._fatal_error: EndpointError | None = None
        self._cache_file = cache
        self._stored_answers: JsonLinesCache | None = None
        if cache is not None:
            with naming_write_errors("judge_cache", cache):
                self._stored_answers = JsonLinesCache(cache)

    def cached(self, messages: Messages) -> str | None:
        """Return the stored answer to these messages; None where there is none."""
        if self._stored_answers is None:
            return None
        return self._stored_answers.get(self._cache_key(messages))

    def _cache_key(self, messages: Messages) -> str:
        """Return the key of a request in the cache: a hash of model, fields and messages.

        The address is not in it, as the same model on another port or node gives the same answers.
        """
        request = [self._fields, list(messages)]
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def detect_server_program(self) -> str | None:
        """Return the program that serves the model, such as `vllm`.

        It is the `owned_by` of the model in the server's list of models, `/models`. The result is
        empty where the server has no such list, or where the list lacks the model. It is None where
        the server gave no reply: a busy server may give one later.
        """
        timeout_s = min(self.endpoint.timeout_s, _MAX_LIST_WAIT_S)
        try:
            reply = fetch_reply(f"{self.endpoint.url}/models", timeout_s, self._key_header())
        except _NO_LIST_ERRORS:
            return None
        if reply.status >= 500:  # a gateway answers so while the server behind it starts
            return None
        try:
            models = json.loads(reply.body)["data"]
            owners = [model["owned_by"] for model in models if model["id"] == self.endpoint.model]
        except _NO_LIST_ERRORS:
            return ""
        return str(owners[0]) if owners else ""

    def _neutral_sampling_fields(self) -> Mapping[str, float]:
        """Return fields for a request with which the server samples from the model's distribution.

        vLLM and SGLang would otherwise take `top_k`, penalties and the like from the model's own
        generation config (`NEUTRAL_SAMPLING_FIELDS`). The result is empty for other servers. A
        field that the user has set for the endpoint is left out. The server is asked once which
        program it is.

        The fields are not in the key of the cache, since the cache is read without asking the
        server.
        """
        with self._neutral_sampling_lock:
            if self._neutral_sampling is None:
                self._neutral_sampling = {}
                if self.detect_server_program() in SERVERS_WITH_MODEL_DEFAULTS:
                    for name, value in NEUTRAL_SAMPLING_FIELDS.items():
                        if name not in self._fields:
                            self._neutral_sampling[name] = value
            return self._neutral_sampling

    def check_server(self, option: str) -> None:
        """Raise `UserError` if a call of `ask` has failed so that no further call can succeed.

        That is if the server has refused the key, or if nobody answered the first call. The next
        `ask` then tries again, such as with another key.

        `option`: the option that names the server, with which the message begins.
        """
        error = self._fatal_error
        if error is None:
            return
        self._fatal_error = None
        variable = self.endpoint.key_variable
        server = f"{option}: {self.endpoint.url}"
        if error.key_refused:
            raise UserError(
                f"{server} refuses the key in {variable} for the model {self.endpoint.model!r} "
                f"({error}); set {variable} to one that it takes"
            )
        raise UserError(
            f"{server} with the model {self.endpoint.model!r} gave no answer: {error}; "
            f"{error.remedy(variable)}"
        )

    def ask(self, messages: Messages, read_answer: Callable[[str], str]) -> str:
        """Ask for an answer, parse it, and store the result in the cache.

        No further call is made if the server has refused the key, or if nobody answered the first
        call (see `check_server`).

        Args:
            messages: the conversation.
            read_answer: parses the text of the answer and returns what is stored, such as a score.
                It may raise `EndpointError` for an answer of the wrong form. Then the question is
                asked again, unless the answer was cut off at the limit on its tokens.

        Returns:
            what `read_answer` returned.

        Raises:
            EndpointError: no attempt gave an answer of the right form.
        """

        def ask_once() -> str:
            """Make one attempt, and return the parsed answer."""
            reply = self._call(messages, body=self._neutral_sampling_fields())
            try:
                return read_answer(reply.text)
            except EndpointError as error:
                if reply.finish_reason != "length":
                    raise
                # The next attempt would end at the same limit.
                reason = f"{error}; it was cut off at the limit on its tokens"
                raise EndpointError(reason, may_retry=False) from error

        if self._fatal_error is not None:
            raise self._fatal_error
        answer: str = self._call_with_retries(ask_once)
        if self._stored_answers is not None and self._cache_file is not None:
            with naming_write_errors("judge_cache", self._cache_file):
                self._stored_answers.put(self._cache_key(messages), answer)
        return answer

    def chat(self, messages: Messages, **body: Any) -> Reply:
        """Ask for an answer, and return it with its numbers of tokens. The cache is not used.

        Args:
            messages: the conversation.
            body: further fields of this request.

        Raises:
            EndpointError: no attempt gave an answer.
        """
        reply: Reply = self._call_with_retries(lambda: self._call(messages, body))
        return reply

    def map_in_threads(
        self, function: Callable[[_Item], _Result], items: Sequence[_Item]
    ) -> list[_Result]:
        """Call a function for each item in several threads, and return its results in order.

        As many calls run at once as there are workers. Their threads are daemons, so that after
        Ctrl-C nobody waits for the calls under way: with their further attempts they may take many
        minutes.
        """
        futures = run_on_daemon_threads(
            [partial(function, item) for item in items],
            max_threads=self.endpoint.workers,
            thread_name="endpoint",
        )
        return [future.result() for future in futures]

    def _call_with_retries(self, call: Callable[[], Any]) -> Any:
        """Make a call until it succeeds, at most `attempts` times, and return its result.

        The wait between two attempts doubles, and is at least what the server asks for.

        Raises:
            EndpointError: the last attempt failed, or an attempt failed for good.
        """
        wait_s = self.endpoint.wait_s
        for attempt in range(1, self.endpoint.attempts + 1):
            try:
                return call()
            except EndpointError as error:
                is_last = attempt == self.endpoint.attempts
                if is_last or not error.may_retry:
                    last_error = EndpointError(
                        f"{error} (attempt {attempt})",
                        key_refused=error.key_refused,
                        prompt_too_long=error.prompt_too_long,
                        is_unreachable=error.is_unreachable,
                        not_found=error.not_found,
                    )
                    # A server that has answered before may be back soon.
                    is_missing_server = not self._has_answered and (
                        error.is_unreachable or error.not_found
                    )
                    if error.key_refused or is_missing_server:
                        self._fatal_error = last_error
                    raise last_error from error
                time.sleep(min(max(wait_s, error.wait_s), _MAX_WAIT_S))
            wait_s *= 2
        raise AssertionError("at least one attempt")

    def _call(self, messages: Messages, body: Mapping[str, Any]) -> Reply:
        """Make one attempt, which counts towards the budget, and return the model's reply.

        Args:
            messages: the conversation.
            body: fields of this request, which take precedence over those of the endpoint.

        Raises:
            EndpointError: the budget is used up, the call failed, or the reply has another form.
        """
        with self._lock:
            if self.budget is not None and self.call_count >= self.budget:
                raise EndpointError(
                    f"the budget of {self.budget} calls is used up", may_retry=False
                )
            self.call_count += 1
        request = {**self._fields, "messages": list(messages), **body}
        reply_body = self._post(json.dumps(request).encode())
        try:
            reply = json.loads(reply_body)
            choice = reply["choices"][0]
            usage = reply.get("usage") or {}
            return Reply(
                text=_answer_text(choice),
                n_tokens=_token_count(usage.get("completion_tokens")),
                finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
                n_prompt_tokens=_token_count(usage.get("prompt_tokens")),
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise EndpointError("the reply is not a chat completion") from error

    def _post(self, content: bytes) -> bytes:
        """Send a request with the key of the environment, and return the body of the reply.

        Raises:
            EndpointError: the call failed. The error says whether another attempt may help, how
                long to wait for it, whether the key was refused, and whether the prompt is too
                long.
        """
        headers = {"Content-Type": "application/json", **self._key_header()}
        try:
            reply = self._http.send(self.endpoint.timeout_s, content, headers)
        except ReplyTooLargeError as error:
            raise EndpointError(str(error), may_retry=False) from error
        # no connection, a reply that came too late, or one that is no HTTP
        except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            is_unreachable = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise EndpointError(
                f"{type(error).__name__}: {error}", is_unreachable=is_unreachable
            ) from error
        if httpx.codes.is_success(reply.status):
            self._has_answered = True
            self._forbidden_calls = 0
            return reply.body
        may_succeed_later = reply.status in _RETRIED_CODES
        # What a server says of a passing failure, such as a page of its proxy, is of no use.
        error_text = "" if may_succeed_later else _error_words(reply.body, self._api_key())
        is_not_found = reply.status == httpx.codes.NOT_FOUND
        if is_not_found:
            # The user may have named an address with too many parts, or too few.
            error_text = f" at {self._http.address}{error_text}"
        # Servers refuse a prompt that is too long, and room for an answer that is too large
        # (`max_tokens`), in similar words. Only the first is a fault of the prompt.
        names_prompt = _PROMPT_TOO_LONG_PATTERN.search(error_text) is not None
        names_answer = _ANSWER_TOO_LONG_PATTERN.search(error_text) is not None
        raise EndpointError(
            f"HTTP {reply.status}{error_text}",
            may_retry=may_succeed_later,
            wait_s=_seconds_to_wait(reply.headers.get("Retry-After")),
            key_refused=self._is_key_refused(reply.status),
            prompt_too_long=names_prompt and not names_answer,
            not_found=is_not_found,
        )

    def _is_key_refused(self, status: int) -> bool:
        """Return whether a reply with this HTTP status means that no call with the key succeeds.

        401 always means it. Some servers answer 403 for a single prompt that their moderation does
        not like. So 403 means it only if the server has answered no call yet, or if it has
        forbidden `_MAX_FORBIDDEN_CALLS` calls since its last answer.
        """
        if status == httpx.codes.FORBIDDEN:
            self._forbidden_calls += 1
            refuses_this_prompt = (
                self._has_answered and self._forbidden_calls < _MAX_FORBIDDEN_CALLS
            )
            return not refuses_this_prompt
        return status == httpx.codes.UNAUTHORIZED

    def _key_header(self) -> dict[str, str]:
        """Return the header with the key of the environment; empty where it is not set."""
        key = self._api_key()
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _api_key(self) -> str:
        """Return the key from the environment; empty where it is not set.

        Raises:
            EndpointError: the key has a character that no HTTP header can hold. The HTTP library
                would refuse it too, but its message shows the key.
        """
        key = os.environ.get(self.endpoint.key_variable, "").strip()
        if not key.isascii() or not key.isprintable():
            raise EndpointError(
                f"the key in {self.endpoint.key_variable} has a character that no header can hold, "
                "such as a line break; set it to the key alone",
                may_retry=False,
                key_refused=True,
            )
        if key:
            register_secret(key)
        return key


def _answer_text(choice: Mapping[str, Any]) -> str:
    """Return the text of the model's message in a reply.

    It is empty if the answer ended within the model's thinking: a server with a reasoning parser
    then sends null for the text.

    `choice`: an entry of `choices` of a chat completion.

    Raises:
        EndpointError: null has another reason, such as a refusal or a call of a tool.
        LookupError: the message has no content at all.
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


def _token_count(value: object) -> int:
    """Return a number of tokens that a server says; 0 where it says none, or no number."""
    return int(value) if isinstance(value, int | float) and 0 < value < 2**53 else 0


def _error_words(body: bytes, key: str) -> str:
    """Return the end of an error line with what a server says about a refused call: `: TEXT`.

    The result is empty for an empty body.

    Args:
        body: the body of the reply.
        key: the API key of the call. The server may have repeated it, so it is hidden.
    """
    text = body[:MAX_ERROR_BYTES].decode(errors="replace")
    one_line = " ".join(printable(text).split())
    one_line = redact_secrets(one_line, key)
    return f": {one_line[:_MAX_SHOWN_CHARACTERS]}" if one_line else ""


def _seconds_to_wait(retry_after: str | None) -> float:
    """Return how many seconds a server's header `Retry-After` asks to wait; 0 without one."""
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:  # a date
        return 0.0
