"""A benchmark's rows as their owners publish them: on the hub, or in Parquet or JSON files here."""

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pyarrow as pa  # pyarrow ships no types
import pyarrow.parquet as pq  # pyarrow ships no types
from PIL import Image

from adora_vl.data.images import UnreadableImageError, decoded_image, file_within, image_size
from adora_vl.data.prompts import PLACEHOLDER
from adora_vl.data.rows import problem_with_row
from adora_vl.evals.inference.predictions import missing_fields, refuse_rows, row_fault
from adora_vl.evals.inference.requests import HUB_ID
from adora_vl.evals.options import DataOptions, HubDataOptions
from adora_vl.evals.records import LoadedProblems, Problem
from adora_vl.utils.cli import read_json
from adora_vl.utils.errors import UserError
from adora_vl.utils.hashing import content_hash
from adora_vl.utils.hub import no_hub, why_missing

Row = dict[str, Any]
_DATA_SUFFIXES = (".parquet", ".jsonl", ".json")
_NAMED_AFTER_SPLIT = re.compile(r"(?:train|test(?:mini)?|val(?:idation)?|dev)[-_.]", re.IGNORECASE)
_MOST_NAMED_FILES = 5  # in a message
_MOST_PATH_CHARACTERS = 300  # a longer text is Base64


@dataclass(frozen=True)
class _Rows:
    """The rows of a split, with their encoded images apart, so that memory need not hold them."""

    rows: list[Row]
    """The rows, without encoded images."""
    encoded: Mapping[str, Any]
    """The columns of encoded images by name, from which each is read when it is needed."""
    hash: str
    """The hash of the data."""
    origin: str
    """The place of the data in messages."""
    folder: Path | None
    """The folder in which paths of images lead; None for data from the hub, which has no files."""

    def pictures(self, index: int, columns: Sequence[str]) -> list[bytes]:
        """Return the first usable image of a row, encoded, as a list of one.

        It is stored as bytes, a struct of bytes or path, a path, or base64.

        Args:
            index: The number of the row, from 0 on.
            columns: The columns that may hold the image, the preferred one first.

        Raises `ValueError` for a row without an image.
        """
        row = dict(self.rows[index])
        for name, column in self.encoded.items():
            row[name] = column[index].as_py()
        values = [row[name] for name in columns if row.get(name) is not None]
        for value in values:
            if isinstance(value, dict):
                value = value.get("bytes") or value.get("path")
            if isinstance(value, bytes):
                return [value]
            if isinstance(value, str) and value:
                if not _is_path(value):
                    return [base64.b64decode(value, validate=True)]
                file = None if self.folder is None else file_within(self.folder, value)
                # A path that leads nowhere is an error only if no further value is left.
                if file is not None and (value == values[-1] or file.is_file()):
                    return [file.read_bytes()]
        raise ValueError("the row has no image")


