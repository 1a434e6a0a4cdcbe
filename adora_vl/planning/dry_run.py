"""The dry run: `python -m adora_vl.train --config FILE --dry-run`.

It prints what a run would do (batches, prompts, learning rate) and whether it fits into memory and
on disk, without loading a weight. It makes the same checks as a run, in the same order.
"""

import json
import math
import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml
from trl import ModelConfig

from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
from adora_vl.config.batch_plan import regroup_obstacle
from adora_vl.config.command import CliArgs
from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.config.sharding import Sharding
from adora_vl.data.dataset import example_row, row_count
from adora_vl.data.prompt_lengths import ContextLimit, LengthCheck, Measured, sizes_in
from adora_vl.data.prompts import Message, as_text, conversation_with_images, shown_lines, template
from adora_vl.models.activations import MicroBatch
from adora_vl.models.families import family_of, sees_images
from adora_vl.models.shape import ModelShape
from adora_vl.planning import memory
from adora_vl.planning.memory import MOST_IMAGE_TOKENS, Engine, Setup, Sharing
from adora_vl.planning.memory_report import memory_lines
from adora_vl.preflight.check_machine import ANY_LENGTH, is_curve, schedule_of
from adora_vl.preflight.facts import ResolvedRun
from adora_vl.prepare import prepare_on_paper
from adora_vl.rollout.engine_settings import engine_dtype
from adora_vl.utils.cli import amount, plain, quantile, section, spelled
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import GIB, check_folder, check_json, replace_file, written_to
from adora_vl.utils.secrets import masked

ASSUMED_CARD_GIB = 80.0
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Plan:
    """A run on paper: what was checked, measured and predicted before a weight is loaded."""

    run: ResolvedRun
    script: AdoraScriptArguments
    lengths: Measured
    rows: int | None
    """Rows that the run trains on; None where the dataset is not on this machine."""
    setup: Setup
    card: int
    """Bytes of memory of one GPU, or one process's share of this machine for a run on its CPU."""
    card_name: str
    notes: list[str]

    @property
    def limit(self) -> ContextLimit | None:
        """What bounds prompt and answer together; None where it is unknown or images have no count."""
        return self.run.prompts.lengths.limit

    @property
    def checks(self) -> list[LengthCheck]:
        """The length checks of training and evaluation prompts, before any prompt is left out."""
        return self.run.prompts.lengths.checks if self.rows is not None else []

    @property
    def image_room(self) -> int:
        """Image tokens that fit beside the longest text and a whole answer.

        Below 1 there is no room for any image.
        """
        if self.limit is None:
            return MOST_IMAGE_TOKENS
        return self.limit.tokens - self.limit.needed(self.lengths.longest_text)


def make_plan(command: CliArgs, options: DryRunOptions, *, with_few_rows: bool = False) -> Plan:
    """Make every check that a run makes before it loads weights, and predict lengths and memory.

    `with_few_rows`: plan also for rows that do not fill a generation. Raises `UserError` with the
    line that a run would stop with.
    """
    run = prepare_on_paper(command, options)
    if run.messages.refusals and not with_few_rows:
        raise UserError(run.messages.refusals[0])
    script = run.script
    lengths = run.data.measured
    sharding = run.context.sharding
    assert script is not None, "a dry run has the keys of a command, and measures"
    assert lengths is not None, "a dry run has the keys of a command, and measures"
    notes = [*run.messages.notes, *_mixture(run), *_larger_pictures(run)]
    if family_of(run.model.config) is None and sees_images(run.model.config):
        notes.append(
            f"the images of model_type {run.model.config.model_type} are counted as those of "
            "Qwen2.5-VL, and what its vision tower keeps for the backward pass is not in the "
            "prediction"
        )
    setup = make_setup(
        run.config,
        model=run.request.model.keys,
        shape=run.shape,
        sharding=sharding,
        lengths=lengths,
    )
    rows = run.data.rows
    return Plan(
        run,
        script,
        lengths,
        rows,
        setup,
        *_card(options, run.config, sharding.local_processes),
        notes,
    )


