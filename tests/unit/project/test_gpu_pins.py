"""What `setup/check_gpu_pins.py` calls agreement, by small resolutions; it asks no index here."""

import pytest

from tests.support.examples import load_module
from tests.support.paths import REPOSITORY

check_gpu_pins = load_module(REPOSITORY / "setup" / "check_gpu_pins.py")
PINNED_VERSIONS = check_gpu_pins.pins(check_gpu_pins.CONSTRAINTS.read_text())


def pip_report(**needs: list[str]) -> dict[str, object]:
    """Return a report of pip's with every pin, and what some of the packages need."""
    packages = {**PINNED_VERSIONS, "cuda-toolkit": "13.0.3"}
    requires = {"torch": ["cuda-toolkit==13.0.3; platform_system == 'Linux'"], **needs}
    items = [
        {
            "metadata": {
                "name": name,
                "version": version,
                "requires_dist": requires.get(name, []),
            },
            "download_info": {"url": f"https://example.org/files/{name}-{version}.whl"},
        }
        for name, version in packages.items()
    ]
    return {"install": items}


def find_faults(content: dict[str, object]) -> list[str]:
    lines: list[str] = check_gpu_pins.describe_broken_pins(
        check_gpu_pins.read_report(content), "3.12"
    )
    return lines


def test_pins_that_agree_have_no_fault():
    assert find_faults(pip_report()) == []
    assert PINNED_VERSIONS["vllm"]
    assert PINNED_VERSIONS["torch"]


@pytest.mark.parametrize(
    ("need", "fault"),
    [
        (
            "trl>=99",
            f"peft {PINNED_VERSIONS['peft']} needs trl>=99, and {PINNED_VERSIONS['trl']} is there",
        ),
        ("nowhere", f"peft {PINNED_VERSIONS['peft']} needs nowhere, and it is not there"),
        ("nowhere; python_version < '3.12'", None),
        ("nowhere; extra == 'dev'", None),
        ("Import_Linter", None),
    ],
)
def test_a_need_that_is_not_met_is_named(need, fault):
    assert find_faults(pip_report(peft=[need])) == ([] if fault is None else [fault])


def test_a_torch_for_cpus_is_no_torch_for_a_card():
    (fault,) = find_faults(pip_report(torch=[]))
    assert fault.startswith(f"torch-{PINNED_VERSIONS['torch']}.whl needs no CUDA")


def test_a_pin_that_is_missed_or_needed_by_nothing_is_named():
    content = pip_report()
    items = content["install"]
    assert isinstance(items, list)
    items[0]["metadata"]["version"] = "0.0.1"
    del items[-2]
    changed, missing = sorted(find_faults(content), key=lambda line: "nothing" in line)
    assert " is 0.0.1, and " in changed
    assert missing.endswith("is pinned, and nothing needs it")


def test_a_python_that_is_not_here_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    programs = check_gpu_pins.interpreters(("3.99",))
    assert programs == {"3.99": None}


def test_what_is_asked_of_pip_is_what_the_setup_installs():
    """A `+cpu` build of the same version is left alone by `===`."""
    requirements = check_gpu_pins.requirements()
    assert f"torch==={PINNED_VERSIONS['torch']}" in requirements
    script = (REPOSITORY / "setup" / "install.sh").read_text()
    assert '".[$device,lora,dev]"' in script
    assert check_gpu_pins.PROJECT_REQUIREMENT == ".[gpu,lora,dev]"
    for name in check_gpu_pins.FURTHER_REQUIREMENTS:
        assert name in script
