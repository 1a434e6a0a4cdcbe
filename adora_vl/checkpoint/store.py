"""Checkpoints on disk: sealed, renamed into their place, and found again whole or not at all."""

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from adora_vl.utils.files import (
    flush_to_disk,
    remove_partial,
    replace_file,
    swap_folders,
    wait_until_visible,
)
from adora_vl.utils.hashing import file_sha256

MANIFEST_FILE = "manifest.json"
COMPLETE_FILE = "complete"
STAGING_FOLDER = ".saving"
CHECKPOINT_NAME_PATTERN = re.compile(r"checkpoint-(\d+)")
_HASHING_THREADS = 8  # hashlib releases the GIL


class DamagedCheckpoint(NamedTuple):
    """A checkpoint that is not whole."""

    path: Path
    """Its folder."""
    problem: str
    """What is wrong with it, in a few words."""


class NewestCheckpoint(NamedTuple):
    """The newest whole checkpoint of a run."""

    path: Path | None
    """Its folder; None if there is none."""
    damaged: list[DamagedCheckpoint]
    """Checkpoints that are newer, and damaged."""


def checkpoint_step(checkpoint: Path) -> int:
    """Return the optimizer step in the name of a checkpoint."""
    match = CHECKPOINT_NAME_PATTERN.fullmatch(checkpoint.name)
    assert match, f"{checkpoint} is no checkpoint folder"
    return int(match[1])


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return all `checkpoint-N` folders of a run, damaged ones too, newest first."""
    if not output_dir.is_dir():
        return []
    folders = [
        path
        for path in output_dir.iterdir()
        if path.is_dir() and CHECKPOINT_NAME_PATTERN.fullmatch(path.name)
    ]
    return sorted(folders, key=checkpoint_step, reverse=True)


def publish_checkpoint(
    staged: Path, final: Path, metadata: dict[str, Any], written_files: Collection[str]
) -> None:
    """Finish a checkpoint: write its manifest, and move it to its place in one rename.

    A crash leaves the checkpoint either complete or absent. A damaged folder that is at `final`
    already is moved away first. One process calls this, after all have written their files.

    Args:
        staged: The folder with the checkpoint's files.
        final: Where the checkpoint belongs.
        metadata: What the manifest says of the run, besides hashes and sizes of the files.
        written_files: Names of the files that all machines have written. On a network disk this
            machine may see the files of another machine some seconds late, so it waits for them.

    Raises `OSError` if one of the files does not appear.
    """
    for name in written_files:
        if not wait_until_visible(staged / name):
            raise FileNotFoundError(
                errno.ENOENT, "a file of another machine does not appear here", str(staged / name)
            )
    mark_checkpoint_complete(staged, metadata, written_files)
    replaced = staged.with_name(f"{staged.name}.replaced")
    swap_folders(staged, final, replaced)
    shutil.rmtree(replaced, ignore_errors=True)


def mark_checkpoint_complete(
    folder: Path, metadata: dict[str, Any], written_files: Collection[str] = ()
) -> None:
    """Write the manifest of a checkpoint, and the file `complete` that marks it as whole.

    All other files are flushed to the disk first and the mark is written last, so that a checkpoint
    with a mark is whole even after a power failure.

    Args:
        folder: The checkpoint.
        metadata: What the manifest says of the run, besides hashes and sizes of the files.
        written_files: Names of further files that other machines have written.
    """
    paths = [folder / name for name in sorted({*file_names_below(folder), *written_files})]
    for path in paths:
        flush_to_disk(path)
    manifest = json.dumps(
        {**metadata, "files": hash_files(folder, paths)}, indent=2, sort_keys=True
    )
    replace_file(folder / MANIFEST_FILE, manifest)
    replace_file(folder / COMPLETE_FILE, hashlib.sha256(manifest.encode()).hexdigest())
    for directory in {path.parent for path in paths} | {folder}:
        flush_to_disk(directory)


def describe_checkpoint_damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, in a few words; None if it is whole.

    Every byte is read, to compare its hashes with those in the manifest.
    """
    try:
        manifest_bytes = (checkpoint / MANIFEST_FILE).read_bytes()
        # The file that marks a checkpoint as complete holds the SHA-256 of its manifest.
        recorded_manifest_hash = (checkpoint / COMPLETE_FILE).read_text().strip()
    except OSError as error:
        return f"it was never finished ({Path(error.filename).name} is missing)"
    if hashlib.sha256(manifest_bytes).hexdigest() != recorded_manifest_hash:
        return f"{MANIFEST_FILE} is not the one that was finished"
    expected: dict[str, dict[str, Any]] = json.loads(manifest_bytes)["files"]
    for name, entry in expected.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
    actual = hash_files(checkpoint, [checkpoint / name for name in expected])
    damaged = [name for name in expected if actual[name] != expected[name]]
    if damaged:
        return f"{damaged[0]} is damaged (its SHA-256 is another one)"
    return None