def load_problems(
    options: DataOptions,
    needed: Sequence[str],
    image_columns: Sequence[str] = (),
    *,
    prompt: Callable[[Row], str],
    stored_columns: Sequence[str] = (),
    check: Callable[[Row], str | None] = lambda row: None,
    id_column: str = "pid",
    split: str | None = None,
    config: str | None = None,
    blind: bool = False,
    pictures: str = "",
    renamed: Mapping[str, str] | None = None,
) -> LoadedProblems:
    """Return the problems of `options.data`, and a hash of the data with their pictures.

    The data are a hub id, a file or a folder. A folder has Parquet files named after the split (or
    one named after no split), or `{split}.json`, `.jsonl`, whose rows name image files within the
    folder.

    Args:
        options: where the data are.
        needed: columns that every row has to have.
        image_columns: those that may hold the image; the first one that is not null counts.
        prompt: returns the text that is asked of a row.
        stored_columns: the columns that a prediction keeps beside the id, which becomes its `pid`;
            by default the needed ones.
        check: returns what is wrong with a row as predictions have it, without a response.
        id_column: the column with the id.
        split: by default that of the options.
        config: the part of a dataset on the hub that has several.
        blind: whether to ask without the image.
        pictures: the folder beside a file in which its images are.
        renamed: other names of columns, and ours.

    Raises:
        UserError: rows lack a column, `check` finds something wrong in them, or they cannot be
            asked; with a line for each, before an answer is paid for and not when it is scored.
    """
    loaded = _load_split(
        options,
        split=split or options.split,
        image_columns=image_columns,
        id_column=id_column,
        config=config,
    )
    if loaded.folder and pictures and (loaded.folder / pictures).is_dir():
        loaded = replace(loaded, folder=loaded.folder / pictures)
    if renamed:
        loaded = replace(loaded, rows=[_renamed(row, renamed) for row in loaded.rows])
    has_image = bool(image_columns) and not blind

    def fault_of(row: Row) -> str | None:
        """Return the first thing that is wrong with a row; None where nothing is."""
        answered_row = _answered_row(row, id_column)
        return (
            missing_fields(row, needed)
            or row_fault(answered_row)
            or check(answered_row)
            or unaskable(prompt(row), has_image=has_image)
            or _fault_of_path_out(row, image_columns, loaded.folder)
        )

    _refuse_faulty_rows(loaded, fault_of)
    field_names = stored_columns or [name for name in needed if name != id_column]
    problems = []
    for index, row in enumerate(loaded.rows):
        fields: Row = {"pid": str(row[id_column])}
        fields |= {name: row.get(name) for name in field_names}
        if has_image:
            stored = partial(loaded.pictures, index, image_columns)
            problem = pictured(fields, prompt=prompt(row), images=1, stored=stored)
        else:
            problem = Problem(fields=fields, prompt=prompt(row), n_images=0, images=list)
        problems.append(problem)
    return LoadedProblems(problems, _data_hash_with_pictures(loaded, image_columns))


def _refuse_faulty_rows(loaded: _Rows, fault_of: Callable[[Row], str | None]) -> None:
    """Raise `UserError` for rows that have a fault, with a line for each, and for no rows at all.

    `fault_of` returns what is wrong with a row, and None where nothing is.
    """
    faults: list[str] = []
    for number, row in enumerate(loaded.rows, start=1):
        fault = fault_of(row)
        if fault:
            faults.append(f"row {number} {fault}")
    refuse_rows(f"data: {loaded.origin}", faults)
    if not loaded.rows:
        raise UserError(f"data: {loaded.origin} has no rows")


def _renamed(row: Row, renamed: Mapping[str, str]) -> Row:
    """Return a row with our names of its columns; `renamed` maps other names to ours."""
    return {renamed.get(name, name): value for name, value in row.items()}


def _answered_row(row: Row, id_column: str) -> Row:
    """Return a row as predictions have it, with an empty response and its id as a text."""
    stored_id = row.get(id_column)
    is_number = isinstance(stored_id, int) and not isinstance(stored_id, bool)
    pid = str(stored_id) if is_number else stored_id
    return {**row, "pid": pid, "response": ""}


def _load_split(
    options: DataOptions,
    *,
    split: str,
    image_columns: Sequence[str],
    id_column: str,
    config: str | None,
) -> _Rows:
    """Return the rows of a split of `options.data`: a file or folder here, or a hub id."""
    path = Path(options.data)
    if path.exists():
        return _local_rows(path, split=split, image_columns=image_columns, id_column=id_column)
    if HUB_ID.fullmatch(options.data) and not path.parent.is_dir():
        revision = options.data_revision if isinstance(options, HubDataOptions) else None
        return _hub_rows(
            options.data, split=split, revision=revision, image_columns=image_columns, config=config
        )
    raise UserError(
        f"data: {options.data!r} is neither a file or folder here nor a hub id of the form "
        "owner/name"
    )


# Some cameras write a second, smaller picture into the file of a photograph.
_decoded_first = partial(decoded_image, first_frame=True)


