"""What goes wrong during a run skips a step, or ends the run with a line that says how to go on.

The code counts optimizer steps from 0, and messages from 1: step 6 is "step 7" there.
"""

import errno
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import PIL.Image
import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from transformers import TrainerControl

from adora_vl import train
from adora_vl.checkpoint.writer import CheckpointWriter
from adora_vl.data.images import png_bytes
from adora_vl.data.loading import unreadable_rows, with_decoded_images
from adora_vl.training.guards import (
    DriftGuard,
    GenerationGuard,
    RatioGuard,
    errors_with_step,
    largest_ratio,
)
from adora_vl.training.optimizer_steps import SkipBadSteps
from adora_vl.types import Batch
from adora_vl.utils.errors import (
    EngineError,
    NoServerError,
    RolloutError,
    RunError,
    UserError,
    engine_call,
)
from adora_vl.utils.files import disk_is_full
from tests.support.disk import limit_file_size
from tests.support.step_context import step_context


class GuardedTraining:
    """A training of two weights by Adam with the callback `SkipBadSteps`.

    It skips an optimizer step whose gradient is not finite, and stops the training after two in a
    row.
    """

    def __init__(self) -> None:
        self.weights = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.optimizer = torch.optim.AdamW([self.weights], lr=0.1)
        self.logged: list[float] = []  # for each step 1 if it was skipped, else 0
        context = step_context(
            lambda name, value: self.logged.append(value), adora_max_ratio=1000.0
        )
        self.ratio_guard = RatioGuard(context)
        self.guard = SkipBadSteps(context, self.ratio_guard, get_deepspeed_engine=None)
        self.guard.max_bad_steps = 2
        self.control = TrainerControl()  # what the callback tells Transformers to do

    def step(self, *gradient: float, ratio: float | None = None) -> list[float]:
        """Make an optimizer step with this gradient, and return the weights after it.

        `ratio`: the largest importance ratio of the step, if `RatioGuard` has refused it.
        """
        self.ratio_guard.exceeding_ratio = ratio
        self.weights.grad = torch.tensor(gradient)
        nothing: Any = None
        self.guard.on_pre_optimizer_step(nothing, nothing, self.control, optimizer=self.optimizer)
        self.optimizer.step()
        weights: list[float] = self.weights.tolist()
        return weights


@pytest.mark.parametrize("bad_gradient", [math.nan, math.inf])
def test_a_bad_step_is_skipped_and_the_next_one_is_as_if_it_had_not_been(bad_gradient):
    """Neither the weights nor Adam's moments change by a gradient that is NaN or infinite."""
    training = GuardedTraining()
    weights_before = training.step(1.0, 1.0)
    moments = training.optimizer.state[training.weights]
    moments_before = {name: moment.clone() for name, moment in moments.items()}
    assert training.step(bad_gradient, 1.0) == weights_before
    for name, moment in moments_before.items():
        assert torch.equal(training.optimizer.state[training.weights][name], moment)
    assert training.step(1.0, 1.0) != weights_before
    assert training.logged == [0.0, 1.0, 0.0]
    assert training.guard.stop_reason is None


def test_bad_steps_in_a_row_save_and_stop():
    """The second bad step in a row makes the training save a checkpoint and stop."""
    training = GuardedTraining()
    # A good step between two bad ones begins the count anew.
    for gradient in (1.0, math.nan, 1.0, math.nan):
        training.step(gradient, 1.0)
        assert not training.control.should_training_stop
    training.step(math.nan, 1.0)
    assert "2 steps in a row" in str(training.guard.stop_reason)
    assert training.control.should_save
    # The checkpoint is of a run that goes on, so the training stops after it.
    assert not training.control.should_training_stop
    nothing: Any = None
    training.guard.on_save(nothing, nothing, training.control)
    assert training.control.should_training_stop


def test_a_checkpoint_has_the_bad_steps_in_a_row_until_the_run_has_stopped_for_them():
    training = GuardedTraining()
    assert training.guard.bad_steps_to_save() == 0
    training.step(math.nan, 1.0)
    assert training.guard.bad_steps_to_save() == 1
    training.step(math.nan, 1.0)
    assert training.guard.bad_steps_to_save() == 0


