"""Evaluation during training: every `eval_steps`, with the trainer's sampler, into the log."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from adora_vl.data.prompts import asks_for_answer_tags
from adora_vl.evals.benchmark import (
    benchmark_name_for,
    data_options,
    find_benchmark,
    load_checked_problems,
)
from adora_vl.evals.inference.chat import ChatProcessor
from adora_vl.evals.inference.local import ConversationEngine
from adora_vl.evals.inference.runner import AnswerSample, answer, refuse_control_tokens
from adora_vl.evals.inference.views import VIEWS, problems_in_view
from adora_vl.evals.scoring.files import figures_in_training
from adora_vl.rollout.stopping import StopCriteria
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from adora_vl.config import AdoraGRPOConfig
    from adora_vl.data.overlong_prompts import OverlongPrompts
    from adora_vl.data.prompt_lengths import Size
    from adora_vl.evals.records import Benchmark, Problem
    from adora_vl.rollout.engine_pair import EnginePair
    from adora_vl.training.generation_sampler import GenerationSampler
    from adora_vl.training.group_sampler import GroupSampler


@dataclass(frozen=True)
class Task:
    """One benchmark with its problems.

    `in_data`: the number of problems in the data, of which `problems` may be a part; None: no more
    than `problems`.
    """

    benchmark: Benchmark
    problems: list[Problem]
    in_data: int | None = None


@dataclass(frozen=True)
class EvaluationPlan:
    """What to evaluate, and when.

    `every`: optimizer steps between evaluations. `at_start`: also before the first step. `prompt`:
    the template of the training (`adora_prompt`). `delay`: optimizer steps before which there is no
    evaluation (`eval_delay`).
    """

    tasks: list[Task]
    every: int
    at_start: bool
    prompt: str | None = None
    delay: float = 0


def take_evaluations(
    config: AdoraGRPOConfig, folders: Sequence[str], prompt: str | None = None
) -> EvaluationPlan | None:
    """Take the evaluations that `config` asks for out of it; None if it asks for none.

    `folders`: those of the training data, whose held-out splits are evaluated where `adora_eval`
    names nothing. `prompt`: the template of the training (`adora_prompt`). Evaluation is switched
    off in `config` itself, because Transformers has its own way of evaluating, and would want a
    second data set. Raises `UserError`.
    """
    if config.eval_strategy == IntervalStrategy.NO:
        return None
    if not config.adora_eval and not folders:
        raise UserError(
            "adora_eval: [] with eval_strategy: steps has nothing to evaluate on; name a "
            "BENCHMARK=DATA, or give the trainer an eval_dataset"
        )
    entries = config.adora_eval or [
        f"{benchmark_name_for(Path(folder))}={folder}" for folder in folders
    ]
    tasks: list[Task] = []
    entries_of_tasks: list[str] = []
    for entry in entries:
        for task in _load(entry, config.adora_eval_limit, prompt):
            tasks.append(task)
            entries_of_tasks.append(entry)
    for task in tasks:
        refuse_control_tokens(task.problems)
    tasks = _with_different_names(tasks, entries_of_tasks)
    plan = EvaluationPlan(
        tasks=tasks,
        every=int(config.eval_steps),
        at_start=bool(config.eval_on_start),
        prompt=prompt,
        delay=config.eval_delay,
    )
    config.eval_strategy = IntervalStrategy.NO
    config.eval_on_start = False
    return plan


def fitting_evaluations(plan: EvaluationPlan, overlong: OverlongPrompts) -> EvaluationPlan:
    """The plan with the problems that leave the engine room for an answer. Raises `UserError`."""
    tasks = []
    for task in plan.tasks:
        rows = ((problem.pid, problem.prompt, _image_sizes(problem)) for problem in task.problems)
        evaluation = f" of the evaluation {task.benchmark.name}"
        numbers = overlong.prompts_to_evaluate(rows, len(task.problems), evaluation)
        tasks.append(replace(task, problems=[task.problems[number] for number in numbers]))
    return replace(plan, tasks=tasks)


def _image_sizes(problem: Problem) -> Sequence[Size | None]:
    """The sizes of a problem's images; None for each where one of them cannot be read."""
    try:
        if problem.sizes is not None:
            return problem.sizes()
        return [image.size for image in problem.images()]
    # A decoder may raise anything on a broken file. The evaluation itself counts such a problem.
    except Exception:
        return [None] * problem.n_images


