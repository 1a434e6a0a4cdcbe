"""The list of the benchmarks.

A new benchmark is one file, `eval/NAME.py`, with a `BENCHMARK`, and its name in `BENCHMARK_NAMES`;
or a file of the user's own.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

from adora_vl.evals.options import DataOptions
from adora_vl.evals.records import Benchmark, LoadedProblems
from adora_vl.utils.errors import UserError, did_you_mean
from adora_vl.utils.own_files import is_users_file, load_from_file

BENCHMARK_NAMES = (
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
# A checkout and an installed wheel both have the folder beside the package.
BENCHMARK_FOLDER = Path(__file__).resolve().parents[2] / "eval"
# The name under which `eval/` is imported as a package; no folder has it.
_BENCHMARK_PACKAGE = "adora_vl_benchmarks"
# The sources of prepared data sets whose benchmark has the same name.
_SOURCES_WITH_BENCHMARK = ("knights", "geometry3k")


def find_benchmark(name: str, key: str = "benchmark", extra_names: Sequence[str] = ()) -> Benchmark:
    """Return the benchmark of this name, or the one in a user's own `FILE.py:NAME`.

    Args:
        name: One of `BENCHMARK_NAMES`, or `FILE.py:NAME`.
        key: The option or config key that has the name, with which an error begins.
        extra_names: Further names that the caller understands; an error lists them too.

    Raises `UserError` for any other name, and for a file without such a benchmark.
    """
    if name in BENCHMARK_NAMES:
        return load_shipped_benchmark(name)
    if is_users_file(name):
        loaded = load_from_file(
            key, name, noun="benchmark", fits=lambda value: isinstance(value, Benchmark)
        )
        benchmark: Benchmark = replace(loaded.function_or_class, file=loaded.hash)
        return benchmark
    names = (*BENCHMARK_NAMES, *extra_names)
    suggestion = did_you_mean(name, names)
    raise UserError(
        f"{key}: {name!r} is not one of {', '.join(names)}, or FILE.py:NAME{suggestion}"
    )


def load_shipped_benchmark(name: str) -> Benchmark:
    """Import one of our own benchmarks from its file `eval/NAME.py` beside this package.

    The file is found by its location, and imported as a part of the package `_BENCHMARK_PACKAGE`.
    Under the name `eval` Python might find an `eval.py` or a folder `eval/` of the user's, and
    would run it. Raises `UserError` where the file is missing.
    """
    if not (BENCHMARK_FOLDER / f"{name}.py").is_file():
        raise UserError(
            f"benchmark: there is no {name}.py in {str(BENCHMARK_FOLDER)!r}; install adora-vl again"
        )
    if _BENCHMARK_PACKAGE not in sys.modules:
        package = ModuleType(_BENCHMARK_PACKAGE)
        # A module with a path is a package, so that a benchmark can import a file beside it.
        package.__path__ = [str(BENCHMARK_FOLDER)]
        sys.modules[_BENCHMARK_PACKAGE] = package
    benchmark: Benchmark = import_module(f"{_BENCHMARK_PACKAGE}.{name}").BENCHMARK
    return benchmark


def load_checked_problems(benchmark: Benchmark, options: DataOptions) -> LoadedProblems:
    """Load the problems of a benchmark, and check that all of them can be asked.

    A benchmark in a user's own file may have checked nothing. Raises `UserError` where two problems
    have the same id, by which answers are matched, or where the text of one cannot be asked.
    """
    # Imported here, because pyarrow takes long, and Ctrl-C in the meantime ends with a line.
    from adora_vl.evals.inference.dataset import describe_prompt_fault

    # A user's own benchmark may return a plain tuple.
    loaded = LoadedProblems(*benchmark.load(options))
    pids: set[str] = set()
    for problem in loaded.problems:
        if problem.pid in pids:
            raise UserError(f"data: the id {problem.pid!r} occurs twice; ids have to be unique")
        fault = describe_prompt_fault(problem.prompt, has_image=problem.n_images > 0)
        if fault:
            raise UserError(f"data: the problem {problem.pid!r} {fault}")
        pids.add(problem.pid)
    return loaded


def default_data_options(benchmark: Benchmark, data: str, prompt: str | None) -> DataOptions:
    """Return the options with which a benchmark loads data during a training.

    Options that only this benchmark has keep their defaults.

    Args:
        benchmark: The benchmark.
        data: The folder, file or hub id of the data.
        prompt: The template of the prompts, for a benchmark with such an option; others ignore it.
    """
    # `fingerprint` names the data options of a benchmark on which an answer depends.
    kwargs = {"prompt": prompt} if "prompt" in benchmark.fingerprint else {}
    return benchmark.data_options(data=data, split=benchmark.split, **kwargs)


def benchmark_name_for(folder: Path) -> str:
    """Return the name of the benchmark that scores the test split of a prepared data set.

    The source that its manifest names decides. Data of any other source, or without a manifest, are
    scored by the benchmark `problems`.
    """
    from adora_vl.data.dataset import read_manifest

    manifest = read_manifest(folder)
    if not manifest:
        return "problems"
    source, _, _ = str(manifest["source"]).partition("/")
    return source if source in _SOURCES_WITH_BENCHMARK else "problems"
