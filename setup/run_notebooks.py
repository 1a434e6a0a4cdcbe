"""Runs the notebooks, and writes what their cells print and draw into them.

    python setup/run_notebooks.py [NOTEBOOK ...]

All but `first_training.ipynb` read the runs of `make demo`. It needs the packages `nbclient` and
`ipykernel`, which come with the extra `notebooks`.
"""

import argparse
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS_PER_CELL = 600


def run_notebook(path: Path) -> None:
    """Run all cells of a notebook in its folder, and write it with their outputs.

    Raises `CellExecutionError` where a cell fails; the file is then as it was.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=SECONDS_PER_CELL, resources=resources)
    client.execute()
    for cell in notebook.cells:
        # Otherwise two runs of the same cells would differ.
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = shown_outputs(cell.outputs)
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)


def shown_outputs(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return the outputs of a cell that a reader should see.

    Progress bars and warnings of libraries are left out, which are those on stderr. What is printed
    in several pieces becomes one, and paths are relative to the folder of the notebooks.
    """
    kept_outputs: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream":
            if output.name == "stderr":
                continue
            output.text = _without_machine(output.text)
            if kept_outputs and kept_outputs[-1].output_type == "stream":
                kept_outputs[-1].text += output.text
                continue
        kept_outputs.append(output)
    return kept_outputs


def _without_machine(text: str) -> str:
    """Make the repository's paths relative, and leave out lines that a library logs with a time."""
    relative = text.replace(str(REPOSITORY), "..")
    return re.sub(r"^\[\d{4}-\d\d-\d\d .*\n", "", relative, flags=re.MULTILINE)


def main() -> None:
    """Run the notebooks that the command names, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", type=Path)
    paths = parser.parse_args().notebooks or sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
    for path in paths:
        print(path.name, flush=True)
        run_notebook(path)


if __name__ == "__main__":
    main()
