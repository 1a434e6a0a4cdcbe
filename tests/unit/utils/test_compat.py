"""Libraries are changed in `adora_vl/utils/compat.py` alone.

The attributes that are replaced exist in the installed versions.
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
    "adora_vl/preflight/request.py",  # keys that stand in model_init_kwargs
    "adora_vl/rewards/safe_call.py",  # the copy of a record that a function is handed
}
SHARED_IMAGES_FILE = "adora_vl/data/shared_images.py"  # gives pictures a class of ours
INTERRUPTS_FILE = "adora_vl/utils/interrupts.py"  # sets Python's own hook, which is made for it
ATTRIBUTE_SETTERS = ("setattr", "delattr", "__setattr__")


@cache
def parsed_sources() -> list[tuple[str, ast.Module]]:
    """Return the path and the tree of each file of `adora_vl` and `eval`, but for compat.py."""
    paths = [path for top in ("adora_vl", "eval") for path in sorted((ROOT / top).rglob("*.py"))]
    return [
        (str(p.relative_to(ROOT)), ast.parse(p.read_text())) for p in paths if p.name != "compat.py"
    ]


def targets_and_values(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of an assignment with the value that it gets."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def changes_of_others(tree: ast.Module) -> Iterator[str]:
    """Yield how a module changes other objects: the attributes to which it assigns code.

    Attributes of `self` do not count. A call such as `setattr` is yielded as `setattr`, and an
    import of `mock` as `mock`.
    """
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    names_of_values = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    names_of_code = {
        node.name for node in ast.walk(tree) if isinstance(node, definitions)
    } - names_of_values
    for node in ast.walk(tree):
        assigned: Iterable[tuple[ast.expr, ast.expr]] = (
            targets_and_values(node) if isinstance(node, ast.Assign) else []
        )
        for target, value in assigned:
            is_code = isinstance(value, ast.Lambda) or (
                isinstance(value, ast.Name) and value.id in names_of_code
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


@pytest.mark.slow
def test_no_library_is_changed_anywhere_else():
    """Outside of compat.py, only the files named above set attributes of other objects."""
    changes = {path: {*changes_of_others(tree)} for path, tree in parsed_sources()}
    allowed = {path: {"setattr"} for path in FILES_THAT_SET_KEYS}
    allowed[SHARED_IMAGES_FILE] = {"__class__"}
    allowed[INTERRUPTS_FILE] = {"excepthook"}
    forbidden_changes = {
        path: names for path, names in changes.items() if names - allowed.get(path, set())
    }
    assert forbidden_changes == {}, "make it a Patch in adora_vl/utils/compat.py"
    assert any(changes.values())


def test_every_way_to_change_a_library_is_noticed():
    """Each line changes a library, and has to be found by `changes_of_others`."""
    sources = (
        "inner.get_image_features = ours",
        "self.llm.generate = lambda: 1",
        "trainer.model.forward, x = ours, 1",
        "setattr(library, name, value)",
        "object.__setattr__(config, 'x', 1)",
        "from unittest.mock import patch",
    )
    definition_of_ours = "def ours(): ...\n"
    assert [
        source
        for source in sources
        if not [*changes_of_others(ast.parse(definition_of_ours + source))]
    ] == []


def test_no_function_of_ours_is_patched():
    """Our own code takes parameters."""
    assert [
        patch
        for patch in PATCH_BY_NAME.values()
        if patch.owner.split(".")[0] in ("adora_vl", "eval", "data_prep")
    ] == []


def exists_in_library(patch):
    """Return whether what a patch replaces is in the installed library."""
    owner = pydoc.locate(patch.owner)
    if owner is None or hasattr(owner, patch.name) or not inspect.isclass(owner):
        return hasattr(owner, patch.name)
    # a constructor's
    return f"self.{patch.name} = " in "".join(inspect.getsource(cls) for cls in owner.__mro__[:-1])


def test_what_is_replaced_is_there_in_the_installed_version_and_replaced_somewhere():
    """A patch of what is gone, or that nothing uses, has to be removed."""
    assert [
        f"{patch.owner}.{patch.name}"
        for patch in PATCH_BY_NAME.values()
        if not exists_in_library(patch)
    ] == []
    used_names = {
        ast.unparse(node)
        for _, tree in parsed_sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    assert [name for name in PATCH_BY_NAME if f"compat.{name}" not in used_names] == [], (
        "nothing uses it: remove it"
    )


def test_every_patch_is_in_the_table_of_what_a_new_version_makes_superfluous():
    """CONTRIBUTING.md has a row for each patch."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for name, patch in PATCH_BY_NAME.items():
        row = rf"^\| `{name}`: `{patch.name}` of `{re.escape(patch.owner)}` \| .+ \| .+ \|$"
        assert re.search(row, page, re.MULTILINE), name


def test_every_correction_is_where_the_page_says():
    """The functions that CONTRIBUTING.md names as corrections can be imported."""
    rows = re.findall(
        r"^\| `(adora_vl\.[\w.]+:\w+)` \| .+ \| .+ \|$",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.M,
    )
    assert rows
    assert [target for target in rows if pydoc.locate(target.replace(":", ".")) is None] == []


def test_a_patch_lasts_for_its_block_and_leaves_nothing_behind():
    """Objects and modules are as before, even after an error; a missing name is an error."""

    class Library:
        """Stands in for a class of a library with a method that is replaced."""

        def call(self) -> str:
            return "stock"

    patch = compat.Patch("library", "call")
    patched_object = Library()
    module = SimpleNamespace(call="stock")
    with (
        pytest.raises(RuntimeError),
        patch.replaced_by(lambda: "ours", on=patched_object),
        patch.replaced_by("ours", on=module),
    ):
        assert patched_object.call() == "ours"
        assert module.call == "ours"
        raise RuntimeError
    assert patched_object.call() == "stock"
    assert module.call == "stock"
    assert "call" not in vars(patched_object), "it would be saved and copied with the object"
    with pytest.raises(AttributeError), patch.replaced_by("ours", on=SimpleNamespace()):
        pass
