"""A model that cannot be loaded ends an evaluation in one line, and nothing is left of the output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from adora_vl.errors import UserError
from adora_vl.models.tiny.build import PRETRAINED, build_tiny_model
from adora_vl.models.tiny.warm_start import WarmStart
from data_prep.cli import main as data_prep
from eval import command
from eval.geometry3k.benchmark import BENCHMARK


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "synthetic"
    assert data_prep(["synthetic", "--output", str(folder), "--rows", "1", "--test-rows", "2"]) == 0
    return folder


def refusal(
    data: Path, model: str, output: Path, capsys: pytest.CaptureFixture[str], engine: str = "transformers"
) -> str:
    words = ["run", "--model", model, "--data", str(data), "--output", str(output), "--engine", engine]
    capsys.readouterr()
    assert command.main(BENCHMARK, words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("file", [path.name for path in sorted(PRETRAINED.iterdir())
    if path.name in ("config.json", "tokenizer.json", "model.safetensors")])  # fmt: skip
@pytest.mark.parametrize("size", [None, 0, 700])
def test_a_file_of_the_model_that_is_missing_or_cut_off(
    file: str, size: int | None, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(PRETRAINED, model)
    content = (model / file).read_bytes()
    (model / file).unlink()
    if size is not None:
        (model / file).write_bytes(content[:size])
    said = refusal(data, str(model), tmp_path / "out", capsys)
    assert said.startswith("error: model: ") and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("processor_config.json", "image_processor", {"image_mean": "x", "patch_size": {}, "size": []}),
        ("processor_config.json", "image_processor", ["no", "mapping"]),
        ("tokenizer_config.json", "eos_token", {"content": 7}),
        ("tokenizer_config.json", "extra_special_tokens", 5),
    ],
)
def test_a_file_of_the_model_that_says_nonsense(
    file: str, key: str, value: object, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Libraries raise errors of many kinds for it. What they take in spite of it is none of ours."""
    model = tmp_path / "model"
    shutil.copytree(PRETRAINED, model)
    content = json.loads((model / file).read_text())
    (model / file).write_text(json.dumps({**content, key: value}))
    said = refusal(data, str(model), tmp_path / "out", capsys)
    assert said.startswith("error: model: ") and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "why"),
    [("qwen3_vl", "has no mrope_interleaved in the rope_parameters"), ("qwen3_5", "use --engine transformers")],
)
def test_a_model_that_vllm_would_run_otherwise(
    kind: str, why: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the key vLLM places images otherwise than Transformers, and nothing else would show it."""
    model = tmp_path / "model"
    build_tiny_model(model, WarmStart(steps=0), kind)
    if kind == "qwen3_vl":
        config = json.loads((model / "config.json").read_text())
        del config["text_config"]["rope_parameters"]["mrope_interleaved"]
        (model / "config.json").write_text(json.dumps(config))
    said = refusal(data, str(model), tmp_path / "out", capsys, "vllm")
    assert said.startswith(f"error: model: {str(model)!r} ") and why in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mine", [None, "notes.txt"])
def test_an_engine_that_cannot_be_built_leaves_nothing_and_takes_nothing_away(
    mine: str | None, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(settings: object) -> None:
        raise UserError("model: 'a/b' cannot be loaded")

    monkeypatch.setattr(command, "build_engine", refuse)
    output = tmp_path / "out"
    if mine:
        output.mkdir()
        (output / mine).write_text("mine")
    said = refusal(data, "a/b", output, capsys)
    assert "error: model: 'a/b' cannot be loaded\n" in said and "its copy" not in said
    assert (output / mine).read_text() == "mine" if mine else not output.exists()
