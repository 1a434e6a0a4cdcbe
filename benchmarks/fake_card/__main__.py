"""Training steps of a GPU's recipe on a card that is not there: `python -m benchmarks.fake_card
CONFIG`.

The real trainer (`--way stock`: TRL's) takes steps of the recipe's model at true size, with drawn
images and recorded answers. Printed: FLOPs, peak memory beside what the dry run predicts, launches,
the kernels of attention, every wait of the host for the device with its line, and what raised. A
model of 3 billion parameters takes some minutes on one core. What follows `--` goes to the
training.

    python -m benchmarks.fake_card configs/train/adora_3b_1gpu_lora.yaml --layers 2 --lengths 2048
        1024 512 256
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
from benchmarks.fake_card.run import PHASES, CardRun, Ran, run
from benchmarks.fake_card.tables import HEADS, flops_of, head_of, line_of, runs

GIB = 2**30
TERA = 1e12
EMULATED = """\
Emulated, so nothing is shown of it: seconds, rounding and every value that depends on weights; the allocator's
fragments, the CUDA context, workspaces of cuBLAS; which kernel runs, beyond attention's choice and its own memory; vLLM
and the weight sync; DeepSpeed; what a checkpoint's files hold. Real: the trainer's code, shapes, dtypes, devices,
autograd and its lifetimes, checkpointed layers, ids, masks, rewards, advantages."""


def main() -> int:
    arguments = _arguments()
    done: list[Ran] = []
    figures: list[dict[str, Any]] = []  # for `--json`
    like = CardRun(**{each.name: getattr(arguments, each.name) for each in fields(CardRun)})
    if arguments.table:
        print("\n".join(head_of(arguments.table)), flush=True)
    for row in runs(arguments.table, arguments.configs, like):
        for asked in row:
            with tempfile.TemporaryDirectory() as folder:
                done.append(run(asked, Path(folder)))
        row_runs = done[-len(row) :]
        row_figures = [facts(ran) for ran in row_runs]
        faults = [ran for ran in row_runs if ran.fault]
        for ran in faults if arguments.table else row_runs[-1:]:
            print("\n".join(report(ran, arguments.most)), flush=True)
        if arguments.table and not faults:
            print(line_of(arguments.table, row_figures), flush=True)
        if arguments.table == "flops" and not faults:
            row_figures = [flops_of(row_figures)]
        figures += row_figures
    print(f"\n{EMULATED}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 1 if any(ran.fault for ran in done) else 0


def _arguments() -> argparse.Namespace:
    words = sys.argv[1:]
    own, rest = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fake_card",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="files of configs/train")
    parser.add_argument(
        "--table",
        choices=list(HEADS),
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
    return parser.parse_args(own, argparse.Namespace(config="", words=rest))


def facts(ran: Ran) -> dict[str, Any]:
    """The figures of a run, for a file."""
    card = ran.card
    counts = {name: dict(getattr(card, name)) for name in ("flops", "launches", "peaks", "kernels")}
    waits = [[number, *place] for place, number in _waits(ran).most_common()]
    predicted = ran.predicted_peak if ran.predicted is not None else None
    figures = {
        "parameters": ran.parameters,
        "trained": ran.trained,
        "prompt": ran.prompt,
        "micro_batches": ran.micro_batches,
        "fault": ran.fault,
    }
    own_counts = {
        "waits": own_waits(ran, "forward", "backward"),
        "generation_waits": own_waits(ran, "generation"),
    }
    memory = {
        "peak": ran.peak,
        "predicted": predicted,
        "first_and_later": ran.first_and_later if predicted else [],
    }
    return {**asdict(ran.asked), **figures, **counts, **own_counts, **memory, "places": waits}


def report(ran: Ran, most: int = 25) -> list[str]:
    """What is printed."""
    asked = ran.asked
    card = ran.card
    size_text = (
        f"{asked.layers or 'all'} layers, {asked.groups} groups, answers of "
        f"{list(asked.lengths) or 'full length'}"
    )
    lines = [
        f"{asked.config}, {asked.way}: {size_text}, prompts of {ran.prompt} tokens; "
        f"{ran.seconds:.0f} s here"
    ]
    lines.append(f"{ran.parameters / 1e9:.2f} billion parameters, {ran.trained / 1e9:.3f} trained")
    lines += [
        "",
        f"{'phase':12} {'TFLOP':>8} {'peak GiB':>9} {'launches':>9} {'waits':>6} "
        f"{'of which ours':>14}",
    ]
    for phase in PHASES:
        if card.launches[phase] or card.peaks[phase]:
            places = card.waits[phase]
            own = sum(number for place, number in places.items() if place.is_ours)
            figures = (
                f"{card.flops[phase] / TERA:8.1f} {card.peaks[phase] / GIB:9.2f} "
                f"{card.launches[phase]:9,}"
            )
            lines.append(f"{phase:12} {figures} {sum(places.values()):6} {own:14}")
    if ran.predicted is not None:
        predicted = ran.predicted_peak
        peak = ran.peak
        lines.append(
            f"peak while learning {peak / GIB:.2f} GiB, predicted {predicted / GIB:.2f}: "
            f"{predicted / peak:.3f} of it"
        )
    if ran.micro_batches:
        learning = own_waits(ran, "forward", "backward")
        sampling = own_waits(ran, "generation")
        count = (
            f"{sampling:.1f} a generation, {learning * ran.generations / ran.micro_batches:.1f} a "
            "micro-batch"
        )
        lines.append(f"waits on lines of ours: {count}")
    lines += [
        "",
        "kernels: "
        + ", ".join(f"{name} {number:,}" for name, number in sorted(card.kernels.items())),
    ]
    for title, counted in (
        ("waits", _waits(ran)),
        ("values that nobody knows, asked for", card.made_up),
    ):
        if counted:
            lines += ["", f"{title}:"]
            lines += [
                f"{number:6}  {_spelled(place)}" for place, number in counted.most_common(most)
            ]
    lines += ["", f"FAULT: {ran.fault}" if ran.fault else "No fault of device or dtype."]
    return lines


def own_waits(ran: Ran, *phases: str) -> float:
    """Waits on lines of ours in these phases, of the mean generation."""
    places = (pair for phase in phases for pair in ran.card.waits[phase].items())
    return sum(number for place, number in places if place.is_ours) / ran.generations


def _waits(ran: Ran) -> Counter[Place]:
    total: Counter[Place] = Counter()
    for phase, places in ran.card.waits.items():
        if phase not in ("load", "start", "checkpoint"):
            total.update(
                {
                    place._replace(what=f"{phase}: {place.what}"): number
                    for place, number in places.items()
                }
            )
    return total


def _spelled(place: Place) -> str:
    by = f"  < {place.ours}" if place.ours and not place.is_ours else ""
    return f"{place.what:28} {place.line}{by}"


if __name__ == "__main__":
    sys.exit(main())