def _mixture(run: ResolvedRun) -> list[str]:
    """Return how several data sets are mixed, as lines of the report."""
    if run.data.train is None or run.script is None or len(run.data.folders) == 1:
        return []
    split = run.script.dataset_train_split
    shares = run.script.adora_mixture
    parts = [
        f"{Path(folder).name} {amount(row_count(Path(folder), split), 'row')}"
        for folder in run.data.folders
    ]
    if shares is not None:
        parts = [f"{part} at {share:.0%}" for part, share in zip(parts, shares, strict=True)]
    return [
        f"{len(parts)} data sets are mixed into {len(run.data.train)} rows per epoch: "
        f"{', '.join(parts)}"
    ]


def _larger_pictures(run: ResolvedRun) -> list[str]:
    """Return how many pictures have more pixels than the model sees, if the model may zoom."""
    if run.data.train is None or "zoom" not in run.tools.functions:
        return []
    sizes = []
    for row_sizes in sizes_in(run.data.train.data.table):
        sizes += [size for size in row_sizes if size is not None]
    larger = sum(width * height > run.prompts.lengths.pixels.high for width, height in sizes)
    consequence = ""
    if not larger:
        consequence = ", so zoom shows nothing new; prepare the data with a larger --max-pixels"
    total = amount(len(sizes), "picture")
    return [f"{larger} of {total} are larger than the model sees them{consequence}"]


def _card(options: DryRunOptions, config: AdoraGRPOConfig, processes: int) -> tuple[int, str]:
    """Return the memory of a card in bytes, and the card in words.

    It is what the user says, else this machine's, else an assumed one. Without a GPU it is a
    process's share of the machine's memory.
    """
    if options.card_gib is not None:
        return int(options.card_gib * GIB), f"a card of {options.card_gib:g} GiB"
    import torch

    if config.use_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes
        return memory, f"a process's share of this machine's memory, {memory / GIB:.0f} GiB"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return int(
            properties.total_memory
        ), f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"
    assumed_card = (
        f"a card of {ASSUMED_CARD_GIB:g} GiB (no GPU is visible here; --card-gib says another size)"
    )
    return int(ASSUMED_CARD_GIB * GIB), assumed_card


def make_setup(
    config: AdoraGRPOConfig,
    model: ModelConfig,
    shape: ModelShape,
    sharding: Sharding,
    lengths: Measured,
) -> Setup:
    """Collect everything that the memory prediction depends on.

    Every prompt is taken to be as long as the longest one, and every completion as long as
    `max_completion_length`: the worst micro-batch that the run can meet.
    """
    prompt, image = lengths.longest
    mixed = bool(config.bf16 or config.fp16)
    sequences = config.per_device_train_batch_size
    generation = sequences * config.steps_per_generation
    engine = None
    dtype = engine_dtype(config)
    if config.use_vllm and config.vllm_mode == "colocate":
        engine = Engine(
            utilization=config.vllm_gpu_memory_utilization,
            dtype_bytes=_BYTES[dtype] if dtype else shape.weight_bytes,
            max_length=config.vllm_max_model_length or prompt + config.max_completion_length,
            max_sequences=generation * config.vllm_tensor_parallel_size,
            tensor_parallel=config.vllm_tensor_parallel_size,
            sleep=config.vllm_enable_sleep_mode,
            cpu_cache=int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * GIB)
            if config.use_cpu
            else None,
        )
    cached = config.uses("cache_images")
    # else the rollouts of a group lie in any micro-batch
    shares = cached and not regroup_obstacle(config)
    sharing = Sharing(
        cached, shares and config.uses("share_vision"), shares and config.uses("share_prompt")
    )
    return Setup(
        shape=shape,
        sharding=sharding,
        batch=MicroBatch(
            sequences=sequences,
            prompt_tokens=prompt,
            completion_tokens=config.max_completion_length,
            image_tokens=image if shape.vision else 0,
        ),
        generation=generation,
        generations=config.num_generations,
        sharing=sharing,
        mixed=mixed,
        checkpointing=config.gradient_checkpointing,
        recompute=config.adora_recompute,
        micro_batches=config.gradient_accumulation_steps,
        masked="flash" not in str(model.attn_implementation or ""),
        reference=config.beta != 0.0,
        engine=engine,
        accelerator=not config.use_cpu,
    )


