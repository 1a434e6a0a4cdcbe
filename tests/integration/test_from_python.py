"""The trainer used from Python in place of TRL's, as the documentation shows it."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import transformers.trainer
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import EarlyStoppingCallback, TrainerCallback

from adora_vl import AdoraGRPOConfig, AdoraGRPOTrainer, load_problems
from adora_vl.checkpoint.store import list_checkpoints
from adora_vl.config.command import parse_command
from adora_vl.config.run_context import RunContext
from adora_vl.preflight.python_inputs import Datasets
from adora_vl.preflight.request import (
    RunRequest,
    model_source,
    request_from_command,
    rows_for_environments,
)
from adora_vl.preflight.resolved_run import ResolvedRun
from adora_vl.preflight.run_checks import run_checks
from adora_vl.record.progress import ProgressLine
from adora_vl.utils.errors import RunError, UserError
from data_prep.__main__ import main as data_prep
from tests.support.paths import REPOSITORY


def quickstart_code() -> str:
    """Return the Python block of the quickstart."""
    text = (REPOSITORY / "docs" / "quickstart.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(block)


def test_the_package_shows_its_classes_and_stays_light_until_they_are_asked_for():
    """Importing `adora_vl` imports neither torch nor TRL. An unknown name is an AttributeError."""
    code = (
        "import sys, adora_vl\n"
        "assert 'torch' not in sys.modules and 'trl' not in sys.modules\n"
        "assert {'AdoraGRPOTrainer', 'AdoraGRPOConfig', 'load_problems'} <= set(dir(adora_vl))\n"
        "try:\n    adora_vl.AdoraTrainer\nexcept AttributeError as error:\n    print(error)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert completed.stdout == "module 'adora_vl' has no attribute 'AdoraTrainer'\n"


@pytest.mark.slow
def test_the_documented_lines_train_and_record(tmp_path):
    """The quickstart's lines train two steps on a data set with two images and a reward of its own.

    The record has the rollouts with problem, images and reward.
    """
    lines = quickstart_code()
    assert len(ast.parse(lines).body) <= 15  # statements
    script = tmp_path / "own.py"
    script.write_text(lines.replace("runs/python", str(tmp_path / "out")))
    completed = subprocess.run(
        [sys.executable, str(script)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    metrics = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert metrics[-1]["kind"] == "end"
    assert metrics[-1]["step"] == 2
    rollouts = pq.read_table(tmp_path / "out" / "rollouts").to_pylist()
    assert len(rollouts) == 2 * 8, "two steps of a micro-batch of eight"
    assert {row["problem"] for row in rollouts} == {"Which one is darker?"}
    assert all(len(row["images"]) == 2 and row["answer"] is None for row in rollouts)
    assert all(row["reward"] == row["reward/brief"] for row in rollouts)


@pytest.mark.parametrize(
    "name",
    [
        "_calculate_rewards",
        "_generate",
        "_get_tool_suffix_ids",
        "_tokenize_prompts",
        "_tool_call_loop",
    ],
)
def test_a_subclass_that_overrides_what_no_step_calls_is_refused(name):
    """The override would change nothing, while that of a method which is called is taken."""
    with pytest.raises(UserError, match=f"^Changed.{name}: a step calls no such method here"):
        type("Changed", (AdoraGRPOTrainer,), {name: lambda self: None})
    type("Taken", (AdoraGRPOTrainer,), {"_generate_and_score_completions": lambda self, rows: {}})


def test_an_override_of_sampling_by_the_policy_is_refused_where_an_engine_samples(tmp_path):
    """Without an engine the policy samples by `_generate_single_turn`, which may be overridden."""

    class Changed(AdoraGRPOTrainer):
        """A trainer that samples in another way."""

        def _generate_single_turn(self, *args, **kwargs):
            """Sample nothing."""

    args = AdoraGRPOConfig(str(tmp_path), **{**KEYS_OF_TWO_STEPS, "use_vllm": True})
    rows = Dataset.from_list(EIGHT_ROWS)
    with pytest.raises(UserError, match="Changed._generate_single_turn: .*; set use_vllm: false"):
        Changed("tiny", reward_every_second_completion, args, rows)
    # It is taken in a run without an engine, which goes on to the next check.
    args = AdoraGRPOConfig(str(tmp_path), **{**KEYS_OF_TWO_STEPS, "use_vllm": False})
    with pytest.raises(UserError, match="adora_reward: unknown preset 'none'"):
        Changed("tiny", "none", args, rows)


EIGHT_ROWS = [
    {
        "prompt": [{"role": "user", "content": f"Which of {n}?"}],
        "images": [Image.new("RGB", (56, 56), (n, n, n))],
    }
    for n in range(8)
]


KEYS_OF_TWO_STEPS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": 2,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 8,
    "save_steps": 1,
    "report_to": "none",
}


def reward_every_second_completion(completions, **kwargs):
    """Reward every second completion, whatever it says."""
    return [float(number % 2) for number in range(len(completions))]


def build_trainer(folder, rows=EIGHT_ROWS, callbacks=(), **keys):
    """Build a trainer of the tiny model from Python, with these keys of the config."""
    args = AdoraGRPOConfig(str(folder), **{**KEYS_OF_TWO_STEPS, **keys})
    return AdoraGRPOTrainer(
        "tiny",
        reward_every_second_completion,
        args,
        Dataset.from_list(rows),
        callbacks=list(callbacks),
    )


def test_the_lines_of_the_steps_are_the_only_progress_that_a_notebook_shows(tmp_path, monkeypatch):
    """A trainer has our callback of progress lines, and not the one of Transformers.

    That one would show a bar and a table of losses below our lines in a notebook.
    """

    class NotebookProgress(TrainerCallback):
        """A fake of Transformers' class, which needs IPython."""

    monkeypatch.setattr(transformers.trainer, "DEFAULT_PROGRESS_CALLBACK", NotebookProgress)
    trainer = build_trainer(tmp_path / "run")
    callbacks = {type(callback) for callback in trainer.callback_handler.callbacks}
    assert NotebookProgress not in callbacks
    assert ProgressLine in callbacks


