"""The command line: options, the YAML file under them, and one line with exit code 2 for the user's
mistakes.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adora_vl.builtin import WarmStart
from adora_vl.builtin.tiny_vl import build_tiny_model
from adora_vl.data.dataset import write_split
from adora_vl.data.prompts import SYSTEM_PROMPT, conversation_with_images
from adora_vl.evals import asking
from adora_vl.evals.inference.chat import ChatProcessor
from adora_vl.evals.inference.predictions import PredictionLog, read_predictions
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.synthetic.generate import generate
from adora_vl.utils import launch
from adora_vl.utils.errors import UserError
from data_prep.cli import main as data_prep
from eval.command import main, parse_command
from eval.geometry3k import BENCHMARK as GEOMETRY3K
from eval.mmstar import BENCHMARK as MMSTAR

REQUIRED_WORDS = ["--model", "M", "--data", "D", "--output", "O"]


def test_the_command_line_goes_over_the_file_and_the_file_over_the_defaults(tmp_path):
    """An option of the command line wins over that of the file, and the file over the default.

    `infer` takes the same file and ignores the options of the score in it (`rounding`).
    """
    config = tmp_path / "c.yaml"
    config.write_text(
        "model: from/file\nmax_tokens: 7\nlimit: 3\nsystem_prompt: null\nrounding: true\nseed: 5\n"
    )
    arguments = ["run", "--limit", "4", "--config", str(config), "--data", "D", "--output", "O"]
    command: Any = parse_command(arguments, GEOMETRY3K)
    options = command.ask_options
    assert options.model == "from/file"
    assert options.max_tokens == 7
    assert options.limit == 4
    assert options.seed == 5
    assert options.system_prompt is None
    assert command.score_options.rounding is True
    arguments = ["run", "--config", str(config), "--no-rounding", *REQUIRED_WORDS]
    command = parse_command(arguments, GEOMETRY3K)
    assert command.score_options.rounding is False
    command = parse_command(["infer", "--config", str(config), *REQUIRED_WORDS], GEOMETRY3K)
    assert command.score_options is None


def test_defaults_are_greedy_and_the_trainings_prompt():
    """Without options a model is asked as the training asks it, at temperature 0."""
    options = parse_command(["infer", *REQUIRED_WORDS], GEOMETRY3K).ask_options
    assert options.temperature == 0.0
    assert options.system_prompt == SYSTEM_PROMPT
    assert options.dtype == "auto"
    assert options.limit is None
    assert options.min_pixels is None
    assert options.max_pixels is None
    command_without_prompt = parse_command(
        ["infer", *REQUIRED_WORDS, "--system-prompt", "none"], GEOMETRY3K
    )
    assert command_without_prompt.ask_options.system_prompt is None


def test_the_users_mistakes_are_one_line_and_exit_code_2(capsys, monkeypatch, case_folder):
    """A mistake of the user's ends a command with exit code 2 and one line on standard error.

    Each case: the words of a command, and a part of the line.
    """
    cases = [
        ([], "required"),
        (["run", "--model", "M", "--data", "D"], "--output is missing"),
        (
            ["run", *REQUIRED_WORDS, "--max-tokens", "0"],
            "--max-tokens: '0' is not a whole number from 1 to 1048576",
        ),
        (
            ["run", *REQUIRED_WORDS, "--temperature", "nan"],
            "--temperature: 'nan' is not 0 or a number from 0.01 to 100",
        ),
        (
            ["run", *REQUIRED_WORDS, "--max_tokens", "9"],
            "unrecognized arguments: --max_tokens 9; did you mean '--max-tokens'?",
        ),
        (["rum", *REQUIRED_WORDS], "did you mean 'run'?"),
        (["run", *REQUIRED_WORDS, "--engine", "sglang"], "'sglang'"),
        (
            ["run", *REQUIRED_WORDS, "--model", "./missing"],
            "model: './missing' is neither a folder here nor a hub id",
        ),
        (
            ["run", *REQUIRED_WORDS, "--model", "missing"],
            "model: 'missing' is neither a folder here nor a hub id",
        ),
        # It has the form of a hub id, but `tests` is a folder.
        (["run", *REQUIRED_WORDS, "--model", "tests/missing"], "model: 'tests/missing' is neither"),
        (["run", *REQUIRED_WORDS, "--model", "tests"], "the folder 'tests' has no config.json"),
        (["run", *REQUIRED_WORDS, "--model", "owner/name", "--data", "./none"], "no folder 'none'"),
        (["score", "--predictions", "none.jsonl", "--output", "s.json"], "no file 'none.jsonl'"),
    ]
    for arguments, message in cases:
        with case_folder(arguments) as folder, monkeypatch.context() as patch:
            (folder / "tests").mkdir()
            patch.chdir(folder)
            assert main(GEOMETRY3K, arguments) == 2
            stderr = capsys.readouterr().err
            assert stderr.startswith("error: ")
            assert message in stderr
            assert stderr.count("\n") == 1


def test_an_unknown_key_names_the_nearest(tmp_path, capsys):
    """A misspelt key in the file of a command is refused like a misspelt option."""
    (tmp_path / "c.yaml").write_text("max_token: 5\n")
    assert main(GEOMETRY3K, ["run", *REQUIRED_WORDS, "--config", str(tmp_path / "c.yaml")]) == 2
    assert "unknown key 'max_token'; did you mean 'max_tokens'?" in capsys.readouterr().err


def test_no_image_is_a_switch_in_a_file_and_on_the_command_line(case_folder):
    """`no_image` is true or false in a file, and `--no-image` sets it on the command line.

    Its name begins with `no_`, so that the other word for it would be `--no-no-image`.
    """
    for value, without_image in [("true", True), ("false", False)]:
        with case_folder(value) as folder:
            config = folder / "c.yaml"
            config.write_text(f"no_image: {value}\n")
            command: Any = parse_command(["run", *REQUIRED_WORDS, "--config", str(config)], MMSTAR)
            assert command.ask_options.data.no_image is without_image
            command = parse_command(["run", *REQUIRED_WORDS, "--no-image"], MMSTAR)
            assert command.ask_options.data.no_image is True


@pytest.fixture(scope="module")
def synthetic_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two drawn problems in the split `test`."""
    folder = tmp_path_factory.mktemp("data") / "synthetic"
    assert data_prep(["synthetic", "--output", str(folder), "--rows", "1", "--test-rows", "2"]) == 0
    return folder


