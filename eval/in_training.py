"""The same evaluation on an engine that somebody else runs: a trainer passes a function that generates, and logs
figures.

There are two functions, `answer_all` and `figures`. Between them several processes can put together the rows that each
of them answered. Nothing is written, and no model is loaded.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adora_vl.endpoint import Answer
from adora_vl.prompts import SYSTEM_PROMPT
from eval.command import Benchmark
from eval.engines import AnswerRequest
from eval.options import score_defaults
from eval.predictions import Prediction
from eval.runner import Ask, Problem, answer
from eval.scoring import Score

Generate = Callable[[Sequence[AnswerRequest]], Sequence[Answer]]


@dataclass
class _Borrowed:
    """An engine that calls the `generate` function of the caller."""

    batch_size: int
    call: Generate

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Answer]:
        return list(self.call(requests))


def answer_all(
    problems: Sequence[Problem],
    generate: Generate,
    *,
    system_prompt: str | None = SYSTEM_PROMPT,
    samples: int = 1,
    seed: int = 0,
    batch_size: int = 256,
) -> list[Prediction]:
    """Returns a predictions row for each problem and sample. `generate` gives one answer per request, in order.

    A request has the messages with one placeholder per image, the decoded images, and the seed for sampling its answer.
    """
    asks = [Ask(problem, sample) for problem in problems for sample in range(samples)]
    engine = _Borrowed(batch_size, generate)
    rows: list[Prediction] = []
    for start in range(0, len(asks), batch_size):
        rows += answer(engine, asks[start : start + batch_size], seed=seed, system_prompt=system_prompt)
    return rows


def figures(
    benchmark: Benchmark, rows: Sequence[Prediction], options: Namespace | None = None, *, answer_tags: bool = False
) -> dict[str, float]:
    """The score of rows as flat numbers for a log: `mathvista_accuracy`, its interval, length, share cut off, ID, OOD.

    `options` are those of the benchmark's `score` verb; its defaults where not given. `answer_tags`: the prompts asked
    for `<answer> </answer>`. At least one row.
    """
    options = options or score_defaults(benchmark.add_score_options)
    options.answer_tags = answer_tags
    score = benchmark.score(rows, options)
    return {f"{benchmark.name}_{name}": value for name, value in _flat(score).items()}


def _flat(score: Score) -> dict[str, float]:
    """The figures of a score as one level of names and numbers, without those that it does not have."""
    low, high = score["wilson_95"]
    flat = {"accuracy": score["accuracy"], "accuracy_low": low, "accuracy_high": high}
    for kind, known in score["tokens"].items():
        if known:
            flat[f"tokens_{kind}"] = known["mean"]
    if score["truncated"]:
        flat["truncated"] = score["truncated"]["share"]
    if score["reflective_words"]:
        flat["reflective"] = score["reflective_words"]["share"]
    for name in ("ID", "OOD"):
        if score.get("id_ood", {}).get(name):
            flat[f"accuracy_{name}"] = score["id_ood"][name]["accuracy"]
    for name, figure in score.get("samples", {}).items():
        if "@" in name:
            flat[name] = figure["value"]
    return flat
