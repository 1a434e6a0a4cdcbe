"""Turns problems into `predictions.jsonl`. The rows of a batch are on the disk before the next batch is asked."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from tqdm import tqdm

from adora_vl.commands import amount
from adora_vl.errors import UserError
from adora_vl.files import make_folder, written_to
from adora_vl.prompts import conversation_with_images
from eval.engines import AnswerEngine, AnswerEngineSettings, AnswerRequest
from eval.fingerprint import FILE_NAME, Fields, note, settle
from eval.predictions import (
    IMAGE_FAILED,
    PREDICTIONS,
    Prediction,
    PredictionLog,
    absorb_parts,
    key,
    part_path,
    read_rows,
    sort_rows,
)
from eval.ranks import Alone, Ranks

ALONE = Alone()


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


class Ask(NamedTuple):
    """One answer to get: the problem, and which of its samples."""

    problem: Problem
    sample: int

    @property
    def key(self) -> tuple[str, int]:
        """The key of the row that the answer becomes."""
        return self.problem.pid, self.sample


@dataclass(frozen=True)
class Summary:
    """What one `infer` did: answers in all, there before, asked now, images that failed now, seconds of generation, and
    answers that an engine could not get.
    """

    total: int
    resumed: int
    asked: int
    image_failed: int
    seconds: float
    missing: int = 0


def infer(
    problems: Sequence[Problem],
    output: Path,
    settings: AnswerEngineSettings,
    fingerprint: Fields,
    *,
    system_prompt: str | None,
    build: Callable[[AnswerEngineSettings], AnswerEngine],
    samples: int = 1,
    in_data: int | None = None,
    ranks: Ranks = ALONE,
) -> Summary:
    """Ask for every answer that `output` does not have yet. The engine is built only if answers are missing.

    `in_data`: number of problems in the data; `problems` may be only the first ones of them.

    With several `ranks` each answers a slice and writes a part of its own. Rank 0 merges the parts in the order of the
    problems.

    Raises `UserError` if `output` holds predictions made with other settings, or rows of problems not asked for now.
    """
    _check_unique(problems)
    make_folder("output", output)
    asks = [Ask(problem, sample) for problem in problems for sample in range(samples)]
    work = _Work(asks, output, _bounded(settings, problems, system_prompt), system_prompt, build, ranks)
    if ranks.rank:
        ranks.meet("start")
        done = {key(row) for row in read_rows(output / PREDICTIONS)}
        work.answer_slice(done)
        ranks.meet("end")
        return Summary(len(asks), len(done), 0, 0, 0.0)
    with PredictionLog(output / PREDICTIONS) as log:
        absorbed = absorb_parts(output, log)
        asked = {"answers": len(asks), "in_data": samples * (in_data or len(problems))}
        with written_to("output", output):
            settle(output, fingerprint, has_predictions=bool(log.done), asked=asked)
        pending = sum(ask.key not in log.done for ask in asks)
        resumed = len(asks) - pending
        if len(log.done) > resumed:
            raise UserError(
                f"limit: {str(output)!r} already has {len(log.done)} predictions and this run asks for "
                f"{len(asks)}; raise --limit or use another --output"
            )
        what = amount(len(problems), "problem") + (f" x {samples} answers" if samples > 1 else "")
        print(f"{what}: {resumed} there already, {pending} to do", file=sys.stderr)
        before = set(log.done)
        ranks.meet("start")
        if ranks.world == 1:
            seconds = work.answer_to(log, asks)
        else:
            seconds = work.answer_slice(before)
            ranks.meet("end")
            absorbed |= absorb_parts(output, log)
        if absorbed or (resumed and settings.endpoint):  # what an endpoint did not give the first time comes last
            sort_rows(output / PREDICTIONS, [ask.key for ask in asks])
    rows = read_rows(output / PREDICTIONS)
    failed = sum(row["finish_reason"] == IMAGE_FAILED for row in rows if key(row) not in before)
    return Summary(len(asks), resumed, pending, failed, seconds, missing=len(asks) - len(rows))


def remove_empty(output: Path) -> None:
    """Take away the folder of a run that came to no answer: an engine that could not be built has left it."""
    predictions = output / PREDICTIONS
    if predictions.is_file() and not predictions.stat().st_size:
        with suppress(OSError):  # a folder with anything else in it stays
            if {path.name for path in output.iterdir()} <= {PREDICTIONS, FILE_NAME}:
                for path in list(output.iterdir()):
                    path.unlink()
                output.rmdir()


@dataclass(frozen=True)
class _Work:
    """What has to be answered, and with what."""

    asks: Sequence[Ask]
    output: Path
    settings: AnswerEngineSettings
    system_prompt: str | None
    build: Callable[[AnswerEngineSettings], AnswerEngine]
    ranks: Ranks

    def answer_slice(self, done: set[tuple[str, int]]) -> float:
        """Answer this rank's part of what is not done, into a file of its own. Returns the seconds it took."""
        mine = self.asks[self.ranks.rank :: self.ranks.world]
        with PredictionLog(part_path(self.output, self.ranks.rank)) as log:
            log.done |= done
            return self.answer_to(log, mine)

    def answer_to(self, log: PredictionLog, asks: Sequence[Ask]) -> float:
        """Answer what the log does not have yet; the engine is built only when there is any.

        Returns the seconds of answering, without those of building the engine.
        """
        resumed = sum(ask.key in log.done for ask in asks)
        if resumed == len(asks):
            return 0.0
        engine = self.build(self.settings)
        resolved = getattr(engine, "resolved", None)  # of the engines here; one that is lent says nothing
        if resolved and self.ranks.rank == 0:
            with written_to("output", self.output):
                note(self.output, "resolved", resolved)
        start = time.perf_counter()
        # `disable=None`: no bar where stderr is not a terminal.
        with tqdm(total=len(asks), initial=resumed, unit="answer", disable=self.ranks.rank > 0 or None) as bar:
            for batch in _batches(asks, engine.batch_size, log.done):
                rows = answer(engine, batch, seed=self.settings.seed, system_prompt=self.system_prompt)
                log.append(rows)
                bar.update(len(rows))
        return time.perf_counter() - start


