"""The checks in their order, each in a process of its own: what breaks there, hangs or runs out of
memory is one line of the table.

The child is `python -m benchmarks.gpu.checks MODULE:FUNCTION SIZE CARDS FILE`. It writes each line
as soon as it is known, so a check that is stopped keeps what it had found. Modules are imported
only where a check runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.table import CheckResult, Line, failed, one_line, skipped

if TYPE_CHECKING:
    from benchmarks.gpu.setting import Setting

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class GPUCheck:
    """`place`: module and function, a generator of lines.

    `needs`: packages without which it is skipped. `cards`: how many it is for; of several cards, a
    check for one sees the first alone, as a run of one process does.
    """

    name: str
    place: str
    limit: int  # seconds
    needs: tuple[str, ...] = ()
    cards: int = 1

    @property
    def missing(self) -> list[str]:
        return [package for package in self.needs if find_spec(package) is None]

    def load(self) -> Callable[[Setting], Iterator[Line]]:
        module, _, function = self.place.partition(":")
        run: Callable[[Setting], Iterator[Line]] = getattr(
            importlib.import_module(module), function
        )
        return run


# What makes a run learn something wrong comes first, then what makes it slow, then what takes long
# and concerns few: time may cut the end off. What needs an engine takes no time where there is
# none.
CHECKS = (
    GPUCheck("rounding", "benchmarks.gpu.precision:cast", 120),
    GPUCheck("attention", "benchmarks.gpu.attention:run", 90),
    GPUCheck("one_call", "benchmarks.gpu.one_call:run", 60),
    GPUCheck(
        name="lm_head", place="benchmarks.gpu.lm_head:run", limit=90, needs=("trl", "datasets")
    ),
    GPUCheck(
        name="drift",
        place="benchmarks.gpu.engine:drift",
        limit=420,
        needs=("vllm", "trl", "datasets"),
    ),
    GPUCheck("vision", "benchmarks.gpu.vision:run", 120),
    GPUCheck(
        name="prompts",
        place="benchmarks.gpu.prompts:run",
        limit=180,
        needs=("trl", "accelerate", "datasets"),
    ),
    GPUCheck(name="lora_sync", place="benchmarks.gpu.streaming:run", limit=90, needs=("peft",)),
    GPUCheck(
        name="recipe",
        place="benchmarks.gpu.engine:recipe",
        limit=300,
        needs=("vllm", "trl", "datasets", "peft"),
    ),
    GPUCheck(
        name="step",
        place="benchmarks.gpu.step:run",
        limit=480,
        needs=("vllm", "trl", "datasets", "peft"),
    ),
    GPUCheck(
        name="tools",
        place="benchmarks.gpu.paths:tools",
        limit=300,
        needs=("vllm", "trl", "datasets"),
    ),
    GPUCheck(
        name="four_bit",
        place="benchmarks.gpu.paths:four_bit",
        limit=300,
        needs=("vllm", "trl", "datasets", "peft", "bitsandbytes"),
    ),
    GPUCheck(
        name="recipe_v1",
        place="benchmarks.gpu.engine:recipe_v1",
        limit=300,
        needs=("vllm", "trl", "datasets", "peft"),
    ),
    GPUCheck(
        name="trainer",
        place="benchmarks.gpu.trainer:run",
        limit=420,
        needs=("trl", "peft", "datasets"),
    ),
    GPUCheck(name="zero3", place="benchmarks.gpu.precision:zero3", limit=300, needs=("deepspeed",)),
    GPUCheck(
        name="engine",
        place="benchmarks.gpu.engine:run",
        limit=600,
        needs=("vllm", "trl", "datasets"),
    ),
    GPUCheck(name="cards", place="benchmarks.gpu.cards:run", limit=120, cards=2),
    GPUCheck(
        name="server",
        place="benchmarks.gpu.server:run",
        limit=600,
        needs=("vllm", "trl", "datasets", "peft"),
        cards=2,
    ),
    GPUCheck(name="offload", place="benchmarks.gpu.offload:run", limit=300, needs=("deepspeed",)),
    GPUCheck(
        name="deepspeed", place="benchmarks.gpu.offload:builds", limit=300, needs=("deepspeed",)
    ),
)
LEAST = 10  # seconds; with fewer left a check would hardly import what it needs


def run(check: GPUCheck, size: str, built: Path, left: float = math.inf) -> list[Line]:
    """The lines of a check, run in a process of its own; at least one.

    `built`: where DeepSpeed's operators are, or come to be, so that one check compiles them for
    all. `left`: seconds left for all checks.
    """
    if check.missing:
        lines = [skipped("all of it", f"{' and '.join(check.missing)} not installed")]
    elif left < LEAST:
        lines = [skipped("all of it", _over(check))]
    else:
        lines = _in_a_child(check, size=size, built=built, left=left)
    return [replace(line, check=check.name) for line in lines]


def _over(check: GPUCheck) -> str:
    return (
        f"not run, the time for all checks was over: `--only {check.name}` runs it alone, "
        "`--minutes` gives more"
    )


def _in_a_child(check: GPUCheck, size: str, built: Path, left: float) -> list[Line]:
    with tempfile.TemporaryDirectory(prefix="adora_vl_gpu_") as folder:
        results = Path(folder) / "lines.jsonl"
        output = Path(folder) / "output.txt"
        results.touch()
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.checks",
            check.place,
            size,
            str(check.cards),
            str(results),
        ]
        with output.open("wb") as stream:
            child = subprocess.Popen(
                command,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                cwd=folder,
                env=_environment(folder, built),
            )
            try:
                code: int | None = child.wait(min(check.limit, left))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(child)
        lines = [_read(words) for words in results.read_text(encoding="utf-8").splitlines()]
        printed = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if code is None and left < check.limit:
        return [*lines, skipped("the rest of it", _over(check))]
    if code is None:
        return [*lines, failed("in time", f"not done after {check.limit} s; stopped")]
    if code < 0:
        memory = (
            "; that is how Linux ends a process when memory runs out"
            if -code == signal.SIGKILL
            else ""
        )
        return [*lines, failed("the process", f"ended by {signal.Signals(-code).name}{memory}")]
    if code:
        return [
            *lines,
            failed(
                "the process", f"exit code {code}: {printed[-1][:300] if printed else 'no output'}"
            ),
        ]
    return lines or [failed("the process", "it ended without a single figure")]


def _environment(folder: str, built: Path) -> dict[str, str]:
    paths = [str(REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {"TORCH_EXTENSIONS_DIR": str(built)}
    # else Triton's float32 is TF32, and no reference for bfloat16
    variables |= {"TRITON_F32_DEFAULT": "ieee"}
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": folder}


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and what it started: the processes of an engine outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def remove_half_built(built: Path) -> None:
    """What a stopped check was compiling: it left a lock, on which every later build would wait
    without end. Nobody else may be building in that folder.
    """
    for lock in list(built.rglob("lock")):
        shutil.rmtree(lock.parent)


def _read(words: str) -> Line:
    fields = json.loads(words)
    return Line(**{**fields, "verdict": CheckResult(fields["verdict"])})


def guarded(check: GPUCheck, setting: Setting) -> Iterator[Line]:
    """The lines of a check.

    An exception, also for lack of memory, becomes the last line; a package of others that is not
    here is none.
    """
    try:
        yield from check.load()(setting)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        ours = package in ("adora_vl", "benchmarks", "data_prep")
        yield (
            failed("all of it", one_line(error))
            if ours
            else skipped("the rest of it", f"{package} not installed")
        )
    except Exception as error:
        yield failed("the rest of it", one_line(error))


def prepare_for(cards: int) -> None:
    """As a run of one process prepares its environment, which sees the first card alone; for
    several, all of them.
    """
    from adora_vl.utils.launch import prepare_engine_environment

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    prepare_engine_environment()
    if cards > 1:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ |= {"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {}


def main(place: str, size: str, cards: str, results: str) -> int:
    """What the child process runs."""
    from adora_vl.utils.launch import use_expandable_segments

    prepare_for(int(cards))  # before anything imports vLLM
    use_expandable_segments()  # as a run does, before torch is imported
    from benchmarks.gpu.setting import here

    with Path(results).open("a", encoding="utf-8") as stream:
        for line in guarded(GPUCheck("", place, 0), here(size == "full")):
            stream.write(json.dumps(asdict(line)) + "\n")
            stream.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
