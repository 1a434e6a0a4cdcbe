"""The command line that the benchmarks share: verbs, options, and a YAML file of the same options."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from adora_vl.errors import UserError, nearest
from adora_vl.prompts import SYSTEM_PROMPT
from eval.engines import ENGINES, default_engine

VERBS = {"infer": "answer the problems", "score": "score answers", "run": "both"}
_NEEDED = {"infer": ("model", "data", "output"), "score": ("predictions", "output"), "run": ("model", "data", "output")}


AddOptions = Callable[[argparse.ArgumentParser], None]


class _Parser(argparse.ArgumentParser):
    """Wrong options are the user's mistake like any other: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def parse(
    argv: Sequence[str] | None,
    benchmark: str,
    split: str,
    add_data_options: AddOptions | None,
    add_score_options: AddOptions,
) -> argparse.Namespace:
    """The options of `python -m eval.{benchmark}`: command line over `--config` file over defaults.

    Raises `UserError` for an unknown option or key, a value of the wrong kind, or a needed option that is missing.
    """
    parser = _Parser(prog=f"python -m eval.{benchmark}", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{infer,score,run}")
    for verb, what in VERBS.items():
        sub = verbs.add_parser(verb, help=what, allow_abbrev=False)
        if verb == "score":
            sub.add_argument("--predictions", type=Path, metavar="FILE.jsonl")
        else:
            _add_inference(sub, split)
            sub.add_argument("--config", type=Path, metavar="FILE.yaml", help="these options, with _ for -")
            if add_data_options:
                add_data_options(sub)
        sub.add_argument(
            "--output", type=Path, help="a score file" if verb == "score" else "a folder; resumed if it is there"
        )
        if verb != "infer":
            add_score_options(sub)
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(words)
    config: Path | None = getattr(options, "config", None)
    if config is not None:
        # The file's options first: argparse keeps the last of two.
        # What is for the score may stand in the file of an `infer` too: it is the file of a `run`.
        unused = set(vars(score_defaults(add_score_options))) if options.verb == "infer" else set()
        options = parser.parse_args([options.verb, *_file_options(config, options, unused), *words[1:]])
    for name in _NEEDED[options.verb]:
        if getattr(options, name) is None:
            raise UserError(f"--{name} is missing; see {parser.prog} {options.verb} --help")
    return options


def _add_inference(parser: argparse.ArgumentParser, split: str) -> None:
    add = parser.add_argument
    add("--model", help="a model folder or a hub id")
    add("--revision", type=optional(str), metavar="NAME", help="of the model on the hub; default: its newest")
    add("--data", help="a folder or file, or a hub id")
    add("--split", default=split, help=f"default {split}")
    add("--engine", choices=ENGINES, default=default_engine(), help="default: vllm where it is installed")
    add("--limit", type=optional(whole(1)), metavar="N", help="the first N problems only")
    add("--max-tokens", type=whole(1), default=2048, metavar="N", help="of an answer; default 2048")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: the model's own")
    add("--min-pixels", type=optional(whole(1)), metavar="N", help="default: the model's own")
    add("--max-pixels", type=optional(whole(1)), metavar="N", help="default: the model's own")
    add(
        "--system-prompt",
        type=optional(str),
        default=SYSTEM_PROMPT,
        metavar="TEXT",
        help="or none; default: the training's",
    )
    add("--temperature", type=_temperature, default=0.0, help="0: greedy, the default")
    add("--samples", type=whole(1), default=1, metavar="K", help="answers a problem, for avg@k and pass@k")
    add("--seed", type=whole(0), default=0)
    add("--batch-size", type=optional(whole(1)), metavar="N", help="default: 256 for vllm, 64 for transformers")


def score_defaults(add_score_options: AddOptions) -> argparse.Namespace:
    """The options of a benchmark's score as they are when none is given."""
    parser = _Parser()
    add_score_options(parser)
    return parser.parse_args([])


def _file_options(path: Path, options: argparse.Namespace, unused: set[str]) -> list[str]:
    """The YAML file's keys as command-line words, so that they are checked in one place."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"config: {str(path)!r} cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise UserError(f"config: {str(path)!r} is not a mapping of options")
    known = set(vars(options)) - {"verb", "config"}
    words = []
    for key, value in content.items():
        if key in unused:
            continue
        if key not in known:
            raise UserError(f"config: {str(path)!r} has the unknown key {key!r}{nearest(str(key), known)}")
        option = "--" + str(key).replace("_", "-")
        if value is False and str(key).startswith("no_"):
            continue
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words.append(f"{option}={'none' if value is None else value}")
    return words


def whole(least: int) -> Callable[[str], int]:
    """A converter for argparse: whole numbers from `least` on."""

    def whole(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return whole


def optional(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter for argparse: `none`, else what `convert` makes of it."""
    return lambda text: None if text.lower() == "none" else convert(text)


def positive(text: str) -> float:
    """A converter for argparse: a number over 0."""
    value = _temperature(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number over 0")
    return value


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value