def test_the_reason_of_a_stop_names_a_ratio_that_exploded():
    """If `RatioGuard` has refused the steps, the reason has the last ratio and the bound's key."""
    training = GuardedTraining()
    training.step(math.nan, 1.0, ratio=5e4)
    training.step(math.nan, 1.0, ratio=7e4)
    reason = str(training.guard.stop_reason)
    assert (
        "2 steps in a row were skipped: the largest importance ratio of the last is 7e+04" in reason
    )
    assert "adora_max_ratio: 1000.0" in reason


class AfterTwoSteps(NamedTuple):
    """The callback of a run, and what it tells Transformers to do."""

    guard: SkipBadSteps
    control: TrainerControl


def two_deepspeed_steps(
    norm: float, *, skipped: bool, max_bad_steps: int = 2, fp16: bool = False
) -> AfterTwoSteps:
    """Make two steps under DeepSpeed.

    Args:
        norm: the norm of their gradients.
        skipped: whether DeepSpeed has skipped them.
        max_bad_steps: the number of bad steps in a row that stops the run.
        fp16: whether the run computes in float16. Then DeepSpeed skips steps while it looks for a
            loss scale, and the default bound on their number applies, not `max_bad_steps`.
    """
    engine = SimpleNamespace(get_global_grad_norm=lambda: norm)
    context = step_context(
        fp16=fp16, accelerator=SimpleNamespace(optimizer_step_was_skipped=skipped)
    )
    guard = SkipBadSteps(context, RatioGuard(context), get_deepspeed_engine=lambda: engine)
    control = TrainerControl()
    if not fp16:
        guard.max_bad_steps = max_bad_steps
    nothing: Any = None
    for step in (7, 8):
        state: Any = SimpleNamespace(global_step=step)
        guard.on_step_end(nothing, state, control)
    return AfterTwoSteps(guard=guard, control=control)


def test_steps_that_deepspeed_has_skipped_are_counted_and_stop_the_run_with_a_checkpoint():
    """Two steps that DeepSpeed has skipped in a row stop the run with a checkpoint.

    DeepSpeed skips steps itself, and only tells so after the step. The run goes on if its bound is
    three steps, if it searches a loss scale, or if the gradients are finite.
    """
    stopped = two_deepspeed_steps(norm=math.inf, skipped=True)
    assert "2 steps in a row" in str(stopped.guard.stop_reason)
    assert stopped.control.should_save
    nothing: Any = None
    stopped.guard.on_save(nothing, nothing, stopped.control)
    assert stopped.control.should_training_stop
    patient = two_deepspeed_steps(norm=math.inf, skipped=True, max_bad_steps=3)
    assert patient.guard.stop_reason is None
    searching_loss_scale = two_deepspeed_steps(norm=math.inf, skipped=True, fp16=True)
    assert searching_loss_scale.guard.stop_reason is None
    good = two_deepspeed_steps(norm=0.3, skipped=False)
    assert good.guard.bad_steps_in_a_row == 0


def test_what_deepspeed_has_applied_is_not_saved():
    """If DeepSpeed has applied gradients that are NaN, the run stops without a checkpoint."""
    stopped = two_deepspeed_steps(norm=math.nan, skipped=False)
    assert "are not finite and DeepSpeed has applied them" in str(stopped.guard.stop_reason)
    assert stopped.control.should_training_stop
    assert not stopped.control.should_save
    # Transformers asks for a checkpoint at the end of an epoch.
    stopped.control.should_save = True
    nothing: Any = None
    stopped.guard.on_epoch_end(nothing, nothing, stopped.control)
    assert not stopped.control.should_save


def test_the_largest_ratio_counts_tokens_and_no_padding(subtests):
    """The largest importance ratio of a row is that of its tokens, whatever stands at padding.

    A ratio is the policy's probability of a token over that of the policy that sampled it. The
    padding has the ratio 1, so no result is below 1.
    """
    # (log-ratios of a row of two tokens and one of padding, the level, the largest ratio). The
    # ratio of a sequence is the exponential of the mean log-ratio of its tokens.
    cases = [
        ([0.0, 2.0, 9.0], "token", math.exp(2)),
        ([0.0, 2.0, 9.0], "sequence", math.exp(1)),
        ([-3.0, -2.0, 9.0], "token", 1.0),
        ([0.0, math.nan, 0.0], "token", math.nan),
        ([0.0, 0.0, math.nan], "token", 1.0),
        ([0.0, 200.0, 0.0], "token", math.inf),
    ]
    for log_ratios, level, expected in cases:
        with subtests.test(f"{log_ratios} {level}"):
            mask_BC = torch.tensor([[1, 1, 0]])
            ratio = largest_ratio(torch.tensor([log_ratios]), mask_BC, level).item()
            assert ratio == pytest.approx(expected, nan_ok=True)


