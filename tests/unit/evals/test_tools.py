"""Evaluation with tools works as a rollout does, and its answers are those of its tools alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adora_vl.data.dataset import write_split
from adora_vl.data.prompts import SYSTEM_PROMPT, conversation_with_images
from adora_vl.evals.asking import check_options
from adora_vl.evals.inference.chat import ChatProcessor
from adora_vl.evals.inference.local import LocalEngine
from adora_vl.evals.inference.predictions import read_predictions
from adora_vl.evals.inference.requests import AnswerRequest
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.rollout.rollouts import FinishReason, SamplingRequest, SamplingResult
from adora_vl.synthetic.generate import generate
from adora_vl.utils.openai_client import Reply
from eval.command import main, parse_command
from eval.compare import main as compare
from eval.geometry3k import BENCHMARK

ZOOM_WORDS = ["--tools", "zoom", "--max-tool-calling-iterations", "2"]
SERVER_WORDS = ["--engine", "openai", "--base-url", "http://127.0.0.1:1/v1"]
LINE_CALL = (
    '<tool_call>{"name": "line", "arguments": {"x1": 1, "y1": 1, "x2": 20, "y2": 20}}</tool_call>'
)


def run_words(zoom_runs: Path, *options: str) -> list[str]:
    """The words of a `run` of a folder's problems, by a tiny model that has learned to zoom."""
    arguments = ["run", "--model", "tiny_zoom", "--data", str(zoom_runs / "data")]
    arguments += ["--engine", "transformers", "--max-tokens", "200"]
    arguments += ["--min-pixels", "3136", "--max-pixels", "3136"]
    return [*arguments, "--prompt", "none", "--system-prompt", "Look with zoom.", *options]


