"""The runner: nothing is asked twice, nothing is lost, and one file comes out of several processes."""

import json
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
    key,
    part_path,
    read_predictions,
)
from adora_vl.evals.inference.provenance import Fields
from adora_vl.evals.inference.ranks import ALONE, Ranks, join_ranks, take_gpu
from adora_vl.evals.inference.requests import AnswerEngine, AnswerEngineSettings, AnswerRequest
from adora_vl.evals.inference.runner import Summary, infer
from adora_vl.evals.prepared import problems as geometry3k_problems
from adora_vl.evals.records import Prediction, Problem
from adora_vl.models.load import model_hash
from adora_vl.synthetic.generate import generate
from adora_vl.utils.errors import UserError
from adora_vl.utils.launch import STARTUP_LOG
from adora_vl.utils.openai_client import Reply
from tests.support.paths import REPOSITORY
from tests.unit.evals import killed_infer

SETTINGS = AnswerEngineSettings(model="m", engine="transformers")


class Recorder:
    """An engine that answers with the question, remembers the requests, and dies when it has
    answered `dies_after`.
    """

    batch_size = 2

    def __init__(self, dies_after: int | None = None) -> None:
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
        return [
            Reply(request.messages[-1]["content"][-1]["text"], 3, "stop", 9) for request in requests
        ]


def problem(index: int) -> Problem:
    fields: Prediction = {
        "pid": f"p/{index}",
        "question": f"q{index}",
        "answer": "5",
        "choices": None,
        "metadata": {},
    }
    return Problem(fields, f"q{index}", 1, lambda: [Image.new("RGB", (8, 8))])


PROBLEMS = [problem(index) for index in range(5)]


def ask(
    output: Path,
    engine: Recorder,
    problems: Sequence[Problem] = PROBLEMS,
    fingerprint: Fields | None = None,
) -> Summary:
    return infer(
        problems,
        output,
        SETTINGS,
        fingerprint or {"model": "m"},
        system_prompt="Think.",
        build=engine.build,
    )


def pids(output: Path) -> list[str]:
    return [row["pid"] for row in read_predictions(output / "predictions.jsonl")]