def test_a_ratio_above_the_bound_makes_the_loss_nan_and_is_told_once(subtests):
    """A largest ratio above the bound makes the loss NaN, and is told by the first pop alone.

    The old log-probabilities are 0, so the largest ratio is exp(log 4) = 4. The 9 stands at
    padding.
    """
    mask_BC = torch.tensor([[1, 1], [1, 0]])
    logps_BC = torch.tensor([[0.0, math.log(4)], [-1.0, 9.0]])
    micro_batch: Batch = {"old_per_token_logps": torch.zeros(2, 2), "completion_mask": mask_BC}

    for bound, is_exceeded in ((5.0, False), (3.0, True), (None, False)):
        with subtests.test(f"bound {bound}"):
            log: dict[str, float] = {}
            guard = RatioGuard(step_context(log, adora_max_ratio=bound))
            loss = guard.loss_or_nan(torch.tensor(2.0), logps_BC, micro_batch).item()
            assert log == {"adora/ratio_max": pytest.approx(4)}
            exceeding_ratio = guard.pop_exceeding_ratio()
            if is_exceeded:
                assert math.isnan(loss)
                assert exceeding_ratio == pytest.approx(4)
            else:
                assert loss == 2.0
                assert exceeding_ratio is None
            assert guard.pop_exceeding_ratio() is None
    # The first pass over a generation has no old log-probabilities: its ratio is 1.
    guard = RatioGuard(step_context(adora_max_ratio=1.0))
    without_old_logps: Batch = {"completion_mask": mask_BC}
    assert guard.loss_or_nan(torch.tensor(2.0), logps_BC, without_old_logps) == 2


def test_a_ratio_that_explodes_on_another_rank_skips_the_step_here_too():
    """A ratio above the bound on another rank makes the loss NaN here too, so all skip the step.

    The other rank's largest ratio is 4, this one's is 1, and the bound is 3.
    """
    log: dict[str, float] = {}
    two_ranks = SimpleNamespace(gather=lambda value: torch.cat([value, torch.tensor([4.0])]))
    guard = RatioGuard(step_context(log, accelerator=two_ranks, adora_max_ratio=3.0))
    micro_batch: Batch = {
        "old_per_token_logps": torch.zeros(1, 2),
        "completion_mask": torch.ones(1, 2),
    }
    assert math.isnan(guard.loss_or_nan(torch.tensor(2.0), torch.zeros(1, 2), micro_batch))
    assert log == {"adora/ratio_max": 4.0}
    assert guard.pop_exceeding_ratio() == 4.0


def test_an_engine_that_drifts_stops_the_run_with_a_checkpoint_and_only_then(tmp_path):
    """A drift above `adora_max_drift` stops the run with a checkpoint, and one below is logged.

    The engine's log-probabilities are 0.5 nats off at each token. The 50 stands at padding. The
    message names the step that is being made, which is the one after the 4 made.
    """
    batch: Batch = {
        "completion_mask": torch.tensor([[1, 1], [1, 0]]),
        "old_per_token_logps": torch.tensor([[-1.0, -2.0], [-3.0, 50.0]]),
        "sampling_per_token_logps": torch.tensor([[-1.5, -2.5], [-3.5, 0.0]]),
    }
    log: dict[str, float] = {}
    DriftGuard(step_context(log, adora_max_drift=0.6)).check_batch(batch, step=4)
    assert log == {"adora/drift": pytest.approx(0.5)}, "in nats per token, without the padding"
    strict = DriftGuard(step_context(adora_max_drift=0.4, save_now=lambda: tmp_path))
    with pytest.raises(RolloutError, match=rf"step 5\b.*{tmp_path}"):
        strict.check_batch(batch, step=4)
    # Without the column there is nothing to compare, unless a pass hands its results over.
    policy_logps_BC = batch.pop("old_per_token_logps") - 9.0
    strict.check_batch(batch, step=4)
    with pytest.raises(RolloutError):
        strict.check_batch(batch, step=4, logps_BC=policy_logps_BC)


