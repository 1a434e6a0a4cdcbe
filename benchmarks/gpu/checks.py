"""Runs the checks in their order, each in a process of its own.

What breaks there, hangs or runs out of memory is one line of the table.

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

from benchmarks.gpu.table import CheckLine, CheckResult, failed_line, one_line, skipped_line

if TYPE_CHECKING:
    from benchmarks.gpu.setting import Setting

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class GPUCheck:
    """One check, and what it needs to run.

    Of several cards, a check for one sees the first alone, as a run of one process does.
    """

    name: str
    entry_point: str  # `MODULE:FUNCTION`, a generator of lines
    limit: int  # seconds
    needs: tuple[str, ...] = ()  # packages without which it is skipped
    cards: int = 1  # how many it is for

    @property
    def missing(self) -> list[str]:
        """The packages that it needs and that are not installed."""
        return [package for package in self.needs if find_spec(package) is None]

    def load(self) -> Callable[[Setting], Iterator[CheckLine]]:
        """Import the module of the check, and return its function."""
        module, _, function = self.entry_point.partition(":")
        run: Callable[[Setting], Iterator[CheckLine]] = getattr(
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
        name="lm_head",
        entry_point="benchmarks.gpu.lm_head:run",
        limit=90,
        needs=("trl", "datasets"),
    ),
    GPUCheck(
        name="drift",
        entry_point="benchmarks.gpu.engine:drift",
        limit=420,
        needs=("vllm", "trl", "datasets"),
    ),
    GPUCheck("vision", "benchmarks.gpu.vision:run", 120),
    GPUCheck(
        name="prompts",
        entry_point="benchmarks.gpu.prompts:run",
        limit=180,
        needs=("trl", "accelerate", "datasets"),
    ),
    GPUCheck(
        name="lora_sync", entry_point="benchmarks.gpu.streaming:run", limit=90, needs=("peft",)
    ),
    GPUCheck(
        name="recipe",
        entry_point="benchmarks.gpu.engine:recipe",
        limit=300,
        needs=("vllm", "trl", "datasets", "peft"),
    ),
    GPUCheck(
        name="step",
        entry_point="benchmarks.gpu.step:run",
        limit=480,
        needs=("vllm", "trl", "datasets", "peft"),
    ),
    GPUCheck(
        name="tools",
        entry_point="benchmarks.gpu.paths:tools",
        limit=300,
        needs=("vllm", "trl", "datasets"),
    ),
    GPUCheck(
        name="four_bit",
        entry_point="benchmarks.gpu.paths:four_bit",
        limit=300,
        needs=("vllm", "trl", "datasets", "peft", "bitsandbytes"),
    ),
    GPUCheck(
        name="recipe_v1",
        entry_point="benchmarks.gpu.engine:recipe_v1",
        limit=300,
        needs=("vllm", "trl", "datasets", "peft"),
    ),
    GPUCheck(
        name="trainer",
        entry_point="benchmarks.gpu.trainer:run",
        limit=420,
        needs=("trl", "peft", "datasets"),
    ),
    GPUCheck(
        name="zero3", entry_point="benchmarks.gpu.precision:zero3", limit=300, needs=("deepspeed",)
    ),
    GPUCheck(
        name="engine",
        entry_point="benchmarks.gpu.engine:run",
        limit=600,
        needs=("vllm", "trl", "datasets"),
    ),
    GPUCheck(name="cards", entry_point="benchmarks.gpu.cards:run", limit=120, cards=2),
    GPUCheck(
        name="server",
        entry_point="benchmarks.gpu.server:run",
        limit=600,
        needs=("vllm", "trl", "datasets", "peft"),
        cards=2,
    ),
    GPUCheck(
        name="offload", entry_point="benchmarks.gpu.offload:run", limit=300, needs=("deepspeed",)
    ),
    GPUCheck(
        name="deepspeed",
        entry_point="benchmarks.gpu.offload:builds",
        limit=300,
        needs=("deepspeed",),
    ),
)
LEAST_SECONDS = 10  # with fewer left a check would hardly import what it needs


def run(
    check: GPUCheck, size: str, extensions_folder: Path, seconds_left: float = math.inf
) -> Iterator[CheckLine]:
    """Run a check in a process of its own, and yield its lines, at least one.

    `extensions_folder` is where DeepSpeed's operators are, or come to be, so that one check
    compiles them for all. `seconds_left` is the time for all checks that are left.

    Raises `KeyboardInterrupt`, where it has come, after the lines that the check had written.
    """
    if check.missing:
        missing = " and ".join(check.missing)
        lines = iter([skipped_line("all of it", f"{missing} not installed")])
    elif seconds_left < LEAST_SECONDS:
        lines = iter([skipped_line("all of it", _time_over_note(check))])
    else:
        lines = _run_in_child(
            check, size=size, extensions_folder=extensions_folder, seconds_left=seconds_left
        )
    for line in lines:
        yield replace(line, check=check.name)


def _time_over_note(check: GPUCheck) -> str:
    """Return the note of a check that the time for all checks does not suffice for."""
    return (
        f"not run, the time for all checks was over: `--only {check.name}` runs it alone, "
        "`--minutes` gives more"
    )


def _run_in_child(
    check: GPUCheck, size: str, extensions_folder: Path, seconds_left: float
) -> Iterator[CheckLine]:
    """Run a check in a child process, which is ended at the limit, and yield its lines.

    A child that broke, hung or was killed leaves what it had written, and a last line on its end.
    Raises `KeyboardInterrupt`, where it has come, after what the child had written.
    """
    with tempfile.TemporaryDirectory(prefix="adora_vl_gpu_") as folder:
        lines_file = Path(folder) / "lines.jsonl"
        output = Path(folder) / "output.txt"
        lines_file.touch()
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.checks",
            check.entry_point,
            size,
            str(check.cards),
            str(lines_file),
        ]
        code: int | None = None  # stays so where the child is ended before its time
        interrupt: KeyboardInterrupt | None = None
        with output.open("wb") as stream:
            child = subprocess.Popen(
                command,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                cwd=folder,
                env=_environment(folder, extensions_folder),
            )
            try:
                code = child.wait(min(check.limit, seconds_left))
            except subprocess.TimeoutExpired:
                pass
            except KeyboardInterrupt as error:
                interrupt = error
            finally:
                _end_process_group(child)
        lines = _whole_lines(lines_file)
        printed = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    yield from lines
    if interrupt is not None:
        raise interrupt
    if code is None and seconds_left < check.limit:
        yield skipped_line("the rest of it", _time_over_note(check))
    elif code is None:
        yield failed_line("in time", f"not done after {check.limit} s; stopped")
    elif code != 0:
        yield failed_line("the process", _reason_of_end(code, printed))
    elif not lines:
        yield failed_line("the process", "it ended without a single figure")


def _reason_of_end(code: int, printed: list[str]) -> str:
    """Return why a child failed, by its exit code, not 0, and the lines that it printed."""
    if code > 0:
        return f"exit code {code}: {printed[-1][:300] if printed else 'no output'}"
    memory = ""
    if -code == signal.SIGKILL:
        memory = "; that is how Linux ends a process when memory runs out"
    return f"ended by {signal.Signals(-code).name}{memory}"


def _environment(folder: str, extensions_folder: Path) -> dict[str, str]:
    """Return the environment of the child, whose temporary files stand in `folder`."""
    paths = [str(REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {"TORCH_EXTENSIONS_DIR": str(extensions_folder)}
    # Else Triton's float32 is TF32, and no reference for bfloat16
    variables |= {"TRITON_F32_DEFAULT": "ieee"}
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": folder}


def _end_process_group(child: subprocess.Popen[bytes]) -> None:
    """End the child and what it started: the processes of an engine outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def remove_half_built_extensions(extensions_folder: Path) -> None:
    """Remove what a stopped check was compiling.

    It left a lock, on which every later build would wait without end. Nobody else may be building
    in that folder.
    """
    for lock in list(extensions_folder.rglob("lock")):
        shutil.rmtree(lock.parent)


