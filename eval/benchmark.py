"""What a benchmark has to give, and the list of the benchmarks.

A new benchmark is one file, `eval/NAME.py`, with a `BENCHMARK`, and its name in `NAMES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from PIL import Image

    from eval.inference.predictions import Prediction
    from eval.scoring.score import Graded, OwnFigures, RowGrade

NAMES = ("geometry3k", "mathvista", "mathvision", "mmstar", "wemath", "mathverse", "knights")
_GREY = (128, 128, 128)
_OF_SOURCES = {"knights": "knights"}  # the source in the manifest of a prepared data set, where not Geometry3K's grader


@dataclass(frozen=True)
class Problem:
    """One problem to ask. `fields` go into the predictions row as they are and have a unique `pid`.

    `images` decodes the images only when it is called, so that memory holds one batch of them and a broken image costs
    one problem. `sizes` gives width and height of each without decoding; None: `images` has to be called for them.
    """

    fields: dict[str, Any]
    prompt: str
    n_images: int
    images: Callable[[], list[Image.Image]]
    sizes: Callable[[], list[tuple[int, int]]] | None = None

    @property
    def pid(self) -> str:
        return str(self.fields["pid"])

    def with_grey_images(self) -> Problem:
        """The same question with an evenly grey picture of the same size in place of each."""
        return replace(self, images=self._grey) if self.n_images else self

    def _grey(self) -> list[Image.Image]:
        from PIL import Image

        sizes = [image.size for image in self.images()] if self.sizes is None else self.sizes()
        return [Image.new("RGB", size, _GREY) for size in sizes]


@dataclass(frozen=True)
class Published:
    """Figures that others have published, in percent, by row and then by column. They are quoted, not measured here.

    `source`: where they stand. `caution(score)`: why a score of ours is not comparable with them, or None.
    """

    source: str
    rows: Mapping[str, Mapping[str, float]]
    caution: Callable[[Mapping[str, Any]], str | None] | None = None


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. `options` is always the command line's namespace.

    - `load(options)`: the problems, and a hash of their data.
    - `grade(row, options)`: whether the answer in a predictions row is right, and the groups that it counts for. A
      problem whose image could not be read is counted as failed, whatever this returns.
    - `rules(options)`: by which rules an answer is right; two scores by different rules are not comparable.
    - `add_score_options`, `add_data_options`: options of its own for `score` and for `infer`.
    - `check(row)`: what is wrong with a predictions row, or None.
    - `fingerprint`: names of its own options on which an answer depends.
    - `id_column`: the column of the data with the id of a row, which is `pid` in a predictions row.
    - `prepare(rows, options)`: the rows as `grade` gets them, for work that is done on all of them at once.
    - `summary(rows, graded, options)`: figures of its own.
    - `item(row, graded)`: what the score file says about an answer; by default verdict, extracted answer and reason.
    - `published`: figures of others to compare with.
    """

    name: str
    split: str
    load: Callable[[Namespace], tuple[list[Problem], str]]
    grade: Callable[[Prediction, Namespace], RowGrade]
    rules: Callable[[Namespace], dict[str, Any]]
    add_score_options: Callable[[ArgumentParser], None] | None = None
    add_data_options: Callable[[ArgumentParser], None] | None = None
    check: Callable[[Prediction], str | None] | None = None
    fingerprint: tuple[str, ...] = ()
    id_column: str = "pid"
    prepare: Callable[[Sequence[Prediction], Namespace], Sequence[Prediction]] | None = None
    summary: Callable[[Sequence[Prediction], Sequence[Graded], Namespace], OwnFigures] | None = None
    item: Callable[[Prediction, Graded], dict[str, Any]] | None = None
    published: Published | None = None


def named(name: str) -> Benchmark:
    """The benchmark of that name, one of `NAMES`."""
    found: Benchmark = import_module(f"eval.{name}").BENCHMARK
    return found


def for_data(folder: Path) -> str:
    """The name of the benchmark that scores the held-out split of a data set, by the source in its manifest."""
    from adora_vl.data.dataset import read_manifest

    manifest = read_manifest(folder)
    return _OF_SOURCES.get(manifest["source"], "geometry3k") if manifest else "geometry3k"
