"""A check in a process of its own: what breaks there, hangs or runs out of memory is one line of the table.

The child is `python -m benchmarks.gpu.isolated MODULE:FUNCTION SIZE FILE`. It writes each line as soon as it is known,
so a check that is stopped keeps what it had found.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.catalogue import GPUCheck
from benchmarks.gpu.table import Line, Verdict, failed, one_line, skipped

if TYPE_CHECKING:
    from benchmarks.gpu.setting import Setting

REPOSITORY = Path(__file__).parents[2]


def run(check: GPUCheck, size: str) -> list[Line]:
    """The lines of a check, by its name; always at least one."""
    if check.missing:
        lines = [skipped("all of it", f"{' and '.join(check.missing)} not installed")]
    else:
        lines = _in_a_child(check, size)
    return [replace(line, check=check.name) for line in lines]


def _in_a_child(check: GPUCheck, size: str) -> list[Line]:
    with tempfile.TemporaryDirectory(prefix="adora_vl_gpu_") as folder:
        results, output = Path(folder) / "lines.jsonl", Path(folder) / "output.txt"
        results.touch()
        command = [sys.executable, "-m", "benchmarks.gpu.isolated", check.place, size, str(results)]
        with output.open("wb") as stream:
            child = subprocess.Popen(
                command, stdout=stream, stderr=stream, start_new_session=True, cwd=folder, env=_environment(folder)
            )
            try:
                code: int | None = child.wait(check.limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(child)
        lines = [_read(words) for words in results.read_text(encoding="utf-8").splitlines()]
        printed = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if code is None:
        return [*lines, failed("in time", f"not done after {check.limit} s; stopped")]
    if code < 0:
        memory = "; that is how Linux ends a process when memory runs out" if -code == signal.SIGKILL else ""
        return [*lines, failed("the process", f"ended by {signal.Signals(-code).name}{memory}")]
    if code:
        return [*lines, failed("the process", f"exit code {code}: {printed[-1][:300] if printed else 'no output'}")]
    return lines or [failed("the process", "it ended without a single figure")]


def _environment(folder: str) -> dict[str, str]:
    paths = [str(REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # What DeepSpeed compiles stays in the folder. A check that is stopped would leave a lock in the cache of the user,
    # on which every later build waits.
    built = {"TORCH_EXTENSIONS_DIR": f"{folder}/extensions"}
    return {**os.environ, **built, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": folder}


def _end(child: subprocess.Popen[bytes]) -> None:
    """The child and whatever it started: an engine's processes outlive one that was killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _read(words: str) -> Line:
    fields = json.loads(words)
    return Line(**{**fields, "verdict": Verdict(fields["verdict"])})


def guarded(check: GPUCheck, setting: Setting) -> Iterator[Line]:
    """Its lines; an exception, out-of-memory too, is the last one of them."""
    try:
        yield from check.load()(setting)
    except Exception as error:
        yield failed("the rest of it", one_line(error))


def main(place: str, size: str, results: str) -> int:
    """What the child process runs."""
    from adora_vl.rollout.environment import prepare_engine_environment

    prepare_engine_environment()  # before anything imports vLLM
    from benchmarks.gpu.setting import here

    with Path(results).open("a", encoding="utf-8") as stream:
        for line in guarded(GPUCheck("", place, 0), here(size == "full")):
            stream.write(json.dumps(asdict(line)) + "\n")
            stream.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
