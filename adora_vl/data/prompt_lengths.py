"""Lengths of a run's prompts, and which of them leave no room for an answer.

They are known before a weight is loaded. A prompt's text is counted by the model's own tokenizer.
Its image tokens follow from the sizes of its images, which their headers say, so that nothing is
decoded: 3,000 rows take about a second.
"""

from __future__ import annotations

import io
import json
import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import httpx
import pyarrow as pa  # pyarrow ships no types
from datasets import Dataset
from tqdm import tqdm

from adora_vl.data.images import DEFAULT_FAMILY, VISIONS, image_tokens, open_picture
from adora_vl.data.prompts import conversation, conversation_with_images
from adora_vl.models.families import family_of, sees_images
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError, in_one_line
from adora_vl.utils.openai_client import EndpointError, fetch
from adora_vl.utils.secrets import without_login

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin
    from trl import GRPOConfig

KEY = "adora_overlong_prompts"
_SERVER_SECONDS = 5.0
_SHOW_AFTER_S = 2.0  # a progress bar

# assumed for a prompt that is not known: Geometry3K's have 60 to 250 with the system prompt
TEXT_TOKENS = 300
# assumed where the tokenizer is not at hand; English mathematics has 3 to 4
CHARACTERS_A_TOKEN = 2.5
_TEMPLATE_TOKENS = 30  # roles and markers of Qwen's chat template around two messages

# Counts tokens: (problem, or a prompt that Python gave, number of images) -> tokens, where each
# image counts as one token.
TextTokens = Callable[[Any, int], int]
Size = tuple[int, int]  # of an image: width and height in pixels
Rows = Iterable[tuple[str, Any, Sequence[Size | None]]]


@dataclass(frozen=True)
class Limits:
    """Pixels of an image, and the side of an image token."""

    low: int
    high: int
    unit: int


