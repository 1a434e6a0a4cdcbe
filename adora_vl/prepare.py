"""From the arguments of a command to a checked run: read, then the road, before a weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from adora_vl.utils.launch import prepare_engine_environment, use_expandable_segments
from adora_vl.utils.versions import check_versions

if TYPE_CHECKING:
    from adora_vl.config.dry_run_options import DryRunOptions
    from adora_vl.start.road import Checked


def prepare(arguments: Sequence[str], *, to_train: bool = True) -> Checked:
    """A run of this command. Raises `UserError`. With `to_train` false `output_dir` is only looked at."""
    check_versions(use_vllm=False)
    prepare_engine_environment()
    use_expandable_segments()
    from adora_vl.config.command_line import parse
    from adora_vl.config.where import Where
    from adora_vl.start.road import walk

    run = walk(_asked(arguments, parse(arguments)), Where.of_launch("take" if to_train else "look"))
    if to_train and run.first:
        print("\n".join(run.first_lines()), flush=True)
    return run


def prepare_on_paper(arguments: Sequence[str], options: DryRunOptions) -> Checked:
    """The same command as a dry run, on this machine or for another one. Raises `UserError`."""
    prepare_engine_environment()
    from adora_vl.config.where import Where
    from adora_vl.start.road import walk

    parsed, here = _parse_for_any_machine(arguments)
    return walk(_asked(arguments, parsed, options.rows), Where.of_dry_run(options, here=here))


def _asked(arguments: Sequence[str], parsed: Any, most: int | None = None) -> Any:
    from adora_vl.models.check import lora_of
    from adora_vl.start.road import Asked, ModelSource

    script, config, model = parsed
    return Asked(config, ModelSource(model, lora_of(model)), script, words=arguments, most=most)


def _parse_for_any_machine(arguments: Sequence[str]) -> tuple[Any, bool]:
    """The three dataclasses, and whether this machine could run them: a GPU's config is read on a laptop too.

    bf16 and fp16 are refused where there is no GPU; they are put back after the check.
    """
    from adora_vl.config.command_line import parse
    from adora_vl.config.schema import NoGPUError

    try:
        return parse(arguments), True
    except NoGPUError as error:
        key = error.key
    parsed = parse([*arguments, "--use_cpu", "true", "--bf16", "false", "--fp16", "false"])
    parsed[1].use_cpu = False
    setattr(parsed[1], key, True)
    return parsed, False
