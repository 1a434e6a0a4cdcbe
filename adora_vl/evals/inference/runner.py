"""Asks a model all problems of a benchmark, in batches and on several processes.

A run that was stopped is resumed: the file of predictions says which answers are there.
"""

import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from adora_vl.data.prompts import control_token_in, conversation_with_images
from adora_vl.evals.inference.predictions import (
    IMAGE_FAILED,
    PREDICTIONS,
    TOO_LONG,
    PredictionLog,
    absorb_parts,
    key,
    part_path,
    read_rows,
    sort_rows,
)
from adora_vl.evals.inference.provenance import (
    FINGERPRINT_FILE,
    Fields,
    read_fingerprint,
    write_json,
    write_or_check_fingerprint,
)
from adora_vl.evals.inference.requests import (
    AnswerEngine,
    AnswerEngineSettings,
    AnswerRequest,
    Unanswerable,
)
from adora_vl.evals.records import Prediction, Problem
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import make_folder, written_to
from adora_vl.utils.launch import STARTUP_LOG, StartupLog

_PATIENCE = timedelta(days=7)  # how long a rank waits for the slowest one
# The variables of a launcher. An engine that sees them would wait for the other processes.
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
)


@dataclass
class Ranks:
    """The rank of this process among those that answer together."""

    rank: int = 0
    world: int = 1
    store: Any = None
    """The store at which several processes meet; the launcher or rank 0 holds it."""
    run: str = ""
    """A name for each of several runs of one process, so that their barriers differ."""

    def barrier(self, point: str) -> None:
        """Wait until every process has come to the named point of the run.

        The last process to arrive sets the key for which all of them wait. A single process has no
        store, and does not wait.
        """
        if self.store is None:
            return
        arrivals = f"adora_vl_eval/{self.run}/{point}"
        if self.store.add(arrivals, 1) == self.world:
            self.store.set(f"{arrivals}/all", "1")
        self.store.wait([f"{arrivals}/all"], _PATIENCE)


ALONE = Ranks()


def join_ranks() -> Ranks:
    """Return the rank of this process.

    The launcher's variables are removed, and the process takes a GPU of its own.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    from torch.distributed.rendezvous import rendezvous

    store, rank, world = next(rendezvous("env://", timeout=_PATIENCE))
    take_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    for name in _LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    return Ranks(rank, world, store)


def take_gpu(local_rank: int) -> None:
    """Make one of the visible GPUs the only one of this process.

    To be called before CUDA starts.
    """
    devices = _visible_devices()
    if local_rank < len(devices):
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[local_rank]


def _visible_devices() -> list[str]:
    """Return the GPUs of the environment, else all of the machine."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")
    # The count is taken only here, since it can start CUDA.
    return [str(index) for index in range(torch.cuda.device_count())]


class Ask(NamedTuple):
    """One answer to ask for: a problem, and the number of the sample from 0 on."""

    problem: Problem
    sample: int

    @property
    def key(self) -> tuple[str, int]:
        """The key of the row with the answer, as `predictions.key` has it."""
        return self.problem.pid, self.sample


@dataclass(frozen=True)
class Summary:
    """The numbers of answers of a run of `infer`, and its time."""

    total: int
    """The answers that the run asks for."""
    resumed: int
    """The answers that were there already."""
    pending: int
    """The answers that were asked for now."""
    image_failed: int
    """The answers of now whose image cannot be decoded."""
    seconds: float
    """The time of generation."""
    missing: int = 0
    """The answers that are not there at the end, because calls of the engine failed."""
    too_long: int = 0
    """The answers of now whose prompt does not fit the context."""