def test_the_drift_is_of_what_the_present_weights_have_sampled(tmp_path):
    """Drift leaves out the tokens that earlier weights have sampled (`stale_tokens` of a row).

    Earlier weights, which are far from the policy, sampled four of the six tokens. These four are
    the first token of the first row, at which the engine is 9 nats off, and all tokens of the
    second, for which the engine has no log-probability. It is 0.1 nats off at the other two.
    """
    batch: Batch = {
        "completion_mask": torch.ones(2, 3),
        "old_per_token_logps": torch.zeros(2, 3),
        "sampling_per_token_logps": torch.tensor([[9.0, 0.1, 0.1], [math.nan] * 3]),
        "stale_tokens": torch.tensor([1, 3]),
    }
    log: dict[str, float] = {}
    guard = DriftGuard(step_context(log, adora_max_drift=0.2))
    guard.check_batch(batch, step=4)
    assert log == {"adora/drift": pytest.approx(0.1)}
    batch["stale_tokens"] = torch.tensor([3, 3])
    log.clear()
    guard.check_batch(batch, step=4)
    assert log == {}, "nothing can be compared"
    # If the present weights had sampled the whole first row, its drift would stop the run.
    batch["stale_tokens"] = torch.tensor([0, 3])
    saving_guard = DriftGuard(step_context(adora_max_drift=0.2, save_now=lambda: tmp_path))
    with pytest.raises(RolloutError):
        saving_guard.check_batch(batch, step=4)


def test_an_engine_that_returns_no_log_probabilities_at_all_stops_the_run(tmp_path):
    """The loss would correct by nothing, so this is no drift of 0. Nothing is logged for it."""
    batch: Batch = {
        "completion_mask": torch.ones(1, 2),
        "old_per_token_logps": torch.zeros(1, 2),
        "sampling_per_token_logps": torch.tensor([[math.nan, math.nan]]),
    }
    log: dict[str, float] = {}
    context = step_context(log, adora_max_drift=0.2, save_now=lambda: tmp_path)
    with pytest.raises(RolloutError, match="inf nats per token"):
        DriftGuard(context).check_batch(batch, step=4)
    assert log == {}


def test_without_a_server_the_run_ends_with_a_checkpoint_to_go_on_from(tmp_path):
    """The error of the servers is raised again with the step and the checkpoint."""
    guard = GenerationGuard(step_context(save_now=lambda: tmp_path))
    line = rf"^step 1: no server, and go on with --resume_from_checkpoint {tmp_path}$"
    with pytest.raises(RunError, match=line), guard.ending_run_if_no_server_is_left():
        raise NoServerError("no server")


def raised_in_step_7(
    error: Exception, saved_at: int | None = None, began_at: str | None = None
) -> RunError:
    """Raise an error in the seventh step of a training, and return what it becomes.

    Args:
        error: the error.
        saved_at: the step of the newest checkpoint, if there is one.
        began_at: the checkpoint from which the run went on, if it did.
    """
    nothing: Any = None
    writer = CheckpointWriter(Path("runs/x"), nothing, nothing)
    writer.last_saved_step = saved_at
    writer.resumed_from = began_at
    with (
        pytest.raises(RunError) as caught,
        errors_with_step(lambda: 6, writer.describe_resume_point),
    ):
        raise error
    return caught.value


def test_an_error_of_the_engine_says_step_cause_and_what_a_new_start_goes_on_from():
    """An error in a step becomes one line: the step, the cause, and the checkpoint to go on from.

    The checkpoint is the newest one, else the one from which the run began, else none.
    """
    with pytest.raises(EngineError) as engine, engine_call("generate"):
        raise ValueError("the core died\nat once")
    error = raised_in_step_7(engine.value, saved_at=5)
    assert str(error) == (
        "step 7: the engine failed in generate (ValueError: the core died); the same command goes "
        "on from checkpoint-5"
    )
    assert isinstance(error.__cause__, ValueError)
    assert str(raised_in_step_7(KeyError("x"), began_at="runs/a/checkpoint-4")) == (
        "step 7: KeyError: 'x'; the same command goes on from runs/a/checkpoint-4"
    )
    assert "there is no checkpoint yet" in str(raised_in_step_7(MemoryError()))


def test_what_we_raise_ourselves_is_not_wrapped_again(subtests):
    """Errors that already are one line for the user pass through `engine_call` as they are."""
    for error in (RunError("x"), RolloutError("drift"), UserError("key")):
        with subtests.test(type(error).__name__):
            with pytest.raises(type(error)) as outer, engine_call("generate"):
                raise error
            assert outer.value is error


