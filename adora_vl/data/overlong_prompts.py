"""Prompts of a run that leave no room for an answer: found, refused or left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from datasets import Dataset

from adora_vl.data.context_limit import ContextLimit
from adora_vl.data.prompt_lengths import (
    PromptLengths,
    ResizeLimits,
    Rows,
    measure_prompts,
    sizes_in,
)
from adora_vl.data.remembered_lengths import RememberedLengths
from adora_vl.data.token_counters import TokenCounter
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError

OVERLONG_PROMPTS_KEY = "adora_overlong_prompts"
# With fewer rows counting takes about ten seconds, and nothing is left in the cache folder.
REMEMBERED_ROWS = 10_000


@dataclass(frozen=True)
class LengthCheck:
    """Compares the prompts of a data set with the context limit.

    For example, with a limit of 1000 tokens and answers of up to 200, a prompt of 1000 tokens or
    more is too long, and one of 801 to 999 may have its answer cut.
    """

    limit: ContextLimit
    measured: PromptLengths
    dataset_note: str = ""  # in messages after "prompts", such as ` of the evaluation mmstar`

    @cached_property
    def too_long_numbers(self) -> list[int]:
        """Numbers of the prompts without room for one token of an answer.

        vLLM raises an error for them.
        """
        limit = self.limit.tokens
        return [
            number for number, length in enumerate(self.measured.prompt_tokens) if length >= limit
        ]

    @cached_property
    def cut_numbers(self) -> list[int]:
        """Numbers of the prompts that fit, but leave less room than `max_completion_length`.

        vLLM ends an answer at the limit.
        """
        longest_uncut = self.limit.tokens - self.limit.completion_tokens
        return [
            number
            for number, length in enumerate(self.measured.prompt_tokens)
            if longest_uncut < length < self.limit.tokens
        ]

    def usable_numbers(self, policy: str | None) -> list[int]:
        """Return the numbers of the prompts that are used.

        `policy`: the value of `adora_overlong_prompts`; None where rows come from Python, which
        cannot be left out. Raises `UserError` for prompts that are too long unless it is `drop`, and
        where none is left.
        """
        too_long = set(self.too_long_numbers)
        if too_long and policy != "drop":
            raise UserError(self.refusal(droppable=policy is not None))
        total = len(self.measured.prompt_tokens)
        usable = [number for number in range(total) if number not in too_long]
        if not usable and too_long:
            raise UserError(
                f"{OVERLONG_PROMPTS_KEY}: drop leaves nothing to use: "
                f"{self.refusal(droppable=False)}"
            )
        return usable

    @property
    def all_fit_line(self) -> str:
        """The line to print where all prompts have room for their answers."""
        total = f"{amount(len(self.measured.prompt_tokens), 'prompt')}{self.dataset_note}"
        return (
            f"{self.limit.name} leaves all of {total} room for max_completion_length: "
            f"{self.limit.completion_tokens}"
        )

    def refusal(self, *, droppable: bool = True) -> str:
        """Return which prompts are too long, and every remedy that would help, in one line.

        `droppable`: whether leaving them out is a remedy.
        """
        prompt_tokens = self.measured.prompt_tokens
        first = self.too_long_numbers[0]
        longest = max(prompt_tokens)
        first_image_tokens = self.measured.image_tokens[first]
        images = f", {first_image_tokens} of them for its images" if first_image_tokens else ""
        longest_note = f", the longest {longest}" if prompt_tokens[first] < longest else ""
        *alternatives, last = self._remedies(droppable)
        return (
            f"{self.limit.name} is too short for {len(self.too_long_numbers)} of "
            f"{amount(len(prompt_tokens), 'prompt')}{self.dataset_note}: row "
            f"{self.measured.ids[first]} has {prompt_tokens[first]} tokens{images}{longest_note}; "
            f"{', '.join(alternatives)}{', or ' if alternatives else ''}{last}"
        )

    def _remedies(self, droppable: bool) -> list[str]:
        """Return what a user can do about prompts that are too long: at least one remedy.

        `droppable`: whether leaving them out is one.
        """
        limit = self.limit
        needed = limit.tokens_for(max(self.measured.prompt_tokens))
        fits_model = limit.model_limit is None or needed <= limit.model_limit
        remedies = []
        if limit.raise_hint and fits_model:
            remedies.append(
                f"{limit.raise_hint} {needed}, which holds every prompt with its answer"
            )
        elif limit.raise_hint:
            remedies.append(
                f"{needed} would hold every prompt with its answer, but the model takes "
                f"{limit.model_limit}"
            )
        if limit.tokens_for(self.measured.longest_text) < limit.tokens:
            remedies.append("lower max_pixels")
        if not (limit.raise_hint and fits_model):
            remedies.append("shorten the rows")
        if droppable:
            remedies.append(f"leave such rows out with {OVERLONG_PROMPTS_KEY}: drop")
        return remedies

    def notes(self) -> list[str]:
        """Return one line on prompts that are left out, and one on those whose answers are cut."""
        limit = self.limit
        prompt_tokens = self.measured.prompt_tokens
        lines = []
        if self.too_long_numbers:
            hint = ""
            if limit.raise_hint:
                hint = f" ({limit.tokens_for(max(prompt_tokens))} would hold all of them)"
            lines.append(
                f"{OVERLONG_PROMPTS_KEY}: drop leaves out {len(self.too_long_numbers)} of "
                f"{amount(len(prompt_tokens), 'row')}{self.dataset_note}, for whose prompts "
                f"{limit.name} is too short{hint}"
            )
        if self.cut_numbers:
            longest = max(prompt_tokens[number] for number in self.cut_numbers)
            consequence = "reach positions that the model was not made for"
            if limit.cuts_answers:
                consequence = "are cut off there"
            hint = ""
            if limit.raise_hint:
                hint = f"; {limit.tokens_for(longest)} would leave room"
            total = f"{amount(len(prompt_tokens), 'prompt')}{self.dataset_note}"
            lines.append(
                f"{limit.name} leaves {len(self.cut_numbers)} of {total} less than "
                f"max_completion_length: {limit.completion_tokens}, {limit.tokens - longest} at the "
                f"least, and longer answers {consequence}{hint}"
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
        prints_notes: bool,
        is_dry_run: bool = False,
        max_rows: int | None = None,
    ) -> None:
        """Create the check of a run.

        Args:
            limit: the context limit; None where nothing is checked.
            counter: counts the tokens of prompts.
            pixels: the limits between which images are resized.
            policy: the value of `adora_overlong_prompts`; None where rows come from Python.
            prints_notes: whether to print notes, which one process does.
            is_dry_run: whether lengths are needed without a limit too, to show them.
            max_rows: check at most so many rows; None for all.
        """
        self.left_out: list[str] = []  # ids of rows
        self.checks: list[LengthCheck] = []
        self.lengths: PromptLengths | None = None  # of the rows that are trained on
        self.limit = limit
        self.pixels = pixels
        self._counter = counter
        self._policy = policy
        self._prints_notes = prints_notes
        self._is_dry_run = is_dry_run
        self._max_rows = max_rows

    def rows_to_train_on(
        self, rows: Dataset, texts: Sequence[str], sources: Sequence[str] = ()
    ) -> Sequence[int]:
        """Return the numbers of the rows to train on. Raises `UserError`.

        Args:
            rows: the data set.
            texts: the problems of its rows.
            sources: hashes of the files that the rows are from. With them the lengths of many rows
                are remembered for the next start.
        """
        total = len(rows)
        if not self._is_needed:
            return range(total)
        measures_all = self._measured_count(total) == total
        if not sources or total < REMEMBERED_ROWS or not measures_all:
            return self.prompts_to_train_on(_rows_to_measure(rows, texts), total)
        identities = [*sources, self._counter.identity(), repr(self.pixels)]
        memory = RememberedLengths(identities, texts=texts)
        remembered = memory.read()
        if remembered is None:
            lengths = self._measure(_rows_to_measure(rows, texts), total)
            memory.write(lengths.prompt_tokens, lengths.image_tokens)
        else:
            prompt_tokens, image_tokens = remembered
            lengths = PromptLengths(
                ids=rows.data.table["id"].to_pylist(),
                prompt_tokens=prompt_tokens,
                image_tokens=image_tokens,
            )
        return self._keep_usable(lengths, total)

    def prompts_to_train_on(self, rows: Rows, total: int) -> Sequence[int]:
        """Return the numbers of the rows to train on. Raises `UserError`.

        `rows`: id, text and sizes of the images of each. `total`: the number of rows.
        """
        if not self._is_needed:
            return range(total)
        count = self._measured_count(total)
        return self._keep_usable(self._measure(islice(rows, count), count), total)

    def prompts_to_evaluate(self, rows: Rows, total: int, dataset_note: str) -> Sequence[int]:
        """Return the numbers of the prompts of an evaluation that are used.

        Raises `UserError`, also for an image that the model's processor refuses.

        Args:
            rows: id, text and sizes of the images of each.
            total: the number of rows.
            dataset_note: names the evaluation in messages, after "prompts".
        """
        if self.limit is None:
            return range(total)
        return self._usable_numbers(self._measure(rows, total), dataset_note)

    @property
    def _is_needed(self) -> bool:
        """Whether lengths are to be known: they are checked, or a dry run shows them."""
        return self.limit is not None or self._is_dry_run

    def _measured_count(self, total: int) -> int:
        """Return how many of `total` rows are measured."""
        return min(total, self._max_rows or total)

    def _measure(self, rows: Rows, total: int) -> PromptLengths:
        """Return the lengths of rows, with a progress bar where this process prints notes."""
        return measure_prompts(
            rows, counter=self._counter, limits=self.pixels, total=total, show=self._prints_notes
        )

    def _keep_usable(self, lengths: PromptLengths, total: int) -> Sequence[int]:
        """Return the numbers of the rows to train on, and keep their lengths and what is left out.

        Args:
            lengths: of the first rows, which are all unless a dry run measures fewer.
            total: the number of all rows. Those that were not measured are trained on.
        """
        measured_count = len(lengths.ids)
        usable = self._usable_numbers(lengths)
        left_out_numbers = sorted({*range(measured_count)} - {*usable})
        self.left_out = [lengths.ids[number] for number in left_out_numbers]
        self.lengths = lengths.select_rows(usable)
        return [*usable, *range(measured_count, total)]

    def _usable_numbers(self, lengths: PromptLengths, dataset_note: str = "") -> Sequence[int]:
        """Return the numbers of the rows to use; print notes on the others.

        `dataset_note`: names the data set in messages; empty for the one that is trained on.
        """
        if self.limit is None:
            return range(len(lengths.ids))
        check = LengthCheck(self.limit, lengths, dataset_note)
        self.checks.append(check)
        usable = check.usable_numbers(self._policy)
        if self._prints_notes:
            for line in check.notes():
                print(line, flush=True)
        return usable


def _rows_to_measure(rows: Dataset, texts: Sequence[str]) -> Rows:
    """Return id, text and sizes of images of each row of a data set."""
    table = rows.data.table
    return zip(table["id"].to_pylist(), texts, sizes_in(table), strict=True)
