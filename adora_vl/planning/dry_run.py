"""The dry run: `python -m adora_vl.train --config FILE --dry-run`.

It prints what a run would do (batches, prompts, learning rate) and whether it fits into memory and
on disk, without loading a weight. It makes the same checks as a run, in the same order.
"""

import json
import os
import shlex
from pathlib import Path

import yaml

from adora_vl.config.command import CliArgs
from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.planning.plan import DryRunPlan, make_plan
from adora_vl.planning.report import prompt_lines, report_text, report_values
from adora_vl.planning.run_keys import resolve_keys
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import (
    GIB,
    check_folder,
    check_json_output,
    naming_write_errors,
    replace_file,
)


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
    print("\n".join([report_text(plan), *prompt_lines(plan)]), flush=True)
    if plan.run.messages.refusals:
        # A run would stop with this. The report comes first, as its memory is of use all the same.
        print(f"\n{verdict_line(plan)}", flush=True)
        raise UserError(plan.run.messages.refusals[0])
    if options.write_config is not None:
        config_text = yaml.safe_dump(resolve_keys(plan), sort_keys=False)
        _write_output("--write-config", options.write_config, config_text)
    if options.json is not None:
        figures_text = json.dumps(report_values(plan), indent=2, default=str)
        _write_output("--json", options.json, figures_text + "\n")
    print(f"\n{verdict_line(plan)}", flush=True)
    if not plan.fits:
        return 1
    # Without rows the data set is not on this machine.
    if plan.row_count is None:
        names = " ".join(plan.script_args.dataset_name)
        print(f"First: prepare the data, {names} (python -m data_prep --help)", flush=True)
    print(f"Next: {training_command(plan, options.accelerate_config)}", flush=True)
    return 0


def verdict_line(plan: DryRunPlan) -> str:
    """Return a line on whether the run fits into its GPUs."""
    usage = f"{plan.prediction.peak_bytes / GIB:.3g} of {plan.gpu_bytes / GIB:.3g} GiB"
    if plan.fits:
        return f"It fits: {usage}."
    return f"It does NOT fit: {usage}; the section on memory above says what would."


def training_command(plan: DryRunPlan, accelerate_config: Path | None) -> str:
    """Return the command that starts the planned run.

    `accelerate_config`: the file that the dry run has read, None without one.
    """
    module = ["-m", "adora_vl.train", *plan.command.words]
    processes = plan.setup.sharding.processes
    if accelerate_config is None and processes == 1:
        return shlex.join(["python", *module])
    launch = ["accelerate", "launch"]
    if accelerate_config is not None:
        launch += ["--config_file", str(accelerate_config)]
    else:
        launch.append("--multi_gpu")
    launch += ["--num_processes", str(processes)]
    return shlex.join([*launch, *module])


def _check_outputs(options: DryRunOptions) -> None:
    """Raise `UserError` if a file that the options ask for cannot be written.

    It is checked before the dry run takes its time.
    """
    if options.json is not None:
        check_json_output(
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
