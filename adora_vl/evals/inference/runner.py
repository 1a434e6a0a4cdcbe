"""Asks a model all problems of a benchmark, in batches and on several processes.

A run that was stopped is resumed: the file of predictions says which answers are there.
"""

import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from adora_vl.data.prompts import conversation_with_images, find_control_token
from adora_vl.evals.inference.predictions import (
    IMAGE_FAILED,
    PREDICTIONS_FILE,
    PROMPT_TOO_LONG,
    PredictionLog,
    RowKey,
    merge_rank_files,
    rank_file_path,
    read_rows,
    row_key,
    sort_rows,
)
from adora_vl.evals.inference.provenance import (
    FINGERPRINT_FILE,
    FingerprintFields,
    check_fingerprint,
    read_fingerprint,
    refuse_other_resolved_settings,
    write_fingerprint,
    write_json,
)
from adora_vl.evals.inference.ranks import SINGLE_PROCESS, ProcessGroup
from adora_vl.evals.inference.requests import (
    AnswerEngine,
    AnswerEngineSettings,
    AnswerRequest,
    Unanswerable,
)
from adora_vl.evals.records import Prediction, Problem
from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import make_output_folder, naming_write_errors
from adora_vl.utils.launch import STARTUP_LOG, StartupLog
from adora_vl.utils.openai_client import Reply


class AnswerSample(NamedTuple):
    """One answer that a run asks for: a problem, and the number of the answer among those to it."""

    problem: Problem
    number: int
    """The number of the answer, from 0 on. A run may ask for several answers to each problem."""

    @property
    def key(self) -> RowKey:
        """The key of the row that has this answer: the id of the problem, and the number."""
        return self.problem.pid, self.number


@dataclass(frozen=True)
class InferenceSummary:
    """The numbers of answers in a run of `infer`, and the time that they took."""

    total: int
    """The number of answers that the run is for: problems times samples."""
    resumed: int
    """How many of them the output folder had already, from an earlier run."""
    pending: int
    """How many of them this run asked for."""
    image_failed: int
    """The problems of this run that were not asked, because an image cannot be decoded."""
    seconds: float
    """The time of generation, without loading the model."""
    missing: int = 0
    """The answers that are still missing at the end, because calls of a server failed."""
    too_long: int = 0
    """The problems of this run that were not asked, because the prompt does not fit the context."""


