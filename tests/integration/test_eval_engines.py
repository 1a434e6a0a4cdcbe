"""vLLM and Transformers give the same answers to the same problems, by a tiny random Qwen2.5-VL."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adora_vl.builtin.processor import build_processor
from adora_vl.builtin.tiny_vl import build_model
from adora_vl.data.dataset import write_split
from adora_vl.data.prompts import SYSTEM_PROMPT, conversation_with_images
from adora_vl.evals.inference.chat import ChatProcessor
from adora_vl.evals.inference.predictions import read_predictions
from adora_vl.evals.records import Prediction
from adora_vl.rollout.prompt_tokens import NEVER_SAMPLED_TOKENS
from adora_vl.synthetic.generate import generate
from eval.command import main
from eval.geometry3k import BENCHMARK
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.slow

# The images are 112 x 112, which is 16 image tokens without a limit and 4 with this one. The lower
# limit is left out on purpose: the image processor ignores an upper one that comes alone.
PIXEL_LIMIT = 56 * 56
IMAGE_TOKENS_UNDER_LIMIT = 4
TWO_QUESTIONS = ("Find x.", "Find the measure of the angle x in the figure.")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `model`, random in float32, and `data`, eight problems.

    The problems have two questions of different lengths in turn.
    """
    folder = tmp_path_factory.mktemp("eval")
    rows = list(generate(8, split="test", seed=1, size=112))
    processor = build_processor([f"{row['problem']} {row['meta']['solution']}" for row in rows])
    for index, row in enumerate(rows):
        row["problem"] = TWO_QUESTIONS[index % len(TWO_QUESTIONS)]
    processor.save_pretrained(folder / "model")
    model = build_model(processor.tokenizer, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "visual" not in name:
                parameter.mul_(2)  # or the fresh model repeats one token whatever it is shown
        # wanted, if allowed
        model.lm_head.weight[processor.tokenizer.convert_tokens_to_ids(NEVER_SAMPLED_TOKENS)] *= 10
    # Qwen2.5-VL's has 1.05; greedy means greedy for both engines
    model.generation_config.repetition_penalty = 1.3
    model.save_pretrained(folder / "model")
    write_split(rows, folder / "data", "test")
    return folder


def evaluation_argv(workspace: Path, engine: str) -> list[str]:
    """Return the arguments of an evaluation with this engine."""
    argv = ["run", "--model", str(workspace / "model"), "--data", str(workspace / "data")]
    argv += ["--output", str(workspace / engine), "--engine", engine]
    return [*argv, "--max-tokens", "48", "--max-pixels", str(PIXEL_LIMIT), "--batch-size", "5"]


@pytest.fixture(scope="module")
def predictions_by_engine(workspace: Path) -> dict[str, list[Prediction]]:
    """Return the predictions of each engine.

    vLLM runs in a process of its own, so that its memory and threads go away with it.
    """
    subprocess.run(
        [sys.executable, "-m", "eval.geometry3k", *evaluation_argv(workspace, "vllm")],
        cwd=REPOSITORY,
        check=True,
    )
    assert main(BENCHMARK, evaluation_argv(workspace, "transformers")) == 0
    return {
        engine: read_predictions(workspace / engine / "predictions.jsonl")
        for engine in ("vllm", "transformers")
    }


def test_both_engines_give_the_same_answers(predictions_by_engine):
    """Answers are equal token by token, and differ between images, so the engines look at them."""
    assert len(predictions_by_engine["vllm"]) == 8
    assert predictions_by_engine["vllm"] == predictions_by_engine["transformers"]
    assert all(
        len(row["response"]) > 20 for row in predictions_by_engine["vllm"]
    )  # special tokens decode to nothing
    assert len({row["response"] for row in predictions_by_engine["vllm"]}) > 2 * len(
        TWO_QUESTIONS
    )  # so the images matter


def test_the_pixel_limit_reaches_both_engines(workspace, predictions_by_engine):
    """A prompt has one placeholder for the image, which becomes four image tokens."""
    chat = ChatProcessor(str(workspace / "model"))
    for rows in predictions_by_engine.values():
        for row in rows:
            prompt = chat.render(conversation_with_images(row["question"], 1, SYSTEM_PROMPT))
            one_placeholder = len(chat.tokenizer(prompt)["input_ids"])
            assert row["n_prompt_tokens"] == one_placeholder - 1 + IMAGE_TOKENS_UNDER_LIMIT


def test_both_engines_end_answers_where_the_training_did(
    workspace: Path, predictions_by_engine: dict[str, list[Prediction]]
) -> None:
    """Both engines end an answer at the first place of the training's stop string.

    The string is cut from the middle of one of the full answers, so that many have it.
    """
    responses = [row["response"] for row in predictions_by_engine["vllm"]]
    string = responses[0][10:13]
    assert string
    config = {"generation_kwargs": {"stop": [string]}}
    (workspace / "model" / "training_prompts.json").write_text(json.dumps(config))
    rows_by_engine: dict[str, list[Prediction]] = {}
    try:
        for engine in ("vllm", "transformers"):
            argv = evaluation_argv(workspace, engine)
            argv[argv.index("--output") + 1] = str(workspace / f"{engine}_stopped")
            command = [sys.executable, "-m", "eval.geometry3k", *argv]
            subprocess.run(command, cwd=REPOSITORY, check=True)
            path = workspace / f"{engine}_stopped" / "predictions.jsonl"
            rows_by_engine[engine] = read_predictions(path)
    finally:
        (workspace / "model" / "training_prompts.json").unlink()
    assert rows_by_engine["vllm"] == rows_by_engine["transformers"]
    for row, full_response in zip(rows_by_engine["vllm"], responses, strict=True):
        response = row["response"]
        if string not in full_response:
            assert response == full_response  # nothing to stop at
            continue
        assert row["finish_reason"] == "stop"
        assert full_response.startswith(response)
        # Behind the string comes at most the rest of the token that completes it.
        assert response.find(string) + len(string) > len(response) - 12
        assert len(response) < len(full_response)
