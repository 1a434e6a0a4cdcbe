"""What `lint-imports` does not hold: that every room has a floor, and a name means one thing."""

import ast
import re
import tomllib
from collections import defaultdict

from tests.support.paths import REPOSITORY


def test_every_room_has_a_floor():
    """The import contract names each module and package of `adora_vl`.

    One that it does not name could import whatever it likes.
    """
    contract = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ][0]
    layer_names = {name for layer in contract["layers"] for name in re.split(r" [|:] ", layer)}
    room_names = {
        f"adora_vl.{path.stem}"
        for path in (REPOSITORY / "adora_vl").iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").is_file()) and path.stem != "__init__"
    }
    assert layer_names == room_names | {"data_prep", "eval"}


def test_no_two_public_classes_have_the_same_name():
    """No public class shares its name with another, so `Schedule` means one thing everywhere."""
    places: dict[str, list[str]] = defaultdict(list)
    for top in ("adora_vl", "data_prep", "eval", "benchmarks"):
        for path in (REPOSITORY / top).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(path.relative_to(REPOSITORY).as_posix())
    assert places
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_test_imports_another_test():
    """Helpers of two tests stand in `tests/support`, which imports no test module either."""
    imports = re.compile(
        r"^\s*(?:from|import) (tests\.(?!support\b)[\w.]*\btest_\w+)", re.MULTILINE
    )
    test_imports_by_file = {}
    for path in (REPOSITORY / "tests").rglob("*.py"):
        modules = imports.findall(path.read_text())
        if modules:
            test_imports_by_file[path.relative_to(REPOSITORY).as_posix()] = modules
    assert test_imports_by_file == {}


def test_no_part_of_a_step_gets_the_whole_trainer():
    """No part that `parts.py` makes gets the whole trainer, so each part says what it uses.

    What gets it are `StepParts` and a function of the same file, which make the parts, and
    `LossSums`, which reads and writes numbers that Transformers has in attributes of the trainer.
    """
    tree = ast.parse((REPOSITORY / "adora_vl/parts.py").read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func)
        not in ("super", "getattr", "LossSums", "StepParts", "_to_device")
    ]
    assert calls
    calls_with_trainer = [
        ast.unparse(call)
        for call in calls
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]
        if ast.unparse(argument) in ("self", "trainer", "self._trainer")
    ]
    assert calls_with_trainer == []