def test_an_iterator_that_has_run_out_is_an_error_like_every_other_one(subtests):
    """A StopIteration of the engine becomes an `EngineError` too, with the step in its line.

    `@contextmanager` would hand a StopIteration on as it was raised, in place of our error. It
    takes a RuntimeError whose cause is a StopIteration for the one that Python makes where a
    generator lets a StopIteration out.
    """
    for kind in (StopIteration, StopAsyncIteration):
        with subtests.test(kind.__name__):
            with pytest.raises(EngineError, match=kind.__name__) as engine, engine_call("generate"):
                raise kind("no more images")
            assert isinstance(engine.value.__cause__, kind)
            error = raised_in_step_7(kind("no more images"))
            assert f"step 7: {kind.__name__}: no more images" in str(error)


def test_an_exception_that_is_no_error_passes_as_it_is():
    """`GeneratorExit`, for example, is no subclass of `Exception`, and stays what it is."""
    with pytest.raises(GeneratorExit), errors_with_step(lambda: 6, str), engine_call("generate"):
        raise GeneratorExit


def with_cause(error: Exception) -> Exception:
    """Return the error, with another error as its cause, as `raise ... from` sets it."""
    error.__cause__ = ZeroDivisionError("why")
    return error


def test_a_run_that_cannot_go_on_ends_in_one_line_and_exit_code_1(monkeypatch, capsys, subtests):
    """An error ends a run with exit code 1 and one line, which one rank alone prints.

    All ranks meet an error without a cause, so the first one alone prints it. One with a cause is
    of a single rank, which prints the line and is named in it.
    """
    # (the error, the rank that raises it, the lines that this rank prints)
    cases: list[tuple[Exception, str, list[str]]] = [
        (RunError("step 3: stop"), "0", ["error: step 3: stop"]),
        (RunError("step 3: stop"), "1", []),
        (RolloutError("step 3: drift"), "0", ["error: step 3: drift"]),
        (
            with_cause(RunError("step 3: boom")),
            "1",
            ["ZeroDivisionError: why", "error (rank 1 of 2): step 3: boom"],
        ),
    ]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for error, rank, lines in cases:
        with subtests.test(f"{error} on rank {rank}"):

            def raise_error(arguments: Any, error: Exception = error) -> int:
                raise error

            monkeypatch.setattr(train, "train", raise_error)
            monkeypatch.setenv("RANK", rank)
            assert train.main(["--model_name_or_path", "tiny"]) == 1
            assert capsys.readouterr().err.splitlines() == lines


def dataset_of_images(*stored_images: dict[str, Any]) -> Dataset:
    """Return a data set with a row for each image, which is stored as bytes or as a path."""
    columns = {
        "id": [f"row/{number}" for number in range(len(stored_images))],
        "prompt": ["What is this?"] * len(stored_images),
        "images": [
            [{"bytes": None, "path": None, **stored_image}] for stored_image in stored_images
        ],
    }
    texts = {"id": Value("string"), "prompt": Value("string")}
    features = Features({**texts, "images": List(Image())})
    return Dataset.from_dict(columns, features=features)


def test_a_row_with_an_image_that_cannot_be_read_is_named_with_the_reason(tmp_path):
    """Rows with unreadable images are refused in one line: the first one's name, and how many more.

    The images here are whole, truncated, no image, and a file that is deleted later.
    """
    png = png_bytes(PIL.Image.new("RGB", (8, 8), "red"))
    deleted_file = tmp_path / "deleted.png"
    deleted_file.write_bytes(png)
    dataset = with_decoded_images(
        dataset_of_images(
            {"bytes": png}, {"bytes": png[:50]}, {"bytes": b"no image"}, {"path": str(deleted_file)}
        )
    )

    assert isinstance(dataset, Dataset)
    assert dataset["id"][:2] == ["row/0", "row/1"]
    deleted_file.unlink()
    rows = dataset.__getitems__([0, 1, 2, 3, 3])  # as a data loader reads them
    assert rows[0]["images"][0].getpixel((4, 4)) == (255, 0, 0)
    names, reasons = zip(*unreadable_rows(rows), strict=True)
    assert names == ("row/1", "row/2", "row/3")
    assert "truncated" in reasons[0].lower()
    assert reasons[1] == "not in any known picture format"
    assert "FileNotFoundError" in reasons[2]
    guard = GenerationGuard(step_context(save_now=lambda: tmp_path))
    guard.refuse_unusable(rows[:1], step=6)
    with pytest.raises(
        RunError, match=rf"^step 7: row row/1: .*[Tt]runcated.*and 2 more rows.* {tmp_path}$"
    ):
        guard.refuse_unusable(rows, step=6)


