"""The files of docs/examples, loaded as a run loads them."""

from pathlib import Path
from typing import Any

from adora_vl.utils.own_files import from_file

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def entry(name: str) -> str:
    """`ngrpo.py:Ngrpo` as a key of a run says it, wherever the run starts."""
    return str(EXAMPLES / name)


def example(name: str) -> Any:
    """What an entry such as `ngrpo.py:Ngrpo` names."""
    return from_file("adora_method", entry(name), fits=callable).value
