"""Says whether a training command will work on this machine.

One line for each check, with the remedy where it failed.

Libraries, builds and drivers come first, then the data's reference answers, the rewards and the
room on the disk, then model and engine are loaded, and engine and trainer are compared on real
prompts. Nothing is trained, and nothing is written but the table of --json. Start it as the
training is started, also under `accelerate launch`. Exit codes: 0 nothing failed, 1 something did,
2 the input is wrong.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adora_vl.config.command import parse_command
from adora_vl.rewards.choose import accepts_rounding, parse_reward_entries
from adora_vl.rewards.entries import JUDGE
from adora_vl.utils.checks import Check, as_json, failed, format_checks, is_checks_json, is_healthy
from adora_vl.utils.cli import USUAL_IMPORT_S, Parser, announce_imports, path_option, run_command
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import check_json_output, naming_write_errors, replace_file
from adora_vl.utils.launch import (
    exit_without_finalization,
    has_vllm_cpu_build,
    imports_of_a_command,
    prepare_engine_environment,
    use_expandable_segments,
)

if TYPE_CHECKING:
    from adora_vl.config.command import CliArgs
    from adora_vl.config.run_context import RunContext
    from adora_vl.preflight.request import RunRequest
    from adora_vl.preflight.resolved_run import ResolvedRun

CHECKED_ROWS = 8  # rows of the run's data set that each rank checks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the doctor: print a table of checks, and return the exit code.

    `arguments`: the words of the command line; None: those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(
        prog="python -m adora_vl.doctor",
        usage="%(prog)s --config FILE.yaml [--key value ...] [--json FILE]",
        description=__doc__,
        epilog="All other arguments are those of the training command; see `python -m "
        "adora_vl.train --help`.",
    )
    parser.add_argument(
        "--json", type=path_option, metavar="FILE", help="write the table there too"
    )
    is_main_process = os.environ.get("RANK", "0") == "0"
    checks: list[Check] = []

    def command() -> None:
        """Run the checks of the command in `words`, and print or write their table."""
        options, training_words = parser.parse_known_args(words)
        if options.json is not None:
            # Now, and not after minutes of checks.
            check_json_output(
                "--json", path=options.json, kind="a table of the doctor", is_ours=is_checks_json
            )
        # A mistake in the command is found before torch is imported, which takes seconds.
        cli_args = parse_command(training_words)
        announce_imports(USUAL_IMPORT_S)
        checks.extend(diagnose(cli_args))
        if is_main_process:
            print(format_checks(checks), flush=True)
        if is_main_process and options.json is not None:
            with naming_write_errors("--json", options.json):
                replace_file(options.json, json.dumps(as_json(checks), indent=2) + "\n")

    exit_code = run_command(
        command, interrupt_note="nothing was written", prints_errors=is_main_process
    )
    if exit_code != 0:
        return exit_code
    return 0 if is_healthy(checks) else 1


def diagnose(cli_args: CliArgs) -> list[Check]:
    """Run every check of a training command, and return the results in the order of the table.

    The cheap checks come first. If checks fail, those that build on them are not made. Raises
    `UserError` for a wrong command.
    """
    prepare_engine_environment()
    use_expandable_segments()
    from adora_vl.doctor.checks import check_libraries, check_torchvision

    checks = [*check_libraries(), check_torchvision()]
    if not is_healthy(checks):
        # The next imports may fail with other versions of the libraries.
        return checks
    with imports_of_a_command():
        from adora_vl.config.run_context import RunContext
        from adora_vl.preflight.request import request_from_command
        from adora_vl.preflight.run_checks import run_checks

    request = request_from_command(cli_args)
    context = RunContext.of_launch(request.config, output_dir_mode="inspect")
    checks += environment_checks(request, context)
    if not is_healthy(checks):
        # Further checks would use the wrong libraries, and say nothing about the run.
        return checks
    run = run_checks(request, context)
    checks += checks_without_weights(run)
    return checks + engine_checks(run)


def environment_checks(request: RunRequest, context: RunContext) -> list[Check]:
    """Check the libraries that only some runs need, driver, compilers, and limit of open files.

    `request`: what the user asks for. `context`: where the run takes place.
    """
    import torch

    from adora_vl.doctor import checks

    config = request.config
    model = request.model.model_args
    uses_deepspeed = context.sharding.zero_stage is not None
    libraries = checks.check_optional_libraries(
        use_vllm=config.use_vllm,
        use_peft=model.use_peft,
        use_deepspeed=uses_deepspeed,
        four_bit=model.load_in_4bit,
    )
    if model.load_in_4bit and is_healthy(libraries):
        libraries.append(checks.check_four_bit())
    builds = checks.check_builds(
        use_cpu=config.use_cpu,
        use_vllm=config.use_vllm,
        gpus=torch.cuda.device_count(),
        cuda=torch.version.cuda,
        vllm_is_cpu_build=has_vllm_cpu_build(),
    )
    # A run on the CPU needs neither the driver nor Triton.
    cuda = None if config.use_cpu else torch.version.cuda
    driver = checks.check_driver(cuda=cuda, driver=checks.driver_version())
    compilers = checks.check_compilers(deepspeed=uses_deepspeed, triton=cuda is not None)
    return [*libraries, builds, driver, compilers, checks.check_open_files()]


def checks_without_weights(run: ResolvedRun) -> list[Check]:
    """Check what needs the data and the config, but no weights: grader, rewards, output folder.

    The grader and the rewards are tried on the first `CHECKED_ROWS` rows of the data set.
    """
    from adora_vl.doctor.checks import check_golds, check_rewards, check_writable

    script_args = run.script_args
    config = run.config
    train = run.data.train_dataset
    assert script_args is not None, "a doctor examines a command"
    assert train is not None, "a doctor examines a command"
    # The images are not needed, and decoding them takes long.
    dataset = train.remove_columns("images") if "images" in train.column_names else train
    rows = [dataset[number] for number in range(min(CHECKED_ROWS, len(train)))]
    checks = [
        check_golds(rows, rounding=accepts_rounding(parse_reward_entries(script_args.adora_reward)))
    ]
    # Functions of the user's were tried already, and may rate answers by something else than being
    # right. A judge, which is a served model, may give any score, or none where it does not reply.
    has_judge = JUDGE in run.rewards.entries
    if is_healthy(checks) and not run.rewards.user_functions and not has_judge:
        checks.append(
            check_rewards(
                rows,
                functions=run.rewards.functions,
                weights=config.reward_weights,
                correct_above=config.adora_correct_above,
            )
        )
    checks.append(check_writable(Path(config.output_dir)))
    checks.append(_room_check(run))
    return checks


def _room_check(run: ResolvedRun) -> Check:
    """Check that the disk of `output_dir` has room for the run's checkpoints and final model."""
    from adora_vl.doctor.checks import check_room
    from adora_vl.planning.disk import (
        max_checkpoint_count,
        max_run_folder_bytes,
        predict_checkpoint_bytes,
    )

    config = run.config
    checkpoint_bytes = predict_checkpoint_bytes(config, run.shape, run.context.sharding)
    model_bytes = run.shape.total_parameters * run.shape.bytes_per_weight
    checkpoint_count = max_checkpoint_count(config, run.layout, run.data.row_count)
    if checkpoint_count is None:
        # Without a limit, and of unknown length: the run needs room for one at least.
        checkpoint_count = 1
    needed_bytes = max_run_folder_bytes(
        checkpoint_bytes,
        model_bytes=model_bytes,
        checkpoint_count=checkpoint_count,
        record_gb=config.adora_record_gb,
    )
    return check_room(
        Path(config.output_dir),
        needed_bytes=needed_bytes,
        checkpoint_bytes=checkpoint_bytes,
        checkpoint_count=checkpoint_count,
    )


