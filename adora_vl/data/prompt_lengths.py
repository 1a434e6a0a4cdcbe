"""How long the prompts of a run are, and which of them leave no room for an answer: known before a
weight is loaded, and without decoding an image.
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
from typing import Any

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

KEY = "adora_overlong_prompts"
_SERVER_SECONDS = 5.0
_SHOW_AFTER_S = 2.0  # a progress bar

# assumed for a prompt that is not known: Geometry3K's have 60 to 250 with the system prompt
TEXT_TOKENS = 300
# assumed where the tokenizer is not at hand; English mathematics has 3 to 4
CHARACTERS_A_TOKEN = 2.5
_TEMPLATE_TOKENS = 30  # roles and markers of Qwen's chat template around two messages

# A problem, or the prompt of a row of Python's, and its number of images -> tokens, each image one
# of them
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
    """One entry per row: its id, the tokens of its whole prompt, and those of its images."""

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
        """The rows of these numbers."""
        ids = self.ids
        prompt = self.prompt
        image = self.image
        return Measured(
            [ids[n] for n in numbers], [prompt[n] for n in numbers], [image[n] for n in numbers]
        )


@dataclass(frozen=True)
class ContextLimit:
    """How many tokens a prompt and its completion may have together.

    `name`: what sets the limit. `raised`: the words before a larger number, such as `set it to`;
    empty for the model's own limit. `most`: that limit, where it is known. `cuts`: whether the
    engine ends an answer at the limit.
    """

    tokens: int
    completion: int  # max_completion_length
    name: str
    raised: str
    most: int | None
    cuts: bool = True

    def needed(self, longest: int) -> int:
        """The limit that holds a prompt of `longest` tokens with any completion."""
        return longest + self.completion


@dataclass(frozen=True)
class LengthCheck:
    """Prompts and the limit.

    `of`: what messages put behind "prompts", such as ` of the evaluation mmstar`.
    """

    limit: ContextLimit
    measured: Measured
    of: str = ""

    @cached_property
    def refused(self) -> list[int]:
        """The prompts that leave no room for one token of an answer: vLLM raises an error for them."""
        return [
            number
            for number, length in enumerate(self.measured.prompt)
            if length >= self.limit.tokens
        ]

    @cached_property
    def cut(self) -> list[int]:
        """The prompts that fit, but leave less than `max_completion_length`: vLLM ends longer
        answers at the limit.
        """
        least = self.limit.tokens - self.limit.completion
        return [
            number
            for number, length in enumerate(self.measured.prompt)
            if least < length < self.limit.tokens
        ]

    def kept(self, policy: str | None) -> list[int]:
        """The numbers of the prompts that are used.

        `policy`: the value of `adora_overlong_prompts`, None where Python gave the rows. Raises
        `UserError` for prompts that are too long unless it is `drop`, and where none is left.
        """
        refused = set(self.refused)
        if refused and policy != "drop":
            raise UserError(self.refusal(droppable=policy is not None))
        kept = [number for number in range(len(self.measured.prompt)) if number not in refused]
        if not kept and refused:
            raise UserError(f"{KEY}: drop leaves nothing to use: {self.refusal(droppable=False)}")
        return kept

    @property
    def enough(self) -> str:
        """What to say where all have room."""
        total = f"{amount(len(self.measured.prompt), 'prompt')}{self.of}"
        return (
            f"{self.limit.name} leaves all of {total} room for max_completion_length: "
            f"{self.limit.completion}"
        )

    def refusal(self, *, droppable: bool = True) -> str:
        """Which prompts are too long, and every remedy that would help, in one line."""
        limit = self.limit
        prompt = self.measured.prompt
        image = self.measured.image
        first = self.refused[0]
        longest = max(prompt)
        needed = limit.needed(longest)
        fits_model = limit.most is None or needed <= limit.most
        raised = f"{limit.raised} {needed}, which holds every prompt with its answer"
        taken = (
            f"{needed} would hold every prompt with its answer, but the model takes {limit.most}"
        )
        ways = [raised if fits_model else taken] if limit.raised else []
        ways += (
            ["lower max_pixels"] if limit.needed(self.measured.longest_text) < limit.tokens else []
        )
        ways += ["shorten the rows"] if not (limit.raised and fits_model) else []
        ways += [f"leave such rows out with {KEY}: drop"] if droppable else []
        images = f", {image[first]} of them for its images" if image[first] else ""
        more = f", the longest {longest}" if prompt[first] < longest else ""
        *others, last = ways
        return (
            f"{limit.name} is too short for {len(self.refused)} of "
            f"{amount(len(prompt), 'prompt')}{self.of}: row {self.measured.ids[first]} has "
            f"{prompt[first]} tokens{images}{more}; "
            f"{', '.join(others)}{', or ' if others else ''}{last}"
        )

    def notes(self) -> list[str]:
        """What to say of prompts that are left out, and of those whose answers are cut: one line
        each.
        """
        limit = self.limit
        prompt = self.measured.prompt
        found = []
        if self.refused:
            enough = (
                f" ({limit.needed(max(prompt))} would hold all of them)" if limit.raised else ""
            )
            found.append(
                f"{KEY}: drop leaves out {len(self.refused)} of "
                f"{amount(len(prompt), 'row')}{self.of}, for whose prompts {limit.name} is too "
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
            found.append(
                f"{limit.name} leaves {len(self.cut)} of {amount(len(prompt), 'prompt')}{self.of} "
                f"less than max_completion_length: {limit.completion}, {limit.tokens - longest} "
                f"at the least, and longer answers {then}{enough}"
            )
        return found


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
        most: int | None = None,
    ) -> None:
        """`limit`: None where nothing is to be checked.

        `policy`: as in `LengthCheck.kept`. `speaks`: whether to say what is found. `paper`: for a
        dry run, which wants the lengths without a limit too; `most`: of so many rows.
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
        self._most = most

    def fitting(self, rows: Dataset, texts: Sequence[str]) -> Sequence[int]:
        """The numbers of the rows to train on. `texts`: of their problems. Raises `UserError`."""
        table = rows.data.table
        ids = table["id"].to_pylist()
        return self.kept_of(zip(ids, texts, sizes_in(table), strict=True), len(ids))

    def kept_of(self, rows: Rows, total: int) -> Sequence[int]:
        """The numbers of the rows to train on, given as to `measured`. Raises `UserError`."""
        if self.limit is None and not self._paper:
            return range(total)
        count = min(total, self._most or total)
        found, kept = self._kept(islice(rows, count), count)
        self.left_out = [found.ids[number] for number in sorted({*range(count)} - {*kept})]
        self.lengths = found.only(kept)
        return [*kept, *range(count, total)]

    def fits(self, rows: Rows, total: int, of: str) -> Sequence[int]:
        """The numbers of the prompts of an evaluation that are used.

        `of` as in `LengthCheck`. Raises `UserError`, also for an image that the model's processor
        refuses.
        """
        return range(total) if self.limit is None else self._kept(rows, total, of)[1]

    def _kept(self, rows: Rows, total: int, of: str = "") -> tuple[Measured, Sequence[int]]:
        """Lines about the prompts that are not used are printed."""
        found = measured(
            rows, text_tokens=self._text_tokens, limits=self.pixels, total=total, show=self._speaks
        )
        if self.limit is None:
            return found, range(total)
        check = LengthCheck(self.limit, found, of)
        self.checks.append(check)
        kept = check.kept(self._policy)
        for line in check.notes() if self._speaks else ():
            print(line, flush=True)
        return found, kept


