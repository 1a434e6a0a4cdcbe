"""The notebooks run from top to bottom on the recorded tiny runs, and are shipped without outputs: those grow stale."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, adora_run, grpo_run, monkeypatch, capsys):
    """Its cells in order in one namespace, as a kernel does; the folder is the notebook's own."""
    matplotlib.use("Agg", force=True)
    monkeypatch.setenv("ADORA_RUN", str(adora_run))
    monkeypatch.setenv("ADORA_RUN_GRPO", str(grpo_run))
    monkeypatch.chdir(path.parent)
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert 4 <= len(cells) <= 12 and all(cell["outputs"] == [] for cell in cells)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        code = compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec")
        exec(code, namespace)  # noqa: S102  # our own notebooks
    assert capsys.readouterr().out


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} == {"grpo_and_adora", "reading_a_record", "weights_by_hand"}
