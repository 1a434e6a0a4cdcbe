"""The context limit of a run: how many tokens a prompt and its completion may have together."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from adora_vl.models.families import family_of, sees_images
from adora_vl.utils.http_client import ReplyTooLargeError, fetch_reply
from adora_vl.utils.secrets import without_login

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from trl import GRPOConfig

_SERVER_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ContextLimit:
    """How many tokens a prompt and its completion may have together."""

    tokens: int
    completion_tokens: int  # max_completion_length
    name: str  # what sets the limit, with its value: `vllm_max_model_length: 4096`
    # how a user raises it, as words before a larger number, such as `set it to`; empty for the
    # model's own limit
    raise_hint: str
    model_limit: int | None  # the model's own, where it is known
    cuts_answers: bool = True  # whether the engine ends an answer at the limit

    def tokens_for(self, prompt_tokens: int) -> int:
        """Return the limit that has room for a prompt of this length with any completion."""
        return prompt_tokens + self.completion_tokens


def context_limit(
    config: GRPOConfig, model_config: PretrainedConfig, server_limit: int | None = None
) -> ContextLimit | None:
    """Return the context limit of a run, None where neither a key nor the model has one.

    Args:
        config: the run's config. With vLLM its key `vllm_max_model_length` is the limit.
        model_config: the model's config. The number of positions that the model was trained for is
            the limit without vLLM, and where no other is known.
        server_limit: the limit of the vLLM server, where it reports one. It comes before all
            others.
    """
    model_limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    tokens = model_limit
    name = "the model's max_position_embeddings"
    raise_hint = ""
    if config.use_vllm and server_limit is not None:
        tokens = server_limit
        name = "the vLLM server's --max-model-len"
        raise_hint = "start the server with"
    elif config.use_vllm and config.vllm_max_model_length is not None:
        tokens = config.vllm_max_model_length
        name = "vllm_max_model_length"
        raise_hint = "set it to"
    if tokens is None:
        return None
    return ContextLimit(
        tokens=tokens,
        completion_tokens=config.max_completion_length,
        name=f"{name}: {tokens}",
        raise_hint=raise_hint,
        model_limit=model_limit,
        cuts_answers=config.use_vllm,
    )


def why_uncountable(model_config: PretrainedConfig) -> str:
    """Return why the image tokens of this model cannot be counted; empty where they can."""
    if family_of(model_config) is not None or not sees_images(model_config):
        return ""
    return (
        f"model_type {model_config.model_type} is not among the known families, so its image "
        "tokens are not known"
    )


def server_context_length(config: GRPOConfig) -> int | None:
    """Return the `--max-model-len` of the run's vLLM servers, the smallest of several.

    Returns None where no server answers (yet).
    """
    addresses = (
        config.vllm_server_base_url or f"http://{config.vllm_server_host}:{config.vllm_server_port}"
    )
    lengths = []
    for address in addresses.split(","):
        try:
            lengths.append(_context_length_of_server(address.strip()))
        except (
            OSError,
            httpx.HTTPError,
            httpx.InvalidURL,
            ReplyTooLargeError,
            ValueError,
            LookupError,
            TypeError,
        ):  # no server there, or one that is not vLLM's
            continue
    return min(lengths, default=None)


def _context_length_of_server(address: str) -> int:
    """Return the `--max-model-len` of a vLLM server, which is asked over HTTP.

    `address` has a user's name and password in it, if the server needs them.

    Raises what asking and reading the answer raise.
    """
    url, login = without_login(address)
    headers = None
    if login:
        credentials = b64encode(":".join(login).encode()).decode()
        headers = {"Authorization": f"Basic {credentials}"}
    _, _, body = fetch_reply(f"{url}/v1/models", _SERVER_TIMEOUT_S, headers)
    first_model = json.loads(body)["data"][0]
    return int(first_model["max_model_len"])
