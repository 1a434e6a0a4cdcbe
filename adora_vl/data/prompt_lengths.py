"""Lengths of a run's prompts, and which of them leave no room for an answer.

They are known before a weight is loaded. A prompt's text is counted by the model's own tokenizer.
Its image tokens follow from the sizes of its images, which their headers say, so that nothing is
decoded: 3,000 rows take about a second.
"""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import httpx
import pyarrow as pa  # pyarrow ships no types
from datasets import Dataset
from tqdm import tqdm

from adora_vl.data.images import DEFAULT_FAMILY, VISIONS, image_tokens, open_picture
from adora_vl.data.remembered_lengths import RememberedLengths
from adora_vl.data.token_counters import TokenCounter
from adora_vl.models.families import family_of, sees_images
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError
from adora_vl.utils.openai_client import EndpointError, fetch
from adora_vl.utils.secrets import without_login

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin
    from trl import GRPOConfig

KEY = "adora_overlong_prompts"
_SERVER_SECONDS = 5.0
_SHOW_AFTER_S = 2.0  # a progress bar
_BATCH_ROWS = 1000  # texts in one call of a tokenizer, which works on them in parallel
# With fewer rows counting takes about ten seconds, and nothing is left in the cache folder.
REMEMBERED_ROWS = 10_000

# assumed for a prompt that is not known: Geometry3K's have 60 to 250 with the system prompt
TEXT_TOKENS = 300
Size = tuple[int, int]  # of an image: width and height in pixels
Rows = Iterable[tuple[str, Any, Sequence[Size | None]]]


@dataclass(frozen=True)
class ResizeLimits:
    """The numbers of pixels between which a processor resizes an image.

    `low` and `high`: width times height. `unit`: the side of an image token, in pixels.
    """

    low: int
    high: int
    unit: int


@dataclass(frozen=True)
class PromptLengths:
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

    def select_rows(self, numbers: Sequence[int]) -> PromptLengths:
        """Return the lengths of the rows with these numbers."""
        return PromptLengths(
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
    measured: PromptLengths
    of_dataset: str = ""

    @cached_property
    def too_long_numbers(self) -> list[int]:
        """Numbers of the prompts without room for one answer token: vLLM raises an error for them."""
        return [
            number
            for number, length in enumerate(self.measured.prompt)
            if length >= self.limit.tokens
        ]

    @cached_property
    def cut_numbers(self) -> list[int]:
        """Numbers of the prompts that fit, but leave less than `max_completion_length`.

        vLLM ends longer answers at the limit.
        """
        longest_uncut = self.limit.tokens - self.limit.completion
        return [
            number
            for number, length in enumerate(self.measured.prompt)
            if longest_uncut < length < self.limit.tokens
        ]

    def usable_numbers(self, policy: str | None) -> list[int]:
        """Return the numbers of the prompts that are used.

        `policy`: the value of `adora_overlong_prompts`, None where Python gave the rows. Raises
        `UserError` for prompts that are too long unless it is `drop`, and where none is left.
        """
        too_long = set(self.too_long_numbers)
        if too_long and policy != "drop":
            raise UserError(self.refusal(droppable=policy is not None))
        total = len(self.measured.prompt)
        usable = [number for number in range(total) if number not in too_long]
        if not usable and too_long:
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
        first = self.too_long_numbers[0]
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
            f"{limit.name} is too short for {len(self.too_long_numbers)} of "
            f"{amount(len(prompt), 'prompt')}{self.of_dataset}: row {self.measured.ids[first]} has "
            f"{prompt[first]} tokens{images}{longest_note}; "
            f"{', '.join(alternatives)}{', or ' if alternatives else ''}{last}"
        )

    def notes(self) -> list[str]:
        """Return one line on prompts that are left out, and one on those whose answers are cut."""
        limit = self.limit
        prompt = self.measured.prompt
        lines = []
        if self.too_long_numbers:
            enough = (
                f" ({limit.needed(max(prompt))} would hold all of them)" if limit.raised else ""
            )
            lines.append(
                f"{KEY}: drop leaves out {len(self.too_long_numbers)} of "
                f"{amount(len(prompt), 'row')}{self.of_dataset}, for whose prompts {limit.name} is too "
                f"short{enough}"
            )
        if self.cut_numbers:
            longest = max(prompt[number] for number in self.cut_numbers)
            then = (
                "are cut off there"
                if limit.cuts
                else "reach positions that the model was not made for"
            )
            enough = f"; {limit.needed(longest)} would leave room" if limit.raised else ""
            lines.append(
                f"{limit.name} leaves {len(self.cut_numbers)} of {amount(len(prompt), 'prompt')}{self.of_dataset} "
                f"less than max_completion_length: {limit.completion}, {limit.tokens - longest} "
                f"at the least, and longer answers {then}{enough}"
            )
        return lines


