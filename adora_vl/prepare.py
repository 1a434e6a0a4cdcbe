"""From a command line to a resolved run: every check, before a weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adora_vl.utils.launch import prepare_engine_environment, use_expandable_segments

if TYPE_CHECKING:
    from adora_vl.config.command import CliArgs
    from adora_vl.config.run_context import DryRunOptions
    from adora_vl.config.schema import Parsed
    from adora_vl.preflight.resolved_run import ResolvedRun, RunRequest


def prepare(cli_args: CliArgs, *, to_train: bool = True) -> ResolvedRun:
    """Check the run of a command. Raises `UserError`.

    `to_train`: lock `output_dir` and print the first lines of the run; else the folder is only
    looked at.
    """
    prepare_engine_environment()
    use_expandable_segments()
    from adora_vl.config.run_context import RunContext
    from adora_vl.config.schema import build
    from adora_vl.preflight.run_checks import resolve_run

    request = _request_of(cli_args, build(cli_args))
    run = resolve_run(request, RunContext.of_launch("take" if to_train else "look"))
    if to_train and run.is_main_process:
        print("\n".join(run.first_lines()), flush=True)
    return run


def prepare_on_paper(cli_args: CliArgs, options: DryRunOptions) -> ResolvedRun:
    """Check the command as a dry run, on this machine or for another one. Raises `UserError`."""
    prepare_engine_environment()
    from adora_vl.config.run_context import RunContext
    from adora_vl.preflight.run_checks import resolve_run

    processes = RunContext.of_dry_run(options, local=False).sharding.processes
    parsed, local = _build_for_any_machine(cli_args, processes)
    request = _request_of(cli_args, parsed, max_rows=options.rows)
    return resolve_run(request, RunContext.of_dry_run(options, local=local))


def _request_of(cli_args: CliArgs, parsed: Parsed, max_rows: int | None = None) -> RunRequest:
    """The request for a run that a command makes; `parsed` are its three dataclasses."""
    from adora_vl.models.check import lora_of
    from adora_vl.preflight.resolved_run import ModelSource, RunRequest

    script, config, model = parsed
    return RunRequest(
        config=config,
        model=ModelSource(keys=model, peft_config=lora_of(model)),
        rows=script,
        cli_args=cli_args,
        max_rows=max_rows,
    )


def _build_for_any_machine(cli_args: CliArgs, processes: int) -> tuple[Parsed, bool]:
    """Build the three dataclasses, and tell whether this machine could run them.

    A dry run on a laptop reads the config of a run on GPUs, which Transformers refuses there: the
    keys that it refuses are switched off while the dataclasses are built, and restored.
    `processes`: of the run that is planned.
    """
    from adora_vl.config.schema import NoGPUError

    try:
        return _build_for(cli_args, processes), True
    except NoGPUError as error:
        key = error.key
    parsed = _build_for(cli_args.but(use_cpu=True, bf16=False, fp16=False), processes)
    _, config, _ = parsed
    config.use_cpu = False
    setattr(config, key, True)
    return parsed, False


def _build_for(cli_args: CliArgs, processes: int) -> Parsed:
    """Build the three dataclasses of a run of so many processes, of which this is one.

    TRL divides a generation of this process alone into groups. Where one of all processes divides,
    it is built with as many passes as all of them make, and gets its own number back.
    """
    from adora_vl.config.schema import UndividedError, build

    try:
        return build(cli_args)
    except UndividedError:
        if processes == 1:
            raise
    key = "steps_per_generation"
    source = key if cli_args.values.get(key) is not None else "gradient_accumulation_steps"
    passes = cli_args.read(source, int) if source in cli_args.values else 1
    parsed = build(cli_args.but(steps_per_generation=passes * processes))
    _, config, _ = parsed
    config.steps_per_generation = passes
    config.generation_batch_size = config.per_device_train_batch_size * passes
    return parsed
