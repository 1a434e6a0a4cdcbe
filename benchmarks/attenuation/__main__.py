"""Train every arm in every regime, then write tables and curves: `python -m
benchmarks.attenuation`.

Every finished run is a file in OUTPUT/runs. The command can be stopped and started again: it goes
on with what is missing. `--report` only reads what is there, and `--tables` prints every table from
one file, by default that of the runs that docs/experiments.md is about. `--add` puts the finished
runs there, beside those of other machines.
"""

import argparse
import json
import os
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path

from adora_vl.utils.launch import prepare_engine_environment, watch_parent
from benchmarks.attenuation.report import (
    CROSSED,
    add_runs,
    all_tables,
    conditions,
    draw_curves,
    unknown_commits,
    write_report,
)
from benchmarks.attenuation.start import (
    arithmetic_folder,
    build_arithmetic,
    build_start,
    fingerprint,
    start_folder,
)
from benchmarks.attenuation.task import SETTINGS, Settings, read_settings
from data_prep.forecast import forecast

REPOSITORY = Path(__file__).parents[2]
RUNS = Path(__file__).with_name("runs.jsonl")  # of the runs that the page is about


def commit() -> str:
    """The commit that the runs are made from, with a plus sign where files differ from it."""
    said = subprocess.run(
        ["git", "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"],  # noqa: S607
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip() or "unknown"


def train_all(settings: Path, output: Path, workers: int) -> int:
    """Every worker trains its share of the seeds on one core.

    Returns how many ended with an error.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment.pop("MASTER_PORT", None)
    words = [
        sys.executable,
        "-m",
        "benchmarks.attenuation",
        "--settings",
        str(settings),
        "--output",
        str(output),
    ]
    words += ["--commit", commit(), "--workers", str(workers)]
    output.mkdir(parents=True, exist_ok=True)
    plan = read_settings(settings)
    for number in sorted({job.model for job in plan.jobs()}):
        build_arithmetic(arithmetic_folder(output, number), plan.start, number)
    running = []
    try:
        for worker in range(workers):
            with (output / f"worker-{worker}.log").open("a") as log:
                own = [*words, "--worker", str(worker)]
                running.append(
                    subprocess.Popen(own, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
                )
        return sum(process.wait() != 0 for process in running)
    finally:
        for process in running:
            process.terminate()


def work(options: argparse.Namespace) -> None:
    """What a worker does, with one engine: the runs of its share of the seeds that have no result,
    in their order. It ends with the command that started it, also where that one is killed.
    """
    watch_parent()
    prepare_engine_environment()
    from benchmarks.attenuation.run import (
        YOKED_TO,
        keep_one_engine,
        read_record,
        run_job,
        write_result,
    )

    settings = read_settings(options.settings)
    keep_one_engine()
    for job in settings.jobs():
        result = options.output / "runs" / f"{job.name}.json"
        if (job.seed + job.model) % options.workers != options.worker or result.is_file():
            continue
        arithmetic = arithmetic_folder(options.output, job.model)
        start = start_folder(options.output, job)
        build_start(start, arithmetic, settings.start, job.seed)
        facts = {
            "plan": options.settings.stem,
            "commit": options.commit,
            "arithmetic": fingerprint(arithmetic),
        }
        try:
            arm = settings.arms[job.arm].get(YOKED_TO)
            record = (
                read_record(result.with_name(f"{replace(job, arm=arm).name}.json")) if arm else None
            )
            found = run_job(settings, job, start, facts, record)
        except Exception:  # one run that fails is said and left out; starting again tries it again
            traceback.print_exc()
            continue
        write_result(result, found)
        end = found["held_out"][-1]
        figures = (
            f"accuracy {end['accuracy']:.3f}, chains {end['chains']:.2f}, {found['seconds']} s"
        )
        print(f"{job.name}: {figures}", flush=True)


def print_forecasts(settings: Settings, output: Path) -> int:
    """What `python -m data_prep filter --attenuation` says of the first start of each regime,
    before any training.
    """
    from benchmarks.attenuation.run import groups_of_start

    for regime in settings.regimes:
        job = next(job for job in settings.jobs() if job.regime == regime)
        arithmetic = arithmetic_folder(output, job.model)
        start = start_folder(output, job)
        build_arithmetic(arithmetic, settings.start, job.model)
        build_start(start, arithmetic, settings.start, job.seed)
        print(
            "\n".join(
                [
                    f"{regime}, seed {job.seed}",
                    *forecast(groups_of_start(settings, job, start)).lines(),
                    "",
                ]
            )
        )
    return 0


def print_tables(file: Path, curves: Path | None) -> int:
    """Every table, from the file with all runs that an earlier command wrote, and the curves of
    what has two arms.
    """
    try:
        runs = [json.loads(line) for line in file.read_text().splitlines()]
        tables = all_tables(runs, unknown_commits(runs)) if conditions(runs) else ""
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"--tables: {file} is no runs.jsonl of this command ({error!r})") from None
    if not tables:
        raise SystemExit(f"--tables: {file} has no run")
    print(tables)
    if curves:
        own = [run for run in runs if run["plan"] != CROSSED]
        draw_curves(own, conditions(own, arms=2), curves)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", type=Path, default=SETTINGS)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "attenuation")
    parser.add_argument(
        "--workers", type=int, default=2, help="processes, one core each (%(default)s)"
    )
    parser.add_argument("--report", action="store_true", help="only read the runs that are there")
    parser.add_argument(
        "--tables",
        type=Path,
        nargs="?",
        const=RUNS,
        metavar="FILE",
        help="only print the tables of a runs.jsonl",
    )
    parser.add_argument(
        "--curves", type=Path, metavar="PNG", help="with --tables: draw the curves too"
    )
    parser.add_argument(
        "--add",
        type=Path,
        nargs="?",
        const=RUNS,
        metavar="FILE",
        help="train nothing, and add the runs that are there to a runs.jsonl that has others",
    )
    parser.add_argument(
        "--forecast",
        action="store_true",
        help="only say what attenuation would act on at the starts",
    )
    parser.add_argument(
        "--worker", type=int, help=argparse.SUPPRESS
    )  # which of them this process is
    parser.add_argument("--commit", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tables:
        return print_tables(options.tables, options.curves)
    for option, file in (("--settings", options.settings), ("--add", options.add)):
        if file is not None and not file.is_file():
            raise SystemExit(f"{option}: {file} is no file")
    options.settings, options.output = options.settings.resolve(), options.output.resolve()
    if options.worker is not None:
        work(options)
        return 0
    if options.forecast:
        return print_forecasts(read_settings(options.settings), options.output)
    failed = (
        0
        if options.report or options.add
        else train_all(options.settings, options.output, options.workers)
    )
    write_report(options.output)
    if options.add:
        print(f"{add_runs(options.output, options.add)} runs added to {options.add}")
    names = [job.name for job in read_settings(options.settings).jobs()]
    missing = [name for name in names if not (options.output / "runs" / f"{name}.json").is_file()]
    if missing:
        logs = options.output / "worker-*.log"
        print(f"{len(missing)} runs are missing, {missing[0]} first; see {logs}", file=sys.stderr)
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
