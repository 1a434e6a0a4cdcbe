"""The files of docs/examples, loaded as a run loads them, and other files beside packages."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from adora_vl.utils.own_files import from_file

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def entry(name: str) -> str:
    """`ngrpo.py:Ngrpo` as a key of a run says it, wherever the run starts."""
    return str(EXAMPLES / name)


def example(name: str) -> Any:
    """Load the class or function that an entry such as `ngrpo.py:Ngrpo` names."""
    return from_file("adora_method", entry(name), fits=callable).value


def loaded(file: Path) -> Any:
    """A file that belongs to no package, as a module."""
    spec = spec_from_file_location(f"_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
