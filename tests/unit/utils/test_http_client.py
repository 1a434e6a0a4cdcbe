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


def http_threads() -> int:
    return sum(thread.name == "http" for thread in threading.enumerate())


def test_calls_go_over_as_many_connections_as_there_are_workers(start_server):
    server = start_server(lambda body, call: completion_reply("hi"))
    client = ChatClient(Endpoint(server.url, "m", workers=4))
    for _ in range(3):
        assert len(client.map_in_threads(lambda _: client.chat(HELLO), range(20))) == 20
    assert client.chat(HELLO).text == "hi"
    assert len(server.requests) == 61
    assert server.connections <= 4


def test_an_attempt_that_fails_leaves_its_connection_usable(start_server):
    server = start_server(lambda body, call: (503, b"busy") if call % 3 else completion_reply("hi"))
    client = ChatClient(Endpoint(server.url, "m", wait_s=0.001))
    for _ in range(5):
        assert client.chat(HELLO).text == "hi"
    assert len(server.requests) == 15
    assert server.connections == 1


def test_a_call_that_took_too_long_is_not_read_by_the_next_one(start_server):
    def answer(body, call):
        if call == 1:
            time.sleep(0.5)
        return completion_reply(f"reply {call}")

    client = ChatClient(Endpoint(start_server(answer).url, "m", attempts=1, timeout_s=0.2))
    with pytest.raises(EndpointError, match="the call took too long"):
        client.chat(HELLO)
    assert client.chat(HELLO).text == "reply 2"


def test_a_client_without_user_ends_its_thread(start_server):
    gc.collect()  # the clients of other tests
    before = http_threads()
    client = ChatClient(Endpoint(start_server(lambda body, call: completion_reply("hi")).url, "m"))
    assert http_threads() == before, "nothing is connected before the first call"
    client.chat(HELLO)
    assert http_threads() == before + 1
    del client
    gc.collect()
    assert http_threads() == before


def test_cookies_are_not_sent_back(monkeypatch, start_server):
    """A cookie of a load balancer would bind all calls to one of its servers."""
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
def hang_up() -> Iterator[Callable[[int], tuple[str, list[int]]]]:
    """A function that starts a server, and returns its address and how often it was connected to.

    It answers a number of requests on each connection, reads another one, and hangs up.
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

    def start(answered: int) -> tuple[str, list[int]]:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        connections: list[int] = []
        body = completion_reply("hi")[1]

        def serve() -> None:
            with suppress(OSError):
                while True:
                    with closing(listener.accept()[0]) as connection:
                        connections.append(len(connections))
                        for _ in range(answered):
                            read_request(connection)
                            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
                            connection.sendall(head.encode() + body)
                        read_request(connection)

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1", connections

    yield start
    for listener in listeners:
        listener.close()


def test_a_kept_connection_that_the_server_closes_costs_no_attempt(hang_up):
    url, connections = hang_up(1)
    client = ChatClient(Endpoint(url, "m", attempts=1), budget=3)
    assert [client.chat(HELLO).text for _ in range(3)] == ["hi"] * 3
    assert len(connections) == 3


def test_a_new_connection_that_the_server_closes_is_a_failed_attempt(hang_up):
    url, connections = hang_up(0)
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
    server = start_server(lambda body, call: completion_reply("hi"))
    slow_server = start_server(lambda body, call: None)
    warnings = ["-W", "always", "-W", "ignore::DeprecationWarning"]  # of a fork with threads
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, *warnings, "-c", SCRIPT, server.url, slow_server.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert time.monotonic() - began < 15
    assert len(server.requests) == 5
    assert server.connections == 2, "the forked process has its own"
