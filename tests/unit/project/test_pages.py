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
from typing import Any

import matplotlib
import PIL.Image
import pytest

from adora_vl.data.prompts import SYSTEM_PROMPT
from tests.support.endpoint_server import completion_reply
from tests.support.paths import REPOSITORY

ARCHITECTURE_TEXT = (REPOSITORY / "docs" / "architecture.md").read_text()


def section_of_page(title: str) -> str:
    """Return the text of the page of the architecture under this heading."""
    return ARCHITECTURE_TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def resolve_path(path: str) -> Path | None:
    """Resolve a path of the page, which is below the repository or below `adora_vl/`."""
    return next(
        (home / path for home in (REPOSITORY, REPOSITORY / "adora_vl") if (home / path).exists()),
        None,
    )


def names_defined_in(path: Path) -> set[str]:
    """Return the classes, functions and variables of a file, at any depth."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names_of_code = {
        node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    return names_of_code | {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def test_a_name_is_in_the_file_that_the_page_gives_for_it():
    """The page's table of stations, and its sentences, name more than 30 files with a name each."""
    stations = re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", ARCHITECTURE_TEXT, re.MULTILINE)
    pairs = [
        (path, name)
        for name, path in re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", ARCHITECTURE_TEXT)
    ]
    places = [(resolve_path(path), name) for path, name in stations + pairs]
    names_not_found = [
        (file, name) for file, name in places if file is None or name not in names_defined_in(file)
    ]
    assert len(pairs) > 30
    assert names_not_found == []
    assert 10 <= len(stations) < 15
    assert len({path for path, _ in stations}) == len(stations)


def test_the_rooms_stand_in_the_order_of_their_floors():
    """The page lists every part of `adora_vl`, in the order of the layers of the import contract.

    A part that is left out is one that a newcomer does not find.
    """
    contract = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ][0]
    floors = [re.split(r" [|:] ", layer) for layer in contract["layers"]]
    listed_paths = re.findall(
        r"^\| `([\w.]+)/?` \|", section_of_page("What stands where"), re.MULTILINE
    )
    rooms = [name.removesuffix(".py") for name in listed_paths]
    for floor in floors:
        room_names = {name.removeprefix("adora_vl.") for name in floor}
        assert set(rooms[: len(floor)]) == room_names, (
            f"the page has {rooms[: len(floor)]} where {room_names} should stand"
        )
        rooms = rooms[len(floor) :]
    assert rooms == []


NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
# The other notebooks read the runs of `make demo`.
TRAINING_NOTEBOOK = REPOSITORY / "notebooks" / "first_training.ipynb"


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    """Return the code cells of a notebook."""
    cells = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def run_cells(notebook: Path, script: Path) -> None:
    """Run the code cells of a notebook in their order, as one script."""
    texts = ["".join(cell["source"]) for cell in code_cells(notebook)]
    script.write_text(
        "\n".join(f"# code cell {number}\n{text}" for number, text in enumerate(texts))
    )
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path != TRAINING_NOTEBOOK], ids=lambda path: path.stem
)
def test_a_notebook_runs(path, adora_run, grpo_run, monkeypatch, capsys, tmp_path):
    """The cells run in the notebook's own folder."""
    matplotlib.use("Agg", force=True)
    monkeypatch.setenv("ADORA_RUN", str(adora_run))
    monkeypatch.setenv("ADORA_RUN_GRPO", str(grpo_run))
    monkeypatch.chdir(path.parent)
    assert 4 <= len(code_cells(path)) <= 12
    run_cells(path, tmp_path / f"{path.stem}.py")
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_notebook_that_trains_ends_with_a_better_model(monkeypatch, tmp_path):
    """The notebook's model solves less than 60 % before its training, and more than 80 % after.

    Its run lies beside the folder in which it is started, here a temporary one.
    """
    matplotlib.use("Agg", force=True)
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.chdir(folder)
    run_cells(TRAINING_NOTEBOOK, folder / "first_training.py")
    accuracy = {}
    for name in ("before", "after"):
        score = json.loads((tmp_path / "runs" / "first_training" / name / "score.json").read_text())
        accuracy[name] = score["accuracy"]
    assert accuracy["before"] < 0.6
    assert accuracy["after"] > 0.8


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_its_cells_print(path):
    """A page that is read without running it has tables and pictures, and nothing of a machine."""
    outputs = [output for cell in code_cells(path) for output in cell["outputs"]]
    assert outputs, "run setup/run_notebooks.py"
    assert all(output["output_type"] != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)
    texts = ["".join(output.get("text", "")) for output in outputs]
    machine_paths = re.findall(r"(?<![\w.])/(?:home|root|tmp|work|usr|opt)/\S*", "\n".join(texts))
    assert machine_paths == []


def test_the_request_of_the_page_arrives_with_its_image_and_the_trainings_prompt(
    tmp_path, start_server
):
    """The code of docs/evaluation.md is run against a stand-in server."""
    pytest.importorskip("openai")  # comes with vLLM
    server = start_server(lambda body, call: completion_reply("so x = 5", finish_reason="stop"))
    (code_block,) = re.findall(
        r"```python\n(import base64.*?)```",
        (REPOSITORY / "docs" / "evaluation.md").read_text(),
        re.DOTALL,
    )
    PIL.Image.new("RGB", (56, 56), "red").save(tmp_path / "problem.png")
    (tmp_path / "request.py").write_text(code_block.replace("http://127.0.0.1:8000/v1", server.url))
    command = [sys.executable, "request.py"]
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    process = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert process.stdout == "so x = 5\n", process.stderr[-2000:]
    system, user = server.requests[0]["messages"]
    assert system["content"] == SYSTEM_PROMPT
    sent_image = user["content"][0]["image_url"]["url"].partition(",")[2]
    assert base64.b64decode(sent_image) == (tmp_path / "problem.png").read_bytes()
