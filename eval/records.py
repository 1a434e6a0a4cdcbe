"""What passes between the parts of the evaluation: problems, benchmarks, grades, scores. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from PIL import Image

Prediction = dict[str, Any]  # a row of `predictions.jsonl`
Score = dict[str, Any]  # the content of a score file: `docs/evaluation.md` describes it, `eval.scoring.score` makes it
CORRECT, WRONG = "correct", "wrong"
FAILED = "failed"  # not asked, or the extraction failed; counts as not correct
JUDGE_FAILED = "judge_failed"  # the `how` of an extraction that no judge could make


@dataclass(frozen=True)
class Problem:
    """One problem to ask. `fields` go into the predictions row as they are and have a unique `pid`.

    `images` decodes the images only when it is called, so that memory holds one batch of them and a broken image costs
    one problem. `sizes` gives width and height of each without decoding; None: `images` has to be called for them.
    `facts`: what the picture says, in words, where they suffice to solve the problem without it.
    """

    fields: dict[str, Any]
    prompt: str
    n_images: int
    images: Callable[[], list[Image.Image]]
    sizes: Callable[[], list[tuple[int, int]]] | None = None
    facts: str | None = None

    @property
    def pid(self) -> str:
        return str(self.fields["pid"])


class Extraction(NamedTuple):
    """The answer in a response (a stored one may be anything), and how it was found: a rule, `stored` or the judge."""

    text: Any
    how: str


class RowGrade(NamedTuple):
    """A benchmark's verdict on one answer.

    `extracted` is the answer that was compared. `reason` says how it was found, or why it got its verdict. `groups`
    gives, for each kind of group, the groups in which the answer is counted. `extraction` is the answer as it was read
    out of the response, if that is a step of its own.
    """

    verdict: str
    extracted: str | None
    reason: str
    groups: dict[str, list[str]] = {}  # noqa: RUF012  # never changed
    extraction: Extraction | None = None


@dataclass(frozen=True)
class Graded:
    """One graded answer: its grade, with the groups that every benchmark has, and what the score needs of its row."""

    pid: str
    grade: RowGrade
    n_tokens: int | None = None
    sample: int = 0

    @property
    def correct(self) -> bool:
        return self.grade.verdict == CORRECT


class Cell(TypedDict):
    """A share of right answers. A figure that is no count has `accuracy` alone."""

    accuracy: float
    correct: NotRequired[int]
    total: NotRequired[int]
    wilson_95: NotRequired[list[float]]


@dataclass(frozen=True)
class OwnFigures:
    """What a benchmark adds to its score; the score file has `figures` and `notes` under their own keys.

    `figures`: under each key named figures, cells (see `cell`) or, for what is no count, shares. Each is a row of the
    table, a column of a comparison and a number in the log of a training. None: nothing to count. A text explains them.
    `notes`: anything else. `lines` and `warnings` are printed below the table. `by`: the rules in words, for its head.
    """

    figures: dict[str, dict[str, Cell | float | str | None]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()
    warnings: Sequence[str] = ()
    by: str | None = None


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
    - `file`: the hash of the user's own file that it stands in, which `named` fills in.
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
    file: str | None = None


class Scored(NamedTuple):
    score: Score
    summary: OwnFigures  # what its benchmark says about it
