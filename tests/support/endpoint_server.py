"""A loopback server with the form of an OpenAI-compatible endpoint, which answers as a test wants."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Reply = tuple[int, bytes]
ReplyFunction = Callable[[dict[str, Any], int], Reply | None]


def completion_reply(text: str, **fields: Any) -> Reply:
    return 200, json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": text}, **fields}], **fields}
    ).encode()


class EndpointServer:
    """A loopback endpoint that answers with `answer(request, number of the call)`; None: it never
    does.

    It lists `models`, the program by the name of the model that it serves, if there are any.
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
                    outer._gone.wait(20)
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
    """Starts servers that end with the test."""
    servers: list[EndpointServer] = []

    def start(answer: ReplyFunction) -> EndpointServer:
        servers.append(EndpointServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