def error_of_run(
    synthetic_data: Path,
    model: str,
    output: Path,
    capsys: pytest.CaptureFixture[str],
    engine: str = "transformers",
) -> str:
    """Run a command that is refused, and return what it prints on standard error."""
    arguments = ["run", "--model", model, "--data", str(synthetic_data), "--output", str(output)]
    capsys.readouterr()
    assert main(GEOMETRY3K, [*arguments, "--engine", engine]) == 2
    return capsys.readouterr().err


def test_a_file_of_the_model_that_is_missing_cut_off_or_nonsense(
    synthetic_data, case_folder, capsys
):
    """A damaged folder of a model is refused in one line, before there is an output folder.

    Libraries raise errors of many kinds for such files.
    """

    def remove(file: Path) -> None:
        file.unlink()

    def cut_off(file: Path, size: int) -> None:
        file.write_bytes(file.read_bytes()[:size])

    def set_key(file: Path, key: str, value: Any) -> None:
        content = json.loads(file.read_bytes())
        file.write_text(json.dumps({**content, key: value}))

    bad_processor = {"image_mean": "x", "patch_size": {}, "size": []}
    cases: list[tuple[str, Callable[[Path], None]]] = []
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        cases += [
            (name, remove),
            (name, partial(cut_off, size=0)),
            (name, partial(cut_off, size=700)),
        ]
    for name, key, value in (
        ("processor_config.json", "image_processor", bad_processor),
        ("processor_config.json", "image_processor", ["no", "mapping"]),
        ("tokenizer_config.json", "eos_token", {"content": 7}),
        ("tokenizer_config.json", "extra_special_tokens", 5),
    ):
        cases.append((name, partial(set_key, key=key, value=value)))
    for name, damage in cases:
        with case_folder(f"{name} {damage}") as folder:
            model = folder / "model"
            shutil.copytree(PRETRAINED_FOLDER, model)
            damage(model / name)
            message = error_of_run(synthetic_data, str(model), folder / "out", capsys)
            assert message.startswith("error: model: ")
            assert message.count("\n") == 1
            assert not (folder / "out").exists()


def test_a_model_that_vllm_would_run_otherwise(synthetic_data, case_folder, capsys, monkeypatch):
    """A model that vLLM would run otherwise than Transformers is refused with `--engine vllm`.

    Without its key, vLLM would place the images of `qwen3_vl` otherwise. The layers of `qwen3_5`
    with linear attention it would compute in 16 bits on a CPU, and in float32 on a GPU.
    """
    missing_key = "has no mrope_interleaved in the rope_parameters"
    for kind, reason in (
        ("qwen3_vl", missing_key),
        ("qwen3_5", "use --engine transformers"),
    ):
        with case_folder(kind) as folder:
            model = folder / "model"
            build_tiny_model(model, WarmStart(steps=0), kind)
            monkeypatch.setattr(launch, "has_vllm_cpu_build", lambda: False)
            ChatProcessor(str(model)).check_vllm(str(model), "auto")
            monkeypatch.setattr(launch, "has_vllm_cpu_build", lambda: True)
            if kind == "qwen3_vl":
                config = json.loads((model / "config.json").read_text())
                del config["text_config"]["rope_parameters"]["mrope_interleaved"]
                (model / "config.json").write_text(json.dumps(config))
            message = error_of_run(
                synthetic_data, str(model), folder / "out", capsys, engine="vllm"
            )
            assert message.startswith(f"error: model: {str(model)!r} ")
            assert reason in message
            assert message.count("\n") == 1
            assert not (folder / "out").exists()


