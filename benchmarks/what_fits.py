"""Prints the table of docs/hardware.md for one card: the longest answers that fit.

The dry run's formulas give the memory.

    python -m benchmarks.what_fits
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from adora_vl.config.command import parse_command
from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.planning.memory import MemoryPrediction, MemorySetup, predict_memory
from adora_vl.planning.plan import make_plan
from adora_vl.planning.what_fits import best_vllm_utilization
from adora_vl.utils.files import GIB

CONFIGS = Path(__file__).parents[1] / "configs"
CARDS_GB = (12, 16, 24, 48)
ANSWER_LIMITS = (8192, 4096, 3072, 2048, 1536, 1024, 512)
SEQUENCES_TRIED = (8, 4, 2, 1)
LEAST_SEQUENCES = 4  # rollouts; with fewer the engine waits for its longest answers
RECIPE_AND_CHANGES_BY_MODE = {  # model, mode: the recipe and what is changed in it
    ("3B", "LoRA on bfloat16"): ("adora_3b_12gb", ["--load_in_4bit", "false"]),
    ("3B", "LoRA on 4 bits"): ("adora_3b_12gb", []),
    ("7B", "LoRA on bfloat16"): ("adora_7b_24gb_4bit", ["--load_in_4bit", "false"]),
    ("7B", "LoRA on 4 bits"): ("adora_7b_24gb_4bit", []),
}


def run_setup(recipe: str, changed: list[str]) -> MemorySetup:
    options = DryRunOptions(accelerate_config=CONFIGS / "accelerate" / "gpu1.yaml", card_gib=80.0)
    # The least memory: auto would fill the card
    changed = [*changed, "--adora_recompute", "all"]
    return make_plan(
        parse_command(["--config", str(CONFIGS / "train" / f"{recipe}.yaml"), *changed]), options
    ).setup


def longest_answer(setup: MemorySetup, card: int) -> tuple[MemorySetup, MemoryPrediction] | None:
    """Return the setup with the longest answers that fit, and its prediction; None if none fits.

    Of those with equal answers it is the one with the largest micro-batch. 5 % of the `card`, in
    bytes, stay free.
    """
    assert setup.engine is not None
    for answer in ANSWER_LIMITS:
        for sequences in SEQUENCES_TRIED:
            batch = replace(setup.batch, sequences=sequences, completion_tokens=answer)
            engine = replace(setup.engine, max_length=batch.prompt_tokens + answer)
            longer_setup = replace(setup, batch=batch, engine=engine)
            share = best_vllm_utilization(longer_setup, card)
            if share is None:
                continue
            longer_setup = replace(longer_setup, engine=replace(engine, utilization=share))
            prediction = predict_memory(longer_setup, card)
            if (
                prediction.engine is not None
                and prediction.engine.concurrent_rollouts >= LEAST_SEQUENCES
            ):
                return longer_setup, prediction
    return None


def table_rows(cards_gb: Sequence[int] = CARDS_GB) -> Iterator[str]:
    """Yield the lines of the table for these cards: one for each model and mode, on each card."""
    yield (
        "| card, GB | model | mode | prompt | longest answer | micro-batch | at once | engine's "
        "share | peak, GiB |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    setups = {mode: run_setup(*recipe) for mode, recipe in RECIPE_AND_CHANGES_BY_MODE.items()}
    for gigabytes in cards_gb:
        card = int(gigabytes * 1e9)
        for (model, mode), setup in setups.items():
            fitting = longest_answer(setup, card)
            if fitting is None:
                yield (
                    f"| {gigabytes} | {model} | {mode} | {setup.batch.prompt_tokens} | does not "
                    "fit | - | - | - | - |"
                )
                continue
            fitting_setup, prediction = fitting
            assert fitting_setup.engine is not None
            assert prediction.engine is not None
            cells = (
                gigabytes,
                model,
                mode,
                fitting_setup.batch.prompt_tokens,
                fitting_setup.batch.completion_tokens,
                fitting_setup.batch.sequences,
                f"{prediction.engine.concurrent_rollouts} of {fitting_setup.sequences_per_generation}",
                f"{fitting_setup.engine.utilization:g}",
                f"{prediction.peak_bytes / GIB:.1f}",
            )
            yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    print("\n".join(table_rows()))
