"""A benchmark's rows as their owners publish them: on the hub, or in Parquet or JSON files here."""

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa  # pyarrow ships no types
import pyarrow.parquet as pq  # pyarrow ships no types

from adora_vl.data.images import UnreadableImageError, decoded_image, file_within, image_size
from adora_vl.data.prompts import IMAGE_PLACEHOLDER
from adora_vl.data.rows import fault_in_row
from adora_vl.evals.inference.predictions import (
    describe_missing_fields,
    describe_row_fault,
    raise_row_faults,
)
from adora_vl.evals.inference.requests import HUB_ID_PATTERN
from adora_vl.evals.options import DataOptions, HubDataOptions
from adora_vl.evals.records import LoadedProblems, Problem
from adora_vl.utils.cli import read_json
from adora_vl.utils.errors import UserError
from adora_vl.utils.hashing import content_hash
from adora_vl.utils.hub import hub_unavailable_reason, load_failure_reason

Row = dict[str, Any]
_DATA_SUFFIXES = (".parquet", ".jsonl", ".json")
# The beginning of a file name that is the name of a split, such as `test-`.
_SPLIT_NAME_PATTERN = re.compile(r"(?:train|test(?:mini)?|val(?:idation)?|dev)[-_.]", re.IGNORECASE)
_MAX_FILES_IN_MESSAGE = 5
_MAX_PATH_CHARS = 300  # a longer text in an image column is the image itself in Base64


@dataclass(frozen=True, kw_only=True)
class DataLayout:
    """How the data of a benchmark are laid out by those who publish them.

    The defaults fit a single table whose columns have our names.
    """

    hub_config: str | None = None
    """The configuration to load of a dataset that has several on the hub."""
    image_folder: str = ""
    """A folder beside a file of rows, in which their images are."""
    our_names: Mapping[str, str] = field(default_factory=dict)
    """Our names of columns by their names in the data, if they differ."""


_DEFAULT_LAYOUT = DataLayout()


@dataclass(frozen=True)
class _LoadedRows:
    """The rows of a split; encoded images stay in columns of the table until they are needed."""

    rows: list[Row]
    """The rows, with None in place of each encoded image."""
    image_column_by_name: Mapping[str, Any]
    """The Arrow columns of encoded images, by name."""
    data_hash: str
    """The hash of the data."""
    origin: str
    """The path or the hub id of the data, for messages."""
    folder: Path | None
    """The folder that paths of images are relative to; None for data from the hub."""

    def read_encoded_image(self, index: int, columns: Sequence[str]) -> bytes:
        """Return the first usable image of a row, encoded (as in a PNG file).

        Benchmarks store images in many ways: as bytes, a struct with bytes or a path, a path, or
        Base64.

        Args:
            index: The index of the row.
            columns: The columns that may hold the image, the preferred one first.

        Raises `ValueError` for a row without an image, and `OSError` for a file that is missing.
        """
        row = dict(self.rows[index])
        for name, column in self.image_column_by_name.items():
            row[name] = column[index].as_py()
        stored_values = [row[name] for name in columns if row.get(name) is not None]
        for number, stored_value in enumerate(stored_values, start=1):
            value = stored_value
            if isinstance(value, dict):
                value = value.get("bytes") or value.get("path")
            if isinstance(value, bytes):
                return value
            if not isinstance(value, str) or not value:
                continue
            # A short text is a path, and a long one is the image in Base64.
            if not _is_path(value):
                return base64.b64decode(value, validate=True)
            file = None if self.folder is None else file_within(self.folder, value)
            # A missing file is an error only if it is the last column that could have the image.
            is_last_value = number == len(stored_values)
            if file is not None and (is_last_value or file.is_file()):
                return file.read_bytes()
        raise ValueError("the row has no image")