def test_every_problem_gets_a_row_with_its_fields_and_its_answer(tmp_path, capfd):
    engine = Recorder()
    assert ask(tmp_path, engine).pending == 5
    assert "library" not in capfd.readouterr().out
    assert "library" in (tmp_path / STARTUP_LOG).read_text()
    rows = read_predictions(tmp_path / "predictions.jsonl")
    assert [row["response"] for row in rows] == ["q0", "q1", "q2", "q3", "q4"]
    assert rows[0] == PROBLEMS[0].fields | {
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
    with pytest.raises(RuntimeError, match="killed"):
        ask(tmp_path, Recorder(dies_after=2))
    assert pids(tmp_path) == ["p/0", "p/1"]
    engine = Recorder()
    assert ask(tmp_path, engine).resumed == 2
    assert len(engine.requests) == 3
    assert pids(tmp_path) == ["p/0", "p/1", "p/2", "p/3", "p/4"]


def test_a_finished_run_does_not_even_build_the_engine(tmp_path):
    ask(tmp_path, Recorder())
    before = (tmp_path / "predictions.jsonl").read_bytes()
    engine = Recorder()
    assert ask(tmp_path, engine).pending == 0
    assert not engine.built
    assert (tmp_path / "predictions.jsonl").read_bytes() == before


def test_a_finished_run_goes_on_with_more_samples_and_not_with_fewer(tmp_path):
    def ask_for(output: Path, samples: int) -> Summary:
        fields = {"model": "m", "samples": samples}
        engine = Recorder()
        return infer(
            PROBLEMS,
            output,
            SETTINGS,
            fields,
            system_prompt=None,
            build=engine.build,
            samples=samples,
        )

    ask_for(tmp_path / "whole", 3)
    assert ask_for(tmp_path / "grown", 1).pending == 5
    assert ask_for(tmp_path / "grown", 3).resumed == 5
    uninterrupted = read_predictions(tmp_path / "whole" / "predictions.jsonl")
    grown = read_predictions(tmp_path / "grown" / "predictions.jsonl")
    assert [key(row) for row in grown] == [key(row) for row in uninterrupted]
    before = (tmp_path / "grown" / "fingerprint.json").read_bytes()
    with pytest.raises(
        UserError, match="samples: the predictions in .* were made with 3, this run has 2"
    ):
        ask_for(tmp_path / "grown", 2)
    assert (tmp_path / "grown" / "fingerprint.json").read_bytes() == before
    assert ask_for(tmp_path / "grown", 3).pending == 0


def test_a_torn_last_line_is_asked_again(case):
    for torn in [
        '{"pid": "p/4", "answer": "5", "resp',
        '{"pid": "p/4", "answer": "5", "response": "x"}',
    ]:
        with case(torn) as folder:
            ask(folder, Recorder(), PROBLEMS[:2])
            with (folder / "predictions.jsonl").open("a") as file:
                file.write(torn)
            ask(folder, Recorder())
            rows = read_predictions(folder / "predictions.jsonl")
            assert [row["response"] for row in rows] == ["q0", "q1", "q2", "q3", "q4"]


def test_another_setting_is_refused_and_named(case):
    for name in ["model", "temperature", "min_pixels"]:
        with case(name) as folder:
            fields: Fields = {"model": "m", "temperature": 0.0, "min_pixels": None}
            ask(folder, Recorder(), PROBLEMS[:2], fields)
            before = (folder / "predictions.jsonl").read_bytes()
            engine = Recorder()
            with pytest.raises(
                UserError,
                match=f"^{name}: .* were made with {fields[name]!r}, this run has 'other'",
            ):
                ask(folder, engine, fingerprint=fields | {name: "other"})
            assert not engine.built
            assert (folder / "predictions.jsonl").read_bytes() == before


def test_a_run_that_died_before_its_first_answer_does_not_bind_the_folder(tmp_path):
    with pytest.raises(RuntimeError, match="killed"):
        ask(tmp_path, Recorder(dies_after=0), fingerprint={"max_pixels": 500})
    ask(tmp_path, Recorder(), fingerprint={"max_pixels": 784})
    assert json.loads((tmp_path / "fingerprint.json").read_text())["fields"] == {"max_pixels": 784}


def test_what_would_mix_or_lose_answers_is_refused(tmp_path):
    ask(tmp_path, Recorder())
    with pytest.raises(
        UserError, match=r"limit: .* already has 5 predictions and this run asks for 2"
    ):
        ask(tmp_path, Recorder(), PROBLEMS[:2])
    with (
        PredictionLog(tmp_path / "predictions.jsonl"),
        pytest.raises(
            UserError, match=f"process {os.getpid()} .* is writing|another process is writing"
        ),
    ):
        ask(tmp_path, Recorder())
    (tmp_path / "fingerprint.json").unlink()
    with pytest.raises(UserError, match="no fingerprint"):
        ask(tmp_path, Recorder())


def test_broken_images_are_recorded_and_the_others_answered(tmp_path):
    rows = list(generate(3, split="test", seed=1))
    rows[1]["images"] = [{"bytes": b"no picture", "path": None}]
    write_split(rows, tmp_path / "data", "test")
    engine = Recorder()
    problems = geometry3k_problems(load_split(tmp_path / "data", "test"))
    summary = ask(tmp_path / "out", engine, problems)
    predictions = read_predictions(tmp_path / "out" / "predictions.jsonl")
    assert summary.image_failed == 1
    assert [row["finish_reason"] for row in predictions] == ["stop", IMAGE_FAILED, "stop"]
    assert "UnreadableImageError" in predictions[1]["error"]
    assert [row["response"] for row in predictions] == [rows[0]["problem"], "", rows[2]["problem"]]
    assert [request.images[0].tobytes() for request in engine.requests] == [
        rows[0]["images"][0].tobytes(),
        rows[2]["images"][0].tobytes(),
    ]
    assert predictions[0]["metadata"]["family"] == rows[0]["meta"]["family"]
    assert "solution" not in predictions[0]["metadata"]


def test_new_weights_or_other_data_in_the_same_folder_are_another_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(9 * 1024 * 1024)
    (tmp_path / "model.safetensors").write_bytes(weights)
    before = model_hash(str(tmp_path))
    (tmp_path / "README.md").write_text("says nothing")
    assert model_hash(str(tmp_path)) == before
    weights[200_000] = 1  # one of a tensor as small as a projector's bias
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert model_hash(str(tmp_path)) != before
    hashes = []
    for seed in (1, 1, 2):
        write_split(generate(2, split="test", seed=seed), tmp_path, "test")
        hashes.append(data_hash(tmp_path, "test"))
    assert hashes[0] == hashes[1] != hashes[2]


class Echo:
    """Answers with the question and the seed."""

    batch_size = 2

    def __init__(self) -> None:
        self.asked: list[str] = []

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
        texts = [
            f"{request.messages[-1]['content'][-1]['text']} {request.seed}" for request in requests
        ]
        self.asked += texts
        return [Reply(text, 3, "stop", 9) for text in texts]


class Thread(Ranks):
    """A rank for the test: threads that meet at a barrier, their store."""

    def barrier(self, where: str) -> None:
        self.store.wait(30)


SEVEN = [problem(index) for index in range(7)]


def ask_as(output: Path, engine: Echo, ranks: Ranks, count: int = 7, samples: int = 2) -> Summary:
    return infer(
        SEVEN[:count],
        output,
        SETTINGS,
        {"model": "m"},
        system_prompt=None,
        build=lambda _: engine,
        samples=samples,
        ranks=ranks,
    )


def together(output: Path, world: int) -> tuple[Summary, list[Echo]]:
    barrier = threading.Barrier(world)
    engines = [Echo() for _ in range(world)]
    summaries: list[Summary | None] = [None] * world

    def run(rank: int) -> None:
        summaries[rank] = ask_as(output, engines[rank], Thread(rank, world, barrier))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    summary = summaries[0]
    assert summary is not None
    return summary, engines


def test_slices_cover_everything_once_and_the_file_is_that_of_one_process(case):
    for world in [2, 3]:
        with case(world) as folder:
            ask_as(folder / "one", Echo(), ALONE)
            summary, engines = together(folder / "many", world)
            of_one_process = (folder / "one" / "predictions.jsonl").read_bytes()
            of_many = (folder / "many" / "predictions.jsonl").read_bytes()
            assert of_one_process == of_many
            texts = [text for engine in engines for text in engine.asked]
            assert len(texts) == len(set(texts)) == 14
            assert max(len(engine.asked) for engine in engines) <= -(-14 // world)
            assert summary.pending == 14
            assert not list((folder / "many").glob("*rank*"))


def test_more_processes_go_on_where_one_was_stopped(tmp_path):
    ask_as(tmp_path / "whole", Echo(), ALONE)
    ask_as(tmp_path / "parts", Echo(), ALONE, count=3)
    summary, engines = together(tmp_path / "parts", 2)
    assert summary.resumed == 6
    assert sum(len(engine.asked) for engine in engines) == 8
    uninterrupted = tmp_path / "whole" / "predictions.jsonl"
    parts = tmp_path / "parts" / "predictions.jsonl"
    assert parts.read_bytes() == uninterrupted.read_bytes()


def test_parts_that_killed_processes_left_are_taken_in(tmp_path):
    ask_as(tmp_path / "whole", Echo(), ALONE)
    rows = read_predictions(tmp_path / "whole" / "predictions.jsonl")
    output = tmp_path / "parts"
    ask_as(output, Echo(), ALONE, count=1)
    # the one row that is in the file already, too
    for rank, written in (
        (0, rows[4:6]),
        (1, [rows[0], *rows[9:11]]),
    ):
        with PredictionLog(part_path(output, rank)) as log:
            log.append(written)
    with part_path(output, 1).open("a") as file:
        file.write('{"pid": "p/3", "torn')
    engine = Echo()
    assert ask_as(output, engine, ALONE).resumed == 6
    assert len(engine.asked) == 8
    assert (output / "predictions.jsonl").read_bytes() == (
        tmp_path / "whole" / "predictions.jsonl"
    ).read_bytes()
    assert not list(output.glob("*rank*"))


def test_each_process_takes_one_of_the_gpus_that_it_sees(monkeypatch, subtests):
    for visible, local_rank, gpu in [
        ("4,5", 1, "5"),
        ("4,5", 0, "4"),
        ("GPU-a,GPU-b", 1, "GPU-b"),
        ("4", 1, "4"),
    ]:
        with subtests.test(f"{visible} {local_rank} {gpu}"), monkeypatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", visible)
            take_gpu(local_rank)
            assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join_ranks().rank == 0
    assert join_ranks().world == 1


ANSWERS = killed_infer.PROBLEMS * killed_infer.SAMPLES
SECONDS_A_BATCH = 0.05


def start(output: Path, seconds_a_batch: float) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "tests.unit.evals.killed_infer",
        str(output),
        str(seconds_a_batch),
    ]
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)