def _with_different_names(tasks: list[Task], entries: Sequence[str]) -> list[Task]:
    """The tasks with different names for the log.

    A benchmark that is evaluated on several data sets gets the name of their folder behind its
    own. `entries`: the entry of `adora_eval` of each task. Raises `UserError` where two tasks have
    the same name even so.
    """
    names = [task.benchmark.name for task in tasks]
    renamed: list[Task] = []
    for task, name, entry in zip(tasks, names, entries, strict=True):
        if names.count(name) > 1:
            folder = Path(entry.partition("=")[2].removesuffix(":views")).name
            longer = f"{name}_{re.sub(r'[^0-9A-Za-z]+', '_', folder)}"
            if any(longer == earlier.benchmark.name for earlier in renamed):
                raise UserError(
                    f"adora_eval: {entry!r} has the name {longer!r} of another one; rename its "
                    "folder"
                )
            task = replace(task, benchmark=replace(task.benchmark, name=longer))
        renamed.append(task)
    return renamed


class DataMissingError(UserError):
    """The data of an evaluation are not on this machine."""


def _load(entry: str, limit: int | None, prompt: str | None) -> list[Task]:
    """Load the benchmark of an entry, of its first `limit` problems.

    An entry that ends in `:views` is loaded once for each view, with the same problems. Raises
    `UserError`, which is a `DataMissingError` where the data are not on this machine.
    """
    name, _, data = entry.partition("=")
    path = data.removesuffix(":views")
    with_views = data.endswith(":views")
    if not path:
        raise UserError(
            f"adora_eval: {entry!r} is not BENCHMARK=DATA; write what it is to be asked, "
            "problems=DIR"
        )
    benchmark = find_benchmark(name, "adora_eval")
    options = data_options(benchmark, path, prompt)
    try:
        problems = load_checked_problems(benchmark, options).problems
    except UserError as error:
        if Path(path).exists():
            raise
        raise DataMissingError(str(error)) from error
    if not problems:
        raise UserError(f"adora_eval: {path!r} has no problems in its split {benchmark.split!r}")
    if not with_views:
        return [Task(benchmark, problems[:limit], len(problems))]
    # Only problems with facts can be shown in other views.
    with_facts = [problem for problem in problems if problem.facts][:limit] or problems
    return [
        Task(
            benchmark=replace(benchmark, name=f"{benchmark.name}_{view}"),
            problems=problems_in_view(with_facts, view),
            in_data=len(problems),
        )
        for view in VIEWS
    ]


class SamplerEngine(ConversationEngine):
    """An engine for the evaluators that answers greedily, with the trainer's sampler.

    Collective: all ranks call it together, even with no problem left.
    """

    def __init__(
        self, pair: EnginePair, groups: GroupSampler, chat: ChatProcessor, end_tokens: Iterable[int]
    ) -> None:
        """Begin with the trainer's own engine, greedy, and with the tools of its groups.

        An answer ends at `end_tokens` alone, whatever strings end a rollout of the training.
        """
        assert pair.engine is not None
        sample = partial(pair.sampler.sample, settings=pair.engine.greedy)
        max_tokens = pair.config.max_completion_length
        super().__init__(
            chat,
            sample,
            max_tokens,
            256,
            stop=StopCriteria(frozenset(end_tokens)),
            any_rank=groups.any_rank_continues,
        )
        self.tool_loop = groups.tool_loop


