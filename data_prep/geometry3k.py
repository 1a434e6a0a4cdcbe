"""Prepares Geometry3K from the authors' folders and zip files, or from tables on the hub.

Tables are read with the preset of the command `convert`. Without the pictures, the logic forms and
the facts of the problems are sources too.
"""

import random
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from adora_vl.conversion.chat import text_of_chat, without_instruction
from adora_vl.conversion.columns import PRESETS, Columns
from adora_vl.conversion.formats import open_table
from adora_vl.conversion.hub import download_parquet
from adora_vl.conversion.pipeline import Cleaning, SplitRows, prepare, recorded_options
from adora_vl.conversion.problem import MAX_FILE_BYTES, RawProblem, RowError, RowReaders, storable
from adora_vl.conversion.tables import open_local, row_readers
from adora_vl.data.dataset import Manifest
from adora_vl.data.images import png_bytes
from adora_vl.data.prompts import PLACEHOLDER
from adora_vl.geometry.forms import Form, form_of
from adora_vl.utils.cli import amount, read_json
from adora_vl.utils.errors import UserError
from data_prep.logic_forms import facts_in_words, read_forms
from data_prep.redraw import can_be_drawn, draw_form
from data_prep.solve import read_forms_or_text
from data_prep.solved_rows import (
    Text,
    features_with_figure,
    solved_figure,
    solved_problems,
)

_POINT = r"[A-Z](?:'+|_\{?\w\}?)?(?![A-Za-z'])"
_SEGMENT = re.compile(  # over two points, however many letters follow
    rf"\\(overline|overrightarrow|overleftarrow|overleftrightarrow|vec|bar)(?:\s+|(?=[A-Z]))({_POINT}|[A-Z]'?)\s*({_POINT})"
)
_ARC = re.compile(
    rf"\\(?:widehat|overarc|arc|wideparen)(?:\s+|(?=[A-Z]))((?:[A-Z]'?\s*){{1,3}}{_POINT})"
)
# The texts write these words as commands, which LaTeX does not have.
_SHAPE = re.compile(
    r"\\(parallelogram|rectangle|rhombus|trapezoid|quadrilateral|pentagon|hexagon|octagon|kite|circle)(?![A-Za-z])"
)
_TIDY = (
    (re.compile(r"[\s\u00a0]+"), " "),
    (re.compile(r"\{ | (?=\})"), lambda m: m.group().strip()),  # `{ 3 }`
    (
        re.compile(
            r"(\\(?:frac|sqrt|widehat|overline|overrightarrow|overleftrightarrow|text)) (?=[{\[])"
        ),
        r"\1",
    ),
    (re.compile(r"(?<=\}) (?=\{)"), ""),  # `\frac{1} {2}`
    (re.compile(r" ?([\^_]) ?"), r"\1"),
    (re.compile(r"\^\{?\\circ(?![A-Za-z])\}?"), r"^\\circ"),
    (re.compile(r" (?=[.,;:?!](?:\s|$))"), ""),
)


def readable(text: str) -> str:
    r"""Write the text of a problem in LaTeX that can be read.

    `m \widehat A B` becomes `m \widehat{A B}`, `\sqrt { 3 }` becomes `\sqrt{3}`, and
    `\parallelogram` becomes `parallelogram`.
    """
    text = _SEGMENT.sub(r"\\\1{\2 \3}", text)
    text = _ARC.sub(lambda match: rf"\widehat{{{match[1]}}}", text)
    text = _SHAPE.sub(r"\1", text)
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    return text.strip()