def read_checkpoint_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a whole checkpoint.

    It has metadata of the run, and the hash and size of each file of the checkpoint.
    """
    manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST_FILE).read_text())
    return manifest


def save_for_rank(folder: Path, name: str, rank: int, content: Any) -> None:
    """Write something that one rank needs to resume into a checkpoint.

    Args:
        folder: The checkpoint, which may not exist yet.
        name: What is saved. The file is `NAME-RANK.pt`, such as `pool-00003.pt`.
        rank: The rank that needs it.
        content: Tensors and plain values.
    """
    import torch  # in here, since it takes seconds

    folder.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / f"{name}-{rank:05}.pt")


def load_for_rank(checkpoint: Path, name: str, rank: int) -> Any:
    """Return what `save_for_rank` wrote for a rank, with its tensors on the CPU.

    None if nothing was saved for the rank, such as in a run with fewer ranks than now. `name`: what
    was saved, the beginning of the file's name.
    """
    import torch

    file = checkpoint / f"{name}-{rank:05}.pt"
    if not file.is_file():
        return None
    return torch.load(file, map_location="cpu", weights_only=True)


def find_newest_valid_checkpoint(output_dir: Path) -> NewestCheckpoint:
    """Return the newest whole checkpoint of a run, and the damaged ones that are newer."""
    damaged: list[DamagedCheckpoint] = []
    for checkpoint in list_checkpoints(output_dir):
        problem = describe_checkpoint_damage(checkpoint)
        if problem is None:
            return NewestCheckpoint(path=checkpoint, damaged=damaged)
        damaged.append(DamagedCheckpoint(path=checkpoint, problem=problem))
    return NewestCheckpoint(path=None, damaged=damaged)


def delete_old_checkpoints(output_dir: Path, max_checkpoints: int | None) -> None:
    """Delete all complete checkpoints of a run except the newest ones.

    It is called after a new checkpoint is complete. Folders without the mark of a complete
    checkpoint stay.

    `max_checkpoints`: how many to keep; None or 0: all.
    """
    if not max_checkpoints:
        return
    complete = [path for path in list_checkpoints(output_dir) if (path / COMPLETE_FILE).is_file()]
    for checkpoint in complete[max_checkpoints:]:
        # Renamed before it is deleted, so that a crash leaves no half checkpoint under its name.
        renamed = output_dir / STAGING_FOLDER / f"{checkpoint.name}.deleted"
        renamed.parent.mkdir(exist_ok=True)
        checkpoint.rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)


def clear_staging(output_dir: Path) -> None:
    """Delete the half-written files that a killed run has left in its folder.

    Call it while `output_dir` is locked, so that they are not those of a running process.
    """
    shutil.rmtree(output_dir / STAGING_FOLDER, ignore_errors=True)
    remove_partial(output_dir)


def file_names_below(folder: Path) -> list[str]:
    """Return the names of all files in a folder and below it, relative to the folder."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def hash_files(folder: Path, paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Return SHA-256 and size of files in a folder, by their names relative to it.

    The form is that of the manifest: {"sha256": ..., "bytes": ...} for each file.
    """

    def hash_and_size(path: Path) -> dict[str, Any]:
        """Return SHA-256 and size of one file."""
        return {"sha256": file_sha256(path), "bytes": path.stat().st_size}

    names = [path.relative_to(folder).as_posix() for path in paths]
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        entries = list(pool.map(hash_and_size, paths))
    return dict(zip(names, entries, strict=True))
