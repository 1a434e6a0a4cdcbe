"""vLLM servers that sample for the trainer.

They get requests group by group and new weights after a step. A server that fails is left out until
it is back. Everything here is HTTP and runs on the first rank alone; what all ranks do together is
in `server_group.py`.
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
# Timeouts to connect and to answer a short question: of a server in use, and of one left out, which
# may be switched off and must not delay every sync.
_TIMEOUTS_IN_USE_S = (_CONNECT_S, 60.0)
_TIMEOUTS_LEFT_OUT_S = (1.0, 10.0)
_RETRY_INTERVAL_S = 2.0
_LORA_BY_REQUEST = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_REFUSED_BY_SERVER = "Request failed: 4"  # how TRL's message begins for an HTTP status of the 400s
# Requests that a server has at a time. This is vLLM's own limit; more would wait in its queue.
_MAX_REQUESTS = 256
# A machine that loses its power closes no connection. With these options the kernel closes it after
# 2 minutes of silence.
_KEEPALIVE_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
]
_T = TypeVar("_T")
# the tokens and log-probabilities of each rollout of a request
Sampled = list[tuple[list[int], list[float]]]
# image features that a server has computed, by the `id`s of a prompt's images
Features = dict[tuple[int, ...], Future[Any]]
# points image features at the image tokens of a prompt's ids
PlaceFeatures = Callable[[dict[str, Any] | None, list[int]], dict[str, Any] | None]


class UnusableServerError(SpokenError, RuntimeError):
    """A server cannot do what it is asked for, though another server might."""


_STARTED_AGAIN = UnusableServerError(
    "it was started again, and gets all weights with the next ones"
)


@dataclass(frozen=True)
class GroupRequest:
    """One prompt, and how its rollouts are sampled."""

    prompt_ids: list[int]  # with the image tokens expanded
    images: list[Any]
    rollouts: int  # number of rollouts
    settings: dict[str, Any]  # vLLM's sampling parameters


def sampled_logps(
    tokens: Sequence[Sequence[int]],
    candidate_logps: Sequence[Sequence[Sequence[float | None]]],
    candidate_ids: Sequence[Sequence[Sequence[int]]],
) -> list[list[float]]:
    """Return the log-probability of each sampled token of each rollout.

    `candidate_logps`, `candidate_ids`: for each token the scored candidates, of which the first is the likeliest and
    not necessarily the sampled one. So the sampled token is looked up by its id.
    """
    logps_by_rollout = []
    for row_tokens, row_logps, row_ids in zip(tokens, candidate_logps, candidate_ids, strict=True):
        rollout_logps = []
        for token, token_logps, token_ids in zip(row_tokens, row_logps, row_ids, strict=True):
            rollout_logps.append(engine_logp(token_logps[token_ids.index(token)]))
        logps_by_rollout.append(rollout_logps)
    return logps_by_rollout


def refuse_impossible(
    tokens: Sequence[Sequence[int]], max_tokens: int, vocabulary_size: int
) -> None:
    """Raise `UnusableServerError` for rollouts that the policy cannot have sampled.

    `tokens`: those of each rollout. `max_tokens`: the largest number of tokens of a rollout.
    `vocabulary_size`: the number of ids in the policy's embedding; a larger id would end the run in its
    first forward pass.
    """
    longest = max(map(len, tokens))
    if longest > max_tokens:
        raise UnusableServerError(f"asked for at most {max_tokens} tokens it gave {longest}")
    for rollout in tokens:
        for token in rollout:
            if not 0 <= token < vocabulary_size:
                raise UnusableServerError(
                    f"it gave the token {token}, but the policy's vocabulary has {vocabulary_size}; "
                    "start it with the policy's model"
                )


class _Retry(Retry):
    """Retries where a connection breaks, but not where a server is silent for too long."""

    def increment(self, *args: Any, **kwargs: Any) -> Self:
        """Count a retry, or raise the timeout that would be retried."""
        error = kwargs.get("error")
        if isinstance(error, ReadTimeoutError):
            raise error
        return super().increment(*args, **kwargs)


class _Adapter(HTTPAdapter):
    """An HTTP adapter that gives up soon on a server which does not answer at all.

    TRL's own adapter waits for a minute, and for ever where nobody listens.
    """

    def __init__(self, answer_s: float) -> None:
        """Create the adapter.

        `answer_s`: timeout of an answer, in seconds, where the request has none of its own.
        """
        self._answer_s = answer_s
        retry = _Retry(
            total=3,
            backoff_factor=0.2,
            status_forcelist=[502, 503],
            allowed_methods=["GET", "POST"],
        )
        super().__init__(max_retries=retry, pool_maxsize=_MAX_REQUESTS)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Open connections with TCP keepalive."""
        options = [*HTTPConnection.default_socket_options, *_KEEPALIVE_OPTIONS]
        super().init_poolmanager(*args, **kwargs, socket_options=options)

    def send(
        self, request: requests.PreparedRequest, *args: Any, **kwargs: Any
    ) -> requests.Response:
        """Send a request, with the adapter's timeouts unless it has its own."""
        kwargs["timeout"] = kwargs.get("timeout") or (_CONNECT_S, self._answer_s)
        return super().send(request, *args, **kwargs)


