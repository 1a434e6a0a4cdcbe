"""One process with one engine: the runs of its share of the seeds that have no result, in the settings' order."""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    options = parser.parse_args()

    from adora_vl.rollout.environment import prepare_engine_environment

    prepare_engine_environment()
    from benchmarks.attenuation.run import keep_one_engine, run_job, write_result
    from benchmarks.attenuation.settings import read_settings
    from benchmarks.attenuation.start import ARITHMETIC, build_start

    settings = read_settings(options.settings)
    keep_one_engine()
    for job in settings.jobs():
        result = options.output / "runs" / f"{job.name}.json"
        if job.seed % options.workers != options.worker or result.is_file():
            continue
        start = options.output / "starts" / str(job.seed)
        build_start(start, options.output / ARITHMETIC, settings.start, job.seed)
        try:
            found = run_job(settings, job, start, options.commit)
        except Exception:  # one run that fails is said and left out; starting again tries it again
            traceback.print_exc()
            continue
        write_result(result, found)
        end = found["held_out"][-1]
        figures = f"accuracy {end['accuracy']:.3f}, chains {end['chains']:.2f}, {found['seconds']} s"
        print(f"{job.name}: {figures}", flush=True)


if __name__ == "__main__":
    main()