@pytest.fixture(scope="module")
def prepared_folder(tmp_path_factory):
    """Return a prepared folder of 12 drawn problems with four choices, which the prompt lists."""
    folder = tmp_path_factory.mktemp("data") / "drawn"
    argv = ["synthetic", "--output", str(folder), "--rows", "12", "--test-rows", "3"]
    assert data_prep([*argv, "--choices", "4"]) == 0
    return folder


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"adora_system_prompt": "think_answer", "adora_prompt": "Solve: {problem}"},
        {"adora_system_prompt": None, "adora_prompt": None},
    ],
    ids=["defaults", "own words", "problem alone"],
)
def test_problems_loaded_in_python_are_those_of_the_command(prepared_folder, tmp_path, keys):
    """Each row has the same conversation, pictures and answer as in a command with these keys."""
    rows = load_problems(str(prepared_folder), **keys)
    argv = ["--model_name_or_path", "tiny", "--dataset_name", str(prepared_folder)]
    argv += ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    for key, value in keys.items():
        argv += [f"--{key}", "null" if value is None else value]
    request = request_from_command(parse_command(argv))
    context = RunContext.of_launch(request.config, output_dir_mode="ignore")
    command_rows = run_checks(request, context).data.train_dataset
    assert len(rows) == len(command_rows) == 12
    for row, command_row in zip(rows, command_rows, strict=True):
        assert row == command_row
    questions = [row["prompt"][-1]["content"] for row in rows]
    has_choices = any("\n(A) " in question for question in questions)
    assert has_choices is (keys == {}), "the default prompt lists the choices"


