"""The vLLM servers of a run. A server that fails is left out until it answers again.

They get requests prompt by prompt, and new weights after a step. Everything here is HTTP and runs
on the first rank alone; what all ranks do together is in `server_group.py`.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import cycle
from pathlib import Path

from tqdm import tqdm
from trl.generation.vllm_client import VLLMClient

from adora_vl.rollout.rollouts import SamplingResult
from adora_vl.rollout.server import (
    REFUSAL_PREFIX,
    AdapterRequirements,
    FeaturesByImageIds,
    GroupRequest,
    PlaceFeatures,
    Server,
    UnusableServerError,
)
from adora_vl.rollout.server_client import (
    FAILED_SERVER_TIMEOUTS,
    MAX_REQUESTS_PER_SERVER,
    SERVER_THREAD,
    SHORT_QUESTION_TIMEOUTS,
)
from adora_vl.utils.daemon_threads import run_on_daemon_threads
from adora_vl.utils.errors import EngineError, NoServerError, RolloutError, describe_error

_RETRY_INTERVAL_S = 2.0
_RESTARTED_SERVER_ERROR = UnusableServerError(
    "it was started again, and gets all weights with the next ones"
)


class ServerPool:
    """All vLLM servers of a run, and which of them are in use. Only the first rank has a pool.

    A server that fails is left out, until a weight sync finds that it answers again. A server that
    was started again has a new `instance_id`, and the weights of its checkpoint in place of the
    policy's until the next sync.
    """

    def __init__(
        self,
        clients: Sequence[VLLMClient],
        *,
        max_wait_s: float,
        answer_timeout_s: float,
        vocabulary_size: int,
        logprobs_mode: str,
    ) -> None:
        """Create a server for each client. All are in use until one fails.

        Args:
            clients: TRL's clients of the servers.
            max_wait_s: how many seconds a weight sync waits for the first server to answer.
            answer_timeout_s: how many seconds a server may take to sample a request.
            vocabulary_size: the number of token ids that the policy has.
            logprobs_mode: vLLM's name for the kind of log-probabilities that the trainer needs. A
                server that returns another kind is reported at its first sync.
        """
        self._servers = [
            Server(client, answer_timeout_s=answer_timeout_s, vocabulary_size=vocabulary_size)
            for client in clients
        ]
        self.servers_in_use = list(self._servers)
        self._max_wait_s = max_wait_s
        self._logprobs_mode = logprobs_mode
        # set by `expect_adapter`; None: the servers read whole weights
        self._adapter_requirements: AdapterRequirements | None = None

    def all_have_lora(self) -> bool:
        """Return whether all servers were started with LoRA.

        Raises what `Server.read_info` raises.
        """
        for server in self._servers:
            server.read_info()
        return all(server.lora_settings for server in self._servers)

    def expect_adapter(self, requirements: AdapterRequirements) -> None:
        """Let the servers read only the policy's LoRA adapter from now on, and no whole weights.

        A server that names its model otherwise is reported, and not refused: two names may lead to
        the same model. Raises `EngineError` where a server cannot load the adapter.
        """
        self._adapter_requirements = requirements
        for server in self._servers:
            try:
                server.check_lora(requirements)
            except UnusableServerError as error:
                raise EngineError(f"vllm_server_base_url: {server.address}: {error}") from None
            if server.model_name != requirements.base_model:
                tqdm.write(
                    f"Server {server.address} serves {server.model_name}, to which the adapter goes "
                    f"alone; it has to be {requirements.base_model}, the policy's base."
                )

    def update_servers_in_use(self, *, sends_only_changes: bool = False) -> bool:
        """Find out which servers answer, before a weight sync, and use only those.

        Args:
            sends_only_changes: whether the sync writes only the weights that training changes. A
                server that has missed the last sync is then left out until the next one.

        Returns whether any server in use has missed the last sync. Raises `NoServerError` where no
        server answers in time.
        """
        deadline = time.monotonic() + self._max_wait_s
        while True:
            errors = _errors_by_server(self._servers, self._check_server)
            for server, error in errors.items():
                if error is None and server not in self.servers_in_use:
                    tqdm.write(f"Server {server.address} is back.")
                    self.servers_in_use.append(server)
                elif error is not None and server in self.servers_in_use:
                    self._exclude(server, error)
            if self.servers_in_use:
                return self._handle_restarted_servers(sends_only_changes=sends_only_changes)
            if time.monotonic() >= deadline:
                raise NoServerError(_no_server_message(_first_error(errors)))
            time.sleep(_RETRY_INTERVAL_S)

    def _check_server(self, server: Server) -> None:
        """Ask a server for its settings, and raise where it cannot be used."""
        timeouts = (
            SHORT_QUESTION_TIMEOUTS if server in self.servers_in_use else FAILED_SERVER_TIMEOUTS
        )
        server.read_info(timeouts)
        if self._adapter_requirements is not None:
            server.check_lora(self._adapter_requirements)

    def _handle_restarted_servers(self, *, sends_only_changes: bool) -> bool:
        """Return whether any server in use was started again since the last sync.

        Such a server has the weights of its checkpoint in place of the policy's. If the next sync
        sends only the weights that training changes, that is not enough for it, and it is left out
        here. If the sync sends an adapter, the server stays, since an adapter is always sent as a
        whole. Raises `NoServerError` where no server remains.

        `sends_only_changes`: whether the next sync sends only the weights that training changes.
        """
        restarted_servers = [
            server
            for server in self.servers_in_use
            if server.synced_instance_id != server.instance_id
        ]
        for server in restarted_servers:
            if server.logprobs_mode != self._logprobs_mode:
                tqdm.write(
                    f"Server {server.address} was started with --logprobs-mode "
                    f"{server.logprobs_mode}; {self._logprobs_mode} is the trainer's."
                )
            if sends_only_changes and self._adapter_requirements is None:
                self._exclude(server, _RESTARTED_SERVER_ERROR)
        if not self.servers_in_use:
            raise NoServerError(_no_server_message(_RESTARTED_SERVER_ERROR))
        return bool(restarted_servers)

    def read_weights(self, folder: Path) -> None:
        """Let all servers in use load the weights, or the adapter, in `folder`.

        Raises `NoServerError` where none can.
        """
        has_adapter = self._adapter_requirements is not None
        read = Server.read_adapter if has_adapter else Server.read_weights
        self._on_servers_in_use(
            lambda server: read(server, folder), hint=f"Does it see {str(folder.parent)!r}? "
        )

    def reset_caches(self) -> None:
        """Let all servers in use empty the caches that old weights have filled.

        Raises `NoServerError` where none can.
        """
        self._on_servers_in_use(Server.reset_caches)

    def sample(
        self, group_requests: Sequence[GroupRequest], place_features: PlaceFeatures
    ) -> list[list[SamplingResult]]:
        """Sample the rollouts of each request, and return them in the order of the requests.

        The requests are divided among the servers. If a server does not answer a request, or
        answers it without the policy's weights, the request is sent to another server. For example,
        of 5 requests server A gets 0, 2 and 4, and server B gets 1 and 3. If B fails, A gets 1 and
        3 in a second round.

        Raises `NoServerError` where no server is left, and `RolloutError` for a request that every
        server would refuse.

        Args:
            group_requests: requests for several rollouts of a prompt each.
            place_features: adds the positions of a prompt's image tokens to its image features.
        """
        # From here on a request is named by its number in `group_requests`.
        request_numbers = range(len(group_requests))
        rollouts_by_request: dict[int, list[SamplingResult]] = {}
        last_error: Exception | None = None
        while len(rollouts_by_request) < len(group_requests):
            if not self.servers_in_use:
                raise NoServerError(_no_server_message(last_error))
            unanswered_requests = [
                number for number in request_numbers if number not in rollouts_by_request
            ]
            # Not strict: the servers repeat without end.
            servers_in_turn = cycle(self.servers_in_use)
            server_by_request = dict(zip(unanswered_requests, servers_in_turn, strict=False))
            futures = _send_all(group_requests, server_by_request, place_features)
            failure = self._exclude_failed(futures, server_by_request)
            # A server that was started again while it sampled has used other weights.
            restart = self._exclude_restarted(server_by_request.values())
            last_error = restart or failure or last_error
            for number, future in futures.items():
                is_server_in_use = server_by_request[number] in self.servers_in_use
                if is_server_in_use and future.exception() is None:
                    rollouts_by_request[number] = future.result()
        return [rollouts_by_request[number] for number in request_numbers]

    def _exclude_failed(
        self,
        futures: Mapping[int, Future[list[SamplingResult]]],
        server_by_request: Mapping[int, Server],
    ) -> Exception | None:
        """Leave out each server that has failed to answer a request, and return the last error.

        The result is None if no server has failed. Raises the error of a request that every server
        would refuse.

        Args:
            futures: the finished future of each request, by the request's number.
            server_by_request: the server of each request, by the request's number.
        """
        last_error = None
        for number, future in futures.items():
            error = future.exception()
            if error is None:
                continue
            server_error = _error_of_one_server(error)
            server = server_by_request[number]
            # A server that failed to answer an earlier one of these requests is left out already.
            if server in self.servers_in_use:
                last_error = server_error
                self._exclude(server, server_error)
        return last_error

    def _exclude_restarted(self, servers: Collection[Server]) -> Exception | None:
        """Leave out each of these servers that has lost the policy's weights in a restart.

        Returns the error of the last server that is left out; None if none is.
        """
        last_error = None
        servers_to_check = [server for server in self.servers_in_use if server in servers]
        errors = _errors_by_server(servers_to_check, Server.check_not_restarted)
        for server, error in errors.items():
            if error is not None:
                last_error = error
                self._exclude(server, error)
        return last_error

    def _on_servers_in_use(self, action: Callable[[Server], None], hint: str = "") -> None:
        """Run an action on all servers in use at the same time, and leave out those that fail.

        `hint` is printed behind the reason. Raises `NoServerError` where all of them fail.
        """
        errors = _errors_by_server(self.servers_in_use, action)
        for server, error in errors.items():
            if error is not None:
                self._exclude(server, error, hint)
        if not self.servers_in_use:
            raise NoServerError(_no_server_message(_first_error(errors)))

    def _exclude(self, server: Server, error: Exception, hint: str = "") -> None:
        """Stop using a server, and print why, with an optional hint."""
        self.servers_in_use.remove(server)
        # It may have failed in the middle of reading weights, so it gets all of them when it is
        # back.
        server.synced_instance_id = ""
        rest = "no server is left"
        if self.servers_in_use:
            rest = f"{len(self.servers_in_use)} of {len(self._servers)} servers go on"
        reason = describe_error(error)[:300]
        tqdm.write(f"Server {server.address} is left out ({rest}): {reason}. {hint}".rstrip())


def _send_all(
    group_requests: Sequence[GroupRequest],
    server_by_request: Mapping[int, Server],
    place_features: PlaceFeatures,
) -> dict[int, Future[list[SamplingResult]]]:
    """Send requests to their servers at the same time, and wait for the answers.

    Args:
        group_requests: all requests of a batch.
        server_by_request: the server of each request that is to be sent, by the request's number in
            the batch.
        place_features: adds the positions of a prompt's image tokens to its image features.

    Returns a finished future for each number, with the sampled rollouts or the exception.
    """
    failed_servers = set[Server]()
    # Each server computes the features of an image once.
    features_by_server: dict[Server, FeaturesByImageIds] = {
        server: {} for server in server_by_request.values()
    }
    jobs = []
    for number, server in server_by_request.items():
        jobs.append(
            partial(
                _sample_unless_failed,
                server=server,
                group_request=group_requests[number],
                place_features=place_features,
                features_by_image_ids=features_by_server[server],
                failed_servers=failed_servers,
            )
        )
    futures = run_on_daemon_threads(
        jobs,
        max_threads=MAX_REQUESTS_PER_SERVER * len(features_by_server),
        thread_name=SERVER_THREAD,
    )
    return dict(zip(server_by_request, futures, strict=True))


def _sample_unless_failed(
    server: Server,
    group_request: GroupRequest,
    place_features: PlaceFeatures,
    features_by_image_ids: FeaturesByImageIds,
    failed_servers: set[Server],
) -> list[SamplingResult]:
    """Sample a request on a server, unless another request on that server has failed.

    All threads of a batch share `failed_servers`. So a server that hangs costs its timeout once,
    and not once for each request. The other arguments are those of `Server.sample`.
    """
    if server in failed_servers:
        raise UnusableServerError("it did not answer another request")
    try:
        return server.sample(group_request, place_features, features_by_image_ids)
    except Exception:
        failed_servers.add(server)
        raise


def _error_of_one_server(error: BaseException) -> Exception:
    """Return the error if another server may still answer the request; raise it otherwise.

    For example, a timeout is returned. An HTTP status of the 400s is raised as `RolloutError`,
    since every server would refuse the request.
    """
    # A `RolloutError` is about the run's settings. Others, such as `SystemExit`, end the program.
    if isinstance(error, RolloutError) or not isinstance(error, Exception):
        raise error
    if str(error).startswith(REFUSAL_PREFIX):
        raise RolloutError(f"a vLLM server refuses what it is asked: {error}"[:400]) from error
    return error


def _first_error(errors: Mapping[Server, Exception | None]) -> Exception:
    """Return the first error of several servers, at least one of which has one."""
    return next(error for error in errors.values() if error is not None)


def _errors_by_server(
    servers: Sequence[Server], action: Callable[[Server], None]
) -> dict[Server, Exception | None]:
    """Run an action on these servers at the same time.

    Returns for each server the exception that the action raised; None where it raised none.
    """

    def error_of(server: Server) -> Exception | None:
        """Run the action on one server, and return its exception."""
        try:
            action(server)
        except Exception as error:  # also that of a reply which is not in vLLM's format
            return error
        return None

    futures = run_on_daemon_threads(
        [partial(error_of, server) for server in servers],
        max_threads=len(servers),
        thread_name=SERVER_THREAD,
    )
    return {server: future.result() for server, future in zip(servers, futures, strict=True)}


def _no_server_message(last_error: Exception | None) -> str:
    """Return the message of a `NoServerError`, with the last error of a server if there is one."""
    last = f"; the last one: {describe_error(last_error)[:300]}" if last_error is not None else ""
    return f"no vLLM server is left{last}. Start one again"
