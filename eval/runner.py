"""From problems to `predictions.jsonl`: prompts, batches, an engine, rows on the disk before the next batch."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from adora_vl.errors import UserError
from adora_vl.prompts import conversation_with_images
from eval.engines import Engine, EngineSettings, Request
from eval.fingerprint import Fields, settle
from eval.predictions import IMAGE_FAILED, Prediction, PredictionLog

PREDICTIONS, SCORE = "predictions.jsonl", "score.json"


@dataclass(frozen=True)
class Problem:
    """What a benchmark hands over. `fields` go into the predictions row as they are and have a unique `pid`.

    `images` decodes them: late, so that memory holds a batch of them, and one that is broken costs one problem only.
    """

    fields: Prediction
    prompt: str
    n_images: int
    images: Callable[[], list[Image.Image]]

    @property
    def pid(self) -> str:
        return str(self.fields["pid"])


@dataclass(frozen=True)
class Summary:
    """What one `infer` did: problems in all, there before, asked now, images that failed now, seconds of generation."""

    total: int
    resumed: int
    asked: int
    image_failed: int
    seconds: float


def infer(
    problems: Sequence[Problem],
    output: Path,
    settings: EngineSettings,
    fingerprint: Fields,
    *,
    system_prompt: str | None,
    build: Callable[[EngineSettings], Engine],
) -> Summary:
    """Answer the problems that `output` has no row for yet. The engine is built only when there are any.

    Raises `UserError` where `output` holds predictions made with something else, or rows of problems not asked for now.
    """
    _check_unique(problems)
    output.mkdir(parents=True, exist_ok=True)
    with PredictionLog(output / PREDICTIONS) as log:
        settle(output, fingerprint, has_predictions=bool(log.done))
        pending = [problem for problem in problems if problem.pid not in log.done]
        resumed = len(problems) - len(pending)
        if len(log.done) > resumed:
            raise UserError(
                f"limit: {str(output)!r} already has {len(log.done)} predictions and this run asks for "
                f"{len(problems)}; raise --limit or use another --output"
            )
        print(f"{len(problems)} problems: {resumed} there already, {len(pending)} to do", file=sys.stderr)
        if not pending:
            return Summary(len(problems), resumed, 0, 0, 0.0)
        engine = build(_bounded(settings, pending, system_prompt))
        start, failed = time.perf_counter(), 0
        # `disable=None`: no bar where stderr is not a terminal.
        with tqdm(total=len(problems), initial=resumed, unit="problem", disable=None) as bar:
            for batch in _batches(pending, engine.batch_size):
                rows = answer(engine, batch, seed=settings.seed, system_prompt=system_prompt)
                log.append(rows)
                failed += sum(row["finish_reason"] == IMAGE_FAILED for row in rows)
                bar.update(len(rows))
        return Summary(len(problems), resumed, len(pending), failed, time.perf_counter() - start)


def answer(engine: Engine, batch: Sequence[Problem], *, seed: int, system_prompt: str | None) -> list[Prediction]:
    """One row a problem, in order; a problem whose image fails to decode gets an empty response and the reason."""
    rows: list[Prediction] = []
    asked: list[Prediction] = []
    requests: list[Request] = []
    for problem in batch:
        row = dict(problem.fields)
        rows.append(row)
        try:
            images = problem.images()
        except Exception as error:  # a decoder raises whatever it likes on a broken file
            reason = f"{type(error).__name__}: {error}"
            row.update(response="", finish_reason=IMAGE_FAILED, n_tokens=0, n_prompt_tokens=0, error=reason)
            continue
        messages = conversation_with_images(problem.prompt, len(images), system_prompt)
        requests.append(Request(messages, images, _seed_of(seed, problem.pid)))
        asked.append(row)
    generations = engine.generate(requests) if requests else []
    for row, generation in zip(asked, generations, strict=True):
        row.update(
            response=generation.text,
            finish_reason=generation.finish_reason,
            n_tokens=generation.n_tokens,
            n_prompt_tokens=generation.n_prompt_tokens,
        )
    return rows


def _seed_of(seed: int, pid: str) -> int:
    """A seed of its own for each problem, so that a resumed run samples what an uninterrupted one would."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{pid}".encode()).digest()[:4])


def _bounded(settings: EngineSettings, problems: Sequence[Problem], system_prompt: str | None) -> EngineSettings:
    longest = max(len(problem.prompt.encode()) for problem in problems) + len((system_prompt or "").encode())
    return replace(settings, max_images=max(problem.n_images for problem in problems), max_text_bytes=longest)


def _batches(problems: Sequence[Problem], size: int) -> Iterator[Sequence[Problem]]:
    for start in range(0, len(problems), size):
        yield problems[start : start + size]


def _check_unique(problems: Sequence[Problem]) -> None:
    seen: set[str] = set()
    for problem in problems:
        if problem.pid in seen:
            raise UserError(f"dataset: the id {problem.pid!r} occurs twice; ids have to be unique")
        seen.add(problem.pid)
