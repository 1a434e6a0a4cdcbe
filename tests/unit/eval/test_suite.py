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

TEXT_LIMITS_OF_BUILT_ENGINES: list[int] = []
HUB_ID_BY_BENCHMARK = suite.HUB_ID_BY_BENCHMARK_BY_SUITE["reasoning"]


class SameAnswerEngine:
    """The same to everything; notes for how long texts it is built."""

    batch_size = 4

    def __init__(self, text: str, longest: int) -> None:
        self.text = text
        TEXT_LIMITS_OF_BUILT_ENGINES.append(longest)

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
        return [Reply(self.text, 3, "stop", 9) for _ in requests]


@pytest.fixture
def folder_of_all_benchmarks(tmp_path: Path) -> Path:
    for name in HUB_ID_BY_BENCHMARK:
        folder = WRITER_BY_BENCHMARK[name](tmp_path)
        folder.rename(tmp_path / "made") if folder.name != name else None
        (tmp_path / "made").rename(tmp_path / name) if folder.name != name else None
    return tmp_path


def test_a_row_with_one_start_of_the_engine(folder_of_all_benchmarks, monkeypatch, capsys):
    TEXT_LIMITS_OF_BUILT_ENGINES.clear()
    for name, text in (("first", "Answer: A"), ("second", "Answer: B")):
        monkeypatch.setattr(
            suite,
            "build_engine",
            lambda settings, t=text: SameAnswerEngine(t, settings.max_text_bytes),
        )
        words = [
            "all",
            "--suite",
            "reasoning",
            "--model",
            "a/b",
            "--data",
            str(folder_of_all_benchmarks),
            "--output",
            str(folder_of_all_benchmarks / name),
        ]
        assert main([*words, "--samples", "3", "--temperature", "1"]) == 0
        head, row, note = capsys.readouterr().out.splitlines()[-3:]
        assert head.split() == list(HUB_ID_BY_BENCHMARK)
        assert row.startswith(str(folder_of_all_benchmarks / name))
        assert "its strict score" in note
    assert len(TEXT_LIMITS_OF_BUILT_ENGINES) == 2, (
        "an engine for each model, that fits all benchmarks"
    )
    assert len(set(TEXT_LIMITS_OF_BUILT_ENGINES)) == 1, (
        "an engine for each model, that fits all benchmarks"
    )
    assert (
        main(
            [
                *words,
                "--samples",
                "3",
                "--temperature",
                "1",
                "--beside",
                str(folder_of_all_benchmarks / "first"),
            ]
        )
        == 0
    )
    assert len(TEXT_LIMITS_OF_BUILT_ENGINES) == 2, "all answers were there"
    first, second, difference = capsys.readouterr().out.splitlines()[-4:-1]
    assert first.startswith(str(folder_of_all_benchmarks / "first"))
    assert second.startswith(str(folder_of_all_benchmarks / "second"))
    assert difference.split("  ")[0] == "difference of accuracy"
    assert "+100.0 [+100.0, +100.0]" in difference


def test_what_is_missing_is_said_before_anything_is_asked(folder_of_all_benchmarks, capsys):
    words = [
        "all",
        "--model",
        "a/b",
        "--output",
        str(folder_of_all_benchmarks / "out"),
        "--data",
        str(folder_of_all_benchmarks),
    ]
    (folder_of_all_benchmarks / "wemath").rename(folder_of_all_benchmarks / "moved")
    assert main(words) == 2
    assert "has no 'wemath'; put it there" in capsys.readouterr().err
    assert main([*words, "--beside", str(folder_of_all_benchmarks / "none")]) == 2
    assert not (folder_of_all_benchmarks / "out").exists()
    assert main([*words, "--modle", "x"]) == 2
