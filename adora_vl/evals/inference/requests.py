"""What passes between a run of an evaluation and its engine: options, settings and requests."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from PIL import Image

from adora_vl.data.images import MAX_PIXELS, SMALLEST_TOKEN_SIDE
from adora_vl.data.prompts import SYSTEM_PROMPT, Message
from adora_vl.evals.options import PROMPT_OF_TRAINING, option
from adora_vl.utils.cli import (
    MAX_SEED,
    integer_between,
    none_or,
    number_between,
    path_or_id,
    text_option,
)
from adora_vl.utils.openai_client import Endpoint, Reply

if TYPE_CHECKING:
    from adora_vl.config.blocks import ToolOptions
    from adora_vl.rollout.stopping import StopParameters
    from adora_vl.tools.run import Toolbox

HUB_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*")
EngineName = Literal["vllm", "transformers", "openai"]
ENGINE_NAMES: tuple[EngineName, ...] = ("vllm", "transformers", "openai")


def default_engine() -> EngineName:
    """Return the default engine: vLLM if it is installed, else Transformers."""
    return "vllm" if importlib.util.find_spec("vllm") else "transformers"


class AnswerRequest(NamedTuple):
    """One answer that an engine is asked for."""

    messages: list[Message]
    """The conversation, with one placeholder per image in the order of the images."""
    images: list[Image.Image]
    """The decoded images."""
    seed: int = 0
    """The seed for sampling this answer."""


class Unanswerable(NamedTuple):
    """A request that no attempt can answer, because its prompt does not fit the context."""

    reason: str


class AnswerEngine(Protocol):
    """Answers requests, `batch_size` at a time."""

    batch_size: int

    def generate(self, requests: Sequence[AnswerRequest]) -> Sequence[Reply | Unanswerable | None]:
        """Return one answer per request, in their order.

        None stands for an answer that failed and can be asked for again.
        """
        ...


_pixel_limit = none_or(integer_between(SMALLEST_TOKEN_SIDE**2, MAX_PIXELS))


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How a model is asked, in an evaluation and to filter problems."""

    revision: str | None = option(
        None,
        help="of the model on the hub; default: its newest",
        type=none_or(text_option),
        metavar="NAME",
    )
    max_tokens: int = option(
        2048, help="limit per answer; default 2048", type=integer_between(1, 2**20), metavar="N"
    )
    dtype: str = option(
        "auto", help="auto: the model's own", choices=("auto", "float32", "bfloat16")
    )
    min_pixels: int | None = option(
        None, help="default: the model's own", type=_pixel_limit, metavar="N"
    )
    max_pixels: int | None = option(
        None, help="default: the model's own", type=_pixel_limit, metavar="N"
    )
    system_prompt: str | None = option(
        SYSTEM_PROMPT,
        help="or none; default: that of the model's own training, as its folder says, else the "
        "paper's",
        parser_default=PROMPT_OF_TRAINING,
        type=none_or(text_option),
        metavar="TEXT",
    )
    seed: int = option(0, help="default 0", type=integer_between(0, MAX_SEED), metavar="S")
    batch_size: int | None = option(
        None,
        help="default: 256 for vllm, else 64",
        type=none_or(integer_between(1, 2**16)),
        metavar="N",
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(SamplingOptions):
    """Which model is asked, by which engine."""

    model: str = option(
        help="needed: a model folder, a hub id, or tiny; with openai its name there",
        type=none_or(path_or_id),
    )
    engine: EngineName = option(
        default_engine(), help="default: vllm where it is installed", choices=ENGINE_NAMES
    )
    base_url: str | None = option(
        None,
        help="of the server for openai; --model is its name there",
        type=none_or(text_option),
        metavar="URL",
    )
    concurrency: int = option(
        16,
        help="calls at once, with openai; default 16",
        type=integer_between(1, 1024),
        metavar="N",
    )
    timeout: float = option(
        600.0, help="of a call; default 600", type=number_between(0.001, 86400), metavar="SECONDS"
    )
    temperature: float = option(
        0.0, help="0: greedy, the default", type=number_between(0.01, 100, also=0.0)
    )
    tools: Sequence[str] = option(
        (),
        help="what the model may call between its turns, as in training: zoom, line, ... or "
        "FILE.py:FUNCTION",
        nargs="*",
        type=text_option,
        metavar="TOOL",
    )
    max_tool_calling_iterations: int = option(
        3, help="turns answered; default 3", type=integer_between(1), metavar="N"
    )
    tool_options: ToolOptions | None = option(
        None,
        help="as adora_tool_options, such as '{images: 4}'; --max-tokens bounds a conversation "
        "with what tools say",
        type=none_or(text_option),
        metavar="MAPPING",
    )


@dataclass(frozen=True, kw_only=True)
class AnswerEngineSettings(SamplingOptions):
    """The settings that an engine is built from: how it samples, and what its options stand for.

    The system prompt has the descriptions of the tools.
    """

    model: str
    """The absolute path of a folder, a hub id, or a name on a server."""
    engine: EngineName
    temperature: float = 0.0  # greedy
    max_images: int = 1
    """The most images of a request; vLLM's context length follows from it and the next field."""
    max_text_bytes: int = 4096
    """The bytes of the longest text of a request."""
    endpoint: Endpoint | None = None
    """The server, for the engine `openai`."""
    toolbox: Toolbox | None = None
    """The tools that the model may call between its turns."""
    max_tool_calling_iterations: int = 3
    """The number of turns whose calls are answered."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of the chat template in the model's training."""
    stop: StopParameters | None = None
    """The strings and tokens that ended an answer in the model's training."""

    @property
    def fingerprint_fields(self) -> dict[str, Any]:
        """The fields of a fingerprint that are not options: tools, and what a training had set.

        A file of the user's own tools is described by its hash.
        """
        fields: dict[str, Any] = {}
        if self.toolbox:
            tools = self.toolbox.tool_set
            fields["tools"] = [*tools.functions]
            fields["max_tool_calling_iterations"] = self.max_tool_calling_iterations
            fields["tool_options"] = vars(self.toolbox.options)
            if tools.hashes:
                fields["tool_files"] = dict(tools.hashes)
        if self.chat_template_kwargs:
            fields["chat_template_kwargs"] = dict(self.chat_template_kwargs)
        if self.stop is not None:
            fields |= self.stop.sampling  # `stop` and `stop_token_ids`, where they are set
        return fields
