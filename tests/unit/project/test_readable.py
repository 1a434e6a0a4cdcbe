"""The fence around legibility: each kind is recognised, and no count of a room rises."""

import ast
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import load_module
from tests.support.paths import REPOSITORY

readable = load_module(REPOSITORY / "setup" / "readable.py")
# What a kind is, and what is close to it.
CODE_WITH_AND_WITHOUT_BY_KIND: dict[str, tuple[str, str]] = {
    "tuple_assign": ("a, b = x, y", "a, b = b, a"),
    "unpacked_generator": ("a, b = (x for x in y)", "a, b = y"),
    "bool_arithmetic": ("a = 'x' * (b > 1)", "a = 'x' * b"),
    "hidden_if": ("a = 1 if b else 2 if c else 3", "a = 1 if b else 2"),
    "nested_comprehensions": (
        "[[[x for x in y] for y in z] for z in a]",
        "[[x for x in y] for y in z]",
    ),
    "any_argument": ("def f(a: Any): ...", "def f(a: int): ..."),
    "no_subject": ('def f():\n    """Of a run."""', 'def f():\n    """The run."""'),
    "long_summary": (
        'def f():\n    """It goes\n    on."""',
        'def f():\n    """It ends.\n\n    On."""',
    ),
    "vague_name": ("found = 1", "groups = found"),
}


def test_each_kind_is_told_from_what_is_close_to_it():
    """The first source of each pair counts once, and the second does not."""
    assert CODE_WITH_AND_WITHOUT_BY_KIND.keys() == readable.COUNTER_BY_KIND.keys()
    for kind, sources in CODE_WITH_AND_WITHOUT_BY_KIND.items():
        counts = [
            sum(map(readable.COUNTER_BY_KIND[kind], ast.walk(ast.parse(source))))
            for source in sources
        ]
        assert counts == [1, 0], kind


@pytest.fixture
def project_folder(tmp_path: Path) -> Path:
    """Make a repository with one room, whose file has a tuple assignment and a vague name."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "adora_vl" / "room").mkdir(parents=True)
    (tmp_path / "adora_vl" / "room" / "one.py").write_text("a, b = 1, 2\nfound = 3\n")
    return tmp_path


def test_a_count_that_rises_fails_with_its_room_and_place_and_none_is_written_down(
    project_folder, capsys
):
    """Limits begin as a room is, go down with it, and rise only with `--allow`."""
    limits = project_folder / "limits.json"

    def run(*arguments: str) -> tuple[int, list[str], Any]:
        """Run the command, and return its exit code, its lines of stderr and the limits."""
        exit_code = readable.main(list(arguments), project_folder, limits)
        return exit_code, capsys.readouterr().err.splitlines(), json.loads(limits.read_text())

    exit_code, faults, limits_before = run("--update")
    assert (exit_code, faults) == (0, []), "a new room begins as it is"
    assert limits_before == {"adora_vl/room": {"tuple_assign": 1, "vague_name": 1, "crowding": 50}}
    (project_folder / "adora_vl" / "room" / "two.py").write_text("groups = 3\nc, d = 1, 2\n")
    for arguments in ((), ("--update",)):
        exit_code, faults, limits_now = run(*arguments)
        assert exit_code == 1, "a limit does not rise"
        assert limits_now == limits_before, "a limit does not rise"
        assert "readable: adora_vl/room: tuple_assign is 2, at most 1" in faults[0]
        assert "adora_vl/room/two.py:2" in faults[0]
    (project_folder / "adora_vl" / "room" / "one.py").write_text("groups = 3\n\n\n")
    (project_folder / "adora_vl" / "room" / "two.py").write_text("c, d = 1, 2\n\n\n")
    exit_code, faults, limits_now = run("--update")
    assert exit_code == 0
    assert faults == []
    assert limits_now["adora_vl/room"].get("vague_name", 0) == 0
    (project_folder / "adora_vl" / "room" / "one.py").write_text("found = 3\n\n\n")
    assert run()[0] == 1
    assert run("--allow", "adora_vl/room")[0] == 0