def test_an_engine_that_cannot_be_built_leaves_nothing_and_takes_nothing_away(
    synthetic_data, tmp_path, monkeypatch, capsys
):
    """A run whose engine cannot be built removes its output folder, unless it has other files."""

    def refuse(settings: object) -> None:
        raise UserError("model: 'a/b' cannot be loaded")

    monkeypatch.setattr(asking, "build_engine", refuse)
    new_folder = tmp_path / "out"
    used_folder = tmp_path / "used"
    used_folder.mkdir()
    (used_folder / "notes.txt").write_text("mine")
    for output in (new_folder, used_folder):
        message = error_of_run(synthetic_data, "a/b", output, capsys)
        assert "error: model: 'a/b' cannot be loaded\n" in message
        assert "its copy" not in message  # the note on a model of the hub that is here already
    assert not new_folder.exists()
    assert (used_folder / "notes.txt").read_text() == "mine"


def test_the_loser_of_two_that_start_together_leaves_the_files_alone(
    synthetic_data, tmp_path, capsys
):
    """A second command on an output folder is refused, and both files of the first one stay.

    The first one has its fingerprint and an empty file of predictions, as while its model loads.
    """
    output = tmp_path / "out"
    output.mkdir()
    (output / "fingerprint.json").write_text("{}")
    with PredictionLog(output / "predictions.jsonl") as log_of_first:
        message = error_of_run(synthetic_data, str(PRETRAINED_FOLDER), output, capsys)
        writer = rf"process {os.getpid()} \(.*\)" if sys.platform == "linux" else "another process"
        remedy = "wait for it or use another --output"
        pattern = rf"error: output: {writer} is writing {output}\S+; {remedy}\n"
        assert re.fullmatch(pattern, message)
        log_of_first.append([{"pid": "1", "answer": "5", "response": "5"}])
    assert (output / "fingerprint.json").read_text() == "{}"
    assert [row["pid"] for row in read_predictions(output / "predictions.jsonl")] == ["1"]


def test_a_problem_too_long_for_the_context_is_recorded_and_the_others_are_answered(
    tmp_path, capsys
):
    """A problem that is too long is recorded as failed, and the next run does not ask it again."""
    rows = list(generate(3, split="test", seed=1))
    rows[1]["problem"] = "Find x. " * 2000
    synthetic_data = tmp_path / "data"
    output = tmp_path / "out"
    write_split(rows, synthetic_data, "test")
    arguments = [
        "run",
        "--model",
        str(PRETRAINED_FOLDER),
        "--data",
        str(synthetic_data),
        "--output",
        str(output),
    ]
    arguments += ["--engine", "transformers", "--max-tokens", "4"]
    assert main(GEOMETRY3K, arguments) == 0
    printed = capsys.readouterr()
    assert f"warning: {rows[1]['id']!r} is not asked: its text has " in printed.err
    assert "3 answered" in printed.err
    assert "1 prompt too long" in printed.err
    assert "--max-pixels" not in printed.err, "fewer pixels would not help"
    reason = "prompt too long for the model's context"
    assert f"warning: 1 problem not asked ({reason}), counted as wrong" in printed.out
    first, too_long, last = read_predictions(output / "predictions.jsonl")
    assert too_long["finish_reason"] == "prompt_too_long"
    assert first["finish_reason"] != "prompt_too_long"
    assert last["finish_reason"] != "prompt_too_long"
    score = json.loads((output / "score.json").read_text())
    assert score["total"] == 3
    assert score["too_long"] == 1
    assert score["items"][1]["verdict"] == "failed"
    assert main(GEOMETRY3K, arguments) == 0
    assert "3 there already, 0 to do" in capsys.readouterr().err


def test_what_is_too_long_says_whether_fewer_pixels_would_help():
    """A smaller image is proposed only where the image is what does not fit."""
    chat = ChatProcessor(str(PRETRAINED_FOLDER), max_pixels=560 * 560)
    large_image = Image.new("RGB", (560, 560))  # 400 tokens
    small_image = Image.new("RGB", (28, 28))  # 1 token

    def why_too_long(text: str, image: Image.Image, context: int) -> str | None:
        """The reason why a prompt does not fit a context of so many tokens; None if it does."""
        messages = conversation_with_images(text, 1, None)
        return chat.why_too_long(chat.prompt_ids(messages, [image]), context)

    reason = why_too_long("Find x.", large_image, context=300)
    assert reason is not None
    assert re.fullmatch(
        r"its text has \d+ tokens, its image 400, and the model's context 300; lower --max-pixels",
        reason,
    )
    reason = why_too_long("Find x. " * 200, large_image, context=300)
    assert reason is not None
    assert "fewer pixels would not help" in reason
    assert why_too_long("Find x.", large_image, context=600) is None
    assert why_too_long("Find x.", small_image, context=300) is None