def pictured(
    fields: Row,
    prompt: str,
    images: int,
    stored: Callable[[], list[bytes]],
    decoded: Callable[[bytes], Image.Image] = _decoded_first,
) -> Problem:
    """Return a problem whose encoded images are read when they are needed.

    Args:
        fields: What a prediction keeps of the row, with its `pid`.
        prompt: The text that is asked.
        images: The number of images.
        stored: Reads the encoded images.
        decoded: Decodes one of them. For their sizes only the headers are decoded.
    """
    return Problem(
        fields=fields,
        prompt=prompt,
        n_images=images,
        images=partial(_converted, decoded, stored),
        sizes=partial(_converted, image_size, stored),
    )


def _converted(convert: Callable[[bytes], Any], stored: Callable[[], list[bytes]]) -> list[Any]:
    """Return the images of a row, which are read and converted when they are asked for."""
    return [convert(content) for content in stored()]


def _fault_of_path_out(row: Row, image_columns: Sequence[str], folder: Path | None) -> str | None:
    """Return the fault of a row whose image has a path out of the data's folder; None without one.

    Such a path would show a model any file of this machine. Data from the hub have no `folder`, and
    no files that a path could lead to.
    """
    if folder is None:
        return None
    for column in image_columns:
        if _is_path(row.get(column)):
            try:
                file_within(folder, row[column])
            except UnreadableImageError as error:
                return f"has {column}: {error}; put the picture into it"
    return None


def unaskable(prompt: object, *, has_image: bool = True) -> str | None:
    """Return what is wrong with the text that the model would be asked; None where nothing is.

    The text may be empty if there is an image, because a question can be a part of its picture. A
    literal `<image>` is only text here: the placeholders of the images are put in by the chat
    template.
    """
    if not isinstance(prompt, str):
        return f"has the question {prompt!r:.60}, expected a text"
    text = prompt.replace(PLACEHOLDER, " ")
    if has_image and not text.strip():
        text = "-"
    return problem_with_row({"id": "-", "problem": text, "answer": "-", "images": []})


def _local_rows(path: Path, split: str, image_columns: Sequence[str], id_column: str) -> _Rows:
    """Return the rows of a file, or of the files of a split in a folder."""
    files = [path] if path.is_file() else _files_of_split(path, split)
    if files[0].suffix == ".parquet":
        folder = path if path.is_dir() else path.parent
        file_hash = content_hash(files)  # before they are read
        return _rows_from_table(
            _read_tables(files),
            image_columns=image_columns,
            data_hash=file_hash,
            origin=str(path),
            folder=folder,
        )
    return _rows_from_json(files[0], id_column)


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """Return the files of a split.

    They are named after it, or are the only Parquet file there is. Parquet comes before JSON.
    Raises `UserError` where the folder has none of them.
    """
    patterns = (f"{split}-*.parquet", f"{split}.parquet", f"{split}.jsonl", f"{split}.json")
    directories = [directory for directory in (folder, folder / "data") if directory.is_dir()]
    for pattern in patterns:
        for directory in directories:
            matches = sorted(directory.glob(pattern))
            if matches:
                return matches
    data_files = []
    for directory in directories:
        data_files += [
            path for path in sorted(directory.iterdir()) if path.suffix in _DATA_SUFFIXES
        ]
    tables = [path for path in data_files if path.suffix == ".parquet"]
    # MMStar's only file is named after the benchmark. One that is named after another split is not
    # taken for this one.
    if len(tables) == 1 and not _NAMED_AFTER_SPLIT.match(tables[0].name):
        return tables
    contents = ", ".join(path.name for path in data_files[:_MOST_NAMED_FILES])
    if len(data_files) > _MOST_NAMED_FILES:
        contents += f" and {len(data_files) - _MOST_NAMED_FILES} more"
    raise UserError(
        f"data: {str(folder)!r} has nothing for the split {split!r}; it has "
        f"{contents or 'no Parquet or JSON file'}; see --split"
    )