class EvaluateOnTheWay(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Evaluates a plan during training: each rank samples its share, rank 0 scores and logs.

    Greedy decoding draws no random numbers, so a run with evaluations takes the same steps as one
    without.
    """

    def __init__(
        self,
        *,
        pair: EnginePair,
        rollouts: GenerationSampler,
        plan: EvaluationPlan,
        end_tokens: Iterable[int],
        log_evaluation: Callable[[dict[str, float]], None],
        system_prompt: str | None = None,
        revision: str | None = None,
    ) -> None:
        """Build the callback.

        Args:
            pair: the policy, and the engine that answers.
            rollouts: the trainer's own; has its tools, and the guard of its servers.
            plan: what is evaluated, and when.
            end_tokens: that end an answer.
            log_evaluation: logs figures by their names, as an entry of its own.
            system_prompt: of the training; None: the data's own.
            revision: of the base model on the hub.
        """
        self.pair = pair
        self.rollouts = rollouts
        self.plan = plan
        self.end_tokens = frozenset(end_tokens)
        self.log_evaluation = log_evaluation
        self.system_prompt = system_prompt
        self.revision = revision

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Evaluate before the first step, if the plan says so."""
        if self.plan.at_start and state.global_step == 0:
            self._evaluate(state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Evaluate after every `plan.every` optimizer steps."""
        if state.global_step % self.plan.every == 0 and state.global_step >= self.plan.delay:
            self._evaluate(state.global_step)

    def _evaluate(self, step: int) -> None:
        """Evaluate all tasks. Collective: every rank samples, and gathers the answers of all."""
        accelerator = self.pair.accelerator
        with self.rollouts.guard.watching(), self.pair.sampler.awake():
            answers_by_task = [self._answer(task) for task in self.plan.tasks]
        tags = asks_for_answer_tags(self.system_prompt, self.plan.prompt)
        for task, answers in zip(self.plan.tasks, answers_by_task, strict=True):
            all_answers = gather_object(answers)
            if accelerator.is_main_process:
                values = figures_in_training(task.benchmark, all_answers, answer_tags=tags)
                self._log(task, step, values, len(all_answers))
        accelerator.wait_for_everyone()

    def _answer(self, task: Task) -> list[dict[str, Any]]:
        """Sample the answers to this rank's share of a task.

        Collective: every rank goes through the same number of batches, though its last ones may be
        empty.
        """
        args = self.pair.config
        accelerator = self.pair.accelerator
        chat = ChatProcessor(
            self.pair.policy().name_or_path,
            args.min_pixels,
            args.max_pixels,
            self.revision,
            template=args.chat_template_kwargs,
            processor=self.pair.processor,
        )
        engine = SamplerEngine(self.pair, self.rollouts.group_sampler, chat, self.end_tokens)
        rows: list[dict[str, Any]] = []
        share = task.problems[accelerator.process_index :: accelerator.num_processes]
        largest_share = math.ceil(len(task.problems) / accelerator.num_processes)
        for start in range(0, largest_share, engine.batch_size):
            batch = [
                AnswerSample(problem, 0) for problem in share[start : start + engine.batch_size]
            ]
            rows += answer(engine, batch, seed=0, system_prompt=self.system_prompt)
        return rows

    def _log(self, task: Task, step: int, values: dict[str, float], total: int) -> None:
        """Log the figures of a task whose `total` problems were answered, and print its accuracy."""
        name = task.benchmark.name
        self.log_evaluation({f"eval_{key}": value for key, value in values.items()})
        accuracy = 100 * values[f"{name}_accuracy"]
        low = 100 * values[f"{name}_accuracy_low"]
        high = 100 * values[f"{name}_accuracy_high"]
        interval = f"(95 %: {low:.1f} to {high:.1f})"
        in_data = task.in_data or total
        part = f"{total} of " if total < in_data else ""
        problems = f"{part}{amount(in_data, 'problem')}"
        print(f"step {step}: {name} {accuracy:.1f} % {interval} of {problems}", flush=True)
