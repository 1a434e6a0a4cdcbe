"""What a person meets first: the list of commands, a line before a silence, the notebooks' runs."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from adora_vl.__main__ import DESCRIPTION_BY_COMMAND, main
from adora_vl.utils.cli import announce_imports
from tests.support.paths import REPOSITORY


def test_the_package_lists_its_commands(capsys):
    """Each listed command can be run by `python -m`; a slip is answered with the nearest name."""
    assert main([]) == 0
    printed = capsys.readouterr().out
    for name in DESCRIPTION_BY_COMMAND:
        assert f"python -m {name} " in printed
        module_spec = find_spec(name) if "." in name else None
        main_file = (
            find_spec(f"{name}.__main__")
            if module_spec is None or is_package(name)
            else module_spec
        )
        assert main_file is not None
        assert main_file.origin is not None
        assert "__main__" in Path(main_file.origin).read_text() or main_file.name.endswith("main__")
    assert main(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


def test_a_command_is_run_by_its_name_also_beside_a_folder_of_the_same_name(tmp_path):
    """`adora_vl eval` is ours, though the user's folder has `eval/__main__.py`."""
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "__main__.py").write_text("print('of the user')")
    result = subprocess.run(
        [sys.executable, "-m", "adora_vl", "eval", "geometry", "run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "did you mean 'geometry3k'?" in result.stderr
    assert result.stdout == ""


def is_package(name: str) -> bool:
    """Tell whether a module is a folder, which runs by its `__main__`."""
    spec = find_spec(name)
    return spec is not None and spec.submodule_search_locations is not None


def test_one_line_is_said_before_the_imports(monkeypatch, capsys):
    """The first process alone announces slow imports, and only if torch is not imported yet."""
    monkeypatch.setitem(sys.modules, "torch", object())
    announce_imports(15)
    assert capsys.readouterr().err == "", "the libraries are there"
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("RANK", "1")
    announce_imports(15)
    assert capsys.readouterr().err == "", "the first process says it"
    monkeypatch.setenv("RANK", "0")
    announce_imports(15)
    captured = capsys.readouterr()
    assert captured.err == "Reading config and libraries, about 15 s\n"
    assert captured.out == ""


def test_the_notebooks_open_what_the_demo_leaves():
    """Each run that a notebook names is one that `setup/demo.sh` writes."""
    script = (REPOSITORY / "setup/demo.sh").read_text()
    [folder] = re.findall(r'^out="\$\{1:-(.+)\}"$', script, re.M)
    run_folders = {f"../{folder}/{run}" for run in re.findall(r'\$out/(\w+)"', script)}
    for notebook in sorted((REPOSITORY / "notebooks").glob("*.ipynb")):
        cells = json.loads(notebook.read_text())["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        texts = {
            node.value
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        paths_of_notebook = {text for text in texts if text.startswith("../runs/")}
        paths_of_notebook.discard(
            "../runs/first_training"
        )  # made by the notebook of this name itself
        assert paths_of_notebook <= run_folders, (
            f"{notebook.name}: {paths_of_notebook - run_folders} is not what setup/demo.sh writes"
        )