@dataclass(frozen=True)
class Measured:
    """Lengths of prompts, one entry per row: its id, all tokens of its prompt, those of images."""

    ids: list[str]
    prompt: list[int]
    image: list[int]

    @property
    def longest(self) -> tuple[int, int]:
        """The longest prompt and the most image tokens, which need not be one row's."""
        return max(self.prompt), max(self.image)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest prompt without its images."""
        return max(prompt - image for prompt, image in zip(self.prompt, self.image, strict=True))

    def only(self, numbers: Sequence[int]) -> Measured:
        """Return the lengths of the rows with these numbers."""
        return Measured(
            ids=[self.ids[number] for number in numbers],
            prompt=[self.prompt[number] for number in numbers],
            image=[self.image[number] for number in numbers],
        )


@dataclass(frozen=True)
class ContextLimit:
    """How many tokens a prompt and its completion may have together.

    `name`: what sets the limit. `raised`: the words before a larger number, such as `set it to`;
    empty for the model's own limit. `model_limit`: that limit, where it is known. `cuts`: whether the
    engine ends an answer at the limit.
    """

    tokens: int
    completion: int  # max_completion_length
    name: str
    raised: str
    model_limit: int | None
    cuts: bool = True

    def needed(self, longest: int) -> int:
        """Return the limit that holds a prompt of `longest` tokens with any completion."""
        return longest + self.completion


@dataclass(frozen=True)
class LengthCheck:
    """Compares the prompts of a data set with the context limit.

    `of_dataset`: what messages put behind "prompts", such as ` of the evaluation mmstar`.
    """

    limit: ContextLimit
    measured: Measured
    of_dataset: str = ""

    @cached_property
    def refused(self) -> list[int]:
        """Numbers of the prompts without room for one answer token: vLLM raises an error for them."""
        return [
            number
            for number, length in enumerate(self.measured.prompt)
            if length >= self.limit.tokens
        ]

    @cached_property
    def cut(self) -> list[int]:
        """Numbers of the prompts that fit, but leave less than `max_completion_length`.

        vLLM ends longer answers at the limit.
        """
        longest_uncut = self.limit.tokens - self.limit.completion
        return [
            number
            for number, length in enumerate(self.measured.prompt)
            if longest_uncut < length < self.limit.tokens
        ]

    def kept(self, policy: str | None) -> list[int]:
        """Return the numbers of the prompts that are used.

        `policy`: the value of `adora_overlong_prompts`, None where Python gave the rows. Raises
        `UserError` for prompts that are too long unless it is `drop`, and where none is left.
        """
        refused = set(self.refused)
        if refused and policy != "drop":
            raise UserError(self.refusal(droppable=policy is not None))
        usable = [number for number in range(len(self.measured.prompt)) if number not in refused]
        if not usable and refused:
            raise UserError(f"{KEY}: drop leaves nothing to use: {self.refusal(droppable=False)}")
        return usable

    @property
    def enough(self) -> str:
        """The line to print where all prompts have room."""
        total = f"{amount(len(self.measured.prompt), 'prompt')}{self.of_dataset}"
        return (
            f"{self.limit.name} leaves all of {total} room for max_completion_length: "
            f"{self.limit.completion}"
        )

    def refusal(self, *, droppable: bool = True) -> str:
        """Return which prompts are too long, and every remedy that would help, in one line."""
        limit = self.limit
        prompt = self.measured.prompt
        image = self.measured.image
        first = self.refused[0]
        longest = max(prompt)
        needed = limit.needed(longest)
        fits_model = limit.model_limit is None or needed <= limit.model_limit
        raised = f"{limit.raised} {needed}, which holds every prompt with its answer"
        beyond_model = (
            f"{needed} would hold every prompt with its answer, but the model takes "
            f"{limit.model_limit}"
        )
        remedies = []
        if limit.raised:
            remedies.append(raised if fits_model else beyond_model)
        if limit.needed(self.measured.longest_text) < limit.tokens:
            remedies.append("lower max_pixels")
        if not (limit.raised and fits_model):
            remedies.append("shorten the rows")
        if droppable:
            remedies.append(f"leave such rows out with {KEY}: drop")
        images = f", {image[first]} of them for its images" if image[first] else ""
        longest_note = f", the longest {longest}" if prompt[first] < longest else ""
        *alternatives, last = remedies
        return (
            f"{limit.name} is too short for {len(self.refused)} of "
            f"{amount(len(prompt), 'prompt')}{self.of_dataset}: row {self.measured.ids[first]} has "
            f"{prompt[first]} tokens{images}{longest_note}; "
            f"{', '.join(alternatives)}{', or ' if alternatives else ''}{last}"
        )

    def notes(self) -> list[str]:
        """Return one line on prompts that are left out, and one on those whose answers are cut."""
        limit = self.limit
        prompt = self.measured.prompt
        lines = []
        if self.refused:
            enough = (
                f" ({limit.needed(max(prompt))} would hold all of them)" if limit.raised else ""
            )
            lines.append(
                f"{KEY}: drop leaves out {len(self.refused)} of "
                f"{amount(len(prompt), 'row')}{self.of_dataset}, for whose prompts {limit.name} is too "
                f"short{enough}"
            )
        if self.cut:
            longest = max(prompt[number] for number in self.cut)
            then = (
                "are cut off there"
                if limit.cuts
                else "reach positions that the model was not made for"
            )
            enough = f"; {limit.needed(longest)} would leave room" if limit.raised else ""
            lines.append(
                f"{limit.name} leaves {len(self.cut)} of {amount(len(prompt), 'prompt')}{self.of_dataset} "
                f"less than max_completion_length: {limit.completion}, {limit.tokens - longest} "
                f"at the least, and longer answers {then}{enough}"
            )
        return lines


class OverlongPrompts:
    """Keeps the prompts of a run that leave room for an answer, and names the others."""

    def __init__(
        self,
        limit: ContextLimit | None,
        text_tokens: TextTokens,
        pixels: Limits,
        policy: str | None,
        *,
        speaks: bool,
        paper: bool = False,
        max_rows: int | None = None,
    ) -> None:
        """Create the check of a run.

        `limit`: None where nothing is to be checked. `policy`: as in `LengthCheck.kept`. `speaks`:
        whether to print notes. `paper`: for a dry run, which needs the lengths without a limit too.
        `max_rows`: check at most so many rows.
        """
        self.left_out: list[str] = []  # ids of rows
        self.checks: list[LengthCheck] = []
        self.lengths: Measured | None = None  # of the rows that are trained on
        self.limit = limit
        self.pixels = pixels
        self._text_tokens = text_tokens
        self._policy = policy
        self._speaks = speaks
        self._paper = paper
        self._max_rows = max_rows

    def fitting(self, rows: Dataset, texts: Sequence[str]) -> Sequence[int]:
        """Return the numbers of the rows to train on.

        `texts`: of the problems of `rows`. Raises `UserError`.
        """
        table = rows.data.table
        ids = table["id"].to_pylist()
        return self.kept_of(zip(ids, texts, sizes_in(table), strict=True), len(ids))

    def kept_of(self, rows: Rows, total: int) -> Sequence[int]:
        """Return the numbers of the rows to train on. `rows`: as for `measured`. Raises `UserError`."""
        if self.limit is None and not self._paper:
            return range(total)
        count = min(total, self._max_rows or total)
        lengths, usable = self._kept(islice(rows, count), count)
        self.left_out = [lengths.ids[number] for number in sorted({*range(count)} - {*usable})]
        self.lengths = lengths.only(usable)
        return [*usable, *range(count, total)]

    def fits(self, rows: Rows, total: int, of_dataset: str) -> Sequence[int]:
        """Return the numbers of the prompts of an evaluation that are used.

        `of_dataset`: as in `LengthCheck`. Raises `UserError`, also for an image that the model's
        processor refuses.
        """
        if self.limit is None:
            return range(total)
        _, usable = self._kept(rows, total, of_dataset)
        return usable

    def _kept(self, rows: Rows, total: int, of_dataset: str = "") -> tuple[Measured, Sequence[int]]:
        """Return the lengths of all rows and the numbers of those to use; print notes on the rest."""
        lengths = measured(
            rows, text_tokens=self._text_tokens, limits=self.pixels, total=total, show=self._speaks
        )
        if self.limit is None:
            return lengths, range(total)
        check = LengthCheck(self.limit, lengths, of_dataset)
        self.checks.append(check)
        usable = check.kept(self._policy)
        if self._speaks:
            for line in check.notes():
                print(line, flush=True)
        return lengths, usable


def context_limit(
    config: GRPOConfig, model_config: PretrainedConfig, served: int | None = None
) -> ContextLimit | None:
    """Return the context limit of a run, None where neither a key nor the model says one.

    With a colocated engine `vllm_max_model_length` counts. A server has a limit of its own, which
    `served` is where it reports one; the same key may stand for it. Without them, and without vLLM,
    it is the number of positions that the model was trained for. `model_config` is its Transformers
    config.
    """
    model_limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    tokens = model_limit
    name = "the model's max_position_embeddings"
    raised = ""
    if config.use_vllm and served is not None:
        tokens = served
        name = "the vLLM server's --max-model-len"
        raised = "start the server with"
    elif config.use_vllm and config.vllm_max_model_length is not None:
        tokens = config.vllm_max_model_length
        name = "vllm_max_model_length"
        raised = "set it to"
    if tokens is None:
        return None
    completion = config.max_completion_length
    named = f"{name}: {tokens}"
    return ContextLimit(
        tokens=tokens,
        completion=completion,
        name=named,
        raised=raised,
        model_limit=model_limit,
        cuts=config.use_vllm,
    )


def uncountable(model_config: PretrainedConfig) -> str:
    """Return why the image tokens of this model cannot be counted; empty where they can."""
    if family_of(model_config) is not None or not sees_images(model_config):
        return ""
    return (
        f"model_type {model_config.model_type} is not among the known families, so its image "
        "tokens are not known"
    )


def served_length(config: GRPOConfig) -> int | None:
    """Return the `--max-model-len` of the run's vLLM servers, the smallest of several.

    None where no server answers (yet).
    """
    addresses = (
        config.vllm_server_base_url or f"http://{config.vllm_server_host}:{config.vllm_server_port}"
    )
    lengths = []
    for address in addresses.split(","):
        try:
            plain, login = without_login(address.strip())
            credentials = b64encode(":".join(login).encode()).decode() if login else ""
            headers = {"Authorization": f"Basic {credentials}"} if login else None
            _, _, received = fetch(f"{plain}/v1/models", _SERVER_SECONDS, headers=headers)
            lengths.append(int(json.loads(received)["data"][0]["max_model_len"]))
        except (
            OSError,
            httpx.HTTPError,
            httpx.InvalidURL,
            EndpointError,
            ValueError,
            LookupError,
            TypeError,
        ):
            continue
    return min(lengths, default=None)


def limits_of(
    processor: ProcessorMixin,
    model: PretrainedConfig,
    min_pixels: int | None,
    max_pixels: int | None,
) -> Limits:
    """Return the pixel limits that images will be resized to.

    They are the config's, else the processor's own, else those published for the family of `model`,
    a Transformers config.
    """
    family = family_of(model)
    published = (family.vision if family is not None else None) or VISIONS[DEFAULT_FAMILY]
    size = dict(getattr(getattr(processor, "image_processor", None), "size", {}))
    low = size.get("shortest_edge", published.min_pixels) if min_pixels is None else min_pixels
    high = size.get("longest_edge", published.max_pixels) if max_pixels is None else max_pixels
    unit = published.unit
    vision_config = getattr(model, "vision_config", None)
    if family is not None and vision_config is not None:
        unit = vision_config.patch_size * vision_config.spatial_merge_size
    return Limits(low, high, unit)


TemplateOptions = dict[str, Any] | None  # TRL's `chat_template_kwargs`


def _chat_tokens(processor: ProcessorMixin, messages: Any, options: TemplateOptions) -> int:
    text = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **(options or {})
    )
    return len(
        getattr(processor, "tokenizer", processor)(text, add_special_tokens=False)["input_ids"]
    )


def tokenizer_counter(
    processor: ProcessorMixin, system_prompt: str | None, options: TemplateOptions = None
) -> TextTokens:
    """Return a counter that uses the trainer's template and tokenizer.

    An image counts as one token; the caller adds the others.
    """
    with_parts = hasattr(processor, "tokenizer")  # a tokenizer's own template takes none

    def count(problem: str, images: int) -> int:
        messages = conversation_with_images(problem, images, system_prompt)
        return _chat_tokens(
            processor, messages if with_parts else conversation(problem, system_prompt), options
        )

    return count


def message_counter(processor: ProcessorMixin, options: TemplateOptions = None) -> TextTokens:
    """Return a counter of prompts in TRL's form, text or messages, as TRL tokenizes them."""
    from trl.data_utils import prepare_multimodal_messages  # importing it takes seconds

    tokenizer = getattr(processor, "tokenizer", processor)

    def count(prompt: Any, images: int) -> int:
        if isinstance(prompt, str):
            return len(tokenizer(prompt)["input_ids"])
        try:
            messages = (
                prompt
                if tokenizer is processor
                else prepare_multimodal_messages(prompt, [None] * images)
            )
            return _chat_tokens(processor, messages, options)
        except Exception as error:  # a template raises what it likes
            raise UserError(
                f"train_dataset: the prompt {prompt!r:.80} is refused ({in_one_line(error)})"
            ) from error

    return count


