"""What `setup/check_gpu_pins.py` calls agreement, by small resolutions; it asks no index here."""

from tests.support.examples import load_module
from tests.support.paths import REPOSITORY

check_gpu_pins = load_module(REPOSITORY / "setup" / "check_gpu_pins.py")
PINNED_VERSIONS = check_gpu_pins.pins(check_gpu_pins.CONSTRAINTS.read_text())


def pip_report(**requirements_by_package: list[str]) -> dict[str, object]:
    """Return a report of pip's with every pin, and what some of the packages need."""
    packages = {**PINNED_VERSIONS, "cuda-toolkit": "13.0.3"}
    requires = {
        "torch": ["cuda-toolkit==13.0.3; platform_system == 'Linux'"],
        **requirements_by_package,
    }
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


def find_faults(report: dict[str, object]) -> list[str]:
    """Return what is wrong with the pins in a report of pip's."""
    lines: list[str] = check_gpu_pins.describe_broken_pins(check_gpu_pins.read_report(report))
    return lines


def test_pins_that_agree_have_no_fault():
    """A report with every pin has no fault; vLLM and torch are among the pins."""
    assert find_faults(pip_report()) == []
    assert PINNED_VERSIONS["vllm"]
    assert PINNED_VERSIONS["torch"]


def test_a_torch_for_cpus_is_no_torch_for_a_card():
    """A torch that needs no CUDA toolkit is a build for CPUs."""
    (fault,) = find_faults(pip_report(torch=[]))
    assert fault.startswith(f"torch-{PINNED_VERSIONS['torch']}.whl needs no CUDA")


def test_a_pin_that_is_missed_or_needed_by_nothing_is_named():
    """One package has another version, and one that is pinned is not installed."""
    report = pip_report()
    items = report["install"]
    assert isinstance(items, list)
    items[0]["metadata"]["version"] = "0.0.1"
    del items[-2]
    changed_pin, superfluous_pin = sorted(find_faults(report), key=lambda line: "nothing" in line)
    assert " is 0.0.1, and " in changed_pin
    assert superfluous_pin.endswith("is pinned, and nothing needs it")


def test_a_python_that_is_not_here_is_none(tmp_path, monkeypatch):
    """On an empty PATH no interpreter is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(check_gpu_pins, "SUPPORTED_PYTHONS", ("3.99",))
    programs = check_gpu_pins.interpreters()
    assert programs == {"3.99": None}


def test_what_is_asked_of_pip_is_what_the_setup_installs():
    """The check asks pip for the pinned versions and the extras that `setup/install.sh` installs.

    A `+cpu` build of the same version is left alone by `===`.
    """
    requirements = check_gpu_pins.requirements()
    assert f"torch==={PINNED_VERSIONS['torch']}" in requirements
    script = (REPOSITORY / "setup" / "install.sh").read_text()
    assert '".[$device,lora,dev]"' in script
    assert check_gpu_pins.PROJECT_REQUIREMENT == ".[gpu,lora,dev]"
    for name in check_gpu_pins.FURTHER_REQUIREMENTS:
        assert name in script