@dataclass(frozen=True, kw_only=True)
class _RankRunner:
    """Lets the engine of this rank answer samples, and appends the answers to a file."""

    output: Path
    """The folder of the predictions."""
    settings: AnswerEngineSettings
    """The engine's settings, which fit all problems of the run (see `with_engine_bounds`)."""
    build: Callable[[AnswerEngineSettings], AnswerEngine]
    """Builds the engine; called only when an answer is missing."""
    process_group: ProcessGroup
    """The rank of this process."""

    def answer_rank_share(
        self, samples: Sequence[AnswerSample], earlier_keys: set[RowKey]
    ) -> float:
        """Answer this rank's share of the samples into a file of its own.

        With 3 ranks, rank 1 answers the samples 1, 4, 7 and so on.

        Args:
            samples: The samples of all ranks.
            earlier_keys: The keys of the answers that an earlier run has written.

        Returns the seconds of generation.
        """
        rank = self.process_group.rank
        rank_samples = samples[rank :: self.process_group.world_size]
        with PredictionLog(rank_file_path(self.output, rank)) as rank_log:
            rank_log.written_keys |= earlier_keys  # they are not asked again
            return self.answer_missing(rank_log, rank_samples)

    def answer_missing(self, log: PredictionLog, samples: Sequence[AnswerSample]) -> float:
        """Answer the samples that the file of predictions does not have yet, and append them to it.

        The engine is built only when an answer is missing.

        Returns the seconds of generation. Building the engine does not count.
        """
        resumed_count = sum(sample.key in log.written_keys for sample in samples)
        if resumed_count == len(samples):
            return 0.0
        engine = self._build_engine(has_predictions=bool(log.written_keys))
        batch_size = engine.batch_size
        start = time.perf_counter()
        # `disable=None` shows no bar where stderr is not a terminal.
        no_bar = self.process_group.rank > 0 or None
        with tqdm(total=len(samples), initial=resumed_count, unit="answer", disable=no_bar) as bar:
            # All samples are divided into batches, not only the missing ones. So a resumed run has
            # the same batches, which matters because rounding can depend on the rest of a batch.
            for start_index in range(0, len(samples), batch_size):
                batch = samples[start_index : start_index + batch_size]
                missing_samples = [sample for sample in batch if sample.key not in log.written_keys]
                if not missing_samples:
                    continue
                rows = answer_batch(
                    engine,
                    missing_samples,
                    seed=self.settings.seed,
                    system_prompt=self.settings.system_prompt,
                )
                log.append(rows)
                bar.update(len(rows))
        return time.perf_counter() - start

    def _build_engine(self, *, has_predictions: bool) -> AnswerEngine:
        """Build the engine, and add the settings that it took from the model to the fingerprint.

        Raises `UserError` if the folder has predictions that were made with other such settings.
        """
        is_rank_0 = self.process_group.rank == 0
        # The libraries print much while they load a model.
        with StartupLog(self.output / STARTUP_LOG, is_first_process=is_rank_0):
            engine = self.build(self.settings)
        # The engine of a trainer has no such settings.
        resolved_settings = getattr(engine, "resolved_settings", None)
        if not resolved_settings:
            return engine
        path = self.output / FINGERPRINT_FILE
        fingerprint = read_fingerprint(path)
        if has_predictions:
            refuse_other_resolved_settings(self.output, fingerprint, resolved_settings)
        if is_rank_0:
            with naming_write_errors("output", self.output):
                write_json(path, {**fingerprint, "resolved": resolved_settings})
        return engine


