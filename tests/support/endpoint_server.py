"""A server on this machine that speaks OpenAI's API, with replies that a test chooses."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Reply = tuple[int, bytes]  # the HTTP status and the body
# Takes a request's JSON and the number of the call, from 1; None: the server never replies.
ReplyFunction = Callable[[dict[str, Any], int], Reply | None]


def completion_reply(text: str, **fields: Any) -> Reply:
    """Return the reply of a chat completion with this text.

    `fields` are added to the choice and to the reply itself, such as `finish_reason="length"`.
    """
    return 200, json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": text}, **fields}], **fields}
    ).encode()


class EndpointServer:
    """An OpenAI-compatible endpoint on this machine, whose replies a `ReplyFunction` gives.

    `url` is its address, and `requests` has the JSON of each request with its path and key.
    `models` is what `/v1/models` lists: the owner of each model by its name, such as
    {"judge": "vllm"}; while it is empty, that path is not there.
    """

    def __init__(self, answer: ReplyFunction) -> None:
        self.models: dict[str, str] = {}
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self._gone = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # keeps connections

            def setup(self) -> None:
                super().setup()
                outer.connections += 1

            def do_GET(self) -> None:
                if self.path != "/v1/models" or not outer.models:
                    self.send_error(404)
                    return
                cards = [{"id": name, "owned_by": owner} for name, owner in outer.models.items()]
                body = json.dumps({"data": cards}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(
                    body | {"path": self.path, "key": self.headers.get("Authorization")}
                )
                reply = answer(body, len(outer.requests))
                if reply is None:
                    outer._gone.wait(20)  # set when the server ends
                    return
                self.send_response(reply[0])
                self.send_header("Content-Length", str(len(reply[1])))
                self.end_headers()
                self.wfile.write(reply[1])

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def close(self) -> None:
        self._gone.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def start_server() -> Iterator[Callable[[ReplyFunction], EndpointServer]]:
    """Return a function that starts a server with a `ReplyFunction`; it ends with the test."""
    servers: list[EndpointServer] = []

    def start(answer: ReplyFunction) -> EndpointServer:
        servers.append(EndpointServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
