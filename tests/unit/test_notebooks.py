"""The notebooks run from top to bottom on the recorded tiny runs, and are shipped without outputs: those grow stale."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import matplotlib
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, adora_run, grpo_run, monkeypatch, capsys, tmp_path):
    """Its cells in order as one script; the folder is the notebook's own."""
    matplotlib.use("Agg", force=True)
    monkeypatch.setenv("ADORA_RUN", str(adora_run))
    monkeypatch.setenv("ADORA_RUN_GRPO", str(grpo_run))
    monkeypatch.chdir(path.parent)
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert 4 <= len(cells) <= 12 and all(cell["outputs"] == [] for cell in cells)
    script = tmp_path / f"{path.stem}.py"
    script.write_text("\n".join(f"# code cell {n}\n{''.join(cell['source'])}" for n, cell in enumerate(cells)))
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} == {"grpo_and_adora", "reading_a_record", "weights_by_hand"}