def load_problems(
    options: DataOptions,
    required_columns: Sequence[str],
    image_columns: Sequence[str] = (),
    *,
    prompt: Callable[[Row], str],
    stored_columns: Sequence[str] = (),
    check: Callable[[Row], str | None] = lambda row: None,
    id_column: str = "pid",
    layout: DataLayout = _DEFAULT_LAYOUT,
) -> LoadedProblems:
    """Load the problems of a benchmark from `options.data`, with a hash of the data.

    The data are a hub id, a file or a folder. A folder has Parquet files that are named after the
    split, or a single one that is named after no split, or a file `{split}.json` or `{split}.jsonl`
    whose rows name image files within the folder.

    Args:
        options: Where the data are.
        required_columns: The columns that every row has to have.
        image_columns: The columns that may hold the image; the first one that is not null counts.
        prompt: Returns the text that is asked of a row.
        stored_columns: The columns that a prediction keeps; by default the required ones. It keeps
            the id in any case, as `pid`.
        check: Returns what is wrong with a row, or None. The row has the fields of a prediction,
            with an empty response.
        id_column: The column with the id.
        layout: How the data are laid out, if they are more than a table with our names.

    Raises:
        UserError: Rows lack a column, `check` finds a fault in them, or they cannot be asked. The
            message has a line for each such row.
    """
    loaded = _load_split(
        options, image_columns=image_columns, id_column=id_column, hub_config=layout.hub_config
    )
    loaded = _rename_columns_and_find_images(loaded, layout)
    has_image = bool(image_columns)  # the question may then be empty, as a part of the picture

    def describe_fault(row: Row) -> str | None:
        """Return what is wrong with a row, None if nothing is."""
        prediction = _as_prediction(row, id_column)
        return (
            describe_missing_fields(row, required_columns)
            or describe_row_fault(prediction)
            or check(prediction)
            or describe_prompt_fault(prompt(row), has_image=has_image)
            or _describe_path_fault(row, image_columns, loaded.folder)
        )

    _check_rows(loaded, describe_fault)
    field_names = stored_columns or [name for name in required_columns if name != id_column]
    problems: list[Problem] = []
    for index, row in enumerate(loaded.rows):
        fields: Row = {"pid": str(row[id_column])}
        fields |= {name: row.get(name) for name in field_names}
        problems.append(_build_problem(loaded, index, fields, prompt(row), image_columns))
    return LoadedProblems(problems, _data_hash_with_images(loaded, image_columns))


def _build_problem(
    loaded: _LoadedRows, index: int, fields: Row, prompt: str, image_columns: Sequence[str]
) -> Problem:
    """Build the problem of one row, with its image if the data have any.

    Args:
        loaded: The rows.
        index: The index of the row.
        fields: The fields that a prediction keeps.
        prompt: The text that is asked.
        image_columns: The columns that may hold the image.
    """
    if not image_columns:
        return Problem(fields=fields, prompt=prompt, n_images=0, images=list)

    def read_images() -> list[bytes]:
        """Read the image of the row, the only one."""
        return [loaded.read_encoded_image(index, image_columns)]

    return problem_with_images(fields, prompt=prompt, n_images=1, read_images=read_images)


def _check_rows(loaded: _LoadedRows, describe_fault: Callable[[Row], str | None]) -> None:
    """Raise `UserError` if rows have faults, with a line for each row, or if there are no rows.

    `describe_fault` returns what is wrong with a row, or None.
    """
    faults: list[str] = []
    for number, row in enumerate(loaded.rows, start=1):
        fault = describe_fault(row)
        if fault:
            faults.append(f"row {number} {fault}")
    raise_row_faults(f"data: {loaded.origin}", faults)
    if not loaded.rows:
        raise UserError(f"data: {loaded.origin} has no rows")


def _rename_columns_and_find_images(loaded: _LoadedRows, layout: DataLayout) -> _LoadedRows:
    """Return the rows with our names of their columns, and the folder that has their images."""
    rows = [
        {layout.our_names.get(name, name): value for name, value in row.items()}
        for row in loaded.rows
    ]
    folder = loaded.folder
    if folder is not None and (folder / layout.image_folder).is_dir():
        folder /= layout.image_folder
    return replace(loaded, rows=rows, folder=folder)


def _as_prediction(row: Row, id_column: str) -> Row:
    """Return a row of the data as a row of predictions, so that the checks of these can be used.

    Its `response` is empty, and its `pid` is the id as a text. A value that is no id stays as it
    is, so that the check can name it.
    """
    stored_id = row.get(id_column)
    is_number = isinstance(stored_id, int) and not isinstance(stored_id, bool)
    pid = str(stored_id) if is_number else stored_id
    return {**row, "pid": pid, "response": ""}


def _load_split(
    options: DataOptions, *, image_columns: Sequence[str], id_column: str, hub_config: str | None
) -> _LoadedRows:
    """Load the rows of a split from the file, the folder or the hub id in `options.data`.

    `image_columns` and `id_column` are arguments of `load_problems`, and `hub_config` is a field of
    its `layout`. Raises `UserError` if the data are none of the three.
    """
    path = Path(options.data)
    if path.exists():
        return _load_local_rows(
            path, split=options.split, image_columns=image_columns, id_column=id_column
        )
    # `data/tset` may be a hub id, or a path with a typing error. It is a path if the folder `data`
    # exists.
    if HUB_ID_PATTERN.fullmatch(options.data) and not path.parent.is_dir():
        revision = options.data_revision if isinstance(options, HubDataOptions) else None
        return _load_hub_rows(
            options.data,
            split=options.split,
            revision=revision,
            image_columns=image_columns,
            config=hub_config,
        )
    raise UserError(
        f"data: {options.data!r} is neither a file or folder here nor a hub id of the form "
        "owner/name"
    )