def test_a_table_and_another_split_are_loaded_in_python(prepared_folder, tmp_path):
    """`load_problems` reads a split of a prepared folder, and a table whose columns are named."""
    assert len(load_problems(prepared_folder, "test")) == 3
    table = tmp_path / "mine.csv"
    table.write_text("question,label\nWhat is 2 + 2?,4\nWhat is 3 + 3?,6\n")
    columns = {"problem": "question", "answer": "label"}
    rows = load_problems(str(table), adora_columns=columns)
    assert rows["answer"] == ["4", "6"]
    with pytest.raises(UserError, match="is a file; say which of its columns is what"):
        load_problems(str(table))
    with pytest.raises(UserError, match="has no split 'validation'"):
        load_problems(prepared_folder, "validation")


def test_a_value_of_another_type_is_refused_by_the_name_of_its_key():
    """`load_problems` refuses a value of a wrong type with an error that begins with its key.

    A type checker would complain about these values, but a notebook runs none.
    """
    wrong_values: list[tuple[str, Any]] = [
        ("dataset_name", None),
        ("adora_columns", "question"),
        ("adora_mixture", 0.5),
    ]
    for key, value in wrong_values:
        arguments: dict[str, Any] = {"dataset_name": "knights", key: value}
        with pytest.raises(UserError, match=f"^{key}: "):
            load_problems(**arguments)


@pytest.mark.slow
def test_loaded_problems_train_and_go_on(prepared_folder, tmp_path):
    """A second trainer with the problems loaded again takes the run for its own."""
    args = AdoraGRPOConfig(str(tmp_path / "run"), **KEYS_OF_TWO_STEPS)
    problems = load_problems(prepared_folder)
    AdoraGRPOTrainer("tiny", "boxed_accuracy", args, problems).train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    problems_again = load_problems(prepared_folder)
    resumed = AdoraGRPOTrainer("tiny", "boxed_accuracy", args, problems_again)
    assert resumed.train(resume_from_checkpoint=True).global_step == 2
    rollouts = pq.read_table(tmp_path / "run" / "rollouts").to_pylist()
    assert {row["step"] for row in rollouts} == {1, 2}
    assert all(row["id"].startswith("synthetic/") and row["answer"] for row in rollouts)


def reward_that_falls(completions, trainer_state, **kwargs):
    """Reward every second completion, with each step less."""
    return [number % 2 - 0.1 * trainer_state.global_step for number in range(len(completions))]


@pytest.mark.slow
def test_early_stopping_ends_a_run_in_order_with_its_newest_checkpoint(tmp_path):
    """The reward falls, so step 1 is the best and the run ends at step 2, without an error.

    Only the newest checkpoint is kept. Transformers would look for the best one where it was
    written, and raise because it is gone.
    """
    keys = {
        **KEYS_OF_TWO_STEPS,
        "max_steps": 4,
        "save_total_limit": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
        "metric_for_best_model": "reward",
        "greater_is_better": True,
    }
    trainer = AdoraGRPOTrainer(
        "tiny",
        reward_that_falls,
        AdoraGRPOConfig(str(tmp_path), **keys),
        Dataset.from_list(EIGHT_ROWS),
        eval_dataset=Dataset.from_list(EIGHT_ROWS[:2]),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
    )
    trainer.train()

    assert json.loads((tmp_path / "manifest.json").read_text())["status"] == "finished"
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert (state["best_global_step"], state["best_model_checkpoint"]) == (1, None)
    assert state["best_metric"] == pytest.approx(0.4)


class Killed(BaseException):
    """Ends a process where it stands, as far as a test can tell."""