@pytest.fixture(scope="module")
def zoom_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a tiny model with its tool, in `with`, and without it, in `without`.

    The problems are numbers that only a model that zooms can read.
    """
    root = tmp_path_factory.mktemp("zoom")
    rows = list(generate(16, split="test", size=448, families=("corners",)))
    write_split(rows, root / "data", "test")
    for name, options in (("with", ZOOM_WORDS), ("without", [])):
        assert main(BENCHMARK, run_words(root, *options, "--output", str(root / name))) == 0
    return root


def test_with_its_tool_the_start_reads_what_it_cannot_see(zoom_runs, capsys):
    """The tiny model is right more often with its tool than without it.

    A score with tools has groups by whether one was called (`called`), and a comparison says that
    the tool helps. The model calls it on at least 14 of the 16 problems.
    """
    score_with = json.loads((zoom_runs / "with" / "score.json").read_text())
    score_without = json.loads((zoom_runs / "without" / "score.json").read_text())
    assert score_with["accuracy"] > 0.8
    assert score_without["accuracy"] <= 0.8
    called_cell = score_with["groups"]["called"]["yes"]
    assert called_cell["total"] >= 14
    assert called_cell["accuracy"] > 0.9
    assert "called" not in score_without["groups"]
    first_row = read_predictions(zoom_runs / "with" / "predictions.jsonl")[0]
    [call] = first_row["calls"]
    assert call["name"] == "zoom"
    assert call["text"] == "<image>"
    assert call["failed"] is False
    assert "x1" in call["arguments"]
    assert "<tool_call>" not in first_row["response"]
    assert r"\boxed" in first_row["response"]
    assert compare([str(zoom_runs / "without"), str(zoom_runs / "with")]) == 0
    text = capsys.readouterr().out
    assert "having zoom helps" in text
    assert "warning" not in text


@pytest.mark.parametrize(
    ("options", "option_name"),
    [
        ([], "tools"),
        (["--tools", "zoom", "line"], "tools"),
        (["--tools", "zoom"], "max_tool_calling_iterations"),
        ([*ZOOM_WORDS, "--tool-options", "{images: 3}"], "tool_options"),
    ],
    ids=["none", "another", "more turns", "options"],
)
def test_answers_with_other_tools_are_not_mixed(zoom_runs, capsys, options, option_name):
    """A run with tools is not resumed with others, and the error names the option."""
    assert main(BENCHMARK, run_words(zoom_runs, *options, "--output", str(zoom_runs / "with"))) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {option_name}: the predictions in ")
    assert "use another --output" in error


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([*SERVER_WORDS, "--tools", "zoom"], "tools: --engine openai answers no calls"),
        (["--tools", "zom"], "tools: 'zom' is none of zoom"),
        (
            ["--tools", "zoom", "--tool-options", "{seconds: 0}"],
            "tool_options.seconds: 0 is not a number of at least 0.001",
        ),
        (["--tools", "zoom", "--max-tokens", "20"], "max_tokens: 20 leaves no room for an answer"),
        (["--system-prompt", "Look.<|im_end|>"], "system_prompt: it has the model's own token"),
    ],
    ids=["a server", "unknown", "option", "no room", "a token"],
)
def test_what_does_not_work_is_one_line(zoom_runs, capsys, options, line):
    """Options that cannot work are refused in one line, which names the option."""
    arguments = ["infer", "--model", "tiny_zoom", "--engine", "transformers"]
    arguments += ["--data", str(zoom_runs / "data"), "--output", str(zoom_runs / "none")]
    assert main(BENCHMARK, [*arguments, *options]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {line}")


def test_tools_of_a_file_beside_the_config(tmp_path, monkeypatch):
    """A tool of a file beside the config is in the fingerprint and in the system prompt.

    The file `own.py` has the tool `two`.
    """
    # Later tests must not look for their files beside this config.
    monkeypatch.setattr("adora_vl.utils.own_files._config_folders", [])
    (tmp_path / "own.py").write_text('def two() -> int:\n    """Two."""\n    return 2\n')
    (tmp_path / "c.yaml").write_text("tools: [line, own.py:two]\ntool_options: {images: 3}\n")
    arguments = [
        "infer",
        "--model",
        str(PRETRAINED_FOLDER),
        "--data",
        "D",
        "--output",
        "O",
        "--config",
        str(tmp_path / "c.yaml"),
    ]
    settings = check_options(
        parse_command([*arguments, "--engine", "transformers"], BENCHMARK).ask_options
    )
    fingerprint = settings.fingerprint_fields
    assert fingerprint["tools"] == ["line", "two"]
    assert fingerprint["tool_options"]["images"] == 3
    assert [*fingerprint["tool_files"]] == ["own.py"]
    assert '"name": "two"' in str(settings.system_prompt)
    assert str(settings.system_prompt).startswith(f"{SYSTEM_PROMPT}\n\n")


class ScriptedEngine(LocalEngine):
    """An engine that says what it is told to, turn by turn, and remembers what it was asked."""

    def __init__(self, settings: Any, *turns: str) -> None:
        chat = ChatProcessor(str(PRETRAINED_FOLDER))
        super().__init__(settings, chat, default_batch_size=8, sample=self._sample_turn)
        self.script = iter(turns)
        self.requests: list[SamplingRequest] = []

    def _sample_turn(self, requests: Sequence[SamplingRequest]) -> list[SamplingResult]:
        self.requests += requests
        tokenizer = self.chat.processor.tokenizer
        results = []
        for _ in requests:
            turn_ids = tokenizer(next(self.script))["input_ids"]
            tokens = [*turn_ids, tokenizer.eos_token_id]
            result = SamplingResult(
                tokens=tokens, logps=[None] * len(tokens), finish_reason=FinishReason.STOP
            )
            results.append(result)
        return results


@pytest.mark.parametrize(
    ("turns", "max_tokens", "reason", "n_calls"),
    [
        ((LINE_CALL, "It is 7."), 900, "stop", 1),
        ((LINE_CALL, LINE_CALL), 900, "calls", 1),  # only one call is answered
        ((LINE_CALL,), 120, "room", 1),  # its answer, a picture, has no room in 120 tokens
        (("It is 7.",), 900, "stop", 0),
    ],
)
def test_a_conversation_is_that_of_a_rollout(turns, max_tokens, reason, n_calls):
    """A conversation with a tool is sampled turn by turn, and its last turn is the answer.

    Each turn goes on from the tokens and pictures before it, with a seed of its own.
    """
    arguments = ["infer", "--model", str(PRETRAINED_FOLDER), "--data", "D", "--output", "O"]
    arguments += ["--engine", "transformers", "--max-tokens", str(max_tokens)]
    arguments += ["--tools", "line", "--max-tool-calling-iterations", "1"]
    options = parse_command(arguments, BENCHMARK).ask_options
    engine = ScriptedEngine(check_options(options), *turns)
    picture = Image.new("RGB", (112, 112), "white")
    messages = conversation_with_images("Find x.", 1, None)
    [reply] = engine.generate([AnswerRequest(messages=messages, images=[picture], seed=5)])
    assert isinstance(reply, Reply)
    turn_ids = [engine.chat.processor.tokenizer(text)["input_ids"] for text in turns]
    assert reply.finish_reason == reason
    assert len(reply.calls or ()) == n_calls
    assert reply.text == engine.chat.decode(turn_ids[-1])
    assert reply.n_tokens == sum(len(ids) + 1 for ids in turn_ids), "each turn has an end token"
    assert reply.n_prompt_tokens == len(engine.requests[0].prompt_ids)
    if len(turns) > 1:
        first, second = engine.requests
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        assert first.seed == 5
        assert second.seed != 5
        assert len(first.images) == 1
        assert len(second.images) == 2, "the tool has drawn a line into another one"
        n_tokens_between = len(second.prompt_ids) - len(first.prompt_ids)
        assert second.max_tokens == max_tokens - n_tokens_between
    assert engine.generate([]) == []


BROKEN_CALLS = [
    f'<tool_call>{{"name": "line", "arguments": {{"x1": {"1" * 400}}}}}',
    f'<tool_call>{{"name": "line", "arguments": {{"x1": {"[" * 600}{"]" * 600}}}}}',
    '<tool_call>{"name": "closed", "arguments": {}}',
    "<tool_call>",
]


@pytest.mark.parametrize(
    "call", BROKEN_CALLS, ids=["digits", "nested", "a value that raises", "nothing"]
)
def test_what_a_model_writes_into_a_call_ends_no_evaluation(tmp_path, call):
    """A broken call is answered by one line and the conversation goes on, as in a training."""
    (tmp_path / "own.py").write_text(
        "class Lazy:\n    @property\n    def item(self):\n        raise RuntimeError('closed')\n\n\n"
        'def closed() -> str:\n    """Return what cannot be looked at."""\n    return Lazy()\n'
    )
    arguments = ["infer", "--model", str(PRETRAINED_FOLDER), "--data", "D", "--output", "O"]
    arguments += ["--engine", "transformers", "--tools", "line", f"{tmp_path / 'own.py'}:closed"]
    options = parse_command([*arguments, "--max-tokens", "3000"], BENCHMARK).ask_options
    engine = ScriptedEngine(check_options(options), call, "It is 7.")
    picture = Image.new("RGB", (112, 112), "white")
    request = AnswerRequest(conversation_with_images("Find x.", 1, None), [picture], seed=5)
    [reply] = engine.generate([request])
    assert isinstance(reply, Reply)
    assert reply.text == "It is 7."
    assert reply.calls is not None
    [recorded_call] = reply.calls
    assert recorded_call["failed"]
    assert recorded_call["text"].startswith("Error: ")
    assert "\n" not in recorded_call["text"]
