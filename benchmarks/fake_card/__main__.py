"""Training steps of a GPU's recipe on a card that is not there.

    python -m benchmarks.fake_card configs/train/adora_3b_1gpu_lora.yaml --layers 2

The real trainer (`--way stock`: TRL's) takes steps of the recipe's model at true size, with drawn
images and recorded answers. It prints FLOPs, peak memory beside what the dry run predicts,
launches, the kernels of attention, every wait of the host for the device with its line, and the
error if one ended the run. A model of 3 billion parameters takes some minutes on one core. What
follows `--` goes to the training.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import benchmarks.fake_card.device  # noqa: F401  # before torch
from benchmarks.fake_card.card import Card, Place
from benchmarks.fake_card.run import PHASES, CardRun, CardRunResult, run
from benchmarks.fake_card.tables import COLUMNS_BY_TABLE, flops_of, head_of, line_of, runs

GIB = 2**30
TERA = 1e12
EMULATED_NOTE = """\
Emulated, so nothing is shown of it: seconds, rounding and every value that depends on weights; the allocator's
fragments, the CUDA context, workspaces of cuBLAS; which kernel runs, beyond attention's choice and its own memory; vLLM
and the weight sync; DeepSpeed; what a checkpoint's files hold. Real: the trainer's code, shapes, dtypes, devices,
autograd and its lifetimes, checkpointed layers, ids, masks, rewards, advantages."""


def main() -> int:
    """Run all configs on the simulated card, and print their reports or rows of a table.

    Returns the exit code: 1 where a run has a fault of device or dtype, else 0.
    """
    arguments = _arguments()
    options = CardRun(
        **{option.name: getattr(arguments, option.name) for option in fields(CardRun)}
    )
    if arguments.table:
        print("\n".join(head_of(arguments.table)), flush=True)
    any_fault = False
    figures: list[dict[str, Any]] = []  # for `--json`
    for row in runs(arguments.table, arguments.configs, options):
        results = []
        for card_run in row:
            with tempfile.TemporaryDirectory() as folder:
                results.append(run(card_run, Path(folder)))
        row_figures = [figures_of(result) for result in results]
        faulty_results = [result for result in results if result.fault]
        if faulty_results:
            any_fault = True
        reported_results = faulty_results if arguments.table else results
        for result in reported_results:
            print("\n".join(report(result, arguments.most)), flush=True)
        if arguments.table and not faulty_results:
            print(line_of(arguments.table, row_figures), flush=True)
        if arguments.table == "flops" and not faulty_results:
            row_figures = [flops_of(row_figures)]
        figures += row_figures
    print(f"\n{EMULATED_NOTE}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 1 if any_fault else 0


def _arguments() -> argparse.Namespace:
    """Parse the command line. Words behind `--` become `words`, for the training command."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    training_words = words[end + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fake_card",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="files of configs/train")
    parser.add_argument(
        "--table",
        choices=list(COLUMNS_BY_TABLE),
        help="of a page, in place of reports (benchmarks.fake_card.tables)",
    )
    parser.add_argument("--way", choices=["ours", "stock"], default="ours")
    parser.add_argument("--layers", type=int, help="of the language model (default: all)")
    parser.add_argument("--blocks", type=int, help="of the vision tower (default: all)")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[],
        help="of the answers of a group (default: full)",
    )
    parser.add_argument("--groups", type=int, default=2, help="of an optimizer step (default: 2)")
    parser.add_argument(
        "--updates",
        type=int,
        default=0,
        help="optimizer steps (default: 2, or as many as learn from one generation)",
    )
    parser.add_argument(
        "--updates-per-generation",
        type=int,
        default=0,
        help="optimizer steps that learn from one generation (default: the recipe's)",
    )
    parser.add_argument(
        "--without-signal",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the groups, whose answers are all right (default: 0)",
    )
    parser.add_argument("--image-tokens", type=int, default=256)
    parser.add_argument("--text-tokens", type=int, default=450)
    parser.add_argument(
        "--most", type=int, default=25, help="lines with waits that are shown (default: 25)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser.parse_args(words[:end], argparse.Namespace(config="", words=training_words))


def figures_of(result: CardRunResult) -> dict[str, Any]:
    """Return the figures of a run, as `--json` writes them."""
    card = result.card
    has_prediction = result.predicted is not None
    return {
        **asdict(result.card_run),
        "parameters": result.parameters,
        "trained": result.trained,
        "prompt": result.prompt,
        "micro_batches": result.micro_batches,
        "fault": result.fault,
        "flops": dict(card.flops),
        "launches": dict(card.launches),
        "peaks": dict(card.peaks),
        "kernels": dict(card.kernels),
        "waits": mean_own_waits(result, "forward", "backward"),
        "generation_waits": mean_own_waits(result, "generation"),
        "peak": result.peak,
        "predicted": result.predicted_peak if has_prediction else None,
        "first_and_later": result.first_and_later if has_prediction else [],
        "places": [[count, *location] for location, count in _waits_by_place(result).most_common()],
    }


def report(result: CardRunResult, shown_places: int = 25) -> list[str]:
    """Return the lines that are printed of a run.

    `shown_places`: how many lines of code with waits are shown.
    """
    card_run = result.card_run
    card = result.card
    lines = [
        f"{card_run.config}, {card_run.way}: {card_run.layers or 'all'} layers, "
        f"{card_run.groups} groups, answers of {list(card_run.lengths) or 'full length'}, "
        f"prompts of {result.prompt} tokens; {result.seconds:.0f} s here",
        f"{result.parameters / 1e9:.2f} billion parameters, {result.trained / 1e9:.3f} trained",
        "",
        *_phase_lines(card),
    ]
    if result.predicted is not None:
        lines.append(
            f"peak while learning {result.peak / GIB:.2f} GiB, predicted "
            f"{result.predicted_peak / GIB:.2f}: {result.predicted_peak / result.peak:.3f} of it"
        )
    if result.micro_batches:
        generation_waits = mean_own_waits(result, "generation")
        learning_waits = mean_own_waits(result, "forward", "backward")
        per_micro_batch = learning_waits * result.generations / result.micro_batches
        lines.append(
            f"waits on lines of ours: {generation_waits:.1f} a generation, "
            f"{per_micro_batch:.1f} a micro-batch"
        )
    kernels = ", ".join(f"{name} {count:,}" for name, count in sorted(card.kernels.items()))
    lines += ["", f"kernels: {kernels}"]
    for title, places in (
        ("waits", _waits_by_place(result)),
        ("values that nobody knows, asked for", card.made_up),
    ):
        if places:
            lines += ["", f"{title}:"]
            for location, count in places.most_common(shown_places):
                lines.append(f"{count:6}  {_place_in_words(location)}")
    lines += ["", f"FAULT: {result.fault}" if result.fault else "No fault of device or dtype."]
    return lines


def _phase_lines(card: Card) -> list[str]:
    """Return a table with a row for each phase in which the card had something to do."""
    lines = [
        f"{'phase':12} {'TFLOP':>8} {'peak GiB':>9} {'launches':>9} {'waits':>6} "
        f"{'of which ours':>14}"
    ]
    for phase in PHASES:
        if not card.launches[phase] and not card.peaks[phase]:
            continue
        wait_counts = card.waits[phase]
        waits_of_ours = sum(count for location, count in wait_counts.items() if location.is_ours)
        lines.append(
            f"{phase:12} {card.flops[phase] / TERA:8.1f} {card.peaks[phase] / GIB:9.2f} "
            f"{card.launches[phase]:9,} {sum(wait_counts.values()):6} {waits_of_ours:14}"
        )
    return lines


def mean_own_waits(result: CardRunResult, *phases: str) -> float:
    """Return how often the host waits on lines of this project in these phases, per generation."""
    count = 0
    for phase in phases:
        for location, waits in result.card.waits[phase].items():
            if location.is_ours:
                count += waits
    return count / result.generations


def _waits_by_place(result: CardRunResult) -> Counter[Place]:
    """Count the waits of a run by place, with the phase written before the place's event.

    Loading, the start and checkpoints are left out, since they are no part of a step.
    """
    waits: Counter[Place] = Counter()
    for phase, wait_counts in result.card.waits.items():
        if phase in ("load", "start", "checkpoint"):
            continue
        for location, count in wait_counts.items():
            waits[location._replace(event=f"{phase}: {location.event}")] += count
    return waits


def _place_in_words(location: Place) -> str:
    """Return the event and line of a place, and the line of this project that led to it."""
    caller = f"  < {location.ours}" if location.ours and not location.is_ours else ""
    return f"{location.event:28} {location.line}{caller}"


if __name__ == "__main__":
    sys.exit(main())
