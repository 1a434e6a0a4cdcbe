"""What the record of the rollouts costs: `python benchmarks/record_cost.py --steps 40`.

The demo's recipe with real vLLM, in which every second step is recorded: the medians of both kinds in one run. Then the
size of a real run without its model: 128 problems with diagrams of 448 x 336 pixels x 8 rollouts of 3,000 characters,
recorded three times; the first time its diagrams are new.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from transformers import TrainerCallback

from adora_vl.rollout_log.rollouts import Record


class Alternate(TrainerCallback):
    """Notes the wall clock of each step, from the end of the one before; the first three steps warm up."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def in_training(steps: int, folder: Path) -> None:
    from adora_vl import train as module

    timer = Alternate()
    build = module.build_trainer

    def build_with_timer(run: Any) -> Any:
        trainer = build(run)
        trainer.add_callback(timer)  # the last one: the record of a step is written before its end is noted
        return trainer

    module.build_trainer = build_with_timer
    words = ["--config", "configs/train/smoke_cpu.yaml", "--output_dir", str(folder), "--max_steps", str(steps)]
    words += ["--save_strategy", "no", "--log_completions", "false", "--adora_record_every", "2"]
    assert module.main(words) == 0
    seconds = [late - early for early, late in zip(timer.ends, timer.ends[1:], strict=False)]
    # seconds[i] is step i + 2, which global_step i + 1 generates: recorded where that is even
    on = [value for i, value in enumerate(seconds) if i >= 3 and (i + 1) % 2 == 0]
    off = [value for i, value in enumerate(seconds) if i >= 3 and (i + 1) % 2 == 1]
    base = statistics.median(off)
    print(f"steps of 128 rollouts, medians of {len(off)} and {len(on)}, of one run")
    print(f"not recorded   {base:8.3f} s   1.000 x")
    print(f"recorded       {statistics.median(on):8.3f} s   {statistics.median(on) / base:.3f} x")


def diagram(rng: random.Random) -> Image.Image:
    image = Image.new("RGB", (448, 336), "white")
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        draw.line([rng.randrange(448), rng.randrange(336), rng.randrange(448), rng.randrange(336)], "black", 2)
    return image


def of_a_large_step(folder: Path, problems: int = 128, rollouts: int = 8) -> None:
    rng = random.Random(0)
    words = [f"w{number}" for number in range(3000)]
    images = [diagram(rng) for _ in range(problems)]
    record = Record(folder, 2.0, {})
    record.start(0)
    count = problems * rollouts
    for step in (1, 2, 3):
        columns: dict[str, list[Any]] = {name: [0.5] * count for name in ("reward", "advantage", "advantage_raw")}
        columns |= {"step": [step] * count, "length": [900] * count, "verdict": ["wrong"] * count}
        columns["completion"] = [" ".join(rng.choices(words, k=550)) for _ in range(count)]
        began = time.perf_counter()
        columns["images"] = [
            record.diagrams.keep(f"p{row // rollouts}", [images[row // rollouts]]) for row in range(count)
        ]
        record.add(columns, rollouts)
        record.flush(step)
        print(f"{count} rollouts, time {step}: {time.perf_counter() - began:.2f} s")
    size = sum(path.stat().st_size for path in record.folder.glob("*.parquet")) / 3
    pictures = sum(path.stat().st_size for path in (record.folder / "_images").glob("*"))
    print(f"{size / 1e6:.1f} MB per step, {pictures / problems / 1e3:.1f} kB per diagram")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        of_a_large_step(Path(temporary) / "large")
        in_training(options.steps, Path(temporary) / "run")


if __name__ == "__main__":
    main()
