"""The commands of `python -m data_prep` and their options."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from adora_vl.conversion.columns import ANSWER_IS, PRESETS, columns_of_words
from adora_vl.conversion.convert import Conversion, convert
from adora_vl.conversion.pipeline import MAX_WORKERS, usable_cores
from adora_vl.conversion.quarantine import MAX_SHARE
from adora_vl.data.dataset import SPLITS
from adora_vl.data.images import DEFAULT_FAMILY, MAX_PIXELS, UNIT, VISIONS
from adora_vl.evals.inference.provenance import PROMPTS, settled_prompts, unusual_prompts
from adora_vl.evals.inference.requests import EngineOptions, SamplingOptions, default_engine
from adora_vl.evals.options import OF_THE_RUN, add_options, options_from
from adora_vl.synthetic.drawing import STYLES
from adora_vl.synthetic.families import FAMILIES
from adora_vl.synthetic.generate import KNOWN, LEVELS, MAX_CHOICES
from adora_vl.synthetic.generated import (
    DEFAULT_SIZE,
    DEFAULT_TEST_ROWS,
    prepare_drawn,
    prepare_knights_table,
    puzzles,
    synthetic,
)
from adora_vl.synthetic.knights import PEOPLE, QUESTIONS
from adora_vl.utils.cli import (
    MAX_SEED,
    Commands,
    Parser,
    exit_code_of,
    number,
    optional,
    path,
    text,
    whole,
)
from adora_vl.utils.errors import UserError
from data_prep.geometry3k import DIAGRAMS, PRESET, SOURCES, Options, prepare_geometry3k
from data_prep.solve import add_solve
from data_prep.survey import GALLERY_ROWS, describe, print_counts, print_prompt, survey
from data_prep.variants import add_variants

MAX_ROWS = 10_000_000
_CONVERT_EXAMPLES = """\
examples:
  python -m data_prep convert --input tasks.csv --output data/mine \\
      --columns problem=Question answer=Solution images=Photo
  python -m data_prep convert --input train.parquet --output data/mine --preset verl
