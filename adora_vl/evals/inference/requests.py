"""What an engine is asked, and what it answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from PIL import Image

from adora_vl.data.prompts import Message, with_tools
from adora_vl.utils.openai_client import Endpoint, Reply

if TYPE_CHECKING:
    from adora_vl.tools.run import Toolbox

HUB_ID = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*")
EngineName = Literal["vllm", "transformers", "openai"]
ENGINES: tuple[EngineName, ...] = ("vllm", "transformers", "openai")


class AnswerRequest(NamedTuple):
    messages: list[Message]  # with one placeholder per image, in the order of the images
    images: list[Image.Image]
    seed: int = 0  # for sampling this answer


class Unanswerable(NamedTuple):
    """A request that no attempt could answer, because its prompt does not fit the model's context."""

    reason: str


class AnswerEngine(Protocol):
    """Answers requests, `batch_size` at a time."""

    batch_size: int

    def generate(self, requests: Sequence[AnswerRequest]) -> Sequence[Reply | Unanswerable | None]:
        """One answer per request, in their order; None for one that failed and can be asked for
        again.
        """
        ...


@dataclass(frozen=True)
class AnswerEngineSettings:
    model: str
    engine: EngineName
    revision: str | None = None
    dtype: str = "auto"  # the model's own
    max_tokens: int = 2048
    temperature: float = 0.0  # greedy
    seed: int = 0
    min_pixels: int | None = None
    max_pixels: int | None = None
    batch_size: int | None = None
    max_images: int = (
        1  # of a request at most, as the bytes of text: vLLM's context length is set from them
    )
    max_text_bytes: int = 4096
    endpoint: Endpoint | None = None  # of the engine `openai`
    toolbox: Toolbox | None = None  # what the model may call between its turns
    max_tool_calling_iterations: int = 3  # turns that are answered
    template: Mapping[str, Any] = field(
        default_factory=dict
    )  # arguments of the chat template, of the model's training

    @property
    def described(self) -> dict[str, Any]:
        """What answers depend on beside the options, for a fingerprint; files by their hashes."""
        found: dict[str, Any] = {}
        if self.toolbox:
            chosen = self.toolbox.chosen
            most = self.max_tool_calling_iterations
            found = {"tools": [*chosen.functions], "max_tool_calling_iterations": most}
            found |= {"tool_options": vars(self.toolbox.options)}
            found |= {"tool_files": dict(chosen.hashes)} if chosen.hashes else {}
        return found | ({"chat_template_kwargs": dict(self.template)} if self.template else {})

    def told(self, system_prompt: str | None) -> str | None:
        return with_tools(system_prompt, self.toolbox.schemas) if self.toolbox else system_prompt