class KillAfterSave(TrainerCallback):
    """Ends the process once the checkpoint of a step is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


def stopping_early(folder: Path, *callbacks: TrainerCallback, patience: int = 2) -> Any:
    """Return a trainer whose reward falls from step to step, so that early stopping ends the run.

    Step 1 is the best. With a patience of 2 the run ends at step 3.
    """
    keys = {
        **KEYS_OF_TWO_STEPS,
        "max_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
        "metric_for_best_model": "reward",
        "greater_is_better": True,
    }
    return AdoraGRPOTrainer(
        "tiny",
        reward_that_falls,
        AdoraGRPOConfig(str(folder), **keys),
        Dataset.from_list(EIGHT_ROWS),
        eval_dataset=Dataset.from_list(EIGHT_ROWS[:2]),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=patience), *callbacks],
    )


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_early_stopping_ends_a_killed_run_where_it_ends_an_unkilled_one(tmp_path, step):
    """A run that early stopping ends at step 3 ends there too if it was killed and resumed.

    It is killed after its second evaluation, or after the third, which ends it. The checkpoint of
    that step is there already, so the resumed run has one step left to make, or none.
    """
    with pytest.raises(Killed):
        stopping_early(tmp_path, KillAfterSave(step)).train()
    resumed = stopping_early(tmp_path)
    assert resumed.train(resume_from_checkpoint=True).global_step == 3
    assert json.loads((tmp_path / "manifest.json").read_text())["status"] == "finished"
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 1
    rollouts = pq.read_table(tmp_path / "rollouts").to_pylist()
    assert {row["step"] for row in rollouts} == {1, 2, 3}
    # The same call ends at once, and more patience goes on.
    assert stopping_early(tmp_path).train(resume_from_checkpoint=True).global_step == 3
    patient = stopping_early(tmp_path, patience=3)
    assert patient.train(resume_from_checkpoint=True).global_step == 4


@pytest.mark.slow
def test_a_run_that_is_killed_after_its_last_step_may_be_given_more_steps(tmp_path):
    """A run of two steps that was killed after the last one is resumed with three.

    It had ended since it had two steps, and not because a callback had ended it.
    """
    # With any other schedule the learning rate depends on the number of steps.
    keys = {"lr_scheduler_type": "constant"}
    with pytest.raises(Killed):
        build_trainer(tmp_path, callbacks=[KillAfterSave(2)], **keys).train()
    longer = build_trainer(tmp_path, max_steps=3, **keys)
    assert longer.train(resume_from_checkpoint=True).global_step == 3


def epoch_figures(checkpoint: Path) -> list[Any]:
    """Return the figures of each line that a run has logged until a checkpoint.

    They are the step, the loss and the reward. The line of the end of a run, without a loss, is
    left out.
    """
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    lines = [line for line in state["log_history"] if "loss" in line]
    return [
        (
            line["step"],
            line["loss"],
            line["reward"],
        )
        for line in lines
    ]


@pytest.mark.slow
def test_an_epochs_figures_are_logged_though_the_run_is_killed_at_its_end(tmp_path):
    """A run that is killed at the end of an epoch and resumed logs the lines of an unkilled one.

    Eight rows, two a step, are four steps an epoch, after which the checkpoint is written.
    """
    keys = {"max_steps": 8, "save_steps": 4, "logging_strategy": "epoch"}
    with pytest.raises(Killed):
        build_trainer(tmp_path / "killed", callbacks=[KillAfterSave(4)], **keys).train()
    build_trainer(tmp_path / "killed", **keys).train(resume_from_checkpoint=True)
    build_trainer(tmp_path / "unkilled", **keys).train()
    killed_lines = epoch_figures(tmp_path / "killed" / "checkpoint-8")
    unkilled_lines = epoch_figures(tmp_path / "unkilled" / "checkpoint-8")
    assert [step for step, *_ in unkilled_lines] == [4, 8]
    assert killed_lines == unkilled_lines


def test_a_run_owns_its_folder_as_a_commands_does(tmp_path):
    """The run writes a manifest, and refuses a folder of another run.

    It goes on in its own, and may replace what is there.
    """
    folder = tmp_path / "run"
    first_run = build_trainer(folder)
    assert not (folder / "manifest.json").exists(), "building a trainer is no run"
    first_run.train()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["steps"] == 2
    assert manifest["data"]["rows"] == 8
    assert "2 steps of ADORA" in (folder / "checkpoint-2" / "README.md").read_text()
    callbacks = {type(callback).__name__ for callback in first_run.callback_handler.callbacks}
    assert {"SkipBadSteps", "RefuseWrongBuffers", "SelfCheck"} <= callbacks
    with pytest.raises(
        UserError,
        match=r"holds checkpoint-2 of a run; train\(resume_from_checkpoint=True\) goes on",
    ):
        build_trainer(folder, learning_rate=1e-5).train()
    for changed_keys, line in (
        ({"max_steps": 4}, "of another run: max_steps: 2 -> 4"),
        (
            {
                "rows": [
                    *EIGHT_ROWS[:7],
                    {**EIGHT_ROWS[7], "images": [Image.new("RGB", (56, 56), "red")]},
                ]
            },
            "of another run: dataset: 8",
        ),
    ):
        with pytest.raises(UserError, match=line):
            build_trainer(folder, **changed_keys).train(resume_from_checkpoint=True)
    (folder / "manifest.json").write_text(json.dumps({**manifest, "status": "running"}))  # killed
    resumed = build_trainer(folder)
    assert resumed.train(resume_from_checkpoint=True).global_step == 2, "nothing is left to train"
    assert json.loads((folder / "manifest.json").read_text())["status"] == "finished"
    assert resumed.manifest["data"] == manifest["data"], "for the card of a model that is saved now"
    new_run = build_trainer(folder, overwrite_output_dir=True, max_steps=1)
    assert new_run.train().global_step == 1
    assert not (folder / "checkpoint-2").exists(), "the run of before has gone"


@pytest.mark.parametrize(
    "peft_config", [None, LoraConfig(r=2, target_modules=["q_proj"])], ids=["weights", "adapter"]
)
def test_a_second_trainer_with_the_same_objects_goes_on_with_the_run(tmp_path, peft_config):
    """The config objects stay as they were, so a second trainer with them resumes the run.

    A cell of a notebook is run again: TRL and PEFT must not have written into its configs.
    """
    args = AdoraGRPOConfig(str(tmp_path / "run"), **KEYS_OF_TWO_STEPS)
    keys_before = {field.name: getattr(args, field.name) for field in fields(args)}
    adapter_before = peft_config and peft_config.to_dict()
    rows = Dataset.from_list(EIGHT_ROWS)
    AdoraGRPOTrainer(
        "tiny", reward_every_second_completion, args, rows, peft_config=peft_config
    ).train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    resumed = AdoraGRPOTrainer(
        "tiny", reward_every_second_completion, args, rows, peft_config=peft_config
    )
    assert resumed.train(resume_from_checkpoint=True).global_step == 2
    assert {field.name: getattr(args, field.name) for field in fields(args)} == keys_before
    assert (peft_config and peft_config.to_dict()) == adapter_before


class Interrupt(TrainerCallback):
    """Interrupts the training as Ctrl-C in a notebook does, in the middle of the second step."""

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            raise KeyboardInterrupt


def test_a_trainer_that_was_interrupted_is_refused_and_a_new_one_goes_on(tmp_path):
    """The old trainer still has micro-batches of the step that was interrupted.

    It would learn from them once more, and end with other weights than an uninterrupted run.
    """
    keys = {
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    }
    uninterrupted = build_trainer(tmp_path / "whole", **keys)
    uninterrupted.train()
    folder = tmp_path / "interrupted"
    trainer = build_trainer(folder, callbacks=[Interrupt()], **keys)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(UserError, match="^train: this trainer has trained before.*build a new one"):
        trainer.train(resume_from_checkpoint=True)
    resumed = build_trainer(folder, **keys)
    assert resumed.train(resume_from_checkpoint=True).global_step == 2
    pairs = zip(uninterrupted.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(expected, actual) for expected, actual in pairs)


def test_a_second_run_of_one_trainer_is_refused(tmp_path):
    """It would begin with the weights of the first run, and its manifest would name the model."""
    trainer = build_trainer(tmp_path / "run", overwrite_output_dir=True, max_steps=1)
    trainer.train()
    with pytest.raises(UserError, match="^train: this trainer has trained before"):
        trainer.train()
    assert (tmp_path / "run" / "checkpoint-1").is_dir(), "the run of before stays"


def test_an_evaluation_before_the_training_names_the_reward_that_fails(tmp_path):
    """No checkpoint can be written then, and an error about that would hide the one of the reward.

    The call before the run succeeds, the one of the evaluation does not.
    """
    calls: list[int] = []

    def reward(completions, **kwargs):
        calls.append(len(completions))
        if len(calls) > 1:
            raise ValueError("no such key")
        return [1.0] * len(completions)

    args = AdoraGRPOConfig(str(tmp_path / "run"), **KEYS_OF_TWO_STEPS)
    rows = Dataset.from_list(EIGHT_ROWS)
    trainer = AdoraGRPOTrainer("tiny", reward, args, rows)
    with pytest.raises(RunError, match=r"ValueError: no such key \(test_from_python.py") as failed:
        trainer.evaluate(rows)
    assert "checkpoint" not in str(failed.value)
    assert not (tmp_path / "run").exists() or not list_checkpoints(tmp_path / "run")


def area(width: int) -> int:
    """Width times itself.

    Args:
        width: In pixels.
    """
    return width * width


class Board:
    """An environment whose method `pair` becomes a tool; its reward is the number of calls."""

    def reset(self, **row):
        """Begin a rollout."""
        self.pairs = 0

    def pair(self) -> int:
        """Count one."""
        self.pairs += 1
        return self.pairs

    def get_reward(self):
        """Return the reward of the rollout."""
        return float(self.pairs)


def reward_pairs(environments, **kwargs):
    """Reward each rollout by the number of calls in its `Board`."""
    return [float(environment.pairs) for environment in environments]


def check_run_with_environment(
    folder: Path, environment: type, *, tools: Sequence[Callable[..., int] | str] = ()
) -> ResolvedRun:
    """Make the checks of a run from Python with an environment, and return what they resolve to.

    `tools`: those that the trainer is given besides the environment's methods.
    """
    args = AdoraGRPOConfig(
        str(folder),
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=1200,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=200,
        report_to="none",
    )
    rows = Datasets(Dataset.from_list(EIGHT_ROWS), {"own": Dataset.from_list(EIGHT_ROWS[4:])})
    source = model_source(
        "tiny", config=args, processor=None, peft_config=None, quantization_config=None
    )
    request = RunRequest(
        args, source, rows, reward_pairs, environment_factory=environment, tools=tools
    )
    return run_checks(request, RunContext.of_launch(args, output_dir_mode="ignore"))


def test_what_python_gives_as_tools_is_told_before_each_problem(tmp_path):
    """A function, the name of a shipped tool and an environment's methods all become tools.

    Each problem's system prompt describes them, in training and in evaluation alike.
    """
    run = check_run_with_environment(tmp_path, Board, tools=[area, "zoom"])
    system, user = run.data.train_dataset[0]["prompt"]
    system_of_evaluation = run.data.eval_dataset["own"][0]["prompt"][0]

    assert system["role"] == "system"
    for tool in ("area", "zoom", "pair"):
        assert f'"name": "{tool}"' in system["content"]
    assert system_of_evaluation == system, "TRL's evaluations tell of them, too"
    assert user["content"] == "Which of 0?"


def test_tools_rewards_and_environments_from_python_are_called_and_hashed(tmp_path):
    """A call of the function is answered, and the environment's reward is one of the rewards."""
    run = check_run_with_environment(tmp_path, Board, tools=[area, "zoom"])
    call = '<tool_call>{"name": "area", "arguments": {"width": 3}}</tool_call>'
    answer = run.prompts.toolbox.answer(call, [], seed="", last=True)

    assert answer.calls[0].text == "9"
    assert run.rewards.entries == ("reward_pairs", "Board")
    assert run.user_code_hashes.keys() == {
        "reward reward_pairs",
        "tool area",
        "tool Board",
    }


