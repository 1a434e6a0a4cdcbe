"""Variants of problems: whether a model solves a problem, or remembers its numbers.

`data_prep variants` makes them in a folder of their own. Their ids are that of their original with
a number, `geometry3k/test/15~3`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from adora_vl.evals.checklist import CHECKLIST_VIEW
from adora_vl.evals.options import DataOptions
from adora_vl.evals.prepared import load as load_prepared
from adora_vl.evals.records import GradedAnswer, LoadedProblems, Prediction, Problem
from adora_vl.evals.score_differences import paired_difference
from adora_vl.evals.scoring.score import accuracy_cell
from adora_vl.utils.errors import UserError

VARIANT_SEPARATOR = "~"  # between the id of an original and the number of its variant
FOLDER_SUFFIX = "-variants"  # behind the name of the folder of the originals


class VariantId(NamedTuple):
    """The id of a variant in its parts."""

    original: str
    """The id of the problem that it is a variant of."""
    number: int
    """Which of the variants of that problem it is, from 1 on."""


def parse_variant_id(pid: str) -> VariantId | None:
    """Split the id of a variant, such as `geometry3k/test/15~3`; None for any other id."""
    original, separator, number = pid.rpartition(VARIANT_SEPARATOR)
    if not separator or not number.isdigit():
        return None
    return VariantId(original, number=int(number))


def original_of(row: Prediction) -> str:
    """Return the id of the problem that a row is a version of.

    - A variant belongs to its original: `geometry3k/test/15~3` gives `geometry3k/test/15`.
    - A question on the marks in a picture (`CHECKLIST_VIEW`) belongs to the problem of the picture:
      `geometry3k/test/15#2` gives `geometry3k/test/15`.
    - Any other row is its own problem.
    """
    pid = str(row["pid"])
    metadata = row.get("metadata") or {}
    if metadata.get("family") == CHECKLIST_VIEW:
        pid = pid.rpartition("#")[0] or pid
    variant_id = parse_variant_id(pid)
    return pid if variant_id is None else variant_id.original


def add_variants(
    loaded: LoadedProblems, options: DataOptions, prompt: str | None, n_per_problem: int
) -> LoadedProblems:
    """Add the first variants of each problem behind all problems.

    Args:
        loaded: The problems.
        options: Where they were loaded from. The folder of the variants has the same name with
            `-variants` behind it.
        prompt: The template of the prompts, as for the problems.
        n_per_problem: The number of variants of each problem.

    Raises `UserError` where there is no such folder, or it has no variants of these problems.
    """
    folder = options.data.rstrip("/") + FOLDER_SUFFIX
    remedy = (
        f"make it with `python -m data_prep variants {options.data} --per {n_per_problem} "
        f"--for-evaluation --output {folder}`"
    )
    if not Path(folder).is_dir():
        raise UserError(f"--variants: there is no folder {folder!r}; {remedy}")
    loaded_variants = load_prepared(replace(options, data=folder), prompt)
    original_pids = {problem.pid for problem in loaded.problems}
    variants: list[Problem] = []
    for problem in loaded_variants.problems:
        variant_id = parse_variant_id(problem.pid)
        if variant_id is None or variant_id.original not in original_pids:
            continue
        if variant_id.number <= n_per_problem:
            variants.append(problem)
    if not variants:
        raise UserError(f"--variants: {folder!r} has no variant of these problems; {remedy}")
    # Answers depend on both data sets, and on how many of the variants were asked.
    hashed_text = f"{loaded.data_hash} {loaded_variants.data_hash} {n_per_problem}"
    return loaded._replace(
        problems=[*loaded.problems, *variants],
        data_hash=hashlib.sha256(hashed_text.encode()).hexdigest(),
    )


def variant_lines(graded: Sequence[GradedAnswer]) -> list[str]:
    """Compare the answers to problems with those to their variants, in lines for the table.

    A model that remembers a problem may fail at its variants. The difference is paired by problem,
    and its interval is over the problems. There are no lines where no problem has
    variants.
    """
    graded_originals: dict[str, list[GradedAnswer]] = defaultdict(list)
    # The key is the id of the original here too.
    graded_variants: dict[str, list[GradedAnswer]] = defaultdict(list)
    for item in graded:
        variant_id = parse_variant_id(item.pid)
        if variant_id is None:
            graded_originals[item.pid].append(item)
        else:
            graded_variants[variant_id.original].append(item)
    pids = [pid for pid in graded_originals if pid in graded_variants]
    if not pids:
        return []
    original_shares = [_share_right(graded_originals[pid]) for pid in pids]
    variant_shares = [_share_right(graded_variants[pid]) for pid in pids]
    # 1 for a problem whose variants are all right, else 0.
    all_right = [float(all(item.correct for item in graded_variants[pid])) for pid in pids]
    difference = paired_difference(before=variant_shares, after=original_shares, problems=pids)
    n_variants = sum(len(graded_variants[pid]) for pid in pids)
    return [
        f"originals with variants: {_mean_percent(original_shares)} right, {len(pids)} problems",
        f"variants: {_mean_percent(variant_shares)} right on average, {n_variants} variants; "
        f"all of a problem's in {_mean_percent(all_right)}",
        f"originals - variants: {difference.points} (paired by problem): the part that may be memory",
    ]


def _share_right(items: Sequence[GradedAnswer]) -> float:
    """Return the share of right answers."""
    return float(accuracy_cell(items)["accuracy"])


def _mean_percent(shares: Sequence[float]) -> str:
    """Format the mean of shares in percent."""
    return f"{100 * sum(shares) / len(shares):.1f} %"
