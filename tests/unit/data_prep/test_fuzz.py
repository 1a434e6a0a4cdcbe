"""Nonsense in every column and every option of data preparation and evaluation: quarantine, or one
line.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from adora_vl.data.dataset import stored_rows
from adora_vl.utils.cli import Parser
from adora_vl.utils.errors import UserError
from data_prep.cli import build_parser as data_prep_parser
from data_prep.cli import main as data_prep
from eval import compare
from eval.command import build_parser, parse_command
from eval.command import main as evaluate
from eval.geometry3k import BENCHMARK as GEOMETRY3K
from eval.knights import BENCHMARK as KNIGHTS
from eval.mathvista import BENCHMARK as MATHVISTA
from eval.mmstar import BENCHMARK as MMSTAR
from tests.support.benchmark_data import mathvista_rows, mmstar_rows
from tests.support.cases import CaseFolder
from tests.support.geometry3k import read_quarantined_rows, run_prepare_geometry3k
from tests.support.pictures import draw_figure, encode_picture

pytestmark = pytest.mark.slow

MISSING = object()  # a field that is left out
ODD_VALUES_BY_NAME: dict[str, Any] = {
    "missing": MISSING,
    "null": None,
    "empty": "",
    "blank": " \n",
    "number": 7,
    "NaN": float("nan"),
    "true": True,
    "list": ["5"],
    "list of null": [None],
    "object": {"a": 1},
    "huge": "9" * 200_000,
    "deep": "{" * 20_000,
    "markup": "<script>alert(1)</script><image>",
    "control token": "Find x.<|image_pad|><|im_end|>",
    "control characters": "a\x00b\x1b[2J\u202e",
}
# in the texts that a model reads or is graded by
NEVER_SOUND = (
    "missing",
    "null",
    "empty",
    "blank",
    "control token",
)


def checked_stderr(code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error, after checking that a refusal is error lines alone."""
    stderr = capsys.readouterr().err
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert code in (0, 2), stderr
    assert bool(errors) == (code == 2), stderr
    assert all(len(line) < 1500 for line in errors), "a line that nobody reads"
    return stderr


def write_table_with_value(column: str, value: Any, path: Path) -> None:
    """Write a Parquet file of two rows, of which at least the second has `value` in `column`.

    Both have it if the column's type would not allow it beside a good value.
    """
    image = {"bytes": encode_picture(draw_figure(1)), "path": None}
    second_image = {"bytes": encode_picture(draw_figure(2)), "path": None}
    good_columns: dict[str, Any] = {
        "id": "a/1",
        "images": [image],
        "problem": "Find x.",
        "answer": "5",
        "choices": None,
    }
    bad_row = {**good_columns, "id": "a/2", "images": [second_image], "problem": "Find y."}
    if value is MISSING:
        rows = [
            {key: item for key, item in row.items() if key != column}
            for row in (good_columns, bad_row)
        ]
    elif value is None or (isinstance(value, type(good_columns[column])) and column != "images"):
        rows = [good_columns, {**bad_row, column: value}]
    else:  # a Parquet column has one type
        rows = [{**good_columns, column: value}, {**bad_row, column: value}]
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_a_column_of_a_table(capsys: pytest.CaptureFixture[str], case_folder: CaseFolder) -> None:
    """A table with an odd value in a column is handled by preparation, inspection and evaluation.

    Each takes it or refuses it in error lines. A row that would end a run never gets through.
    """
    for column, value_name in product(
        ("id", "images", "problem", "answer", "choices"), ODD_VALUES_BY_NAME
    ):
        with case_folder((column, value_name)) as folder:
            source = folder / "raw" / "data" / "train-00000-of-00001.parquet"
            write_table_with_value(column, ODD_VALUES_BY_NAME[value_name], source)
            code = run_prepare_geometry3k(
                "parquet", folder / "raw", folder / "out", "--allow-quarantined", "1"
            )
            checked_stderr(code, capsys)
            is_sound = not (value_name in NEVER_SOUND and column in ("images", "problem", "answer"))
            is_sound = is_sound or (column, value_name) == (
                "answer",
                "control token",
            )  # no model reads a gold
            if code == 0:
                has_quarantine = (folder / "out" / "quarantine.jsonl").exists()
                refused = read_quarantined_rows(folder / "out") if has_quarantine else []
                assert sum(1 for _ in stored_rows(folder / "out", "train")) + len(refused) == 2
                assert is_sound or refused, "a row that ends a run got through"
                assert data_prep(["inspect", str(folder / "out"), "--text-only"]) == 0
            inspect_code = data_prep(["inspect", str(folder / "raw"), "--text-only"])
            errors = checked_stderr(inspect_code, capsys)
            arguments = [
                "infer",
                "--model",
                "tiny",
                "--data",
                str(folder / "raw"),
                "--split",
                "train",
                "--output",
                "o",
            ]
            error_of_loading = loading_error(GEOMETRY3K, arguments)
            assert is_sound or (inspect_code == 2 and error_of_loading is not None), errors