class Riddle:
    """An environment without tools, which says the problem and judges the answer itself."""

    def reset(self, **row):
        """Return the problem."""
        return "Say a number."

    async def get_reward(self):
        """Return the reward of the rollout, as one that asks a judge would."""
        return 1.0


def test_environments_may_say_the_problems_of_a_run_without_a_data_set(tmp_path):
    """The rows have empty prompts, as many as a generation of all processes has problems.

    `max_steps` is needed.
    """
    keys: dict[str, Any] = {"use_cpu": True, "bf16": False, "use_vllm": True, "max_steps": 2}
    args = AdoraGRPOConfig(str(tmp_path), **keys, per_device_train_batch_size=16)
    rows = rows_for_environments(args, processes=1)
    assert len(rows_for_environments(args, processes=2)) == 2 * len(rows)
    # The optimizer step of two generations must not end with the rows of one.
    args_of_longer_step = AdoraGRPOConfig(
        str(tmp_path),
        **keys,
        per_device_train_batch_size=16,
        steps_per_generation=1,
        gradient_accumulation_steps=2,
    )
    assert len(rows_for_environments(args_of_longer_step, processes=1)) == 2 * len(rows)
    source = model_source(
        "tiny", config=args, processor=None, peft_config=None, quantization_config=None
    )
    request = RunRequest(args, source, Datasets(rows), environment_factory=Riddle)
    run = run_checks(request, RunContext.of_launch(args, output_dir_mode="ignore"))

    assert run.rewards.entries == ("Riddle",)
    assert run.data.row_count == 16 / args.num_generations
    assert run.data.train_dataset[0]["prompt"] == [{"role": "user", "content": ""}]
    with pytest.raises(UserError, match="train_dataset: None.*leaves the length of the run open"):
        AdoraGRPOTrainer(
            "tiny",
            args=AdoraGRPOConfig(str(tmp_path), **{**keys, "max_steps": -1}),
            environment_factory=Riddle,
        )


