"""How long the page of a 10,000-rollout run takes to make and to open: `python -m benchmarks.report_page`.

A record like that of a real run: 1,280 groups of 8 over 1,000 problems with diagrams of 448 x 336 pixels, completions
of 3,000 characters. Opened in headless Chromium, from the navigation until the first group is shown; a filter is the
time from a typed word to the list of the groups that have it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from adora_vl.report.__main__ import report
from adora_vl.rollout_log.rollouts import Record
from benchmarks.record_cost import diagram
from tests.browser import chromium


def write_run(
    folder: Path, rollouts: int, characters: int, problems: int, group: int = 8, step_groups: int = 16
) -> None:
    rng = random.Random(0)
    words = [f"w{number}" for number in range(3000)]
    images = [diagram(rng) for _ in range(problems)]
    record = Record(folder, 2.0, {"adora_mode": "attenuation", "adora_criteria": ["length"]})
    record.start(0)
    steps = rollouts // (group * step_groups)
    for step in range(1, steps + 1):
        rows: dict[str, list[Any]] = {}
        for _ in range(step_groups):
            problem = rng.randrange(problems)
            names = record.diagrams.keep(f"geometry3k/train/{problem}", [images[problem]])
            for _ in range(group):
                row = {
                    "step": step, "id": f"geometry3k/train/{problem}", "problem": "Find x to the nearest tenth.",
                    "answer": "7", "images": names, "completion": " ".join(rng.choices(words, k=characters // 6)),
                    "verdict": rng.choice(["correct", "wrong"]), "extracted": "7", "reason": "same_number",
                    "reward": rng.choice([1.0, 0.1]), "advantage_raw": rng.gauss(0, 1), "advantage": rng.gauss(0, 0.1),
                    "weight": 0.1, "tds": True, "pass_rate": 0.5, "longest_right": 700.0, "mean_wrong": 800.0,
                    "length": rng.randrange(200, 1200), "truncated": False, "drift": 0.01,
                }  # fmt: skip
                for name, value in row.items():
                    rows.setdefault(name, []).append(value)
        record.add(rows, group)
        record.flush(step)
    keys = ["reward", "adora/pass_rate", "adora/length_correct", "adora/length_wrong", "entropy", "seconds/rollout"]
    lines = [{"step": s, "kind": "train", **{key: rng.random() for key in keys}} for s in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_240)
    parser.add_argument("--characters", type=int, default=3000)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run, page = Path(temporary) / "run", Path(temporary) / "page.html"
        write_run(run, options.rollouts, options.characters, options.problems)
        began = time.perf_counter()
        views = report([run], page, max_rollouts=20_000, max_image_mb=30)
        made = time.perf_counter() - began
        shown = sum(len(group["rollouts"]) for group in views[0].groups)
        size = page.stat().st_size / 1e6
        print(f"{shown} rollouts of {options.characters} characters: made in {made:.1f} s, {size:.1f} MB")
        shown_after, opened, filtered = [], [], []
        with chromium(Path(temporary)) as browser:
            for _ in range(options.repeats):
                began = time.perf_counter()
                browser.open(page)
                opened.append(time.perf_counter() - began)
                shown_after.append(float(browser.js("document.documentElement.dataset.ready")) / 1000)
                began = time.perf_counter()
                browser.put("#filter-text", "w123 w")
                filtered.append(time.perf_counter() - began)
        print(f"curves and list after {statistics.median(shown_after):.2f} s, ", end="")
        print(f"all texts after {statistics.median(opened):.2f} s, ", end="")
        print(f"filtered by a word in {statistics.median(filtered):.2f} s")


if __name__ == "__main__":
    main()
