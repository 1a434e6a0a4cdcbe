"""`python -m eval.mmstar`: MMStar, with its official scoring."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from adora_vl.utils.cli import imports

with imports():
    from adora_vl.evals.inference.dataset import load_problems
    from adora_vl.evals.inference.predictions import (
        TEXT,
        key,
        matching,
        read_predictions,
        wrong_fields,
    )
    from adora_vl.evals.options import HubDataOptions, ScoreOptions, option
    from adora_vl.evals.records import (
        Benchmark,
        Graded,
        LoadedProblems,
        OwnFigures,
        Prediction,
        Published,
        RowGrade,
    )
    from adora_vl.evals.scoring.choice import extract_choice, lettered_options
    from adora_vl.evals.scoring.score import (
        correct_by_problem,
        extraction_item,
        graded_rows,
        rule_set,
        verdict_of,
    )
    from adora_vl.evals.scoring.statistics import bootstrap
    from adora_vl.evals.scoring.table import percent_with_interval
    from adora_vl.utils.cli import optional, path
    from adora_vl.utils.errors import UserError

RULE_SETS = ("official", "letter")
COLUMNS = {
    "question": TEXT,
    "answer": matching(r"\s*[A-Za-z]\s*", "a letter"),
    "category": TEXT,
    "l2_category": TEXT,
}
_OPTION = re.compile(r"(?:^|[\s,])([A-Z]): ")
check = partial(wrong_fields, kinds=COLUMNS)


@dataclass(frozen=True, kw_only=True)
class MMStarDataOptions(HubDataOptions):
    """Which problems are asked, with their images or without."""

    # The action is not argparse's BooleanOptionalAction, which takes every option that starts with
    # `--no-` for a no.
    no_image: bool = option(
        False, help="ask without the image, for the leakage metrics", action="store_true"
    )


@dataclass(frozen=True, kw_only=True)
class MMStarScoreOptions(ScoreOptions):
    """Which letter counts, and the runs that gain and leakage are measured against."""

    rules: Literal["official", "letter"] = option(
        "letter", help="official is made for answers that start with the letter", choices=RULE_SETS
    )
    without_image: Path | None = option(
        None,
        help="predictions made with --no-image",
        type=optional(path),
        metavar="FILE.jsonl",
    )
    text_only: Path | None = option(
        None,
        help="predictions of the language backbone",
        type=optional(path),
        metavar="FILE.jsonl",
    )


def is_officially_right(response: str, answer: str) -> bool:
    """Return whether a response is right by the official rule.

    The letter has to stand at one of four places. The rule (MMStar-Benchmark/MMStar,
    eval/mmstar_eval/evaluate) is made for answers that start with the letter. It reads the first
    letter of a chain of thought: `Based on` is B.
    """
    letter = answer.lower().strip().replace("\n", " ")
    text = response.lower().strip().replace("\n", " ")
    beginnings = [f"{before}{letter}" for before in ("", "(", "option ", "the answer is ")]
    return text.startswith(tuple(beginnings))


def options_of(question: str) -> list[str]:
    """Return the texts of the options in `... Options: A: a park, B: a dam`.

    They are four empty ones where the question has none.
    """
    return lettered_options(question.rpartition("Options:")[2], _OPTION) or [""] * 4


def grade(row: Prediction, options: MMStarScoreOptions) -> RowGrade:
    """Return the verdict on a row by `options.rules`, and the groups that it counts in."""
    groups = {"category": [row["category"]], "l2_category": [row["l2_category"]]}
    if options.rules == "official":
        hit = is_officially_right(row["response"], row["answer"])
        return RowGrade(
            verdict=verdict_of(hit),
            extracted=row["response"][:20],
            reason="official",
            groups=groups,
        )
    extracted, rule = extract_choice(row["response"], options_of(row["question"]))
    return RowGrade(
        verdict=verdict_of(extracted == row["answer"].strip().upper()),
        extracted=extracted,
        reason=rule,
        groups=groups,
    )


def _summary(
    rows: Sequence[Prediction], graded: Sequence[Graded], options: MMStarScoreOptions
) -> OwnFigures:
    """Return the multi-modal gain and the leakage, if there are runs to compare with."""
    leakage = _leakage(rows, graded, options)
    lines = []
    if leakage is not None:
        figure = percent_with_interval(leakage["MG"], leakage["MG_bootstrap_95"])
        lines.append(
            f"multi-modal gain MG: {figure}, S_v {leakage['S_v']:.3f}, S_wv {leakage['S_wv']:.3f}"
        )
        if "ML" in leakage:
            figure = percent_with_interval(leakage["ML"], leakage["ML_bootstrap_95"])
            lines.append(f"leakage ML: {figure}, S_t {leakage['S_t']:.3f}")
    return OwnFigures(notes={"leakage": leakage}, lines=lines)


def _leakage(
    rows: Sequence[Prediction], graded: Sequence[Graded], options: MMStarScoreOptions
) -> dict[str, Any] | None:
    """Return the multi-modal gain MG = S_v - S_wv and the leakage ML = max(0, S_wv - S_t).

    They are differences of shares of right answers to the same items (Chen et al. 2024, MMStar,
    section 3.3): S_v is that of this run, S_wv without the image, S_t of the language backbone.
    None where there is no run without the image.
    """
    if options.text_only and not options.without_image:
        raise UserError("text_only: the leakage needs --without-image too (ML = S_wv - S_t)")
    blind = _shares_of_run(options.without_image, rows=rows, options=options, name="without_image")
    text = _shares_of_run(options.text_only, rows=rows, options=options, name="text_only")
    if blind is None:
        return None
    with_image = _shares(graded)
    gains = [a - b for a, b in zip(with_image, blind, strict=True)]
    leakage: dict[str, Any] = {"S_v": _mean(with_image), "S_wv": _mean(blind)}
    leakage |= {"MG": _mean(gains), "MG_bootstrap_95": bootstrap(gains)}
    if text is not None:
        leaks = [a - b for a, b in zip(blind, text, strict=True)]
        low, high = bootstrap(leaks)
        leakage |= {"S_t": _mean(text), "ML": max(0.0, _mean(leaks))}
        leakage["ML_bootstrap_95"] = (max(0.0, low), max(0.0, high))
    return leakage


def _shares_of_run(
    path: Path | None, rows: Sequence[Prediction], options: MMStarScoreOptions, name: str
) -> list[float] | None:
    """Return another run's shares of right answers to these problems, in their order."""
    if path is None:
        return None
    row_of_key = {key(row): row for row in read_predictions(path, check, BENCHMARK.id_column)}
    absent = [row["pid"] for row in rows if key(row) not in row_of_key]
    if absent or len(row_of_key) != len(rows):
        fault = f"it has {len(row_of_key)} rows and this run {len(rows)}"
        if absent:
            fault = f"pid {absent[0]!r} is missing"
        raise UserError(
            f"{name}: {path} does not have the items of this run ({fault}); run it on the same data"
        )
    _, graded = graded_rows(BENCHMARK, [row_of_key[key(row)] for row in rows], options)
    return _shares(graded)