def infer(
    problems: Sequence[Problem],
    output: Path,
    settings: AnswerEngineSettings,
    fingerprint: FingerprintFields,
    *,
    build: Callable[[AnswerEngineSettings], AnswerEngine],
    samples_per_problem: int = 1,
    problems_in_data: int | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> InferenceSummary:
    """Ask the model for all answers that the folder `output` does not have yet.

    With several ranks, each rank answers its share into a file of its own, and rank 0 merges the
    files.

    Args:
        problems: The problems to ask.
        output: The folder of the answers.
        settings: The settings of the engine, with the system prompt of all problems.
        fingerprint: What the answers depend on; a run is resumed only with the same.
        build: Builds the engine from its settings; called only if answers are missing.
        samples_per_problem: The number of answers to each problem.
        problems_in_data: The number of problems in the data, if `problems` are a part of them.
        process_group: The rank of this process among those that answer together.

    Raises `UserError` if `output` has predictions that were made with other settings or are not of
    these problems, and for a prompt with one of the model's special tokens in its text.
    """
    refuse_control_tokens(problems, settings.system_prompt)
    make_output_folder(output)
    samples = [
        AnswerSample(problem, number)
        for problem in problems
        for number in range(samples_per_problem)
    ]
    runner = _RankRunner(
        output=output,
        settings=with_engine_bounds(settings, problems),
        build=build,
        process_group=process_group,
    )
    if process_group.rank > 0:
        return _answer_on_other_rank(runner, samples)
    n_problems_in_data = problems_in_data or len(problems)
    return _answer_on_rank_0(
        runner,
        samples,
        fingerprint,
        samples_per_problem=samples_per_problem,
        n_answers_in_data=samples_per_problem * n_problems_in_data,
    )


def _answer_on_rank_0(
    runner: _RankRunner,
    samples: Sequence[AnswerSample],
    fingerprint: FingerprintFields,
    *,
    samples_per_problem: int,
    n_answers_in_data: int,
) -> InferenceSummary:
    """Answer the share of rank 0, and gather the answers of all ranks in the file of predictions.

    `samples` are those of all ranks, and `n_answers_in_data` is the number of answers to all
    problems of the data. The other arguments are those of `infer`.

    Raises `UserError` if the folder has predictions that were made with other settings, or that
    this run does not ask for.
    """
    output = runner.output
    process_group = runner.process_group
    n_answers = len(samples)
    with PredictionLog(output / PREDICTIONS_FILE) as log, _removing_folder_without_answers(output):
        # A run that was killed may have left files of its ranks that rank 0 did not merge.
        has_merged_files = merge_rank_files(output, log)
        earlier_keys = set(log.written_keys)
        pending_count = sum(sample.key not in earlier_keys for sample in samples)
        resumed_count = n_answers - pending_count
        _check_and_write_fingerprint(
            output,
            fingerprint,
            n_earlier=len(earlier_keys),
            n_resumed=resumed_count,
            answer_counts={"answers": n_answers, "in_data": n_answers_in_data},
        )
        _print_counts(
            n_problems=n_answers // samples_per_problem,
            samples_per_problem=samples_per_problem,
            resumed=resumed_count,
            pending=pending_count,
        )
        # The other ranks read the file of predictions after this barrier.
        process_group.barrier("start")
        if process_group.world_size == 1:
            seconds = runner.answer_missing(log, samples)
        else:
            seconds = runner.answer_rank_share(samples, earlier_keys)
        process_group.barrier("end")  # every rank has written its file
        has_merged_files |= merge_rank_files(output, log)
        is_server = runner.settings.endpoint is not None
        # A resumed run may append answers that belong before the others: answers that a server
        # failed to give in the earlier run, and further samples of the same problems.
        is_resumed = bool(resumed_count and pending_count)
        may_be_out_of_order = is_resumed and (is_server or samples_per_problem > 1)
        if has_merged_files or may_be_out_of_order:
            sort_rows(output / PREDICTIONS_FILE, [sample.key for sample in samples])
    return _summary_of_run(
        read_rows(output / PREDICTIONS_FILE),
        earlier_keys,
        total=n_answers,
        pending=pending_count,
        seconds=seconds,
    )


def _summary_of_run(
    rows: Sequence[Prediction],
    earlier_keys: set[RowKey],
    *,
    total: int,
    pending: int,
    seconds: float,
) -> InferenceSummary:
    """Count what became of the answers that a run asked for.

    Args:
        rows: All rows of the file of predictions.
        earlier_keys: The keys of the rows that were there before the run.
        total: The number of answers that the run is for.
        pending: The number of answers that this run asked for.
        seconds: The time of generation.
    """
    finish_reason_counts = Counter(
        row["finish_reason"] for row in rows if row_key(row) not in earlier_keys
    )
    return InferenceSummary(
        total=total,
        resumed=total - pending,
        pending=pending,
        image_failed=finish_reason_counts[IMAGE_FAILED],
        seconds=seconds,
        missing=total - len(rows),
        too_long=finish_reason_counts[PROMPT_TOO_LONG],
    )


def _check_and_write_fingerprint(
    output: Path,
    fingerprint: FingerprintFields,
    *,
    n_earlier: int,
    n_resumed: int,
    answer_counts: dict[str, int],
) -> None:
    """Check that this run can go on from an earlier one, and write what its answers depend on.

    The fingerprint is written only after the checks. A run that is refused must not change the
    counts of the earlier run, which a score reads.

    Args:
        output: The folder.
        fingerprint: What the answers depend on; a run is resumed only with the same.
        n_earlier: The number of predictions of the earlier run; 0 where there was none.
        n_resumed: The number of these predictions that are answers of this run too.
        answer_counts: `answers`, the number of all answers of this run, and `in_data`, the number
            of answers to all problems of the data.

    Raises `UserError` for predictions that were made with other settings, or that this run does not
    ask for. The score would count these too.
    """
    if n_earlier:
        check_fingerprint(output, fingerprint)
    if n_earlier > n_resumed:
        raise UserError(
            f"limit: {str(output)!r} already has {n_earlier} predictions and this run "
            f"asks for {answer_counts['answers']}; raise --limit or use another --output"
        )
    with naming_write_errors("output", output):
        write_fingerprint(
            output, fingerprint, has_predictions=n_earlier > 0, answer_counts=answer_counts
        )


def _answer_on_other_rank(runner: _RankRunner, samples: Sequence[AnswerSample]) -> InferenceSummary:
    """Answer the share of a rank other than 0, between the same barriers as rank 0.

    The summary's counts of pending problems and of images that failed are 0, since only rank 0,
    which merges the answers of all ranks, knows them.
    """
    process_group = runner.process_group
    process_group.barrier("start")
    earlier_keys = {row_key(row) for row in read_rows(runner.output / PREDICTIONS_FILE)}
    runner.answer_rank_share(samples, earlier_keys)
    process_group.barrier("end")
    return InferenceSummary(
        total=len(samples), resumed=len(earlier_keys), pending=0, image_failed=0, seconds=0.0
    )


def _print_counts(*, n_problems: int, samples_per_problem: int, resumed: int, pending: int) -> None:
    """Print on stderr how many answers a run has already, and how many it asks for.

    An example is `100 problems x 4 answers: 40 there already, 360 to do`.
    """
    size = pluralize(n_problems, "problem")
    if samples_per_problem > 1:
        size += f" x {samples_per_problem} answers"
    resumed_text = f"{resumed} there already, " if resumed else ""
    print(f"{size}: {resumed_text}{pending} to do", file=sys.stderr)


@contextmanager
def _removing_folder_without_answers(output: Path) -> Iterator[None]:
    """Remove the output folder if the body raises `UserError` before there is an answer in it.

    A user who mends the mistake can then use the same folder with other settings. The caller holds
    the lock of the file of predictions, so that no other run is using the folder.
    """
    try:
        yield
    except UserError:
        # An error here, such as a file that has vanished meanwhile, would hide the user's mistake.
        with suppress(OSError, KeyError):
            path_by_name = {path.name: path for path in output.iterdir()}
            has_only_our_files = path_by_name.keys() <= {
                PREDICTIONS_FILE,
                FINGERPRINT_FILE,
                STARTUP_LOG,
            }
            has_no_answer = has_only_our_files and not path_by_name[PREDICTIONS_FILE].stat().st_size
            if has_no_answer:
                for path in path_by_name.values():
                    path.unlink()
                output.rmdir()
        raise


def answer_batch(
    engine: AnswerEngine, batch: Sequence[AnswerSample], *, seed: int, system_prompt: str | None
) -> list[Prediction]:
    """Get a batch of answers from an engine, as rows of the file of predictions.

    A problem that cannot be asked, because its image is broken or its prompt too long, has a row
    with an empty response and the reason. An answer that the engine could not get has no row, so
    that a later run asks for it again.

    Args:
        engine: The engine.
        batch: The samples to answer.
        seed: The seed of the run, from which the seed of each answer is derived.
        system_prompt: The system prompt of all prompts.
    """
    rows: list[Prediction] = []
    requests: list[AnswerRequest] = []
    # The index of the row of each request. A problem with a broken image has a row but no request.
    row_indices: list[int] = []
    for row_index, sample in enumerate(batch):
        problem = sample.problem
        row: Prediction = dict(problem.fields)
        if sample.number:
            row["sample"] = sample.number
        rows.append(row)
        try:
            images = problem.images()
        except Exception as error:  # a decoder raises whatever it likes on a broken file
            _set_failure_fields(row, IMAGE_FAILED, f"{type(error).__name__}: {error}")
            continue
        if images:
            row["image_size"] = list(images[0].size)
        messages = conversation_with_images(problem.prompt, len(images), system_prompt)
        requests.append(
            AnswerRequest(messages=messages, images=images, seed=_answer_seed(sample, seed))
        )
        row_indices.append(row_index)
    unanswered_indices: set[int] = set()
    for row_index, reply in zip(row_indices, engine.generate(requests), strict=True):
        row = rows[row_index]
        if reply is None:
            unanswered_indices.add(row_index)
        elif isinstance(reply, Unanswerable):
            print(f"warning: {row['pid']!r} is not asked: {reply.reason}", file=sys.stderr)
            _set_failure_fields(row, PROMPT_TOO_LONG, reply.reason)
        else:
            _set_reply_fields(row, reply)
    return [row for index, row in enumerate(rows) if index not in unanswered_indices]


def _set_reply_fields(row: Prediction, reply: Reply) -> None:
    """Set the fields of a row that come from the reply of the engine: response, lengths and so on.

    `calls` is set only for a model with tools. `thinking_opened` is set only if the prompt ended
    inside a block of thinking, so that the response begins inside it.
    """
    row.update(
        response=reply.text,
        finish_reason=reply.finish_reason,
        n_tokens=reply.n_tokens,
        n_prompt_tokens=reply.n_prompt_tokens,
    )
    if reply.calls is not None:
        row["calls"] = list(reply.calls)
    if reply.thinking_opened:
        row["thinking_opened"] = True


def _set_failure_fields(row: Prediction, finish_reason: str, error: str) -> None:
    """Set the fields of a row whose problem could not be asked: an empty response and the reason.

    Args:
        row: The row, which is changed in place.
        finish_reason: `IMAGE_FAILED` or `PROMPT_TOO_LONG`.
        error: The reason in words.
    """
    row.update(response="", finish_reason=finish_reason, n_tokens=0, n_prompt_tokens=0, error=error)


def _answer_seed(sample: AnswerSample, run_seed: int) -> int:
    """Derive the 32-bit seed of one answer from the seed of the run.

    The seed is a hash of the text `7/p3` for the first answer to the problem `p3` with the run's
    seed 7, and of `7/p3/1` for the second one. So a resumed run samples the same answers as an
    uninterrupted one, and the first answer is the same for any number of samples.
    """
    name = f"{run_seed}/{sample.problem.pid}"
    if sample.number:
        name += f"/{sample.number}"
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4])


