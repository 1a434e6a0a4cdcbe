"""`python -m adora_vl.builtin --output DIR [--start NAME]`: build a tiny model.

`tiny` is built from scratch, for any of the families, of any width, depth and dtype;
`tiny_perimeter` and `tiny_zoom` go on from the shipped `tiny`. `--find NAME` prints the folder of a
tiny model, built in the cache where it is missing.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from adora_vl.builtin import (
    DEFAULT_FAMILY,
    DTYPES,
    HEAD_SIZE,
    SHIPPED_SIZE,
    TINY_FAMILIES,
    ModelSize,
    WarmStart,
)
from adora_vl.models.load import TINY_MODEL, TINY_MODELS
from adora_vl.utils.cli import MAX_SEED, Parser, integer_between, path_option, run_command
from adora_vl.utils.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `python -m adora_vl.builtin`, and return its exit code.

    `arguments`: of the command; None for those of this process.
    """

    def command() -> None:
        """Print the folder of a tiny model, or build one and print how it was made."""
        options = _parser().parse_args(arguments)
        size = ModelSize(width=options.width, layers=options.layers, dtype=options.dtype)
        if size != SHIPPED_SIZE and options.start != TINY_MODEL:
            raise UserError(
                f"width, layers, dtype: {options.start} goes on from the shipped {TINY_MODEL}, "
                f"which has its own; leave them out, or build --start {TINY_MODEL}"
            )
        if options.find:
            _print_folder(options.find)
        else:
            _build(options, size)

    return run_command(
        command, interrupt_note="nothing was written, and what was there before is unchanged"
    )


def _parser() -> Parser:
    """Return the parser of the command's arguments."""
    defaults = WarmStart()
    parser = Parser(prog="python -m adora_vl.builtin", description=__doc__)
    by_default = "%(default)s by default"
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "--output", type=path_option, metavar="DIR", help="replaced if it holds a tiny model"
    )
    action.add_argument(
        "--find",
        choices=TINY_MODELS,
        help="print its folder, built if it is missing",
    )
    parser.add_argument("--start", choices=TINY_MODELS, default=TINY_MODEL, help=by_default)
    parser.add_argument("--family", choices=TINY_FAMILIES, default=DEFAULT_FAMILY, help=by_default)
    steps_help = "of the warm start (%(default)s); 0: random weights"
    parser.add_argument("--steps", type=integer_between(0), default=defaults.steps, help=steps_help)
    parser.add_argument("--seed", type=integer_between(0, MAX_SEED), default=defaults.seed)
    width_help = f"a multiple of {HEAD_SIZE}, the size of a head ({by_default})"
    parser.add_argument("--width", type=int, default=SHIPPED_SIZE.width, help=width_help)
    layers_help = f"of the language model and of the vision tower ({by_default})"
    parser.add_argument("--layers", type=int, default=SHIPPED_SIZE.layers, help=layers_help)
    dtype_help = f"of the saved weights: {' or '.join(DTYPES)} ({by_default})"
    parser.add_argument("--dtype", default=SHIPPED_SIZE.dtype, help=dtype_help)
    return parser


def _print_folder(name: str) -> None:
    """Print the folder of a tiny model, which is built first if it is missing."""
    from adora_vl.builtin.builtin_data import resolve_model

    with redirect_stdout(sys.stderr):  # what its training prints
        folder = resolve_model(name)
    print(folder)


def _build(options: argparse.Namespace, size: ModelSize) -> None:
    """Build the tiny model that the options ask for, and print how it was made."""
    from adora_vl.builtin.builtin_data import RECIPE_BY_TINY_MODEL
    from adora_vl.builtin.small_model import train_and_save
    from adora_vl.builtin.tiny_vl import build_tiny_model

    if options.start == TINY_MODEL:
        short_prompt_steps = min(WarmStart().short_prompt_steps, options.steps // 2)
        plan = WarmStart(
            steps=options.steps, short_prompt_steps=short_prompt_steps, seed=options.seed
        )
        facts = build_tiny_model(options.output, plan, family=options.family, size=size)
    else:
        recipe = RECIPE_BY_TINY_MODEL[options.start]
        facts = train_and_save(options.output, recipe.plan, recipe.prepare)
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    sys.exit(main())