def _shares(graded: Sequence[Graded]) -> list[float]:
    """Return the share of right answers to each problem."""
    return [sum(right) / len(right) for right in correct_by_problem(graded).values()]


def _mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return sum(values) / len(values)


def load(options: MMStarDataOptions) -> LoadedProblems:
    """Return the problems of a split, and a hash of the data.

    The question is asked as it is, since its options are in it.
    """
    return load_problems(
        options,
        needed=("index", *COLUMNS),
        image_columns=("image",),
        prompt=itemgetter("question"),
        check=check,
        id_column="index",
        stored_columns=("index", *COLUMNS, "meta_info"),
        blind=options.no_image,
    )


_PUBLISHED = Published(
    source="ADORA, arXiv 2602.10019, pass@1; MathVista by VLMEvalKit's rules",
    rows={
        "Qwen2.5-VL-7B-Instruct": {"all": 63.9},
        "MM-EUREKA-8B": {"all": 64.3},
        "MMR1-math-v0": {"all": 64.9},
        "GRPO": {"all": 61.9},
        "ADORA": {"all": 63.8},
    },
)
BENCHMARK = Benchmark(
    name="mmstar",
    split="val",
    load=load,
    grade=grade,
    rules=rule_set,
    score_options=MMStarScoreOptions,
    data_options=MMStarDataOptions,
    check=check,
    fingerprint=("data_revision", "no_image"),
    id_column="index",
    summary=_summary,
    item=extraction_item,
    published=_PUBLISHED,
)
if __name__ == "__main__":
    with imports():
        from eval.command import main
    raise SystemExit(main(BENCHMARK))