def test_user_code_that_begins_a_rollout_ends_the_run_with_a_checkpoint_where_it_fails(tmp_path):
    """A `UserError` of code that begins a rollout ends the run with the step and a checkpoint.

    An environment's `reset`, for example, is a user's code.
    """
    guard = GenerationGuard(step_context(save_now=lambda: tmp_path))
    with guard.ending_run_on_user_error(6):
        pass
    ends_run = pytest.raises(
        UserError, match=f"^step 7: row 3: reset: oh, and go on with .*checkpoint {tmp_path}$"
    )
    with ends_run, guard.ending_run_on_user_error(6):
        raise UserError("row 3: reset: oh")


def save_on_a_full_disk(folder: Path) -> None:
    """Let torch write a file of 40,000 bytes where the disk has room for 5000."""
    with limit_file_size(5000):
        torch.save({"weights": torch.zeros(10_000)}, folder / "model.pt")


def test_errors_of_torch_and_safetensors_about_a_full_disk_are_recognised(tmp_path):
    """`disk_is_full` knows the errors of torch and safetensors about a full disk by their texts.

    Both raise errors without the system's number ENOSPC.
    """
    with pytest.raises(RuntimeError) as error:
        save_on_a_full_disk(tmp_path)
    assert disk_is_full(error.value), str(error.value)
    assert disk_is_full(
        OSError("Error while serializing: I/O error: No space left on device (os error 28)")
    )
    assert not disk_is_full(OSError(errno.EACCES, "Permission denied"))
    assert not disk_is_full(RuntimeError("os error 2"))


def test_a_full_disk_ends_the_run_in_one_line_of_the_rank_that_met_it(
    monkeypatch, capsys, tmp_path
):
    """An error about a full disk becomes one line: rank, step, what to do, and the checkpoint."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def fill_disk(*_: object) -> int:
        """Fail in the fifth step, as a training would."""
        with errors_with_step(lambda: 4, lambda: "the same command goes on from checkpoint-4"):
            save_on_a_full_disk(tmp_path)
        return 0

    monkeypatch.setattr("adora_vl.train.train", fill_disk)
    assert train.main(["--model_name_or_path", "tiny"]) == 1
    assert capsys.readouterr().err == (
        "error (rank 1 of 2): step 5: no space left on the disk; make room there, and the same "
        "command goes on from checkpoint-4\n"
    )


def test_a_prompt_of_a_stream_that_cannot_be_used_ends_the_run_before_it_is_sampled(tmp_path):
    """A prompt with control tokens in its text, or with a picture inside its messages, is refused.

    A streamed data set is not checked before the run, so each generation checks its own prompts.
    The row "b" is fine: a plain text may have tokens that mark turns, since its user has applied
    the chat template already. It must not have those of pictures.
    """
    guard = GenerationGuard(
        step_context(save_now=lambda: tmp_path), control_tokens=("<|im_end|>", "<end>")
    )
    user = {"role": "user", "content": "Which?"}
    text: Any = "<|im_end|> of a text"
    guard.refuse_unusable([{"id": "a", "prompt": [user]}, {"id": "b", "prompt": text}], step=6)
    # (the prompt, what is wrong with it): each kind of content that a prompt may have
    cases: list[tuple[Any, str]] = [
        (
            [user, {"role": "assistant", "content": "A<|im_end|>"}],
            "the model's own token <|im_end|>",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "<end>"}]}], "own token <end>"),
        ("Which <|image_pad|>?", "the model's own token <|image_pad|>"),
        (
            [{"role": "user", "content": [{"image": PIL.Image.new("L", (8, 8))}]}],
            "a picture inside",
        ),
    ]
    for prompt, fault in cases:
        with pytest.raises(UserError, match=f"^step 7: row c: its prompt has .*{re.escape(fault)}"):
            guard.refuse_unusable([{"id": "c", "prompt": prompt}], step=6)
