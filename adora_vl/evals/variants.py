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

from adora_vl.evals.options import DataOptions
from adora_vl.evals.prepared import load as load_prepared
from adora_vl.evals.records import Graded, LoadedProblems
from adora_vl.evals.scoring.score import accuracy_cell
from adora_vl.evals.scoring.statistics import bootstrap
from adora_vl.utils.errors import UserError

MARK = "~"  # between the id of an original and the number of its variant
FOLDER = "-variants"  # behind the name of the folder of the originals


def original_of(pid: str) -> tuple[str, int] | None:
    """The id of the original and the number of a variant; None for what is no variant."""
    original, mark, number = pid.rpartition(MARK)
    return (original, int(number)) if mark and number.isdigit() else None


def with_variants(
    loaded: LoadedProblems, options: DataOptions, prompt: str | None, count: int
) -> LoadedProblems:
    """Return the problems with the first `count` variants of each behind them.

    Raises `UserError` where the folder of the variants does not exist or has none of these
    problems.
    """
    folder = options.data.rstrip("/") + FOLDER
    remedy = (
        f"make it with `python -m data_prep variants {options.data} --per {count} "
        f"--for-evaluation --output {folder}`"
    )
    if not Path(folder).is_dir():
        raise UserError(f"--variants: there is no folder {folder!r}; {remedy}")
    varied = load_prepared(replace(options, data=folder), prompt)
    originals = {problem.pid for problem in loaded.problems}
    chosen = []
    for problem in varied.problems:
        variant = original_of(problem.pid)
        if variant is not None and variant[0] in originals and variant[1] <= count:
            chosen.append(problem)
    if not chosen:
        raise UserError(f"--variants: {folder!r} has no variant of these problems; {remedy}")
    both = f"{loaded.data_hash} {varied.data_hash} {count}"
    return loaded._replace(
        problems=[*loaded.problems, *chosen],
        data_hash=hashlib.sha256(both.encode()).hexdigest(),
    )


def variant_lines(graded: Sequence[Graded]) -> list[str]:
    """Return the lines on originals against variants; none where no problem has variants.

    The difference is paired by problem, with its bootstrap interval.
    """
    originals: dict[str, list[Graded]] = defaultdict(list)
    variants: dict[str, list[Graded]] = defaultdict(list)
    for item in graded:
        variant = original_of(item.pid)
        if variant is None:
            originals[item.pid].append(item)
        else:
            variants[variant[0]].append(item)
    common = [pid for pid in originals if pid in variants]
    if not common:
        return []
    first = [_share(originals[pid]) for pid in common]
    mean_shares = [_share(variants[pid]) for pid in common]
    worst = [float(all(item.correct for item in variants[pid])) for pid in common]
    differences = [share - mean_share for share, mean_share in zip(first, mean_shares, strict=True)]
    low, high = bootstrap(differences)
    variant_count = sum(len(variants[pid]) for pid in common)
    return [
        f"originals with variants: {_percent(first)} right, {len(common)} problems",
        f"variants: {_percent(mean_shares)} right on average, {variant_count} variants; all of a problem's in "
        f"{_percent(worst)}",
        f"originals - variants: {100 * sum(differences) / len(common):+.1f} points (95 %: "
        f"{100 * low:+.1f} to {100 * high:+.1f}, paired by problem): the part that may be memory",
    ]


def _share(items: Sequence[Graded]) -> float:
    """The share of right answers."""
    return float(accuracy_cell(items)["accuracy"])


def _percent(values: Sequence[float]) -> str:
    return f"{100 * sum(values) / len(values):.1f} %"