def _read_tables(files: Iterable[Path]) -> pa.Table:
    """Return the rows of several Parquet files as one table. Raises `UserError`."""
    tables = []
    for path in files:
        try:
            tables.append(pq.read_table(path))
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"data: {str(path)!r} is not a readable Parquet file ({error})"
            ) from None
    try:
        return pa.concat_tables(tables)
    except pa.ArrowException as error:
        raise UserError(f"data: the files of one split have different columns ({error})") from None


def _hub_rows(
    name: str, split: str, revision: str | None, image_columns: Sequence[str], config: str | None
) -> _Rows:
    """Return the rows of a dataset on the hub. Raises `UserError` if it cannot be loaded."""
    from datasets import load_dataset

    no_hub()  # the library would try for minutes; what was loaded before is still found
    try:
        dataset = load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # of the hub, the network or the file system
        reason = why_missing(name, error)
        raise UserError(
            f"data: {name!r} split {split!r} cannot be loaded from the hub ({reason})"
        ) from error
    # The library's own fingerprint of the data.
    return _rows_from_table(
        dataset.with_format("arrow")[:],
        image_columns=image_columns,
        data_hash=str(dataset._fingerprint),
        origin=name,
        folder=None,
    )


def _rows_from_table(
    table: pa.Table, image_columns: Sequence[str], data_hash: str, origin: str, folder: Path | None
) -> _Rows:
    """Return the rows of a table, whose encoded images stay in it until they are asked for.

    Raises `UserError` for a text that is not UTF-8.
    """
    encoded = {}
    for name in image_columns:
        # A column of texts stays with the rows: those are paths, or Base64.
        if name in table.column_names and not pa.types.is_string(table.schema.field(name).type):
            encoded[name] = table.column(name)
    try:
        rows = table.drop_columns(list(encoded)).to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(f"data: {origin} has a text that is not UTF-8 ({error})") from None
    for row in rows:
        row.update(dict.fromkeys(encoded))
    return _Rows(rows=rows, encoded=encoded, hash=data_hash, origin=origin, folder=folder)


def _data_hash_with_pictures(loaded: _Rows, image_columns: Sequence[str]) -> str:
    """Return the hash of the rows, and of the files of pictures that they name."""
    folder = loaded.folder
    if folder is None:
        return loaded.hash
    picture_names = set()
    for row in loaded.rows:
        for column in image_columns:
            value = row.get(column)
            if _is_path(value):
                picture_names.add(str(value))
    pictures = [folder / name for name in picture_names if (folder / name).is_file()]
    if not pictures:
        return loaded.hash
    return f"{loaded.hash}+{content_hash(pictures)}"


def _rows_from_json(path: Path, id_column: str) -> _Rows:
    """Return the rows of a JSON file: a list, an object of rows by id, or one object per line."""
    location = ""
    rows = cast(Any, [])  # whatever the JSON holds, until it is checked below
    try:
        file_hash = content_hash([path])  # before it is read
        content = path.read_bytes()
        if path.suffix == ".jsonl":
            for number, line in enumerate(content.splitlines(), 1):
                location = f"line {number} of "
                if line.strip():
                    rows.append(read_json(line))
        else:
            rows = read_json(content)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"data: {location}{str(path)!r} is not JSON ({error})") from None
    if isinstance(rows, dict):
        # The keys are the ids of the rows; a value that is no row is refused below.
        rows = [
            {id_column: row_id, **row} if isinstance(row, dict) else row
            for row_id, row in rows.items()
        ]
    is_list_of_rows = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if not is_list_of_rows:
        raise UserError(f"data: {str(path)!r} is not a list of objects, nor an object of them")
    return _Rows(rows=rows, encoded={}, hash=file_hash, origin=str(path), folder=path.parent)


def _is_path(value: object) -> bool:
    """Return whether the value of an image column is a path, and not a text of Base64."""
    return isinstance(value, str) and 0 < len(value) <= _MOST_PATH_CHARACTERS