def context_limit(config: Any, model_config: Any, served: int | None = None) -> ContextLimit | None:
    """The limit of a run: that of its server (`served`, where it says so), `vllm_max_model_length`,
    or without them, and without vLLM, the number of positions of the model. None where that is not
    known.
    """
    most = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    tokens = most
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
        most=most,
        cuts=config.use_vllm,
    )


def uncountable(model_config: Any) -> str:
    """Why the image tokens of this model cannot be counted; empty where they can."""
    if family_of(model_config) is not None or not sees_images(model_config):
        return ""
    return (
        f"model_type {model_config.model_type} is not among the known families, so its image "
        "tokens are not known"
    )


def served_length(config: Any) -> int | None:
    """The `--max-model-len` of the run's vLLM server, the least of several; None where none answers
    (yet).
    """
    addresses = (
        config.vllm_server_base_url or f"http://{config.vllm_server_host}:{config.vllm_server_port}"
    )
    found = []
    for address in addresses.split(","):
        try:
            plain, login = without_login(address.strip())
            known = b64encode(":".join(login).encode()).decode() if login else ""
            headers = {"Authorization": f"Basic {known}"} if login else None
            _, _, received = fetch(f"{plain}/v1/models", _SERVER_SECONDS, headers=headers)
            found.append(int(json.loads(received)["data"][0]["max_model_len"]))
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
    return min(found, default=None)


