"""The entry point: read the config, build, train, report.

accelerate launch --config_file configs/accelerate/cpu.yaml -m adora_vl.train --config configs/train/smoke_cpu.yaml
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adora_vl.checkpoint.launcher import watch_launcher
from adora_vl.commands import EXIT_INTERRUPTED
from adora_vl.dry_run.options import take_options
from adora_vl.dry_run.options import wanted as wants_dry_run
from adora_vl.errors import RolloutError, RunError, UserError, in_one_line, lost_contact
from adora_vl.families import sees_images
from adora_vl.files import written_to
from adora_vl.prepare import Run, prepare
from adora_vl.versions import check_versions

if TYPE_CHECKING:
    from adora_vl.checkpoint.stop import StopOnSignal
    from adora_vl.guards import SkipBadSteps
    from adora_vl.trainer import AdoraGRPOTrainer

# After which a rank takes itself for the only one that has found a mistake. Python takes seconds to end where torch is
# imported, and longer on a busy machine.
_ALONE_S = 20.0


def build_trainer(run: Run) -> AdoraGRPOTrainer:
    """Weights are loaded here, and nowhere before."""
    from trl import get_peft_config

    from adora_vl.trainer import AdoraGRPOTrainer

    config, model = run.config, run.model
    own: dict[str, Any] = {"revision": model.model_revision, "dtype": model.dtype}
    if model.attn_implementation is not None:
        own["attn_implementation"] = model.attn_implementation
    config.model_init_kwargs = {**own, **(config.model_init_kwargs or {})}
    return AdoraGRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=list(run.rewards.functions),
        args=config,
        train_dataset=run.dataset,
        peft_config=get_peft_config(model),
    )


def load(run: Run) -> AdoraGRPOTrainer:
    """`build_trainer`, whose failure is one line: of the user where a key of `model_init_kwargs` is what is wrong."""
    given = dict(run.config.model_init_kwargs or {})
    try:
        return build_trainer(run)
    except (UserError, RunError, RolloutError):
        raise
    except Exception as error:  # model, engine, optimizer and trackers each have their own
        wrong = next((key for key in given if key in str(error)), None)
        if wrong is not None and isinstance(error, TypeError | ValueError):
            raise UserError(
                f"model_init_kwargs: {wrong}: {given[wrong]!r:.60} is refused by the model ({in_one_line(error)})"
            ) from error
        raise RunError(f"the model or the engine could not be loaded ({in_one_line(error)})") from error


def add_callbacks(trainer: AdoraGRPOTrainer, run: Run) -> tuple[StopOnSignal, SkipBadSteps]:
    """What watches the training. Returned are those that may end it."""
    from adora_vl.checkpoint.stop import StopOnSignal
    from adora_vl.doctor.self_check import SelfCheck
    from adora_vl.evaluation import EvaluateOnTheWay
    from adora_vl.guards import DeepSpeedSteps, SkipBadSteps
    from adora_vl.models.precision import RefuseWrongBuffers

    deepspeed = DeepSpeedSteps(lambda: trainer.model_wrapped, trainer.accelerator)
    stop = StopOnSignal()
    bad_steps = SkipBadSteps(
        run.config.adora_max_bad_steps,
        trainer.ratio_guard,
        trainer.log_figure,
        deepspeed if trainer.is_deepspeed_enabled else None,
        fp16=bool(run.config.fp16),
    )
    for callback in (stop, bad_steps, RefuseWrongBuffers(trainer)):
        trainer.add_callback(callback)
    if run.config.adora_self_check:
        trainer.add_callback(SelfCheck(trainer))
    if run.evaluations:
        trainer.add_callback(EvaluateOnTheWay(trainer, run.evaluations, run.script.adora_system_prompt))
    return stop, bad_steps


def save_final_model(trainer: AdoraGRPOTrainer, output_dir: Path) -> Path:
    """Save the model and the trainer's state into `output_dir`. Returns the folder of the whole model.

    With LoRA that is `output_dir/merged`: `output_dir` has the adapter alone, which neither vLLM nor the evaluators
    load. Raises `RunError` where they cannot be written.
    """
    from adora_vl.models.merged import save_merged

    try:
        trainer.save_model(str(output_dir))
        trainer.save_state()
        merged = output_dir / "merged"
        if not save_merged(trainer.model, trainer.processing_class, merged, trainer.accelerator):
            return output_dir
        if trainer.accelerator.is_main_process:
            trainer.card.write(merged, trainer.state)
    except Exception as error:  # torch and safetensors raise errors of their own for a full disk
        where = trainer.checkpoints.where_to_go_on()
        raise RunError(f"the model could not be written into {str(output_dir)!r} ({error}); {where}") from error
    return merged


def train(arguments: Sequence[str]) -> int:
    """Train, save the model with its processor into `output_dir`, and print what happened and where to look."""
    from adora_vl.checkpoint.set_aside import delete_aside, set_aside
    from adora_vl.checkpoint.stop import EXIT_STOPPED, mark_stopped
    from adora_vl.checkpoint.universal import expect_universal, is_universal
    from adora_vl.export import copy_model
    from adora_vl.guards import located
    from adora_vl.report.card import model_card
    from adora_vl.report.manifest import end_manifest, failure_noted, write_manifest
    from adora_vl.report.summary import print_summary

    run = prepare(arguments)
    if run.finished:
        if run.config.process_index == 0:
            with written_to("output_dir", Path(run.config.output_dir)):
                copy_model(run.finished, Path(run.config.output_dir))
            print(f"{run.finished} is the last step: nothing left to train; its model is in {run.config.output_dir}")
        return 0
    trainer = load(run)
    trainer.run_facts = {"fingerprint": run.fingerprint}
    manifest = run.manifest(arguments)
    manifest["model"]["sees_images"] = sees_images(trainer.model.config)
    trainer.card.text = partial(model_card, manifest)
    output_dir, is_main = Path(run.config.output_dir), trainer.accelerator.is_main_process
    if is_main:
        if run.start.replaces:
            set_aside(output_dir)  # now that all that is known of the new run is in order
        write_manifest(manifest, output_dir)
    trainer.accelerator.wait_for_everyone()
    stop, bad_steps = add_callbacks(trainer, run)
    if run.start.checkpoint:
        trainer.begin_at(run.start.checkpoint)
        if is_universal(Path(run.start.checkpoint)):
            expect_universal(trainer)
    started = time.perf_counter()
    with failure_noted(manifest, output_dir, lambda: trainer.state.global_step, is_main):
        with stop, located(lambda: trainer.state.global_step, trainer.checkpoints.where_to_go_on):
            trainer.train(resume_from_checkpoint=run.start.checkpoint)
        if bad_steps.reason:
            raise RunError(f"step {trainer.state.global_step}: {bad_steps.reason}")
    seconds = time.perf_counter() - started
    if stop.stopped:
        if is_main:
            step = trainer.state.global_step
            mark_stopped(output_dir, step)
            end_manifest(manifest, output_dir, "stopped", step)
            print(f"Stopped after step {step}; the same command goes on from checkpoint-{step}:", file=sys.stderr)
            print(manifest["command"], file=sys.stderr)
    else:
        with failure_noted(manifest, output_dir, lambda: trainer.state.global_step, is_main):
            model_folder = save_final_model(trainer, output_dir)
        if is_main:
            delete_aside(output_dir)
            end_manifest(manifest, output_dir, "finished", trainer.state.global_step)
            log, command = trainer.state.log_history, manifest["command"]
            print_summary(log, run.config, model_folder, seconds, data=run.data[0], command=command)
    trainer.accelerator.wait_for_everyone()
    stop.release()
    trainer.close()
    trainer.accelerator.end_training()
    return EXIT_STOPPED if stop.stopped else 0


def report_stop(error: Exception, cause: BaseException | None = None) -> None:
    """One line, the last one; where another error is the cause, its traceback first. `cause`: by default the one that
    `error` was raised from.

    All ranks stop together where there is no such cause, and one speaks for all.
    """
    rank, ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    cause = cause or error.__cause__
    if cause is not None:
        traceback.print_exception(cause)
    elif rank != "0":
        return
    place = f" (rank {rank} of {ranks})" if cause is not None and ranks != "1" else ""
    print(f"error{place}: {error}", file=sys.stderr, flush=True)


def report_mistake(error: UserError) -> None:
    """One line. Every rank finds most mistakes, and the first rank of each machine speaks for all of them.

    A rank that has found one alone says it itself: the first one then waits for it in a collective call, so the
    launcher, which ends all ranks once one has ended, has not ended this one after some seconds.
    """
    place = ""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_ALONE_S)
        place = f" (rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')})"
    print(f"error{place}: {error}", file=sys.stderr, flush=True)


def dry_run(arguments: Sequence[str]) -> int:
    """With `--dry-run`: say what the run would do and whether it fits, load no weight, write nothing."""
    from adora_vl.dry_run.command import dry_run

    return dry_run(arguments)


def look_first(words: Sequence[str]) -> None:
    """Versions, keys and values: what can be wrong before anything slow is imported. Raises `UserError`."""
    check_versions(use_vllm=False)
    from adora_vl.config.first_look import first_look

    first_look(take_options(words)[1] if wants_dry_run(words) else words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 the user's input is wrong (one line), 75 stopped by a signal with a checkpoint, 130
    interrupted outside the training, 1 anything else: one line with the step and the checkpoint to go on from, after
    the traceback of its cause; of a dry run 1 that it does not fit, in words.
    """
    words = sys.argv[1:] if arguments is None else arguments
    watch_launcher()
    try:
        look_first(words)
        return dry_run(words) if wants_dry_run(words) else train(words)
    except UserError as error:
        report_mistake(error)
        return 2
    except (RunError, RolloutError) as error:
        report_stop(error)
        return 1
    except RuntimeError as error:
        lost = lost_contact(error)
        if not lost:
            raise
        report_stop(RunError(f"outside the training: {lost}"), cause=error)
        return 1
    except KeyboardInterrupt:  # while training a callback takes it, and saves
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("interrupted outside the training; checkpoints are as they were", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
