"""The pages name what there is: the way through the code, the notebooks, and the request of
docs/evaluation.md.
"""

import ast
import base64
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import matplotlib
import PIL.Image
import pytest

from adora_vl.data.prompts import SYSTEM_PROMPT
from tests.support.endpoint_server import completion_reply

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def _section(title: str) -> str:
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def _place(path: str) -> Path | None:
    """Resolve a path of the page, which is below the repository or below `adora_vl/`."""
    return next((home / path for home in (ROOT, ROOT / "adora_vl") if (home / path).exists()), None)


def _defined(path: Path) -> set[str]:
    """Return the classes, functions and variables of a file, at any depth."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    named = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return named | {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def test_a_name_is_in_the_file_that_the_page_gives_for_it():
    stations = re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", TEXT, re.MULTILINE)
    pairs = [(path, name) for name, path in re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", TEXT)]
    places = [(_place(path), name) for path, name in stations + pairs]
    elsewhere = [
        (file, name) for file, name in places if file is None or name not in _defined(file)
    ]
    assert len(pairs) > 30
    assert elsewhere == []
    assert 10 <= len(stations) < 15
    assert len({path for path, _ in stations}) == len(stations)


def test_the_rooms_stand_in_the_order_of_their_floors():
    """A room that is left out is one that a newcomer does not find."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ][0]
    floors = [re.split(r" [|:] ", layer) for layer in contract["layers"]]
    listed = re.findall(r"^\| `([\w.]+)/?` \|", _section("What stands where"), re.MULTILINE)
    rooms = [name.removesuffix(".py") for name in listed]
    for floor in floors:
        beside = {name.removeprefix("adora_vl.") for name in floor}
        assert set(rooms[: len(floor)]) == beside, (
            f"the page has {rooms[: len(floor)]} where {beside} should stand"
        )
        rooms = rooms[len(floor) :]
    assert rooms == []


NOTEBOOKS = [
    ROOT / "notebooks" / f"{name}.ipynb"
    for name in ("grpo_and_adora", "reading_a_record", "weights_by_hand")
]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, adora_run, grpo_run, monkeypatch, capsys, tmp_path):
    """The cells run in order as one script, in the notebook's own folder."""
    matplotlib.use("Agg", force=True)
    monkeypatch.setenv("ADORA_RUN", str(adora_run))
    monkeypatch.setenv("ADORA_RUN_GRPO", str(grpo_run))
    monkeypatch.chdir(path.parent)
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert 4 <= len(cells) <= 12
    assert all(cell["outputs"] == [] for cell in cells)
    script = tmp_path / f"{path.stem}.py"
    script.write_text(
        "\n".join(f"# code cell {n}\n{''.join(cell['source'])}" for n, cell in enumerate(cells))
    )
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out


def test_the_request_of_the_page_arrives_with_its_image_and_the_trainings_prompt(tmp_path, serve):
    pytest.importorskip("openai")  # comes with vLLM
    server = serve(lambda body, call: completion_reply("so x = 5", finish_reason="stop"))
    (block,) = re.findall(
        r"```python\n(import base64.*?)```",
        (ROOT / "docs" / "evaluation.md").read_text(),
        re.DOTALL,
    )
    PIL.Image.new("RGB", (56, 56), "red").save(tmp_path / "problem.png")
    (tmp_path / "request.py").write_text(block.replace("http://127.0.0.1:8000/v1", server.url))
    words = [sys.executable, "request.py"]
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "so x = 5\n", done.stderr[-2000:]
    system, user = server.requests[0]["messages"]
    assert system["content"] == SYSTEM_PROMPT
    sent = user["content"][0]["image_url"]["url"].partition(",")[2]
    assert base64.b64decode(sent) == (tmp_path / "problem.png").read_bytes()