def answer(engine: AnswerEngine, batch: Sequence[Ask], *, seed: int, system_prompt: str | None) -> list[Prediction]:
    """One row per ask, in order. A problem whose image cannot be decoded gets an empty response and the reason; one
    whose answer the engine could not get has no row.
    """
    rows: list[Prediction] = []
    asked: list[Prediction] = []
    requests: list[AnswerRequest] = []
    for problem, sample in batch:
        row = dict(problem.fields) | ({"sample": sample} if sample else {})
        rows.append(row)
        try:
            images = problem.images()
        except Exception as error:  # a decoder raises whatever it likes on a broken file
            reason = f"{type(error).__name__}: {error}"
            row.update(response="", finish_reason=IMAGE_FAILED, n_tokens=0, n_prompt_tokens=0, error=reason)
            continue
        if images:
            row["image_size"] = list(images[0].size)
        messages = conversation_with_images(problem.prompt, len(images), system_prompt)
        requests.append(AnswerRequest(messages, images, _seed_of(seed, problem.pid, sample)))
        asked.append(row)
    generations = engine.generate(requests) if requests else []
    for row, generation in zip(asked, generations, strict=True):
        if generation is None:
            rows = [other for other in rows if other is not row]
            continue
        row.update(
            response=generation.text,
            finish_reason=generation.finish_reason,
            n_tokens=generation.n_tokens,
            n_prompt_tokens=generation.n_prompt_tokens,
        )
    return rows


def _seed_of(seed: int, pid: str, sample: int) -> int:
    """A separate seed for each answer, so that a resumed run samples what an uninterrupted one would."""
    text = f"{seed}/{pid}" + (f"/{sample}" if sample else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def _bounded(
    settings: AnswerEngineSettings, problems: Sequence[Problem], system_prompt: str | None
) -> AnswerEngineSettings:
    """The settings with the bounds that the engine needs: the most images and the longest text of any problem."""
    longest = max(len(problem.prompt.encode()) for problem in problems) + len((system_prompt or "").encode())
    return replace(settings, max_images=max(problem.n_images for problem in problems), max_text_bytes=longest)


def _batches(asks: Sequence[Ask], size: int, done: Container[tuple[str, int]]) -> Iterator[Sequence[Ask]]:
    """What is left to answer of each batch.

    The whole list is divided into batches, so that a resumed run has the same batches as an uninterrupted one. Rounding
    can depend on what a batch contains.
    """
    for start in range(0, len(asks), size):
        batch = [ask for ask in asks[start : start + size] if ask.key not in done]
        if batch:
            yield batch


def _check_unique(problems: Sequence[Problem]) -> None:
    """Raise `UserError` if two problems have the same id, because answers are found by their ids."""
    seen: set[str] = set()
    for problem in problems:
        if problem.pid in seen:
            raise UserError(f"dataset: the id {problem.pid!r} occurs twice; ids have to be unique")
        seen.add(problem.pid)
