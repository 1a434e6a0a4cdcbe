"""From a command that was read to a checked run: the road, before a weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adora_vl.utils.launch import prepare_engine_environment, use_expandable_segments

if TYPE_CHECKING:
    from adora_vl.config.command import CliArgs
    from adora_vl.config.run_context import DryRunOptions
    from adora_vl.preflight.resolved_run import ResolvedRun


def prepare(given: CliArgs, *, to_train: bool = True) -> ResolvedRun:
    """A run of this command.

    Raises `UserError`. With `to_train` false `output_dir` is only looked at.
    """
    prepare_engine_environment()
    use_expandable_segments()
    from adora_vl.config.run_context import RunContext
    from adora_vl.config.schema import build
    from adora_vl.preflight.run_checks import walk

    run = walk(_asked(given, build(given)), RunContext.of_launch("take" if to_train else "look"))
    if to_train and run.first:
        print("\n".join(run.first_lines()), flush=True)
    return run


def prepare_on_paper(given: CliArgs, options: DryRunOptions) -> ResolvedRun:
    """The same command as a dry run, on this machine or for another one. Raises `UserError`."""
    prepare_engine_environment()
    from adora_vl.config.run_context import RunContext
    from adora_vl.preflight.run_checks import walk

    parsed, here = _build_for_any_machine(given)
    return walk(_asked(given, parsed, options.rows), RunContext.of_dry_run(options, here=here))


def _asked(given: CliArgs, parsed: Any, most: int | None = None) -> Any:
    from adora_vl.models.check import lora_of
    from adora_vl.preflight.resolved_run import ModelSource, RunRequest

    script, config, model = parsed
    return RunRequest(
        config=config, model=ModelSource(model, lora_of(model)), rows=script, given=given, most=most
    )


def _build_for_any_machine(given: CliArgs) -> tuple[Any, bool]:
    """The three dataclasses, and whether this machine could run them: a GPU's config is read on a
    laptop too.
    """
    from adora_vl.config.schema import NoGPUError, build

    try:
        return build(given), True
    except NoGPUError as error:
        key = error.key
    parsed = build(given.but(use_cpu=True, bf16=False, fp16=False))  # refused here, and put back
    parsed[1].use_cpu = False
    setattr(parsed[1], key, True)
    return parsed, False
