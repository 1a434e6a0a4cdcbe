"""The hash of files: every byte counts, and a file is read again only where it may have changed."""

import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adora_vl.utils import hashing
from adora_vl.utils.files import JsonLinesCache
from adora_vl.utils.hashing import content_hash

THREE_MIB = 3 * 2**20


@pytest.fixture
def hashed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the files that were hashed, which grows while a test runs.

    The remembered hashes are those of the test alone. The clock is a minute ahead of the disk's, so
    that new files are old enough to be remembered.
    """
    names: list[str] = []
    real_digest = hashlib.file_digest

    def note_and_digest(file: Any, kind: Any) -> Any:
        names.append(Path(file.name).name)
        return real_digest(file, kind)

    monkeypatch.setattr(hashing, "hashlib", SimpleNamespace(file_digest=note_and_digest))
    monkeypatch.setattr(
        hashing, "time", SimpleNamespace(time_ns=lambda: time.time_ns() + 60 * 10**9)
    )
    monkeypatch.setenv("ADORA_VL_HOME", str(tmp_path / "home"))
    return names


def test_one_byte_anywhere_is_another_hash_although_size_and_time_are_the_same(
    tmp_path, hashed_files
):
    """The first, a middle and the last byte of 3 MiB are changed, one after the other."""
    file = tmp_path / "model.safetensors"
    content = bytearray(THREE_MIB)
    hashes = set()
    for position in (None, 0, THREE_MIB // 2 - 1, THREE_MIB - 1):
        if position is not None:
            content[position] ^= 1
        file.write_bytes(content)  # the same inode
        os.utime(file, (1, 1))  # as rsync and tar put a time back
        hashes.add(content_hash([file]))
    assert len(hashes) == 4
    assert len(hashed_files) == 4
    assert content_hash([file.rename(tmp_path / "other.safetensors")]) not in hashes, (
        "a file's name counts"
    )


def test_a_second_look_reads_nothing_also_in_another_process(tmp_path, hashed_files):
    """Hashes are remembered in a file; what stands there and is no hash is computed again."""
    (tmp_path / "a").write_bytes(bytes(THREE_MIB))
    hash_before = content_hash([tmp_path / "a"])
    hashing._hashes_in_file.cache_clear()  # as a new process
    assert content_hash([(tmp_path / "a")]) == hash_before
    assert hashed_files == ["a"]
    hashes_file = tmp_path / "home" / "content.jsonl"
    hashes_file.write_text(hashes_file.read_text().replace('"answer": "', '"answer": "nonsense'))
    hashing._hashes_in_file.cache_clear()
    assert content_hash([tmp_path / "a"]) == hash_before, "what is no hash is not believed"
    assert hashed_files == ["a", "a"], "what is no hash is not believed"


def test_a_file_that_was_just_written_is_read_again(tmp_path, hashed_files, monkeypatch):
    """Within the grain of a clock, a second change would leave its time as it is."""
    monkeypatch.setattr(hashing, "time", time)
    (tmp_path / "a").write_bytes(bytes(THREE_MIB))
    assert content_hash([tmp_path / "a"]) == content_hash([tmp_path / "a"])
    assert hashed_files == ["a", "a"]


def test_a_torn_line_does_not_take_the_next_answer_with_it(tmp_path):
    """The file ends in the middle of a line, and what is put in next can be read."""
    file = tmp_path / "kept.jsonl"
    file.write_bytes(
        b'{"key": "a", "answer": "1"}\n{"key": "b", "answer": 2}\n[1]\n\xff{"key": "c", "ans'
    )
    JsonLinesCache(file).put("d", "4")
    answers = JsonLinesCache(file)
    assert [answers.get(key) for key in "abcd"] == ["1", None, None, "4"]
