"""`python -m data_prep filter`: its options, and what it does with them."""

from __future__ import annotations

import argparse
from typing import Any

from adora_vl.commands import MAX_SEED, number, optional, path, text, whole
from adora_vl.errors import UserError
from data_prep.pixels import MAX_PIXELS, UNIT
from eval.prompting import OF_THE_RUN, settle_prompts, unusual_prompts

MAX_SAMPLES, MAX_TOKENS = 1024, 2**20


def add_filter(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser("filter", help="keep the problems that a model solves sometimes, by sampling answers")
    add = command.add_argument
    add("--input", type=path, required=True, metavar="DIR", help="a folder that data_prep made")
    add("--output", type=path, required=True, metavar="DIR", help="the answers are kept in DIR.samples, to go on from")
    add("--overwrite", action="store_true", help="replace another prepared dataset there")
    add("--keep", type=_rates, default="0.1:0.9", metavar="LOW:HIGH", help="pass rates to keep, default: %(default)s")
    add("--split", type=text, default="train", help="the split to filter, default: %(default)s; others are copied")
    add("--model", type=optional(text), metavar="M", help="a model folder, a hub id, or tiny")
    add("--revision", type=optional(text), metavar="NAME", help="of the model on the hub; default: its newest")
    add("--samples", type=whole(1, MAX_SAMPLES), default=8, metavar="N", help="per problem, default: %(default)s")
    add(
        "--predictions", type=optional(path), metavar="FILE.jsonl",
        help="instead of --model: answers that `python -m eval.geometry3k infer --split train --samples N` made",
    )  # fmt: skip
    add(
        "--system-prompt", type=optional(text), default=OF_THE_RUN, metavar="TEXT",
        help="or none; default: that of the model's own training, as its folder says, else the paper's",
    )  # fmt: skip
    add(
        "--prompt", type=optional(text), default=OF_THE_RUN, metavar="TEMPLATE",
        help="as adora_prompt of the training that the rows are for, such as '{problem} Choices: {choices}'; default: "
        "that of the model's own training, else the problem alone",
    )  # fmt: skip
    add("--temperature", type=number(0.01, 100), default=1.0, metavar="T", help="default: %(default)s")
    add("--max-tokens", type=whole(1, MAX_TOKENS), default=2048, metavar="N", help="per answer, default: %(default)s")
    add("--seed", type=whole(0, MAX_SEED), default=0, metavar="S", help="default: %(default)s")
    add("--rounding", action="store_true", help="accept rounded decimals")
    add("--engine", choices=("vllm", "transformers"), help="default: vllm where it is installed")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: the model's own")
    pixels = optional(whole(UNIT**2, MAX_PIXELS))
    add("--min-pixels", type=pixels, metavar="N", help="default: the model's own")
    add("--max-pixels", type=pixels, metavar="N", help="default: the model's own")
    add("--batch-size", type=optional(whole(1)), metavar="N", help="default: 256 for vllm, 64 for transformers")
    command.set_defaults(run=_filter)


def _rates(word: str) -> tuple[float, float]:
    """`LOW:HIGH`, two shares."""
    low, colon, high = word.partition(":")
    share = number(0, 1)
    if not colon:
        raise argparse.ArgumentTypeError(f"{word!r} has no colon; write LOW:HIGH, such as 0.1:0.9")
    ends = share(low), share(high)
    if ends[0] > ends[1]:
        raise argparse.ArgumentTypeError(f"{word!r} has the larger share first; write {high}:{low}")
    return ends


def _filter(arguments: argparse.Namespace) -> None:
    # the engines of `eval` are imported by this command alone
    from data_prep import filtering
    from data_prep.filtering import Keep
    from eval.engines import AnswerEngineSettings, check_model, default_engine

    if (arguments.model is None) == (arguments.predictions is None):
        raise UserError("model: give --model, to sample answers with, or --predictions, answers that are there")
    if arguments.min_pixels and arguments.max_pixels and arguments.min_pixels > arguments.max_pixels:
        raise UserError(f"min_pixels: {arguments.min_pixels} is over max_pixels, {arguments.max_pixels}; lower it")
    if arguments.predictions is not None:
        _refuse_prompts(arguments)
    filtering.check_input(arguments.input, arguments.split)
    filtering.check_output(arguments.input, arguments.output)
    predictions = arguments.predictions
    facts: dict[str, Any] = {"predictions": str(predictions)}
    if predictions is None:
        settings = AnswerEngineSettings(
            model=check_model(arguments.model),
            engine=arguments.engine or default_engine(),
            revision=arguments.revision,
            dtype=arguments.dtype,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
            min_pixels=arguments.min_pixels,
            max_pixels=arguments.max_pixels,
            batch_size=arguments.batch_size,
        )
        settle_prompts(arguments)
        folder = filtering.samples_folder(arguments.output)
        predictions = filtering.sample(
            arguments.input,
            arguments.split,
            folder,
            settings,
            samples=arguments.samples,
            system_prompt=arguments.system_prompt,
            prompt=arguments.prompt,
        )
        facts = {"model": settings.model, "samples": arguments.samples, "temperature": settings.temperature}
        facts |= unusual_prompts(arguments)
    manifest = filtering.filter_dataset(
        arguments.input,
        arguments.output,
        predictions,
        Keep(*arguments.keep),
        split=arguments.split,
        rounding=arguments.rounding,
        overwrite=arguments.overwrite,
        arguments=facts,
    )
    print(f"{arguments.output}: {filtering.in_words(manifest)}")


def _refuse_prompts(arguments: argparse.Namespace) -> None:
    """Answers that are there were asked for in their own words."""
    for name in ("prompt", "system_prompt"):
        if getattr(arguments, name) is not OF_THE_RUN:
            option = name.replace("_", "-")
            raise UserError(f"{name}: --{option} is for sampling, and --predictions has answers already; leave one out")