class Server:
    """One vLLM server. Its methods raise `UnusableServerError`, or what `requests` raises."""

    def __init__(self, client: VLLMClient, answer_timeout_s: float, vocabulary_size: int) -> None:
        """Create the server's state; nothing is asked of it yet.

        `answer_timeout_s`: how many seconds it may take to answer a request, or to read all weights.
        `vocabulary_size`: the number of token ids that the policy has.
        """
        for scheme in ("http://", "https://"):
            client.session.mount(scheme, _Adapter(answer_timeout_s))
        self.client = client
        self._answer_s = answer_timeout_s
        self._vocabulary = vocabulary_size
        self.address: str = client.base_url
        self.life = ""  # vLLM's instance id, which is new after each start of the server
        self.synced_life = ""  # the instance that has the weights of the last sync
        self.logprobs_mode = ""  # vLLM's name for the kind of log-probabilities that it returns
        self.lora: dict[str, Any] = {}  # vLLM's LoRA settings; empty if it was started without LoRA
        self.model_name = ""  # vLLM's name for the model that it serves
        self.in_four_bit = False  # whether that model is in 4 bits

    def read_info(self, timeout: tuple[float, float] = _TIMEOUTS_IN_USE_S) -> None:
        """Read what the server is, and raise where it does not answer.

        `timeout`: seconds to connect, and seconds to answer.
        """
        info = self._json("GET", "server_info?config_format=json", timeout=timeout)
        config = info["vllm_config"]
        model = config["model_config"]
        self.life = str(config["instance_id"])
        self.logprobs_mode = str(model["logprobs_mode"])
        lora = config.get("lora_config")
        self.lora = {"enable_lora": True, **lora, **info["vllm_env"]} if lora else {}
        self.model_name = str(model.get("model"))
        self.in_four_bit = model.get("quantization") == "bitsandbytes"

    def check_lora(
        self, required_settings: Mapping[str, Any], base_model: str, is_in_four_bit: bool
    ) -> None:
        """Raise `UnusableServerError` where it was not started for an adapter on `base_model`.

        Args:
            required_settings: vLLM's settings that the adapter needs; a number is a lower bound.
            base_model: the model that the policy is trained on.
            is_in_four_bit: whether that model is in 4 bits.
        """
        missing_options = []
        for name, value in required_settings.items():
            if self.lora.get(name, 0) < value:
                option = f"--{name.replace('_', '-')}"
                missing_options.append(option if value is True else f"{option} {value}")
        if not self.lora.get(_LORA_BY_REQUEST):
            missing_options.append(f"{_LORA_BY_REQUEST}=1 in its environment")
        if self.lora.get("target_modules"):  # vLLM would skip the adapter's other layers
            missing_options.append("no --lora-target-modules")
        if missing_options:
            raise UnusableServerError(
                f"it has no room for the policy's adapter; start it with {' and '.join(missing_options)}"
            )
        if self.in_four_bit != is_in_four_bit:
            raise UnusableServerError(
                f"it serves {self.model_name}; start it with {base_model}, which the policy is trained on"
            )

    def check_weights(self) -> None:
        """Raise `UnusableServerError` where it was started again since it read the weights.

        It then has the weights of its checkpoint instead of the policy's.
        """
        if not self.synced_life:  # weights do not travel by file
            return
        self.read_info()
        if self.life != self.synced_life:
            raise UnusableServerError(
                "it was started again, and has not the policy's weights until the next sync"
            )

    def answer(
        self, group_request: GroupRequest, place_features: PlaceFeatures, features_of: Features
    ) -> Sampled:
        """Sample the rollouts of a request.

        Args:
            group_request: the prompt, and how its rollouts are sampled.
            place_features: points image features at the image tokens of the prompt.
            features_of: the features that the server has computed for the present batch of requests.
                Requests for the same images share them, such as those for rollouts that go on, each
                of which is a request.
        """
        features = None
        try:
            if group_request.images:
                image_features = self._image_features(group_request.images, features_of)
                features = [place_features(image_features, group_request.prompt_ids)]
            reply = self.client.generate(
                [group_request.prompt_ids],
                features,
                group_request.rollouts,
                generation_kwargs=group_request.settings,
            )
        except requests.ReadTimeout as error:
            raise UnusableServerError(
                f"it gave no answer in {self._answer_s:g} s, half of ddp_timeout"
            ) from error
        except Exception as error:
            # A server that was started again has no such adapter and refuses too.
            if str(error).startswith(_REFUSED_BY_SERVER):
                self.check_weights()
            raise
        return self._checked(reply, group_request)

    def _image_features(self, images: list[Any], features_of: Features) -> dict[str, Any] | None:
        """Return the features of images, which the first request for them has computed."""
        image_ids = tuple(map(id, images))
        own_future = Future[Any]()
        future = features_of.setdefault(image_ids, own_future)
        if future is own_future:
            _settle(own_future, partial(self.client.image_features, [images]))
        features: dict[str, Any] | None = future.result()[0]
        return features

    def _checked(self, reply: Mapping[str, Any], group_request: GroupRequest) -> Sampled:
        """Return the rollouts in a reply.

        Raises `UnusableServerError` where they are not what the policy would sample for the request.
        """
        tokens = reply["completion_ids"]
        logps = reply["logprobs"]
        token_counts = [len(rollout) for rollout in tokens]
        scored_counts = [len(rollout) for rollout in logps or ()]
        rollout_count = group_request.rollouts
        if (
            len(token_counts) != rollout_count
            or not all(token_counts)
            or scored_counts != token_counts
        ):
            raise UnusableServerError(
                f"asked for {rollout_count} rollouts it gave {token_counts} tokens, {scored_counts} of them "
                "scored"
            )
        refuse_impossible(tokens, group_request.settings["max_tokens"], self._vocabulary)
        if reply["prompt_ids"] != [group_request.prompt_ids]:
            raise UnusableServerError("it read another prompt than the trainer's")
        rollout_logps = sampled_logps(tokens, logps, reply["logprob_token_ids"])
        return list(zip(tokens, rollout_logps, strict=True))

    def read_weights(self, folder: Path) -> None:
        """Load the tensors in `folder`, and empty the caches that the old weights have filled."""
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._ask("POST", "collective_rpc", json=arguments)
        self.reset_caches()
        self.synced_life = self.life

    def read_adapter(self, folder: Path) -> None:
        """Load the adapter in `folder` in place of the previous one.

        The adapter is named by the folder, whose name is unique. So a server that has another
        adapter refuses requests instead of sampling with it.
        """
        previous_adapter = self.client.model
        self.client.model = folder.name
        self._ask(
            "POST",
            "v1/load_lora_adapter",
            json={"lora_name": folder.name, "lora_path": str(folder)},
        )
        if self.synced_life == self.life:
            self._ask("POST", "v1/unload_lora_adapter", json={"lora_name": previous_adapter})
        self.reset_caches()
        self.synced_life = self.life

    def reset_caches(self) -> None:
        """Empty the caches of prefixes and image features."""
        if not self._json("POST", "reset_prefix_cache", timeout=_TIMEOUTS_IN_USE_S).get(
            "success", True
        ):
            raise UnusableServerError(
                "it did not reset its prefix cache: requests of others are running"
            )
        self._ask("POST", "reset_encoder_cache", timeout=_TIMEOUTS_IN_USE_S)

    def _ask(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        """Return the response with status 200.

        Raises `UnusableServerError` for every other status.
        """
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
        """Return the body of a response with status 200."""
        reply: dict[str, Any] = self._ask(method, path, **kwargs).json()
        return reply


class ServerPool:
    """All servers of a run. Those that fail are left out until they are back.

    `living`: the servers in use.
    """

    def __init__(
        self,
        clients: Sequence[VLLMClient],
        patience_s: float,
        answer_timeout_s: float,
        vocabulary_size: int,
        logprobs_mode: str = "",
    ) -> None:
        """Create the pool of all clients' servers, which count as living until one fails.

        Args:
            clients: TRL's clients of the servers.
            patience_s: how many seconds a sync waits for a first server to answer.
            answer_timeout_s: timeout of a sampling request, in seconds.
            vocabulary_size: the number of the policy's token ids.
            logprobs_mode: the kind of log-probabilities that the trainer uses; a server with
                another kind is reported at its first sync.
        """
        self._all = [Server(client, answer_timeout_s, vocabulary_size) for client in clients]
        self.living = list(self._all)
        self._patience_s = patience_s
        self._logprobs_mode = logprobs_mode
        # the arguments of `Server.check_lora`; None where whole weights are written
        self._adapter: tuple[Mapping[str, Any], str, bool] | None = None

    def have_lora(self) -> bool:
        """Return whether all servers were started with LoRA. Raises what `Server.read_info` raises."""
        for server in self._all:
            server.read_info()
        return all(server.lora for server in self._all)

    def take_adapter(
        self, required_settings: Mapping[str, Any], base_model: str, is_in_four_bit: bool
    ) -> None:
        """Send the servers nothing but the adapter from now on.

        The arguments are those of `Server.check_lora`. A server whose model has another name than
        `base_model` is reported, since it may be the same model. Raises `EngineError` where a server cannot
        take the adapter.
        """
        self._adapter = required_settings, base_model, is_in_four_bit
        for server in self._all:
            try:
                server.check_lora(required_settings, base_model, is_in_four_bit)
            except UnusableServerError as error:
                raise EngineError(f"vllm_server_base_url: {server.address}: {error}") from None
            if server.model_name != base_model:
                tqdm.write(
                    f"Server {server.address} serves {server.model_name}, to which the adapter goes "
                    f"alone; it has to be {base_model}, the policy's base."
                )

    def find_living(self, *, in_part: bool = False) -> bool:
        """Find the servers that answer, before a sync.

        Returns whether any of them lacks the weights of the last sync. Where only a part of the
        weights is written (`in_part`), such a server is left out until the next sync. Raises
        `NoServerError` where none answers in time.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            problems = _on_each(self._all, self._look)
            self._update_living(problems)
            if self.living:
                return self._lacks_weights(in_part)
            if time.monotonic() >= deadline:
                raise NoServerError(_none_left(_first_problem(problems)))
            time.sleep(_RETRY_INTERVAL_S)

    def _update_living(self, problems: Mapping[Server, Exception | None]) -> None:
        """Use the servers that have answered, and leave out those with a problem."""
        for server, problem in problems.items():
            if problem is None and server not in self.living:
                tqdm.write(f"Server {server.address} is back.")
                self.living.append(server)
            elif problem is not None and server in self.living:
                self._leave_out(server, problem)

    def _lacks_weights(self, in_part: bool) -> bool:
        """Return whether any server in use lacks the weights of the last sync, as after a restart.

        `in_part`: such a server is left out, unless it gets an adapter, which is always written as a
        whole. Raises `NoServerError` where no server remains.
        """
        restarted = [server for server in self.living if server.synced_life != server.life]
        for server in restarted:
            if server.logprobs_mode != self._logprobs_mode:
                tqdm.write(
                    f"Server {server.address} was started with --logprobs-mode "
                    f"{server.logprobs_mode}; {self._logprobs_mode} is the trainer's."
                )
            if in_part and not self._adapter:
                self._leave_out(server, _STARTED_AGAIN)
        if not self.living:
            raise NoServerError(_none_left(_STARTED_AGAIN))
        return bool(restarted)

    def _look(self, server: Server) -> None:
        """Look at a server, with shorter timeouts if it is left out."""
        server.read_info(_TIMEOUTS_IN_USE_S if server in self.living else _TIMEOUTS_LEFT_OUT_S)
        if self._adapter:
            server.check_lora(*self._adapter)

    def read_weights(self, folder: Path) -> None:
        """Let all servers load the tensors in `folder`. Raises `NoServerError` where none can."""
        read = Server.read_adapter if self._adapter else Server.read_weights
        self._on_all_living(
            lambda server: read(server, folder), hint=f"Does it see {str(folder.parent)!r}? "
        )

    def reset_caches(self) -> None:
        """Empty the caches that new weights make stale. Raises `NoServerError` where none does."""
        self._on_all_living(Server.reset_caches)

    def sample(
        self, group_requests: Sequence[GroupRequest], place_features: PlaceFeatures
    ) -> list[Sampled]:
        """Sample the rollouts of each request.

        Requests go to another server where one does not answer, or turns out to have lost the
        weights. Raises `NoServerError` where no server is left, and `RolloutError` for a request
        that no server would answer.
        """
        answer_by_number: dict[int, Sampled] = {}
        last_problem: Exception | None = None
        while len(answer_by_number) < len(group_requests):
            servers = list(self.living)
            if not servers:
                raise NoServerError(_none_left(last_problem))
            unanswered = [
                number for number in range(len(group_requests)) if number not in answer_by_number
            ]
            server_by_number = {
                number: servers[index % len(servers)] for index, number in enumerate(unanswered)
            }
            futures = _send_all(group_requests, server_by_number, place_features)
            sampled_by_number: dict[int, Sampled] = {}
            for number, future in futures.items():
                error = future.exception()
                if error is None:
                    sampled_by_number[number] = future.result()
                    continue
                problem = _problem_of_server(error)
                if server_by_number[number] in self.living:
                    last_problem = problem
                    self._leave_out(server_by_number[number], problem)
            # A server that was started again while it sampled has answered with other weights.
            servers_in_use = [
                server for server in self.living if server in server_by_number.values()
            ]
            for server, weights_problem in _on_each(servers_in_use, Server.check_weights).items():
                if weights_problem is not None:
                    last_problem = weights_problem
                    self._leave_out(server, weights_problem)
            for number, answer in sampled_by_number.items():
                if server_by_number[number] in self.living:
                    answer_by_number[number] = answer
        return [answer_by_number[number] for number in range(len(group_requests))]

    def _on_all_living(self, do: Callable[[Server], None], hint: str = "") -> None:
        """Let all servers in use do something at the same time; those that fail are left out.

        `hint` follows the reason. Raises `NoServerError` where all of them fail.
        """
        problems = _on_each(self.living, do)
        for server, problem in problems.items():
            if problem is not None:
                self._leave_out(server, problem, hint)
        if not self.living:
            raise NoServerError(_none_left(_first_problem(problems)))

    def _leave_out(self, server: Server, problem: Exception, hint: str = "") -> None:
        """Use a server no longer, and say why."""
        self.living.remove(server)
        server.synced_life = ""  # it may have died while it read
        remaining = "no server is left"
        if self.living:
            remaining = f"{len(self.living)} of {len(self._all)} servers go on"
        reason = in_one_line(problem)[:300]
        tqdm.write(f"Server {server.address} is left out ({remaining}): {reason}. {hint}".rstrip())


def _send_all(
    group_requests: Sequence[GroupRequest],
    server_by_number: Mapping[int, Server],
    place_features: PlaceFeatures,
) -> dict[int, Future[Sampled]]:
    """Send requests at the same time, each to its server, and wait for the answers.

    `server_by_number`: the server of each request that is to be sent, by its number. Returns a future for
    each of them, with the answer or what was raised.
    """
    failed_servers = set[Server]()
    features_by_server: dict[Server, Features] = {
        server: {} for server in server_by_number.values()
    }
    jobs = []
    for number, server in server_by_number.items():
        jobs.append(
            partial(
                _answer,
                server=server,
                group_request=group_requests[number],
                place_features=place_features,
                features=features_by_server[server],
                failed_servers=failed_servers,
            )
        )
    futures = _on_threads(jobs, _MAX_REQUESTS * len(features_by_server))
    return dict(zip(server_by_number, futures, strict=True))


def _answer(
    server: Server,
    group_request: GroupRequest,
    place_features: PlaceFeatures,
    features: Features,
    failed_servers: set[Server],
) -> Sampled:
    """Return the server's answer to a request.

    Servers in `failed_servers` are skipped, so that a server which hangs costs its timeout only once.
    """
    if server in failed_servers:
        raise UnusableServerError("it did not answer another request")
    try:
        return server.answer(group_request, place_features, features)
    except Exception:
        failed_servers.add(server)
        raise


def _problem_of_server(error: BaseException) -> Exception:
    """Return an error for which another server may be asked; raise every other one."""
    if isinstance(error, RolloutError) or not isinstance(error, Exception):
        raise error
    if str(error).startswith(_REFUSED_BY_SERVER):  # every server would refuse
        raise RolloutError(f"a vLLM server refuses what it is asked: {error}"[:400]) from error
    return error


def _first_problem(problems: Mapping[Server, Exception | None]) -> Exception:
    """Return the first problem of several servers, at least one of which has one."""
    return next(problem for problem in problems.values() if problem is not None)


def _on_each(
    servers: Sequence[Server], action: Callable[[Server], None]
) -> dict[Server, Exception | None]:
    """Let all servers do something at the same time; return what each has raised, or None."""

    def problem_of(server: Server) -> Exception | None:
        """Return the exception of `action` for a server, None where it has none."""
        try:
            action(server)
        except Exception as error:  # also what reading a reply of another form raises
            return error
        return None

    futures = _on_threads([partial(problem_of, server) for server in servers], len(servers))
    return {server: future.result() for server, future in zip(servers, futures, strict=True)}


def _settle(future: Future[_T], job: Callable[[], _T]) -> None:
    """Put the result of `job`, or what it raises, into the future."""
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)


def _on_threads(jobs: Sequence[Callable[[], _T]], max_threads: int) -> list[Future[_T]]:
    """Run all of `jobs` on at most `max_threads` threads, and wait for it.

    Each future has a result, or what was raised. The threads are daemons, since a process that ends
    must not wait for a server.
    """
    futures = [Future[_T]() for _ in jobs]
    queue = deque(zip(jobs, futures, strict=True))

    def run_queue() -> None:
        """Take items from the queue until it is empty."""
        while queue:
            with suppress(IndexError):  # another thread has taken the last item
                job, future = queue.popleft()
                _settle(future, job)

    threads = []
    for _ in range(min(max_threads, len(jobs))):
        threads.append(Thread(target=run_queue, name="vllm-servers", daemon=True))
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        # After Ctrl-C in this thread the others begin nothing more.
        queue.clear()
    return futures


def _none_left(problem: BaseException | None) -> str:
    """Return the message of a `NoServerError`, with the last problem of a server."""
    last = f"; the last one: {in_one_line(problem)[:300]}" if problem is not None else ""
    return f"no vLLM server is left{last}. Start one again"


class _Session(requests.Session):
    """The HTTP session of one server.

    Its login is sent in a header instead of in the address, and a server on this machine is reached
    without a proxy.
    """

    def __init__(self, address: str, login: tuple[str, str] | None) -> None:
        """Begin a session with the login of the address, and without a proxy on this machine."""
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
        """Wait until the server is healthy; raise `ConnectionError` once the time is over.

        Stock TRL has no timeout for a single question, goes through a proxy, and asks for ever
        where the status is not 200. Its messages show the address with the login.
        """
        self.base_url, login = without_login(self.base_url)
        self.session = _Session(self.base_url, login)
        deadline = time.monotonic() + total_timeout
        while True:
            try:
                response = self.session.get(f"{self.base_url}/health", timeout=_TIMEOUTS_IN_USE_S)
                if response.status_code == 200:
                    self.host = response.headers.get("X-Forwarded-For", self.host)
                    return
                problem = f"it answers {response.status_code} to /health"
            except requests.RequestException as error:
                problem = in_one_line(error)
            if time.monotonic() >= deadline:
                raise ConnectionError(f"{problem}, in {total_timeout:g} s")
            time.sleep(retry_interval)


def connect(addresses: Sequence[str], group_port: int, patience_s: float) -> list[VLLMClient]:
    """Return TRL's clients of the servers at these addresses.

    `group_port`: TRL's port for a group of NCCL. Raises `EngineError` where a server does not
    answer within `patience_s` seconds.
    """

    def client_of(address: str) -> VLLMClient:
        """Return a client of an address that answers. Raises `EngineError`."""
        try:
            client = Client(base_url=address, group_port=group_port, connection_timeout=patience_s)
            client.get_server_info()
        except Exception as error:  # TRL raises `Exception` for a status that it does not expect
            public_address = without_login(address)[0]
            raise EngineError(
                f"vllm_server_base_url: {public_address} cannot be used ({in_one_line(error)})"
            ) from error
        return client

    futures = _on_threads([partial(client_of, address) for address in addresses], len(addresses))
    return [future.result() for future in futures]
