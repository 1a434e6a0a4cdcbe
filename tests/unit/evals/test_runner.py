"""The runner: nothing is asked twice, nothing is lost, one file comes out of several processes."""

import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from adora_vl.data.dataset import data_hash, load_split, write_split
from adora_vl.evals.inference.predictions import (
    IMAGE_FAILED,
    PredictionLog,
    rank_file_path,
    read_predictions,
    row_key,
)
from adora_vl.evals.inference.provenance import FingerprintFields
from adora_vl.evals.inference.ranks import (
    SINGLE_PROCESS,
    ProcessGroup,
    join_process_group,
    take_gpu,
)
from adora_vl.evals.inference.requests import AnswerEngine, AnswerEngineSettings, AnswerRequest
from adora_vl.evals.inference.runner import InferenceSummary, infer
from adora_vl.evals.prepared import build_problems as geometry3k_problems
from adora_vl.evals.records import Prediction, Problem
from adora_vl.models.load import model_hash
from adora_vl.synthetic.generate import generate
from adora_vl.utils.errors import UserError
from adora_vl.utils.launch import STARTUP_LOG
from adora_vl.utils.openai_client import Reply
from tests.support.paths import REPOSITORY
from tests.unit.evals import killed_infer

ENGINE_SETTINGS = AnswerEngineSettings(model="m", engine="transformers", system_prompt="Think.")


class RecordingEngine:
    """An engine that answers with the question and remembers what it was asked.

    It dies at the first batch after `dies_after` requests.
    """

    batch_size = 2

    def __init__(self, dies_after: int | None = None) -> None:
        self.resolved_settings: dict[str, str] = {}
        self.requests: list[AnswerRequest] = []
        self.built: list[AnswerEngineSettings] = []
        self._dies_after = dies_after

    def build(self, settings: AnswerEngineSettings) -> AnswerEngine:
        self.built.append(settings)
        os.write(1, b"what a library says\n")
        return self

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
        if self._dies_after is not None and len(self.requests) >= self._dies_after:
            raise RuntimeError("killed")
        self.requests += requests
        questions = [request.messages[-1]["content"][-1]["text"] for request in requests]
        return [
            Reply(question, n_tokens=3, finish_reason="stop", n_prompt_tokens=9)
            for question in questions
        ]


def build_problem(index: int) -> Problem:
    """Return a problem `p/0` with the question `q0` and a picture of 8 x 8 pixels."""
    fields: Prediction = {
        "pid": f"p/{index}",
        "question": f"q{index}",
        "answer": "5",
        "choices": None,
        "metadata": {},
    }
    return Problem(
        fields,
        prompt=f"q{index}",
        n_images=1,
        images=lambda: [Image.new("RGB", (8, 8))],
    )


FIVE_PROBLEMS = [build_problem(index) for index in range(5)]


def infer_with(
    output: Path,
    engine: RecordingEngine,
    problems: Sequence[Problem] = FIVE_PROBLEMS,
    fingerprint: FingerprintFields | None = None,
) -> InferenceSummary:
    """Run `infer` into a folder with this engine, as a command would."""
    return infer(
        problems,
        output,
        ENGINE_SETTINGS,
        fingerprint or {"model": "m"},
        build=engine.build,
    )


def answered_pids(output: Path) -> list[str]:
    """Return the ids of the problems that have an answer in a folder."""
    return [row["pid"] for row in read_predictions(output / "predictions.jsonl")]


def test_every_problem_gets_a_row_with_its_fields_and_its_answer(tmp_path, capfd):
    """A row has the problem's fields and its answer, and the engine's output goes into a log.

    `RecordingEngine.build` prints a line with "library", as libraries do.
    """
    engine = RecordingEngine()
    assert infer_with(tmp_path, engine).pending == 5
    assert "library" not in capfd.readouterr().out
    assert "library" in (tmp_path / STARTUP_LOG).read_text()
    rows = read_predictions(tmp_path / "predictions.jsonl")
    assert [row["response"] for row in rows] == ["q0", "q1", "q2", "q3", "q4"]
    assert rows[0] == FIVE_PROBLEMS[0].fields | {
        "response": "q0",
        "finish_reason": "stop",
        "n_tokens": 3,
        "n_prompt_tokens": 9,
        "image_size": [8, 8],
    }
    system, user = engine.requests[0].messages
    assert system == {"role": "system", "content": "Think."}
    assert [part["type"] for part in user["content"]] == ["image", "text"]


