"""Whole runs of three benchmarks in their published formats, with the tiny model and real vLLM."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from adora_vl.evals.inference.predictions import IMAGE_FAILED, read_predictions
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.utils.launch import STARTUP_LOG
from eval.command import main
from eval.mathvista import BENCHMARK as MATHVISTA
from tests.support.benchmark_data import (
    mathvista_rows,
    mmstar_rows,
    write_geometry3k,
    write_mathvista,
    write_mmstar,
)
from tests.support.launch import accelerate_launch, cli_arguments, run_command

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def benchmark_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answer and score three benchmarks with one engine; return the folder with a folder of each.

    MathVista's second image cannot be read.
    """
    benchmark_folder = tmp_path_factory.mktemp("benchmarks")
    write_geometry3k(benchmark_folder / "data" / "geometry3k")
    rows = mathvista_rows()
    rows[1]["decoded_image"]["bytes"] = b"no picture"
    write_mathvista(benchmark_folder / "data" / "mathvista", rows)
    write_mmstar(benchmark_folder / "data" / "mmstar", mmstar_rows())
    run_command(
        [
            sys.executable,
            "-m",
            "tests.integration.run_benchmarks",
            str(PRETRAINED_FOLDER),
            str(benchmark_folder),
        ]
    )
    return benchmark_folder


def read_score(benchmark_folder: Path, name: str) -> dict[str, Any]:
    """Return the scores that a benchmark has written into its folder."""
    result: dict[str, Any] = json.loads((benchmark_folder / name / "score.json").read_text())
    return result


def test_geometry3k_is_answered_and_graded(benchmark_folder: Path) -> None:
    """Answers are graded, grouped by the size of the image, and counted in tokens."""
    result = read_score(benchmark_folder, "geometry3k")
    # The shipped model is warm-started on such problems: it boxes an answer to most and gets some
    # right.
    assert result["total"] == 6
    assert result["verdicts"].get("unparseable", 0) < 6
    assert result["groups"]["image_size"]["to 128x128"]["total"] == 6
    assert result["tokens"]["wrong"] or result["tokens"]["correct"]


def test_mathvista_is_answered_and_its_broken_image_recorded(benchmark_folder: Path) -> None:
    """One of six images cannot be read.

    Its problem counts as failed, and the others are answered.
    """
    result = read_score(benchmark_folder, "mathvista")
    assert result["total"] == 6
    assert result["image_failed"] == 1
    assert result["verdicts"]["failed"] == 1
    assert {value: cell["total"] for value, cell in result["groups"]["answer_type"].items()} == {
        "text": 2,
        "integer": 2,
        "float": 1,
        "list": 1,
    }
    assert result["rules"]["rules"] == "vlmevalkit"
    rows = read_predictions(benchmark_folder / "mathvista" / "predictions.jsonl")
    assert [row["finish_reason"] == IMAGE_FAILED for row in rows] == [
        False,
        True,
        False,
        False,
        False,
        False,
    ]
    assert "UnreadableImageError" in rows[1]["error"]
    assert all(row["response"] for row in rows if row["finish_reason"] != IMAGE_FAILED)


def test_mmstar_sees_the_image_unless_told_not_to(benchmark_folder: Path) -> None:
    """The blind prompts lack the tokens of the image, and the leakage follows from both scores."""
    with_image = read_predictions(benchmark_folder / "mmstar" / "predictions.jsonl")
    blind = read_predictions(benchmark_folder / "mmstar_blind" / "predictions.jsonl")
    # 56 x 56 pixels are 4 image tokens; with the two tokens around them the blind prompt lacks 6.
    assert [
        a["n_prompt_tokens"] - b["n_prompt_tokens"] for a, b in zip(with_image, blind, strict=True)
    ] == [6] * 6
    leakage = read_score(benchmark_folder, "mmstar")["leakage"]
    assert leakage["MG"] == pytest.approx(leakage["S_v"] - leakage["S_wv"])
    assert read_score(benchmark_folder, "mmstar_blind")["fingerprint"]["fields"]["no_image"] is True
    assert len(read_score(benchmark_folder, "mmstar")["groups"]["l2_category"]) == 2


def test_two_launched_processes_write_what_one_writes(tmp_path: Path) -> None:
    """Two processes write the predictions and scores of one, and no process a file of its own.

    The predictions are equal to the byte.
    """
    data = write_mathvista(tmp_path / "data", mathvista_rows(5))
    argv = [
        "run",
        *cli_arguments(model=PRETRAINED_FOLDER, data=data, engine="transformers"),
        "--max-tokens",
        "12",
    ]
    argv += ["--batch-size", "1"]  # on whose make-up rounding depends

    assert main(MATHVISTA, [*argv, "--output", str(tmp_path / "one")]) == 0
    accelerate_launch("cpu_zero3", "-m", "eval.mathvista", *argv, "--output", str(tmp_path / "two"))
    of_one_process = tmp_path / "one" / "predictions.jsonl"
    of_two_processes = tmp_path / "two" / "predictions.jsonl"
    assert of_two_processes.read_bytes() == of_one_process.read_bytes()
    assert read_score(tmp_path, "two")["items"] == read_score(tmp_path, "one")["items"]
    file_names = {path.name for path in (tmp_path / "two").iterdir()}
    assert file_names == {"predictions.jsonl", "fingerprint.json", "score.json", STARTUP_LOG}