def test_an_environment_with_the_name_of_a_reward_function_is_refused(tmp_path):
    """An environment and a reward function may not share a name, as both log rewards under it."""
    environment = type("reward_pairs", (Board,), {})
    with pytest.raises(
        UserError,
        match="environment_factory: a reward function has the name 'reward_pairs', too; rename",
    ):
        check_run_with_environment(tmp_path, environment)


def test_columns_that_rewards_log_under_names_of_the_record_end_no_run(tmp_path):
    """Two rewards log columns whose names the record has for itself, with other types of values.

    Values that can be converted are, numbers under `extracted` to text. The rest is null: numbers
    under `steps`, which is text, and text under `new`, which is a count. Where both rewards log a
    column, the later one is taken.
    """

    def first_reward(completions, log_extra, **kwargs):
        log_extra("extracted", ["first"] * len(completions))
        log_extra("new", ["a"] * len(completions))
        return reward_every_second_completion(completions)

    def second_reward(completions, log_extra, **kwargs):
        numbers = range(len(completions))
        log_extra("extracted", [number / 2 for number in numbers])
        log_extra("steps", list(numbers))
        log_extra("false", list(numbers))
        return reward_every_second_completion(completions)

    args = AdoraGRPOConfig(str(tmp_path / "run"), **{**KEYS_OF_TWO_STEPS, "save_strategy": "no"})
    rows = Dataset.from_list(EIGHT_ROWS)
    AdoraGRPOTrainer("tiny", [first_reward, second_reward], args, rows).train()
    record = pq.read_table(tmp_path / "run" / "rollouts").to_pylist()
    assert [row["extracted"] for row in record] == 2 * [str(number / 2) for number in range(8)]
    assert [row["false"] for row in record] == 2 * list(range(8))
    assert {(row["steps"], row["new"]) for row in record} == {(None, None)}


