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

from adora_vl.config.command import read
from adora_vl.rewards import judge
from adora_vl.rewards.choose import accepts_rounding
from adora_vl.utils.checks import Check, as_json, failed, is_healthy, is_table, table
from adora_vl.utils.cli import READING_S, Parser, announce_reading, exit_code_of, path
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import check_json, replace_file, written_to
from adora_vl.utils.launch import (
    find_cpu_build,
    leave,
    prepare_engine_environment,
    use_expandable_segments,
)

if TYPE_CHECKING:
    from adora_vl.config.command import CliArgs
    from adora_vl.preflight.facts import ResolvedRun
    from adora_vl.preflight.request import RunRequest

ROWS = 8  # real prompts, of each rank


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of checks, and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(
        prog="python -m adora_vl.doctor",
        usage="%(prog)s --config FILE.yaml [--key value ...] [--json FILE]",
        description=__doc__,
        epilog="All other arguments are those of the training command; see `python -m "
        "adora_vl.train --help`.",
    )
    parser.add_argument("--json", type=path, metavar="FILE", help="write the table there too")
    speaks = os.environ.get("RANK", "0") == "0"
    checks = list[Check]()

    def command() -> None:
        """Check what the words ask for, and print or write the table."""
        options, rest = parser.parse_known_args(words)
        if options.json is not None:
            # before minutes of checks
            check_json("--json", path=options.json, kind="a table of the doctor", is_ours=is_table)
        cli_args = read(rest)  # before torch, whose import takes seconds
        announce_reading(READING_S)
        checks.extend(diagnose(cli_args))
        if speaks:
            print(table(checks), flush=True)
        if speaks and options.json is not None:
            with written_to("--json", options.json):
                replace_file(options.json, json.dumps(as_json(checks), indent=2) + "\n")

    return exit_code_of(command, "nothing was written", speaks=speaks) or int(
        not is_healthy(checks)
    )


def diagnose(cli_args: CliArgs) -> list[Check]:
    """Run every check of a training command, the cheap ones first.

    Raises `UserError` where the command is wrong.
    """
    prepare_engine_environment()
    use_expandable_segments()
    from adora_vl.doctor.checks import check_libraries, check_torchvision

    checks = [*check_libraries(), check_torchvision()]
    if not is_healthy(checks):
        # another version may not even be importable
        return checks
    from adora_vl.config.run_context import RunContext
    from adora_vl.preflight.request import request_from_command
    from adora_vl.preflight.run_checks import run_checks

    request = request_from_command(cli_args)
    checks += environment_checks(request)
    if not is_healthy(checks):
        # Further checks would use the wrong libraries, and say nothing about the run.
        return checks
    run = run_checks(request, RunContext.of_launch("look"))
    checks += paper_checks(run)
    return checks + engine_checks(run)


def environment_checks(request: RunRequest) -> list[Check]:
    """Check the builds of the libraries that a run uses, and what lies outside Python."""
    import torch

    from adora_vl.doctor import checks as make

    config = request.config
    model = request.model.keys
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    four_bit = model.load_in_4bit
    use_vllm = config.use_vllm
    parts = make.check_parts(
        use_vllm=use_vllm, use_peft=model.use_peft, use_deepspeed=deepspeed, four_bit=four_bit
    )
    if four_bit and is_healthy(parts):
        parts.append(make.check_four_bit())
    builds = make.check_builds(
        use_cpu=config.use_cpu,
        use_vllm=config.use_vllm,
        gpus=torch.cuda.device_count(),
        cuda=torch.version.cuda,
        vllm_is_cpu_build=find_cpu_build(),
    )
    cuda = None if config.use_cpu else torch.version.cuda
    driver = make.check_driver(cuda=cuda, driver=make.driver_version())
    return [
        *parts,
        builds,
        driver,
        make.check_compilers(deepspeed=deepspeed, triton=cuda is not None),
    ]


def paper_checks(run: ResolvedRun) -> list[Check]:
    """Check grader, reward and output folder: what needs data and config, but no weights."""
    from adora_vl.doctor.checks import check_golds, check_rewards, check_room, check_writable
    from adora_vl.planning.disk import checkpoint_of, run_bytes

    script = run.script
    config = run.config
    train = run.data.train
    assert script is not None, "a doctor examines a command"
    assert train is not None, "a doctor examines a command"
    without_images = train.remove_columns(
        [name for name in ("images",) if name in train.column_names]
    )
    rows = [without_images[number] for number in range(min(ROWS, len(train)))]
    checks = [check_golds(rows, rounding=accepts_rounding(script.adora_reward))]
    # Functions of the user's were tried already, and their sums may mean something else. What a
    # judge thinks of an answer in a box is its own, and may be no score where it does not reply.
    has_judge = judge.NAME in run.rewards.entries
    if is_healthy(checks) and not run.rewards.user_functions and not has_judge:
        checks.append(
            check_rewards(
                rows,
                functions=run.rewards.functions,
                weights=config.reward_weights,
                correct_above=config.adora_correct_above,
            )
        )
    folder = Path(config.output_dir)
    checks.append(check_writable(folder))
    shape = run.shape
    checkpoint_bytes = checkpoint_of(config, shape, run.context.sharding)
    needed = shape.total_parameters * shape.weight_bytes
    checkpoints = 0
    if config.save_strategy == "steps":
        checkpoints = config.save_total_limit or 1
        needed = run_bytes(checkpoint_bytes, needed, checkpoints)
    room = check_room(
        folder, needed=needed, checkpoint_bytes=checkpoint_bytes, checkpoints=checkpoints
    )
    return [*checks, room]


def engine_checks(run: ResolvedRun) -> list[Check]:
    """Return the trainer that training would use, up to just before its first step."""
    from trl import GRPOTrainer

    from adora_vl.doctor.engine import ExamineBeforeStepOne, Examined
    from adora_vl.train import build_trainer

    config = run.config
    config.log_completions = False
    config.report_to = []
    config.save_strategy = "no"
    config.disable_tqdm = True
    with tempfile.TemporaryDirectory(prefix="adora_vl_doctor_") as folder:
        config.output_dir = folder  # nothing may be written into the user's
        try:
            trainer = build_trainer(run)
        except UserError:
            raise
        except Exception as error:  # an engine that does not start has many ways not to
            line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            remedy = (
                "if memory is short, `--dry-run` says what would fit; else look above for vLLM's "
                "own message"
            )
            return [failed("model and engine start", line, remedy)]
        examination = ExamineBeforeStepOne(trainer.engine_pair, trainer.models_by_role, ROWS)
        # before what would check or evaluate by itself
        trainer.callback_handler.callbacks.insert(0, examination)
        try:
            GRPOTrainer.train(trainer)  # without a run's folder
        except Examined:
            pass
        finally:
            trainer.close()
            trainer.accelerator.end_training()
        return examination.checks


if __name__ == "__main__":
    leave(main())
