"""The runner: nothing is asked twice, nothing is lost but a batch, and no file mixes two models or settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from adora_vl.endpoint import Answer
from adora_vl.errors import UserError
from data_prep.storage import load_split, write_split
from data_prep.synthetic.generate import generate
from eval.engines import AnswerEngine, AnswerEngineSettings, AnswerRequest
from eval.fingerprint import Fields, data_hash, model_hash
from eval.geometry3k.benchmark import problems as geometry3k_problems
from eval.predictions import IMAGE_FAILED, Prediction, PredictionLog, read_predictions
from eval.runner import Problem, Summary, infer

SETTINGS = AnswerEngineSettings(model="m", engine="transformers")


class Recorder:
    """An engine that answers with the question, remembers the requests, and dies when it has answered `dies_after`."""

    batch_size = 2

    def __init__(self, dies_after: int | None = None) -> None:
        self.requests: list[AnswerRequest] = []
        self.built: list[AnswerEngineSettings] = []
        self._dies_after = dies_after

    def build(self, settings: AnswerEngineSettings) -> AnswerEngine:
        self.built.append(settings)
        return self

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Answer]:
        if self._dies_after is not None and len(self.requests) >= self._dies_after:
            raise RuntimeError("killed")
        self.requests += requests
        return [Answer(request.messages[-1]["content"][-1]["text"], 3, "stop", 9) for request in requests]


def problem(index: int) -> Problem:
    fields: Prediction = {"pid": f"p/{index}", "question": f"q{index}", "answer": "5", "choices": None, "metadata": {}}
    return Problem(fields, f"q{index}", 1, lambda: [Image.new("RGB", (8, 8))])


PROBLEMS = [problem(index) for index in range(5)]


def ask(
    output: Path, engine: Recorder, problems: Sequence[Problem] = PROBLEMS, fingerprint: Fields | None = None
) -> Summary:
    return infer(problems, output, SETTINGS, fingerprint or {"model": "m"}, system_prompt="Think.", build=engine.build)


def pids(output: Path) -> list[str]:
    return [row["pid"] for row in read_predictions(output / "predictions.jsonl")]


def test_every_problem_gets_a_row_with_its_fields_and_its_answer(tmp_path: Path) -> None:
    engine = Recorder()
    assert ask(tmp_path, engine).asked == 5
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


def test_a_killed_run_keeps_its_batches_and_the_next_asks_only_the_rest(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        ask(tmp_path, Recorder(dies_after=2))
    assert pids(tmp_path) == ["p/0", "p/1"]
    engine = Recorder()
    assert (ask(tmp_path, engine).resumed, len(engine.requests)) == (2, 3)
    assert pids(tmp_path) == ["p/0", "p/1", "p/2", "p/3", "p/4"]


def test_a_finished_run_does_not_even_build_the_engine(tmp_path: Path) -> None:
    ask(tmp_path, Recorder())
    before = (tmp_path / "predictions.jsonl").read_bytes()
    engine = Recorder()
    assert ask(tmp_path, engine).asked == 0
    assert not engine.built
    assert (tmp_path / "predictions.jsonl").read_bytes() == before


def test_a_resumed_run_samples_with_the_seeds_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, rest = Recorder(), Recorder()
    ask(tmp_path / "whole", whole)
    ask(tmp_path / "parts", Recorder(), PROBLEMS[:3])
    ask(tmp_path / "parts", rest)
    seeds = [request.seed for request in whole.requests]
    assert [request.seed for request in rest.requests] == seeds[3:]
    assert len(set(seeds)) == 5


@pytest.mark.parametrize(
    "torn", ['{"pid": "p/4", "answer": "5", "resp', '{"pid": "p/4", "answer": "5", "response": "x"}']
)
def test_a_torn_last_line_is_asked_again(tmp_path: Path, torn: str) -> None:
    ask(tmp_path, Recorder(), PROBLEMS[:2])
    with (tmp_path / "predictions.jsonl").open("a") as file:
        file.write(torn)
    ask(tmp_path, Recorder())
    rows = read_predictions(tmp_path / "predictions.jsonl")
    assert [row["response"] for row in rows] == ["q0", "q1", "q2", "q3", "q4"]


@pytest.mark.parametrize("name", ["model", "temperature", "min_pixels"])
def test_another_setting_is_refused_and_named(tmp_path: Path, name: str) -> None:
    fields: Fields = {"model": "m", "temperature": 0.0, "min_pixels": None}
    ask(tmp_path, Recorder(), PROBLEMS[:2], fields)
    before = (tmp_path / "predictions.jsonl").read_bytes()
    engine = Recorder()
    with pytest.raises(UserError, match=f"^{name}: .* were made with {fields[name]!r}, this run has 'other'"):
        ask(tmp_path, engine, fingerprint=fields | {name: "other"})
    assert not engine.built
    assert (tmp_path / "predictions.jsonl").read_bytes() == before


def test_a_run_that_died_before_its_first_answer_does_not_bind_the_folder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        ask(tmp_path, Recorder(dies_after=0), fingerprint={"max_pixels": 500})
    ask(tmp_path, Recorder(), fingerprint={"max_pixels": 784})
    assert json.loads((tmp_path / "fingerprint.json").read_text())["fields"] == {"max_pixels": 784}


def test_predictions_without_a_fingerprint_are_not_extended(tmp_path: Path) -> None:
    ask(tmp_path, Recorder(), PROBLEMS[:2])
    (tmp_path / "fingerprint.json").unlink()
    with pytest.raises(UserError, match="no fingerprint"):
        ask(tmp_path, Recorder())


def test_a_smaller_limit_than_what_is_there_is_refused(tmp_path: Path) -> None:
    ask(tmp_path, Recorder())
    with pytest.raises(UserError, match=r"limit: .* already has 5 predictions and this run asks for 2"):
        ask(tmp_path, Recorder(), PROBLEMS[:2])


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with PredictionLog(tmp_path / "predictions.jsonl"), pytest.raises(UserError, match="another process"):
        ask(tmp_path, Recorder())


def test_an_id_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'p/0' occurs twice"):
        ask(tmp_path, Recorder(), [PROBLEMS[0], PROBLEMS[0]])


def test_broken_images_are_recorded_and_the_others_answered(tmp_path: Path) -> None:
    rows = list(generate(3, split="test", seed=1))
    rows[1]["images"] = [{"bytes": b"no picture", "path": None}]
    write_split(rows, tmp_path / "data", "test")
    engine = Recorder()
    problems = geometry3k_problems(load_split(tmp_path / "data", "test"))
    summary = ask(tmp_path / "out", engine, problems)
    predictions = read_predictions(tmp_path / "out" / "predictions.jsonl")
    assert summary.image_failed == 1
    assert [row["finish_reason"] for row in predictions] == ["stop", IMAGE_FAILED, "stop"]
    assert "UnidentifiedImageError" in predictions[1]["error"]
    assert [row["response"] for row in predictions] == [rows[0]["problem"], "", rows[2]["problem"]]
    assert [request.images[0].tobytes() for request in engine.requests] == [
        rows[0]["images"][0].tobytes(),
        rows[2]["images"][0].tobytes(),
    ]
    assert predictions[0]["metadata"]["family"] == rows[0]["meta"]["family"]
    assert "solution" not in predictions[0]["metadata"]


def test_new_weights_in_the_same_folder_are_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(9 * 1024 * 1024)
    (tmp_path / "model.safetensors").write_bytes(weights)
    before = model_hash(str(tmp_path))
    (tmp_path / "README.md").write_text("says nothing")
    assert model_hash(str(tmp_path)) == before
    weights[5_000_000:6_000_000] = b"\1" * 1_000_000
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert model_hash(str(tmp_path)) != before


def test_other_data_in_the_same_folder_is_other_data(tmp_path: Path) -> None:
    write_split(generate(2, split="test", seed=1), tmp_path, "test")
    before = data_hash(tmp_path, "test")
    assert data_hash(tmp_path, "test") == before
    write_split(generate(2, split="test", seed=2), tmp_path, "test")
    assert data_hash(tmp_path, "test") != before
