"""`python -m adora_vl.models.tiny --output DIR`: build and warm-start the tiny model from scratch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from adora_vl.models.tiny.build import build_tiny_model
from adora_vl.models.tiny.warm_start import WarmStart


def main() -> None:
    defaults = WarmStart()
    parser = argparse.ArgumentParser(prog="python -m adora_vl.models.tiny", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write (replaced if it exists)")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="warm-start steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    options = parser.parse_args()
    short = min(defaults.short_prompt_steps, options.steps // 2)
    facts = build_tiny_model(options.output, WarmStart(options.steps, short, seed=options.seed))
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
