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
from statistics import fmean
from typing import NamedTuple

from adora_vl.evals.checklist import CHECKLIST_VIEW
from adora_vl.evals.options import DataOptions
from adora_vl.evals.prepared import load as load_prepared
from adora_vl.evals.records import GradedAnswer, LoadedProblems, Prediction, Problem
from adora_vl.evals.score_differences import paired_difference
from adora_vl.utils.errors import UserError

VARIANT_SEPARATOR = "~"  # between the id of an original and the number of its variant
FOLDER_SUFFIX = "-variants"  # after the name of the folder of the originals


class VariantId(NamedTuple):
    """The id of a variant in its parts."""

    original: str
    """The id of the problem that it is a variant of."""
    number: int
    """Which of the variants of that problem it is, from 1 on."""


def parse_variant_id(pid: str) -> VariantId | None:
    """Split the id of a variant, such as `geometry3k/test/15~3`, at its `~`.

    Returns None for the id of a problem that is no variant.
    """
    original, separator, number = pid.rpartition(VARIANT_SEPARATOR)
    if not separator or not number.isdigit():
        return None
    return VariantId(original, number=int(number))


def get_original_id(row: Prediction) -> str:
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
    """Add variants of the problems, which are the same problems with other numbers, after them.

    Args:
        loaded: The problems.
        options: Where they were loaded from. The folder of the variants has the same name with
            `-variants` after it.
        prompt: The template of the prompts, as for the problems.
        n_per_problem: How many variants of each problem are added, from the first on.

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


def variant_lines(graded_answers: Sequence[GradedAnswer]) -> list[str]:
    """Compare the answers to problems with those to their variants, in lines for the table.

    A variant is the same problem with other numbers, at which a model that remembers the problem
    may fail. The difference of accuracy is paired by problem. There are no lines where no problem
    has variants.
    """
    # Whether the answers are right, by the id of the original problem.
    original_correctness: dict[str, list[bool]] = defaultdict(list)
    variant_correctness: dict[str, list[bool]] = defaultdict(list)
    for graded in graded_answers:
        variant_id = parse_variant_id(graded.pid)
        if variant_id is None:
            original_correctness[graded.pid].append(graded.correct)
        else:
            variant_correctness[variant_id.original].append(graded.correct)
    problem_ids = [pid for pid in original_correctness if pid in variant_correctness]
    if not problem_ids:
        return []
    original_accuracies = [fmean(original_correctness[pid]) for pid in problem_ids]
    variant_accuracies = [fmean(variant_correctness[pid]) for pid in problem_ids]
    # 1 for a problem whose variants are all right, else 0.
    all_variants_right = [float(all(variant_correctness[pid])) for pid in problem_ids]
    difference = paired_difference(
        before=variant_accuracies, after=original_accuracies, problem_ids=problem_ids
    )
    n_variants = sum(len(variant_correctness[pid]) for pid in problem_ids)
    return [
        f"originals with variants: {_mean_percent(original_accuracies)} right, {len(problem_ids)} problems",
        f"variants: {_mean_percent(variant_accuracies)} right on average, {n_variants} variants; "
        f"all of a problem's in {_mean_percent(all_variants_right)}",
        f"originals - variants: {difference.text_in_points} (paired by problem): the part that may be memory",
    ]


def _mean_percent(shares: Sequence[float]) -> str:
    """Format the mean of shares in percent."""
    return f"{100 * sum(shares) / len(shares):.1f} %"
