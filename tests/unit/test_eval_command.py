"""The command line: options, the YAML file under them, and one line with exit code 2 for the user's mistakes."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from adora_vl.prompts import SYSTEM_PROMPT
from data_prep.storage import write_split
from data_prep.synthetic.generate import generate
from eval.command import Benchmark, main
from eval.geometry3k.benchmark import BENCHMARK as GEOMETRY3K
from eval.mathvista.benchmark import BENCHMARK as MATHVISTA
from eval.mmstar.benchmark import BENCHMARK as MMSTAR
from eval.options import parse

BENCHMARKS = {benchmark.name: benchmark for benchmark in (GEOMETRY3K, MATHVISTA, MMSTAR)}
CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "eval").glob("*.yaml"))
NEEDED = ["--model", "M", "--data", "D", "--output", "O"]


def options_of(words: list[str], benchmark: Benchmark = GEOMETRY3K) -> Namespace:
    return parse(words, benchmark.name, benchmark.split, benchmark.add_data_options, benchmark.add_score_options)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_every_config_is_read(config: Path) -> None:
    benchmark = BENCHMARKS[config.stem]
    options = options_of(["run", "--config", str(config), *NEEDED], benchmark)
    assert (options.temperature, options.split, options.max_pixels) == (0.0, benchmark.split, None)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_a_runs_config_serves_its_infer_too(config: Path) -> None:
    assert not hasattr(options_of(["infer", "--config", str(config), *NEEDED], BENCHMARKS[config.stem]), "rules")


def test_every_benchmark_has_a_config() -> None:
    assert {path.stem for path in CONFIGS} == BENCHMARKS.keys()


def test_the_command_line_goes_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("model: from/file\nmax_tokens: 7\nlimit: 3\nsystem_prompt: null\nrounding: true\nseed: 5\n")
    options = options_of(["run", "--limit", "4", "--config", str(config), "--data", "D", "--output", "O"])
    assert (options.model, options.max_tokens, options.limit, options.seed) == ("from/file", 7, 4, 5)
    assert options.system_prompt is None
    assert options.rounding is True
    assert options_of(["run", "--config", str(config), "--no-rounding", *NEEDED]).rounding is False


def test_defaults_are_greedy_and_the_trainings_prompt() -> None:
    options = options_of(["infer", *NEEDED])
    assert (options.temperature, options.system_prompt, options.dtype) == (0.0, SYSTEM_PROMPT, "auto")
    assert (options.limit, options.min_pixels, options.max_pixels) == (None, None, None)
    assert options_of(["infer", *NEEDED, "--system-prompt", "none"]).system_prompt is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["run", "--model", "M", "--data", "D"], "--output is missing"),
        (["run", *NEEDED, "--max-tokens", "0"], "--max-tokens: '0' is not a whole number from 1 to 1048576"),
        (["run", *NEEDED, "--temperature", "nan"], "--temperature: 'nan' is not 0 or a number from 0.01 to 100"),
        (["run", *NEEDED, "--max_tokens", "9"], "unrecognized arguments: --max_tokens 9"),
        (["run", *NEEDED, "--engine", "sglang"], "'sglang'"),
        (["run", *NEEDED, "--model", "./missing"], "model: './missing' is neither a folder here nor a hub id"),
        (["run", *NEEDED, "--model", "missing"], "model: 'missing' is neither a folder here nor a hub id"),
        # It has the form of a hub id, but `tests` is a folder.
        (["run", *NEEDED, "--model", "tests/missing"], "model: 'tests/missing' is neither"),
        (["run", *NEEDED, "--model", "tests"], "the folder 'tests' has no config.json"),
        (["run", *NEEDED, "--model", "owner/name", "--data", "./none"], "no folder 'none'"),
        (["score", "--predictions", "none.jsonl", "--output", "s.json"], "no file 'none.jsonl'"),
    ],
)
def test_the_users_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(GEOMETRY3K, arguments) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ")
    assert message in stderr
    assert stderr.count("\n") == 1


def test_a_split_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(generate(1, split="test"), tmp_path / "data", "test")
    assert (
        main(GEOMETRY3K, ["infer", *NEEDED, "--model", "a/b", "--data", str(tmp_path / "data"), "--split", "val"]) == 2
    )
    assert "has no split 'val'" in capsys.readouterr().err


def test_an_unknown_key_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("max_token: 5\n")
    assert main(GEOMETRY3K, ["run", *NEEDED, "--config", str(tmp_path / "c.yaml")]) == 2
    assert "unknown key 'max_token'; did you mean 'max_tokens'?" in capsys.readouterr().err


def test_score_writes_the_file_and_shows_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"pid": "1", "answer": "5", "response": r"\boxed{5}"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    output = tmp_path / "new" / "s.json"
    assert main(GEOMETRY3K, ["score", "--predictions", str(tmp_path / "p.jsonl"), "--output", str(output)]) == 0
    score = json.loads(output.read_text())
    assert (score["correct"], score["total"], score["accuracy"]) == (1, 1, 1.0)
    assert "1/1" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "blind"), [("true", True), ("false", False)])
def test_no_image_is_a_switch_in_a_file_and_on_the_command_line(value: str, blind: bool, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"no_image: {value}\n")
    assert options_of(["run", *NEEDED, "--config", str(tmp_path / "c.yaml")], MMSTAR).no_image is blind
    assert options_of(["run", *NEEDED, "--no-image"], MMSTAR).no_image is True