def limits_of(processor: Any, model: Any, min_pixels: int | None, max_pixels: int | None) -> Limits:
    """The pixel limits that images will be resized to: the config's, else the processor's own, else
    those published for the family of `model`, a Transformers config.
    """
    family = family_of(model)
    published = (family.vision if family is not None else None) or VISIONS[DEFAULT_FAMILY]
    size = dict(getattr(getattr(processor, "image_processor", None), "size", {}))
    low = size.get("shortest_edge", published.min_pixels) if min_pixels is None else min_pixels
    high = size.get("longest_edge", published.max_pixels) if max_pixels is None else max_pixels
    seen = getattr(model, "vision_config", None)
    unit = (
        seen.patch_size * seen.spatial_merge_size
        if family is not None and seen is not None
        else published.unit
    )
    return Limits(low, high, unit)


TemplateOptions = dict[str, Any] | None  # TRL's `chat_template_kwargs`


def _chat_tokens(processor: Any, messages: Any, options: TemplateOptions) -> int:
    text = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **(options or {})
    )
    return len(
        getattr(processor, "tokenizer", processor)(text, add_special_tokens=False)["input_ids"]
    )


def tokenizer_counter(
    processor: Any, system_prompt: str | None, options: TemplateOptions = None
) -> TextTokens:
    """Counts by the trainer's own template and tokenizer; an image is one token, its run is added
    by the caller.
    """
    with_parts = hasattr(processor, "tokenizer")  # a tokenizer's own template takes none

    def count(problem: str, images: int) -> int:
        messages = conversation_with_images(problem, images, system_prompt)
        return _chat_tokens(
            processor, messages if with_parts else conversation(problem, system_prompt), options
        )

    return count


def message_counter(processor: Any, options: TemplateOptions = None) -> TextTokens:
    """Counts a prompt of TRL's form, a text or messages, as TRL gives it to the processor."""
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
    """An estimate where the tokenizer cannot be reached."""

    def count(problem: str, images: int) -> int:
        characters = len(problem) + len(system_prompt or "")
        return math.ceil(characters / CHARACTERS_A_TOKEN) + _TEMPLATE_TOKENS + images

    return count


def assumed(limits: Limits, *, sees: bool) -> tuple[Measured, str]:
    """One row of the worst kind, for data that are not here, with an image of `max_pixels`; and
    what to say of it.
    """
    tokens = limits.high // limits.unit**2 if sees else 0
    picture = f"one image of {tokens} tokens and " if sees else ""
    words = f"assumed: {picture}{TEXT_TOKENS} tokens{' of text' if sees else ''} in every prompt"
    return Measured(["?"], [tokens + TEXT_TOKENS], [tokens]), words


def measured(
    rows: Rows, text_tokens: TextTokens, limits: Limits, total: int, *, show: bool = True
) -> Measured:
    """The lengths of rows, each given by its id, its text and the sizes of its images, which count
    nothing where they cannot be read. `show`: a progress bar, on a terminal and where it takes
    longer. Raises `UserError` for an image that the model's processor refuses.
    """
    # None: unless it is a terminal
    found = Measured([], [], [])
    off = None if show else True
    for name, text, sizes in tqdm(
        rows, "prompt lengths", total, unit="row", delay=_SHOW_AFTER_S, disable=off
    ):
        pixels = (limits.unit, limits.low, limits.high)
        tokens = sum(image_tokens(size, *pixels, name) for size in sizes if size is not None)
        found.ids.append(name)
        found.prompt.append(text_tokens(text, len(sizes)) - len(sizes) + tokens)
        found.image.append(tokens)
    return found


def sizes_in(table: pa.Table) -> Iterator[list[Size | None]]:
    """For each row of a table of the schema the sizes of its images, read from the bytes where they
    lie.
    """
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
    except (
        Exception
    ):  # Pillow raises what its formats raise, and a null that stands for an image has no fields
        return None