_NUMBERED = re.compile(r"(?:(?:.*/)?(train|val|test)/|.*/)?(\d+)/[^/]*")
_SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class ProblemFolder:
    """The folder of one problem: `path`, or the folder `inside` the zip file `path`."""

    path: Path
    inside: str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.inside is None else f"{self.path}/{self.inside}"

    @property
    def number(self) -> int:
        """The number of the problem, which is the name of its folder."""
        return int((self.inside or self.path.name).rstrip("/").rsplit("/", 1)[-1])

    def read(self, name: str) -> bytes:
        """Return the bytes of the file `name`.

        Raises `OSError`, also for a damaged or encrypted member of a zip file, and for a file that
        is too large.
        """
        if self.inside is None:
            path = self.path / name
            if path.stat().st_size > MAX_FILE_BYTES:
                raise OSError(27, f"it has over {MAX_FILE_BYTES} bytes", str(path))
            return path.read_bytes()
        member = self.inside + name
        try:
            archive = _archive(self.path)
            if archive.getinfo(member).file_size > MAX_FILE_BYTES:
                raise OSError(27, f"it unpacks to over {MAX_FILE_BYTES} bytes", member)
            return archive.read(member)
        except KeyError:
            raise FileNotFoundError(2, "not in the zip file", member) from None
        except (
            zipfile.BadZipFile,
            zlib.error,
            RuntimeError,
            NotImplementedError,
            EOFError,
        ) as error:
            raise OSError(5, str(error), member) from error


def problem_folders(root: Path) -> dict[str, list[ProblemFolder]]:
    """Find the problems of the authors' splits `train`, `val` and `test`, sorted by number.

    `root` is one zip file, or a folder with folders `train/` ... or zip files of any name, whose
    splits are those of the folders inside. A split is read from its folder, else from the zip file
    of its name, else from the only zip file that has it. A split without problems is left out.

    Raises `UserError` for a bad zip file, for two that have one split, and where `root` has no
    problem.
    """
    problems: dict[str, list[ProblemFolder]] = {}
    if root.is_file():
        problems = _zipped(root)
    elif root.is_dir():
        for split in _SPLITS:
            paths = [path for path in root.glob(f"{split}/*/") if path.name.isdecimal()]
            if paths:
                problems[split] = [ProblemFolder(path) for path in paths]
        if len(problems) < len(_SPLITS):
            problems = _from_zips(sorted(root.glob("*.zip"))) | problems
    else:
        raise UserError(f"input: there is no file or folder {str(root)!r}")
    if not problems:
        raise UserError(
            f"input: {str(root)!r} has no problem folder such as train/0 with a data.json, and no "
            f"zip file with one; give the folder that holds {', '.join(_SPLITS)}, or a zip file "
            "of it"
        )
    by_split = {}
    for split in _SPLITS:
        if split in problems:
            by_split[split] = sorted(
                problems[split], key=lambda folder: (folder.number, str(folder))
            )
    return by_split


def _from_zips(paths: list[Path]) -> dict[str, list[ProblemFolder]]:
    """Find the problems of zip files by split.

    Raises `UserError` where two files have one split, and the name of neither says which to take.
    """
    problems_of_file = {path: _zipped(path) for path in paths}
    problems = {}
    for split in _SPLITS:
        with_split = [path for path in paths if split in problems_of_file[path]]
        by_name = [path for path in with_split if path.stem == split]
        candidates = by_name or with_split
        if len(candidates) > 1:
            names = " and ".join(repr(str(path)) for path in candidates[:2])
            raise UserError(
                f"input: {names} both hold problems of {split!r}; give one of them with --input"
            )
        if candidates:
            problems[split] = problems_of_file[candidates[0]][split]
    return problems


def _zipped(path: Path) -> dict[str, list[ProblemFolder]]:
    """Find the numbered folders of a zip file by the split folder above them.

    Where there is no folder of a split, the file's name is the split.

    Raises `UserError` for a file that cannot be read, or whose problems belong to no split.
    """
    try:
        names = _archive(path).namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(
            f"input: {str(path)!r} is not a readable zip file ({error}); download it again"
        ) from error
    # The split of each numbered folder, None for one that is below no folder of a split.
    folders: dict[str, str | None] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        # macOS puts files of its own into the archives that it makes.
        if match and not name.startswith("__MACOSX/"):
            folder = name[: name.rindex("/") + 1]
            folders[folder] = match[1]
    split_of_folder = {folder: split for folder, split in folders.items() if split}
    if not split_of_folder and folders:
        if path.stem not in _SPLITS:
            problem = f"the problems in {str(path)!r} are in no folder {', '.join(_SPLITS)}"
            raise UserError(f"input: {problem}; call the file after its split, such as train.zip")
        split_of_folder = dict.fromkeys(folders, path.stem)
    problems: dict[str, list[ProblemFolder]] = {}
    for split in _SPLITS:
        in_split = [folder for folder, its_split in split_of_folder.items() if its_split == split]
        if in_split:
            problems[split] = [ProblemFolder(path, folder) for folder in in_split]
    return problems