def test_a_killed_run_keeps_its_batches_and_the_next_asks_only_the_rest(tmp_path):
    """A run that is killed after the first batch of two goes on with the other three problems."""
    with pytest.raises(RuntimeError, match="killed"):
        infer_with(tmp_path, RecordingEngine(dies_after=2))
    assert answered_pids(tmp_path) == ["p/0", "p/1"]
    engine = RecordingEngine()
    assert infer_with(tmp_path, engine).resumed == 2
    assert len(engine.requests) == 3
    assert answered_pids(tmp_path) == ["p/0", "p/1", "p/2", "p/3", "p/4"]


def test_a_finished_run_does_not_even_build_the_engine(tmp_path):
    """A run without missing answers builds no engine, and leaves the file as it is.

    To build an engine is to load a model, which takes minutes.
    """
    infer_with(tmp_path, RecordingEngine())
    predictions_before = (tmp_path / "predictions.jsonl").read_bytes()
    engine = RecordingEngine()

    assert infer_with(tmp_path, engine).pending == 0

    assert not engine.built
    assert (tmp_path / "predictions.jsonl").read_bytes() == predictions_before


def test_a_finished_run_goes_on_with_more_samples_and_not_with_fewer(tmp_path):
    """A finished run asks only for the samples that are new, and refuses fewer samples.

    The file is then in the order of a run that had all samples from the start.
    """

    def ask_for(output: Path, samples: int) -> InferenceSummary:
        """Ask for so many samples of each of the five problems."""
        return infer(
            FIVE_PROBLEMS,
            output,
            ENGINE_SETTINGS,
            {"model": "m", "samples": samples},
            build=RecordingEngine().build,
            samples_per_problem=samples,
        )

    whole = tmp_path / "whole"
    grown = tmp_path / "grown"
    ask_for(whole, samples=3)
    assert ask_for(grown, samples=1).pending == 5
    assert ask_for(grown, samples=3).resumed == 5
    uninterrupted_rows = read_predictions(whole / "predictions.jsonl")
    grown_rows = read_predictions(grown / "predictions.jsonl")
    assert [row_key(row) for row in grown_rows] == [row_key(row) for row in uninterrupted_rows]
    fingerprint_before = (grown / "fingerprint.json").read_bytes()
    message = "samples: the predictions in .* were made with 3, this run has 2"
    with pytest.raises(UserError, match=message):
        ask_for(grown, samples=2)
    assert (grown / "fingerprint.json").read_bytes() == fingerprint_before
    assert ask_for(grown, samples=3).pending == 0


def test_a_torn_last_line_is_asked_again(case_folder):
    """A last line without its newline is dropped, and its problem is asked again.

    A kill may cut the line off, within it or just before its newline.
    """
    torn_lines = [
        '{"pid": "p/4", "answer": "5", "resp',
        '{"pid": "p/4", "answer": "5", "response": "x"}',
    ]
    for torn_line in torn_lines:
        with case_folder(torn_line) as folder:
            infer_with(folder, RecordingEngine(), FIVE_PROBLEMS[:2])
            with (folder / "predictions.jsonl").open("a") as file:
                file.write(torn_line)
            infer_with(folder, RecordingEngine())
            rows = read_predictions(folder / "predictions.jsonl")
            assert [row["response"] for row in rows] == ["q0", "q1", "q2", "q3", "q4"]


def test_another_setting_is_refused_and_named(case_folder):
    """Answers by other settings are not added to a folder, and the engine is not even built."""
    for name in ["model", "temperature", "min_pixels"]:
        with case_folder(name) as folder:
            fields: FingerprintFields = {"model": "m", "temperature": 0.0, "min_pixels": None}
            infer_with(folder, RecordingEngine(), FIVE_PROBLEMS[:2], fields)
            predictions_before = (folder / "predictions.jsonl").read_bytes()
            engine = RecordingEngine()
            message = f"^{name}: .* were made with {fields[name]!r}, this run has 'other'"
            with pytest.raises(UserError, match=message):
                infer_with(folder, engine, fingerprint=fields | {name: "other"})
            assert not engine.built
            assert (folder / "predictions.jsonl").read_bytes() == predictions_before


