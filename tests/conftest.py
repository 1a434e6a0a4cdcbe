"""Where the real data lies, and a small environment for every test."""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.paths import SHARED_FOLDER

# a machine under load may be slow, and no test is about seconds
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing in the tests may reach for a network
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# vLLM compiles one sum of its sampler at every start: 2 to 5 s
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
# DeepSpeed's operators are compiled once for each Python environment, so that a green run proves
# that they compile.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test where weights are loaded: what is refused or planned is so before that."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were loaded before the input was checked")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", refuse)


@pytest.fixture(scope="session")
def geometry3k_raw() -> Path:
    """Return the six real Geometry3K problems beside the checkout."""
    folder = SHARED_FOLDER / "data" / "geometry3k_raw"
    if not folder.is_dir():
        pytest.skip(
            f"the real Geometry3K problems are not beside this checkout ({folder.name} in "
            "../shared/data)"
        )
    return folder


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Models and datasets that are made on the way go into a folder of this test run."""
    os.environ["ADORA_VL_HOME"] = str(tmp_path_factory.mktemp("adora_vl_home"))


# The libraries are some 700,000 objects that live to the end. Python would look through all of them
# again and again while they are imported, and in every test.
gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage from now on, among what the tests make and not among the libraries."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`--cov` counts what quick tests run: measuring would take the slow ones up to twice their
    time.
    """
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker("no_cover")


pytest_plugins = [
    "tests.support.cases",
    "tests.support.tiny_run",
    "tests.support.endpoint_server",
    "tests.support.browser",
]
