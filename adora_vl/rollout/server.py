"""One vLLM server that samples for the trainer and reads the policy's weights from files."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import requests
from trl.generation.vllm_client import VLLMClient

from adora_vl.rollout.rollouts import SamplingResult, logp_or_minus_infinity
from adora_vl.rollout.server_client import SHORT_QUESTION_TIMEOUTS, Timeouts, mount_timeouts
from adora_vl.utils.daemon_threads import set_outcome
from adora_vl.utils.errors import RedactedError

# vLLM's variable for endpoints that load and unload adapters
_RUNTIME_LORA_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
# TRL's message for an HTTP status of the 400s begins so. The server refuses the request itself.
REFUSAL_PREFIX = "Request failed: 4"
# image features that a server has computed for this batch of requests, by the `id`s of the images
FeaturesByImageIds = dict[tuple[int, ...], Future[Any]]
# Takes the image features of a prompt and the prompt's ids. Returns the features with the positions
# of the prompt's image tokens.
PlaceFeatures = Callable[[dict[str, Any] | None, list[int]], dict[str, Any] | None]


class UnusableServerError(RedactedError, RuntimeError):
    """A server cannot do what it is asked for, though another server might."""


@dataclass(frozen=True)
class GroupRequest:
    """A prompt from which a server samples several rollouts."""

    prompt_ids: list[int]  # with one image token for each image feature
    images: list[Any]
    rollout_count: int
    settings: dict[str, Any]  # vLLM's sampling parameters


@dataclass(frozen=True, kw_only=True)
class AdapterRequirements:
    """What a server must have been started with to sample with the policy's LoRA adapter."""

    lora_settings: Mapping[str, Any]  # vLLM's LoRA settings; of a number, the least that is enough
    base_model: str  # the model that the policy was loaded from
    is_in_four_bit: bool  # whether that model is quantised to 4 bits


def sampled_logps(
    tokens: Sequence[Sequence[int]],
    candidate_logps: Sequence[Sequence[Sequence[float | None]]],
    candidate_ids: Sequence[Sequence[Sequence[int]]],
) -> list[list[float]]:
    """Select the log-probability of each sampled token from a server's reply.

    The server returns one or more candidates for each position, the likeliest first. So the sampled
    token is looked up by its id. For example, the token 7 with the candidates 5 and 7, which have
    the log-probabilities -0.1 and -2.3, gets -2.3.

    Args:
        tokens: the sampled tokens, by rollout and position.
        candidate_logps: the log-probabilities of the candidates, by rollout, position and
            candidate.
        candidate_ids: the token ids of the candidates, in the same shape.

    Returns the log-probabilities in the shape of `tokens`.
    """
    logps_by_rollout = []
    for row_tokens, row_logps, row_ids in zip(tokens, candidate_logps, candidate_ids, strict=True):
        rollout_logps = []
        for token, token_logps, token_ids in zip(row_tokens, row_logps, row_ids, strict=True):
            rollout_logps.append(logp_or_minus_infinity(token_logps[token_ids.index(token)]))
        logps_by_rollout.append(rollout_logps)
    return logps_by_rollout


