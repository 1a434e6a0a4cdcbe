"""Which files of a run's folder a run wrote: those alone may be deleted with `--overwrite_output_dir`.

checkpoint-N     by its manifest, which names its files
the record       by its content: metrics.jsonl, manifest.json, stopped.json, rollouts/, completions/
a final model    by written.json: the hash of each saved file; during a save, the names of files that are not the run's
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from adora_vl.checkpoint.store import CHECKPOINT, MANIFEST, MARK, facts_of, hashes, step_of
from adora_vl.utils.files import is_partial, read_object, replace_file

WRITTEN = "written.json"
_MADE_BY = {"made_by": "adora_vl.train"}
_STOPPED = {"exit_code", "step", "checkpoint"}  # the keys of stopped.json
_MODEL = (
    "merged", "ref", "*.safetensors", "*.safetensors.index.json", "adapter_*", "config.json", "generation_config.json",
    "README.md", "*processor_config.json", "tokenizer*", "chat_template*", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "training_args.bin", "trainer_state.json",
)  # fmt: skip
_SHOWN = 5


def of_a_run(folder: Path) -> list[Path]:
    """The entries of the folder whose names a run uses. Anything else there is the user's, and stays."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    steps = sorted((path for path in entries if CHECKPOINT.fullmatch(path.name)), key=step_of)
    patterns = (*_MODEL, *_RECORD, WRITTEN)
    named = [path for pattern in patterns for path in entries if fnmatchcase(path.name, pattern)]
    return list(dict.fromkeys([*steps, *named]))


def model_of_a_run(folder: Path) -> list[Path]:
    """The entries of a final model, and `written.json`."""
    return [path for path in of_a_run(folder) if any(fnmatchcase(path.name, name) for name in (*_MODEL, WRITTEN))]


def own_files(folder: Path, paths: Iterable[Path] | None = None) -> list[str]:
    """The files below `paths` that no run is known to have written as they are, by their names in the folder.

    `paths`: by default `of_a_run`. Links are among them, as a run makes none. A folder `checkpoint-N` without a
    checkpoint's manifest is named as a whole. Raises `OSError` where a folder cannot be listed.
    """
    notes, own = _notes(folder), list[Path]()
    for path in of_a_run(folder) if paths is None else paths:
        if CHECKPOINT.fullmatch(path.name):
            own += _own_of_checkpoint(path)
        else:
            own += [file for file in _below(path) if not _wrote(file, file.relative_to(folder).as_posix(), notes)]
    return [path.relative_to(folder).as_posix() for path in own]


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more


@contextmanager
def noted(output_dir: Path, writes: bool) -> Iterator[None]:
    """Note in `written.json` what the block saves of a model into `output_dir`. `writes`: this process saves it.

    If the run is killed inside, whatever was not there before counts as the run's, so that it can resume. Raises
    `OSError`.
    """
    if not writes:
        yield
        return
    before, known = _model_files(output_dir), _notes(output_dir).get("files", {})
    _write_notes(output_dir, others=[name for name in before if name not in known])
    try:
        yield
    finally:
        after = _model_files(output_dir)
        changed = [output_dir / name for name, state in after.items() if before.get(name) != state]
        kept = {name: entry for name, entry in known.items() if name in after}
        _write_notes(output_dir, files={**kept, **hashes(output_dir, changed)})


def _write_notes(output_dir: Path, **notes: Any) -> None:
    replace_file(output_dir / WRITTEN, json.dumps({**_MADE_BY, **notes}, indent=2, sort_keys=True) + "\n")


def _model_files(output_dir: Path) -> dict[str, tuple[int, ...]]:
    """The files of a final model, each with what changes when it is written."""
    tops = [path for path in model_of_a_run(output_dir) if path.name != WRITTEN]
    files = [path for top in tops for path in _below(top) if not path.is_symlink()]
    states = {path.relative_to(output_dir).as_posix(): path.lstat() for path in files}
    return {name: (state.st_ino, state.st_mtime_ns, state.st_size) for name, state in states.items()}


def _below(path: Path) -> Iterator[Path]:
    """The files in a folder and in its folders, or the file itself. A link is a file, wherever it leads."""
    if path.is_symlink() or not path.is_dir():
        yield path
    else:
        for inside in sorted(path.iterdir()):
            yield from _below(inside)


def _own_of_checkpoint(checkpoint: Path) -> list[Path]:
    """The files in a `checkpoint-N` that no run wrote. A damaged checkpoint is a run's too: its mark is not read."""
    found = list(_below(checkpoint))
    try:
        facts = facts_of(checkpoint)
        sealed = {checkpoint / name for name in (*facts["files"], MANIFEST, MARK)} if "step" in facts else set()
    except (OSError, ValueError, KeyError, TypeError):
        sealed = set()
    if checkpoint.is_symlink() or not sealed:
        return [checkpoint] if found else []
    return [path for path in found if path.is_symlink() or path not in sealed]


def _wrote(path: Path, name: str, notes: dict[str, Any]) -> bool:
    """Whether a run wrote this file as it is. `name` is its name in the run's folder."""
    if path.is_symlink() or not path.is_file():
        return False
    top, _, inside = name.partition("/")
    try:
        if top in _RECORD:
            return _is_record(path, top, inside)
        if name == WRITTEN:
            return bool(notes)
        if "others" in notes:  # the run was killed while it saved
            return name not in notes["others"]
        noted = notes["files"].get(name)
        same_size = noted is not None and noted["bytes"] == path.stat().st_size
        return same_size and bool(hashes(path.parent, [path])[path.name] == noted)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return False


def _notes(folder: Path) -> dict[str, Any]:
    """What `written.json` says; nothing where a run did not write it."""
    notes = read_object(folder / WRITTEN)
    return notes if notes.items() >= _MADE_BY.items() else {}


def is_manifest(path: Path) -> bool:
    """Whether this is the `manifest.json` of a run, which is there from its beginning."""
    return read_object(path).items() >= _MADE_BY.items()


_RECORD = ("metrics.jsonl", "manifest.json", "stopped.json", "rollouts", "completions")


def _is_record(path: Path, top: str, inside: str) -> bool:
    """Whether a file of the record is a run's: `inside` is its name in the folder `top`, empty for a file."""
    if top == "rollouts":  # a part has the run's settings in its metadata; a diagram is named by its hash
        if re.fullmatch(r"rollouts-\d+-\d+\.parquet", inside):
            return b"adora_vl" in (pq.read_schema(path).metadata or {})
        return is_partial(path) or re.fullmatch(r"_images/[0-9a-f]{16}\.png", inside) is not None
    if top == "completions":  # TRL's tables have these columns
        named = re.fullmatch(r"completions_\d{5,}\.parquet", inside) is not None
        return named and {"step", "prompt", "completion", "advantage"} <= set(pq.read_schema(path).names)
    if inside:
        return False
    if top == "metrics.jsonl":  # a crash may have cut off a last line after others
        *lines, rest = path.read_bytes().split(b"\n")
        ours = all(json.loads(line).keys() >= {"step", "kind", "time"} for line in lines)
        return ours and (bool(lines) or not rest)
    return is_manifest(path) if top == "manifest.json" else read_object(path).keys() == _STOPPED
