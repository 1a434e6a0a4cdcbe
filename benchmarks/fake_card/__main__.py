"""Training steps of a GPU's recipe on a card that is not there.

    python -m benchmarks.fake_card configs/train/adora_3b_1gpu_lora.yaml --layers 2

The real trainer (`--way stock`: TRL's) takes steps of the recipe's model at true size, with drawn
images and recorded answers. Printed: FLOPs, peak memory beside what the dry run predicts, launches,
the kernels of attention, every wait of the host for the device with its line, and what raised. A
model of 3 billion parameters takes some minutes on one core. What follows `--` goes to the
training.
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
from benchmarks.fake_card.card import Place
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
    results: list[CardRunResult] = []
    figures: list[dict[str, Any]] = []  # for `--json`
    options = CardRun(
        **{option.name: getattr(arguments, option.name) for option in fields(CardRun)}
    )
    if arguments.table:
        print("\n".join(head_of(arguments.table)), flush=True)
    for row in runs(arguments.table, arguments.configs, options):
        for card_run in row:
            with tempfile.TemporaryDirectory() as folder:
                results.append(run(card_run, Path(folder)))
        row_results = results[-len(row) :]
        row_figures = [facts(result) for result in row_results]
        faults = [result for result in row_results if result.fault]
        for result in faults if arguments.table else row_results[-1:]:
            print("\n".join(report(result, arguments.most)), flush=True)
        if arguments.table and not faults:
            print(line_of(arguments.table, row_figures), flush=True)
        if arguments.table == "flops" and not faults:
            row_figures = [flops_of(row_figures)]
        figures += row_figures
    print(f"\n{EMULATED_NOTE}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 1 if any(result.fault for result in results) else 0


def _arguments() -> argparse.Namespace:
    """Parse the words of the command line."""
    words = sys.argv[1:]
    # What stands behind `--` goes to the training command.
    end = words.index("--") if "--" in words else len(words)
    own_words = words[:end]
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
    return parser.parse_args(own_words, argparse.Namespace(config="", words=training_words))


def facts(result: CardRunResult) -> dict[str, Any]:
    """Return the figures of a run, as the file has them."""
    card = result.card
    counts = {name: dict(getattr(card, name)) for name in ("flops", "launches", "peaks", "kernels")}
    waits = [[number, *place] for place, number in _waits(result).most_common()]
    predicted = result.predicted_peak if result.predicted is not None else None
    figures = {
        "parameters": result.parameters,
        "trained": result.trained,
        "prompt": result.prompt,
        "micro_batches": result.micro_batches,
        "fault": result.fault,
    }
    own_counts = {
        "waits": own_waits(result, "forward", "backward"),
        "generation_waits": own_waits(result, "generation"),
    }
    memory = {
        "peak": result.peak,
        "predicted": predicted,
        "first_and_later": result.first_and_later if predicted else [],
    }
    return {**asdict(result.card_run), **figures, **counts, **own_counts, **memory, "places": waits}


def report(result: CardRunResult, shown_places: int = 25) -> list[str]:
    """Return the lines that are printed of a run."""
    card_run = result.card_run
    card = result.card
    size_text = (
        f"{card_run.layers or 'all'} layers, {card_run.groups} groups, answers of "
        f"{list(card_run.lengths) or 'full length'}"
    )
    lines = [
        f"{card_run.config}, {card_run.way}: {size_text}, prompts of {result.prompt} tokens; "
        f"{result.seconds:.0f} s here"
    ]
    lines.append(
        f"{result.parameters / 1e9:.2f} billion parameters, {result.trained / 1e9:.3f} trained"
    )
    lines += [
        "",
        f"{'phase':12} {'TFLOP':>8} {'peak GiB':>9} {'launches':>9} {'waits':>6} "
        f"{'of which ours':>14}",
    ]
    for phase in PHASES:
        if card.launches[phase] or card.peaks[phase]:
            places = card.waits[phase]
            waits_of_ours = sum(number for place, number in places.items() if place.is_ours)
            figures = (
                f"{card.flops[phase] / TERA:8.1f} {card.peaks[phase] / GIB:9.2f} "
                f"{card.launches[phase]:9,}"
            )
            lines.append(f"{phase:12} {figures} {sum(places.values()):6} {waits_of_ours:14}")
    if result.predicted is not None:
        predicted = result.predicted_peak
        peak = result.peak
        lines.append(
            f"peak while learning {peak / GIB:.2f} GiB, predicted {predicted / GIB:.2f}: "
            f"{predicted / peak:.3f} of it"
        )
    if result.micro_batches:
        learning = own_waits(result, "forward", "backward")
        sampling = own_waits(result, "generation")
        count = (
            f"{sampling:.1f} a generation, {learning * result.generations / result.micro_batches:.1f} a "
            "micro-batch"
        )
        lines.append(f"waits on lines of ours: {count}")
    lines += [
        "",
        "kernels: "
        + ", ".join(f"{name} {number:,}" for name, number in sorted(card.kernels.items())),
    ]
    for title, counts in (
        ("waits", _waits(result)),
        ("values that nobody knows, asked for", card.made_up),
    ):
        if counts:
            lines += ["", f"{title}:"]
            lines += [
                f"{number:6}  {_spelled(place)}"
                for place, number in counts.most_common(shown_places)
            ]
    lines += ["", f"FAULT: {result.fault}" if result.fault else "No fault of device or dtype."]
    return lines


def own_waits(result: CardRunResult, *phases: str) -> float:
    """Return the waits on lines of ours in these phases, a generation on average."""
    places = (pair for phase in phases for pair in result.card.waits[phase].items())
    return sum(number for place, number in places if place.is_ours) / result.generations


def _waits(result: CardRunResult) -> Counter[Place]:
    """Return the waits of a run by place, whose event begins with the phase."""
    total: Counter[Place] = Counter()
    for phase, places in result.card.waits.items():
        if phase not in ("load", "start", "checkpoint"):
            total.update(
                {
                    place._replace(event=f"{phase}: {place.event}"): number
                    for place, number in places.items()
                }
            )
    return total


def _spelled(place: Place) -> str:
    by = f"  < {place.ours}" if place.ours and not place.is_ours else ""
    return f"{place.event:28} {place.line}{by}"


if __name__ == "__main__":
    sys.exit(main())
