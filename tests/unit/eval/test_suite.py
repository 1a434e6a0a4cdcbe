"""The row of a table: one start of the engine for all benchmarks, resumed, and beside another
model's row.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from adora_vl.evals.inference.requests import AnswerRequest
from adora_vl.utils.openai_client import Reply
from eval import suite
from eval.__main__ import main
from tests.support.benchmark_data import WRITER_BY_BENCHMARK

# What `max_text_bytes` was of each engine that a test has built.
LONGEST_TEXT_OF_ENGINES: list[int] = []
SUITE_BENCHMARKS = suite.HUB_ID_BY_BENCHMARK_BY_SUITE["reasoning"]


class ConstantEngine:
    """An engine that gives the same text to everything.

    Each engine that is built adds the longest text that it is built for, in bytes, to
    `LONGEST_TEXT_OF_ENGINES`.
    """

    batch_size = 4

    def __init__(self, text: str, longest: int) -> None:
        self.text = text
        LONGEST_TEXT_OF_ENGINES.append(longest)

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
        return [
            Reply(self.text, n_tokens=3, finish_reason="stop", n_prompt_tokens=9) for _ in requests
        ]


@pytest.fixture
def suite_data(tmp_path: Path) -> Path:
    """Return a folder with the data of each benchmark of the suite, in a folder of its name."""
    for name in SUITE_BENCHMARKS:
        folder = WRITER_BY_BENCHMARK[name](tmp_path)
        if folder.name == name:
            continue
        # A writer may return a folder inside the one that gets the name, so it is moved out first.
        moved_folder = folder.rename(tmp_path / "made")
        moved_folder.rename(tmp_path / name)
    return tmp_path


def test_a_row_with_one_start_of_the_engine(suite_data, monkeypatch, capsys):
    """Two models are asked all benchmarks of a suite; the second is shown beside the first.

    The first answers A to everything, which is wrong, and the second B, which is right.
    """
    LONGEST_TEXT_OF_ENGINES.clear()
    for name, text in (("first", "Answer: A"), ("second", "Answer: B")):
        monkeypatch.setattr(
            suite,
            "build_engine",
            lambda settings, t=text: ConstantEngine(t, settings.max_text_bytes),
        )
        arguments = [
            "all",
            "--suite",
            "reasoning",
            "--model",
            "a/b",
            "--data",
            str(suite_data),
            "--output",
            str(suite_data / name),
        ]
        assert main([*arguments, "--samples", "3", "--temperature", "1"]) == 0
        head, row, note = capsys.readouterr().out.splitlines()[-3:]
        assert head.split() == list(SUITE_BENCHMARKS)
        assert row.startswith(str(suite_data / name))
        assert "its strict score" in note  # which figure of We-Math the table has
        n_columns = len(SUITE_BENCHMARKS)
        assert row.count("[") == n_columns, "each figure has its interval"
    assert len(LONGEST_TEXT_OF_ENGINES) == 2, "an engine for each model"
    assert len(set(LONGEST_TEXT_OF_ENGINES)) == 1, "each fits the texts of all benchmarks"

    beside_words = ["--beside", str(suite_data / "first")]
    assert main([*arguments, "--samples", "3", "--temperature", "1", *beside_words]) == 0

    assert len(LONGEST_TEXT_OF_ENGINES) == 2, "all answers were there"
    first, second, difference = capsys.readouterr().out.splitlines()[-4:-1]
    assert first.startswith(str(suite_data / "first"))
    assert second.startswith(str(suite_data / "second"))
    assert difference.split("  ")[0] == "difference of accuracy"
    # The first model is wrong and the second right everywhere: 0 against 100 %.
    assert "+100.0 [+7.0, +100.0]" in difference, "few problems say little, whatever their samples"


def test_what_is_missing_is_said_before_anything_is_asked(suite_data, capsys):
    """A suite is refused before it asks anything, where data or the run of `--beside` are missing.

    An unknown option is refused too.
    """
    arguments = [
        "all",
        "--model",
        "a/b",
        "--output",
        str(suite_data / "out"),
        "--data",
        str(suite_data),
    ]
    (suite_data / "wemath").rename(suite_data / "moved")
    assert main(arguments) == 2
    assert "has no 'wemath'; put it there" in capsys.readouterr().err
    assert main([*arguments, "--beside", str(suite_data / "none")]) == 2
    assert not (suite_data / "out").exists()
    assert main([*arguments, "--modle", "x"]) == 2