def test_rewards_judge_the_rollouts_where_a_column_of_the_data_has_the_name_of_their_argument(
    tmp_path,
):
    """A data set may have answers of another model in a column `completions`, and a column `self`.

    The reward gets its own `completions` and `prompts`, and the other columns as they are.
    """
    judged: list[Any] = []

    def reward(prompts, completions, source, **kwargs):
        judged.extend(zip(prompts, completions, source, strict=True))
        return reward_every_second_completion(completions)

    columns = {"completions": "of a model", "prompts": "theirs", "source": "s", "self": 1}
    rows = Dataset.from_list([{**row, **columns} for row in EIGHT_ROWS])
    args = AdoraGRPOConfig(str(tmp_path / "run"), **{**KEYS_OF_TWO_STEPS, "save_strategy": "no"})
    AdoraGRPOTrainer("tiny", reward, args, rows).train()
    assert judged
    for prompt, completion, source in judged:
        assert prompt[-1]["role"] == "user"
        assert completion[0]["role"] == "assistant"
        assert source == "s"


def test_a_stream_that_ends_before_its_first_generation_is_an_error_and_no_finished_run(tmp_path):
    """Transformers would end such a training after no step, with a line in the log alone."""
    stream = Dataset.from_list(EIGHT_ROWS[:1]).to_iterable_dataset()
    args = AdoraGRPOConfig(str(tmp_path / "run"), **KEYS_OF_TWO_STEPS)
    trainer = AdoraGRPOTrainer("tiny", reward_every_second_completion, args, stream)
    with pytest.raises(RunError, match="ends before it has the 2 prompts of a generation"):
        trainer.train()
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "failed"


