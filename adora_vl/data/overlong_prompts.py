"""Prompts of a run that leave no room for an answer: found, refused or left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from datasets import Dataset

from adora_vl.data.context_limit import ContextLimit
from adora_vl.data.images import PixelLimits
from adora_vl.data.prompt_lengths import (
    PromptLengths,
    Rows,
    measure_prompts,
    stored_image_sizes,
)
from adora_vl.data.token_counters import TokenCounter
from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import UserError

OVERLONG_PROMPTS_KEY = "adora_overlong_prompts"


@dataclass(frozen=True)
class LengthCheck:
    """Compares the prompts of a data set with the context limit.

    For example, with a limit of 1000 tokens and answers of up to 200, a prompt of 1000 tokens or
    more is too long, and one of 801 to 999 may have its answer cut.
    """

    limit: ContextLimit
    lengths: PromptLengths
    dataset_suffix: str = ""  # in messages after "prompts", such as ` of the evaluation mmstar`

    @cached_property
    def too_long_indices(self) -> list[int]:
        """The indices of the prompts without room for one token of an answer.

        vLLM raises an error for them.
        """
        limit = self.limit.tokens
        return [index for index, length in enumerate(self.lengths.prompt_tokens) if length >= limit]

    @cached_property
    def cut_indices(self) -> list[int]:
        """The indices of the prompts that fit, but leave less room than `max_completion_length`.

        vLLM ends an answer at the limit.
        """
        longest_uncut = self.limit.tokens - self.limit.completion_tokens
        return [
            index
            for index, length in enumerate(self.lengths.prompt_tokens)
            if longest_uncut < length < self.limit.tokens
        ]

    def usable_indices(self, error_or_drop: str | None) -> list[int]:
        """Return the indices of the prompts that are used.

        `error_or_drop` is the value of `adora_overlong_prompts`. None refuses too long prompts as
        `error` does: rows that come from Python cannot be left out.

        Raises `UserError` for prompts that are too long, unless they are to be dropped; also if
        dropping them leaves no prompt.
        """
        too_long = set(self.too_long_indices)
        if too_long and error_or_drop != "drop":
            raise UserError(self.refusal(droppable=error_or_drop is not None))
        total = len(self.lengths.prompt_tokens)
        usable = [index for index in range(total) if index not in too_long]
        if not usable and too_long:
            raise UserError(
                f"{OVERLONG_PROMPTS_KEY}: drop leaves nothing to use: "
                f"{self.refusal(droppable=False)}"
            )
        return usable

    @property
    def all_fit_line(self) -> str:
        """The line to print where all prompts have room for their answers."""
        total = f"{pluralize(len(self.lengths.prompt_tokens), 'prompt')}{self.dataset_suffix}"
        return (
            f"{self.limit.name} leaves all of {total} room for max_completion_length: "
            f"{self.limit.completion_tokens}"
        )

    def refusal(self, *, droppable: bool = True) -> str:
        """Return which prompts are too long, and every remedy that would help, in one line.

        `droppable` says whether leaving them out is a remedy.
        """
        prompt_tokens = self.lengths.prompt_tokens
        first_index = self.too_long_indices[0]
        first_length = prompt_tokens[first_index]
        first_image_tokens = self.lengths.image_tokens[first_index]
        longest = max(prompt_tokens)
        image_clause = ""
        if first_image_tokens:
            image_clause = f", {first_image_tokens} of them for its images"
        longest_clause = f", the longest {longest}" if first_length < longest else ""
        *other_remedies, last_remedy = self._remedies(droppable)
        return (
            f"{self.limit.name} is too short for {len(self.too_long_indices)} of "
            f"{pluralize(len(prompt_tokens), 'prompt')}{self.dataset_suffix}: row "
            f"{self.lengths.ids[first_index]} has {first_length} tokens{image_clause}"
            f"{longest_clause}; "
            f"{', '.join(other_remedies)}{', or ' if other_remedies else ''}{last_remedy}"
        )

    def _remedies(self, droppable: bool) -> list[str]:
        """Return what a user can do about prompts that are too long: at least one remedy.

        `droppable` says whether leaving them out is one.
        """
        limit = self.limit
        needed_limit = limit.tokens_for(max(self.lengths.prompt_tokens))
        fits_model = limit.model_limit is None or needed_limit <= limit.model_limit
        remedies = []
        if limit.raise_hint and fits_model:
            remedies.append(
                f"{limit.raise_hint} {needed_limit}, which holds every prompt with its answer"
            )
        elif limit.raise_hint:
            remedies.append(
                f"{needed_limit} would hold every prompt with its answer, but the model takes "
                f"{limit.model_limit}"
            )
        # Where the texts alone would fit, smaller images help.
        if limit.tokens_for(self.lengths.longest_text) < limit.tokens:
            remedies.append("lower max_pixels")
        if not (limit.raise_hint and fits_model):
            remedies.append("shorten the rows")
        if droppable:
            remedies.append(f"leave such rows out with {OVERLONG_PROMPTS_KEY}: drop")
        return remedies

    def warnings(self) -> list[str]:
        """Return a line on prompts that are left out, and one on prompts whose answers are cut.

        Either is missing where there are no such prompts.
        """
        limit = self.limit
        prompt_tokens = self.lengths.prompt_tokens
        lines = []
        if self.too_long_indices:
            hint = ""
            if limit.raise_hint:
                hint = f" ({limit.tokens_for(max(prompt_tokens))} would hold all of them)"
            lines.append(
                f"{OVERLONG_PROMPTS_KEY}: drop leaves out {len(self.too_long_indices)} of "
                f"{pluralize(len(prompt_tokens), 'row')}{self.dataset_suffix}, for whose prompts "
                f"{limit.name} is too short{hint}"
            )
        if self.cut_indices:
            longest = max(prompt_tokens[index] for index in self.cut_indices)
            consequence = "reach positions that the model was not made for"
            if limit.cuts_answers:
                consequence = "are cut off there"
            hint = ""
            if limit.raise_hint:
                hint = f"; {limit.tokens_for(longest)} would leave room"
            total = f"{pluralize(len(prompt_tokens), 'prompt')}{self.dataset_suffix}"
            lines.append(
                f"{limit.name} leaves {len(self.cut_indices)} of {total} less than "
                f"max_completion_length: {limit.completion_tokens}, {limit.tokens - longest} at the "
                f"least, and longer answers {consequence}{hint}"
            )
        return lines


class PromptLengthFilter:
    """Keeps the prompts that leave room for an answer, and refuses or leaves out the others."""

    def __init__(
        self,
        limit: ContextLimit | None,
        counter: TokenCounter,
        pixels: PixelLimits,
        error_or_drop: str | None,
        *,
        prints_warnings: bool,
        is_dry_run: bool = False,
        max_rows: int | None = None,
    ) -> None:
        """Create the check of a run.

        Args:
            limit: the context limit; None where nothing is checked.
            counter: counts the tokens of prompts.
            pixels: the limits between which images are resized.
            error_or_drop: the value of `adora_overlong_prompts`. None refuses too long prompts as
                `error` does: rows that come from Python cannot be left out.
            prints_warnings: whether to print warnings, which one process does.
            is_dry_run: whether lengths are needed without a limit too, to show them.
            max_rows: the largest number of rows that are checked; None for all.
        """
        self.left_out: list[str] = []  # ids of rows
        self.checks: list[LengthCheck] = []  # one for each data set that was compared with `limit`
        self.lengths: PromptLengths | None = None  # of the rows that are trained on
        self.limit = limit
        self.pixels = pixels
        self._counter = counter
        self._error_or_drop = error_or_drop
        self._prints_warnings = prints_warnings
        self._is_dry_run = is_dry_run
        self._max_rows = max_rows

    def rows_to_train_on(self, rows: Dataset, texts: Sequence[str]) -> Sequence[int]:
        """Return the indices of the rows of a data set to train on; `texts` are their problems.

        Raises `UserError` for prompts that are too long, and may not be left out.
        """
        table = rows.data.table
        prompts = zip(table["id"].to_pylist(), texts, stored_image_sizes(table), strict=True)
        return self.prompts_to_train_on(prompts, len(rows))

    def prompts_to_train_on(self, rows: Rows, total: int) -> Sequence[int]:
        """Return the indices of the rows to train on, out of `total` rows.

        `rows` are tuples of a row's id, its text, and the sizes of its images.

        Raises `UserError` for prompts that are too long, and may not be left out.
        """
        # A dry run shows lengths also where no limit is known.
        if self.limit is None and not self._is_dry_run:
            return range(total)
        count = min(total, self._max_rows or total)
        lengths = self._measure(islice(rows, count), count)
        return self._keep_usable(lengths, total)

    def prompts_to_evaluate(self, rows: Rows, total: int, dataset_suffix: str) -> Sequence[int]:
        """Return the indices of the prompts of an evaluation that are used.

        Args:
            rows: tuples of a row's id, its text, and the sizes of its images.
            total: the number of rows.
            dataset_suffix: names the evaluation in messages, after "prompts".

        Raises:
            UserError: prompts are too long, or an image is refused by the model's processor.
        """
        if self.limit is None:
            return range(total)
        lengths = self._measure(rows, total)
        return self._usable_indices(lengths, dataset_suffix)

    def _measure(self, rows: Rows, total: int) -> PromptLengths:
        """Return the lengths of rows, with a progress bar where this process prints warnings."""
        return measure_prompts(
            rows,
            counter=self._counter,
            limits=self.pixels,
            total=total,
            show_progress=self._prints_warnings,
        )

    def _keep_usable(self, lengths: PromptLengths, total: int) -> Sequence[int]:
        """Return the indices of the rows to train on; store their lengths and what is left out.

        Args:
            lengths: the lengths of the first rows, which are all unless a dry run measures fewer.
            total: the number of all rows. Those that were not measured are trained on.
        """
        measured_count = len(lengths.ids)
        usable = self._usable_indices(lengths)
        left_out_indices = sorted({*range(measured_count)} - {*usable})
        self.left_out = [lengths.ids[index] for index in left_out_indices]
        self.lengths = lengths.select_rows(usable)
        return [*usable, *range(measured_count, total)]

    def _usable_indices(self, lengths: PromptLengths, dataset_suffix: str = "") -> Sequence[int]:
        """Return the indices of the rows to use, and print warnings on the others.

        `dataset_suffix` names the data set in messages; it is empty for the one that is trained on.
        """
        if self.limit is None:
            return range(len(lengths.ids))
        check = LengthCheck(limit=self.limit, lengths=lengths, dataset_suffix=dataset_suffix)
        self.checks.append(check)
        usable = check.usable_indices(self._error_or_drop)
        if self._prints_warnings:
            for line in check.warnings():
                print(line, flush=True)
        return usable