"""
SIZES = (28, 1024)  # below, a label is not readable; above, the oversampled canvas takes gigabytes


def add_synthetic(commands: Commands) -> None:
    """Add the command `synthetic`, which draws problems."""
    command = commands.add_parser(
        "synthetic", help="drawn geometry problems; equal arguments give equal problems"
    )
    _add_drawn(command, _synthetic)
    add = command.add_argument
    add(
        "--size",
        type=whole(*SIZES),
        default=DEFAULT_SIZE,
        metavar="PIXELS",
        help="side length, default: %(default)s",
    )
    add(
        "--families",
        type=_names,
        default=(),
        metavar="A,B",
        help=f"of {', '.join(KNOWN)}; default: {', '.join(FAMILIES)}",
    )
    add(
        "--level",
        type=whole(min(LEVELS), max(LEVELS)),
        default=1,
        help="difficulty, 1 to 3, default: %(default)s",
    )
    add(
        "--styles",
        type=_names,
        default=("plain",),
        metavar="A,B",
        help=f"of {', '.join(STYLES)}; default: plain",
    )
    help_text = "answers to choose from, default: 0, an open question"
    choices = whole(2, MAX_CHOICES)
    add(
        "--choices",
        type=lambda word: 0 if word == "0" else choices(word),
        default=0,
        metavar="N",
        help=help_text,
    )
    add(
        "--figures",
        action="store_true",
        default=None,
        help="add each problem's facts and its solved figure, on which the reward `steps` checks "
        "what a response says",
    )


def add_knights(commands: Commands) -> None:
    """Add the command `knights`, which draws puzzles or reads published ones."""
    command = commands.add_parser(
        "knights", help="knights-and-knaves puzzles, texts without images, with one solution"
    )
    _add_drawn(command, _knights, rows_required=False)
    add = command.add_argument
    add(
        "--people",
        type=optional(_people),
        metavar="A-B",
        help="per puzzle, default: {}-{}".format(*PEOPLE),
    )
    add("--source", choices=("drawn", "parquet"), default="drawn", help="default: %(default)s")
    add(
        "--input",
        type=optional(path),
        metavar="PATH",
        help="parquet: the reference's data/kk, or a file of it",
    )
    add(
        "--question",
        choices=QUESTIONS,
        help="parquet: ask for a box (default), or leave that to the system prompt",
    )


def add_output(command: argparse.ArgumentParser) -> None:
    """Add the options for the folder that a command writes."""
    command.add_argument("--output", type=path, required=True, metavar="DIR")
    command.add_argument(
        "--overwrite", action="store_true", help="replace another prepared dataset there"
    )


def _add_drawn(command: argparse.ArgumentParser, run: Any, *, rows_required: bool = True) -> None:
    """Add the options of a data set that is drawn, and the function that runs the command.

    `rows_required`: whether the number of rows has to be given.
    """
    add_output(command)
    add = command.add_argument
    add(
        "--rows", type=whole(1, MAX_ROWS), required=rows_required, metavar="N", help="training rows"
    )
    add("--test-rows", type=whole(0, MAX_ROWS), metavar="M", help=f"default: {DEFAULT_TEST_ROWS}")
    add("--seed", type=whole(0, MAX_SEED), metavar="S", help="default: 0")
    command.set_defaults(run=run)


def _names(word: str) -> tuple[str, ...]:
    """Return the names in a word, which stand with commas between them.

    Raises the error that argparse shows for an empty name.
    """
    names = tuple(name.strip() for name in word.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(
            f"{word!r} has an empty name; write names with commas between them"
        )
    return names


def _ends(sign: str, convert: Callable[[str], Any], word: str) -> Any:
    """Return the two ends of a range with a sign between them, the smaller one first."""
    first, _, last = word.partition(sign)
    low = convert(first)
    high = convert(last)
    if low > high:
        raise argparse.ArgumentTypeError(
            f"{word!r} has the larger number first; write {last}{sign}{first}"
        )
    return low, high


def _people(word: str) -> Any:
    """Return `A-B` or one number."""
    return _ends("-", whole(*PEOPLE), word if "-" in word else f"{word}-{word}")


_DRAWN_ONLY = ("rows", "test_rows", "seed", "people")
_PARQUET_ONLY = ("input", "question")


def _knights(arguments: argparse.Namespace) -> None:
    """Run `knights`: draw puzzles, or read published ones from Parquet.

    Raises `UserError` for an option that belongs to the other source.
    """
    is_drawn = arguments.source == "drawn"
    needed, foreign = ("rows", _PARQUET_ONLY) if is_drawn else ("input", _DRAWN_ONLY)
    for name, value in _given(arguments, *foreign).items():
        raise UserError(
            f"{name}: {value} does not go with --source {arguments.source}; leave one of them out"
        )
    if getattr(arguments, needed) is None:
        raise UserError(f"{needed}: --source {arguments.source} needs it; give --{needed}")
    if is_drawn:
        drawn = puzzles(**_given(arguments, *_DRAWN_ONLY))
        manifest = prepare_drawn(arguments.output, drawn, overwrite=arguments.overwrite)
    else:
        options = _given(arguments, "question", "overwrite")
        manifest = prepare_knights_table(arguments.output, arguments.input, **options)
    print_counts(arguments.output, manifest)


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options that the user gave; the functions that take them have the default values."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _synthetic(arguments: argparse.Namespace) -> None:
    """Run `synthetic`: draw the problems, and print how many there are."""
    names = ("rows", "test_rows", "seed", "size", "families", "level", "styles", "choices")
    drawn = synthetic(**_given(arguments, *names, "figures"))
    print_counts(
        arguments.output, prepare_drawn(arguments.output, drawn, overwrite=arguments.overwrite)
    )


MAX_SAMPLES = 1024


def add_filter(commands: Commands) -> None:
    """Add the command `filter`, which keeps the problems that a model solves sometimes."""
    command = commands.add_parser(
        "filter", help="keep the problems that a model solves sometimes, by sampling answers"
    )
    add = command.add_argument
    add("--input", type=optional(path), metavar="DIR", help="a folder that data_prep made")
    add(
        "--output",
        type=optional(path),
        metavar="DIR",
        help="the answers are kept in DIR.samples, to go on from",
    )
    add(
        "--attenuation",
        type=optional(path),
        metavar="PLACE",
        help="filter nothing: say whether ADORA's attenuation would act on the answers of a run's "
        "folder, or on stored ones (DIR.samples, or a predictions file)",
    )
    add("--overwrite", action="store_true", help="replace another prepared dataset there")
    add(
        "--keep",
        type=_rates,
        default="0.1:0.9",
        metavar="LOW:HIGH",
        help="pass rates to keep, default: %(default)s",
    )
    add(
        "--split",
        type=text,
        default="train",
        help="the split to filter, default: %(default)s; others are copied",
    )
    add("--model", type=optional(text), metavar="M", help="a model folder, a hub id, or tiny")
    add_options(command, SamplingOptions)
    add(
        "--samples",
        type=whole(1, MAX_SAMPLES),
        default=8,
        metavar="N",
        help="per problem, default: %(default)s",
    )
    help_text = (
        "instead of --model: answers that `python -m eval.problems infer --split train "
        "--samples N` made"
    )
    add("--predictions", type=optional(path), metavar="FILE.jsonl", help=help_text)
    add(
        "--prompt",
        type=optional(text),
        default=OF_THE_RUN,
        metavar="TEMPLATE",
        help="as adora_prompt of the training that the rows are for, or none; default: that of "
        "the model's own training, else with the choices listed",
    )
    add(
        "--temperature",
        type=number(0.01, 100),
        default=1.0,
        metavar="T",
        help="default: %(default)s",
    )
    add("--rounding", action="store_true", help="accept rounded decimals")
    add("--engine", choices=("vllm", "transformers"), help="default: vllm where it is installed")
    command.set_defaults(run=_filter)


def _rates(word: str) -> Any:
    """Return `LOW:HIGH`, two shares."""
    if ":" not in word:
        raise argparse.ArgumentTypeError(f"{word!r} has no colon; write LOW:HIGH, such as 0.1:0.9")
    return _ends(":", number(0, 1), word)


def _check_filter_arguments(arguments: argparse.Namespace) -> None:
    """Raise `UserError` where folders are missing, or answers come from two places or from none."""
    for name in ("input", "output"):
        if getattr(arguments, name) is None:
            raise UserError(f"{name}: give --{name} DIR")
    if (arguments.model is None) == (arguments.predictions is None):
        raise UserError(
            "model: give --model, to sample answers with, or --predictions, answers that are there"
        )
    if arguments.predictions is None:
        return
    for name in ("prompt", "system_prompt"):
        # Answers that are stored were sampled with prompts of their own.
        if getattr(arguments, name) is not OF_THE_RUN:
            option = name.replace("_", "-")
            raise UserError(
                f"{name}: --{option} is for sampling, and --predictions has answers already; "
                "leave one out"
            )


def _filter(arguments: argparse.Namespace) -> None:
    """Run `filter`: sample answers, or read stored ones, and write the problems that are kept.

    With `--attenuation` nothing is filtered; it prints what ADORA would do with stored answers.
    """
    # the engines of `eval` are imported by this command alone
    from adora_vl.evals.inference.engines import settings_of
    from data_prep import filter as filtering
    from data_prep import forecast

    if arguments.attenuation is not None:
        print("\n".join(forecast.of(arguments.attenuation).lines()))
        return
    _check_filter_arguments(arguments)
    filtering.check_input(arguments.input, arguments.split)
    filtering.check_output(arguments.input, arguments.output)
    predictions = arguments.predictions
    facts: dict[str, Any] = {"predictions": str(predictions)}
    if predictions is None:
        engine = arguments.engine or default_engine()
        settings = settings_of(options_from(EngineOptions, arguments, engine=engine))
        prompt_options = {name: getattr(arguments, name) for name in PROMPTS}
        prompts = settled_prompts(arguments.model, prompt_options)
        predictions = filtering.sample(
            arguments.input,
            arguments.split,
            filtering.samples_folder(arguments.output),
            settings,
            samples=arguments.samples,
            system_prompt=prompts["system_prompt"],
            prompt=prompts["prompt"],
        )
        facts = {
            "model": settings.model,
            "samples": arguments.samples,
            "temperature": settings.temperature,
        }
        facts |= unusual_prompts(prompts)
    low, high = arguments.keep
    manifest = filtering.filter_dataset(
        arguments.input,
        arguments.output,
        predictions,
        filtering.Keep(low=low, high=high),
        split=arguments.split,
        rounding=arguments.rounding,
        overwrite=arguments.overwrite,
        arguments=facts,
    )
    print(f"{arguments.output}: {filtering.in_words(manifest)}")
    if arguments.predictions is None and arguments.samples > 1:
        print("\n".join(["", *forecast.of(predictions).lines()]))


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Returns the exit code: 0, 2 with one line where the user's input is wrong, 130 after Ctrl-C.
    """

    def command() -> None:
        """Run the chosen command, without progress bars in log files."""
        arguments = parser().parse_args(argv)
        if not sys.stderr.isatty():
            from datasets import disable_progress_bars
            from huggingface_hub.utils.tqdm import (
                disable_progress_bars as disable_hub_progress_bars,
            )

            disable_progress_bars()  # `datasets` and the hub draw their own into log files too
            disable_hub_progress_bars()
        arguments.run(arguments)

    return exit_code_of(command, "nothing was written, and what was there before is unchanged")


