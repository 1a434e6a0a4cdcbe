"""The list of the benchmarks.

A new benchmark is one file, `eval/NAME.py`, with a `BENCHMARK`, and its name in `NAMES`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from eval.records import Benchmark

NAMES = ("geometry3k", "mathvista", "mathvision", "mmstar", "wemath", "mathverse", "knights")
_OF_SOURCES = {"knights": "knights"}  # the source in the manifest of a prepared data set, where not Geometry3K's grader


def named(name: str) -> Benchmark:
    """The benchmark of that name, one of `NAMES`."""
    found: Benchmark = import_module(f"eval.{name}").BENCHMARK
    return found


def for_data(folder: Path) -> str:
    """The name of the benchmark that scores the held-out split of a data set, by the source in its manifest."""
    from adora_vl.data.dataset import read_manifest

    manifest = read_manifest(folder)
    return _OF_SOURCES.get(manifest["source"], "geometry3k") if manifest else "geometry3k"
