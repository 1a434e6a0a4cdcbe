"""Libraries are changed in `adora_vl/utils/compat.py` alone, and only where the installed version is as it says."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from adora_vl.utils import compat
from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

ROOT = Path(__file__).parents[3]
PATCHES = {name: value for name, value in vars(compat).items() if isinstance(value, compat.Patch)}

# Fields of other libraries' objects that are there to be set: values, never code. A new name here has to be one too.
FIELDS = {
    "training arguments": {"disable_tqdm", "eval_on_start", "eval_strategy", "log_completions", "model_init_kwargs"}
    | {"model_name_or_path", "output_dir", "report_to", "save_strategy", "use_cpu"},
    "Transformers' control and state of a training": {"num_input_tokens_seen", "should_log", "should_save"}
    | {"should_training_stop", "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged"},
    "tensors": {"data", "grad"},
    "models, processors and tokenizers of ours": {"chat_template", "decoder", "eos_token_id", "generation_config"}
    | {"pad_token_id", "padding_side", "pooler_output", "pre_tokenizer", "size", "suppress_tokens"},
    "vLLM's requests and their outputs, each a copy": {"n", "outputs", "seed"},
    "argparse and subprocess": {"choices", "metavar", "returncode", "type"},
    "options of our own commands": {"answer_tags", "tool_options"},
    "a context of mpmath that we have made": {"prec"},
    "functions of our own": {"__name__", "__qualname__", "__doc__", "__signature__", "__annotations__"},
    "images of a row, see KeptImage": {"__class__"},
    "an image of Pillow that we have made": {"readonly"},
    "the config of an adapter": {"base_model_name_or_path", "inference_mode"},
    "a layer in 4 bits that we have made, and a model turned back from them": {"support_avx512bf16_for_cpu"}
    | {"_weight_conversions"},
    "the output of a forward pass, and a copy of a module": {"config", "last_hidden_state"},
}
# setattr with a key of a dataclass of settings
SETS_KEYS = {"adora_vl/config/advantage.py", "adora_vl/config/values.py", "adora_vl/prepare.py"}
SETTERS = ("setattr", "delattr", "__setattr__")


@cache
def _sources() -> list[tuple[str, ast.Module]]:
    paths = [path for top in ("adora_vl", "eval") for path in sorted((ROOT / top).rglob("*.py"))]
    return [(str(p.relative_to(ROOT)), ast.parse(p.read_text())) for p in paths if p.name != "compat.py"]


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        found = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For):
        found = [node.target]
    elif isinstance(node, ast.With):
        found = [item.optional_vars for item in node.items if item.optional_vars is not None]
    else:
        return []
    return [part for one in found for part in (one.elts if isinstance(one, ast.Tuple | ast.List) else [one])]


def _changes_of_others(tree: ast.Module) -> Iterator[str]:
    """Attributes that are set on anything but `self`, and every call that sets one by its name."""
    for node in ast.walk(tree):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self":
                yield target.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in SETTERS:
            yield "setattr"
        if isinstance(node, ast.Import | ast.ImportFrom) and "mock" in ast.unparse(node):
            yield "mock"


@cache
def _own_fields() -> set[str]:
    """What our classes declare, or set on themselves in their constructors."""
    found = set()
    for _, tree in _sources():
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            found |= {ast.unparse(node.target) for node in cls.body if isinstance(node, ast.AnnAssign)}
            constructors = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
            targets = [target for one in constructors for node in ast.walk(one) for target in _targets(node)]
            found |= {t.attr for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"}
    return found


def test_no_library_is_changed_anywhere_else():
    fields, changes = _own_fields().union(*FIELDS.values()), 0
    for path, tree in _sources():
        allowed = fields | {"setattr"} if path in SETS_KEYS else fields
        for change in _changes_of_others(tree):
            changes += 1
            assert change in allowed, (
                f"{path} sets {change} on another object: make it a Patch in adora_vl/utils/compat.py"
            )
    assert changes > 0


def test_that_test_would_notice():
    sources = (
        "inner.get_image_features = shared", "self.llm.generate = ask_once", "trainer.model.forward, x = mine, 1",
        "setattr(library, name, value)", "object.__setattr__(config, 'x', 1)", "from unittest.mock import patch",
    )  # fmt: skip
    fields = _own_fields().union(*FIELDS.values())
    assert [source for source in sources if not set(_changes_of_others(ast.parse(source))) - fields] == []


def test_no_function_of_ours_is_patched():
    """Our own code takes parameters."""
    assert [patch for patch in PATCHES.values() if patch.owner.split(".")[0] in ("adora_vl", "eval", "data_prep")] == []


def _is_there(patch):
    owner = pydoc.locate(patch.owner)
    if owner is None or hasattr(owner, patch.name) or not inspect.isclass(owner):
        return hasattr(owner, patch.name)
    return f"self.{patch.name} = " in "".join(inspect.getsource(cls) for cls in owner.__mro__[:-1])  # a constructor's


def test_what_is_replaced_is_there_in_the_installed_version_and_replaced_somewhere():
    assert [f"{patch.owner}.{patch.name}" for patch in PATCHES.values() if not _is_there(patch)] == []
    used = {ast.unparse(node) for _, tree in _sources() for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert [name for name in PATCHES if f"compat.{name}" not in used] == [], "nothing uses it: remove it"


def test_every_patch_is_in_the_table_of_what_a_new_version_makes_superfluous():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for name, patch in PATCHES.items():
        row = rf"^\| `{name}`: `{patch.name}` of `{re.escape(patch.owner)}` \| .+ \| .+ \|$"
        assert re.search(row, page, re.MULTILINE), name


def test_every_correction_is_where_the_page_says():
    rows = re.findall(
        r"^\| `(adora_vl\.[\w.]+:\w+)` \| .+ \| .+ \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert rows and [where for where in rows if pydoc.locate(where.replace(":", ".")) is None] == []


def test_a_patch_lasts_for_its_block_and_leaves_nothing_behind():
    class Library:
        def call(self) -> str:
            return "stock"

    patch = compat.Patch("library", "call")
    thing, module = Library(), SimpleNamespace(call="stock")
    with pytest.raises(RuntimeError), patch.replaced_by(lambda: "ours", on=thing), patch.replaced_by("ours", on=module):
        assert thing.call() == "ours" and module.call == "ours"
        raise RuntimeError
    assert thing.call() == "stock" and module.call == "stock"
    assert "call" not in vars(thing), "it would be saved and copied with the object"
    with pytest.raises(AttributeError), patch.replaced_by("ours", on=SimpleNamespace()):
        pass
