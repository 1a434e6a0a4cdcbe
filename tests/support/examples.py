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
    """Return `ngrpo.py:Ngrpo` as a key of a run says it, wherever the run starts."""
    return str(EXAMPLES / name)


def load_example(name: str) -> Any:
    """Load the class or function that an entry such as `ngrpo.py:Ngrpo` names."""
    return load_from_file("adora_method", example_entry(name), fits=callable).value


def started_extension(
    name: str,
    log: dict[str, float] | None = None,
    images: object = None,
    keys: Mapping[str, Any] | None = None,
    **options: object,
) -> Any:
    """Return an extension of docs/examples as a trainer starts it.

    `log` gets its figures, `images` are the run's images (by default without a processor), `keys`
    are attributes of the context, and `options` are the extension's own.
    """
    extension = load_example(name)(**options)
    run_images = images or SimpleNamespace(image_processor=None)
    extension.start(step_context(log, **(keys or {})), run_images)
    return extension


def generation_of_step(step: int) -> Generation:
    """Return the generation of groups of four that is sampled at an optimizer step."""
    return Generation(key=StepKey(mode="train", step=step, micro=0), group_size=4)


def load_module(file: Path) -> Any:
    """Return a file that belongs to no package, as a module."""
    spec = spec_from_file_location(f"_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
