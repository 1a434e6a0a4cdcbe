"""Connections to a served model: kept for later calls, and closed at the end without a word."""

import gc
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from adora_vl.utils.openai_client import ChatClient, Endpoint, EndpointError
from tests.support.endpoint_server import completion_reply

ROOT = Path(__file__).parents[3]
HELLO = [{"role": "user", "content": "hello"}]


def count_http_threads() -> int:
    """Return how many threads of HTTP clients are alive."""
    return sum(thread.name == "http" for thread in threading.enumerate())


def test_calls_go_over_as_many_connections_as_there_are_workers(start_server):
    """61 calls of four workers need at most four connections."""
    server = start_server(lambda body, call: completion_reply("hi"))
    client = ChatClient(Endpoint(server.url, "m", workers=4))
    for _ in range(3):
        assert len(client.map_in_threads(lambda _: client.chat(HELLO), range(20))) == 20
    assert client.chat(HELLO).text == "hi"
    assert len(server.requests) == 3 * 20 + 1
    assert server.connections <= 4


def test_an_attempt_that_fails_leaves_its_connection_usable(start_server):
    """Five calls of three attempts each go over one connection."""
    server = start_server(lambda body, call: (503, b"busy") if call % 3 else completion_reply("hi"))
    client = ChatClient(Endpoint(server.url, "m", wait_s=0.001))
    for _ in range(5):
        assert client.chat(HELLO).text == "hi"
    assert len(server.requests) == 5 * 3
    assert server.connections == 1


def test_a_call_that_took_too_long_is_not_read_by_the_next_one(start_server):
    """The reply of the first call comes after its 0.2 s, and the second call gets its own."""

    def answer(body, call):
        """Reply to the first call after half a second, and to others at once."""
        if call == 1:
            time.sleep(0.5)
        return completion_reply(f"reply {call}")

    client = ChatClient(Endpoint(start_server(answer).url, "m", attempts=1, timeout_s=0.2))
    with pytest.raises(EndpointError, match="the call took too long"):
        client.chat(HELLO)
    assert client.chat(HELLO).text == "reply 2"


def test_a_client_without_user_ends_its_thread(start_server):
    """A thread begins with the first call, and ends when the client is collected."""
    gc.collect()  # the clients of other tests

    threads_before = count_http_threads()
    client = ChatClient(Endpoint(start_server(lambda body, call: completion_reply("hi")).url, "m"))
    assert count_http_threads() == threads_before, "nothing is connected before the first call"
    client.chat(HELLO)
    assert count_http_threads() == threads_before + 1
    del client
    gc.collect()
    assert count_http_threads() == threads_before


def test_cookies_are_not_sent_back(monkeypatch, start_server):
    """A cookie that a server sets is not sent with the next call.

    A cookie of a load balancer would bind all calls to one of its servers.
    """
    cookies = []

    def answer(body, call):
        return completion_reply("hi")

    server = start_server(answer)
    handler = server._server.RequestHandlerClass
    send_response = handler.send_response

    def send_with_cookie(self, code):
        cookies.append(self.headers.get("Cookie"))
        send_response(self, code)
        self.send_header("Set-Cookie", "lane=7; Path=/")

    monkeypatch.setattr(handler, "send_response", send_with_cookie)
    client = ChatClient(Endpoint(server.url, "m"))
    client.chat(HELLO)
    client.chat(HELLO)
    assert cookies == [None, None]


@pytest.fixture
def start_server_that_hangs_up() -> Iterator[Callable[[int], tuple[str, list[int]]]]:
    """Return a function that starts a server which hangs up.

    The function returns the server's address, and a list with an entry for each connection. The
    server answers `requests_answered` requests on each connection, reads another one, and hangs up.
    """
    listeners: list[socket.socket] = []

    def read_request(connection: socket.socket) -> None:
        """Read a whole request, since bytes that are not read reset a connection."""
        received = b""
        while not received.endswith(b"}]}"):
            part = connection.recv(65536)
            if not part:
                return
            received += part

    def start(requests_answered: int) -> tuple[str, list[int]]:
        """Start the server, and return its address and the list of its connections."""
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        connections: list[int] = []
        body = completion_reply("hi")[1]

        def serve() -> None:
            """Answer, read one request more and hang up, on each connection."""
            with suppress(OSError):
                while True:
                    with closing(listener.accept()[0]) as connection:
                        connections.append(len(connections))
                        for _ in range(requests_answered):
                            read_request(connection)
                            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
                            connection.sendall(head.encode() + body)
                        read_request(connection)

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1", connections

    yield start
    for listener in listeners:
        listener.close()


def test_a_kept_connection_that_the_server_closes_costs_no_attempt(start_server_that_hangs_up):
    """Each of three calls has one attempt; two of them find their connection closed."""
    url, connections = start_server_that_hangs_up(1)
    client = ChatClient(Endpoint(url, "m", attempts=1), budget=3)
    assert [client.chat(HELLO).text for _ in range(3)] == ["hi"] * 3
    assert len(connections) == 3


def test_a_new_connection_that_the_server_closes_is_a_failed_attempt(start_server_that_hangs_up):
    """Nothing was answered on it, so that it is counted and tried again."""
    url, connections = start_server_that_hangs_up(0)
    with pytest.raises(EndpointError, match=r"Server disconnected .* \(attempt 2\)"):
        ChatClient(Endpoint(url, "m", attempts=2, wait_s=0.001)).chat(HELLO)
    assert len(connections) == 2


SCRIPT = """
import asyncio, os, signal, sys, time
from adora_vl.utils.openai_client import ChatClient, Endpoint

url, slow_url = sys.argv[1:]
hello = [{"role": "user", "content": "hello"}]
client = ChatClient(Endpoint(url, "m"))
text = client.chat(hello).text

async def in_a_running_loop():
    return client.chat(hello).text

assert asyncio.run(in_a_running_loop()) == text

child = os.fork()
if child == 0:
    os._exit(0 if client.chat(hello).text == text else 1)
assert os.waitpid(child, 0)[1] == 0
assert client.chat(hello).text == text

signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.3)
slow_client = ChatClient(Endpoint(slow_url, "m"))
began = time.monotonic()
try:
    slow_client.chat(hello)
except KeyboardInterrupt:
    assert time.monotonic() - began < 5
else:
    raise AssertionError
assert client.chat(hello).text == text

# Threads of the client still wait when the process ends.
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    slow_client.map_in_threads(lambda _: slow_client.chat(hello), range(20))
except KeyboardInterrupt:
    assert time.monotonic() - began < 10
"""


def test_loops_forks_interrupts_and_ends_leave_nothing_open(start_server):
    """A process calls in a loop and after a fork, is interrupted, and ends without a warning."""
    server = start_server(lambda body, call: completion_reply("hi"))
    slow_server = start_server(lambda body, call: None)
    warnings = ["-W", "always", "-W", "ignore::DeprecationWarning"]  # of a fork with threads
    start_time = time.monotonic()
    process = subprocess.run(
        [sys.executable, *warnings, "-c", SCRIPT, server.url, slow_server.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    assert time.monotonic() - start_time < 15
    assert len(server.requests) == 5
    assert server.connections == 2, "the forked process has its own"
