"""What passes between the parts of the evaluation: problems, benchmarks, grades, scores.

Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NotRequired, TypedDict

from adora_vl.evals.options import DataOptions, ScoreOptions, required_names

if TYPE_CHECKING:
    from PIL import Image

# A row of `predictions.jsonl`: the `pid`, the columns of the data that the benchmark grades by, and
# the model's `response`, `finish_reason`, `n_tokens` and further fields on how it was generated.
Prediction = dict[str, Any]
# The content of a score file: `docs/evaluation.md` describes it, `adora_vl.evals.scoring.score`
# makes it.
Score = dict[str, Any]
CORRECT = "correct"
WRONG = "wrong"
FAILED = "failed"  # not asked, or the extraction failed; counts as not correct
# Other names of benchmarks, in commands, score files and logs, with the name of the benchmark
# itself.
BENCHMARK_BY_ALIAS = {"geometry3k": "problems"}
JUDGE_FAILED = "judge_failed"  # the `method` of an extraction that no judge could make


@dataclass(frozen=True)
class Problem:
    """One problem to ask.

    Images are decoded on call: memory holds one batch, and a broken one costs one problem.
    """

    fields: dict[str, Any]  # go into the predictions row as they are and have a unique `pid`
    prompt: str
    n_images: int
    images: Callable[[], list[Image.Image]]
    # width and height of each, without decoding
    sizes: Callable[[], list[tuple[int, int]]] | None = None
    # what the picture says, in words, where they suffice to solve the problem without it
    facts: str | None = None

    @property
    def pid(self) -> str:
        """The id of the problem, unique in its benchmark."""
        return str(self.fields["pid"])


class Extraction(NamedTuple):
    """The answer in a response, and how it was found."""

    text: Any
    """The answer, empty where there is none; a stored one may be any value of JSON."""
    method: str
    """The name of the rule that found it, `stored`, or a word for the judge."""


class RowGrade(NamedTuple):
    """The verdict on one answer, and what led to it."""

    verdict: str
    """`CORRECT`, `WRONG` or `FAILED`."""
    extracted: str | None
    """The answer that was compared with the reference answer."""
    reason: str
    """How the answer was found, or why it got its verdict."""
    groups: dict[str, list[str]] = {}  # noqa: RUF012  # never changed
    """The groups in which the answer is counted, by the kind of group."""
    extraction: Extraction | None = None
    """The answer that was extracted before grading; None for a benchmark without such a step."""


@dataclass(frozen=True)
class GradedAnswer:
    """One graded answer: its grade, and what the score needs of its row.

    The groups of the grade include those that every benchmark has.
    """

    pid: str
    grade: RowGrade
    n_tokens: int | None = None
    sample: int = 0
    # What became of its block of thinking: there was none, it stood before the answer, or no answer
    # stands after it.
    thinking: Literal["none", "set_aside", "without_answer"] = "none"
    # The id of the problem, where it is asked in several versions. Each version has its own `pid`.
    original_id: str | None = None

    @property
    def problem_id(self) -> str:
        """The id of the problem. Its versions share it, since their answers are not independent."""
        return self.pid if self.original_id is None else self.original_id

    @property
    def correct(self) -> bool:
        """Whether the answer counts as right."""
        return self.grade.verdict == CORRECT


class AccuracyMetric(TypedDict):
    """An accuracy or another figure of a benchmark in a score file, such as 6 right of 10 answers.

    A figure that is no count, such as a mean, has neither `correct` nor `total`.
    """

    accuracy: float
    """The share of right answers, from 0 to 1."""
    correct: NotRequired[int]
    """The number of right answers."""
    total: NotRequired[int]
    """The number of answers."""
    interval_95: NotRequired[list[float]]
    """The lower and the upper end at 95 %. It is Wilson's interval for a count, and another one for
    a mean, such as avg@k. A ratio, such as DynaMath's robustness, has none."""


class ShareMetric(TypedDict):
    """A share that is no accuracy as a score file has it, such as 2 answers of 10 cut off."""

    count: int
    total: int
    share: float
    """`count` divided by `total`."""
    interval_95: list[float]
    """Wilson's interval of the share: its lower and its upper end, at 95 %."""


