"""The list of the benchmarks.

A new benchmark is one file, `eval/NAME.py`, with a `BENCHMARK`, and its name in `NAMES`; or a file
of the user's own.
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
from adora_vl.utils.own_files import from_file, is_own

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
# A checkout and an installed wheel both have the folder beside the package.
BENCHMARK_FILES = Path(__file__).resolve().parents[2] / "eval"
_PACKAGE = "adora_vl_benchmarks"  # the name in `sys.modules`; no file has it
# By the beginning of the source in the manifest of a prepared data set; any other is `problems`.
_OF_SOURCES = {"knights": "knights", "geometry3k": "geometry3k"}


def find_benchmark(name: str, key: str = "benchmark", extra_names: Sequence[str] = ()) -> Benchmark:
    """Return the benchmark of a name in `NAMES`, or of a user's own `FILE.py:NAME`.

    Args:
        name: The name.
        key: The option or key that names it, with which an error begins.
        extra_names: Words beside `NAMES` that the caller understands, for the error alone.

    Raises `UserError` for any other name, and for a file without such a benchmark.
    """
    if name in NAMES:
        benchmark = load_shipped_benchmark(name)
    elif is_own(name):
        user_file = from_file(
            key, name, noun="benchmark", fits=lambda value: isinstance(value, Benchmark)
        )
        benchmark = replace(user_file.value, file=user_file.hash)
    else:
        names = (*NAMES, *extra_names)
        close = did_you_mean(name, names)
        raise UserError(f"{key}: {name!r} is not one of {', '.join(names)}, or FILE.py:NAME{close}")
    return benchmark


def load_shipped_benchmark(name: str) -> Benchmark:
    """Return one of our benchmarks, from its file `eval/NAME.py` beside this package.

    The file is found by where it lies, and imported under a name of our own. Under the name `eval`
    Python could find an `eval.py` or a folder `eval/` of the user's first, and would run it.
    Raises `UserError` where the file is missing.
    """
    if not (BENCHMARK_FILES / f"{name}.py").is_file():
        raise UserError(
            f"benchmark: there is no {name}.py in {str(BENCHMARK_FILES)!r}; install adora-vl again"
        )
    if _PACKAGE not in sys.modules:
        package = ModuleType(_PACKAGE)
        # With a path it is a package, so that a benchmark can import a file beside it.
        package.__path__ = [str(BENCHMARK_FILES)]
        sys.modules[_PACKAGE] = package
    benchmark: Benchmark = import_module(f"{_PACKAGE}.{name}").BENCHMARK
    return benchmark


def load_checked_problems(benchmark: Benchmark, options: DataOptions) -> LoadedProblems:
    """Return the problems of a benchmark, a user's own too, and a hash of their data.

    Raises `UserError` where two have the same id, by which answers are found, or where a text
    cannot be asked.
    """
    # Imported here, because pyarrow takes long, and Ctrl-C in the meantime ends with a line.
    from adora_vl.evals.inference.dataset import unaskable

    # A user's own benchmark may return a plain tuple.
    everything = LoadedProblems(*benchmark.load(options))
    pids: set[str] = set()
    for problem in everything.problems:
        if problem.pid in pids:
            raise UserError(f"data: the id {problem.pid!r} occurs twice; ids have to be unique")
        if fault := unaskable(problem.prompt, has_image=problem.n_images > 0):
            raise UserError(f"data: the problem {problem.pid!r} {fault}")
        pids.add(problem.pid)
    return everything


def data_options(benchmark: Benchmark, data: str, prompt: str | None) -> DataOptions:
    """Return the options with which a benchmark loads `data`, its own ones at their defaults.

    `prompt`: the template of what is asked, for a benchmark that has one.
    """
    kwargs = {"prompt": prompt} if "prompt" in benchmark.fingerprint else {}
    return benchmark.data_options(data=data, split=benchmark.split, **kwargs)


def benchmark_name_for(folder: Path) -> str:
    """Return the name of the benchmark that scores the held-out split of a data set.

    The source in the manifest of the folder decides; without one it is `problems`.
    """
    from adora_vl.data.dataset import read_manifest

    manifest = read_manifest(folder)
    source = str(manifest["source"]).partition("/")[0] if manifest else ""
    return _OF_SOURCES.get(source, "problems")
