"""A language model without vision, for MMStar's leakage: it answers problems without images, and refuses others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from adora_vl.models.tiny.build import PRETRAINED
from eval.command import main
from eval.mmstar.benchmark import BENCHMARK
from tests.benchmark_data import mmstar_rows, write_mmstar


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    tokenizer = AutoTokenizer.from_pretrained(PRETRAINED)
    # As the templates of such models: the content is text, a list would be printed as one.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant:"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=1024, **sizes)
    config.eos_token_id = tokenizer.eos_token_id
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def command(tmp_path: Path, model: Path, *more: str) -> list[str]:
    data = write_mmstar(tmp_path / "data", mmstar_rows(3))
    words = ["run", "--model", str(model), "--data", str(data), "--output", str(tmp_path / "out")]
    return [*words, "--engine", "transformers", "--max-tokens", "8", *more]


def test_a_backbone_answers_without_the_image(tmp_path: Path, backbone: Path) -> None:
    assert main(BENCHMARK, command(tmp_path, backbone, "--no-image")) == 0
    assert json.loads((tmp_path / "out" / "score.json").read_text())["total"] == 3


@pytest.mark.parametrize(
    ("more", "message"),
    [([], "it sees no images, and the problems have some"), (["--max-pixels", "784"], "max_pixels: ")],
)
def test_what_needs_eyes_is_refused_in_a_line(
    more: list[str], message: str, tmp_path: Path, backbone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(BENCHMARK, command(tmp_path, backbone, *more)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
