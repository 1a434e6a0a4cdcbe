"""Every option of every command of data preparation and evaluation, given nonsense: one line that names it, code 2.

The options are read from the commands' own parsers, so a new one is tried without being written down here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from adora_vl.commands import Parser
from data_prep.cli import main as data_prep
from data_prep.cli import parser as data_prep_parser
from eval import compare
from eval.command import main as evaluate
from eval.geometry3k.benchmark import BENCHMARK as GEOMETRY3K
from eval.knights.benchmark import BENCHMARK as KNIGHTS
from eval.mathvista.benchmark import BENCHMARK as MATHVISTA
from eval.mmstar.benchmark import BENCHMARK as MMSTAR
from eval.options import build_parser

pytestmark = pytest.mark.slow

SWITCHES = (argparse._HelpAction, argparse._StoreTrueAction, argparse.BooleanOptionalAction)
Main = Callable[[list[str]], int]
BENCHMARKS = (GEOMETRY3K, KNIGHTS, MATHVISTA, MMSTAR)
NEVER_A_NUMBER = ["nan", "-1", "-0.5", "1e999", "-inf", "x", "[1,2]", "1,2", "9" * 5000, "0x10", "²", "true"]
NEVER_ANYTHING = ["", "  ", "\0"]


def commands() -> Iterator[tuple[str, Main, Parser, list[str]]]:
    """Name, entry point, the parser of its options, and the words before them."""
    yield from ((f"data_prep {name}", data_prep, sub, [name]) for name, sub in subparsers(data_prep_parser()))
    for benchmark in BENCHMARKS:
        parser = build_parser(benchmark.name, benchmark.split, benchmark.add_data_options, benchmark.add_score_options)

        def main(words: list[str], benchmark: object = benchmark) -> int:
            return evaluate(benchmark, words)  # type: ignore[arg-type]

        yield from ((f"{benchmark.name} {verb}", main, sub, [verb]) for verb, sub in subparsers(parser))
    yield "compare", compare.main, compare.build_parser(), []


def subparsers(parser: Parser) -> Iterator[tuple[str, Parser]]:
    (action,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    yield from action.choices.items()


def is_number(action: argparse.Action) -> bool:
    """Whether an ordinary whole number is taken, or said to be out of range, rather than a word."""
    if action.type is None or action.choices:
        return False
    try:
        return isinstance(action.type("1" if "pixels" not in action.dest else "1000"), int | float)  # type: ignore[operator]
    except argparse.ArgumentTypeError:
        return True


def cases() -> Iterator[object]:
    for name, main, parser, before in commands():
        required = [a for a in parser._actions if a.required]
        for action in parser._actions:
            if isinstance(action, SWITCHES):
                continue
            bad = NEVER_ANYTHING + (NEVER_A_NUMBER if is_number(action) or action.choices else [])
            bad += ["x" * 300 + "/y"] if isinstance(action.default, Path) or action.metavar in ("DIR", "FILE") else []
            others = [word for other in required if other is not action for word in words_of(other)]
            yield pytest.param(main, before, others, action, bad, id=f"{name} {action.dest}")


def words_of(action: argparse.Action) -> list[str]:
    """Something that the option takes."""
    value = next(iter(action.choices)) if action.choices else "3"
    return [f"{action.option_strings[0]}={value}"] if action.option_strings else [value]


@pytest.mark.parametrize(("main", "before", "others", "action", "bad"), list(cases()))
def test_nonsense_is_one_line_that_names_the_option(
    main: Main,
    before: list[str],
    others: list[str],
    action: argparse.Action,
    bad: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    named = action.option_strings[0] if action.option_strings else str(action.metavar)
    for value in bad:
        word = [f"{named}={value}"] if action.option_strings else [value]
        if not action.option_strings and value.startswith("-"):
            continue
        assert main([*before, *others, *word]) == 2, value
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1, said
        assert named.strip("-") in said.replace("_", "-") and len(said) < 600, said
        assert not list(tmp_path.iterdir()), f"{word} left something"


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_nonsense_in_a_file_names_the_key(
    benchmark: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same of a YAML file, where a value may have a type of its own."""
    monkeypatch.chdir(tmp_path)
    (parser,) = [
        parser
        for name, _, parser, _ in commands()
        if name == f"{benchmark.name} run"  # type: ignore[attr-defined]
    ]
    config = tmp_path / "c.yaml"
    for action in parser._actions:
        if action.dest in ("help", "config"):
            continue
        bad: list[object] = ["", [1], {"a": 1}]
        if is_number(action) or action.choices:
            bad += [float("nan"), float("inf"), -1, True, "x"]
        for value in bad:
            config.write_text(yaml.safe_dump({action.dest: value}))
            assert evaluate(benchmark, ["run", "--config", str(config)]) == 2, (action.dest, value)  # type: ignore[arg-type]
            said = capsys.readouterr().err
            assert said.startswith("error: ") and said.count("\n") == 1, said
            assert action.dest in said.replace("-", "_"), (value, said)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: [", b"- 1", b"", b"&a [*a, *a]", b"[" * 3000], ids=repr)
def test_a_file_that_is_no_config_is_named(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_bytes(content)
    for path in (config, tmp_path, tmp_path / "missing"):
        assert evaluate(GEOMETRY3K, ["run", "--config", str(path)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: config: ") and said.count("\n") == 1


@pytest.mark.parametrize("word", ["null", "none", "Null", "NONE"])
def test_null_is_null_on_the_command_line_and_in_a_file(word: str, tmp_path: Path) -> None:
    options = build_parser("geometry3k", "test", None, GEOMETRY3K.add_score_options)
    found = options.parse_args(["run", f"--system-prompt={word}", f"--limit={word}", f"--revision={word}"])
    assert (found.system_prompt, found.limit, found.revision) == (None, None, None)