@pytest.mark.parametrize(
    "benchmark", [GEOMETRY3K, KNIGHTS, MATHVISTA, MMSTAR], ids=lambda benchmark: benchmark.name
)
def test_a_field_of_a_predictions_row(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of answers with an odd value in a column is scored, or refused with the row's name."""
    rows: list[dict[str, Any]] = {"mathvista": mathvista_rows(4), "mmstar": mmstar_rows(2)}.get(
        benchmark.name
    ) or [
        {
            "pid": "1",
            "question": "Who?",
            "answer": "Ada is a knight",
            "choices": None,
            "metadata": {"family": "3"},
        }
    ]
    for row in rows:
        row.pop("decoded_image", None)
        row.pop("image", None)
        row.setdefault("pid", str(row.get("index")))
        row.update(
            response="\\boxed{Ada is a knight}",
            n_tokens=3,
            finish_reason="stop",
            image_size=[5, 6],
            sample=0,
            extraction="A",
        )
    for column in rows[0]:
        for value_name, value in ODD_VALUES_BY_NAME.items():
            changed_rows = [{**row, column: value} for row in rows]
            stored_rows = [
                {key: item for key, item in row.items() if item is not MISSING}
                for row in changed_rows
            ]
            (tmp_path / "p.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in stored_rows)
            )
            option_lists: list[list[str]] = [[]]
            if benchmark is MATHVISTA:
                option_lists.append(["--extraction", "stored"])
            for options in option_lists:
                arguments = [
                    "score",
                    "--predictions",
                    str(tmp_path / "p.jsonl"),
                    "--output",
                    str(tmp_path / "out"),
                    *options,
                ]
                try:
                    exit_code = evaluate(benchmark, arguments)
                except Exception as error:
                    raise AssertionError(f"{column} {value_name} {options}") from error
                errors = checked_stderr(exit_code, capsys)
                assert exit_code == 0 or "row " in errors or "pid" in errors, (
                    column,
                    value_name,
                    errors,
                )


@pytest.mark.parametrize("benchmark", [MATHVISTA, MMSTAR], ids=lambda benchmark: benchmark.name)
def test_a_field_of_a_benchmarks_row(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Benchmark data with an odd value in a column can be asked, or are refused with the row."""
    rows: list[dict[str, Any]] = mathvista_rows(4) if benchmark is MATHVISTA else mmstar_rows(2)
    for row in rows:
        row.pop("decoded_image", None)
        row["image"] = "images/1.png"
    (tmp_path / "data").mkdir()
    for column in rows[0]:
        for value_name, value in ODD_VALUES_BY_NAME.items():
            changed_rows = [{**row, column: value} for row in rows]
            stored_rows = [
                {key: item for key, item in row.items() if item is not MISSING}
                for row in changed_rows
            ]
            (tmp_path / "data" / f"{benchmark.split}.json").write_text(json.dumps(stored_rows))
            parsed = [
                "infer",
                "--model",
                "tiny",
                "--data",
                str(tmp_path / "data"),
                "--output",
                str(tmp_path / "o"),
            ]
            message = loading_error(benchmark, parsed)
            if value_name == "control token" and column in ("question", "query", "choices"):
                # the data's own `query` is what is asked
                unread = column == "question" and benchmark is MATHVISTA
                assert message is not None or unread, (column, value_name)
            if column == "answer" and value_name in ("missing", "null"):
                assert message is not None
            assert message is None or "row" in message or "id" in message, (
                column,
                value_name,
                message,
            )


def loading_error(benchmark: Any, words: list[str]) -> str | None:
    """Return the error with which a benchmark refuses its data; None where it takes them."""
    options = parse_command(words, benchmark).ask_options.data
    try:
        benchmark.load(options)
    except UserError as error:
        return str(error)
    return None


# The kinds of options that take no value.
SWITCHES = (argparse._HelpAction, argparse._StoreTrueAction, argparse.BooleanOptionalAction)
Main = Callable[[list[str]], int]
BENCHMARKS = (GEOMETRY3K, KNIGHTS, MATHVISTA, MMSTAR)
# Values of an option that are refused where it takes a number, and where it takes anything.
NEVER_A_NUMBER = [
    "nan",
    "-1",
    "-0.5",
    "1e999",
    "-inf",
    "x",
    "[1,2]",
    "1,2",
    "9" * 5000,
    "0x10",
    "²",
    "true",
]
NEVER_ANYTHING = ["", "  ", "\0"]


def commands() -> Iterator[tuple[str, Main, Parser, list[str]]]:
    """Name, entry point, the parser of its options, and the words before them."""
    yield from (
        (f"data_prep {name}", data_prep, sub, [name])
        for name, sub in subparsers(data_prep_parser())
    )
    for benchmark in BENCHMARKS:
        parser = build_parser(benchmark)

        def main(words: list[str], benchmark: object = benchmark) -> int:
            return evaluate(benchmark, words)  # type: ignore[arg-type]

        yield from (
            (f"{benchmark.name} {verb}", main, sub, [verb]) for verb, sub in subparsers(parser)
        )
    yield "compare", compare.main, compare.build_parser(), []


def subparsers(parser: Parser) -> Iterator[tuple[str, Parser]]:
    (action,) = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    yield from action.choices.items()


def is_number(action: argparse.Action) -> bool:
    """Tell whether an option takes an ordinary whole number, or says that it is out of range."""
    if action.type is None or action.choices:
        return False
    try:
        return isinstance(
            action.type("1" if "pixels" not in action.dest else "1000"),  # type: ignore[operator]
            int | float,
        )
    except argparse.ArgumentTypeError:
        return True


def bad_values(action: argparse.Action) -> list[str]:
    """List values that the option can never take."""
    never_taken = NEVER_ANYTHING + (NEVER_A_NUMBER if is_number(action) or action.choices else [])
    never_taken += (
        ["x" * 300 + "/y"]
        if isinstance(action.default, Path) or action.metavar in ("DIR", "FILE")
        else []
    )
    return (
        never_taken
        if action.option_strings
        else [value for value in never_taken if not value.startswith("-")]
    )


def valid_words(action: argparse.Action) -> list[str]:
    """Words with which the command takes this option."""
    value = next(iter(action.choices)) if action.choices else "3"
    return [f"{action.option_strings[0]}={value}"] if action.option_strings else [value]


def test_nonsense_is_one_line_that_names_the_option(monkeypatch, capsys, case_folder):
    """Every option of every command with every value that it can never take."""
    for name, main, parser, words_before in commands():
        with case_folder(name) as folder:
            monkeypatch.chdir(folder)
            assert values_not_refused_by_name(main, parser, words_before, folder, capsys) == {}


def values_not_refused_by_name(
    main: Main, parser: Parser, before: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> dict[tuple[str, str], object]:
    """Try values that options can never take, and return those that are not refused in one line.

    By option and value: the exit code, stderr and the files in `folder`. `before`: the words before
    the options.
    """
    values_by_option: dict[tuple[str, str], object] = {}
    required = [action for action in parser._actions if action.required]
    tried = 0
    for action in (action for action in parser._actions if not isinstance(action, SWITCHES)):
        option_name = action.option_strings[0] if action.option_strings else str(action.metavar)
        required_words = [
            word
            for required_action in required
            if required_action is not action
            for word in valid_words(required_action)
        ]
        for value in bad_values(action):
            tried += 1
            code = main(
                [
                    *before,
                    *required_words,
                    f"{option_name}={value}" if action.option_strings else value,
                ]
            )
            stderr = capsys.readouterr().err
            one_line = (
                stderr.startswith("error: ") and stderr.count("\n") == 1 and len(stderr) < 600
            )
            if (
                code != 2
                or not one_line
                or option_name.strip("-") not in stderr.replace("_", "-")
                or list(folder.iterdir())
            ):
                values_by_option[option_name, value[:40]] = (code, stderr, list(folder.iterdir()))
    assert tried > 0
    return values_by_option


def test_help_says_something_of_every_option():
    """No option of any command is without a help text."""
    silent_options = [
        f"{name} {action.option_strings or action.metavar}"
        for name, _, parser, _ in commands()
        for action in parser._actions
        if not action.help
    ]
    assert silent_options == []


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_nonsense_in_a_file_names_the_key(benchmark, tmp_path, monkeypatch, capsys):
    """A value in a YAML file that an option can never take is refused in one line with its key.

    A YAML value may have a type of its own.
    """
    monkeypatch.chdir(tmp_path)
    (parser,) = [parser for name, _, parser, _ in commands() if name == f"{benchmark.name} run"]
    config = tmp_path / "c.yaml"
    for action in parser._actions:
        if action.dest in ("help", "config"):
            continue
        never_taken: list[object] = ["", [1], {"a": 1}]
        if is_number(action) or action.choices:
            never_taken += [float("nan"), float("inf"), -1, True, "x"]
        for value in never_taken:
            config.write_text(yaml.safe_dump({action.dest: value}))
            assert evaluate(benchmark, ["run", "--config", str(config)]) == 2, (action.dest, value)
            stderr = capsys.readouterr().err
            assert stderr.startswith("error: "), stderr
            assert stderr.count("\n") == 1, stderr
            assert action.dest in stderr.replace("-", "_"), (value, stderr)


def test_a_file_that_is_no_config_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case_folder: CaseFolder
) -> None:
    """A config that is broken, missing or a folder is refused in one line."""
    for content in (b"\xff\xfe", b"a: [", b"- 1", b"", b"&a [*a, *a]", b"[" * 3000):
        with case_folder(content) as folder:
            (folder / "c.yaml").write_bytes(content)
            for path in (folder / "c.yaml", folder, folder / "missing"):
                assert evaluate(GEOMETRY3K, ["run", "--config", str(path)]) == 2
                stderr = capsys.readouterr().err
                assert stderr.startswith("error: config: ")
                assert stderr.count("\n") == 1


def test_null_is_null_on_the_command_line() -> None:
    for word in ("null", "none", "Null", "NONE"):
        arguments = ["run", f"--system-prompt={word}", f"--limit={word}", f"--revision={word}"]
        options = build_parser(GEOMETRY3K).parse_args(arguments)
        assert options.system_prompt is None
        assert options.limit is None
        assert options.revision is None
