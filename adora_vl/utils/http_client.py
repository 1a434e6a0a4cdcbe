"""HTTP requests to one address, each with a limit on all of it, over connections that are kept.

The connections are in an event loop on a daemon thread. A request can so be given up at its limit
whatever it waits for, its sender may run an event loop of its own, and a process that ends waits
for no reply.
"""

import asyncio
import ipaddress
import os
import ssl
import threading
import urllib.parse
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, NamedTuple

import httpx

from adora_vl.utils.errors import RedactedError

MAX_ERROR_BYTES = 4096  # that are read of what a server says about a refused request
_MAX_REPLY_BYTES = 32 * 2**20  # a million tokens of text are a quarter of it
# Seconds after which an unused connection is not used again. Servers close theirs after 5 s or
# more, and a firewall between may forget them without a word.
_MAX_IDLE_S = 2.0
_MAX_CLOSING_S = 1.0
Headers = Mapping[str, str]


class ReplyTooLargeError(RedactedError):
    """A reply is larger than any that is expected."""


class HttpReply(NamedTuple):
    """What a server has replied."""

    status: int
    headers: Headers
    body: bytes


class _Connections(NamedTuple):
    """The connections to an address, and the event loop that they are in."""

    address: str
    """Where all requests go."""
    idle_clients: list[httpx.AsyncClient]
    """The clients that no request uses now.

    Each has one connection. A single client with all connections would search through all of them
    at each request.
    """
    loop: asyncio.AbstractEventLoop
    """What all requests run in."""
    thread: threading.Thread
    """The daemon thread that runs the loop."""
    close_requested: asyncio.Event
    """Set to let the thread close the connections and end."""
    process_id: int
    """The process that has the thread; a process that is forked from it lacks the thread."""


class HttpClient:
    """Sends requests to one address from any thread, and keeps its connections for later ones.

    The proxy of the environment is used, but not for this machine itself. No redirect is followed,
    so that the key in a header goes nowhere but to the address that the user named. No cookie is
    kept, which might bind all requests to one of several servers.
    """

    def __init__(self, address: str) -> None:
        """Create the client; nothing is connected before the first request.

        Args:
            address: where all requests go.
        """
        self.address = address
        self._lock = threading.Lock()
        self._connections: _Connections | None = None
        self._finalizer: weakref.finalize[..., HttpClient] | None = None

    def send(
        self, timeout_s: float, content: bytes | None = None, headers: Headers | None = None
    ) -> HttpReply:
        """Send one request and return the reply.

        Args:
            timeout_s: the limit for the whole exchange, to the reply's last byte.
            content: the body of a POST request; None for a GET request.
            headers: the headers of the request.

        Raises:
            ReplyTooLargeError: the reply is too large.
            OSError: there is no connection, or `timeout_s` is over (`TimeoutError`).
            httpx.HTTPError: the reply is no HTTP.
        """
        connections = self._connections_of_process()
        coroutine = _send_request(connections, timeout_s, content, headers)
        future = asyncio.run_coroutine_threadsafe(coroutine, connections.loop)
        try:
            return future.result()
        finally:
            future.cancel()  # after Ctrl-C; a future that is done stays so

    def close(self) -> None:
        """Close the connections.

        Otherwise they are closed with the client, or by the end of the process.
        """
        if self._finalizer is not None:
            self._finalizer()
        self._connections = None

    def _connections_of_process(self) -> _Connections:
        """Return the connections of this process, which are made at the first call.

        A forked process makes its own, since the thread of its parent's is missing there.
        """
        with self._lock:
            if self._connections is None or self._connections.process_id != os.getpid():
                self._connections = _start_connections(self.address)
                self._finalizer = weakref.finalize(self, _close_connections, self._connections)
                # At the end of a process the connections are closed anyway. Without this, a request
                # that is given up at that moment, as after Ctrl-C, would cause a warning.
                self._finalizer.atexit = False
            return self._connections


def fetch_reply(address: str, timeout_s: float, headers: Headers | None = None) -> HttpReply:
    """Send one GET request and return the reply.

    Args:
        address: where the request goes.
        timeout_s: the limit for the whole exchange, to the reply's last byte.
        headers: the headers of the request.

    Raises what `HttpClient.send` raises.
    """
    with closing(HttpClient(address)) as client:
        return client.send(timeout_s, headers=headers)