def test_settings_that_the_engine_finds_are_those_of_the_answers_before(tmp_path):
    """A resumed run refuses another program of the server, and takes another address.

    It takes any program if the fingerprint has none, since the server was too busy to tell it.
    """

    def engine_with(**resolved: str) -> RecordingEngine:
        engine = RecordingEngine()
        engine.resolved_settings = resolved
        return engine

    server = {"base_url": "http://a:1/v1", "server": "vllm"}
    infer_with(tmp_path, engine_with(**server), FIVE_PROBLEMS[:2])
    other_program = engine_with(**server | {"server": "unknown"})
    message = "^server: .* were made with 'vllm', the engine has 'unknown' now"
    with pytest.raises(UserError, match=message):
        infer_with(tmp_path, other_program)
    assert not other_program.requests
    infer_with(tmp_path, engine_with(**server | {"base_url": "http://b:2/v1"}))
    fingerprint = json.loads((tmp_path / "fingerprint.json").read_text())
    assert fingerprint["resolved"] == {"base_url": "http://b:2/v1", "server": "vllm"}
    # The server of the first run was too busy to tell its program.
    fingerprint["resolved"] = {"base_url": "http://a:1/v1"}
    (tmp_path / "fingerprint.json").write_text(json.dumps(fingerprint))
    # A sixth problem, so that there is something to ask.
    infer_with(tmp_path, engine_with(server="unknown"), [*FIVE_PROBLEMS, build_problem(5)])


def test_a_run_that_died_before_its_first_answer_does_not_bind_the_folder(tmp_path):
    """A folder without answers takes other settings, although it has a fingerprint.

    Other settings are refused only where there are answers by the first ones.
    """
    with pytest.raises(RuntimeError, match="killed"):
        infer_with(tmp_path, RecordingEngine(dies_after=0), fingerprint={"max_pixels": 500})
    infer_with(tmp_path, RecordingEngine(), fingerprint={"max_pixels": 784})
    assert json.loads((tmp_path / "fingerprint.json").read_text())["fields"] == {"max_pixels": 784}


def test_what_would_mix_or_lose_answers_is_refused(tmp_path):
    """A run with fewer problems, beside another one, or without a fingerprint is refused."""
    predictions = tmp_path / "predictions.jsonl"
    infer_with(tmp_path, RecordingEngine())
    fingerprint = (tmp_path / "fingerprint.json").read_bytes()
    message = r"limit: .* already has 5 predictions and this run asks for 2"
    with pytest.raises(UserError, match=message):
        infer_with(tmp_path, RecordingEngine(), FIVE_PROBLEMS[:2])
    # A score would else take the five answers for those to two problems of a part.
    assert (tmp_path / "fingerprint.json").read_bytes() == fingerprint
    message = f"process {os.getpid()} .* is writing|another process is writing"
    with PredictionLog(predictions), pytest.raises(UserError, match=message):
        infer_with(tmp_path, RecordingEngine())
    (tmp_path / "fingerprint.json").unlink()
    with pytest.raises(UserError, match="no fingerprint"):
        infer_with(tmp_path, RecordingEngine())


def test_broken_images_are_recorded_and_the_others_answered(tmp_path):
    """A problem whose picture cannot be decoded gets a row that says so, and is not asked.

    It is the second of three.
    """
    rows = list(generate(3, split="test", seed=1))
    rows[1]["images"] = [{"bytes": b"no picture", "path": None}]
    write_split(rows, tmp_path / "data", "test")
    engine = RecordingEngine()
    problems = geometry3k_problems(load_split(tmp_path / "data", "test"))
    summary = infer_with(tmp_path / "out", engine, problems)
    assert summary.image_failed == 1
    first_row, broken_row, last_row = read_predictions(tmp_path / "out" / "predictions.jsonl")
    assert first_row["finish_reason"] == last_row["finish_reason"] == "stop"
    assert first_row["response"] == rows[0]["problem"]
    assert last_row["response"] == rows[2]["problem"]
    assert broken_row["finish_reason"] == IMAGE_FAILED
    assert broken_row["response"] == ""
    assert "UnreadableImageError" in broken_row["error"]
    asked_images = [request.images[0].tobytes() for request in engine.requests]
    assert asked_images == [rows[0]["images"][0].tobytes(), rows[2]["images"][0].tobytes()]
    assert first_row["metadata"]["family"] == rows[0]["meta"]["family"]
    assert "solution" not in first_row["metadata"], "a prediction keeps no text of the warm start"


