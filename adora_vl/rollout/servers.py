"""vLLM servers that sample for the trainer: asked group by group, given weights, left out where
they fail.

Everything here is HTTP, and runs on the first rank alone. What all ranks do together is in
`served.py`.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Self, TypeVar

import requests
from requests.adapters import HTTPAdapter
from tqdm import tqdm
from trl.generation.vllm_client import VLLMClient
from urllib3.connection import HTTPConnection
from urllib3.exceptions import ReadTimeoutError
from urllib3.util.retry import Retry

from adora_vl.rollout.engine_logps import engine_logp
from adora_vl.utils.errors import EngineError, NoServerError, RolloutError, SpokenError, in_one_line
from adora_vl.utils.openai_client import is_here
from adora_vl.utils.secrets import without_login

DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1"
_CONNECT_S = 10.0
# to connect, and to answer a short question
_LIVING_S = (_CONNECT_S, 60.0)
_GONE_S = (1.0, 10.0)
_BETWEEN_LOOKS_S = 2.0
_LORA_BY_REQUEST = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_REFUSED = "Request failed: 4"  # TRL's words for an HTTP status of the 400s
# requests that a server has at a time: vLLM's own limit, beyond which one would wait there
_AT_A_TIME = 256
# A machine that has lost its power closes no connection: after 2 minutes of silence the kernel
# does.
_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
]
_T = TypeVar("_T")
# tokens and log-probabilities of a request's rollouts
Sampled = list[tuple[list[int], list[float]]]
Features = dict[tuple[int, ...], Future[Any]]  # of images that a server has read
PlaceFeatures = Callable[[dict[str, Any] | None, list[int]], dict[str, Any] | None]


class UnusableServerError(SpokenError, RuntimeError):
    """A server does not do what it is asked for; others may."""


_STARTED_AGAIN = UnusableServerError(
    "it was started again, and gets all weights with the next ones"
)


@dataclass(frozen=True)
class GroupRequest:
    """One prompt, and how it is sampled."""

    prompt_ids: list[int]  # with the image tokens expanded
    images: list[Any]
    rollouts: int
    settings: dict[str, Any]  # vLLM's parameters


def of_sampled(tokens: Any, logps: Any, ids: Any) -> list[list[float]]:
    """The log-probability of each sampled token, by its id: the first of several is the likeliest
    token's.
    """
    return [
        [engine_logp(scores[known.index(token)]) for token, scores, known in zip(*row, strict=True)]
        for row in zip(tokens, logps, ids, strict=True)
    ]


def refuse_impossible(tokens: Sequence[Sequence[int]], most: int, vocabulary: int) -> None:
    """Raise `UnusableServerError` for an answer that the policy cannot have given.

    `tokens`: of each rollout. `most`: how many a rollout may have. `vocabulary`: how many ids the
    policy's embedding has; any other one would end the run in its first pass.
    """
    longest = max(map(len, tokens))
    if longest > most:
        raise UnusableServerError(f"asked for at most {most} tokens it gave {longest}")
    unknown = next((token for row in tokens for token in row if not 0 <= token < vocabulary), None)
    if unknown is not None:
        raise UnusableServerError(
            f"it gave the token {unknown}, but the policy's vocabulary has {vocabulary}; start it "
            "with the policy's model"
        )


class _Retry(Retry):
    """Asks again where a connection breaks, but not where it is silent for too long."""

    def increment(self, *args: Any, **kwargs: Any) -> Self:
        error = kwargs.get("error")
        if isinstance(error, ReadTimeoutError):
            raise error
        return super().increment(*args, **kwargs)


class _Adapter(HTTPAdapter):
    """Gives up soon on what does not answer at all.

    TRL's own waits for a minute, and for ever where nobody listens.
    """

    def __init__(self, answer_s: float) -> None:
        """`answer_s`: how long an answer may take where the request does not say it."""
        self._answer_s = answer_s
        retry = _Retry(
            total=3,
            backoff_factor=0.2,
            status_forcelist=[502, 503],
            allowed_methods=["GET", "POST"],
        )
        super().__init__(max_retries=retry, pool_maxsize=_AT_A_TIME)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        options = [*HTTPConnection.default_socket_options, *_ALIVE]
        super().init_poolmanager(*args, **kwargs, socket_options=options)

    def send(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["timeout"] = kwargs.get("timeout") or (_CONNECT_S, self._answer_s)
        return super().send(request, *args, **kwargs)


class Server:
    """One vLLM server. Its methods raise `UnusableServerError`, or what `requests` raises."""

    def __init__(self, client: VLLMClient, answer_s: float, vocabulary: int) -> None:
        """`answer_s`: how long it may take to sample what is one request, or to read all weights.

        `vocabulary`: how many token ids the policy has.
        """
        for scheme in ("http://", "https://"):
            client.session.mount(scheme, _Adapter(answer_s))
        self.client = client
        self._answer_s = answer_s
        self._vocabulary = vocabulary
        self.address: str = client.base_url
        self.life = ""  # which start of the server answers now
        self.synced_life = ""  # which one has the weights of the last sync
        self.logprobs_mode = ""  # vLLM's name for the log-probabilities that it gives
        self.lora: dict[
            str, Any
        ] = {}  # vLLM's settings of it; none where it was not started with it
        self.serves = ("", False)  # its model, and whether that is in 4 bits

    def look(self, timeout: tuple[float, float] = _LIVING_S) -> None:
        """See whether it answers, and which start of it does.

        `timeout`: seconds to connect, and to answer.
        """
        found = self._json("GET", "server_info?config_format=json", timeout=timeout)
        config = found["vllm_config"]
        model = found["vllm_config"]["model_config"]
        self.life = str(config["instance_id"])
        self.logprobs_mode = str(model["logprobs_mode"])
        lora = config.get("lora_config")
        self.lora = {"enable_lora": True, **lora, **found["vllm_env"]} if lora else {}
        self.serves = str(model.get("model")), model.get("quantization") == "bitsandbytes"

    def check_lora(self, needs: Mapping[str, Any], base: str, four_bit: bool) -> None:
        """Raise `UnusableServerError` where it was not started for an adapter on `base`.

        `needs`: vLLM's settings.
        """
        served, in_four_bit = self.serves
        lacks = [
            f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"
            for name, value in needs.items()
            if self.lora.get(name, 0) < value
        ]
        lacks += (
            [] if self.lora.get(_LORA_BY_REQUEST) else [f"{_LORA_BY_REQUEST}=1 in its environment"]
        )
        # it passes the others over
        lacks += ["no --lora-target-modules"] if self.lora.get("target_modules") else []
        if lacks:
            raise UnusableServerError(
                f"it has no room for the policy's adapter; start it with {' and '.join(lacks)}"
            )
        if in_four_bit != four_bit:
            raise UnusableServerError(
                f"it serves {served}; start it with {base}, which the policy is trained on"
            )

    def check_weights(self) -> None:
        """Raise `UnusableServerError` where it was started again since it read the weights: it has
        its checkpoint's.
        """
        if not self.synced_life:  # weights do not travel by file
            return
        self.look()
        if self.life != self.synced_life:
            raise UnusableServerError(
                "it was started again, and has not the policy's weights until the next sync"
            )

    def answer(self, ask: GroupRequest, place: PlaceFeatures, features_of: Features) -> Sampled:
        """Sample.

        `place` points image features at the image tokens of the prompt. `features_of`: those that
        it has read in this call, each once, also for rollouts that go on: each of them is a
        request.
        """
        features = None
        try:
            if ask.images:
                mine = Future[Any]()
                names = tuple(map(id, ask.images))
                found = features_of.setdefault(names, mine)
                if found is mine:
                    _settle(mine, partial(self.client.image_features, [ask.images]))
                features = [place(found.result()[0], ask.prompt_ids)]
            given = self.client.generate(
                [ask.prompt_ids], features, ask.rollouts, generation_kwargs=ask.settings
            )
        except requests.ReadTimeout as error:
            raise UnusableServerError(
                f"it gave no answer in {self._answer_s:g} s, half of ddp_timeout"
            ) from error
        except Exception as error:
            # as one does that was started again and has no such adapter
            if str(error).startswith(_REFUSED):
                self.check_weights()
            raise
        tokens = given["completion_ids"]
        logps = given["logprobs"]
        lengths = [len(row) for row in tokens]
        known = [len(row) for row in logps or ()]
        if len(lengths) != ask.rollouts or not all(lengths) or known != lengths:
            gave = f"{lengths} tokens, {known} of them scored"
            raise UnusableServerError(f"asked for {ask.rollouts} rollouts it gave {gave}")
        refuse_impossible(tokens, ask.settings["max_tokens"], self._vocabulary)
        if given["prompt_ids"] != [ask.prompt_ids]:
            raise UnusableServerError("it read another prompt than the trainer's")
        return [*zip(tokens, of_sampled(tokens, logps, given["logprob_token_ids"]), strict=True)]

    def read_weights(self, folder: Path) -> None:
        """Have it read the tensors in `folder`, and forget what it computed with the old ones."""
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._ask("POST", "collective_rpc", json=arguments)
        self.forget()
        self.synced_life = self.life

    def read_adapter(self, folder: Path) -> None:
        """Have it read the adapter in `folder` in the place of the one before.

        Requests name it as the folder, as no other one is named: a server that has another one
        refuses them.
        """
        old = self.client.model
        self.client.model = folder.name
        self._ask(
            "POST",
            "v1/load_lora_adapter",
            json={"lora_name": folder.name, "lora_path": str(folder)},
        )
        if self.synced_life == self.life:
            self._ask("POST", "v1/unload_lora_adapter", json={"lora_name": old})
        self.forget()
        self.synced_life = self.life

    def forget(self) -> None:
        """Empty the caches of prefixes and image features."""
        if not self._json("POST", "reset_prefix_cache", timeout=_LIVING_S).get("success", True):
            raise UnusableServerError(
                "it did not reset its prefix cache: requests of others are running"
            )
        self._ask("POST", "reset_encoder_cache", timeout=_LIVING_S)

    def _ask(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        response: requests.Response = self.client.session.request(
            method, f"{self.address}/{path}", **kwargs
        )
        if response.status_code == 404:
            raise UnusableServerError(f"it has no /{path.partition('?')[0]}; {DEV_MODE}")
        if response.status_code != 200:
            raise UnusableServerError(
                f"it answered {response.status_code} to /{path}: {response.text[:200]}"
            )
        return response

    def _json(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._ask(method, path, **kwargs).json()
        return found


class ServerPool:
    """All servers of a run, those that fail left out until they are back."""

    def __init__(
        self,
        clients: Sequence[VLLMClient],
        patience_s: float,
        answer_s: float,
        vocabulary: int,
        logprobs_mode: str = "",
    ) -> None:
        """`patience_s`: how long a sync waits for a first server to be there.

        `answer_s`: how long one may sample. `vocabulary`: token ids of the policy.
        `logprobs_mode`: the trainer's; one that gives others is named at its first sync.
        """
        self._all = [Server(client, answer_s, vocabulary) for client in clients]
        self.living = list(self._all)
        self._patience_s = patience_s
        self._logprobs_mode = logprobs_mode
        self._adapter: tuple[Any, ...] = ()  # what `Server.check_lora` is given

    def have_lora(self) -> bool:
        """Whether all of them were started with it. Raises what looking raises."""
        for server in self._all:
            server.look()
        return all(server.lora for server in self._all)

    def take_adapter(self, needs: Any, base: str, four_bit: bool) -> None:
        """They get the adapter alone from now on.

        `needs`: as of `Server.check_lora`. Raises `EngineError`.
        """
        self._adapter = needs, base, four_bit
        for server in self._all:
            try:
                server.check_lora(*self._adapter)
            except UnusableServerError as error:
                raise EngineError(f"vllm_server_base_url: {server.address}: {error}") from None
            if server.serves[0] != base:
                named = f"Server {server.address} serves {server.serves[0]}"
                tqdm.write(
                    f"{named}, to which the adapter goes alone; it has to be {base}, the policy's "
                    "base."
                )

    def find(self, *, in_part: bool = False) -> bool:
        """See which servers are there, for a sync.

        Returns whether one of them has not the weights of the last one; where only a part of the
        weights is written (`in_part`), it is left out until the next sync.

        Raises `NoServerError` where none answers in time.
        """
        end = time.monotonic() + self._patience_s
        while True:
            problems = _together(self._all, self._look)
            for server, problem in problems.items():
                if problem is None and server not in self.living:
                    tqdm.write(f"Server {server.address} is back.")
                    self.living.append(server)
                elif problem is not None and server in self.living:
                    self._leave_out(server, problem)
            if self.living:
                new = [server for server in self.living if server.synced_life != server.life]
                for server in new:
                    if server.logprobs_mode != self._logprobs_mode:
                        started = (
                            f"Server {server.address} was started with --logprobs-mode "
                            f"{server.logprobs_mode}"
                        )
                        tqdm.write(f"{started}; {self._logprobs_mode} is the trainer's.")
                    if in_part and not self._adapter:
                        self._leave_out(server, _STARTED_AGAIN)
                if not self.living:
                    raise NoServerError(_none_left(_STARTED_AGAIN))
                return bool(new)
            if time.monotonic() >= end:
                raise NoServerError(_none_left(next(filter(None, problems.values()))))
            time.sleep(_BETWEEN_LOOKS_S)

    def _look(self, server: Server) -> None:
        """One that is left out may be switched off, and must not delay every sync."""
        server.look(_LIVING_S if server in self.living else _GONE_S)
        if self._adapter:
            server.check_lora(*self._adapter)

    def read_weights(self, folder: Path) -> None:
        """Give all of them the tensors in `folder`.

        Raises `NoServerError` where none takes them.
        """
        read = Server.read_adapter if self._adapter else Server.read_weights
        self._all_do(lambda server: read(server, folder), f"Does it see {str(folder.parent)!r}? ")

    def forget(self) -> None:
        """Empty the caches that new weights make stale. Raises `NoServerError` where none does."""
        self._all_do(Server.forget)

    def sample(self, asks: Sequence[GroupRequest], place: PlaceFeatures) -> list[Sampled]:
        """An answer to each request; others are asked where one does not answer, or turns out to
        have lost the weights.

        Raises `NoServerError` where none is left, and `RolloutError` for what no server would
        answer.
        """
        answers: dict[int, Sampled] = {}
        last: Exception | None = None
        while left := [number for number in range(len(asks)) if number not in answers]:
            servers = list(self.living)
            if not servers:
                raise NoServerError(_none_left(last))
            turns = {number: servers[turn % len(servers)] for turn, number in enumerate(left)}
            failed = set[Server]()
            features: dict[Server, Features] = {server: {} for server in servers}
            work = [
                partial(_answer, turns[one], asks[one], place, features[turns[one]], failed)
                for one in left
            ]
            found: dict[int, Sampled] = {}
            for number, future in zip(
                left, _on_threads(work, _AT_A_TIME * len(servers)), strict=True
            ):
                problem = future.exception()
                if problem is None:
                    found[number] = future.result()
                elif isinstance(problem, RolloutError) or not isinstance(problem, Exception):
                    raise problem
                elif str(problem).startswith(_REFUSED):  # every server would
                    raise RolloutError(
                        f"a vLLM server refuses what it is asked: {problem}"[:400]
                    ) from problem
                elif turns[number] in self.living:
                    self._leave_out(turns[number], last := problem)
            asked = [server for server in self.living if server in turns.values()]
            for server, doubt in _together(asked, Server.check_weights).items():
                if doubt is not None:
                    self._leave_out(server, last := doubt)
            answers |= {
                number: answer for number, answer in found.items() if turns[number] in self.living
            }
        return [answers[number] for number in range(len(asks))]

    def _all_do(self, do: Callable[[Server], None], hint: str = "") -> None:
        problems = _together(self.living, do)
        for server, problem in problems.items():
            if problem is not None:
                self._leave_out(server, problem, hint)
        if not self.living:
            raise NoServerError(_none_left(next(filter(None, problems.values()))))

    def _leave_out(self, server: Server, problem: Exception, more: str = "") -> None:
        self.living.remove(server)
        server.synced_life = ""  # it may have died while it read
        others = (
            f"{len(self.living)} of {len(self._all)} servers go on"
            if self.living
            else "no server is left"
        )
        reason = in_one_line(problem)[:300]
        tqdm.write(f"Server {server.address} is left out ({others}): {reason}. {more}".rstrip())


def _answer(
    server: Server, ask: GroupRequest, place: PlaceFeatures, features: Features, failed: set[Server]
) -> Sampled:
    """Its answer, unless it is one of those that have `failed`: the deadline of a server that hangs
    passes once.
    """
    if server in failed:
        raise UnusableServerError("it did not answer another request")
    try:
        return server.answer(ask, place, features)
    except Exception:
        failed.add(server)
        raise


def _together(
    servers: Sequence[Server], do: Callable[[Server], None]
) -> dict[Server, Exception | None]:
    """What went wrong with each, all at the same time."""

    def tried(server: Server) -> Exception | None:
        try:
            do(server)
        except Exception as error:  # also what reading a reply of another form raises
            return error
        return None

    found = _on_threads([partial(tried, server) for server in servers], len(servers))
    return {server: future.result() for server, future in zip(servers, found, strict=True)}


def _settle(future: Future[_T], do: Callable[[], _T]) -> None:
    try:
        future.set_result(do())
    except BaseException as error:
        future.set_exception(error)


def _on_threads(work: Sequence[Callable[[], _T]], at_a_time: int) -> list[Future[_T]]:
    """The result of each, or what it raised.

    The threads are daemons: an ending process waits for no server.
    """
    futures = [Future[_T]() for _ in work]
    left = deque(zip(work, futures, strict=True))

    def run() -> None:
        while left:
            with suppress(IndexError):  # another thread has taken the last one
                do, future = left.popleft()
                _settle(future, do)

    threads = [
        Thread(target=run, name="vllm-servers", daemon=True)
        for _ in range(min(at_a_time, len(work)))
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        left.clear()
    return futures


def _none_left(problem: BaseException | None) -> str:
    last = f"; the last one: {in_one_line(problem)[:300]}" if problem is not None else ""
    return f"no vLLM server is left{last}. Start one again"


class _Session(requests.Session):
    """What a server is asked by: its login in a header instead of in its address, and no proxy to
    this machine.
    """

    def __init__(self, address: str, login: tuple[str, str] | None) -> None:
        super().__init__()
        self.auth = login
        self.trust_env = not is_here(address)
        for scheme in ("http://", "https://"):
            self.mount(scheme, _Adapter(_CONNECT_S))


class Client(VLLMClient):  # type: ignore[misc]  # TRL is untyped to mypy
    """TRL's client of a server."""

    base_url: str
    host: str

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Stock TRL asks without a time limit, also a proxy, and for ever where it gets another
        status than 200; what it says has the address with its login. Ours raises `ConnectionError`
        once the time is over.
        """
        self.base_url, login = without_login(self.base_url)
        self.session = _Session(self.base_url, login)
        end = time.monotonic() + total_timeout
        while True:
            try:
                response = self.session.get(f"{self.base_url}/health", timeout=_LIVING_S)
                if response.status_code == 200:
                    self.host = response.headers.get("X-Forwarded-For", self.host)
                    return
                problem = f"it answers {response.status_code} to /health"
            except requests.RequestException as error:
                problem = in_one_line(error)
            if time.monotonic() >= end:
                raise ConnectionError(f"{problem}, in {total_timeout:g} s")
            time.sleep(retry_interval)


def connect(addresses: Sequence[str], group_port: int, patience_s: float) -> list[VLLMClient]:
    """TRL's clients of the servers, which answer within `patience_s`.

    Raises `EngineError` where one does not.
    """

    def client(address: str) -> VLLMClient:
        try:
            found = Client(base_url=address, group_port=group_port, connection_timeout=patience_s)
            found.get_server_info()
        except Exception as error:  # TRL raises `Exception` for a status that it does not expect
            shown = without_login(address)[0]
            raise EngineError(
                f"vllm_server_base_url: {shown} cannot be used ({in_one_line(error)})"
            ) from error
        return found

    return [
        future.result()
        for future in _on_threads([partial(client, one) for one in addresses], len(addresses))
    ]