class OverlongPrompts:
    """Keeps the prompts of a run that leave room for an answer, and names the others."""

    def __init__(
        self,
        limit: ContextLimit | None,
        counter: TokenCounter,
        pixels: ResizeLimits,
        policy: str | None,
        *,
        speaks: bool,
        paper: bool = False,
        max_rows: int | None = None,
    ) -> None:
        """Create the check of a run.

        `limit`: None where nothing is to be checked. `policy`: as in `LengthCheck.usable_numbers`. `speaks`:
        whether to print notes. `paper`: for a dry run, which needs the lengths without a limit too.
        `max_rows`: check at most so many rows.
        """
        self.left_out: list[str] = []  # ids of rows
        self.checks: list[LengthCheck] = []
        self.lengths: PromptLengths | None = None  # of the rows that are trained on
        self.limit = limit
        self.pixels = pixels
        self._counter = counter
        self._policy = policy
        self._speaks = speaks
        self._is_dry_run = paper
        self._max_rows = max_rows

    def rows_to_train_on(
        self, rows: Dataset, texts: Sequence[str], sources: Sequence[str] = ()
    ) -> Sequence[int]:
        """Return the numbers of the rows to train on.

        `texts`: of the problems of `rows`. `sources`: hashes of the files that the rows are from;
        with them the lengths of many rows are remembered for the next start. Raises `UserError`.
        """
        total = len(rows)
        if not self._is_needed:
            return range(total)
        if sources and total >= REMEMBERED_ROWS and self._count(total) == total:
            memory = RememberedLengths(
                [*sources, self._counter.identity(), repr(self.pixels)], texts=texts
            )
            remembered = memory.read()
            if remembered is None:
                lengths = self._measure(_rows_of(rows, texts), total)
                memory.write(lengths.prompt, lengths.image)
            else:
                lengths = PromptLengths(rows.data.table["id"].to_pylist(), *remembered)
            return self._keep_usable(lengths, total)
        return self.prompts_to_train_on(_rows_of(rows, texts), total)

    def prompts_to_train_on(self, rows: Rows, total: int) -> Sequence[int]:
        """Return the numbers of the rows to train on. `rows`: as for `measure_prompts`. Raises `UserError`."""
        if not self._is_needed:
            return range(total)
        count = self._count(total)
        return self._keep_usable(self._measure(islice(rows, count), count), total)

    def prompts_to_evaluate(self, rows: Rows, total: int, of_dataset: str) -> Sequence[int]:
        """Return the numbers of the prompts of an evaluation that are used.

        `of_dataset`: as in `LengthCheck`. Raises `UserError`, also for an image that the model's
        processor refuses.
        """
        if self.limit is None:
            return range(total)
        return self._usable_numbers(self._measure(rows, total), of_dataset)

    @property
    def _is_needed(self) -> bool:
        """Whether lengths are to be known: they are checked, or a dry run shows them."""
        return self.limit is not None or self._is_dry_run

    def _count(self, total: int) -> int:
        """Return how many of the rows are measured."""
        return min(total, self._max_rows or total)

    def _measure(self, rows: Rows, total: int) -> PromptLengths:
        """Return the lengths of rows, with a progress bar where one is wanted."""
        return measure_prompts(
            rows, counter=self._counter, limits=self.pixels, total=total, show=self._speaks
        )

    def _keep_usable(self, lengths: PromptLengths, total: int) -> Sequence[int]:
        """Return the numbers of the rows to train on, and keep their lengths and what is left out.

        `lengths`: of the first rows, all of them unless a dry run measures fewer.
        """
        count = len(lengths.ids)
        usable = self._usable_numbers(lengths)
        self.left_out = [lengths.ids[number] for number in sorted({*range(count)} - {*usable})]
        self.lengths = lengths.select_rows(usable)
        return [*usable, *range(count, total)]

    def _usable_numbers(self, lengths: PromptLengths, of_dataset: str = "") -> Sequence[int]:
        """Return the numbers of the rows to use; print notes on the rest."""
        if self.limit is None:
            return range(len(lengths.ids))
        check = LengthCheck(self.limit, lengths, of_dataset)
        self.checks.append(check)
        usable = check.usable_numbers(self._policy)
        if self._speaks:
            for line in check.notes():
                print(line, flush=True)
        return usable