def test_new_weights_or_other_data_in_the_same_folder_are_another_run(tmp_path):
    """The hashes of a model and of data change with a byte of the weights, or with a row.

    They stand in the fingerprint. A README of the model does not change its hash.
    """
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(9 * 1024 * 1024)
    (tmp_path / "model.safetensors").write_bytes(weights)
    hash_before = model_hash(str(tmp_path))
    (tmp_path / "README.md").write_text("says nothing")
    assert model_hash(str(tmp_path)) == hash_before
    weights[200_000] = 1  # as in a tensor as small as a projector's bias
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert model_hash(str(tmp_path)) != hash_before
    hashes = []
    for seed in (1, 1, 2):
        write_split(generate(2, split="test", seed=seed), tmp_path, "test")
        hashes.append(data_hash(tmp_path, "test"))
    assert hashes[0] == hashes[1] != hashes[2]


class EchoEngine:
    """An engine that answers with the question and the seed, and remembers its answers."""

    batch_size = 2

    def __init__(self) -> None:
        self.answers: list[str] = []

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
        answers = []
        for request in requests:
            question = request.messages[-1]["content"][-1]["text"]
            answers.append(f"{question} {request.seed}")
        self.answers += answers
        return [
            Reply(answer, n_tokens=3, finish_reason="stop", n_prompt_tokens=9) for answer in answers
        ]


class ThreadRanks(ProcessGroup):
    """Ranks that are threads of one process; their `store` is a `threading.Barrier`."""

    def barrier(self, where: str) -> None:
        self.store.wait(30)


SEVEN_PROBLEMS = [build_problem(index) for index in range(7)]


def infer_as_rank(
    output: Path, engine: EchoEngine, process_group: ProcessGroup, count: int = 7, samples: int = 2
) -> InferenceSummary:
    """Ask the first `count` of seven problems as one rank, `samples` times each."""
    return infer(
        SEVEN_PROBLEMS[:count],
        output,
        ENGINE_SETTINGS,
        {"model": "m"},
        build=lambda _: engine,
        samples_per_problem=samples,
        process_group=process_group,
    )


def infer_with_ranks(output: Path, world_size: int) -> tuple[InferenceSummary, list[EchoEngine]]:
    """Ask all problems with `world_size` ranks; returns the summary of rank 0 and all engines."""
    barrier = threading.Barrier(world_size)
    engines = [EchoEngine() for _ in range(world_size)]
    summary_by_rank: dict[int, InferenceSummary] = {}

    def run(rank: int) -> None:
        process_group = ThreadRanks(rank=rank, world_size=world_size, store=barrier)
        summary_by_rank[rank] = infer_as_rank(output, engines[rank], process_group)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return summary_by_rank[0], engines


def test_slices_cover_everything_once_and_the_file_is_that_of_one_process(case_folder):
    """Each rank answers its share of the 14 answers, and rank 0 merges them in their order."""
    for world_size in [2, 3]:
        with case_folder(world_size) as folder:
            infer_as_rank(folder / "one", EchoEngine(), SINGLE_PROCESS)
            summary, engines = infer_with_ranks(folder / "many", world_size)
            file_of_one = (folder / "one" / "predictions.jsonl").read_bytes()
            file_of_many = (folder / "many" / "predictions.jsonl").read_bytes()
            assert file_of_one == file_of_many
            answers = [answer for engine in engines for answer in engine.answers]
            assert len(answers) == len(set(answers)) == 7 * 2
            assert max(len(engine.answers) for engine in engines) <= math.ceil(7 * 2 / world_size)
            assert summary.pending == 7 * 2
            assert not list((folder / "many").glob("*rank*")), "the files of the ranks are merged"


def test_more_processes_go_on_where_one_was_stopped(tmp_path):
    """Two processes go on where one has answered three of seven problems, with the same file."""
    infer_as_rank(tmp_path / "whole", EchoEngine(), SINGLE_PROCESS)
    infer_as_rank(tmp_path / "parts", EchoEngine(), SINGLE_PROCESS, count=3)
    summary, engines = infer_with_ranks(tmp_path / "parts", world_size=2)
    assert summary.resumed == 3 * 2  # two samples of each
    assert sum(len(engine.answers) for engine in engines) == 4 * 2
    uninterrupted = tmp_path / "whole" / "predictions.jsonl"
    resumed = tmp_path / "parts" / "predictions.jsonl"
    assert resumed.read_bytes() == uninterrupted.read_bytes()