def _whole_lines(lines_file: Path) -> list[CheckLine]:
    """Return the lines of a child's file; half a line, which it was writing at its end, is not."""
    *whole_lines, _ = lines_file.read_text(encoding="utf-8", errors="replace").split("\n")
    return [_parse_line(words) for words in whole_lines]


def _parse_line(words: str) -> CheckLine:
    """Return the line that the child process wrote as JSON."""
    fields = json.loads(words)
    return CheckLine(**{**fields, "verdict": CheckResult(fields["verdict"])})


def lines_until_error(check: GPUCheck, setting: Setting) -> Iterator[CheckLine]:
    """Yield the lines of a check, which runs in this process.

    An exception, also for lack of memory, becomes the last line: a failure, but for a package of
    others that is not installed.
    """
    try:
        yield from check.load()(setting)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        is_ours = package in ("adora_vl", "benchmarks", "data_prep")
        if is_ours:
            yield failed_line("all of it", one_line(error))
        else:
            yield skipped_line("the rest of it", f"{package} not installed")
    except Exception as error:
        yield failed_line("the rest of it", one_line(error))


def prepare_environment(cards: int) -> None:
    """Prepare the environment of a check as a run does.

    A run of one process sees the first card alone, and a check for several cards sees all of them.
    """
    from adora_vl.utils.launch import prepare_engine_environment

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    prepare_engine_environment()
    if cards > 1:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ |= {"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {}


def main(entry_point: str, size: str, cards: str, lines_file: str) -> int:
    """Run one check in the child process, and write its lines to the file `lines_file`.

    The arguments are the words of the command line. Returns the exit code, 0.
    """
    from adora_vl.utils.launch import use_expandable_segments

    prepare_environment(int(cards))  # before anything imports vLLM
    use_expandable_segments()  # as a run does, before torch is imported
    from benchmarks.gpu.setting import current_setting

    with Path(lines_file).open("a", encoding="utf-8") as stream:
        for line in lines_until_error(
            GPUCheck("", entry_point, 0), current_setting(size == "full")
        ):
            stream.write(json.dumps(asdict(line)) + "\n")
            stream.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
