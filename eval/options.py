"""The command line that all benchmarks share: verbs, options, and a YAML file with the same options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from adora_vl.commands import MAX_SEED, Parser, is_null, number, optional, path, text, whole
from adora_vl.errors import UserError, nearest
from adora_vl.yaml_file import read_mapping
from data_prep.pixels import MAX_PIXELS, UNIT
from eval.engines import ENGINES, default_engine
from eval.prompting import OF_THE_RUN, settle_prompts

VERBS = {"infer": "answer the problems", "score": "score answers", "run": "both"}
_NEEDED = {"infer": ("model", "data", "output"), "score": ("predictions", "output"), "run": ("model", "data", "output")}


MAX_TOKENS, MAX_SAMPLES, MAX_BATCH = 2**20, 1024, 2**16
AddOptions = Callable[[argparse.ArgumentParser], None]


def parse(
    argv: Sequence[str] | None,
    benchmark: str,
    split: str,
    add_data_options: AddOptions | None,
    add_score_options: AddOptions,
) -> argparse.Namespace:
    """The options of `python -m eval.{benchmark}`. The command line overrides the `--config` file, which overrides
    defaults.

    Raises `UserError` for an unknown option or key, a value of the wrong kind, or a required option that is missing.
    """
    parser = build_parser(benchmark, split, add_data_options, add_score_options)
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(words)
    config: Path | None = getattr(options, "config", None)
    if config is not None:
        # The options of the file come first, because argparse keeps the last of two equal options.
        # `infer` ignores options for the score, so that one file serves `infer` and `run`.
        unused = set(vars(score_defaults(add_score_options))) if options.verb == "infer" else set()
        options = parser.parse_args([options.verb, *_file_options(config, options, unused), *words[1:]])
    for name in _NEEDED[options.verb]:
        if getattr(options, name) is None:
            raise UserError(f"--{name} is missing; see {parser.prog} {options.verb} --help")
    settle_prompts(options)
    return options


def build_parser(
    benchmark: str, split: str, add_data_options: AddOptions | None, add_score_options: AddOptions
) -> Parser:
    """The verbs of a benchmark and their options."""
    parser = Parser(prog=f"python -m eval.{benchmark}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{infer,score,run}")
    for verb, what in VERBS.items():
        sub = verbs.add_parser(verb, help=what)
        if verb == "score":
            sub.add_argument("--predictions", type=optional(path), metavar="FILE.jsonl")
            where = "a folder for score.json, or a file whose name ends in .json"
        else:
            _add_inference(sub, split)
            sub.add_argument("--config", type=optional(path), metavar="FILE.yaml", help="these options, with _ for -")
            if add_data_options:
                add_data_options(sub)
            where = "a folder; a run that is there is resumed"
        sub.add_argument("--output", type=optional(path), help=where)
        if verb != "infer":
            add_score_options(sub)
    return parser


def _add_inference(parser: argparse.ArgumentParser, split: str) -> None:
    """The options of `infer` and `run`. `split`: the default split of the benchmark."""
    add = parser.add_argument
    add("--model", type=optional(text), help="a model folder, a hub id, or tiny; with openai its name there")
    add("--revision", type=optional(text), metavar="NAME", help="of the model on the hub; default: its newest")
    add("--data", type=optional(text), help="a folder or file, or a hub id")
    add("--split", type=_split, default=split, help=f"default {split}")
    add("--engine", choices=ENGINES, default=default_engine(), help="default: vllm where it is installed")
    add(
        "--base-url",
        type=optional(text),
        metavar="URL",
        help="of the server for --engine openai; --model is its name there",
    )
    add("--concurrency", type=whole(1, 1024), default=16, metavar="N", help="calls at once, with openai; default 16")
    add(
        "--timeout",
        type=number(0.001, 86400),
        default=600.0,
        metavar="SECONDS",
        help="of a call, with openai; default 600",
    )
    add("--limit", type=optional(whole(1)), metavar="N", help="use only the first N problems")
    add("--max-tokens", type=whole(1, MAX_TOKENS), default=2048, metavar="N", help="limit per answer; default 2048")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: the model's own")
    add("--min-pixels", type=optional(whole(UNIT**2, MAX_PIXELS)), metavar="N", help="default: the model's own")
    add("--max-pixels", type=optional(whole(UNIT**2, MAX_PIXELS)), metavar="N", help="default: the model's own")
    add(
        "--system-prompt",
        type=optional(text),
        default=OF_THE_RUN,
        metavar="TEXT",
        help="or none; default: that of the model's own training, as its folder says, else the paper's",
    )
    add("--temperature", type=number(0.01, 100, also=0.0), default=0.0, help="0: greedy, the default")
    add("--samples", type=whole(1, MAX_SAMPLES), default=1, metavar="K", help="answers per problem, for avg@k, pass@k")
    add("--seed", type=whole(0, MAX_SEED), default=0)
    add(
        "--batch-size",
        type=optional(whole(1, MAX_BATCH)),
        metavar="N",
        help="default: 256 for vllm, else 64",
    )


def score_defaults(add_score_options: AddOptions) -> argparse.Namespace:
    """The default values of the options of a benchmark's score."""
    parser = Parser()
    add_score_options(parser)
    return parser.parse_args([])


def _split(word: str) -> str:
    """The name of a split, which cannot be null. Raises argparse's error for a bad value."""
    if is_null(word):
        raise argparse.ArgumentTypeError("null is no split; leave the option out for its default")
    return text(word)


def _file_options(file: Path, options: argparse.Namespace, unused: set[str]) -> list[str]:
    """The keys of the YAML file as command-line words, so that both are checked by the same code."""
    content = read_mapping("config", file)
    known = set(vars(options)) - {"verb", "config"}
    words = []
    for key, value in content.items():
        if key in unused:
            continue
        if key not in known:
            raise UserError(f"config: {str(file)!r} has the unknown key {key!r}{nearest(str(key), known)}")
        if isinstance(value, list | dict):
            raise UserError(f"config: {key}: {value!r:.60} in {str(file)!r} is not one value; write one")
        option = "--" + str(key).replace("_", "-")
        is_switch = isinstance(getattr(options, key), bool)
        if (value is False and str(key).startswith("no_")) or (value is None and is_switch):
            continue
        if isinstance(value, bool) and is_switch:
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words.append(f"{option}={'null' if value is None else value}")
    return words