def refuse_control_tokens(problems: Sequence[Problem], system_prompt: str | None = None) -> None:
    """Raise `UserError` for a prompt that has one of the model's special tokens as text.

    Such a token would begin a turn of the conversation, or stand for a picture that is not there.
    The prompts are checked as they are asked, since a token may come from a template or from the
    facts of a picture as well as from the data.
    """
    token = find_control_token(system_prompt)
    if token is not None:
        raise UserError(
            f"system_prompt: it has the model's own token {token}; remove it from the text"
        )
    for problem in problems:
        token = find_control_token(problem.prompt)
        if token is not None:
            raise UserError(
                f"data: what is asked of {problem.pid} has the model's own token {token}; remove "
                "it from the text"
            )


def with_engine_bounds(
    settings: AnswerEngineSettings, problems: Sequence[Problem]
) -> AnswerEngineSettings:
    """Return the engine's settings with the bounds of these problems, for vLLM's context length.

    The bounds are the largest number of images in a problem, and the bytes of the longest prompt
    plus those of the system prompt.
    """
    longest_prompt = max(len(problem.prompt.encode()) for problem in problems)
    system_bytes = len((settings.system_prompt or "").encode())
    return replace(
        settings,
        max_images=max(problem.n_images for problem in problems),
        max_text_bytes=longest_prompt + system_bytes,
    )
