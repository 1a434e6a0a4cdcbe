"""Checkpoints on disk: sealed, renamed into their place, and found again whole or not at all."""

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from adora_vl.utils.files import appears, flush, put_in_place, remove_partial, replace_file
from adora_vl.utils.hashing import file_sha256

MANIFEST = "manifest.json"
MARK = "complete"
STAGING = ".saving"
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_HASHING_THREADS = 8  # hashlib releases the GIL


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step in the name of a checkpoint."""
    match = CHECKPOINT.fullmatch(checkpoint.name)
    assert match, f"{checkpoint} is no checkpoint folder"
    return int(match[1])


def checkpoints(output_dir: Path) -> list[Path]:
    """Return all `checkpoint-N` folders, whole or not, newest first."""
    if not output_dir.is_dir():
        return []
    folders = (
        path for path in output_dir.iterdir() if path.is_dir() and CHECKPOINT.fullmatch(path.name)
    )
    return sorted(folders, key=step_of, reverse=True)


def publish(
    staged: Path, final: Path, facts: dict[str, Any], written: Collection[str] = ()
) -> None:
    """Seal `staged` with `facts` in its manifest, and make it `final` in one rename.

    Nothing is lost in a crash. A folder that is at `final` already, one that was found damaged, is
    moved away first. `written`: the files that other machines have put there; on a shared disk this
    machine may list its folder as it was some seconds ago. One process calls this, after all have
    written. Raises `OSError` where one of the files does not appear.
    """
    missing_names = (name for name in written if not appears(staged / name))
    missing = next(missing_names, None)
    if missing is not None:
        raise FileNotFoundError(
            errno.ENOENT, "a file of another machine does not appear here", str(staged / missing)
        )
    seal(staged, facts, written)
    replaced = staged.with_name(f"{staged.name}.replaced")
    put_in_place(staged, final, replaced)
    shutil.rmtree(replaced, ignore_errors=True)


def seal(folder: Path, facts: dict[str, Any], written: Collection[str] = ()) -> None:
    """Flush everything to the disk, then write the manifest, then the mark.

    In this order, so that a checkpoint with a mark is whole. The arguments are those of `publish`.
    """
    paths = [folder / name for name in sorted({*names_in(folder), *written})]
    for path in paths:
        flush(path)
    manifest = json.dumps({**facts, "files": hashes(folder, paths)}, indent=2, sort_keys=True)
    replace_file(folder / MANIFEST, manifest)
    replace_file(folder / MARK, hashlib.sha256(manifest.encode()).hexdigest())
    for directory in {path.parent for path in paths} | {folder}:
        flush(directory)


def problem_of(checkpoint: Path) -> str | None:
    """Return why this checkpoint is not whole, in a few words; None if it is.

    Every byte of it is read.
    """
    try:
        manifest_bytes = (checkpoint / MANIFEST).read_bytes()
        mark = (checkpoint / MARK).read_text().strip()
    except OSError as error:
        return f"it was never finished ({Path(error.filename).name} is missing)"
    if hashlib.sha256(manifest_bytes).hexdigest() != mark:
        return f"{MANIFEST} is not the one that was finished"
    expected: dict[str, dict[str, Any]] = json.loads(manifest_bytes)["files"]
    for name, entry in expected.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
    actual = hashes(checkpoint, [checkpoint / name for name in expected])
    damaged = [name for name in expected if actual[name] != expected[name]]
    return f"{damaged[0]} is damaged (its SHA-256 is another one)" if damaged else None


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a whole checkpoint."""
    facts: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text())
    return facts


def save_of_rank(folder: Path, kind: str, rank: int, content: Any) -> None:
    """Write what one rank needs to resume into the checkpoint `folder`, which may not exist yet."""
    import torch  # in here, since it takes seconds

    folder.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / f"{kind}-{rank:05}.pt")


def load_of_rank(checkpoint: Path, kind: str, rank: int) -> Any:
    """Return what `save_of_rank` wrote, its tensors on the CPU.

    None where it wrote nothing for this rank.
    """
    import torch

    file = checkpoint / f"{kind}-{rank:05}.pt"
    return torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else None


def newest_valid(output_dir: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest whole checkpoint of a run, and each newer one with why it is not whole."""
    skipped: list[tuple[Path, str]] = []
    for checkpoint in checkpoints(output_dir):
        problem = problem_of(checkpoint)
        if problem is None:
            return checkpoint, skipped
        skipped.append((checkpoint, problem))
    return None, skipped


def rotate(output_dir: Path, keep: int | None) -> None:
    """Delete all finished checkpoints except the newest `keep` (None keeps all).

    Call it after the newest is published. Folders without the mark are neither counted nor touched.
    A folder is renamed before it is deleted, so that a checkpoint is never half there.
    """
    if not keep:
        return
    finished = [path for path in checkpoints(output_dir) if (path / MARK).is_file()]
    for checkpoint in finished[keep:]:
        doomed = output_dir / STAGING / f"{checkpoint.name}.deleted"
        doomed.parent.mkdir(exist_ok=True)
        checkpoint.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def clear_staging(output_dir: Path) -> None:
    """Remove what a killed process left behind. Call it while `output_dir` is held."""
    shutil.rmtree(output_dir / STAGING, ignore_errors=True)
    remove_partial(output_dir)


def names_in(folder: Path) -> list[str]:
    """Return the files of a folder, as a manifest names them."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def hashes(folder: Path, paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Return SHA-256 and size of files, by their names in the folder."""

    def entry_of(path: Path) -> dict[str, Any]:
        """Return SHA-256 and size of one file."""
        return {"sha256": file_sha256(path), "bytes": path.stat().st_size}

    names = [path.relative_to(folder).as_posix() for path in paths]
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        entries = list(pool.map(entry_of, paths))
    return dict(zip(names, entries, strict=True))
