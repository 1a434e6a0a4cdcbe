"""MMStar's score: the published hits, both rules, and gain and leakage, which need a model without
vision.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from adora_vl.models.load import PRETRAINED
from eval.command import main
from eval.mmstar import BENCHMARK, choices_of, is_officially_right
from tests.support import benchmark_data
from tests.support.benchmark_data import mmstar_rows, to_score, write_lines, write_mmstar
from tests.support.paths import SHARED

DATA = SHARED / "data" / "mmstar"
real = pytest.mark.skipif(
    not DATA.is_dir(), reason="MMStar's published outputs are not beside this checkout"
)
QUESTION = "Which?\nOptions: A: a park, with trees, B: a dam, C: note A: twice, D: none"


def row(pid: str, response: str, answer: str = "B", **fields: Any) -> dict[str, Any]:
    row_fields = {
        "pid": pid,
        "index": int(pid),
        "question": QUESTION,
        "answer": answer,
        "response": response,
    }
    return row_fields | {"category": "math", "l2_category": "geometry"} | fields


scored = partial(benchmark_data.scored, BENCHMARK)


@real
def test_the_published_half_has_404_hits_and_its_categories(case):
    for rules in ["official", "letter"]:
        with case(rules) as folder:
            expected = json.loads((DATA / "expected.json").read_text())
            result = scored(folder, next(DATA.glob("*.jsonl")), "--rules", rules)
            assert (
                (result["correct"], result["total"])
                == (expected["correct"], expected["total"])
                == (404, 750)
            )
            categories = result["groups"]["category"]
            assert {
                key: [category["correct"], category["total"]]
                for key, category in categories.items()
            } == expected["by_category"]
            assert len(result["groups"]["l2_category"]) == 18


def test_the_official_rule_looks_at_four_places(subtests):
    cases = [
        ("B", True),
        ("b.", True),
        ("(B) a dam", True),
        ("Option B", True),
        ("The answer is B", True),
        ("The answer is: B", False),
        ("Based on the picture it is C", True),  # the rule's known flaw
        ("It is B", False),
        ("", False),
    ]
    for response, hit in cases:
        with subtests.test(f"{response!r:.80}"):
            assert is_officially_right(response, "B") is hit


def test_options_are_read_out_of_the_question():
    assert choices_of(QUESTION) == ["a park, with trees", "a dam", "note A: twice", "none"]
    assert choices_of("Which?\nA: 1, B: 2") == ["1", "2"]
    assert choices_of("Which one?") == [""] * 4


def test_a_chain_of_thought_is_right_by_letter_and_wrong_by_the_official_rule(tmp_path):
    rows = [
        row("1", r"A park? Based on the water it is a dam: \boxed{B}"),
        row("2", r"By the water: \boxed{A}"),
    ]
    by_letter = scored(tmp_path, rows, "--rules", "letter")
    assert [item["correct"] for item in by_letter["items"]] == [True, False]
    assert by_letter["rules"] == {"rules": "letter"}
    official = scored(tmp_path, rows, "--rules", "official")
    assert [item["correct"] for item in official["items"]] == [False, True]


def test_gain_and_leakage_by_hand(tmp_path, capsys):
    def run(name: str, right: str) -> Path:
        return write_lines(
            tmp_path / name,
            [row(str(i), "B" if hit == "1" else "C") for i, hit in enumerate(right)],
        )

    with_image = run("v.jsonl", "11110")
    blind = run("wv.jsonl", "01100")
    text = run("t.jsonl", "00100")
    baselines = ["--without-image", str(blind), "--text-only", str(text)]
    leakage = scored(tmp_path, with_image, *baselines)["leakage"]
    assert leakage["S_v"] == 0.8
    assert leakage["S_wv"] == 0.4
    assert leakage["S_t"] == 0.2
    assert leakage["MG"] == pytest.approx(0.4)
    assert leakage["ML"] == pytest.approx(0.2)
    assert leakage["MG_bootstrap_95"][0] < 0.4 < leakage["MG_bootstrap_95"][1]
    assert "MG: 40.0 %" in capsys.readouterr().out
    # A backbone that knows more than the blind model has leaked nothing.
    assert (
        scored(tmp_path, with_image, "--without-image", str(text), "--text-only", str(blind))[
            "leakage"
        ]["ML"]
        == 0
    )


def test_another_runs_items_must_be_the_same(tmp_path, capsys):
    other_run = write_lines(tmp_path / "b.jsonl", [row("2", "B")])
    words = to_score(tmp_path, [row("1", "B")])
    assert main(BENCHMARK, [*words, "--without-image", str(other_run)]) == 2
    assert "without_image: " in (message := capsys.readouterr().err)
    assert "pid '1' is missing" in message
    assert main(BENCHMARK, [*words, "--text-only", str(other_run)]) == 2
    assert "needs --without-image too" in capsys.readouterr().err


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
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = Qwen2Config(
        vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=1024, **sizes
    )
    config.eos_token_id = tokenizer.eos_token_id
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def command(tmp_path: Path, model: Path, *options: str) -> list[str]:
    data = write_mmstar(tmp_path / "data", mmstar_rows(3))
    words = ["run", "--model", str(model), "--data", str(data), "--output", str(tmp_path / "out")]
    return [*words, "--engine", "transformers", "--max-tokens", "8", *options]


def test_a_backbone_answers_without_the_image_and_refuses_one(tmp_path, backbone, capsys):
    assert main(BENCHMARK, command(tmp_path, backbone, "--no-image")) == 0
    assert json.loads((tmp_path / "out" / "score.json").read_text())["total"] == 3
    blind = "it sees no images, and the problems have some"
    for options, message in (
        ([], blind),
        (["--max-pixels", "784"], "max_pixels: "),
    ):
        assert main(BENCHMARK, command(tmp_path / "eyes", backbone, *options)) == 2
        lines = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")
        ]
        assert len(lines) == 1
        assert message in lines[0]