def refuse_impossible_tokens(
    tokens: Sequence[Sequence[int]], max_tokens: int, vocabulary_size: int
) -> None:
    """Raise `UnusableServerError` for rollouts that the policy cannot have sampled.

    Args:
        tokens: the sampled tokens of each rollout.
        max_tokens: the largest number of tokens that was asked for.
        vocabulary_size: the number of rows in the policy's embedding. A token id beyond it would
            end the run in the next forward pass.
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


class Server:
    """One vLLM server, which is asked by HTTP.

    The methods raise `UnusableServerError`, or what the library `requests` raises. A weight sync
    lets the server read weights, or a LoRA adapter, from files. `instance_id` is vLLM's id of the
    server process. If it differs from `synced_instance_id`, the server was started again since the
    last sync, and has the weights of its checkpoint.
    """

    def __init__(self, client: VLLMClient, answer_timeout_s: float, vocabulary_size: int) -> None:
        """Wrap a client. Nothing is asked of the server before `read_info`.

        Args:
            client: TRL's client of the server.
            answer_timeout_s: how many seconds the server may take to sample a request, or to read
                weights.
            vocabulary_size: the number of token ids that the policy has.
        """
        mount_timeouts(client.session, answer_timeout_s=answer_timeout_s)
        self.client = client
        self._answer_timeout_s = answer_timeout_s
        self._vocabulary_size = vocabulary_size
        self.address: str = client.base_url
        # `read_info` reads the following from the server.
        self.instance_id = ""  # vLLM's id of the server process, a new one after each start
        self.logprobs_mode = ""  # vLLM's name for the kind of log-probabilities that it returns
        # vLLM's LoRA settings; empty if the server was started without LoRA
        self.lora_settings: dict[str, Any] = {}
        self.model_name = ""  # vLLM's name for the model that it serves
        self.is_in_four_bit = False  # whether that model is quantised to 4 bits
        # `instance_id` when the server last read weights. Another instance does not have them.
        self.synced_instance_id = ""

    def read_info(self, timeouts: Timeouts = SHORT_QUESTION_TIMEOUTS) -> None:
        """Ask the server for its settings, and store them in this object."""
        info = self._ask_json("GET", "server_info?config_format=json", timeout=timeouts)
        config = info["vllm_config"]
        model = config["model_config"]
        self.instance_id = str(config["instance_id"])
        self.logprobs_mode = str(model["logprobs_mode"])
        self.lora_settings = {}
        if config.get("lora_config"):
            # The server's environment is read too: one of its variables allows to load adapters.
            self.lora_settings = {"enable_lora": True, **config["lora_config"], **info["vllm_env"]}
        self.model_name = str(model.get("model"))
        self.is_in_four_bit = model.get("quantization") == "bitsandbytes"

    def check_lora(self, requirements: AdapterRequirements) -> None:
        """Raise `UnusableServerError` where the server cannot load the policy's LoRA adapter.

        It compares what `read_info` has read with `requirements`.
        """
        missing_options = []
        for name, least_value in requirements.lora_settings.items():
            # True counts as 1. A server without the setting counts as one with 0.
            if self.lora_settings.get(name, 0) < least_value:
                option = f"--{name.replace('_', '-')}"
                missing_options.append(option if least_value is True else f"{option} {least_value}")
        if not self.lora_settings.get(_RUNTIME_LORA_VARIABLE):
            missing_options.append(f"{_RUNTIME_LORA_VARIABLE}=1 in its environment")
        if self.lora_settings.get("target_modules"):  # vLLM would skip the adapter's other layers
            missing_options.append("no --lora-target-modules")
        if missing_options:
            raise UnusableServerError(
                f"it has no room for the policy's adapter; start it with {' and '.join(missing_options)}"
            )
        if self.is_in_four_bit != requirements.is_in_four_bit:
            raise UnusableServerError(
                f"it serves {self.model_name}; start it with {requirements.base_model}, which the "
                "policy is trained on"
            )

    def check_not_restarted(self) -> None:
        """Raise `UnusableServerError` where the server was started again since the last sync.

        It then has the weights of its checkpoint instead of the policy's.
        """
        if not self.synced_instance_id:  # it gets its weights by NCCL, not from files
            return
        self.read_info()
        if self.instance_id != self.synced_instance_id:
            raise UnusableServerError(
                "it was started again, and has not the policy's weights until the next sync"
            )

    def sample(
        self,
        group_request: GroupRequest,
        place_features: PlaceFeatures,
        features_by_image_ids: FeaturesByImageIds,
    ) -> list[SamplingResult]:
        """Sample the rollouts of a request.

        Args:
            group_request: the prompt, and how its rollouts are sampled.
            place_features: adds the positions of the prompt's image tokens to its image features.
            features_by_image_ids: the image features that the server has computed for this batch
                of requests, to which new ones are added. Several requests may have the same images,
                and the server computes their features once.
        """
        placed_features = None
        try:
            if group_request.images:
                features = self._image_features(group_request.images, features_by_image_ids)
                placed_features = [place_features(features, group_request.prompt_ids)]
            reply = self.client.generate(
                [group_request.prompt_ids],
                placed_features,
                group_request.rollout_count,
                generation_kwargs=group_request.settings,
            )
        except requests.ReadTimeout as error:
            raise UnusableServerError(
                f"it gave no answer in {self._answer_timeout_s:g} s, half of ddp_timeout"
            ) from error
        except Exception as error:
            # A server that was started again refuses too, since it has lost the adapter. The check
            # then raises the reason in place of the refusal.
            if str(error).startswith(REFUSAL_PREFIX):
                self.check_not_restarted()
            raise
        return self._checked_rollouts(reply, group_request)

    def _image_features(
        self, images: list[Any], features_by_image_ids: FeaturesByImageIds
    ) -> dict[str, Any] | None:
        """Return the features of a prompt's images, from the server or from an earlier request.

        Requests run on several threads. The first one with these images puts its future into
        `features_by_image_ids` and asks the server; the others wait for that future.
        """
        image_ids = tuple(map(id, images))
        new_future = Future[Any]()
        # `setdefault` returns the future that another thread has put there, or else the new one.
        future = features_by_image_ids.setdefault(image_ids, new_future)
        if future is new_future:
            set_outcome(new_future, partial(self.client.image_features, [images]))
        features_of_prompts = future.result()  # a list with one entry
        features: dict[str, Any] | None = features_of_prompts[0]
        return features

    def _checked_rollouts(
        self, reply: Mapping[str, Any], group_request: GroupRequest
    ) -> list[SamplingResult]:
        """Check the rollouts in a server's reply to a request, and return them.

        Raises `UnusableServerError` where the policy cannot have sampled them for this request:
        their number is wrong, a rollout is empty or not scored, a token is impossible, or the
        server has read another prompt.
        """
        tokens_by_rollout = reply["completion_ids"]
        # By rollout and position, the log-probabilities of one or more candidates for the token.
        candidate_logps = reply["logprobs"]
        token_counts = [len(tokens) for tokens in tokens_by_rollout]
        logp_counts = [len(logps) for logps in candidate_logps or ()]
        rollout_count = group_request.rollout_count
        has_wrong_count = len(token_counts) != rollout_count
        has_empty_rollout = not all(token_counts)
        lacks_logps = logp_counts != token_counts
        if has_wrong_count or has_empty_rollout or lacks_logps:
            raise UnusableServerError(
                f"asked for {rollout_count} rollouts it gave {token_counts} tokens, {logp_counts} "
                "of them scored"
            )
        refuse_impossible_tokens(
            tokens_by_rollout,
            max_tokens=group_request.settings["max_tokens"],
            vocabulary_size=self._vocabulary_size,
        )
        prompts_read = reply["prompt_ids"]
        if prompts_read != [group_request.prompt_ids]:
            raise UnusableServerError("it read another prompt than the trainer's")
        logps_by_rollout = sampled_logps(
            tokens_by_rollout,
            candidate_logps=candidate_logps,
            candidate_ids=reply["logprob_token_ids"],
        )
        return [
            SamplingResult(tokens=tokens, logps=[*logps])
            for tokens, logps in zip(tokens_by_rollout, logps_by_rollout, strict=True)
        ]

    def read_weights(self, folder: Path) -> None:
        """Load the tensors in `folder`, and empty the caches that the old weights have filled."""
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._ask("POST", "collective_rpc", json=arguments)
        self.reset_caches()
        self.synced_instance_id = self.instance_id

    def read_adapter(self, folder: Path) -> None:
        """Load the LoRA adapter in `folder`, and unload the previous one.

        vLLM gets the folder's name as the adapter's name, and each sync has a new folder. So a
        server that missed a sync refuses requests, instead of sampling with an old adapter.
        """
        previous_adapter = self.client.model
        self.client.model = folder.name
        self._ask(
            "POST",
            "v1/load_lora_adapter",
            json={"lora_name": folder.name, "lora_path": str(folder)},
        )
        # A server that was started again does not have the previous adapter.
        if self.synced_instance_id == self.instance_id:
            self._ask("POST", "v1/unload_lora_adapter", json={"lora_name": previous_adapter})
        self.reset_caches()
        self.synced_instance_id = self.instance_id

    def reset_caches(self) -> None:
        """Empty the caches of prefixes and image features, which old weights have filled."""
        reply = self._ask_json("POST", "reset_prefix_cache", timeout=SHORT_QUESTION_TIMEOUTS)
        if not reply.get("success", True):
            raise UnusableServerError(
                "it did not reset its prefix cache: requests of others are running"
            )
        self._ask("POST", "reset_encoder_cache", timeout=SHORT_QUESTION_TIMEOUTS)

    def _ask(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        """Send an HTTP request, and return the response.

        `kwargs` are those of `requests.Session.request`. Raises `UnusableServerError` for every
        status but 200.
        """
        response: requests.Response = self.client.session.request(
            method, f"{self.address}/{path}", **kwargs
        )
        if response.status_code == 404:
            raise UnusableServerError(
                f"it has no /{path.partition('?')[0]}; start it with VLLM_SERVER_DEV_MODE=1"
            )
        if response.status_code != 200:
            raise UnusableServerError(
                f"it answered {response.status_code} to /{path}: {response.text[:200]}"
            )
        return response

    def _ask_json(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        """Send an HTTP request as `_ask` does, and return the JSON object in the response."""
        reply: dict[str, Any] = self._ask(method, path, **kwargs).json()
        return reply
