"""The dry run: `python -m adora_vl.train --config FILE --dry-run`.

It prints what a run would do (batches, prompts, learning rate) and whether it fits into memory and
on disk, without loading a weight. It makes the same checks as a run, in the same order.
"""

import json
import math
import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.command import CliArgs
from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.data.dataset import example_row
from adora_vl.data.prompts import (
    Message,
    as_text,
    conversation_with_images,
    read_template,
    shown_lines,
)
from adora_vl.planning import disk, memory, what_fits
from adora_vl.planning.memory_report import memory_lines
from adora_vl.planning.plan import Plan, make_plan
from adora_vl.preflight.check_machine import TRIED_UPDATES, depends_on_step_alone, schedule_of
from adora_vl.utils.cli import amount, plain_value, quantile, report_section, spelled_in_config
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import GIB, check_folder, check_json, naming_write_errors, replace_file
from adora_vl.utils.secrets import without_secrets


def learning_rates(config: AdoraGRPOConfig, updates: int | None) -> dict[str, float]:
    """Return the learning rate at the `first`, the `middle` and the `last` optimizer step.

    Empty for a schedule that depends on how the training goes, such as reduce_lr_on_plateau.

    `updates`: the number of optimizer steps of the run; None if it is not known. Then the rates are
    those of a run of some length, since most schedules have the same shape for every length.
    """
    step_count = updates or TRIED_UPDATES
    schedule = schedule_of(config, step_count)
    if not depends_on_step_alone(schedule):
        return {}
    step_by_name = {"first": 0, "middle": step_count // 2, "last": step_count - 1}
    # torch's function from the step to a factor of the learning rate
    factor_at = schedule.lr_lambdas[0]
    return {name: config.learning_rate * factor_at(step) for name, step in step_by_name.items()}


def learning_rate_line(config: AdoraGRPOConfig, updates: int | None) -> str:
    """Return a line with the name of the learning rate's schedule, and three of its rates.

    `updates`: the number of optimizer steps of the run; None if it is not known.
    """
    rates = learning_rates(config, updates)
    schedule = spelled_in_config(config.lr_scheduler_type)
    if not rates:
        return f"Learning rate: {schedule} from {config.learning_rate:g} on, as the training goes."
    words_by_name = {"first": "at the first update", "middle": "half-way", "last": "at the last"}
    rate_texts = [f"{rates[name]:.3g} {words}" for name, words in words_by_name.items()]
    return f"Learning rate: {schedule}, {', '.join(rate_texts)}."


def prompt_lines(plan: Plan) -> list[str]:
    """Return a section with one whole prompt as the model reads it.

    It is the prompt of a multiple-choice row, if there is one. There is no section for a data set
    that is not on this machine.
    """
    if not plan.rows:
        return []
    script = plan.script
    example_rows = []
    for folder in plan.run.data.folders:
        row = example_row(Path(folder), [script.dataset_train_split])
        if row:
            example_rows.append(row)
    # A row with choices shows how the prompt presents them too.
    rows_with_choices = [row for row in example_rows if row.get("choices")]
    example = rows_with_choices[0] if rows_with_choices else example_rows[0]
    problem_text = example["problem"]
    if script.adora_prompt:
        problem_text = read_template(script.adora_prompt)(example)
    image_count = len(example["images"] or [])
    messages = conversation_with_images(problem_text, image_count, plan.run.system_prompt)
    prompt_text = _render_messages(plan, messages)
    return report_section(f"One whole prompt, of {example['id']}", shown_lines(prompt_text))


def _render_messages(plan: Plan, messages: list[Message]) -> str:
    """Return messages as text, by the model's chat template.

    Without a processor, or a template in it, each message follows the name of its role.
    """
    processor = plan.run.prompts.processor
    if processor is None:
        return as_text(messages)
    try:
        prompt_text = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return str(prompt_text)
    except ValueError:  # the processor has no chat template
        return as_text(messages)


class KeyValue(NamedTuple):
    """One key of a run's configuration.

    `field`: the dataclass field that declares it. `value`: its value in the types of YAML and JSON,
    if it has such a form. `is_default`: whether it is the field's default.
    """

    field: Field[Any]
    value: Any
    is_default: bool


def _key_values(plan: Plan) -> Iterator[KeyValue]:
    """Yield all keys of a run, in the order in which the three config dataclasses declare them."""
    for arguments in (plan.script, plan.run.config, plan.run.request.model.keys):
        for field in fields(arguments):
            value = getattr(arguments, field.name)
            default = field.default
            if default is MISSING:
                default = None if field.default_factory is MISSING else field.default_factory()
            # A member of an enumeration is written by its value.
            yaml_value = plain_value(getattr(value, "value", value))
            yield KeyValue(field=field, value=yaml_value, is_default=value == default)


def changed_keys(plan: Plan, set_keys: Collection[str]) -> dict[str, Any]:
    """Return the values of the keys that the user set to something else than the default.

    Secrets are masked. `set_keys`: names of all keys in the file and on the command line.
    """
    value_by_key: dict[str, Any] = {}
    for key in _key_values(plan):
        if key.field.name in set_keys and not key.is_default:
            value_by_key[key.field.name] = key.value
    return dict(without_secrets(value_by_key))


def config_lines(plan: Plan, set_keys: Collection[str]) -> list[str]:
    """Return a section with a line `key: value` for each key that differs from its default.

    `set_keys`: names of all keys in the file and on the command line.
    """
    value_by_key = changed_keys(plan, set_keys)
    column_width = max(map(len, value_by_key), default=0) + 2
    lines = [f"{key + ':':{column_width}} {value}" for key, value in value_by_key.items()]
    return report_section(
        "Config, where it differs from the defaults (--write-config FILE: all of it)", lines
    )


class OptimizerSteps(NamedTuple):
    """The number of optimizer steps, None where it is not known without the data set."""

    per_epoch: int | None
    total: int | None


def optimizer_steps_of(plan: Plan) -> OptimizerSteps:
    """Return the optimizer steps of an epoch and of the whole run, as Transformers counts them."""
    batches = plan.run.layout
    config = plan.run.config
    # -1 means that num_train_epochs decides.
    max_steps = config.max_steps if config.max_steps > 0 else None
    if plan.rows is None:
        return OptimizerSteps(per_epoch=None, total=max_steps)
    per_epoch = batches.optimizer_steps_per_epoch(plan.rows)
    total = max_steps or math.ceil(config.num_train_epochs * per_epoch)
    return OptimizerSteps(per_epoch=per_epoch, total=total)


def batch_lines(plan: Plan) -> list[str]:
    """Return a section on prompts, groups, micro-batches, optimizer steps and epochs."""
    batches = plan.run.layout
    config = plan.run.config
    processes = plan.setup.sharding.processes
    prompts = batches.prompts_per_generation
    are = "is" if prompts == 1 else "are"
    process_noun = "process" if processes == 1 else "processes"
    lines = [
        f"{amount(prompts, 'prompt')} {are} sampled together, "
        f"{config.num_generations} rollouts of each: {batches.generation_batch} rollouts per "
        "generation.",
        f"An optimizer step learns from {batches.optimizer_batch} of them: "
        f"per_device_train_batch_size: {config.per_device_train_batch_size} x "
        f"gradient_accumulation_steps: {config.gradient_accumulation_steps} x "
        f"{processes} {process_noun}. Optimizer steps a generation: "
        f"{batches.updates_per_generation:g}.",
        *_other_process_counts_lines(plan),
        *_epoch_lines(plan),
        learning_rate_line(config, optimizer_steps_of(plan).total),
    ]
    if config.save_strategy == "steps":
        lines.append(
            f"A checkpoint is saved every {amount(int(config.save_steps), 'optimizer step')}."
        )
    return report_section("Batches", lines)


def _other_process_counts_lines(plan: Plan) -> list[str]:
    """Return a line with the batch sizes that the run would have on 1, 2, 4 and 8 processes.

    There is no line for one process on a CPU, since a config for a CPU always starts one.
    """
    planned_layout = plan.run.layout
    processes = plan.setup.sharding.processes
    if processes == 1 and plan.run.config.use_cpu:
        return []
    size_texts: list[str] = []
    for process_count in (1, 2, 4, 8):
        if process_count == processes:
            continue
        layout = replace(planned_layout, processes=process_count)
        size_texts.append(
            f"{process_count} processes {layout.generation_batch} and {layout.optimizer_batch}"
        )
    return [
        "Rollouts of a generation and of an optimizer step with another --num_processes: "
        f"{', '.join(size_texts)}."
    ]


def _epoch_lines(plan: Plan) -> list[str]:
    """Return lines on the numbers of rows, optimizer steps and epochs, as far as they are known."""
    per_epoch, total = optimizer_steps_of(plan)
    if per_epoch is None:
        length = "The length of the run is not known."
        if total is not None:
            length = f"max_steps says {total}."
        return [f"The number of rows is not known, nor is the length of an epoch. {length}"]
    rows = plan.rows or 0
    total = total or 0
    # TRL's sampler leaves out the last rows of an epoch if they do not fill a generation.
    remainder = rows % plan.run.layout.prompts_per_generation
    waiting = f"; {amount(remainder, 'row')} left out, others each time" if remainder else ""
    make = "makes" if rows == 1 else "make"
    return [
        f"{amount(rows, 'row')} {make} {amount(per_epoch, 'optimizer step')} an epoch{waiting}.",
        f"The run takes {amount(total, 'optimizer step')}, {total / per_epoch:.3g} epochs.",
    ]


def _length_table_line(name: str, token_counts: Sequence[int]) -> str:
    """Return a line of the table of lengths: smallest, median, 95 % quantile and largest."""
    cells = [f"{count:>9}" for count in _min_median_q95_max(token_counts).values()]
    return f"{name:14}" + "".join(cells)


def length_lines(plan: Plan) -> list[str]:
    """Return a section on the lengths of the prompts, and on those that meet a limit."""
    lengths = plan.lengths
    config = plan.run.config
    lines = [f"{'tokens':14}{'min':>9}{'median':>9}{'95 %':>9}{'max':>9}"]
    lines += [
        _length_table_line("prompt", lengths.prompt_tokens),
        _length_table_line("image", lengths.image_tokens),
        *limit_lines(plan),
    ]
    token_budget = config.adora_vllm_max_num_batched_tokens
    longer_lengths = [length for length in lengths.prompt_tokens if length > token_budget]
    if config.use_vllm and longer_lengths:
        lines.append(
            f"{len(longer_lengths)} prompts exceed adora_vllm_max_num_batched_tokens: "
            f"{token_budget}; raise it to {max(longer_lengths)}."
        )
    title = "Prompts (assumed)"
    if plan.rows:
        title = f"Prompts ({amount(len(lengths.prompt_tokens), 'row')})"
    return report_section(title, lines)


def limit_lines(plan: Plan) -> list[str]:
    """Return lines on the prompts that leave no room for an answer, or too little."""
    limit = plan.limit
    if limit is None:
        return ["Whether they leave room for an answer is not known for this model."]
    if plan.rows is None:
        longest_prompt = plan.lengths.longest_prompt
        answer_tokens = max(0, limit.tokens - longest_prompt)
        return [f"{limit.name} leaves such a prompt {answer_tokens} tokens for its answer."]
    lines: list[str] = []
    for check in plan.checks:
        # A check without notes says that all prompts leave enough room.
        notes = check.notes() or [check.all_fit_line]
        lines += [f"{note}." for note in notes]
    return lines


def disk_lines(plan: Plan) -> list[str]:
    """Return a section on what the checkpoints will take on the disk."""
    setup = plan.setup
    config = plan.run.config
    checkpoint_bytes = disk.checkpoint_of(config, setup.shape, setup.sharding)
    kept_checkpoints = config.save_total_limit
    total_steps = optimizer_steps_of(plan).total
    if config.save_strategy != "steps":
        lines = ["No checkpoints on the way (save_strategy)."]
    elif kept_checkpoints is None and total_steps is None:
        lines = [
            f"{checkpoint_bytes / GIB:.3g} GiB per checkpoint, without a limit to their number "
            "(save_total_limit)."
        ]
    else:
        if kept_checkpoints is None:
            # All checkpoints of the run are there at its end.
            kept_checkpoints = math.ceil((total_steps or 0) / int(config.save_steps))
        model_bytes = setup.shape.total_parameters * setup.shape.weight_bytes
        folder_bytes = disk.run_bytes(
            checkpoint_bytes, model=model_bytes, checkpoints=kept_checkpoints
        )
        lines = [
            f"{checkpoint_bytes / GIB:.3g} GiB per checkpoint, {folder_bytes / GIB:.3g} GiB for the "
            "run's folder at most."
        ]
    return report_section("Disk", lines)


def machine_lines(plan: Plan) -> list[str]:
    """Return a section on what several machines need to start; none for a single machine."""
    sharding = plan.setup.sharding
    if sharding.machines == 1:
        return []
    lines = [
        f"{sharding.machines} machines with {sharding.local_processes} processes each, "
        "started by setup/slurm/train.sbatch or setup/ssh/train.sh (docs/hardware.md).",
        "output_dir must be on a disk that all of them share; the run does not start without one.",
    ]
    return report_section("Machines", lines)


def report_text(plan: Plan, set_keys: Collection[str]) -> str:
    """Return the report of a dry run as text, section by section.

    `set_keys`: names of all keys in the file and on the command line.
    """
    lines = [
        *config_lines(plan, set_keys),
        *machine_lines(plan),
        *batch_lines(plan),
        *length_lines(plan),
        *memory_lines(plan),
        *disk_lines(plan),
    ]
    if plan.notes:
        lines += report_section("Notes", [f"- {note}" for note in plan.notes])
    unknown = plan.run.messages.unknown
    if unknown:
        lines += report_section("Not known here", [f"- {line}" for line in unknown])
    return "\n".join(lines)


def dry_run(command: CliArgs, options: DryRunOptions) -> int:
    """Print what a training command would do, and write the files that the options ask for.

    At the end it says whether the run fits, and the command that starts it. Returns the exit code:
    0 if the run fits, 1 if not. Raises `UserError` as a run would.
    """
    _check_outputs(options)
    plan = make_plan(command, options, with_few_rows=True)
    if os.environ.get("RANK", "0") != "0":
        # Only the first process prints.
        return 0
    set_keys = command.set_keys
    print("\n".join([report_text(plan, set_keys), *prompt_lines(plan)]), flush=True)
    if plan.run.messages.refusals:
        # A run would stop with this. The report comes first, as its memory is of use all the same.
        print(f"\n{verdict_line(plan)}", flush=True)
        raise UserError(plan.run.messages.refusals[0])
    if options.write_config is not None:
        config_text = yaml.safe_dump(resolve_keys(plan, set_keys), sort_keys=False)
        _write_output("--write-config", options.write_config, config_text)
    if options.json is not None:
        figures_text = json.dumps(report_figures(plan, set_keys), indent=2, default=str)
        _write_output("--json", options.json, figures_text + "\n")
    print(f"\n{verdict_line(plan)}", flush=True)
    if not what_fits.fits_into_gpu(plan.setup, plan.card_bytes):
        return 1
    if plan.rows is None:
        print(f"First: {_data_command(plan)}", flush=True)
    print(f"Next: {launch_command(plan, command.words, options.accelerate_config)}", flush=True)
    return 0


def verdict_line(plan: Plan) -> str:
    """Return a line on whether the run fits into its GPUs."""
    prediction = memory.predict_memory(plan.setup, plan.card_bytes)
    usage = f"{prediction.peak / GIB:.3g} of {plan.card_bytes / GIB:.3g} GiB"
    if what_fits.fits_into_gpu(plan.setup, plan.card_bytes):
        return f"It fits: {usage}."
    return f"It does NOT fit: {usage}; the section on memory above says what would."


def _data_command(plan: Plan) -> str:
    """Return what a user has to do about data that is not on this machine."""
    names = " ".join(plan.script.dataset_name)
    return f"prepare the data, {names} (python -m data_prep --help)"


def launch_command(plan: Plan, arguments: Sequence[str], launcher: Path | None) -> str:
    """Return the command that starts the planned run.

    Args:
        plan: The plan, of which the number of processes is used.
        arguments: The words of the training command, without the options of the dry run.
        launcher: The accelerate config that the dry run has read, None without one.
    """
    module = ["-m", "adora_vl.train", *arguments]
    processes = plan.setup.sharding.processes
    if launcher is None and processes == 1:
        return shlex.join(["python", *module])
    launch = ["accelerate", "launch"]
    if launcher is not None:
        launch += ["--config_file", str(launcher)]
    else:
        launch.append("--multi_gpu")
    launch += ["--num_processes", str(processes)]
    return shlex.join([*launch, *module])


def _check_outputs(options: DryRunOptions) -> None:
    """Raise `UserError` if a file that the options ask for cannot be written.

    It is checked before the dry run takes its time.
    """
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


def _write_output(option: str, path: Path, text: str) -> None:
    """Write a file of the dry run. Raises `UserError` that names the option."""
    with naming_write_errors(option, path):
        replace_file(path, text)


def resolve_keys(plan: Plan, set_keys: Collection[str]) -> dict[str, Any]:
    """Return all keys of a run for `--write-config`, so that `--config` reads the same run again.

    The keys that the user changed come first, then those with their defaults. Keys that
    Transformers or TRL derive from others are left out, since they would not accept them.

    `set_keys`: names of all keys in the file and on the command line.
    """
    value_by_key = changed_keys(plan, set_keys)
    for key in _key_values(plan):
        name = key.field.name
        # A key that the user has not set and that is not at its default was derived.
        if key.field.init and name not in value_by_key and key.is_default:
            value_by_key[name] = key.value
    values_to_write: dict[str, Any] = {}
    for name, value in value_by_key.items():
        # A key that is null has no line, unless the user set it to null.
        has_line = value is not None or name in set_keys
        if has_line and _is_plain_yaml(value):
            values_to_write[name] = value
    return values_to_write


def _is_plain_yaml(value: object) -> bool:
    """Return whether YAML can write a value without a tag that only Python reads."""
    try:
        yaml.safe_dump(value)
    except yaml.YAMLError:
        return False
    return True


_BATCH_FIGURES = ("global_batch", "optimizer_batch", "generation_batch", "prompts_per_generation")


def report_figures(plan: Plan, set_keys: Collection[str]) -> dict[str, Any]:
    """Return the numbers of the report for `--json`; sizes are in bytes.

    `set_keys`: names of all keys in the file and on the command line.
    """
    prediction = memory.predict_memory(plan.setup, plan.card_bytes)
    schedule = spelled_in_config(plan.run.config.lr_scheduler_type)
    steps = optimizer_steps_of(plan)
    batches = plan.run.layout
    image_room = max(0, plan.image_room)
    image_tokens = what_fits.largest_image_tokens(plan.setup, plan.card_bytes, image_room)
    return {
        "changed": changed_keys(plan, set_keys),
        "batches": {
            **{name: getattr(batches, name) for name in _BATCH_FIGURES},
            "cycle_micro_batches": batches.micro_batches_per_generation,
            "gradient_accumulation_steps": batches.gradient_accumulation_steps,
        },
        "updates": {
            "a_generation": batches.updates_per_generation,
            "an_epoch": steps.per_epoch,
            "total": steps.total,
        },
        "learning_rate": {"schedule": schedule, **learning_rates(plan.run.config, steps.total)},
        "rows": plan.rows,
        "prompt_tokens": _min_median_q95_max(plan.lengths.prompt_tokens),
        "image_tokens": _min_median_q95_max(plan.lengths.image_tokens),
        "overlong_prompts": sum(len(check.too_long_numbers) for check in plan.checks),
        "card_bytes": plan.card_bytes,
        "phases": prediction.phases,
        "peak_bytes": prediction.peak,
        "recomputed_layers": prediction.recomputed,
        "fits": what_fits.fits_into_gpu(plan.setup, plan.card_bytes),
        "proposed_vllm_gpu_memory_utilization": what_fits.proposed_utilization(
            plan.setup, plan.card_bytes
        ),
        "largest_per_device_train_batch_size": what_fits.largest_batch(plan.setup, plan.card_bytes),
        "largest_max_pixels": image_tokens * plan.setup.shape.image_token_pixels,
        "notes": plan.notes,
        "unknown": plan.run.messages.unknown,
    }


def _min_median_q95_max(values: Sequence[int]) -> dict[str, int]:
    """Return the smallest value, the median, the 95 % quantile and the largest value.

    `values`: at least one.
    """
    return {
        "min": min(values),
        "median": quantile(values, 0.5),
        "p95": quantile(values, 0.95),
        "max": max(values),
    }