def parser() -> Parser:
    """Return the parser of `python -m data_prep`, with all of its commands."""
    top = Parser(
        prog="python -m data_prep",
        description="Make, and look at, data sets for training and evaluation.",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    add_synthetic(commands)
    add_knights(commands)
    _add_geometry3k(commands)
    _add_convert(commands)
    add_filter(commands)
    add_solve(commands)
    add_variants(commands)

    inspect = commands.add_parser(
        "inspect", help="what a prepared folder holds, as text and as an HTML page"
    )
    inspect.add_argument("folder", type=path, metavar="DIR")
    inspect.add_argument(
        "--html", type=optional(path), metavar="FILE", help="file for the page, default: DIR.html"
    )
    inspect.add_argument("--text-only", action="store_true", help="write no page")
    inspect.add_argument(
        "--model", type=optional(text), metavar="M", help="measure problems with its tokenizer"
    )
    _add_family(inspect)
    inspect.set_defaults(run=_inspect)
    return top


def _add_family(command: argparse.ArgumentParser) -> None:
    """Add the option for the model family whose image tokens are counted."""
    help_text = "the model_type that counts image tokens, default: %(default)s"
    command.add_argument("--family", choices=tuple(VISIONS), default=DEFAULT_FAMILY, help=help_text)


def _add_geometry3k(commands: Commands) -> None:
    """Add the command `geometry3k`."""
    command = commands.add_parser(
        "geometry3k", help="Geometry3K from the hub, Parquet, its own folders or redrawn"
    )
    add_output(command)
    add = command.add_argument
    add("--source", choices=SOURCES, required=True)
    add(
        "--input",
        type=optional(text),
        metavar="ID_OR_PATH",
        help=f"an id for hub (default: {PRESET.id}), else a path",
    )
    add(
        "--revision",
        type=optional(text),
        metavar="COMMIT",
        help="of the hub: commit, tag or branch, default: newest",
    )
    add(
        "--diagram",
        choices=DIAGRAMS,
        help="intergps: the picture as printed, or with every vertex lettered",
    )
    help_text = (
        "logic-forms, facts: a table with the questions (messages, solution, images), whose "
        "diagrams are redrawn"
    )
    add("--texts", type=optional(text), metavar="FILE", help=help_text)
    _add_cleaning(command)
    add(
        "--limit",
        type=optional(whole(1)),
        metavar="N",
        help="only N rows a split: the first, or with --seed a sample",
    )
    add("--seed", type=optional(whole(0, MAX_SEED)), metavar="S", help="seed of the sample")
    command.set_defaults(run=_geometry3k)


def _add_cleaning(command: argparse.ArgumentParser) -> None:
    """Add the options on pictures, duplicates and refused rows, which several commands share."""
    add = command.add_argument
    pixels = optional(whole(UNIT**2, MAX_PIXELS))  # from one image token on
    add(
        "--max-pixels",
        type=pixels,
        metavar="N",
        help="shrink larger images as the model does, default: keep them",
    )
    add(
        "--min-pixels",
        type=pixels,
        metavar="N",
        help="enlarge smaller ones as the model does, default: keep them",
    )
    _add_family(command)
    help_text = "cleaning processes, default: the cores, here %(default)s"
    add(
        "--workers", type=whole(1, MAX_WORKERS), default=usable_cores(), metavar="N", help=help_text
    )
    add(
        "--keep-leaks",
        action="store_true",
        help="keep training rows that also occur in a held-out split",
    )
    help_text = "largest share of unusable rows that is not an error, default: %(default)s"
    add(
        "--allow-quarantined", type=number(0, 1), default=MAX_SHARE, metavar="SHARE", help=help_text
    )


def _add_convert(commands: Commands) -> None:
    """Add the command `convert`, which prepares a table of the user's or of the hub."""
    command = commands.add_parser(
        "convert",
        help="your own data: JSON, CSV, Excel, Parquet, a folder, a hub id",
        epilog=_CONVERT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_output(command)
    add = command.add_argument
    add(
        "--preset",
        choices=tuple(PRESETS),
        help="a published data set, or rows of another trainer; for --columns",
    )
    help_text = "a table, a folder with one, or a hub id; default: that of the preset"
    add("--input", type=optional(text), metavar="PATH_OR_ID", help=help_text)
    add(
        "--columns",
        nargs="+",
        metavar="NAME=COLUMN",
        help="problem=question answer=label, and images=, choices=, id= where there are such; "
        "others are kept as texts; a dot leads into an object, "
        "answer=reward_model.ground_truth",
    )
    add(
        "--decimal-comma",
        action="store_true",
        default=None,
        help="52,5 is 52.5, and 1.234,5 is 1234.5",
    )
    add(
        "--answer-is",
        choices=ANSWER_IS,
        help="of a whole number beside choices: one of them, or its place",
    )
    add(
        "--image-dir",
        type=optional(path),
        metavar="DIR",
        help="where paths of images begin, default: by the table; also of paths of another machine",
    )
    add(
        "--keep-options-in-text",
        action="store_true",
        default=None,
        help="options in the text of a problem do not become choices",
    )
    add(
        "--text-answers",
        action="store_true",
        default=None,
        help="sentences are reference answers too, right for the same text alone",
    )
    add(
        "--name",
        type=optional(text),
        metavar="WORD",
        help="of the data set, for its rows' ids; default: the input's",
    )
    add(
        "--split-name",
        choices=SPLITS,
        help="of a single table, in place of what the name of its file says",
    )
    add(
        "--drop-instruction",
        action="store_true",
        help="take off what problems of other trainers say on how to answer",
    )
    _add_split_options(command)
    _add_hub_options(command)
    _add_cleaning(command)
    command.set_defaults(run=_convert)


def _add_split_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `convert` that say how many rows there are, and which are held out."""
    add = command.add_argument
    add(
        "--test-share",
        type=number(0, 0.99),
        default=0.0,
        metavar="SHARE",
        help="of train, to become the split test",
    )
    add(
        "--seed",
        type=whole(0, MAX_SEED),
        default=0,
        metavar="S",
        help="of the test share, default: %(default)s",
    )
    add(
        "--limit", type=optional(whole(1)), metavar="N", help="only the first N rows of every split"
    )


def _add_hub_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `convert` that say which part of a dataset of the hub is read."""
    add = command.add_argument
    add(
        "--revision",
        type=optional(text),
        metavar="COMMIT",
        help="of a hub id: commit, tag or branch",
    )
    add(
        "--subset",
        type=optional(text),
        metavar="NAME",
        help="of a hub id: one of its configurations",
    )
    add(
        "--splits",
        type=_split_pair,
        nargs="+",
        default=[],
        metavar="OURS=THEIRS",
        help="of a hub id: test=testmini",
    )


def _split_pair(word: str) -> tuple[str, str]:
    """Return our split and the data set's from `OURS=THEIRS`.

    Raises the error that argparse shows for anything else.
    """
    ours, _, theirs = word.partition("=")
    if ours not in SPLITS or not theirs.strip():
        raise argparse.ArgumentTypeError(
            f"{word!r:.60} is not OURS=THEIRS; before the = stands {', '.join(SPLITS)}"
        )
    return ours, theirs


def _geometry3k(arguments: argparse.Namespace) -> None:
    """Run `geometry3k`: prepare the data set, and print its counts and one prompt."""
    options = Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})
    manifest = prepare_geometry3k(
        arguments.output,
        source=arguments.source,
        location=arguments.input,
        revision=arguments.revision,
        options=options,
        workers=arguments.workers,
        overwrite=arguments.overwrite,
    )
    print_counts(arguments.output, manifest)
    print_prompt(arguments.output, manifest)


