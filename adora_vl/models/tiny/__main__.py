"""`python -m adora_vl.models.tiny --output DIR [--family FAMILY]`: build and warm-start a tiny model from scratch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from adora_vl.commands import MAX_SEED, Parser, exit_code_of, imports, path, whole

with imports():
    from adora_vl.models.tiny.architecture import DEFAULT_FAMILY, TINY_FAMILIES
    from adora_vl.models.tiny.build import build_tiny_model
    from adora_vl.models.tiny.warm_start import WarmStart


def main(arguments: Sequence[str] | None = None) -> int:
    defaults = WarmStart()
    parser = Parser(prog="python -m adora_vl.models.tiny", description=__doc__)
    parser.add_argument("--output", type=path, required=True, metavar="DIR", help="replaced if it holds a tiny model")
    parser.add_argument("--family", choices=TINY_FAMILIES, default=DEFAULT_FAMILY, help="%(default)s by default")
    parser.add_argument(
        "--steps", type=whole(0), default=defaults.steps, help="warm-start steps (%(default)s); 0: random weights"
    )
    parser.add_argument("--seed", type=whole(0, MAX_SEED), default=defaults.seed)

    def command() -> None:
        options = parser.parse_args(arguments)
        short = min(defaults.short_prompt_steps, options.steps // 2)
        plan = WarmStart(options.steps, short, seed=options.seed)
        print(json.dumps(build_tiny_model(options.output, plan, options.family), indent=2))

    return exit_code_of(command, "nothing was written, and what was there before is unchanged")


if __name__ == "__main__":
    sys.exit(main())
