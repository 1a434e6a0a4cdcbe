"""Several processes: each answers its slice, one file comes out, and a part that was left over is not lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from adora_vl.endpoint import Answer
from eval.engines import AnswerEngineSettings, AnswerRequest
from eval.predictions import PredictionLog, part_path, read_predictions
from eval.ranks import Alone, Ranks, ranks, take_gpu
from eval.runner import Problem, Summary, infer


class Echo:
    """Answers with the question and the seed."""

    batch_size = 2

    def __init__(self) -> None:
        self.asked: list[str] = []

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Answer]:
        texts = [f"{request.messages[-1]['content'][-1]['text']} {request.seed}" for request in requests]
        self.asked += texts
        return [Answer(text, 3, "stop", 9) for text in texts]


@dataclass
class Thread:
    """A rank for the test: processes that meet at a barrier."""

    rank: int
    world: int
    barrier: threading.Barrier

    def meet(self, where: str) -> None:
        self.barrier.wait(30)


PROBLEMS = [Problem({"pid": f"p/{i}", "answer": "5"}, f"q{i}", 1, lambda: [Image.new("RGB", (8, 8))]) for i in range(7)]


def ask(output: Path, engine: Echo, ranks: Ranks, count: int = 7, samples: int = 2) -> Summary:
    settings = AnswerEngineSettings("m", "transformers")
    return infer(
        PROBLEMS[:count],
        output,
        settings,
        {"model": "m"},
        system_prompt=None,
        build=lambda _: engine,
        samples=samples,
        ranks=ranks,
    )


def together(output: Path, world: int) -> tuple[Summary, list[Echo]]:
    barrier, engines = threading.Barrier(world), [Echo() for _ in range(world)]
    summaries: list[Summary | None] = [None] * world

    def run(rank: int) -> None:
        summaries[rank] = ask(output, engines[rank], Thread(rank, world, barrier))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    summary = summaries[0]
    assert summary is not None
    return summary, engines


@pytest.mark.parametrize("world", [2, 3])
def test_slices_cover_everything_once_and_the_file_is_that_of_one_process(tmp_path: Path, world: int) -> None:
    ask(tmp_path / "one", Echo(), Alone())
    summary, engines = together(tmp_path / "many", world)
    assert (tmp_path / "many" / "predictions.jsonl").read_bytes() == (
        tmp_path / "one" / "predictions.jsonl"
    ).read_bytes()
    asked = [text for engine in engines for text in engine.asked]
    assert len(asked) == len(set(asked)) == 14
    assert max(len(engine.asked) for engine in engines) <= -(-14 // world)
    assert summary.asked == 14
    assert not list((tmp_path / "many").glob("*rank*"))


def test_more_processes_go_on_where_one_was_stopped(tmp_path: Path) -> None:
    ask(tmp_path / "whole", Echo(), Alone())
    ask(tmp_path / "parts", Echo(), Alone(), count=3)
    summary, engines = together(tmp_path / "parts", 2)
    assert (summary.resumed, sum(len(engine.asked) for engine in engines)) == (6, 8)
    whole, parts = (tmp_path / name / "predictions.jsonl" for name in ("whole", "parts"))
    assert parts.read_bytes() == whole.read_bytes()


def test_parts_that_killed_processes_left_are_taken_in(tmp_path: Path) -> None:
    ask(tmp_path / "whole", Echo(), Alone())
    rows = read_predictions(tmp_path / "whole" / "predictions.jsonl")
    output = tmp_path / "parts"
    ask(output, Echo(), Alone(), count=1)
    for rank, kept in ((0, rows[4:6]), (1, [rows[0], *rows[9:11]])):  # the one row that is in the file already, too
        with PredictionLog(part_path(output, rank)) as log:
            log.append(kept)
    with part_path(output, 1).open("a") as file:
        file.write('{"pid": "p/3", "torn')
    engine = Echo()
    assert ask(output, engine, Alone()).resumed == 6
    assert len(engine.asked) == 8
    assert (output / "predictions.jsonl").read_bytes() == (tmp_path / "whole" / "predictions.jsonl").read_bytes()
    assert not list(output.glob("*rank*"))


@pytest.mark.parametrize(
    ("visible", "local_rank", "taken"), [("4,5", 1, "5"), ("4,5", 0, "4"), ("GPU-a,GPU-b", 1, "GPU-b"), ("4", 1, "4")]
)
def test_each_process_takes_one_of_the_gpus_that_it_sees(
    visible: str, local_rank: int, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    take_gpu(local_rank)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == taken


def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert (ranks().rank, ranks().world) == (0, 1)