def _rows_of(rows: Dataset, texts: Sequence[str]) -> Rows:
    """Return id, text and sizes of images of each row of a data set."""
    table = rows.data.table
    return zip(table["id"].to_pylist(), texts, sizes_in(table), strict=True)


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


def resize_limits_of(
    processor: ProcessorMixin,
    model: PretrainedConfig,
    min_pixels: int | None,
    max_pixels: int | None,
) -> ResizeLimits:
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
    return ResizeLimits(low, high, unit)


def assume_lengths(limits: ResizeLimits, *, sees: bool) -> tuple[PromptLengths, str]:
    """Return assumed lengths for data that are not at hand, and the words that say what is assumed.

    The lengths are those of one row of the worst kind, with an image of `max_pixels` if the model
    `sees` images.
    """
    tokens = limits.high // limits.unit**2 if sees else 0
    picture = f"one image of {tokens} tokens and " if sees else ""
    words = f"assumed: {picture}{TEXT_TOKENS} tokens{' of text' if sees else ''} in every prompt"
    return PromptLengths(["?"], [tokens + TEXT_TOKENS], [tokens]), words


def measure_prompts(
    rows: Rows, counter: TokenCounter, limits: ResizeLimits, total: int, *, show: bool = True
) -> PromptLengths:
    """Return the lengths of rows.

    `rows`: id, text and sizes of the images of each; an image of unknown size (None) counts
    nothing. `total`: the number of rows. `show`: a progress bar, on a terminal and where it takes
    longer. Raises `UserError` for
    an image that the model's processor refuses.
    """
    lengths = PromptLengths([], [], [])
    pixels = (limits.unit, limits.low, limits.high)
    # None: tqdm disables the bar unless it writes to a terminal
    disable = None if show else True
    bar = tqdm(rows, "prompt lengths", total, unit="row", delay=_SHOW_AFTER_S, disable=disable)
    row_iterator = iter(bar)
    while batch := list(islice(row_iterator, _BATCH_ROWS)):
        texts = [text for _, text, _ in batch]
        image_counts = [len(sizes) for _, _, sizes in batch]
        token_counts = counter.count(texts, image_counts)
        for number, (row_id, _, sizes) in enumerate(batch):
            known_sizes = [size for size in sizes if size is not None]
            row_image_tokens = sum(image_tokens(size, *pixels, row_id) for size in known_sizes)
            # The counter takes each image for one token.
            text_tokens = token_counts[number] - image_counts[number]
            lengths.ids.append(row_id)
            lengths.prompt.append(text_tokens + row_image_tokens)
            lengths.image.append(row_image_tokens)
    return lengths


def sizes_in(table: pa.Table) -> Iterator[list[Size | None]]:
    """Yield for each row of a table of the schema the sizes of its images, without copying bytes."""
    for chunk in table["images"].chunks:
        values = iter(chunk.flatten())
        for count in chunk.value_lengths().to_pylist():
            yield [_size(stored) for stored in islice(values, count or 0)]


def _size(stored: pa.StructScalar) -> Size | None:
    """Return the size of a stored image, None where it cannot be read."""
    try:
        content = stored["bytes"]
        source = io.BytesIO(content.as_buffer()) if content.is_valid else stored["path"].as_py()
        with open_picture(source) as opened:
            return opened.size
    # Pillow raises what its formats raise, and a null in place of an image has no fields
    except Exception:
        return None
