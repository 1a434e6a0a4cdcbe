"""HTTP clients of vLLM servers: TRL's client with timeouts, keepalive and a login."""

import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import requests
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient
from urllib3.connection import HTTPConnection
from urllib3.exceptions import ReadTimeoutError
from urllib3.util.retry import Retry

from adora_vl.utils.daemon_threads import run_on_daemon_threads
from adora_vl.utils.errors import EngineError, describe_error
from adora_vl.utils.http_client import is_this_machine
from adora_vl.utils.secrets import without_login

SERVER_THREAD = "vllm-servers"  # the name of each thread that waits for a server
# Requests that a server has at a time. This is vLLM's own limit; more would wait in its queue.
MAX_REQUESTS_PER_SERVER = 256
_CONNECT_TIMEOUT_S = 10.0
# Until `Server` mounts the run's own timeout, a client only asks short questions.
_STARTUP_ANSWER_TIMEOUT_S = 10.0
# A machine that loses its power closes no connection. With these options the kernel closes it after
# 2 minutes of silence.
_KEEPALIVE_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
]


class Timeouts(NamedTuple):
    """The two timeouts of a request, in the order in which `requests` takes them."""

    connect_s: float
    answer_s: float


# For a short question to a server that samples for the run.
SHORT_QUESTION_TIMEOUTS = Timeouts(connect_s=_CONNECT_TIMEOUT_S, answer_s=60.0)
# For a server that has failed. It may be switched off, and must not delay every weight sync.
FAILED_SERVER_TIMEOUTS = Timeouts(connect_s=1.0, answer_s=10.0)


class _BrokenConnectionRetry(Retry):
    """Retries a request whose connection broke, but not one that timed out."""

    def increment(self, *args: Any, **kwargs: Any) -> Self:
        """Count a retry, and raise a timeout instead of retrying after it.

        Stock urllib3 retries after a timeout too, so a server that hangs would cost several
        timeouts.
        """
        error = kwargs.get("error")
        if isinstance(error, ReadTimeoutError):
            raise error
        return super().increment(*args, **kwargs)


class TimeoutAdapter(HTTPAdapter):
    """An HTTP adapter that sets a timeout for every request.

    TRL's own adapter waits for a minute, and for ever where nobody listens.
    """

    def __init__(self, answer_timeout_s: float) -> None:
        """Create an adapter that retries a request up to three times after a broken connection.

        Args:
            answer_timeout_s: the seconds to wait for an answer, for requests that come without a
                timeout.
        """
        self._default_timeouts = Timeouts(connect_s=_CONNECT_TIMEOUT_S, answer_s=answer_timeout_s)
        retry = _BrokenConnectionRetry(
            total=3,
            backoff_factor=0.2,
            status_forcelist=[502, 503],
            allowed_methods=["GET", "POST"],
        )
        super().__init__(max_retries=retry, pool_maxsize=MAX_REQUESTS_PER_SERVER)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Open connections with TCP keepalive."""
        options = [*HTTPConnection.default_socket_options, *_KEEPALIVE_OPTIONS]
        super().init_poolmanager(*args, **kwargs, socket_options=options)

    def send(
        self, request: requests.PreparedRequest, *args: Any, **kwargs: Any
    ) -> requests.Response:
        """Send a request, with the adapter's timeouts where it has none of its own."""
        if not kwargs.get("timeout"):
            kwargs["timeout"] = self._default_timeouts
        return super().send(request, *args, **kwargs)


def mount_timeouts(session: requests.Session, answer_timeout_s: float) -> None:
    """Make all requests of a session time out: see `TimeoutAdapter`."""
    for scheme in ("http://", "https://"):
        session.mount(scheme, TimeoutAdapter(answer_timeout_s))


class _Session(requests.Session):
    """The HTTP session of one server, with its login in a header instead of in the address."""

    def __init__(self, address: str, login: tuple[str, str] | None) -> None:
        """Create a session for a server.

        Args:
            address: the server's URL. A server on this machine is reached without a proxy.
            login: the user name and password; None for a server without a login.
        """
        super().__init__()
        self.auth = login
        self.trust_env = not is_this_machine(address)  # `trust_env` reads the proxy variables
        mount_timeouts(self, answer_timeout_s=_STARTUP_ANSWER_TIMEOUT_S)


class Client(VLLMClient):  # type: ignore[misc]  # TRL is untyped to mypy
    """TRL's client of a vLLM server."""

    base_url: str
    host: str

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait until the server answers its health check with status 200.

        Stock TRL has no timeout for a single question, goes through a proxy, and asks for ever
        where the status is not 200. Its messages show the address with the login.

        Raises `ConnectionError` when `total_timeout` seconds have passed.
        """
        self.base_url, login = without_login(self.base_url)
        self.session = _Session(self.base_url, login)
        deadline = time.monotonic() + total_timeout
        while True:
            try:
                response = self.session.get(
                    f"{self.base_url}/health", timeout=SHORT_QUESTION_TIMEOUTS
                )
                if response.status_code == 200:
                    # As in TRL: a proxy passes the server's own host in this header.
                    self.host = response.headers.get("X-Forwarded-For", self.host)
                    return
                reason = f"it answers {response.status_code} to /health"
            except requests.RequestException as error:
                reason = describe_error(error)
            if time.monotonic() >= deadline:
                raise ConnectionError(f"{reason}, in {total_timeout:g} s")
            time.sleep(retry_interval)


def connect(addresses: Sequence[str], group_port: int, max_wait_s: float) -> list[VLLMClient]:
    """Connect to the servers at these URLs, all at the same time.

    Args:
        addresses: the URLs, which may contain a login.
        group_port: TRL's port for a group of NCCL.
        max_wait_s: how many seconds to wait for a server that does not answer yet.

    Raises `EngineError` for a server that does not answer in that time.
    """

    def connect_to(address: str) -> VLLMClient:
        """Return a client of one server. Raises `EngineError`."""
        try:
            client = Client(base_url=address, group_port=group_port, connection_timeout=max_wait_s)
            client.get_server_info()
        except Exception as error:  # TRL raises `Exception` for a status that it does not expect
            public_address = without_login(address)[0]
            raise EngineError(
                f"vllm_server_base_url: {public_address} cannot be used ({describe_error(error)})"
            ) from error
        return client

    futures = run_on_daemon_threads(
        [partial(connect_to, address) for address in addresses],
        max_threads=len(addresses),
        thread_name=SERVER_THREAD,
    )
    return [future.result() for future in futures]