def test_parts_that_killed_processes_left_are_taken_in(tmp_path):
    """A run takes the rows of killed ranks out of their files, and asks for the rest.

    The two files have four new rows, one that the folder has already, and a torn line.
    """
    infer_as_rank(tmp_path / "whole", EchoEngine(), SINGLE_PROCESS)
    rows = read_predictions(tmp_path / "whole" / "predictions.jsonl")
    output = tmp_path / "parts"
    infer_as_rank(output, EchoEngine(), SINGLE_PROCESS, count=1)
    old_row = rows[0]
    rows_by_rank = {0: rows[4:6], 1: [old_row, *rows[9:11]]}  # any four answers to other problems
    for rank, rows_of_rank in rows_by_rank.items():
        with PredictionLog(rank_file_path(output, rank)) as log:
            log.append(rows_of_rank)
    with rank_file_path(output, 1).open("a") as file:
        file.write('{"pid": "p/3", "torn')
    engine = EchoEngine()
    # the two answers to the first problem, and the four of the ranks
    assert infer_as_rank(output, engine, SINGLE_PROCESS).resumed == 2 + 4
    assert len(engine.answers) == 7 * 2 - 6
    uninterrupted = tmp_path / "whole" / "predictions.jsonl"
    assert (output / "predictions.jsonl").read_bytes() == uninterrupted.read_bytes()
    assert not list(output.glob("*rank*")), "the files of the ranks are merged"


def test_each_process_takes_one_of_the_gpus_that_it_sees(monkeypatch, subtests):
    """Each local rank sees the GPU of its number; one without a GPU of its own keeps what it sees.

    The latter is as the second rank on a machine with one GPU.
    """
    # CUDA_VISIBLE_DEVICES before, the local rank, CUDA_VISIBLE_DEVICES after
    cases = [
        ("4,5", 1, "5"),
        ("4,5", 0, "4"),
        ("GPU-a,GPU-b", 1, "GPU-b"),
        ("4", 1, "4"),
    ]
    for visible, local_rank, gpu in cases:
        with subtests.test(f"{visible} {local_rank} {gpu}"), monkeypatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", visible)
            take_gpu(local_rank)
            assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join_process_group().rank == 0
    assert join_process_group().world_size == 1


ANSWER_COUNT = killed_infer.PROBLEM_COUNT * killed_infer.SAMPLES_PER_PROBLEM
SECONDS_A_BATCH = 0.05


def start_process(output: Path, seconds_a_batch: float) -> subprocess.Popen[bytes]:
    """Start the run of `killed_infer` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "tests.unit.evals.killed_infer",
        str(output),
        str(seconds_a_batch),
    ]
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)


def count_rows(path: Path) -> int:
    """Return the number of whole rows in a file that may not exist yet."""
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def kill_after_rows(output: Path, rows: int, extra_s: float) -> bool:
    """Start a run and kill it `extra_s` after there are more than `rows` rows.

    Returns whether it was still running.
    """
    process = start_process(output, SECONDS_A_BATCH)
    while count_rows(output / "predictions.jsonl") <= rows and process.poll() is None:
        time.sleep(0.002)  # between two looks at the file
    time.sleep(extra_s)
    was_running = process.poll() is None
    process.kill()
    process.wait()
    return was_running


@pytest.mark.slow
def test_three_kills_leave_the_file_of_an_uninterrupted_run(tmp_path):
    """A run that is killed three times at random moments ends with the file of one without kills.

    After each kill its whole lines are the first ones of that file.
    """
    killed_infer.main(tmp_path / "whole", 0.0)
    uninterrupted = (tmp_path / "whole" / "predictions.jsonl").read_bytes()
    generator = random.Random()  # other moments each time
    output = tmp_path / "parts"
    predictions = output / "predictions.jsonl"
    n_rows = 0
    for _ in range(3):
        assert kill_after_rows(output, n_rows, generator.uniform(0, 2 * SECONDS_A_BATCH))
        n_rows_before = n_rows
        n_rows = count_rows(predictions)
        assert n_rows_before < n_rows < ANSWER_COUNT
        whole_lines, _, _ = predictions.read_bytes().rpartition(b"\n")
        assert uninterrupted.startswith(whole_lines)
    assert start_process(output, seconds_a_batch=0.0).wait() == 0
    assert predictions.read_bytes() == uninterrupted
    rows = [json.loads(line) for line in uninterrupted.splitlines()]
    assert len({(row["pid"], row.get("sample", 0)) for row in rows}) == len(rows) == ANSWER_COUNT