def character_counter(system_prompt: str | None) -> TextTokens:
    """Return a counter that estimates from characters, where the tokenizer cannot be reached."""

    def count(problem: str, images: int) -> int:
        characters = len(problem) + len(system_prompt or "")
        return math.ceil(characters / CHARACTERS_A_TOKEN) + _TEMPLATE_TOKENS + images

    return count


def assumed(limits: Limits, *, sees: bool) -> tuple[Measured, str]:
    """Return assumed lengths for data that are not at hand, and the words that say what is assumed.

    The lengths are those of one row of the worst kind, with an image of `max_pixels` if the model
    `sees` images.
    """
    tokens = limits.high // limits.unit**2 if sees else 0
    picture = f"one image of {tokens} tokens and " if sees else ""
    words = f"assumed: {picture}{TEXT_TOKENS} tokens{' of text' if sees else ''} in every prompt"
    return Measured(["?"], [tokens + TEXT_TOKENS], [tokens]), words


def measured(
    rows: Rows, text_tokens: TextTokens, limits: Limits, total: int, *, show: bool = True
) -> Measured:
    """Return the lengths of rows.

    `rows`: id, text and sizes of the images of each; an image of unknown size (None) counts
    nothing. `show`: a progress bar, on a terminal and where it takes longer. Raises `UserError` for
    an image that the model's processor refuses.
    """
    lengths = Measured([], [], [])
    # None: tqdm disables the bar unless it writes to a terminal
    disable = None if show else True
    for name, text, sizes in tqdm(
        rows, "prompt lengths", total, unit="row", delay=_SHOW_AFTER_S, disable=disable
    ):
        pixels = (limits.unit, limits.low, limits.high)
        tokens = sum(image_tokens(size, *pixels, name) for size in sizes if size is not None)
        lengths.ids.append(name)
        lengths.prompt.append(text_tokens(text, len(sizes)) - len(sizes) + tokens)
        lengths.image.append(tokens)
    return lengths


def sizes_in(table: pa.Table) -> Iterator[list[Size | None]]:
    """Yield for each row of a table of the schema the sizes of its images, without copying bytes."""
    for chunk in table["images"].chunks:
        values = iter(chunk.flatten())
        for count in chunk.value_lengths().to_pylist():
            yield [_size(stored) for stored in islice(values, count or 0)]


def _size(stored: Any) -> Size | None:
    try:
        content = stored["bytes"]
        with open_picture(
            io.BytesIO(content.as_buffer()) if content.is_valid else stored["path"].as_py()
        ) as opened:
            return opened.size
    # Pillow raises what its formats raise, and a null in place of an image has no fields
    except Exception:
        return None
