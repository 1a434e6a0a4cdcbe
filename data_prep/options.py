"""Options that several commands of `python -m data_prep` have in common."""

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from adora_vl.conversion.quarantine import MAX_BROKEN_SHARE
from adora_vl.conversion.workers import MAX_WORKERS, usable_cores
from adora_vl.data.images import DEFAULT_FAMILY, MAX_PIXELS, SMALLEST_TOKEN_SIDE, VISION_BY_FAMILY
from adora_vl.utils.cli import (
    integer_between,
    none_or,
    number_between,
    path_option,
)
from adora_vl.utils.errors import UserError

Number = TypeVar("Number", int, float)


def add_output(command: argparse.ArgumentParser) -> None:
    """Add the options for the folder that a command writes."""
    command.add_argument(
        "--output", type=path_option, required=True, metavar="DIR", help="the folder to write"
    )
    command.add_argument(
        "--overwrite", action="store_true", help="replace another prepared dataset there"
    )


def add_family(command: argparse.ArgumentParser) -> None:
    """Add the option for the model family whose image tokens are counted."""
    help_text = "the model_type that counts image tokens, default: %(default)s"
    command.add_argument(
        "--family", choices=tuple(VISION_BY_FAMILY), default=DEFAULT_FAMILY, help=help_text
    )


def add_cleaning(command: argparse.ArgumentParser) -> None:
    """Add the options on pictures, duplicates and refused rows, which several commands share."""
    add = command.add_argument
    # The smallest limit is the pixels of one image token.
    pixel_limit = none_or(integer_between(SMALLEST_TOKEN_SIDE**2, MAX_PIXELS))
    add(
        "--max-pixels",
        type=pixel_limit,
        metavar="N",
        help="shrink larger images as the model does, default: keep them",
    )
    add(
        "--min-pixels",
        type=pixel_limit,
        metavar="N",
        help="enlarge smaller ones as the model does, default: keep them",
    )
    add_family(command)
    help_text = "cleaning processes, default: the cores, here %(default)s"
    add(
        "--workers",
        type=integer_between(1, MAX_WORKERS),
        default=usable_cores(),
        metavar="N",
        help=help_text,
    )
    add(
        "--keep-leaks",
        action="store_true",
        help="keep training rows that also occur in a held-out split",
    )
    help_text = "largest share of unusable rows that is not an error, default: %(default)s"
    add(
        "--allow-quarantined",
        type=number_between(0, 1),
        default=MAX_BROKEN_SHARE,
        metavar="SHARE",
        help=help_text,
    )


def number_range(
    argument: str, *, separator: str, convert: Callable[[str], Number]
) -> tuple[Number, Number]:
    """Return the two ends of a range: (2, 5) for the argument `2-5` and the separator `-`.

    `convert` makes a number of each end.

    Raises the error that argparse shows where the larger number stands first.
    """
    low_text, _, high_text = argument.partition(separator)
    low = convert(low_text)
    high = convert(high_text)
    if low > high:
        raise argparse.ArgumentTypeError(
            f"{argument!r} has the larger number first; write {high_text}{separator}{low_text}"
        )
    return low, high


def options_set_by_user(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options among `names` that the user has set, by name: {"rows": 100}.

    An option that the user has not set is None. It is left out, so that the function that gets the
    options takes its own default.
    """
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def refuse_options(arguments: argparse.Namespace, *names: str, why: str) -> None:
    """Raise `UserError` for the first of the options `names` that the user has set.

    `why` goes on after its value: `does not go with --source drawn`.
    """
    for name, value in options_set_by_user(arguments, *names).items():
        raise UserError(f"{name}: {value} {why}; leave one of them out")
