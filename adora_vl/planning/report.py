"""The report of a dry run, section by section: config, batches, prompts, memory and disk."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adora_vl.config import AdoraGRPOConfig
from adora_vl.data.dataset import example_row
from adora_vl.data.prompts import (
    Message,
    conversation_with_images,
    lines_for_terminal,
    messages_as_text,
    read_template,
)
from adora_vl.planning import disk, what_fits
from adora_vl.planning.memory_report import memory_lines
from adora_vl.planning.plan import DryRunPlan
from adora_vl.planning.run_keys import changed_keys
from adora_vl.preflight.check_machine import (
    TRIAL_SCHEDULE_STEPS,
    build_lr_schedule,
    depends_only_on_step,
)
from adora_vl.utils.cli import enum_value, pluralize, quantile, report_section
from adora_vl.utils.files import GIB


def learning_rates(config: AdoraGRPOConfig, total_steps: int | None) -> dict[str, float]:
    """Return the learning rate at the `first`, the `middle` and the `last` optimizer step.

    Empty for a schedule that depends on how the training goes, such as reduce_lr_on_plateau.

    `total_steps`: the number of optimizer steps of the run; None if it is not known. The rates are
    then those of a run of `TRIAL_SCHEDULE_STEPS` steps, since most schedules have one shape for
    every length.
    """
    step_count = total_steps or TRIAL_SCHEDULE_STEPS
    schedule = build_lr_schedule(config, step_count)
    if not depends_only_on_step(schedule):
        return {}
    step_by_name = {"first": 0, "middle": step_count // 2, "last": step_count - 1}
    # torch's function from the step to a factor of the learning rate
    factor_at = schedule.lr_lambdas[0]
    return {name: config.learning_rate * factor_at(step) for name, step in step_by_name.items()}


def learning_rate_line(config: AdoraGRPOConfig, total_steps: int | None) -> str:
    """Return a line with the name of the learning rate's schedule, and three of its rates.

    `total_steps`: the number of optimizer steps of the run; None if it is not known.
    """
    rates = learning_rates(config, total_steps)
    schedule = enum_value(config.lr_scheduler_type)
    if not rates:
        return f"Learning rate: {schedule} from {config.learning_rate:g} on, as the training goes."
    words_by_name = {"first": "at the first update", "middle": "half-way", "last": "at the last"}
    rate_texts = [f"{rates[name]:.3g} {words}" for name, words in words_by_name.items()]
    return f"Learning rate: {schedule}, {', '.join(rate_texts)}."


def prompt_lines(plan: DryRunPlan) -> list[str]:
    """Return a section with one whole prompt as the model reads it.

    It is the prompt of a multiple-choice row, if there is one. There is no section for a data set
    that is not on this machine.
    """
    if not plan.row_count:
        return []
    script_args = plan.script_args
    example_rows = []
    for folder in plan.run.data.folders:
        row = example_row(Path(folder), [script_args.dataset_train_split])
        if row:
            example_rows.append(row)
    # A row with choices shows how the prompt presents them too.
    rows_with_choices = [row for row in example_rows if row.get("choices")]
    example = rows_with_choices[0] if rows_with_choices else example_rows[0]
    problem_text = example["problem"]
    if script_args.adora_prompt:
        problem_text = read_template(script_args.adora_prompt)(example)
    image_count = len(example["images"] or [])
    messages = conversation_with_images(problem_text, image_count, plan.run.system_prompt)
    prompt_text = _render_messages(plan, messages)
    return report_section(f"One whole prompt, of {example['id']}", lines_for_terminal(prompt_text))


def _render_messages(plan: DryRunPlan, messages: list[Message]) -> str:
    """Return messages as text, by the model's chat template.

    Without a processor, or a template in it, each message follows the name of its role.
    """
    processor = plan.run.prompts.processor
    if processor is None:
        return messages_as_text(messages)
    try:
        prompt_text = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return str(prompt_text)
    except ValueError:  # the processor has no chat template
        return messages_as_text(messages)


def config_lines(plan: DryRunPlan) -> list[str]:
    """Return a section with a line `key: value` for each key that the user changed."""
    value_by_key = changed_keys(plan)
    column_width = max(map(len, value_by_key), default=0) + 2
    lines = [f"{key + ':':{column_width}} {value}" for key, value in value_by_key.items()]
    return report_section(
        "Config, where it differs from the defaults (--write-config FILE: all of it)", lines
    )


def batch_lines(plan: DryRunPlan) -> list[str]:
    """Return a section on prompts, groups, micro-batches, optimizer steps and epochs."""
    batches = plan.run.layout
    config = plan.run.config
    processes = plan.setup.sharding.processes
    prompts = batches.prompts_per_generation
    are = "is" if prompts == 1 else "are"
    process_noun = "process" if processes == 1 else "processes"
    lines = [
        f"{pluralize(prompts, 'prompt')} {are} sampled together, "
        f"{config.num_generations} rollouts of each: {batches.generation_batch} rollouts per "
        "generation.",
        f"An optimizer step learns from {batches.optimizer_batch} of them: "
        f"per_device_train_batch_size: {config.per_device_train_batch_size} x "
        f"gradient_accumulation_steps: {config.gradient_accumulation_steps} x "
        f"{processes} {process_noun}. Optimizer steps a generation: "
        f"{batches.updates_per_generation:g}.",
        *_other_process_count_lines(plan),
        *_epoch_lines(plan),
        learning_rate_line(config, plan.total_steps),
    ]
    if config.save_strategy == "steps":
        lines.append(
            f"A checkpoint is saved every {pluralize(int(config.save_steps), 'optimizer step')}."
        )
    elif config.save_strategy == "epoch":
        lines.append("A checkpoint is saved after every epoch.")
    return report_section("Batches", lines)


def _other_process_count_lines(plan: DryRunPlan) -> list[str]:
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


def _epoch_lines(plan: DryRunPlan) -> list[str]:
    """Return lines on the numbers of rows, optimizer steps and epochs, as far as they are known."""
    rows = plan.row_count
    per_epoch = plan.steps_per_epoch
    total = plan.total_steps
    if rows is None or per_epoch is None:
        length = "The length of the run is not known."
        if total is not None:
            length = f"max_steps says {total}."
        return [f"The number of rows is not known, nor is the length of an epoch. {length}"]
    assert total is not None, "it is known where the rows are"
    # TRL's sampler leaves out the last rows of an epoch if they do not fill a generation.
    remainder = rows % plan.run.layout.prompts_per_generation
    left_out_note = ""
    if remainder > 0:
        left_out_note = f"; {pluralize(remainder, 'row')} left out, others each time"
    verb = "makes" if rows == 1 else "make"
    steps_text = pluralize(per_epoch, "optimizer step")
    return [
        f"{pluralize(rows, 'row')} {verb} {steps_text} an epoch{left_out_note}.",
        f"The run takes {pluralize(total, 'optimizer step')}, {total / per_epoch:.3g} epochs.",
    ]


def _length_table_line(name: str, token_counts: Sequence[int]) -> str:
    """Return a line of the table of lengths: smallest, median, 95 % quantile and largest."""
    cells = [f"{count:>9}" for count in _min_median_p95_max(token_counts).values()]
    return f"{name:14}" + "".join(cells)


def length_lines(plan: DryRunPlan) -> list[str]:
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
    if plan.row_count:
        title = f"Prompts ({pluralize(len(lengths.prompt_tokens), 'row')})"
    return report_section(title, lines)


def limit_lines(plan: DryRunPlan) -> list[str]:
    """Return lines on the prompts that leave no room for an answer, or too little."""
    limit = plan.limit
    if limit is None:
        return ["Whether they leave room for an answer is not known for this model."]
    if plan.row_count is None:
        longest_prompt = plan.lengths.longest_prompt
        answer_tokens = max(0, limit.tokens - longest_prompt)
        return [f"{limit.name} leaves such a prompt {answer_tokens} tokens for its answer."]
    lines: list[str] = []
    for check in plan.checks:
        # A check without notes says that all prompts leave enough room.
        notes = check.warnings() or [check.all_fit_line]
        lines += [f"{note}." for note in notes]
    return lines


def disk_lines(plan: DryRunPlan) -> list[str]:
    """Return a section on what the checkpoints will take on the disk."""
    setup = plan.setup
    config = plan.run.config
    checkpoint_bytes = disk.predict_checkpoint_bytes(config, setup.shape, setup.sharding)
    checkpoint_count = disk.max_checkpoint_count(config, plan.run.layout, plan.row_count)
    if checkpoint_count == 0:
        lines = ["No checkpoints on the way (save_strategy)."]
    elif checkpoint_count is None:
        lines = [
            f"{checkpoint_bytes / GIB:.3g} GiB per checkpoint, without a limit to their number "
            "(save_total_limit)."
        ]
    else:
        model_bytes = setup.shape.total_parameters * setup.shape.bytes_per_weight
        folder_bytes = disk.max_run_folder_bytes(
            checkpoint_bytes,
            model_bytes=model_bytes,
            checkpoint_count=checkpoint_count,
            record_gb=config.adora_record_gb,
        )
        lines = [
            f"{checkpoint_bytes / GIB:.3g} GiB per checkpoint, {folder_bytes / GIB:.3g} GiB for the "
            f"run's folder at most, with {config.adora_record_gb:g} GB of recorded rollouts "
            "(adora_record_gb)."
        ]
    return report_section("Disk", lines)


def machine_lines(plan: DryRunPlan) -> list[str]:
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


def report_text(plan: DryRunPlan) -> str:
    """Return the report of a dry run as text, section by section."""
    lines = [
        *config_lines(plan),
        *machine_lines(plan),
        *batch_lines(plan),
        *length_lines(plan),
        *memory_lines(plan),
        *disk_lines(plan),
    ]
    if plan.notes:
        lines += report_section("Notes", [f"- {note}" for note in plan.notes])
    unknown = plan.run.messages.unchecked
    if unknown:
        lines += report_section("Not known here", [f"- {line}" for line in unknown])
    return "\n".join(lines)


_BATCH_FIGURES = ("global_batch", "optimizer_batch", "generation_batch", "prompts_per_generation")


def report_values(plan: DryRunPlan) -> dict[str, Any]:
    """Return the numbers of the report for `--json`; sizes are in bytes."""
    prediction = plan.prediction
    schedule = enum_value(plan.run.config.lr_scheduler_type)
    batches = plan.run.layout
    image_tokens = what_fits.largest_image_tokens(
        plan.setup, plan.gpu_bytes, max_tokens=plan.max_image_tokens
    )
    return {
        "changed": changed_keys(plan),
        "batches": {
            **{name: getattr(batches, name) for name in _BATCH_FIGURES},
            "cycle_micro_batches": batches.micro_batches_per_generation,
            "gradient_accumulation_steps": batches.gradient_accumulation_steps,
        },
        "updates": {
            "a_generation": batches.updates_per_generation,
            "an_epoch": plan.steps_per_epoch,
            "total": plan.total_steps,
        },
        "learning_rate": {
            "schedule": schedule,
            **learning_rates(plan.run.config, plan.total_steps),
        },
        "rows": plan.row_count,
        "prompt_tokens": _min_median_p95_max(plan.lengths.prompt_tokens),
        "image_tokens": _min_median_p95_max(plan.lengths.image_tokens),
        "overlong_prompts": sum(len(check.too_long_indices) for check in plan.checks),
        "card_bytes": plan.gpu_bytes,
        "phases": prediction.phases,
        "peak_bytes": prediction.peak_bytes,
        "recomputed_layers": prediction.recomputed_layers,
        "fits": plan.fits,
        "proposed_vllm_gpu_memory_utilization": what_fits.best_vllm_utilization(
            plan.setup, plan.gpu_bytes
        ),
        "largest_per_device_train_batch_size": what_fits.largest_batch(plan.setup, plan.gpu_bytes),
        "largest_max_pixels": image_tokens * plan.setup.shape.image_token_pixels,
        "notes": plan.notes,
        "unknown": plan.run.messages.unchecked,
    }


def _min_median_p95_max(values: Sequence[int]) -> dict[str, int]:
    """Return the smallest value, the median, the 95 % quantile and the largest value.

    `values`: at least one.
    """
    return {
        "min": min(values),
        "median": quantile(values, 0.5),
        "p95": quantile(values, 0.95),
        "max": max(values),
    }