def learning_rates(config: AdoraGRPOConfig, updates: int | None) -> dict[str, float]:
    """Return the learning rate at the first, the middle and the last update.

    The result is empty for a schedule that depends on the training, such as reduce_lr_on_plateau.
    """
    total = updates or ANY_LENGTH
    schedule = schedule_of(config, total)
    if not is_curve(schedule):
        return {}
    places = {"first": 0, "middle": total // 2, "last": total - 1}
    return {
        name: config.learning_rate * schedule.lr_lambdas[0](step) for name, step in places.items()
    }


def learning_rate_line(config: AdoraGRPOConfig, updates: int | None) -> str:
    """Return the name of the learning rate's schedule and its curve, in words."""
    rates = learning_rates(config, updates)
    schedule = spelled(config.lr_scheduler_type)
    if not rates:
        return f"Learning rate: {schedule} from {config.learning_rate:g} on, as the training goes."
    places = {"first": "at the first update", "middle": "half-way", "last": "at the last"}
    return (
        f"Learning rate: {schedule}, "
        f"{', '.join(f'{rates[at]:.3g} {words}' for at, words in places.items())}."
    )


def prompt_lines(plan: Plan) -> list[str]:
    """Return one whole prompt as the model reads it, of a row with choices if there is one.

    There is no line where the dataset is not on this machine.
    """
    if not plan.rows:
        return []
    script = plan.script
    rows = []
    for folder in plan.run.data.folders:
        example = example_row(Path(folder), [script.dataset_train_split])
        if example:
            rows.append(example)
    row = next((row for row in rows if row.get("choices")), rows[0])
    problem = template(script.adora_prompt)(row) if script.adora_prompt else row["problem"]
    image_count = len(row["images"] or [])
    text = _rendered(plan, conversation_with_images(problem, image_count, plan.run.system_prompt))
    return section(f"One whole prompt, of {row['id']}", shown_lines(text))


def _rendered(plan: Plan, messages: list[Message]) -> str:
    """Render messages with the model's chat template, or by roles where there is no processor."""
    if plan.run.prompts.processor is None:
        return as_text(messages)
    try:
        return str(
            plan.run.prompts.processor.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        )
    except ValueError:  # the processor has no chat template
        return as_text(messages)


def _keys(plan: Plan) -> Iterator[tuple[Field[Any], Any, bool]]:
    """Yield each key's field, its value, and whether that is the default, in declared order."""
    for keys in (plan.script, plan.run.config, plan.run.request.model.keys):
        for field in fields(keys):
            value = getattr(keys, field.name)
            default = field.default
            if default is MISSING:
                default = None if field.default_factory is MISSING else field.default_factory()
            yield field, plain(getattr(value, "value", value)), value == default


def changed_keys(plan: Plan, set_keys: Collection[str]) -> dict[str, Any]:
    """Return the keys that the user set to something else than the default, with secrets masked.

    `set_keys`: names of all keys in the file and on the command line.
    """
    changed = {
        key.name: value
        for key, value, is_default in _keys(plan)
        if key.name in set_keys and not is_default
    }
    return dict(masked(changed))


def config_lines(plan: Plan, set_keys: Collection[str]) -> list[str]:
    """Return a line `key: value` for each key that differs from its default."""
    changed = changed_keys(plan, set_keys)
    width = max(map(len, changed), default=0) + 2
    lines = [f"{key + ':':{width}} {value}" for key, value in changed.items()]
    return section(
        "Config, where it differs from the defaults (--write-config FILE: all of it)", lines
    )


def steps_of(plan: Plan) -> tuple[int | None, int | None]:
    """Return the optimizer steps of an epoch and of the whole run, None where not known."""
    batches = plan.run.layout
    config = plan.run.config
    fixed = config.max_steps if config.max_steps > 0 else None
    if plan.rows is None:
        return None, fixed
    generations = plan.rows // batches.prompts_per_generation
    epoch = max(
        1, generations * batches.micro_batches_per_generation // batches.gradient_accumulation_steps
    )
    return epoch, fixed or math.ceil(config.num_train_epochs * epoch)


def batch_lines(plan: Plan) -> list[str]:
    """Return the lines on prompts, groups, micro-batches, optimizer steps and epochs."""
    batches = plan.run.layout
    config = plan.run.config
    processes = plan.setup.sharding.processes
    local = config.per_device_train_batch_size
    prompts = batches.prompts_per_generation
    lines = [
        f"{amount(prompts, 'prompt')} {'is' if prompts == 1 else 'are'} sampled together, "
        f"{config.num_generations} rollouts of each: {batches.generation_batch} rollouts per "
        "generation.",
        f"They are learned from in micro-batches of {local} sequences on each of {processes} "
        f"process{'' if processes == 1 else 'es'} ({batches.global_batch} over all).",
        f"Micro-batches an optimizer step: {config.gradient_accumulation_steps}, which are "
        f"{batches.optimizer_batch} sequences. Optimizer steps a generation: "
        f"{batches.updates_per_generation:g}.",
    ]
    if processes > 1 or not config.use_cpu:  # a recipe for a CPU starts one
        alternatives = [
            replace(batches, processes=count) for count in (1, 2, 4, 8) if count != processes
        ]
        sizes = [
            f"{layout.processes}: {layout.generation_batch} rollouts and {layout.optimizer_batch}"
            for layout in alternatives
        ]
        lines.append(
            "With another --num_processes a generation and an optimizer step would have "
            f"{'; '.join(sizes)}."
        )
    epoch, total = steps_of(plan)
    rows = plan.rows
    if epoch is None:
        length = f"max_steps says {total}." if total else "The length of the run is not known."
        lines.append(f"The number of rows is not known, nor is the length of an epoch. {length}")
    else:
        # TRL's sampler leaves out the last rows of an epoch that fill no generation.
        remainder = (rows or 0) % batches.prompts_per_generation
        dropped = f"; {remainder} rows wait for another epoch's order" if remainder else ""
        make = "makes" if rows == 1 else "make"
        lines.append(
            f"{amount(rows or 0, 'row')} {make} {amount(epoch, 'optimizer step')} an "
            f"epoch{dropped}."
        )
        lines.append(
            f"The run takes {amount(total or 0, 'optimizer step')}, {(total or 0) / epoch:.3g} "
            "epochs."
        )
    lines.append(learning_rate_line(config, total))
    if config.save_strategy == "steps":
        lines.append(
            f"A checkpoint is saved every {amount(int(config.save_steps), 'optimizer step')}."
        )
    return section("Batches", lines)


def _spread(name: str, values: Sequence[int]) -> str:
    """Return a line of the table of lengths."""
    return f"{name:14}" + "".join(f"{figure:>9}" for figure in _spread_of(values).values())


def length_lines(plan: Plan) -> list[str]:
    """Return the spread of prompt lengths, and what happens to prompts that meet a limit."""
    lengths = plan.lengths
    config = plan.run.config
    lines = [f"{'tokens':14}{'min':>9}{'median':>9}{'95 %':>9}{'max':>9}"]
    lines += [
        _spread("prompt", lengths.prompt),
        _spread("image", lengths.image),
        *limit_lines(plan),
    ]
    budget = config.adora_vllm_max_num_batched_tokens
    above = sum(length > budget for length in lengths.prompt)
    if config.use_vllm and above:
        lines.append(
            f"{above} prompts exceed adora_vllm_max_num_batched_tokens: {budget}; raise it to "
            f"{max(lengths.prompt)}."
        )
    return section(
        f"Prompts ({amount(len(lengths.prompt), 'row')})" if plan.rows else "Prompts (assumed)",
        lines,
    )


def limit_lines(plan: Plan) -> list[str]:
    """Say which prompts leave no room for an answer, or too little."""
    limit = plan.limit
    longest = plan.lengths.longest[0]
    if limit is None:
        return ["Whether they leave room for an answer is not known for this model."]
    if plan.rows is None:
        return [
            f"{limit.name} leaves such a prompt {max(0, limit.tokens - longest)} tokens for its "
            "answer."
        ]
    return [f"{line}." for check in plan.checks for line in check.notes() or [check.enough]]


def disk_lines(plan: Plan) -> list[str]:
    """Return what the checkpoints will take on the disk, as lines."""
    setup = plan.setup
    config = plan.run.config
    checkpoint = memory.checkpoint_of(config, setup.shape, setup.sharding)
    limit = config.save_total_limit
    _, total = steps_of(plan)
    if config.save_strategy != "steps":
        lines = ["No checkpoints on the way (save_strategy)."]
    elif limit is None and total is None:
        lines = [
            f"{checkpoint / GIB:.3g} GiB per checkpoint, without a limit to their number "
            "(save_total_limit)."
        ]
    else:
        # Without a limit all checkpoints of the run are there at its end.
        number = limit if limit is not None else math.ceil((total or 0) / int(config.save_steps))
        folder = memory.run_bytes(checkpoint, setup.shape.total * setup.shape.weight_bytes, number)
        lines = [
            f"{checkpoint / GIB:.3g} GiB per checkpoint, {folder / GIB:.3g} GiB for the run's folder at "
            "most."
        ]
    return section("Disk", lines)


def machine_lines(plan: Plan) -> list[str]:
    """Return what several machines need to start, as lines."""
    sharding = plan.setup.sharding
    return (
        section(
            "Machines",
            [
                f"{sharding.machines} machines with {sharding.local_processes} processes each, "
                "started by setup/slurm/train.sbatch or setup/ssh/train.sh (docs/hardware.md).",
                "output_dir must be on a disk that all of them share; the run does not start "
                "without one.",
            ],
        )
        if sharding.machines > 1
        else []
    )


def report(plan: Plan, set_keys: Collection[str]) -> str:
    """Return the whole dry run as text, section by section."""
    notes = section("Notes", [f"- {note}" for note in plan.notes]) if plan.notes else []
    notes += (
        section("Not known here", [f"- {line}" for line in plan.run.messages.unknown])
        if plan.run.messages.unknown
        else []
    )
    sections = (
        config_lines(plan, set_keys),
        machine_lines(plan),
        batch_lines(plan),
        length_lines(plan),
        memory_lines(plan),
        disk_lines(plan),
    )
    return "\n".join([line for section in sections for line in section] + notes)


def dry_run(command: CliArgs, options: DryRunOptions) -> int:
    """Print what the command would do.

    The verdict stands last, with the command that comes next. Returns the exit code: 0 if the run
    fits, 1 if not. Raises `UserError` as a run would.
    """
    _check_outputs(options)
    plan = make_plan(command, options, with_few_rows=True)
    if os.environ.get("RANK", "0") != "0":  # only the first process prints
        return 0
    set_keys = command.set_keys
    print("\n".join([report(plan, set_keys), *prompt_lines(plan)]), flush=True)
    if plan.run.messages.refusals:
        print(f"\n{verdict_line(plan)}", flush=True)
        raise UserError(plan.run.messages.refusals[0])
    if options.write_config is not None:
        _write(
            "--write-config",
            options.write_config,
            yaml.safe_dump(resolved(plan, set_keys), sort_keys=False),
        )
    if options.json is not None:
        _write(
            "--json",
            options.json,
            json.dumps(figures(plan, set_keys), indent=2, default=str) + "\n",
        )
    print(f"\n{verdict_line(plan)}", flush=True)
    if not memory.fits(plan.setup, plan.card):
        return 1
    print(f"Next: {launch_command(plan, command.words, options.accelerate_config)}", flush=True)
    return 0


def verdict_line(plan: Plan) -> str:
    """Say whether the run fits, in one line."""
    prediction = memory.predict(plan.setup, plan.card)
    usage = f"{prediction.peak / GIB:.3g} of {plan.card / GIB:.3g} GiB"
    if memory.fits(plan.setup, plan.card):
        return f"It fits: {usage}."
    return f"It does NOT fit: {usage}; the section on memory above says what would."


def launch_command(plan: Plan, arguments: Sequence[str], launcher: Path | None) -> str:
    """Return the command that starts the run.

    `arguments`: those of the dry run without its options. `launcher`: the accelerate config that
    the dry run was asked about.
    """
    module = ["-m", "adora_vl.train", *arguments]
    sharding = plan.setup.sharding
    if launcher is None and sharding.processes == 1:
        return shlex.join(["python", *module])
    words = ["accelerate", "launch"]
    if launcher is not None:
        words += ["--config_file", str(launcher)]
    if launcher is None:
        words.append("--multi_gpu")
    words += ["--num_processes", str(sharding.processes)]
    return shlex.join([*words, *module])


def _check_outputs(options: DryRunOptions) -> None:
    """Raise `UserError` where a file of the dry run cannot be written, before it is computed."""
    if options.json is not None:
        check_json(
            "--json",
            path=options.json,
            kind="the figures of a dry run",
            is_ours=lambda figures: "peak_bytes" in figures,
        )
    config = options.write_config
    if config is not None:
        check_folder("--write-config", config.parent)
        if config.is_file() or config.is_dir():
            raise UserError(
                f"--write-config: {str(config)!r} is there already; choose another name"
            )


def _write(option: str, path: Path, text: str) -> None:
    """Write a file of the dry run. Raises `UserError` that names the option."""
    with written_to(option, path):
        replace_file(path, text)


def resolved(plan: Plan, set_keys: Collection[str]) -> dict[str, Any]:
    """Return every key with its value, in a form that `--config` reads; changed keys come first.

    Keys that Transformers or TRL derive from others, and would not accept as they are, are left
    out.
    """
    everything = changed_keys(plan, set_keys)
    for key, value, is_default in _keys(plan):
        if key.init and key.name not in everything and is_default:
            everything[key.name] = value
    # A key that is not set has no line, unless null is what the user set it to.
    return {
        key: value
        for key, value in everything.items()
        if _is_plain(value) and (value is not None or key in set_keys)
    }


def _is_plain(value: object) -> bool:
    """Return whether YAML can write a value."""
    try:
        yaml.safe_dump(value)
    except yaml.YAMLError:
        return False
    return True


_BATCHES = ("global_batch", "optimizer_batch", "generation_batch", "prompts_per_generation")


def figures(plan: Plan, set_keys: Collection[str]) -> dict[str, Any]:
    """Return the figures of the report as JSON for a program; sizes are in bytes."""
    prediction = memory.predict(plan.setup, plan.card)
    schedule = spelled(plan.run.config.lr_scheduler_type)
    epoch, total = steps_of(plan)
    batches = plan.run.layout
    return {
        "changed": changed_keys(plan, set_keys),
        "batches": {
            **{name: getattr(batches, name) for name in _BATCHES},
            "cycle_micro_batches": batches.micro_batches_per_generation,
            "gradient_accumulation_steps": batches.gradient_accumulation_steps,
        },
        "updates": {
            "a_generation": batches.updates_per_generation,
            "an_epoch": epoch,
            "total": total,
        },
        "learning_rate": {"schedule": schedule, **learning_rates(plan.run.config, total)},
        "rows": plan.rows,
        "prompt_tokens": _spread_of(plan.lengths.prompt),
        "image_tokens": _spread_of(plan.lengths.image),
        "overlong_prompts": sum(len(check.refused) for check in plan.checks),
        "card_bytes": plan.card,
        "phases": prediction.phases,
        "peak_bytes": prediction.peak,
        "recomputed_layers": prediction.recomputed,
        "fits": memory.fits(plan.setup, plan.card),
        "proposed_vllm_gpu_memory_utilization": memory.proposed_utilization(plan.setup, plan.card),
        "largest_per_device_train_batch_size": memory.largest_batch(plan.setup, plan.card),
        "largest_max_pixels": memory.largest_image_tokens(
            plan.setup, plan.card, max(0, plan.image_room)
        )
        * plan.setup.shape.image_token_pixels,
        "notes": plan.notes,
        "unknown": plan.run.messages.unknown,
    }


def _spread_of(values: Sequence[int]) -> dict[str, int]:
    """Return how at least one value spreads: smallest, median, 95 % quantile and largest."""
    return {
        "min": min(values),
        "median": quantile(values, 0.5),
        "p95": quantile(values, 0.95),
        "max": max(values),
    }