def engine_checks(run: ResolvedRun) -> list[Check]:
    """Build the trainer and its engine as a training would, and compare them; no step is made.

    A callback at the beginning of the training makes the checks, and ends it by an exception.
    """
    from trl import GRPOTrainer

    from adora_vl.doctor.engine import ChecksFinished, EngineChecksCallback
    from adora_vl.train import build_trainer

    config = run.config
    config.log_completions = False
    config.report_to = []
    config.save_strategy = "no"
    config.disable_tqdm = True
    with tempfile.TemporaryDirectory(prefix="adora_vl_doctor_") as folder:
        # Nothing may be written into the user's own folder.
        config.output_dir = folder
        try:
            trainer = build_trainer(run)
        except UserError:
            raise
        except Exception as error:  # vLLM raises exceptions of many classes
            line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            remedy = (
                "if memory is short, `--dry-run` says what would fit; else look above for vLLM's "
                "own message"
            )
            return [failed("model and engine start", line, remedy)]
        engine_checks_callback = EngineChecksCallback(
            trainer.parts.engine_and_policy, trainer.models_by_role(), row_count=CHECKED_ROWS
        )
        # First, before the callbacks that check or evaluate when a training begins.
        trainer.callback_handler.callbacks.insert(0, engine_checks_callback)
        try:
            # TRL's own method, since that of the subclass would lock the run's folder.
            GRPOTrainer.train(trainer)
        except ChecksFinished:
            pass
        finally:
            trainer.close()
            trainer.accelerator.end_training()
        return engine_checks_callback.checks


if __name__ == "__main__":
    exit_without_finalization(main())