@lru_cache(maxsize=4)
def _archive(path: Path) -> zipfile.ZipFile:
    """Open a zip file, once in each process; it stays open until the process ends."""
    return zipfile.ZipFile(path)


# The files of a problem's diagram; in `point` every vertex has a letter.
DIAGRAMS = {"plain": "img_diagram.png", "point": "img_diagram_point.png"}
_OUR_SPLITS = {"train": "train", "val": "validation", "test": "test"}  # the authors' name: ours


def problems_of_folders(root: Path, diagram: str = "plain") -> dict[str, SplitRows]:
    """Return the problems of the authors' folders or zip files, in the order of their numbers.

    `diagram` is a key of `DIAGRAMS`.

    Raises `UserError` as `problem_folders`.
    """
    splits = {}
    for name, folders in problem_folders(root).items():
        split = _OUR_SPLITS[name]
        calls = [partial(_read_folder, folder, split, DIAGRAMS[diagram]) for folder in folders]
        splits[split] = SplitRows(partial(iter, calls), len(calls))
    return splits


def _read_folder(folder: ProblemFolder, split: str, diagram: str) -> RawProblem:
    """Read one problem.

    Raises `RowError`, with the original bytes, if a file or a field is not usable.
    """
    row_id = f"geometry3k/{split}/{folder.number}"
    originals: list[bytes] = []
    try:
        for name in ("data.json", diagram):
            originals.append(folder.read(name))
    except OSError as error:
        wrong = f"{folder}/{name} cannot be read ({error.strerror})"
        raise RowError(
            row_id=row_id,
            kind="file_missing",
            wrong=wrong,
            remedy="put the file there",
            originals=originals,
        ) from error
    # From here on a refused row is kept with the bytes that were read.
    refuse = partial(RowError, row_id, originals=originals)
    try:
        data = read_json(originals[0].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise refuse(
            "not_json", f"{folder}/data.json is not JSON ({error})", "download the problem again"
        ) from error
    if not isinstance(data, dict):
        wrong = f"{folder}/data.json is not a JSON object but {data!r:.40}"
        raise refuse("not_json", wrong, "download the problem again")
    field = partial(_field, data, refuse, f"{folder}/data.json")
    problem = field("problem_text", str)
    # A logic form that is missing or broken costs the row its facts, not its place.
    form = None
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        form = form_of(read_json(folder.read("logic_form.json").decode("utf-8")))
    return RawProblem(
        id=row_id,
        split=split,
        source="geometry3k",
        origin=str(folder),
        images=(originals[1],),
        problem=readable(problem),
        answer=field("answer", str),
        choices=tuple(field("choices", list)),
        goal=", ".join(field("problem_type_goal", list, [])),
        shapes=tuple(field("problem_type_graph", list, [])),
        solution=field("detailed_solution", str, "").strip(),
        other_files=(originals[0],),
        **with_facts(form, problem, row_id),
    )


def with_facts(form: Form | None, problem: str, row_id: str) -> dict[str, Any]:
    """Return the fields of a `RawProblem` for the columns `facts` and `figure`.

    Where no facts suffice, `facts` is null and the row is noted; where they do not determine a
    figure, `figure` is null.
    """
    facts = facts_in_words(form, problem) if form is not None else None
    extras = {"facts": facts, "figure": solved_figure(form) if form is not None else None}
    return {"extras": extras, "notes": {} if facts else {"no_facts": row_id}}


_TEXTS = Columns("messages", "solution", ("images",))
REDRAWN = "geometry3k, redrawn"


def problems_of_facts(path: Path, texts: Path | None) -> dict[str, SplitRows]:
    """Return the problems whose facts determine their answers, with the texts of a table or without.

    Raises `UserError` as `read_forms_or_text` and `_texts_of`.
    """
    if texts is None:
        return solved_problems(read_forms_or_text(path), None)
    texts_by_number = {
        number: Text(split=split, problem=problem, answer=answer)
        for split, number, problem, answer in _texts_of(texts)
    }
    return solved_problems(read_forms_or_text(path), texts_by_number)


def _texts_of(texts: Path) -> Iterator[tuple[str, str, str, str]]:
    """Read a table with the questions.

    Yields our split, the number of the problem, its text and its answer for each row.

    Raises `UserError` for a row that lacks one of them.
    """
    _, read_records = open_table(texts, _TEXTS)
    for where, record in read_records():
        row = record if isinstance(record, dict) else {}
        path = re.search(r"(?:^|[/\"'])(train|val|test)/(\d+)/", str(row.get("images")))
        question = text_of_chat(row.get("messages"))
        answer = row.get("solution")
        if path is None or question is None or not isinstance(answer, str):
            raise UserError(
                f"texts: {where} of {str(texts)!r} lacks messages with one question, a solution, "
                "or images with a path such as test/2401/img_diagram.png; put them in"
            )
        problem = readable(without_instruction(question.replace(PLACEHOLDER, " ").strip())[0])
        yield _OUR_SPLITS[path[1]], path[2], problem, answer


def problems_of_forms(path: Path, texts: Path | None) -> dict[str, SplitRows]:
    """Return the problems of `texts` whose diagrams can be redrawn from the logic forms of `path`.

    How many cannot be redrawn is printed. `path` is a file of logic forms, `texts` the folder or
    table with the questions. Raises `UserError` where `texts` is missing, or one of the two cannot
    be read.
    """
    if texts is None:
        raise UserError(
            "texts: missing; --source logic-forms has no questions, so name a table that has them"
        )
    forms = read_forms(path)
    calls: dict[str, list[Callable[[], RawProblem]]] = {split: [] for split in _OUR_SPLITS.values()}
    undrawn = 0
    for split, number, problem, answer in _texts_of(texts):
        form = forms.get(int(number))
        if form is None or not can_be_drawn(form):
            undrawn += 1
        else:
            calls[split].append(partial(_redrawn, form, split, number, problem, answer))
    if undrawn:
        print(
            f"{amount(undrawn, 'problem')} of {str(texts)!r} left out: not all points of the "
            "diagram have a place"
        )
    return {
        split: SplitRows(partial(iter, split_calls), len(split_calls))
        for split, split_calls in calls.items()
        if split_calls
    }


def _redrawn(form: Form, split: str, number: str, problem: str, answer: str) -> RawProblem:
    """Make the problem of a logic form, with its diagram drawn anew."""
    row_id = f"geometry3k/{split}/{number}"
    return RawProblem(
        id=row_id,
        split=split,
        source=REDRAWN,
        origin=f"problem {number}",
        images=(png_bytes(draw_form(form)),),
        problem=problem,
        answer=answer,
        **with_facts(form, problem, row_id),
    )


def _field(
    data: dict[str, Any],
    refuse: Callable[..., RowError],
    path: str,
    name: str,
    kind: type[str] | type[list[str]],
    default: object = None,
) -> Any:
    """Return `data[name]`, a text or a list of texts.

    Raises `RowError` where it is neither, or missing without a default.
    """
    value = data.get(name, default)
    if isinstance(value, kind) and all(isinstance(item, str) and storable(item) for item in value):
        return value
    expected = "a text" if kind is str else "a list of texts"
    actual = f"{value!r:.60}" if name in data else "missing"
    raise refuse(
        "field_type", f"{name!r} is {actual}", f"make it {expected} in {path}", record=data
    )


SOURCES = ("hub", "parquet", "intergps", FORMS := "logic-forms", FACTS := "facts")
PRESET = PRESETS["geometry3k"]
PRESET_ID = PRESET.id or ""


def open_source(
    kind: str,
    location: str | None,
    *,
    revision: str | None = None,
    diagram: str | None = None,
    texts: str | None = None,
) -> tuple[dict[str, SplitRows], str | None]:
    """Open a source of `SOURCES` at a dataset id or a path.

    Returns the rows of its splits, and the commit where the source is the hub, else None.

    Raises `UserError` for an option that belongs to another source, for a missing path, and for data
    that cannot be read.
    """
    # Each option with its value and the sources that it is for.
    limited_options = (
        ("revision", revision, ("hub",)),
        ("diagram", diagram, ("intergps",)),
        ("texts", texts, (FORMS, FACTS)),
    )
    for name, value, sources in limited_options:
        if value is not None and kind not in sources:
            raise UserError(
                f"{name}: {value!r} is for --source {sources[0]} alone; leave it out with --source "
                f"{kind}"
            )
    if kind != "hub" and not location:
        raise UserError(f"input: missing; --source {kind} needs the path of the data")
    if kind == "intergps":
        return problems_of_folders(Path(location or ""), diagram or "plain"), None
    if kind == FORMS:
        return problems_of_forms(Path(location or ""), Path(texts) if texts else None), None
    if kind == FACTS:
        return problems_of_facts(Path(location or ""), Path(texts) if texts else None), None
    if kind == "hub":
        opened = download_parquet(location or PRESET_ID, PRESET.columns, revision)
    else:
        opened = open_local(Path(location or ""), PRESET.columns)
        if opened.kind != "parquet":
            raise UserError(
                f"input: {location!r} is no Parquet but {opened.kind}; prepare it with the "
                "command convert"
            )
    begin = partial(
        row_readers, opened, name="geometry3k", columns=PRESET.columns, tests=None, limit=None
    )
    return {
        split: SplitRows(partial(begin, split), total) for split, total in opened.totals.items()
    }, opened.revision


@dataclass(frozen=True)
class Options(Cleaning):
    """The options that decide which rows there are.

    `limit` takes the first rows of each split, or with a `seed` a random sample.
    """

    seed: int | None = None
    diagram: str | None = None  # `plain` or `point`, for intergps only
    texts: str | None = None  # the table with the questions, for logic-forms only


def prepare_geometry3k(
    output: Path,
    *,
    source: str,
    location: str | None = None,
    revision: str | None = None,
    options: Options | None = None,
    workers: int = 1,
    overwrite: bool = False,
) -> Manifest:
    """Prepare Geometry3K from `source` (one of `SOURCES`) at `location`, a dataset id or a path.

    `revision` is the branch, tag or commit on the hub. `workers` is the number of processes that
    clean rows, on which the output does not depend. `overwrite` replaces another prepared dataset
    at `output`; one of the same source and options is always replaced.

    Returns the manifest.

    Raises `UserError` as `open_source` and `prepare`.
    """
    chosen_options = options or Options()
    if chosen_options.seed is not None and chosen_options.limit is None:
        raise UserError(
            f"seed: {chosen_options.seed} has nothing to choose without --limit; give both or none"
        )

    def begin() -> tuple[dict[str, Any], dict[str, SplitRows]]:
        """Open the source, and return its description and the chosen rows of each split."""
        splits, commit = open_source(
            source,
            location=location,
            revision=revision,
            diagram=chosen_options.diagram,
            texts=chosen_options.texts,
        )
        description: dict[str, Any] = {
            "source": f"geometry3k/{source}",
            "input": location or PRESET_ID,
        }
        description |= {"revision": commit, "arguments": recorded_options(asdict(chosen_options))}
        return description, {
            split: _chosen_of(split, rows, chosen_options) for split, rows in splits.items()
        }

    # Rows from the authors' logic forms have the facts in words and the solved figure, too.
    has_forms = source in ("intergps", FORMS, FACTS)
    features = features_with_figure() if has_forms else None
    return prepare(output, chosen_options, begin, features, workers=workers, overwrite=overwrite)


def _chosen_of(split: str, rows: SplitRows, options: Options) -> SplitRows:
    """Return the rows of one split that `limit` and `seed` choose; each split is drawn by itself."""
    assert rows.total is not None
    count = min(rows.total, options.limit or rows.total)
    chosen: range | set[int] = range(count)
    if options.seed is not None and count < rows.total:
        chosen = set(random.Random(f"{options.seed}/{split}").sample(range(rows.total), count))

    def problems() -> RowReaders:
        # `islice` ends without reading the rest of the source.
        return islice(
            (read for index, read in enumerate(rows.problems()) if index in chosen), count
        )

    return SplitRows(problems, count)