def rows_there(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def killed_beyond(output: Path, rows: int, extra_s: float) -> bool:
    """Start, kill -9 a moment after more than `rows` rows are there; whether it was still running."""
    process = start(output, SECONDS_A_BATCH)
    while rows_there(output / "predictions.jsonl") <= rows and process.poll() is None:
        time.sleep(0.002)  # polling a process, not waiting for luck
    time.sleep(extra_s)
    running = process.poll() is None
    process.kill()
    process.wait()
    return running


@pytest.mark.slow
def test_three_kills_leave_the_file_of_an_uninterrupted_run(tmp_path):
    killed_infer.main(tmp_path / "whole", 0.0)
    uninterrupted = (tmp_path / "whole" / "predictions.jsonl").read_bytes()
    draw = random.Random()  # another moment each time
    parts = tmp_path / "parts"
    row_count = 0
    for _ in range(3):
        assert killed_beyond(parts, row_count, draw.uniform(0, 2 * SECONDS_A_BATCH))
        before = row_count
        row_count = rows_there(parts / "predictions.jsonl")
        assert before < row_count < ANSWERS
        assert uninterrupted.startswith(
            (parts / "predictions.jsonl").read_bytes().rpartition(b"\n")[0]
        )
    assert start(parts, 0.0).wait() == 0
    assert (parts / "predictions.jsonl").read_bytes() == uninterrupted
    rows = [json.loads(line) for line in uninterrupted.splitlines()]
    assert len({(row["pid"], row.get("sample", 0)) for row in rows}) == len(rows) == ANSWERS
    assert sum(row["finish_reason"] == "image_failed" for row in rows) == ANSWERS // 10
