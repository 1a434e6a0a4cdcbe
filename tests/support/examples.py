"""The files of docs/examples, loaded as a run loads them, and other files beside packages."""

from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from adora_vl.rollout.rollouts import StepKey
from adora_vl.training.generation import Generation
from adora_vl.utils.own_files import load_from_file
from tests.support.step_context import step_context

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example_entry(name: str) -> str:
    """Return "ngrpo.py:Ngrpo" with the full path of the file, as a key of the config names it."""
    return str(EXAMPLES / name)


def load_example(name: str) -> Any:
    """Load the class or function that an entry such as `ngrpo.py:Ngrpo` names."""
    return load_from_file("adora_method", example_entry(name), fits=callable).function_or_class


def started_extension(
    name: str,
    log: dict[str, float] | None = None,
    images: object = None,
    keys: Mapping[str, Any] | None = None,
    **options: object,
) -> Any:
    """Return an extension of docs/examples, started as a trainer does it.

    Args:
        name: the file and the class, such as "visual_tokens.py:VisualTokens".
        log: gets the metrics that the extension logs.
        images: the run's images; by default they have no processor.
        keys: keyword arguments of `step_context`.
        options: the options of the extension.
    """
    extension = load_example(name)(**options)
    run_images = images or SimpleNamespace(image_processor=None)
    extension.start(step_context(log, **(keys or {})), run_images)
    return extension


def generation_of_step(step: int) -> Generation:
    """Return the `Generation` sampled at an optimizer step, with four rollouts in a group."""
    return Generation(key=StepKey(mode="train", step=step, micro=0), group_size=4)


def load_module(file: Path) -> Any:
    """Import a file that belongs to no package, and return its module."""
    spec = spec_from_file_location(f"_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