def _start_connections(address: str) -> _Connections:
    """Start a daemon thread with an event loop for the connections to an address."""
    idle_clients: list[httpx.AsyncClient] = []
    loop = asyncio.new_event_loop()
    close_requested = asyncio.Event()

    async def close_when_requested() -> None:
        """Wait for `close_requested`; then cancel the requests under way, and close the clients."""
        await close_requested.wait()
        request_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in request_tasks:
            task.cancel()
        await asyncio.gather(*request_tasks, return_exceptions=True)
        for client in idle_clients:
            await client.aclose()

    def run_loop() -> None:
        """Run the event loop until `close_requested` is set, and close it."""
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(close_when_requested())

    thread = threading.Thread(target=run_loop, name="http", daemon=True)
    thread.start()
    return _Connections(
        address=address,
        idle_clients=idle_clients,
        loop=loop,
        thread=thread,
        close_requested=close_requested,
        process_id=os.getpid(),
    )


def _close_connections(connections: _Connections) -> None:
    """Close the connections of this process; a forked one leaves those of its parent alone."""
    if connections.process_id != os.getpid():
        return
    connections.loop.call_soon_threadsafe(connections.close_requested.set)
    # The garbage collector calls this for a client that is not closed. It may run on the thread of
    # the connections, which cannot wait for itself.
    if connections.thread is not threading.current_thread():
        connections.thread.join(_MAX_CLOSING_S)


async def _send_request(
    connections: _Connections, timeout_s: float, content: bytes | None, headers: Headers | None
) -> HttpReply:
    """Send a request and return the reply.

    Only the beginning of an error's body is read, since no more is shown.

    Args:
        connections: the connections of this process. An idle one is used, or a new one.
        timeout_s: the limit for the whole exchange, to the reply's last byte.
        content: the body of a POST request; None for a GET request.
        headers: the headers of the request.

    Raises what `HttpClient.send` raises.
    """
    received = bytearray()
    idle_clients = connections.idle_clients
    client = idle_clients.pop() if idle_clients else _create_client(connections.address)
    method = "GET" if content is None else "POST"
    try:
        request = client.build_request(
            method, connections.address, content=content, headers=headers
        )
        async with asyncio.timeout(timeout_s), _streamed_reply(client, request) as reply:
            async for part in reply.aiter_bytes():
                received += part
                if not reply.is_success and len(received) > MAX_ERROR_BYTES:
                    break
                if len(received) > _MAX_REPLY_BYTES:
                    raise ReplyTooLargeError(
                        f"the reply is larger than {_MAX_REPLY_BYTES / 2**20:g} MiB"
                    )
    except TimeoutError:
        raise TimeoutError("the call took too long") from None
    finally:
        idle_clients.append(client)
    return HttpReply(status=reply.status_code, headers=reply.headers, body=bytes(received))


def _create_client(address: str) -> httpx.AsyncClient:
    """Create a client for requests to an address, one at a time."""
    return httpx.AsyncClient(
        verify=_trusted_certificates(),
        trust_env=not is_this_machine(address),
        # httpx's own timeout is for each part of a reply, so `_send_request` limits the whole
        # reply.
        timeout=None,  # noqa: S113
        limits=httpx.Limits(keepalive_expiry=_MAX_IDLE_S),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
    )


@asynccontextmanager
async def _streamed_reply(
    client: httpx.AsyncClient, request: httpx.Request
) -> AsyncIterator[httpx.Response]:
    """Send a request, and yield the reply, whose body is not read yet.

    A server may close a kept connection at the moment in which it is used again. The request is
    then sent once more.
    """
    event_names: list[str] = []  # such as `connection.connect_tcp.started`

    async def record_event(name: str, _: Mapping[str, Any]) -> None:
        """Record the name of an event of the connection."""
        event_names.append(name)

    request.extensions["trace"] = record_event
    try:
        reply = await client.send(request, stream=True)
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        is_new_connection = any(name.endswith("connect_tcp.started") for name in event_names)
        if is_new_connection:
            raise
        reply = await client.send(request, stream=True)
    try:
        yield reply
    finally:
        await reply.aclose()


@cache
def _trusted_certificates() -> ssl.SSLContext:
    """Return the certificates that this machine trusts, read once since that takes long."""
    return ssl.create_default_context()


def is_this_machine(address: str) -> bool:
    """Return whether an address leads to this machine itself, which no proxy can reach."""
    host = (urllib.parse.urlsplit(address).hostname or "").lower()
    try:
        ip_address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return ip_address.is_loopback or ip_address.is_unspecified
