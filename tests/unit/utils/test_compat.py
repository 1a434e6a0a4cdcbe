"""Libraries are changed in `adora_vl/utils/compat.py` alone, and only where the installed version
is as it says.
"""

import ast
import inspect
import pydoc
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from adora_vl.utils import compat
from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

ROOT = Path(__file__).parents[3]
PATCH_BY_NAME = {
    name: value for name, value in vars(compat).items() if isinstance(value, compat.Patch)
}

# setattr with a key of a dataclass of settings
FILES_THAT_SET_KEYS = {
    "adora_vl/config/methods.py",
    "adora_vl/config/values.py",
    "adora_vl/config/schema.py",
    "adora_vl/rewards/safe_call.py",  # the copy of a record that a function is handed
}
SHARED_IMAGES_FILE = "adora_vl/data/shared_images.py"  # gives pictures a class of ours
INTERRUPTS_FILE = "adora_vl/utils/interrupts.py"  # sets Python's own hook, which is made for it
ATTRIBUTE_SETTERS = ("setattr", "delattr", "__setattr__")


@cache
def _sources() -> list[tuple[str, ast.Module]]:
    paths = [path for top in ("adora_vl", "eval") for path in sorted((ROOT / top).rglob("*.py"))]
    return [
        (str(p.relative_to(ROOT)), ast.parse(p.read_text())) for p in paths if p.name != "compat.py"
    ]


def _attributes_set_in(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """List the targets and the values that an assignment sets."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def _changes_of_others(tree: ast.Module) -> Iterator[str]:
    """Yield how a module changes other objects: the attributes to which it assigns code.

    Attributes of `self` do not count. A call such as `setattr` is yielded as `setattr`, and an
    import of `mock` as `mock`.
    """
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    values = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    code = {node.name for node in ast.walk(tree) if isinstance(node, definitions)} - values
    for node in ast.walk(tree):
        assigned: Iterable[tuple[ast.expr, ast.expr]] = (
            _attributes_set_in(node) if isinstance(node, ast.Assign) else []
        )
        for target, value in assigned:
            is_code = isinstance(value, ast.Lambda) or (
                isinstance(value, ast.Name) and value.id in code
            )
            if (
                is_code
                and isinstance(target, ast.Attribute)
                and ast.unparse(target.value) != "self"
            ):
                yield target.attr
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] in ATTRIBUTE_SETTERS
        ):
            yield "setattr"
        if isinstance(node, ast.Import | ast.ImportFrom) and "mock" in ast.unparse(node):
            yield "mock"


def test_no_library_is_changed_anywhere_else():
    changes = {path: {*_changes_of_others(tree)} for path, tree in _sources()}
    allowed = {path: {"setattr"} for path in FILES_THAT_SET_KEYS}
    allowed[SHARED_IMAGES_FILE] = {"__class__"}
    allowed[INTERRUPTS_FILE] = {"excepthook"}
    past = {path: names for path, names in changes.items() if names - allowed.get(path, set())}
    assert past == {}, "make it a Patch in adora_vl/utils/compat.py"
    assert any(changes.values())


def test_every_way_to_change_a_library_is_noticed():
    sources = (
        "inner.get_image_features = ours",
        "self.llm.generate = lambda: 1",
        "trainer.model.forward, x = ours, 1",
        "setattr(library, name, value)",
        "object.__setattr__(config, 'x', 1)",
        "from unittest.mock import patch",
    )
    ours = "def ours(): ...\n"
    assert [
        source for source in sources if not [*_changes_of_others(ast.parse(ours + source))]
    ] == []


def test_no_function_of_ours_is_patched():
    """Our own code takes parameters."""
    assert [
        patch
        for patch in PATCH_BY_NAME.values()
        if patch.owner.split(".")[0] in ("adora_vl", "eval", "data_prep")
    ] == []


def _exists_in_library(patch):
    owner = pydoc.locate(patch.owner)
    if owner is None or hasattr(owner, patch.name) or not inspect.isclass(owner):
        return hasattr(owner, patch.name)
    # a constructor's
    return f"self.{patch.name} = " in "".join(inspect.getsource(cls) for cls in owner.__mro__[:-1])


def test_what_is_replaced_is_there_in_the_installed_version_and_replaced_somewhere():
    assert [
        f"{patch.owner}.{patch.name}"
        for patch in PATCH_BY_NAME.values()
        if not _exists_in_library(patch)
    ] == []
    used = {
        ast.unparse(node)
        for _, tree in _sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    assert [name for name in PATCH_BY_NAME if f"compat.{name}" not in used] == [], (
        "nothing uses it: remove it"
    )


def test_every_patch_is_in_the_table_of_what_a_new_version_makes_superfluous():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for name, patch in PATCH_BY_NAME.items():
        row = rf"^\| `{name}`: `{patch.name}` of `{re.escape(patch.owner)}` \| .+ \| .+ \|$"
        assert re.search(row, page, re.MULTILINE), name


def test_every_correction_is_where_the_page_says():
    rows = re.findall(
        r"^\| `(adora_vl\.[\w.]+:\w+)` \| .+ \| .+ \|$",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.M,
    )
    assert rows
    assert [where for where in rows if pydoc.locate(where.replace(":", ".")) is None] == []


def test_a_patch_lasts_for_its_block_and_leaves_nothing_behind():
    class Library:
        def call(self) -> str:
            return "stock"

    patch = compat.Patch("library", "call")
    thing = Library()
    module = SimpleNamespace(call="stock")
    with (
        pytest.raises(RuntimeError),
        patch.replaced_by(lambda: "ours", on=thing),
        patch.replaced_by("ours", on=module),
    ):
        assert thing.call() == "ours"
        assert module.call == "ours"
        raise RuntimeError
    assert thing.call() == "stock"
    assert module.call == "stock"
    assert "call" not in vars(thing), "it would be saved and copied with the object"
    with pytest.raises(AttributeError), patch.replaced_by("ours", on=SimpleNamespace()):
        pass