# Some cameras write a second, smaller picture into the file of a photograph.
_decode_first_frame = partial(decoded_image, first_frame=True)


def problem_with_images(
    fields: Row, prompt: str, n_images: int, read_images: Callable[[], list[bytes]]
) -> Problem:
    """Build a problem whose images are read and decoded only when they are asked for.

    Args:
        fields: The fields of the row that a prediction keeps, with its `pid`.
        prompt: The text that is asked.
        n_images: The number of images.
        read_images: Reads the encoded images. As in a training the first frame of each is shown.
    """
    return Problem(
        fields=fields,
        prompt=prompt,
        n_images=n_images,
        images=partial(_read_and_convert, read_images, _decode_first_frame),
        sizes=partial(_read_and_convert, read_images, image_size),
    )


def _read_and_convert(
    read_images: Callable[[], list[bytes]], convert: Callable[[bytes], Any]
) -> list[Any]:
    """Read the encoded images of a row, and convert each of them."""
    return [convert(content) for content in read_images()]


def _describe_path_fault(row: Row, image_columns: Sequence[str], folder: Path | None) -> str | None:
    """Return what is wrong if an image path of a row leads out of `folder`, such as `../x.png`.

    Such a path could show the model any file of this machine. Returns None if all paths are inside,
    and for data from the hub, which have no folder.
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


def describe_prompt_fault(prompt: object, *, has_image: bool = True) -> str | None:
    """Return why a model cannot be asked this text, None if it can.

    The text may be empty if there is an image, since the question may be written in the picture. A
    literal `<image>` in the text is no placeholder: the chat template adds the placeholders.
    """
    if not isinstance(prompt, str):
        return f"has the question {prompt!r:.60}, expected a text"
    text = prompt.replace(IMAGE_PLACEHOLDER, " ")
    if has_image and not text.strip():
        text = "-"
    # Rows of the training are checked by the same function, so the other fields get values.
    return fault_in_row({"id": "-", "problem": text, "answer": "-", "images": []})


def _load_local_rows(
    path: Path, split: str, image_columns: Sequence[str], id_column: str
) -> _LoadedRows:
    """Load the rows of a file, or of the files of a split in a folder.

    Raises `UserError` where a folder has only some of the files of the split.
    """
    # Imported here, because `datasets` behind it takes seconds.
    from adora_vl.data.dataset import describe_missing_files

    files = [path] if path.is_file() else _files_of_split(path, split)
    fault = describe_missing_files(file.name for file in files) if path.is_dir() else None
    if fault is not None:
        raise UserError(f"data: {str(path)!r} {fault}")
    if files[0].suffix != ".parquet":
        return _rows_from_json(files[0], id_column)
    # The files are hashed before they are read. If they change in between, the next load gives
    # another hash.
    file_hash = content_hash(files)
    return _rows_from_table(
        _read_tables(files),
        image_columns=image_columns,
        data_hash=file_hash,
        origin=str(path),
        folder=path if path.is_dir() else path.parent,
    )


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """Return the files of a split in a folder, or in the folder `data` in it.

    For the split `test` they are the first of these that exists:

    1. `test-*.parquet`
    2. `test.parquet`
    3. `test.jsonl`
    4. `test.json`
    5. the only Parquet file, unless it is named after another split

    Raises `UserError` if none of them exists.
    """
    patterns = (f"{split}-*.parquet", f"{split}.parquet", f"{split}.jsonl", f"{split}.json")
    directories = [directory for directory in (folder, folder / "data") if directory.is_dir()]
    for pattern in patterns:
        for directory in directories:
            matches = sorted(directory.glob(pattern))
            if matches:
                return matches
    data_files: list[Path] = []
    for directory in directories:
        for path in sorted(directory.iterdir()):
            if path.suffix in _DATA_SUFFIXES:
                data_files.append(path)
    tables = [path for path in data_files if path.suffix == ".parquet"]
    # MMStar's only file is named after the benchmark.
    if len(tables) == 1 and not _SPLIT_NAME_PATTERN.match(tables[0].name):
        return tables
    contents = ", ".join(path.name for path in data_files[:_MAX_FILES_IN_MESSAGE])
    n_further_files = len(data_files) - _MAX_FILES_IN_MESSAGE
    if n_further_files > 0:
        contents += f" and {n_further_files} more"
    raise UserError(
        f"data: {str(folder)!r} has nothing for the split {split!r}; it has "
        f"{contents or 'no Parquet or JSON file'}; see --split"
    )


def _read_tables(files: Iterable[Path]) -> pa.Table:
    """Read several Parquet files as one table.

    Raises `UserError` for a file that cannot be read, and for files with different columns.
    """
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


def _load_hub_rows(
    name: str, split: str, revision: str | None, image_columns: Sequence[str], config: str | None
) -> _LoadedRows:
    """Load the rows of a dataset on the hub. Raises `UserError` if it cannot be loaded."""
    from datasets import load_dataset

    # It switches the library offline where the hub does not answer. The library would try for
    # minutes then, and finds data in its cache even so.
    hub_unavailable_reason()
    try:
        dataset = load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # of the hub, the network or the file system
        reason = load_failure_reason(name, error)
        raise UserError(
            f"data: {name!r} split {split!r} cannot be loaded from the hub ({reason})"
        ) from error
    return _rows_from_table(
        dataset.with_format("arrow")[:],
        image_columns=image_columns,
        data_hash=str(dataset._fingerprint),  # the library's own hash of the data
        origin=name,
        folder=None,
    )


def _rows_from_table(
    table: pa.Table, image_columns: Sequence[str], data_hash: str, origin: str, folder: Path | None
) -> _LoadedRows:
    """Convert an Arrow table to rows, but leave its encoded images in it until they are needed.

    Args:
        table: The table.
        image_columns: The columns that may hold images.
        data_hash: The hash of the data.
        origin: Where the table comes from, for messages.
        folder: The folder that paths of images are relative to, if there is one.

    Raises `UserError` for a text that is not UTF-8.
    """
    image_column_by_name = {}
    for name in image_columns:
        if name not in table.column_names:
            continue
        # A column of texts has paths or Base64, so it stays in the rows.
        if not pa.types.is_string(table.schema.field(name).type):
            image_column_by_name[name] = table.column(name)
    try:
        rows = table.drop_columns(list(image_column_by_name)).to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(f"data: {origin} has a text that is not UTF-8 ({error})") from None
    # The rows get None for these columns, since a check may ask whether a row has the field.
    for row in rows:
        row.update(dict.fromkeys(image_column_by_name))
    return _LoadedRows(
        rows=rows,
        image_column_by_name=image_column_by_name,
        data_hash=data_hash,
        origin=origin,
        folder=folder,
    )


def _data_hash_with_images(loaded: _LoadedRows, image_columns: Sequence[str]) -> str:
    """Return the hash of the rows; where they name image files, `HASH+HASH` with that of the files.

    Image files are looked for in the folder of the data. Data of the hub are in no folder.
    """
    folder = loaded.folder
    if folder is None:
        return loaded.data_hash
    image_names: set[str] = set()
    for row in loaded.rows:
        for column in image_columns:
            if _is_path(row.get(column)):
                image_names.add(str(row[column]))
    image_files = [folder / name for name in image_names if (folder / name).is_file()]
    if not image_files:
        return loaded.data_hash
    return f"{loaded.data_hash}+{content_hash(image_files)}"


def _rows_from_json(path: Path, id_column: str) -> _LoadedRows:
    """Load the rows of a JSON file: a list, an object of rows by id, or one object per line.

    Raises `UserError` for a file of any other form.
    """
    file_hash, content = _read_json_file(path)
    rows = content
    if isinstance(content, dict):
        # The keys are the ids of the rows. A value that is no row is refused below.
        rows = [
            {id_column: row_id, **row} if isinstance(row, dict) else row
            for row_id, row in content.items()
        ]
    is_list_of_rows = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if not is_list_of_rows:
        raise UserError(f"data: {str(path)!r} is not a list of objects, nor an object of them")
    return _LoadedRows(
        rows=rows,
        image_column_by_name={},
        data_hash=file_hash,
        origin=str(path),
        folder=path.parent,
    )


def _read_json_file(path: Path) -> tuple[str, Any]:
    """Return the hash and the content of a JSON file. A `.jsonl` file gives a list of its lines.

    Raises `UserError` for a file that cannot be read.
    """
    location = ""  # the line that is being read, for messages
    try:
        file_hash = content_hash([path])  # before it is read
        encoded_content = path.read_bytes()
        if path.suffix != ".jsonl":
            return file_hash, read_json(encoded_content)
        rows: list[Any] = []
        for number, line in enumerate(encoded_content.splitlines(), start=1):
            location = f"line {number} of "
            if line.strip():
                rows.append(read_json(line))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"data: {location}{str(path)!r} is not JSON ({error})") from None
    return file_hash, rows


def _is_path(value: object) -> bool:
    """Return whether the value of an image column is a path, and not a text of Base64."""
    return isinstance(value, str) and 0 < len(value) <= _MAX_PATH_CHARS
