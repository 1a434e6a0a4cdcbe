"""Options of an evaluation stand once, for a command and for Python."""

from argparse import ArgumentParser
from dataclasses import dataclass, replace

import pytest

from adora_vl.evals.asking import AskOptions
from adora_vl.evals.benchmark import BENCHMARK_NAMES, default_data_options, find_benchmark
from adora_vl.evals.options import DataOptions, ScoreOptions, add_options, option, options_from
from eval.command import parse_command


@dataclass(frozen=True, kw_only=True)
class Options(ScoreOptions):
    """Options of a benchmark."""

    longest: int = option(7, help="in words", type=int, metavar="N")


@dataclass(frozen=True, kw_only=True)
class Demanding(DataOptions):
    """Options of which one has to be given."""

    level: int = option(help="of the problems", type=int)


def test_a_parser_reads_the_options_of_a_dataclass_with_its_defaults() -> None:
    """`answer_tags` is no option of the command, and is given by the caller."""
    parser = ArgumentParser()
    add_options(parser, Options)
    assert options_from(Options, parser.parse_args([])) == Options()
    parsed = parser.parse_args(["--longest", "3"])
    assert options_from(Options, parsed, answer_tags=True) == Options(longest=3, answer_tags=True)


@pytest.mark.parametrize("name", BENCHMARK_NAMES)
def test_the_command_and_a_training_have_the_same_defaults(name: str) -> None:
    """A command without options has the defaults of an evaluation during a training.

    The latter builds its options without a command line.
    """
    benchmark = find_benchmark(name)
    command = parse_command(["run", "--model", "M", "--data", "D", "--output", "O"], benchmark)
    assert isinstance(command.ask_options, AskOptions)
    assert command.score_options is not None
    prompt = getattr(command.ask_options.data, "prompt", None)
    assert command.ask_options.data == default_data_options(benchmark, "D", prompt)
    assert replace(command.score_options, output=None) == benchmark.score_options()


def test_an_option_without_a_default_is_refused_where_the_benchmark_is_made() -> None:
    benchmark = find_benchmark("knights")
    with pytest.raises(TypeError, match=r"Demanding\.level has no default"):
        replace(benchmark, data_options=Demanding)
