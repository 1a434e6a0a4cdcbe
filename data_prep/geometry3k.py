"""Prepares Geometry3K from the authors' folders and zip files, or from tables on the hub.

Tables are read with the preset of the command `convert`. Without the pictures, the logic forms and
the facts of the problems are sources too.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from adora_vl.conversion.chat import question_of_chat, split_off_instruction
from adora_vl.conversion.columns import PRESETS, Columns
from adora_vl.conversion.formats import open_table
from adora_vl.conversion.hub import download_parquet
from adora_vl.conversion.pipeline import CleaningOptions, OpenedSource, SplitRows, prepare
from adora_vl.conversion.problem import RawProblem, RowReaders
from adora_vl.conversion.tables import open_local, row_readers
from adora_vl.data.dataset import Manifest
from adora_vl.data.images import png_bytes
from adora_vl.data.prompts import IMAGE_PLACEHOLDER
from adora_vl.geometry.logic_form import LogicForm
from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import UserError
from data_prep.geometry3k_folders import OUR_SPLIT_BY_AUTHORS_SPLIT, rows_of_folders
from data_prep.problem_text import mend_latex
from data_prep.redraw import can_be_drawn, draw_form
from data_prep.solve import read_forms, read_forms_or_text
from data_prep.solved_rows import (
    LabelledQuestion,
    fact_fields,
    features_with_figure,
    rows_of_solvable_forms,
)

_QUESTION_COLUMNS = Columns(problem="messages", answer="solution", images=("images",))
# The column `source` of rows whose diagram is drawn from a logic form.
_SOURCE_OF_REDRAWN_ROWS = "geometry3k, redrawn"


def rows_of_solved_forms(path: Path, question_table: Path | None) -> dict[str, SplitRows]:
    """Return by split the rows of the problems in a file whose facts determine their answer.

    `path` is a file of logic forms, the facts of a diagram with a question. The wording of the
    problems comes from `question_table`. Without it the question of the form is put into words.

    Raises `UserError` where one of the two files cannot be read.
    """
    questions = None
    if question_table is not None:
        questions = {question.number: question for question in _read_questions(question_table)}
    return rows_of_solvable_forms(read_forms_or_text(path), questions)


def _read_questions(table: Path) -> Iterator[LabelledQuestion]:
    """Yield the questions with their answers in a table whose column `messages` has a chat.

    The split and the number of a problem stand in the path of its image.

    Raises `UserError` for a row that lacks its question, its answer, or the path of its image.
    """
    opened = open_table(table, _QUESTION_COLUMNS)
    for position, record in opened.read_records():  # the position is `line 14`, say
        row = record if isinstance(record, dict) else {}  # a line that cannot be read is no dict
        image_path = re.search(r"(?:^|[/\"'])(train|val|test)/(\d+)/", str(row.get("images")))
        question = question_of_chat(row.get("messages"))
        answer = row.get("solution")
        if image_path is None or question is None or not isinstance(answer, str):
            raise UserError(
                f"texts: {position} of {str(table)!r} lacks messages with one question, a "
                "solution, or images with a path such as test/2401/img_diagram.png; put them in"
            )
        authors_split, number = image_path.groups()
        text = question.replace(IMAGE_PLACEHOLDER, " ").strip()
        yield LabelledQuestion(
            number=number,
            split=OUR_SPLIT_BY_AUTHORS_SPLIT[authors_split],
            problem=mend_latex(split_off_instruction(text).problem),
            answer=answer,
        )


def rows_of_redrawn_forms(path: Path, question_table: Path | None) -> dict[str, SplitRows]:
    """Return by split the rows of a table of questions, whose diagrams are drawn from logic forms.

    `path` is the file of logic forms, which say the lines and points of each diagram. Problems
    whose diagram cannot be drawn are left out, and their number is printed.

    Raises `UserError` where the table is missing, or one of the two files cannot be read.
    """
    if question_table is None:
        raise UserError(
            "texts: missing; --source logic-forms has no questions, so name a table that has them"
        )
    forms_by_number = read_forms(path)
    readers_by_split: dict[str, list[Callable[[], RawProblem]]] = {
        split: [] for split in OUR_SPLIT_BY_AUTHORS_SPLIT.values()
    }
    undrawable_count = 0
    for question in _read_questions(question_table):
        form = forms_by_number.get(question.number)
        if form is None or not can_be_drawn(form):
            undrawable_count += 1
        else:
            # Drawing waits until the row is read, in a worker process.
            readers_by_split[question.split].append(partial(_redrawn_problem, form, question))
    if undrawable_count:
        print(
            f"{pluralize(undrawable_count, 'problem')} of {str(question_table)!r} left out: not "
            "all points of the diagram have a place"
        )
    return {
        split: SplitRows.from_readers(readers)
        for split, readers in readers_by_split.items()
        if readers
    }


def _redrawn_problem(form: LogicForm, question: LabelledQuestion) -> RawProblem:
    """Return a problem of Geometry3K with a diagram that is drawn from its logic form."""
    row_id = f"geometry3k/{question.split}/{question.number}"
    return RawProblem(
        id=row_id,
        split=question.split,
        source=_SOURCE_OF_REDRAWN_ROWS,
        origin=f"problem {question.number}",
        images=(png_bytes(draw_form(form)),),
        problem=question.problem,
        answer=question.answer,
        **fact_fields(form, question.problem, row_id),
    )


_FORMS_SOURCE = "logic-forms"
_FACTS_SOURCE = "facts"
SOURCES = ("hub", "parquet", "intergps", _FORMS_SOURCE, _FACTS_SOURCE)
GEOMETRY3K_PRESET = PRESETS["geometry3k"]
_PRESET_HUB_ID = GEOMETRY3K_PRESET.id or ""


@dataclass(frozen=True)
class Geometry3KOptions(CleaningOptions):
    """The options that decide which rows there are.

    `limit` takes the first rows of each split, or with a `seed` a random sample.
    """

    seed: int | None = None
    diagram: str | None = None  # `plain` or `point`, for intergps only
    texts: str | None = None  # the table with the questions, for logic-forms and facts only


class SplitsAtCommit(NamedTuple):
    """The rows of each split, and the commit that they come from."""

    splits: Mapping[str, SplitRows]
    commit: str | None = None  # None for a source that is not the hub


def open_source(
    source: str, location: str | None, *, revision: str | None, options: Geometry3KOptions
) -> SplitsAtCommit:
    """Return the splits of Geometry3K in a source, before a row is read.

    Args:
        source: one of `SOURCES`.
        location: an id on the hub, or the path of files.
        revision: the branch, tag or commit on the hub; for the hub alone.
        options: how rows are cleaned, and options that only some sources have.

    Raises:
        UserError: an option belongs to another source, the path is missing, or the data cannot be
            read.
    """
    _check_options_of_source(source, revision=revision, options=options)
    if source != "hub" and not location:
        raise UserError(f"input: missing; --source {source} needs the path of the data")
    path = Path(location or "")
    question_table = Path(options.texts) if options.texts else None
    if source == "intergps":
        return SplitsAtCommit(rows_of_folders(path, options.diagram or "plain"))
    if source == _FORMS_SOURCE:
        return SplitsAtCommit(rows_of_redrawn_forms(path, question_table))
    if source == _FACTS_SOURCE:
        return SplitsAtCommit(rows_of_solved_forms(path, question_table))
    if source == "hub":
        opened = download_parquet(location or _PRESET_HUB_ID, GEOMETRY3K_PRESET.columns, revision)
    else:
        opened = open_local(path, GEOMETRY3K_PRESET.columns)
        if opened.format != "parquet":
            raise UserError(
                f"input: {location!r} is no Parquet but {opened.format}; prepare it with the "
                "command convert"
            )
    splits = {}
    for split, row_count in opened.row_counts.items():
        begin_reading = partial(
            row_readers, opened, split, name="geometry3k", columns=GEOMETRY3K_PRESET.columns
        )
        splits[split] = SplitRows(begin_reading=begin_reading, row_count=row_count)
    return SplitsAtCommit(splits, commit=opened.revision)


def _check_options_of_source(
    source: str, *, revision: str | None, options: Geometry3KOptions
) -> None:
    """Raise `UserError` for an option that the chosen source does not know."""
    # For each option its value, and the sources that know it.
    options_and_sources = (
        ("revision", revision, ("hub",)),
        ("diagram", options.diagram, ("intergps",)),
        ("texts", options.texts, (_FORMS_SOURCE, _FACTS_SOURCE)),
    )
    for name, value, sources in options_and_sources:
        if value is not None and source not in sources:
            raise UserError(
                f"{name}: {value!r} is for --source {sources[0]} alone; leave it out with --source "
                f"{source}"
            )


def prepare_geometry3k(
    output: Path,
    *,
    source: str,
    location: str | None = None,
    revision: str | None = None,
    options: Geometry3KOptions | None = None,
    workers: int = 1,
    overwrite: bool = False,
) -> Manifest:
    """Write Geometry3K as a data set for training, and return its manifest.

    Args:
        output: the folder that is written.
        source: one of `SOURCES`, where the problems come from.
        location: their id on the hub, or their path.
        revision: the branch, tag or commit on the hub.
        options: which rows there are, and how they are cleaned.
        workers: the number of processes that clean rows, on which the output does not depend.
        overwrite: whether another data set in `output` is replaced. One of the same source and
            options is always replaced.

    Raises:
        UserError: as `open_source` and `prepare`.
    """
    chosen_options = options or Geometry3KOptions()
    if chosen_options.seed is not None and chosen_options.limit is None:
        raise UserError(
            f"seed: {chosen_options.seed} has nothing to choose without --limit; give both or none"
        )

    def open_chosen_rows() -> OpenedSource:
        """Return the chosen rows of each split, before they are read, and the manifest's words."""
        splits, commit = open_source(
            source, location=location, revision=revision, options=chosen_options
        )
        description = {
            "source": f"geometry3k/{source}",
            "input": location or _PRESET_HUB_ID,
            "revision": commit,
            "arguments": asdict(chosen_options),
        }
        chosen_rows = {
            split: _limited_rows(split, rows, chosen_options) for split, rows in splits.items()
        }
        return OpenedSource(description, chosen_rows)

    # Rows from the authors' logic forms have the facts in words and the solved figure, too.
    has_forms = source in ("intergps", _FORMS_SOURCE, _FACTS_SOURCE)
    return prepare(
        output,
        chosen_options,
        open_source=open_chosen_rows,
        features=features_with_figure() if has_forms else None,
        workers=workers,
        overwrite=overwrite,
    )


def _limited_rows(split: str, rows: SplitRows, options: Geometry3KOptions) -> SplitRows:
    """Return `limit` rows of a split: the first ones, or with a `seed` a random sample.

    Both are options. A sample stays in the order of the source, and depends on the seed and the
    name of the split alone.
    """
    total = rows.row_count
    assert total is not None, "all sources of Geometry3K know how many rows they have"
    chosen_count = min(total, options.limit or total)
    chosen_indices: range | set[int] = range(chosen_count)
    if options.seed is not None and chosen_count < total:
        rng = random.Random(f"{options.seed}/{split}")
        chosen_indices = set(rng.sample(range(total), chosen_count))

    def begin_reading() -> RowReaders:
        """Return the functions that read the chosen rows, one for each."""
        numbered_readers = enumerate(rows.begin_reading())
        chosen_readers = (reader for index, reader in numbered_readers if index in chosen_indices)
        # `islice` ends without reading the rest of the source.
        return islice(chosen_readers, chosen_count)

    return SplitRows(begin_reading=begin_reading, row_count=chosen_count)
