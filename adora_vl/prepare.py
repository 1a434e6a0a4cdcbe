"""From a command line to a resolved run: every check, before a weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adora_vl.utils.launch import (
    imports_of_a_command,
    prepare_engine_environment,
    use_expandable_segments,
)

if TYPE_CHECKING:
    from adora_vl.config.command import CliArgs
    from adora_vl.config.dry_run_options import DryRunOptions
    from adora_vl.config.run_context import OutputDirMode
    from adora_vl.preflight.resolved_run import ResolvedRun


def prepare(cli_args: CliArgs, output_dir_mode: OutputDirMode = "lock") -> ResolvedRun:
    """Make all checks of a command's run, before a weight is loaded, and return what they found.

    `output_dir_mode`: `lock` locks `output_dir` for the run and prints the first lines of the run;
    other modes only look at the folder. Raises `UserError` for what a check refuses.
    """
    prepare_engine_environment()
    use_expandable_segments()
    with imports_of_a_command():
        from adora_vl.config.run_context import RunContext
        from adora_vl.preflight.request import request_from_command
        from adora_vl.preflight.run_checks import run_checks

    request = request_from_command(cli_args)
    context = RunContext.of_launch(request.config, output_dir_mode=output_dir_mode)
    run = run_checks(request, context)
    if output_dir_mode == "lock" and run.request.is_main_process:
        print("\n".join(run.lines_before_start()), flush=True)
    return run


def prepare_on_paper(cli_args: CliArgs, options: DryRunOptions) -> ResolvedRun:
    """Make the checks of a command as a dry run, on this machine or for another one.

    `options`: those of `--dry-run`, such as another number of GPUs. Raises `UserError` for what a
    check refuses.
    """
    prepare_engine_environment()
    with imports_of_a_command():
        from adora_vl.config.dry_run_options import planned_sharding
        from adora_vl.config.run_context import RunContext
        from adora_vl.config.schema import key_that_needs_missing_gpu
        from adora_vl.preflight.request import request_from_command
        from adora_vl.preflight.run_checks import run_checks

    request = request_from_command(
        cli_args,
        max_rows=options.rows,
        planned_processes=planned_sharding(options).processes,
    )
    context = RunContext.of_dry_run(
        request.config,
        options,
        on_this_machine=key_that_needs_missing_gpu(request.config) is None,
    )
    return run_checks(request, context)