def _convert(arguments: argparse.Namespace) -> None:
    """Run `convert`: prepare a table, and print its counts and one prompt.

    Raises `UserError` where the columns or the input are missing.
    """
    preset = PRESETS.get(arguments.preset)
    name = arguments.name
    if (preset is None) == (arguments.columns is None):
        raise UserError(
            "columns: give --columns, such as problem=question answer=label, or --preset"
        )
    columns = preset.columns if preset else columns_of_words(arguments.columns)
    reading = {
        "decimal_comma": arguments.decimal_comma,
        "answer_is": arguments.answer_is or "",
        "image_dir": str(arguments.image_dir or ""),
        "text_answers": arguments.text_answers,
        "keep_options_in_text": arguments.keep_options_in_text,
    }
    # What the user does not give stays as the preset or the mapping has it.
    columns = replace(columns, **{name: value for name, value in reading.items() if value})
    if preset and preset.id:
        name = name or arguments.preset  # the data set's own
    location = arguments.input or (preset.id if preset else None)
    if location is None:
        raise UserError("input: missing; give --input, a table, a folder with one, or a hub id")
    options = {field.name: getattr(arguments, field.name) for field in fields(Conversion)}
    conversion = Conversion(**{**options, "name": name, "splits": dict(arguments.splits)})
    manifest = convert(
        location,
        arguments.output,
        columns,
        options=conversion,
        revision=arguments.revision,
        workers=arguments.workers,
        overwrite=arguments.overwrite,
    )
    print_counts(arguments.output, manifest)
    print_prompt(arguments.output, manifest)


def _inspect(arguments: argparse.Namespace) -> None:
    """Run `inspect`: read every row of a data set, print its figures and write its page."""
    gallery = 0 if arguments.text_only else GALLERY_ROWS
    folder = arguments.folder.resolve()
    path = arguments.html or folder.with_name(f"{folder.name}.html")
    if not arguments.text_only:
        from data_prep.survey_page import check_page, write_page  # matplotlib takes a second

        check_page(path)  # before every row is read
    overview = survey(
        arguments.folder, gallery=gallery, model=arguments.model, family=arguments.family
    )
    print(describe(overview))
    if not arguments.text_only:
        write_page(overview, path)
        print(f"\npage: {path}")