@dataclass(frozen=True, kw_only=True)
class _Answering:
    """What the answers of one run have in common, on every rank."""

    output: Path
    """The folder of the answers."""
    settings: AnswerEngineSettings
    """The engine, with the bounds of all problems of the run (see `with_engine_bounds`)."""
    system_prompt: str | None
    build: Callable[[AnswerEngineSettings], AnswerEngine]
    """Makes the engine of the settings; called only when an answer is missing."""
    ranks: Ranks
    """The rank of this process."""

    def answer_slice(self, asks: Sequence[Ask], done: set[tuple[str, int]]) -> float:
        """Answer this rank's slice into a file of its own, and return the seconds.

        Args:
            asks: The asks of all ranks.
            done: The keys of the answers that are there already.
        """
        ranks = self.ranks
        with PredictionLog(part_path(self.output, ranks.rank)) as part:
            part.done |= done
            return self.answer_missing(part, asks[ranks.rank :: ranks.world])

    def answer_missing(self, log: PredictionLog, asks: Sequence[Ask]) -> float:
        """Answer what the log does not have yet, and return the seconds without those of loading.

        The engine is built only when an answer is missing.
        """
        resumed = sum(ask.key in log.done for ask in asks)
        if resumed == len(asks):
            return 0.0
        engine = self._built_engine()
        batch_size = engine.batch_size
        start = time.perf_counter()
        # `disable=None`: no bar where stderr is not a terminal.
        no_bar = self.ranks.rank > 0 or None
        with tqdm(total=len(asks), initial=resumed, unit="answer", disable=no_bar) as bar:
            # The whole list is divided, so that a resumed run has the same batches: rounding can
            # depend on what is in one.
            for start_index in range(0, len(asks), batch_size):
                batch = asks[start_index : start_index + batch_size]
                missing = [ask for ask in batch if ask.key not in log.done]
                if not missing:
                    continue
                rows = answer(
                    engine, missing, seed=self.settings.seed, system_prompt=self.system_prompt
                )
                log.append(rows)
                bar.update(len(rows))
        return time.perf_counter() - start

    def _built_engine(self) -> AnswerEngine:
        """Return the engine, and store the settings that it took from the model."""
        is_rank_0 = self.ranks.rank == 0
        with StartupLog(
            self.output / STARTUP_LOG, first=is_rank_0
        ):  # libraries speak while loading
            engine = self.build(self.settings)
        resolved = getattr(engine, "resolved", None)  # an engine of a trainer has none
        if resolved and is_rank_0:
            fingerprint_path = self.output / FINGERPRINT_FILE
            with written_to("output", self.output):
                write_json(
                    fingerprint_path, {**read_fingerprint(fingerprint_path), "resolved": resolved}
                )
        return engine


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
    """Ask for every answer that `output` does not have yet.

    The engine is built only if answers are missing. With several `ranks` each answers a slice into
    a part of its own, and rank 0 merges the parts in the order of the problems.

    Args:
        problems: The problems to ask.
        output: The folder of the answers.
        settings: The engine.
        fingerprint: What the answers depend on.
        system_prompt: The system prompt, with the descriptions of tools.
        build: Makes the engine of the settings.
        samples: The answers to each problem.
        in_data: The number of problems in the data, of which `problems` may be the first.
        ranks: The rank of this process.

    Raises `UserError` if `output` holds predictions made with other settings, or rows
    of problems not asked for now, and as `refuse_control_tokens` does.
    """
    refuse_control_tokens(problems, system_prompt)
    make_folder("output", output)
    asks = [Ask(problem, sample) for problem in problems for sample in range(samples)]
    answering = _Answering(
        output=output,
        settings=with_engine_bounds(settings, problems, system_prompt),
        system_prompt=system_prompt,
        build=build,
        ranks=ranks,
    )
    if ranks.rank:
        return _answer_with_rank_0(answering, asks)
    with PredictionLog(output / PREDICTIONS) as log, _removed_if_unanswered(output):
        # The parts of a run that was killed before its rank 0 could merge them.
        has_merged_parts = absorb_parts(output, log)
        n_in_data = in_data or len(problems)
        answer_counts = {"answers": len(asks), "in_data": samples * n_in_data}
        with written_to("output", output):
            write_or_check_fingerprint(
                output,
                fingerprint,
                has_predictions=bool(log.done),
                answer_counts=answer_counts,
            )
        earlier_keys = set(log.done)
        pending = sum(ask.key not in earlier_keys for ask in asks)
        resumed = len(asks) - pending
        _refuse_further_predictions(
            output, predictions=len(earlier_keys), answers=len(asks), resumed=resumed
        )
        _print_size(len(problems), samples, resumed=resumed, pending=pending)
        # The other ranks read which answers are there only after this barrier.
        ranks.barrier("start")
        if ranks.world == 1:
            seconds = answering.answer_missing(log, asks)
        else:
            seconds = answering.answer_slice(asks, earlier_keys)
            # Every part is whole only when all ranks have answered.
            ranks.barrier("end")
            has_merged_parts |= absorb_parts(output, log)
        # Answers that were missing, and further samples, are last in the file.
        has_late_rows = resumed and pending and (settings.endpoint or samples > 1)
        if has_merged_parts or has_late_rows:
            sort_rows(output / PREDICTIONS, [ask.key for ask in asks])
    rows = read_rows(output / PREDICTIONS)
    finish_reason_counts = Counter(
        row["finish_reason"] for row in rows if key(row) not in earlier_keys
    )
    return Summary(
        total=len(asks),
        resumed=resumed,
        pending=pending,
        image_failed=finish_reason_counts[IMAGE_FAILED],
        seconds=seconds,
        missing=len(asks) - len(rows),
        too_long=finish_reason_counts[TOO_LONG],
    )


def _answer_with_rank_0(answering: _Answering, asks: Sequence[Ask]) -> Summary:
    """Answer a slice between the barriers of rank 0, which merges it and has the real summary."""
    ranks = answering.ranks
    ranks.barrier("start")
    earlier_keys = {key(row) for row in read_rows(answering.output / PREDICTIONS)}
    answering.answer_slice(asks, earlier_keys)
    ranks.barrier("end")
    return Summary(
        total=len(asks), resumed=len(earlier_keys), pending=0, image_failed=0, seconds=0.0
    )


def _print_size(problems: int, samples: int, *, resumed: int, pending: int) -> None:
    """Say on standard error how many answers are there already, and how many are to do."""
    size = amount(problems, "problem")
    if samples > 1:
        size += f" x {samples} answers"
    print(f"{size}: {resumed} there already, {pending} to do", file=sys.stderr)


