"""The files of a run's record: Parquet tables in `output_dir/rollouts`.

Each has the rows of some steps.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from adora_vl.utils.errors import UserError, describe_error
from adora_vl.utils.files import remove_partial, replacing_file

ROLLOUTS_FOLDER = "rollouts"
IMAGES_FOLDER = "_images"  # in it, with the diagrams
_FILE_NAME_PATTERN = re.compile(r"rollouts-(\d+)-(\d+)\.parquet")
# When so many of the newest files are all within this size, they are merged
_FILES_TO_MERGE = 32
_MAX_BYTES_TO_MERGE = 8_000_000


@dataclass(frozen=True)
class RecordFile:
    """One file of the record and the first and last step in it."""

    path: Path
    first_step: int
    last_step: int


def list_record_files(folder: Path) -> list[RecordFile]:
    """Return the record's files in `folder`, in the order of their steps.

    A file is left out if another file also has its steps. For example, where there are files of the
    steps 1 to 3 and 2 to 2, the second was merged into the first, and a crash came before it was
    deleted.
    """
    files_or_none = [_parse_record_path(path) for path in folder.glob("*")]
    all_files = [file for file in files_or_none if file is not None]
    merged_files = set()
    for outer in all_files:
        for inner in all_files:
            is_within = outer.first_step <= inner.first_step and inner.last_step <= outer.last_step
            if is_within and inner != outer:
                merged_files.add(inner)
    return sorted(set(all_files) - merged_files, key=lambda file: file.first_step)


def _parse_record_path(path: Path) -> RecordFile | None:
    """Return the file of the record with this path; None if its name is not that of one."""
    match = _FILE_NAME_PATTERN.fullmatch(path.name)
    if match is None:
        return None
    return RecordFile(path, first_step=int(match[1]), last_step=int(match[2]))


def write_record_file(folder: Path, table: pa.Table, first_step: int, last_step: int) -> RecordFile:
    """Write the rows of the steps from `first_step` to `last_step` as one file of the record.

    The data are on the disk before the file gets its name, so that no crash leaves half a file.
    """
    name = f"rollouts-{first_step:08}-{last_step:08}.parquet"
    file = RecordFile(folder / name, first_step=first_step, last_step=last_step)
    with replacing_file(file.path) as stream:
        pq.write_table(table, stream, compression="zstd")
    return file


def merge_small_record_files(folder: Path) -> None:
    """Merge the newest files if they are many and small, so that a long run leaves few files."""
    newest_files = list_record_files(folder)[-_FILES_TO_MERGE:]
    are_small = all(file.path.stat().st_size <= _MAX_BYTES_TO_MERGE for file in newest_files)
    if len(newest_files) < _FILES_TO_MERGE or not are_small:
        return
    # A crash between here and the last deletion does no harm: `list_record_files` leaves merged
    # files out.
    write_record_file(
        folder,
        table=read_record_files(newest_files),
        first_step=newest_files[0].first_step,
        last_step=newest_files[-1].last_step,
    )
    for file in newest_files:
        file.path.unlink()


def delete_oldest_record_files(folder: Path, limit_bytes: float) -> None:
    """Delete the record's oldest files until the rest has at most `limit_bytes`.

    The newest file always stays.
    """
    bytes_by_file = {file: file.path.stat().st_size for file in list_record_files(folder)}
    total_bytes = sum(bytes_by_file.values())
    oldest_first = list(bytes_by_file)
    for file in oldest_first[:-1]:
        if total_bytes <= limit_bytes:
            return
        total_bytes -= bytes_by_file[file]
        file.path.unlink()


def delete_steps_after(folder: Path, step: int) -> None:
    """Delete the rollouts of all steps after `step` from the record, as a run resumes there.

    The step 0 deletes all rollouts, and the diagrams too. Files of others are not touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    current_files = list_record_files(folder)
    current_paths = [file.path for file in current_files]
    remove_partial(folder)
    remove_partial(folder / IMAGES_FOLDER)
    # A crash may have left files whose steps a larger file has too, which they were merged into.
    for path in folder.glob("rollouts-*"):
        is_merged = _parse_record_path(path) is not None and path not in current_paths
        if is_merged:
            path.unlink()
    for file in current_files:
        has_steps_on_both_sides = file.first_step <= step < file.last_step
        if has_steps_on_both_sides:
            # the rows up to `step` become a file of their own before their old file is deleted
            write_record_file(
                folder,
                table=read_record_file(file).filter(pc.field("step") <= step),
                first_step=file.first_step,
                last_step=step,
            )
        if file.last_step > step:
            file.path.unlink()
    if step == 0:
        shutil.rmtree(folder / IMAGES_FOLDER, ignore_errors=True)


def read_record_files(record_files: list[RecordFile]) -> pa.Table:
    """Return the rows of several files of the record in one table.

    A column that a file lacks is null in its rows.
    """
    tables = [read_record_file(file) for file in record_files]
    return pa.concat_tables(tables, promote_options="default")


def read_record_file(file: RecordFile, columns: list[str] | None = None) -> pa.Table:
    """Return the rows of one file of the record.

    Args:
        file: the file.
        columns: the columns to read; None reads all.

    Raises:
        UserError: the file is damaged.
        FileNotFoundError: the file is gone, as when a run that goes on has merged it meanwhile.
    """
    try:
        return pq.read_table(file.path, columns=columns)
    except FileNotFoundError:
        # This is an OSError too, but the file is not damaged. The caller handles it.
        raise
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"the record's file {str(file.path)!r} cannot be read ({describe_error(error)}); move "
            f"it out of the run, and the record lacks the steps {file.first_step} to "
            f"{file.last_step} and no others"
        ) from error
