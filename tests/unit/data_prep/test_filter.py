"""The filter by pass rate: what it keeps, that it goes on where it was stopped, and what it
refuses.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from adora_vl.data.dataset import load_split, read_manifest
from adora_vl.evals.inference.requests import AnswerEngineSettings, AnswerRequest
from adora_vl.utils.errors import UserError
from adora_vl.utils.openai_client import Reply
from data_prep import filter as filtering
from data_prep.cli import main
from data_prep.filter import (
    AnswerTally,
    PassRateRange,
    count_right_answers,
    filter_dataset,
    samples_folder,
)

SAMPLES_PER_ROW = 4
PASS_RATES = [0.0, 0.25, 0.5, 0.75, 1.0, 0.5]  # of the six training rows


@pytest.fixture(scope="module")
def drawn_data(tmp_path_factory):
    """Return a folder of drawn problems: six in the split `train`, three in `test`."""
    folder = tmp_path_factory.mktemp("data") / "drawn"
    assert main(["synthetic", "--output", str(folder), "--rows", "6", "--test-rows", "3"]) == 0
    return folder


class SolvingModel:
    """A model that answers each training row rightly in its share of the samples.

    It raises at the first batch after `dies_after` answers.
    """

    batch_size = 3

    def __init__(self, drawn_data: Path, dies_after: int | None = None) -> None:
        rows = load_split(drawn_data, "train")
        # the right answer and the pass rate of each problem, by its text and its picture
        self.gold_and_pass_rate = {
            row["problem"] + str(row["images"][0].tobytes()): (row["answer"], rate)
            for row, rate in zip(rows, PASS_RATES, strict=True)
        }
        self.asked: Counter[str] = Counter()
        self.dies_after = dies_after
        self.settings: AnswerEngineSettings | None = None

    def build(self, settings: AnswerEngineSettings) -> SolvingModel:
        self.settings = settings
        return self

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
        """Answer each request rightly in its first samples, as many as its pass rate says."""
        if self.dies_after is not None and self.asked.total() >= self.dies_after:
            raise RuntimeError("killed")
        answers = []
        for request in requests:
            question = request.messages[-1]["content"][-1]["text"] + str(
                request.images[0].tobytes()
            )
            gold, pass_rate = self.gold_and_pass_rate[question]
            # The first samples are right, and the others wrong.
            is_right = self.asked[question] < SAMPLES_PER_ROW * pass_rate
            self.asked[question] += 1
            response = rf"It is \boxed{{{gold}}}" if is_right else r"\boxed{-1}"
            answers.append(Reply(response, n_tokens=5, finish_reason="stop", n_prompt_tokens=9))
        return answers


@pytest.fixture
def solving_model(drawn_data, monkeypatch):
    """A model that solves the training rows with `PASS_RATES`, and is asked by the filter."""
    solver = SolvingModel(drawn_data)
    sample = filtering.sample_answers
    monkeypatch.setattr(
        filtering, "sample_answers", lambda *a, **k: sample(*a, **k, build=solver.build)
    )
    return solver


def run_filter(drawn_data, output, *arguments):
    """Run the command `filter`, with four samples of the model `tiny`, and return its exit code."""
    sampling = (
        ["--model", "tiny", "--samples", str(SAMPLES_PER_ROW)]
        if "--predictions" not in arguments
        else []
    )
    return main(
        ["filter", "--input", str(drawn_data), "--output", str(output), *sampling, *arguments]
    )


def read_split_rows(folder, split="train"):
    """Return the rows of a split of prepared data."""
    return load_split(folder, split).to_list()


def test_it_keeps_what_is_solved_sometimes_and_copies_the_other_splits(
    drawn_data, solving_model, tmp_path, capsys
):
    """The filter keeps rows whose pass rate is in the range, and copies other splits as they are.

    Four of the six rows have a pass rate from 0.25 to 0.75.
    """
    output = tmp_path / "hard"
    assert run_filter(drawn_data, output, "--keep", "0.25:0.75") == 0
    solved_sometimes = [
        row
        for row, rate in zip(read_split_rows(drawn_data), PASS_RATES, strict=True)
        if 0.25 <= rate <= 0.75
    ]
    assert read_split_rows(output) == solved_sometimes, (
        "whole rows, in their order, images byte by byte"
    )
    assert len(solved_sometimes) == 4, "whole rows, in their order, images byte by byte"
    assert read_split_rows(output, "test") == read_split_rows(drawn_data, "test")
    assert (
        "6 problems: 4 kept with a pass rate of 0.25:0.75, 1 below and 1 above"
        in capsys.readouterr().out
    )
    written = [json.loads(line) for line in (output / "pass_rates.jsonl").read_text().splitlines()]
    assert [(row["right"], row["answers"]) for row in written] == [
        (round(4 * rate), 4) for rate in PASS_RATES
    ]
    manifest = read_manifest(output)
    assert manifest is not None
    assert manifest["filtered"]["never_solved"] == manifest["filtered"]["always_solved"] == 1
    assert solving_model.settings.temperature == 1.0
    assert set(solving_model.asked.values()) == {4}  # samples of each problem
    assert main(["inspect", str(output), "--text-only"]) == 0


def test_another_keep_asks_nothing_again_and_another_dataset_is_not_replaced(
    drawn_data, solving_model, tmp_path, capsys
):
    """Other bounds take the stored answers, but need `--overwrite` to replace the earlier output.

    Another temperature is refused, since its answers would be others.
    """
    output = tmp_path / "hard"
    assert run_filter(drawn_data, output) == 0
    assert len(read_split_rows(output)) == 4  # with the default, 0.1:0.9
    assert run_filter(drawn_data, output, "--keep", "0:0.5") == 2
    assert "another prepared dataset (keep '0.1:0.9', this one '0:0.5')" in capsys.readouterr().err
    assert run_filter(drawn_data, output, "--keep", "0:0.5", "--overwrite") == 0
    assert len(read_split_rows(output)) == 4
    assert run_filter(drawn_data, output, "--keep", "0:0", "--overwrite") == 0
    assert len(read_split_rows(output)) == 1
    assert run_filter(drawn_data, output, "--temperature", "0.7", "--overwrite") == 2
    assert "temperature: the predictions in" in capsys.readouterr().err, (
        "answers of another model are not mixed in"
    )
    assert solving_model.asked.total() == 6 * 4, "no problem was asked again"


def test_a_run_that_was_killed_asks_for_the_rest_alone(
    drawn_data, solving_model, tmp_path, monkeypatch
):
    """A filter that was killed asks only for the answers that it lacks when it starts again.

    Six problems are asked four times each; 12 of the 24 answers are kept after the kill.
    """
    output = tmp_path / "hard"
    solving_model.dies_after = 10
    with pytest.raises(RuntimeError, match="killed"):
        run_filter(drawn_data, output)
    assert not output.exists()
    assert solving_model.asked.total() == 12  # four batches of three
    solving_model.dies_after = None
    assert run_filter(drawn_data, output) == 0
    assert solving_model.asked.total() == 6 * 4


def test_questions_are_asked_and_answers_read_as_in_the_training(
    drawn_data, solving_model, tmp_path, monkeypatch, capsys
):
    """The filter asks with the prompts of its options, or with those of the model's training.

    The model answers in `<answer>` tags here, for which this system prompt asks, and is graded by
    these.
    """
    generate = solving_model.generate
    prompts: list[list] = []

    def generate_with_tags(requests):
        prompts.extend(
            [message["role"], message["content"]]
            for request in requests
            for message in request.messages
        )
        for request in requests:
            part = request.messages[-1]["content"][-1]
            part["text"] = part["text"].removeprefix("Look: ")
        answers = generate(requests)
        return [
            replace(answer, text=re.sub(r"\\boxed\{(.*)\}", r"<answer>\1</answer>", answer.text))
            for answer in answers
        ]

    monkeypatch.setattr(solving_model, "generate", generate_with_tags)
    arguments = ["--prompt", "Look: {problem}", "--system-prompt", "Put it in <answer> </answer>."]
    assert run_filter(drawn_data, tmp_path / "given", *arguments) == 0
    assert ["system", [{"type": "text", "text": "Put it in <answer> </answer>."}]] in prompts or [
        "system",
        "Put it in <answer> </answer>.",
    ] in prompts
    assert solving_model.asked.total() == 24, "0.1:0.9, as with boxes"
    assert len(read_split_rows(tmp_path / "given")) == 4, "0.1:0.9, as with boxes"
    manifest = read_manifest(tmp_path / "given")
    assert manifest is not None
    assert manifest["arguments"]["prompt"] == "Look: {problem}"
    assert manifest["arguments"]["system_prompt"] == arguments[3]
    assert run_filter(drawn_data, tmp_path / "given", *arguments[2:], "--overwrite") == 2
    assert "prompt: the predictions in" in capsys.readouterr().err, "of another prompt"
    assert run_filter(drawn_data, tmp_path / "typo", "--prompt", "{problm}") == 2
    assert "adora_prompt: 'problm' is no column" in capsys.readouterr().err
    trained = {
        "adora_prompt": "Look: {problem}",
        "adora_system_prompt": "Put it in <answer> </answer>.",
    }
    monkeypatch.setattr(
        "adora_vl.evals.inference.provenance.read_training_config", lambda model: trained
    )
    solving_model.asked.clear()
    assert run_filter(drawn_data, tmp_path / "trained") == 0
    assert read_split_rows(tmp_path / "trained") == read_split_rows(tmp_path / "given")


def test_answers_of_the_evaluation_can_be_used(drawn_data, solving_model, tmp_path):
    """`--predictions` filters by a file of answers, as by the model that gave them."""
    first = tmp_path / "first"
    second = tmp_path / "second"
    assert run_filter(drawn_data, first) == 0
    file = samples_folder(first) / "predictions.jsonl"
    fields = json.loads(file.with_name("fingerprint.json").read_text())["fields"]
    assert fields["prompt"] is None, (
        "there are no choices, so the default template asks the problem alone"
    )
    assert run_filter(drawn_data, second, "--predictions", str(file)) == 0
    assert read_split_rows(second) == read_split_rows(first)
    assert solving_model.asked.total() == 24


def test_answers_that_are_not_those_of_the_split_are_refused(drawn_data, solving_model, tmp_path):
    """Stored answers that lack a problem or a sample, or are of another split, are refused."""
    assert run_filter(drawn_data, tmp_path / "hard") == 0
    lines = (samples_folder(tmp_path / "hard") / "predictions.jsonl").read_text().splitlines()
    predictions_by_message = {
        "has no answer.*1 of 6 rows have none": lines[4:],  # of the first problem
        "has 3 answers to some problems and 4 to others": lines[1:],
        "is not in the split 'train'": [*lines, lines[0].replace('"pid": "', '"pid": "another/')],
    }
    for number, (message, predictions) in enumerate(predictions_by_message.items()):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("\n".join(predictions) + "\n")
        with pytest.raises(UserError) as caught:
            filter_dataset(drawn_data, tmp_path / "other", file, PassRateRange(0.1, 0.9))
        assert re.search(message, str(caught.value)), str(caught.value)


def test_rates_at_the_edges_by_hand():
    """Both ends of a range of pass rates are in it, whatever the rounding of a float.

    An answer counts as right in its box alone.
    """
    assert 3 / 10 in PassRateRange(0.3, 0.9)
    assert 0.1 + 0.2 in PassRateRange(0.0, 0.3)
    assert 0.125 in PassRateRange(0.1, 0.9)
    assert 0.0 not in PassRateRange(0.1, 0.9)
    assert 1.0 not in PassRateRange(0.1, 0.9)
    assert 1.0 in PassRateRange(0.0, 1.0)
    assert AnswerTally(right=3, answers=8).rate == 0.375
    row = {"pid": "a", "answer": "5", "response": r"\boxed{5}"}
    assert count_right_answers([row, {**row, "sample": 1, "response": "5"}]) == {
        "a": AnswerTally(right=1, answers=2)
    }, "as in training: the box counts"


def test_what_does_not_fit_is_one_line(drawn_data, solving_model, capsys, case_folder):
    """Options that do not fit are refused with one line, and nothing is written.

    Each case: options of the command, and a part of the error.
    """
    cases = [
        (["--keep", "0.5"], "'0.5' has no colon"),
        (["--keep", "0.9:0.1"], "write 0.1:0.9"),
        (["--keep", "0.1:2"], "2"),
        (["--split", "validation"], "has no 'validation'; it has train, test"),
        (
            ["--keep", "0.3:0.4"],
            "leaves no row; the pass rates are 0 of 1, 0.25 of 1, 0.5 of 2, 0.75 of 1, 1 of 1",
        ),
        (
            ["--predictions", "x.jsonl", "--model", "tiny"],
            "give --model, to sample answers with, or --predictions",
        ),
        (
            ["--predictions", "x.jsonl", "--prompt", "{problem}"],
            "prompt: --prompt is for sampling, and --predictions",
        ),
        (
            ["--predictions", "x.jsonl", "--system-prompt", "Box it."],
            "--system-prompt is for sampling, and",
        ),
        (["--min-pixels", "9000", "--max-pixels", "8000"], "min_pixels: 9000 is over"),
        (["--predictions", "x.jsonl"], "predictions: no file 'x.jsonl'"),
    ]
    for words, message in cases:
        with case_folder(f"{words!r:.80}") as folder:
            assert run_filter(drawn_data, folder / "out", *words) == 2
            error = capsys.readouterr().err.strip().splitlines()[-1]
            assert message in error
            assert not (folder / "out").exists()


def test_the_dataset_itself_and_what_we_did_not_make_are_left_alone(
    drawn_data, solving_model, tmp_path, capsys
):
    """The filter refuses to write over its input, and an input that is no prepared data set."""
    assert run_filter(drawn_data, drawn_data) == 2
    assert "is the dataset to filter" in capsys.readouterr().err
    assert run_filter(tmp_path, tmp_path / "out") == 2
    assert "not a folder made by" in capsys.readouterr().err
    assert not solving_model.asked
