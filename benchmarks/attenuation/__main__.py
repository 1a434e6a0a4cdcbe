"""Train arms of an experiment from one start: `python -m benchmarks.attenuation --arms grpo adora`.

Arms of one condition (regime, recipe, seed, arithmetic model and reward) share their start, their
problems and their random numbers, so they are a pair. Each prints its held-out figures and is
written to OUTPUT/runs; one that is there already is not trained again.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from adora_vl.utils.launch import prepare_engine_environment
from benchmarks.attenuation.start import (
    arithmetic_folder,
    build_arithmetic,
    build_start,
    hash_of_weights,
    start_folder,
)
from benchmarks.attenuation.task import REWARD_NAMES, ExperimentSettings, Trial, read_settings

REPOSITORY = Path(__file__).parents[2]


def train_or_read(settings: ExperimentSettings, trial: Trial, output: Path) -> dict[str, Any]:
    """Return the result of one arm, from its file if it was trained before; else train it."""
    from benchmarks.attenuation.run import run_trial, write_result

    file = output / "runs" / f"{trial.name}.json"
    if file.is_file():
        stored: dict[str, Any] = json.loads(file.read_text())
        return stored
    arithmetic = arithmetic_folder(output, trial.model)
    start = start_folder(output, trial)
    build_arithmetic(arithmetic, settings.start, trial.model)
    build_start(start, arithmetic, settings.start, trial.seed)
    result = run_trial(
        settings, trial=trial, start=start, facts={"arithmetic": hash_of_weights(arithmetic)}
    )
    write_result(file, result)
    return result


def result_lines(result: dict[str, Any]) -> list[str]:
    """Return a line for each evaluation: accuracy by family, and the share of chains."""
    lines = [f"{result['arm']}:"]
    for point in result["held_out"]:
        figures = ("accuracy", "accuracy_A", "accuracy_B", "chains")
        cells = [f"{name} {100 * point[name]:.1f} %" for name in figures]
        lines.append(f"  step {point['step']}: {', '.join(cells)}")
    return lines


def main() -> int:
    """Train the arms that the command names, and print the figures of each."""
    settings = read_settings()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attenuation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--regime", choices=list(settings.regimes), default="R2")
    parser.add_argument("--recipe", choices=list(settings.recipes), default="grpo")
    parser.add_argument("--arms", choices=list(settings.arms), nargs="+", default=["adora"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=int, default=0, help="seed of the arithmetic model")
    parser.add_argument("--reward", choices=REWARD_NAMES, default=REWARD_NAMES[0])
    parser.add_argument("--engine", action="store_true", help="sample with vLLM")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "attenuation")
    options = parser.parse_args()
    prepare_engine_environment()
    for arm in options.arms:
        trial = Trial(
            regime=options.regime,
            recipe=options.recipe,
            seed=options.seed,
            arm=arm,
            engine=options.engine,
            model=options.model,
            reward=options.reward,
        )
        result = train_or_read(settings, trial, options.output.resolve())
        print("\n".join(result_lines(result)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
