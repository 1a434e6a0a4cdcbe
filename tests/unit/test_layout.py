"""What the layout promises: the direction of imports, and that a name means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# package or module prefix -> what of ours it may import (itself always)
ALLOWED = {
    "adora_vl.advantage": (),
    "adora_vl.errors": (),
    "adora_vl.seeds": (),
    "adora_vl.families": (),
    "adora_vl.memory": (
        "adora_vl.compat",
        "adora_vl.config",
        "adora_vl.dedup",
        "adora_vl.errors",
        "adora_vl.families",
        "adora_vl.models",
        "adora_vl.yaml_file",
    ),
    "adora_vl.files": ("adora_vl.errors",),
    "adora_vl.yaml_file": ("adora_vl.errors",),
    "adora_vl.hub": ("adora_vl.compat",),
    "adora_vl.commands": ("adora_vl.errors",),
    "adora_vl.comparability": (),
    "adora_vl.checkpoint": ("adora_vl.errors", "adora_vl.files", "adora_vl.models"),
    "adora_vl.config": (
        "adora_vl.advantage",
        "adora_vl.commands",
        "adora_vl.errors",
        "adora_vl.families",
        "adora_vl.prompt_template",
        "adora_vl.prompts",
        "adora_vl.rollout",
        "adora_vl.words",
        "adora_vl.yaml_file",
    ),
    "adora_vl.prompt_template": ("adora_vl.errors",),
    "adora_vl.training_data": (
        "adora_vl.assets",
        "adora_vl.config",
        "adora_vl.errors",
        "adora_vl.prompt_template",
        "adora_vl.prompts",
        "adora_vl.rows",
        "adora_vl.unreadable_images",
        "data_prep",
    ),
    "adora_vl.rows": ("adora_vl.errors",),
    "adora_vl.words": (),
    "adora_vl.batch": (),
    "adora_vl.dedup": (
        "adora_vl.batch",
        "adora_vl.compat",
        "adora_vl.config",
        "adora_vl.errors",
        "adora_vl.families",
        "adora_vl.rollout",
        "adora_vl.seeds",
    ),
    "adora_vl.batching": (
        "adora_vl.batch",
        "adora_vl.checkpoint",
        "adora_vl.dedup",
        "adora_vl.errors",
        "adora_vl.config",
        "adora_vl.seeds",
    ),
    "adora_vl.reflection": (),
    "adora_vl.learning_rate": (),
    "adora_vl.weighing": ("adora_vl.advantage", "adora_vl.batch", "adora_vl.reflection"),
    "adora_vl.guards": (
        "adora_vl.batch",
        "adora_vl.errors",
        "adora_vl.unreadable_images",
        "adora_vl.rollout",
        "adora_vl.rewards",
    ),
    "adora_vl.rollout_log": (
        "adora_vl.batch",
        "adora_vl.weighing",
        "adora_vl.rewards",
        "adora_vl.advantage",
        "adora_vl.checkpoint",
        "adora_vl.errors",
        "adora_vl.files",
        "adora_vl.rollout",
    ),
    "adora_vl.compat": (),
    "adora_vl.prompts": (),
    "adora_vl.report": (
        "adora_vl.advantage",
        "adora_vl.comparability",
        "adora_vl.checkpoint",
        "adora_vl.commands",
        "adora_vl.config",
        "adora_vl.errors",
        "adora_vl.files",
        "adora_vl.prompts",
        "adora_vl.rollout_log",
        "eval.compare",
        "eval.statistics",
    ),
    "adora_vl.rewards": ("adora_vl.endpoint", "adora_vl.errors", "adora_vl.files"),
    "adora_vl.endpoint": ("adora_vl.errors", "adora_vl.files"),
    "adora_vl.rollout": ("adora_vl.batch", "adora_vl.compat", "adora_vl.errors", "adora_vl.models", "adora_vl.seeds"),
    "eval": (
        "adora_vl.assets",
        "adora_vl.commands",
        "adora_vl.comparability",
        "adora_vl.endpoint",
        "adora_vl.errors",
        "adora_vl.families",
        "adora_vl.files",
        "adora_vl.hub",
        "adora_vl.rows",
        "adora_vl.prompt_template",
        "adora_vl.prompts",
        "adora_vl.rewards",
        "adora_vl.models",
        "adora_vl.reflection",
        "adora_vl.rollout",
        "adora_vl.words",
        "adora_vl.yaml_file",
        "data_prep",
    ),
    # asks a model, as the evaluation does
    "data_prep.filtering": ("adora_vl.commands", "adora_vl.errors", "adora_vl.prompts", "data_prep", "eval"),
    "data_prep.filter_command": ("adora_vl.commands", "adora_vl.errors", "data_prep", "eval"),
    "data_prep": (
        "adora_vl.commands",
        "adora_vl.errors",
        "adora_vl.files",
        "adora_vl.hub",
        "adora_vl.rows",
        "adora_vl.prompts",
        "adora_vl.rewards",
        "adora_vl.families",
        "adora_vl.models",
    ),
}


PACKAGES = ("adora_vl", "data_prep", "eval")


@cache
def _modules(tops: tuple[str, ...] = PACKAGES) -> list[tuple[str, ast.Module]]:
    """Name and syntax tree of every module."""
    paths = [path for top in tops for path in (ROOT / top).rglob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [(name, ast.parse(path.read_text())) for name, path in zip(names, paths, strict=True)]


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "adora_vl":
            yield from (f"adora_vl.{alias.name}" for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("prefix", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(prefix):
    checked = 0
    for name, tree in _modules():
        if not _within(name, prefix) or max((p for p in ALLOWED if _within(name, p)), key=len) != prefix:
            continue
        checked += 1
        for imported in _imports(tree):
            if any(_within(imported, top) for top in PACKAGES):
                allowed = (prefix, *ALLOWED[prefix])
                assert any(_within(imported, p) for p in allowed), f"{name} imports {imported}"
    assert checked > 0


# Arrows that run upwards, for a reason: the doctor's command builds the trainer as training does, LoRA's targets are
# checked on the modules that the memory prediction builds without weights, and `data_prep filter` lets a model answer,
# as the evaluation does.
UPWARDS = {
    ("adora_vl.doctor", "adora_vl.train"),
    ("adora_vl.models", "adora_vl.memory"),
    ("data_prep", "eval"),
}


def _room(module: str) -> str:
    """`adora_vl.rollout` for `adora_vl.rollout.engine`, `eval` for `eval.runner`."""
    return ".".join(module.split(".")[: 2 if module.startswith("adora_vl.") else 1])


def _rooms() -> dict[str, set[str]]:
    """Each room with the other rooms that it imports."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for name, tree in _modules():
        rooms[_room(name)] |= {_room(i) for i in _imports(tree) if any(_within(i, top) for top in PACKAGES)}
    return {room: imported - {room, "adora_vl"} for room, imported in rooms.items()}


def test_no_room_imports_another_in_a_circle():
    """A reader of one room needs those below it, and never comes back. Raises `CycleError` with the circle."""
    downwards = {room: {i for i in imported if (room, i) not in UPWARDS} for room, imported in _rooms().items()}
    order = list(TopologicalSorter(downwards).static_order())
    assert order.index("adora_vl.trainer") < order.index("adora_vl.train")
    assert all(above in _rooms()[below] for below, above in UPWARDS), "an exception that is no longer needed"


def test_nothing_imports_the_entry_point():
    """But for the doctor's command, an entry point itself: it examines the very trainer that training would build."""
    importers = [name for name, tree in _modules() if any(_within(i, "adora_vl.train") for i in _imports(tree))]
    assert importers == ["adora_vl.doctor.__main__"]


def test_no_two_public_classes_have_the_same_name():
    """Whoever reads `Schedule` or `Request` somewhere knows which one is meant."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, tree in _modules((*PACKAGES, "benchmarks")):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    assert len(places) > 100
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
