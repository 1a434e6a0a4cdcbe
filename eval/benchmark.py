"""The list of the benchmarks.

A new benchmark is one file, `eval/NAME.py`, with a `BENCHMARK`, and its name in `NAMES`; or a file
of the user's own.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from adora_vl.utils.errors import UserError, did_you_mean, refuse
from adora_vl.utils.own_files import from_file, is_own
from eval.records import Benchmark, Problem

NAMES = (
    "geometry3k",
    "mathvista",
    "mathvision",
    "mmstar",
    "wemath",
    "mathverse",
    "mmmu_pro",
    "logicvista",
    "dynamath",
    "knights",
    "problems",
)
# By the beginning of the source in the manifest of a prepared data set; any other is `problems`.
_OF_SOURCES = {"knights": "knights", "geometry3k": "geometry3k"}


def named(name: str, key: str = "benchmark", others: Sequence[str] = ()) -> Benchmark:
    """The benchmark of that name.

    `others`: words beside `NAMES`. Raises `UserError`, which begins with `key`.
    """
    if name in NAMES:
        found: Benchmark = import_module(f"eval.{name}").BENCHMARK
    elif is_own(name):
        own = from_file(
            key, name, noun="benchmark", fits=lambda value: isinstance(value, Benchmark)
        )
        found = replace(own.value, file=own.hash)
    else:
        known = (*NAMES, *others)
        close = did_you_mean(name, known)
        raise UserError(f"{key}: {name!r} is not one of {', '.join(known)}, or FILE.py:NAME{close}")
    return found


def loaded(benchmark: Benchmark, options: Namespace) -> tuple[list[Problem], str]:
    """The problems of a benchmark, a user's own too, and a hash of their data.

    Raises `UserError` where two have the same id, by which answers are found, or where a text
    cannot be asked.
    """
    from eval.inference.dataset import (
        unaskable,
    )  # in here: pyarrow takes long, and Ctrl-C then ends with a line

    problems, data_hash = benchmark.load(options)
    seen: set[str] = set()
    for problem in problems:
        refuse(
            (
                problem.pid in seen,
                f"data: the id {problem.pid!r} occurs twice; ids have to be unique",
            )
        )
        if fault := unaskable(problem.prompt, has_image=problem.n_images > 0):
            raise UserError(f"data: the problem {problem.pid!r} {fault}")
        seen.add(problem.pid)
    return problems, data_hash


def for_data(folder: Path) -> str:
    """The name of the benchmark that scores the held-out split of a data set, by the source in its
    manifest.
    """
    from adora_vl.data.dataset import read_manifest

    manifest = read_manifest(folder)
    source = str(manifest["source"]).partition("/")[0] if manifest else ""
    return _OF_SOURCES.get(source, "problems")