@dataclass(frozen=True)
class BenchmarkSummary:
    """What a benchmark adds to its score, in the score file and on the screen."""

    metrics: dict[str, dict[str, AccuracyMetric | float | str | None]] = field(default_factory=dict)
    """Named metrics under each key of the score file. A metric is an `AccuracyMetric`, or the share
    alone as a number. Each is a row of the table, a column of a comparison and a number in the log
    of a training. None stands where there is nothing to count, and a text explains the metrics."""
    extra_keys: dict[str, Any] = field(default_factory=dict)
    """Further keys of the score file, with their values."""
    lines: Sequence[str] = ()
    """Lines that are printed below the table."""
    warnings: Sequence[str] = ()
    """Warnings that are printed below the table."""
    rules_text: str | None = None
    """The rules in words, for the head of the table; None: their names."""


@dataclass(frozen=True)
class PublishedResults:
    """Accuracies that others have published, to be quoted beside ours in a comparison."""

    source: str
    """Who has published them, and where."""
    rows: Mapping[str, Mapping[str, float]]
    """The accuracies in percent, by model and then by metric: `{"GRPO": {"all": 70.2}}`."""
    rules: str | None = None
    """The name of the rules that they are by; None where the benchmark has one set of rules."""
    why_not_comparable: Callable[[Mapping[str, Any]], str | None] | None = None
    """Gets a score of ours, and says why it is not comparable with them; None where it is."""
    is_same_data: Callable[[Mapping[str, Any]], bool] | None = None
    """Tells whether a score of ours is of the same problems; None: every score of the benchmark
    is."""


class LoadedProblems(NamedTuple):
    """The problems of a benchmark, and what its data are known by."""

    problems: list[Problem]
    data_hash: str
    unused_options: Sequence[str] = ()
    """Options that changed nothing, such as a template that asks the problem as it is. In the
    fingerprint they are None, since the same questions have the same fingerprint."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark: its problems, its rules, and what it adds to a score.

    The functions get an instance of the benchmark's own `data_options` or `score_options`.
    """

    name: str
    """The name in commands, score files and logs."""
    split: str
    """The split of the data that is asked by default."""
    load: Callable[[Any], LoadedProblems]
    """Loads the problems that the data options name."""
    grade: Callable[[Prediction, Any], RowGrade]
    """Says by the score options whether the answer in a row is right, and in which groups it
    counts. A row whose problem was never asked has failed, whatever this says."""
    rules: Callable[[Any], dict[str, Any]]
    """The rules by which an answer is right. Scores by different rules are not comparable."""
    score_options: type[ScoreOptions] = ScoreOptions
    """The options of `score`, a dataclass whose fields all have defaults."""
    data_options: type[DataOptions] = DataOptions
    """The options that say which problems are asked."""
    check: Callable[[Prediction], str | None] | None = None
    """Says what is wrong with a predictions row; None where nothing is."""
    fingerprint: tuple[str, ...] = ()
    """The names of those data options on which an answer depends."""
    id_column: str = "pid"
    """The column of the data with the id of a row, which is `pid` in a predictions row."""
    original_id: Callable[[Prediction], str] | None = None
    """Returns the id of the problem that a row asks a version of, for a benchmark that asks several
    versions of one problem. Intervals are over problems."""
    prepare: Callable[[Sequence[Prediction], Any], Sequence[Prediction]] | None = None
    """Makes the rows that `grade` gets, for work that is done on all of them at once."""
    summary: (
        Callable[[Sequence[Prediction], Sequence[GradedAnswer], Any], BenchmarkSummary] | None
    ) = None
    """Computes figures of the benchmark's own."""
    item: Callable[[Prediction, GradedAnswer], dict[str, Any]] | None = None
    """What the score file says about an answer, in place of verdict, extracted answer and
    reason."""
    published: PublishedResults | None = None
    """Figures of others to compare with."""
    file: str | None = None
    """The hash of the user's own file in which the benchmark stands (see `find_benchmark`)."""

    def __post_init__(self) -> None:
        """Raise `TypeError` for an option without a default, since a training gives none."""
        # A training supplies these fields alone.
        supplied_names = {self.data_options: {"data", "split"}, self.score_options: set[str]()}
        for options_class, names in supplied_names.items():
            for name in required_names(options_class):
                if name not in names:
                    raise TypeError(
                        f"{options_class.__name__}.{name} has no default; a training asks with the "
                        "defaults"
                    )


class ScoredBenchmark(NamedTuple):
    """The content of a score file, and what is printed beside it."""

    score: Score
    """The content of the score file."""
    summary: BenchmarkSummary
    """What the benchmark added: the score has its metrics, and its lines are printed."""
