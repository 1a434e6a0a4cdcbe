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

from adora_vl.models.load import PRETRAINED_FOLDER
from eval.command import main
from eval.mmstar import BENCHMARK, is_officially_right, read_choices
from tests.support import benchmark_data
from tests.support.benchmark_data import (
    mmstar_rows,
    score_arguments,
    write_jsonl_rows,
    write_mmstar,
)
from tests.support.paths import SHARED_FOLDER

PUBLISHED_DATA = SHARED_FOLDER / "data" / "mmstar"
needs_published_data = pytest.mark.skipif(
    not PUBLISHED_DATA.is_dir(), reason="MMStar's published outputs are not beside this checkout"
)
QUESTION_WITH_OPTIONS = (
    "Which?\nOptions: A: a park, with trees, B: a dam, C: note A: twice, D: none"
)


def prediction(pid: str, response: str, answer: str = "B", **fields: Any) -> dict[str, Any]:
    """Return a prediction for a question with the options A to D."""
    return {
        "pid": pid,
        "index": int(pid),
        "question": QUESTION_WITH_OPTIONS,
        "answer": answer,
        "response": response,
        "category": "math",
        "l2_category": "geometry",
        **fields,
    }


score_as_command = partial(benchmark_data.score_predictions, BENCHMARK)


@needs_published_data
def test_the_published_half_has_404_hits_and_its_categories(case_folder):
    """Both rules give the published counts on half of a model's published outputs."""
    published = json.loads((PUBLISHED_DATA / "expected.json").read_text())
    assert published["correct"] == 404
    assert published["total"] == 750
    for rules in ["official", "letter"]:
        with case_folder(rules) as folder:
            result = score_as_command(
                folder, next(PUBLISHED_DATA.glob("*.jsonl")), "--rules", rules
            )
            assert result["correct"] == published["correct"]
            assert result["total"] == published["total"]
            categories = result["groups"]["category"]
            assert categories.keys() == published["by_category"].keys()
            for name, cell in categories.items():
                assert [cell["correct"], cell["total"]] == published["by_category"][name]
            assert len(result["groups"]["l2_category"]) == 18


def test_the_official_rule_looks_at_four_places(subtests):
    """The official rule finds the answer B only at the beginning of a response."""
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
    for response, is_right in cases:
        with subtests.test(f"{response!r:.80}"):
            assert is_officially_right(response, "B") is is_right


def test_options_are_read_out_of_the_question():
    """Options are read in order; a question without any has four empty ones."""
    assert read_choices(QUESTION_WITH_OPTIONS) == [
        "a park, with trees",
        "a dam",
        "note A: twice",
        "none",
    ]
    assert read_choices("Which?\nA: 1, B: 2") == ["1", "2"]
    assert read_choices("Which one?") == [""] * 4


def test_a_chain_of_thought_is_right_by_letter_and_wrong_by_the_official_rule(tmp_path):
    """The official rule looks at the first letters of a response, and the letter rule at its box.

    The right answer is B.
    """
    rows = [
        prediction("1", r"A park? Based on the water it is a dam: \boxed{B}"),
        prediction("2", r"By the water: \boxed{A}"),
    ]
    by_letter = score_as_command(tmp_path, rows, "--rules", "letter")
    assert [item["correct"] for item in by_letter["items"]] == [True, False]
    assert by_letter["rules"] == {"rules": "letter"}
    official = score_as_command(tmp_path, rows, "--rules", "official")
    assert [item["correct"] for item in official["items"]] == [False, True]


def test_gain_and_leakage_by_hand(tmp_path, capsys):
    """The gain by seeing (MG) and the leakage (ML) are differences between three runs.

    The runs are with images, without images, and of the language model alone.
    """

    def write_run(name: str, right_digits: str) -> Path:
        """Write predictions with a right answer for each `1`."""
        rows = []
        for index, character in enumerate(right_digits):
            rows.append(prediction(str(index), "B" if character == "1" else "C"))
        return write_jsonl_rows(tmp_path / name, rows)

    with_images = write_run("v.jsonl", "11110")
    without_images = write_run("wv.jsonl", "01100")
    language_model = write_run("t.jsonl", "00100")
    arguments = ["--without-image", str(without_images), "--text-only", str(language_model)]
    leakage_figures = score_as_command(tmp_path, with_images, *arguments)["leakage"]
    assert leakage_figures["S_v"] == 4 / 5
    assert leakage_figures["S_wv"] == 2 / 5
    assert leakage_figures["S_t"] == 1 / 5
    assert leakage_figures["MG"] == pytest.approx(4 / 5 - 2 / 5)  # the gain by seeing
    assert leakage_figures["ML"] == pytest.approx(
        2 / 5 - 1 / 5
    )  # what leaked into the vision training
    low, high = leakage_figures["MG_95"]
    assert low < 0.4 < high
    assert "MG: 40.0 %" in capsys.readouterr().out
    # A language model that knows more than the model without images has leaked nothing.
    arguments = ["--without-image", str(language_model), "--text-only", str(without_images)]
    assert score_as_command(tmp_path, with_images, *arguments)["leakage"]["ML"] == 0


def test_another_runs_items_must_be_the_same(tmp_path, capsys):
    """A run without images of other problems is refused, and so is `--text-only` alone.

    Gain and leakage are differences over the same problems.
    """
    other_run = write_jsonl_rows(tmp_path / "b.jsonl", [prediction("2", "B")])
    arguments = score_arguments(tmp_path, [prediction("1", "B")])
    assert main(BENCHMARK, [*arguments, "--without-image", str(other_run)]) == 2
    message = capsys.readouterr().err
    assert "without_image: " in message
    assert "pid '1' is missing" in message
    assert main(BENCHMARK, [*arguments, "--text-only", str(other_run)]) == 2
    assert "needs --without-image too" in capsys.readouterr().err


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny language model that sees no images."""
    folder = tmp_path_factory.mktemp("backbone")
    tokenizer = AutoTokenizer.from_pretrained(PRETRAINED_FOLDER)
    # The templates of such models take the content as text, and would print a list as it is.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant:"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    config.eos_token_id = tokenizer.eos_token_id
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def arguments_of_run(tmp_path: Path, model: Path, *options: str) -> list[str]:
    """Return the words of a `run` of three problems with the engine of Transformers."""
    data = write_mmstar(tmp_path / "data", mmstar_rows(3))
    paths = ["--model", str(model), "--data", str(data), "--output", str(tmp_path / "out")]
    return ["run", *paths, "--engine", "transformers", "--max-tokens", "8", *options]


def test_a_backbone_answers_without_the_image_and_refuses_one(tmp_path, backbone, capsys):
    """A language model answers with `--no-image`; with images or pixel limits it is refused."""
    assert main(BENCHMARK, arguments_of_run(tmp_path, backbone, "--no-image")) == 0
    assert json.loads((tmp_path / "out" / "score.json").read_text())["total"] == 3
    cases = [
        ([], "it sees no images, and the problems have some"),
        (["--max-pixels", "784"], "max_pixels: "),
    ]
    for options, message in cases:
        assert main(BENCHMARK, arguments_of_run(tmp_path / "eyes", backbone, *options)) == 2
        lines = capsys.readouterr().err.splitlines()
        (error_line,) = [line for line in lines if line.startswith("error: ")]
        assert message in error_line
