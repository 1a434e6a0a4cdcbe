"""The entry point of a training: read the config, build the trainer, train, report.

accelerate launch --config_file configs/accelerate/cpu.yaml -m adora_vl.train --config
configs/train/smoke_cpu.yaml
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adora_vl.config.command import CliArgs, parse_command
from adora_vl.config.dry_run_options import split_dry_run_options
from adora_vl.config.help import asks_for_help, help_text
from adora_vl.prepare import prepare
from adora_vl.utils import errors
from adora_vl.utils.cli import (
    USUAL_IMPORT_S,
    announce_imports,
    flushing_stdout,
    handle_broken_pipe,
    run_command,
)
from adora_vl.utils.errors import DiskFullError, RolloutError, RunError, UserError
from adora_vl.utils.files import disk_is_full, naming_write_errors
from adora_vl.utils.interrupts import EXIT_INTERRUPTED
from adora_vl.utils.launch import (
    STARTUP_LOG,
    StartupLog,
    end_with_launcher,
    exit_without_finalization,
    imports_of_a_command,
)
from adora_vl.utils.open_files import open_files_message
from adora_vl.utils.outputs import ignore_closed_outputs
from adora_vl.utils.secrets import redact_secrets, without_secrets
from adora_vl.utils.versions import check_versions

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from adora_vl.preflight.resolved_run import ResolvedRun
    from adora_vl.trainer import AdoraGRPOTrainer

# Seconds before a rank other than the first reports a mistake of its own. The launcher ends it
# before that if the first rank has found the same mistake, but that takes a while: a Python process
# that has imported torch needs seconds to end, and longer on a busy machine.
_SECONDS_BEFORE_SINGLE_RANK_REPORT = 20.0


def build_trainer(run: ResolvedRun) -> AdoraGRPOTrainer:
    """Build the trainer of a run, which loads the weights of the models.

    `run`: a run that has passed all checks, with its config, data and rewards.
    """
    with imports_of_a_command():
        from adora_vl.trainer import AdoraGRPOTrainer

    config = run.config
    model_args = run.request.model.model_args
    init_kwargs: dict[str, Any] = {"revision": run.model.revision, "dtype": model_args.dtype}
    if model_args.attn_implementation is not None:
        init_kwargs["attn_implementation"] = model_args.attn_implementation
    config.model_init_kwargs = {**init_kwargs, **(config.model_init_kwargs or {})}
    return AdoraGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=list(run.rewards.functions),
        args=config,
        run=run,
    )


def load_trainer(run: ResolvedRun, log: Path) -> AdoraGRPOTrainer:
    """Build the trainer, and write what libraries print meanwhile into the file `log`.

    Raises `UserError` for an entry of `model_init_kwargs` that the model refuses, and `RunError`
    for anything else that cannot be loaded.
    """
    # A copy of what the user has set: `build_trainer` adds entries.
    init_kwargs = dict(run.config.model_init_kwargs or {})
    if run.request.is_main_process:
        print(f"Loading model and engine; what the libraries say is in {log}", flush=True)
    try:
        with StartupLog(log, is_first_process=run.request.is_main_process, option="output_dir"):
            return build_trainer(run)
    except (UserError, RunError, RolloutError):
        raise
    # Model, engine, optimizer and trackers each raise exceptions of their own.
    except Exception as error:
        open_files_line = open_files_message(error)
        if open_files_line:
            raise UserError(open_files_line) from error
        refused_keys = [key for key in init_kwargs if key in str(error)]
        if refused_keys and isinstance(error, TypeError | ValueError):
            key = refused_keys[0]
            value = f"{without_secrets(init_kwargs)[key]!r:.60}"
            reason = errors.describe_error(error)
            raise UserError(
                f"model_init_kwargs: {key}: {value} is refused by the model ({reason})"
            ) from error
        raise RunError(
            f"the model or the engine could not be loaded ({errors.describe_error(error)})"
        ) from error


def release_output_at_train_begin(trainer: AdoraGRPOTrainer, startup: StartupLog) -> None:
    """Add a callback that lets output go to the terminal again when the training begins.

    It is the first callback, so that the others print to the terminal.

    Args:
        trainer: gets the callback.
        startup: writes what is printed until then into a file.
    """
    from transformers import TrainerCallback
    from transformers.utils.logging import disable_progress_bar

    class ReleaseOutput(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
        def on_train_begin(
            self,
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            **kwargs: Any,
        ) -> None:
            """Let later output go to the terminal again."""
            startup.release()

    trainer.callback_handler.callbacks.insert(0, ReleaseOutput())
    # Otherwise every checkpoint would show a bar for its files, between the lines of the steps.
    disable_progress_bar()


def save_final_model(trainer: AdoraGRPOTrainer, output_dir: Path) -> Path:
    """Save the model and the trainer's state into `output_dir`.

    With LoRA `output_dir` gets the adapter alone, which neither vLLM nor the evaluators load, and
    `output_dir/merged` the whole model. Collective: every rank calls it. Raises `RunError` where
    the files cannot be written.

    Returns:
        The folder of the whole model.
    """
    from adora_vl.checkpoint.run_files import recording_saved_files
    from adora_vl.export import save_merged
    from adora_vl.models.load import MERGED_FOLDER
    from adora_vl.record.card import write_card

    is_main = trainer.accelerator.is_main_process
    try:
        # Outside of the block below: `save_model` records its files as those of the run itself.
        trainer.save_model(str(output_dir))
        with recording_saved_files(output_dir, is_main):
            trainer.save_state()
            merged_folder = output_dir / MERGED_FOLDER
            is_merged = save_merged(
                trainer.model,
                processing_class=trainer.processing_class,
                folder=merged_folder,
                accelerator=trainer.accelerator,
            )
            if not is_merged:
                return output_dir
            if is_main:
                write_card(trainer.manifest, merged_folder, trainer.state)
    except Exception as error:
        remedy = trainer.parts.checkpoint_writer.describe_resume_point()
        if disk_is_full(error):
            raise DiskFullError(
                "the model could not be written (no space left on the disk of "
                f"{str(output_dir)!r}); make room there, and {remedy}"
            ) from None
        raise RunError(
            f"the model could not be written into {str(output_dir)!r} ({error}); {remedy}"
        ) from error
    return merged_folder


def finish_from_checkpoint(run: ResolvedRun, checkpoint: Path) -> None:
    """Write into `output_dir` what a finished run leaves there, from its last checkpoint.

    The run has made its last step, and may have been killed after that. What is written is what
    `finish_run` writes: model and state, the merged model of an adapter, and how the run has ended.
    One process calls this. Raises `UserError` if it cannot be written.

    Args:
        run: the run, which is not trained again.
        checkpoint: that of the last step.
    """
    from transformers import TrainerState
    from transformers.trainer import TRAINER_STATE_NAME

    from adora_vl.checkpoint.run_files import read_run_manifest, recording_saved_files
    from adora_vl.checkpoint.store import read_checkpoint_manifest
    from adora_vl.export import copy_model, merge_checkpoint
    from adora_vl.models.load import MERGED_FOLDER
    from adora_vl.record.card import write_card
    from adora_vl.record.manifest import mark_finished
    from adora_vl.record.metrics import write_missing_end_of_metrics

    output_dir = Path(run.config.output_dir)
    manifest = run.manifest()
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    with (
        naming_write_errors("output_dir", output_dir),
        recording_saved_files(output_dir, saves_model=True),
    ):
        copy_model(checkpoint, output_dir, with_arguments=True)
        model_folders = [output_dir]
        if run.merges_at_end:
            merged_folder = output_dir / MERGED_FOLDER
            # Merging a large model takes minutes. A run that has finished has merged already.
            has_finished = read_run_manifest(output_dir).get("status") == "finished"
            if not has_finished or not merged_folder.is_dir():
                dtype = run.request.model.model_args.dtype or "auto"
                merge_checkpoint(checkpoint, merged_folder, dtype=dtype)
            model_folders.append(merged_folder)
        write_missing_end_of_metrics(output_dir, read_checkpoint_manifest(checkpoint), state)
        state.save_to_json(str(output_dir / TRAINER_STATE_NAME))
        # Behind the models: a run whose model cannot be written has not finished.
        mark_finished(manifest, output_dir, steps=state.global_step)
        for folder in model_folders:
            write_card(manifest, folder, state)
    print(f"{checkpoint} is the last step: nothing left to train; its model is in {output_dir}")


def record_stop(manifest: dict[str, Any], output_dir: Path, step: int) -> None:
    """Record that a signal stopped the run after this step, and print the command to go on.

    Args:
        manifest: the manifest of the run, which is written again.
        output_dir: the folder of the run.
        step: optimizer steps that were made.
    """
    from adora_vl.checkpoint.stop import mark_stopped
    from adora_vl.record.manifest import end_manifest

    mark_stopped(output_dir, step)
    end_manifest(manifest, output_dir=output_dir, status="stopped", steps=step)
    print(
        f"Stopped after step {step}; the same command goes on from checkpoint-{step}:",
        file=sys.stderr,
    )
    print(manifest["command"], file=sys.stderr)


def train(cli_args: CliArgs) -> int:
    """Train, save the model into `output_dir`, print a summary, and return the exit code.

    A run that has made its last step already is not trained; its end is written from the last
    checkpoint. A run that a signal stops saves a checkpoint and no model.
    """
    from adora_vl.checkpoint.stop import EXIT_STOPPED, StopOnSignal

    run = prepare(cli_args)
    output_dir = Path(run.config.output_dir)
    if run.finished_checkpoint:
        if run.request.is_main_process:
            finish_from_checkpoint(run, run.finished_checkpoint)
        return 0
    trainer = load_trainer(run, output_dir / STARTUP_LOG)
    stop = StopOnSignal()
    trainer.callback_handler.callbacks.insert(0, stop)
    startup = StartupLog(output_dir / STARTUP_LOG, option="output_dir")
    release_output_at_train_begin(trainer, startup)
    start_time = time.perf_counter()
    with stop, startup:
        trainer.train()
    seconds = time.perf_counter() - start_time
    if not stop.stopped:
        finish_run(trainer, run, output_dir, seconds=seconds)
    elif trainer.accelerator.is_main_process:
        record_stop(trainer.manifest, output_dir, trainer.state.global_step)
    trainer.accelerator.wait_for_everyone()
    stop.release()
    trainer.close()
    trainer.accelerator.end_training()
    return EXIT_STOPPED if stop.stopped else 0


def finish_run(
    trainer: AdoraGRPOTrainer, run: ResolvedRun, output_dir: Path, *, seconds: float
) -> None:
    """Save the model of a run that has made all of its steps, and print a summary.

    The manifest records how the run has ended. Collective: every rank saves.

    Args:
        trainer: the trainer of the run.
        run: its config and data.
        output_dir: the folder of the run.
        seconds: how long the training took.
    """
    from adora_vl.checkpoint.writer import delete_old_run
    from adora_vl.record.manifest import end_manifest, mark_failed_on_error
    from adora_vl.record.summary import summary_lines

    is_main = trainer.accelerator.is_main_process
    with mark_failed_on_error(
        trainer.manifest,
        output_dir=output_dir,
        count_steps=lambda: trainer.state.global_step,
        is_main=is_main,
    ):
        model_folder = save_final_model(trainer, output_dir)
    if is_main:
        delete_old_run(output_dir)
        end_manifest(
            trainer.manifest,
            output_dir=output_dir,
            status="finished",
            steps=trainer.state.global_step,
        )
        lines = summary_lines(
            trainer.state.log_history,
            config=run.config,
            model=model_folder,
            seconds=seconds,
            data=run.data.folders[0],
            command=trainer.manifest["command"],
        )
        print("\n".join(lines), flush=True)


def print_run_error(error: Exception, cause: BaseException | None = None) -> None:
    """Print an error of the run in one line, after the traceback of its cause if it has one.

    An error without a cause is raised on all ranks together, and only the first rank prints it.

    Args:
        error: the error; its text is the line.
        cause: the exception behind it; None: the one that `error` was raised from, if any.
    """
    rank = os.environ.get("RANK", "0")
    ranks = os.environ.get("WORLD_SIZE", "1")
    cause = cause or error.__cause__
    # An error with a cause, and a full disk, may be this rank's alone.
    may_be_alone = cause is not None or isinstance(error, DiskFullError)
    if cause is not None:
        print(redact_secrets("".join(traceback.format_exception(cause))), end="", file=sys.stderr)
    if not may_be_alone and rank != "0":
        return
    rank_note = f" (rank {rank} of {ranks})" if may_be_alone and ranks != "1" else ""
    print(f"error{rank_note}: {error}", file=sys.stderr, flush=True)


def print_user_error(error: UserError) -> None:
    """Print a user's mistake in one line, once for each machine.

    Most mistakes are raised on every rank. The first rank of each machine prints them and ends, and
    the launcher then ends the other ranks. A rank that is still running some seconds later is the
    only one with this mistake, and prints it itself. A `SharedUserError` is known to be raised on
    all ranks; only the first rank of all prints it.
    """
    rank_note = ""
    if isinstance(error, errors.SharedUserError) and os.environ.get("RANK", "0") != "0":
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # The launcher ends this process meanwhile if the mistake is shared.
        time.sleep(_SECONDS_BEFORE_SINGLE_RANK_REPORT)
        rank_note = f" (rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')})"
    print(f"error{rank_note}: {error}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: done. 1: the run failed, or a dry run does not fit; one line names the step and the
    checkpoint to go on from, after the traceback of its cause. 2: the user's input is wrong, in one
    line. 75: stopped by a signal, with a checkpoint. 130: interrupted outside the training. 141:
    nobody reads what a dry run prints; a training goes on then.
    """
    argv = sys.argv[1:] if arguments is None else arguments
    end_with_launcher()
    try:
        if asks_for_help(argv):
            return run_command(lambda: print(help_text(argv)), interrupt_note="nothing was done")
        check_versions(use_vllm=False)
        # Without `--dry-run` the options are None, and all arguments are those of the training.
        options, training_arguments = split_dry_run_options(argv)
        cli_args = parse_command(argv if options is None else training_arguments)
        if options is None:
            ignore_closed_outputs()
        announce_imports(USUAL_IMPORT_S)
        if options is None:
            return train(cli_args)
        from adora_vl.planning.dry_run import dry_run

        with flushing_stdout():
            return dry_run(cli_args, options)
    except UserError as error:
        print_user_error(error)
        return 2
    except (RunError, RolloutError) as error:
        print_run_error(error)
        return 1
    except RuntimeError as error:
        lost_contact = errors.lost_contact_message(error)
        if not lost_contact:
            raise
        print_run_error(RunError(f"outside the training: {lost_contact}"), cause=error)
        return 1
    # During training a callback catches the signal, and saves a checkpoint.
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("interrupted outside the training; checkpoints are as they were", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return handle_broken_pipe()


if __name__ == "__main__":
    exit_without_finalization(main())