class StopBeforeFirstStep(TrainerCallback):
    """Ends a training after the first of the micro-batches that a step accumulates."""

    def on_substep_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


def test_a_callback_may_end_a_training_before_its_first_step(tmp_path):
    """It has what it asked for: a training without a step, and no error about the problems."""
    keys = {
        **KEYS_OF_TWO_STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    }
    args = AdoraGRPOConfig(str(tmp_path / "run"), **keys)
    rows = Dataset.from_list(EIGHT_ROWS)
    trainer = AdoraGRPOTrainer(
        "tiny", reward_every_second_completion, args, rows, callbacks=[StopBeforeFirstStep()]
    )
    assert trainer.train().global_step == 0


# An epoch of three rows is one generation of three micro-batches, so its second step has one alone.
KEYS_OF_SHORT_LAST_STEP = {
    "rows": EIGHT_ROWS[:3],
    "per_device_train_batch_size": 4,
    "steps_per_generation": 3,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"max_steps": 3}, KEYS_OF_SHORT_LAST_STEP], ids=["plain", "short"]
)
def test_a_run_that_goes_on_ends_with_the_weights_of_one_that_did_not_stop(tmp_path, layout):
    """The last checkpoint is lost, and the same trainer is built and resumed."""
    keys = {"learning_rate": 1e-3, **layout}
    last_step = keys["max_steps"]
    uninterrupted = build_trainer(tmp_path / "whole", **keys)
    uninterrupted.train()
    folder = tmp_path / "stopped"
    build_trainer(folder, **keys).train()
    shutil.rmtree(folder / f"checkpoint-{last_step}")
    resumed = build_trainer(folder, **keys)
    assert resumed.train(resume_from_checkpoint=True).global_step == last_step
    assert len(json.loads((folder / "manifest.json").read_text())["starts"]) == 2
    pairs = zip(uninterrupted.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(expected, actual) for expected, actual in pairs)