def _refuse_further_predictions(
    output: Path, *, predictions: int, answers: int, resumed: int
) -> None:
    """Raise `UserError` where a folder has predictions that this run does not ask for.

    `resumed` of its `predictions` answer what is asked.
    """
    if predictions > resumed:
        raise UserError(
            f"limit: {str(output)!r} already has {predictions} predictions and this run "
            f"asks for {answers}; raise --limit or use another --output"
        )


@contextmanager
def _removed_if_unanswered(output: Path) -> Iterator[None]:
    """Remove the folder of a run that raises `UserError` before it has an answer.

    A user who mends the mistake can then use the same folder, with other settings. The caller holds
    the lock of the file of predictions, so no other run is using the folder.
    """
    try:
        yield
    except UserError:
        with suppress(OSError, KeyError):  # a folder with anything else in it stays
            path_by_name = {path.name: path for path in output.iterdir()}
            has_only_our_files = path_by_name.keys() <= {PREDICTIONS, FINGERPRINT_FILE, STARTUP_LOG}
            if has_only_our_files and not path_by_name[PREDICTIONS].stat().st_size:
                for path in path_by_name.values():
                    path.unlink()
                output.rmdir()
        raise


def answer(
    engine: AnswerEngine, batch: Sequence[Ask], *, seed: int, system_prompt: str | None
) -> list[Prediction]:
    """Return one row per ask, in order.

    A problem whose image cannot be decoded gets an empty response and the reason; one whose answer
    the engine could not get has no row.
    """
    rows: list[Prediction] = []
    asked_rows: list[Prediction] = []
    requests: list[AnswerRequest] = []
    for ask in batch:
        problem, sample = ask
        row = dict(problem.fields)
        if sample:
            row["sample"] = sample
        rows.append(row)
        try:
            images = problem.images()
        except Exception as error:  # a decoder raises whatever it likes on a broken file
            _fill_without_answer(row, IMAGE_FAILED, f"{type(error).__name__}: {error}")
            continue
        if images:
            row["image_size"] = list(images[0].size)
        messages = conversation_with_images(problem.prompt, len(images), system_prompt)
        requests.append(
            AnswerRequest(messages=messages, images=images, seed=_answer_seed(ask, seed))
        )
        asked_rows.append(row)
    for row, generation in zip(asked_rows, engine.generate(requests), strict=True):
        if generation is None:
            # By identity: two answers to one problem may be equal so far.
            rows = [kept_row for kept_row in rows if kept_row is not row]
            continue
        if isinstance(generation, Unanswerable):
            print(f"warning: {row['pid']!r} is not asked: {generation.reason}", file=sys.stderr)
            _fill_without_answer(row, TOO_LONG, generation.reason)
            continue
        row.update(
            response=generation.text,
            finish_reason=generation.finish_reason,
            n_tokens=generation.n_tokens,
            n_prompt_tokens=generation.n_prompt_tokens,
        )
        if generation.calls is not None:
            row["calls"] = list(generation.calls)
        if generation.thinking_opened:
            row["thinking_opened"] = True
    return rows


def _fill_without_answer(row: Prediction, finish_reason: str, error: str) -> None:
    """Give a row an empty response, and the reason why its problem could not be asked."""
    row.update(response="", finish_reason=finish_reason, n_tokens=0, n_prompt_tokens=0, error=error)


def _answer_seed(ask: Ask, seed: int) -> int:
    """Return the 32-bit seed of one answer, from the seed of the run.

    It is a separate one for each answer, so that a resumed run samples what an uninterrupted one
    would. The first sample's name has no number, which keeps the seeds of runs with one answer.
    """
    name = f"{seed}/{ask.problem.pid}"
    if ask.sample:
        name += f"/{ask.sample}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])


def refuse_control_tokens(problems: Sequence[Problem], system_prompt: str | None = None) -> None:
    """Raise `UserError` for a text that has one of the model's own tokens.

    The prompts are checked as they stand at last. A token of the model in the system prompt, a
    template or the facts of a picture would begin a turn, or stand for a picture that is not there.
    """
    token = control_token_in(system_prompt)
    if token is not None:
        raise UserError(
            f"system_prompt: it has the model's own token {token}; remove it from the text"
        )
    for problem in problems:
        token = control_token_in(problem.prompt)
        if token is not None:
            raise UserError(
                f"data: what is asked of {problem.pid} has the model's own token {token}; remove "
                "it from the text"
            )


def with_engine_bounds(
    settings: AnswerEngineSettings, problems: Sequence[Problem], system_prompt: str | None
) -> AnswerEngineSettings:
    """Return the settings with the bounds that an engine needs for these problems.

    They are the most images of a problem, and the bytes of the longest text with the system prompt.
    """
    longest_prompt = max(len(problem.prompt.encode()) for problem in problems)
    system_bytes = len((system_prompt or "").encode())
    return replace(
        settings,
        max_images=max(problem.n_images for problem in problems),
        max_text_bytes=longest_prompt + system_bytes,
    )
