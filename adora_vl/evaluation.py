"""Evaluation during training: every `eval_steps`, with the trainer's sampler, into the log."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from adora_vl.data.prompts import asks_for_answer_tags
from adora_vl.evals.benchmark import (
    benchmark_name_for,
    default_data_options,
    find_benchmark,
    load_checked_problems,
)
from adora_vl.evals.inference.chat import ChatProcessor
from adora_vl.evals.inference.local import ConversationEngine
from adora_vl.evals.inference.runner import AnswerSample, answer_batch, refuse_control_tokens
from adora_vl.evals.inference.views import DESCRIPTION_BY_VIEW, apply_view
from adora_vl.evals.scoring.files import metrics_in_training
from adora_vl.evals.scoring.table import percent_with_interval
from adora_vl.packing.prompts import PromptBatch
from adora_vl.rollout.rollouts import SamplingRequest, SamplingResult
from adora_vl.rollout.stopping import StopCriteria
from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from adora_vl.config import AdoraGRPOConfig
    from adora_vl.data.overlong_prompts import PromptLengthFilter
    from adora_vl.data.prompt_lengths import Size
    from adora_vl.evals.records import Benchmark, Problem
    from adora_vl.rollout.engine_and_policy import EngineAndPolicy
    from adora_vl.training.generation_sampler import GenerationSampler
    from adora_vl.training.group_sampler import GroupSampler


@dataclass(frozen=True)
class EvaluationTask:
    """One benchmark with the problems that are evaluated.

    For example, `problems=data/my-set` of the key `adora_eval` becomes the task of the benchmark
    `problems` with the held-out problems of `data/my-set`.
    """

    benchmark: Benchmark
    problems: list[Problem]
    problems_in_data: int | None = None
    """Problems in the data, of which `problems` may be a part; None: no more than `problems`."""
    entry: str = ""
    """The entry of the key `adora_eval` that asks for it."""


class _EvaluationEntry(NamedTuple):
    """What an entry of the key `adora_eval` asks for: `BENCHMARK=DATA`, or `BENCHMARK=DATA:views`.

    With `:views` the same problems are shown in several ways, such as the facts of the figure as
    text. For example, `problems=data/a:views` names the benchmark `problems` and the path `data/a`,
    with views.
    """

    benchmark_name: str
    path: str
    with_views: bool

    @classmethod
    def parse(cls, entry: str) -> _EvaluationEntry:
        """Read an entry. Without `=` the path is empty."""
        benchmark_name, _, data = entry.partition("=")
        return cls(
            benchmark_name=benchmark_name,
            path=data.removesuffix(":views"),
            with_views=data.endswith(":views"),
        )


@dataclass(frozen=True)
class EvaluationPlan:
    """What to evaluate during a training, and when."""

    tasks: list[EvaluationTask]
    every: int
    """Optimizer steps between evaluations."""
    at_start: bool
    """Whether to evaluate before the first step too."""
    prompt_template: str | None = None
    """The template of the training's prompts (`adora_prompt`)."""
    delay: float = 0
    """Optimizer steps before which there is no evaluation (`eval_delay`)."""


def load_evaluation_plan(
    config: AdoraGRPOConfig, folders: Sequence[str], prompt_template: str | None = None
) -> EvaluationPlan | None:
    """Return what a training evaluates and when, and switch Transformers' own evaluation off.

    Transformers would evaluate too, by the loss on a second data set. So `eval_strategy` and
    `eval_on_start` in `config` are reset, once they have been read.

    Args:
        config: the training arguments; `adora_eval` names benchmarks and their data.
        folders: the folders of the training data, whose held-out splits are evaluated where
            `adora_eval` names nothing.
        prompt_template: that of the training (`adora_prompt`).

    Returns:
        What to evaluate; None if the keys ask for no evaluation.

    Raises:
        UserError: there is nothing to evaluate on, or it cannot be loaded.
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
    tasks: list[EvaluationTask] = []
    for entry in entries:
        tasks += _load_tasks(entry, config.adora_eval_limit, prompt_template)
    for task in tasks:
        refuse_control_tokens(task.problems)
    plan = EvaluationPlan(
        tasks=_make_names_unique(tasks),
        every=int(config.eval_steps),
        at_start=bool(config.eval_on_start),
        prompt_template=prompt_template,
        delay=config.eval_delay,
    )
    config.eval_strategy = IntervalStrategy.NO
    config.eval_on_start = False
    return plan


def drop_overlong_problems(
    plan: EvaluationPlan, overlong_prompts: PromptLengthFilter
) -> EvaluationPlan:
    """Return the plan without problems whose prompts leave no tokens for an answer.

    Raises `UserError` for such problems if the keys of the run say so.

    Args:
        plan: what is evaluated during a training.
        overlong_prompts: finds these problems by the keys of the run.
    """
    tasks = []
    for task in plan.tasks:
        # This is a generator, so that image sizes, which take time to read, are read only if
        # needed.
        rows = ((problem.pid, problem.prompt, _image_sizes(problem)) for problem in task.problems)
        evaluation_name = f" of the evaluation {task.benchmark.name}"
        fitting_indices = overlong_prompts.prompts_to_evaluate(
            rows, len(task.problems), evaluation_name
        )
        tasks.append(replace(task, problems=[task.problems[index] for index in fitting_indices]))
    return replace(plan, tasks=tasks)


def _image_sizes(problem: Problem) -> Sequence[Size | None]:
    """Return the sizes of a problem's images; None for each if one of them cannot be read."""
    try:
        if problem.sizes is not None:
            return problem.sizes()
        return [image.size for image in problem.images()]
    # A decoder may raise anything on a broken file. The evaluation itself counts such a problem.
    except Exception:
        return [None] * problem.n_images


def _make_names_unique(tasks: Sequence[EvaluationTask]) -> list[EvaluationTask]:
    """Return the tasks with benchmark names that are unique in the log.

    If a benchmark is evaluated on several data sets, the name of the folder is appended. For
    example, `problems=data/my-set` and `problems=data/b` become `problems_my_set` and `problems_b`.
    Raises `UserError` if two tasks still have the same name.
    """
    names = [task.benchmark.name for task in tasks]
    renamed_tasks: list[EvaluationTask] = []
    for task, name in zip(tasks, names, strict=True):
        if names.count(name) == 1:
            renamed_tasks.append(task)
            continue
        folder_name = Path(_EvaluationEntry.parse(task.entry).path).name
        longer_name = f"{name}_{re.sub(r'[^0-9A-Za-z]+', '_', folder_name)}"
        if any(longer_name == earlier.benchmark.name for earlier in renamed_tasks):
            raise UserError(
                f"adora_eval: {task.entry!r} has the name {longer_name!r} of another one; rename "
                "its folder"
            )
        renamed_tasks.append(replace(task, benchmark=replace(task.benchmark, name=longer_name)))
    return renamed_tasks


class DataMissingError(UserError):
    """The data of an evaluation are not on this machine."""


def _load_tasks(
    entry: str, max_problems: int | None, prompt_template: str | None
) -> list[EvaluationTask]:
    """Return the evaluation tasks that an entry of the key `adora_eval` names, with their problems.

    Args:
        entry: `BENCHMARK=DATA` becomes one task. `BENCHMARK=DATA:views` becomes one for each view,
            a way to show a problem, such as the facts of its figure as text.
        max_problems: how many problems are evaluated at most; None for all.
        prompt_template: the template of the training's prompts (`adora_prompt`).

    Raises:
        DataMissingError: the data are not on this machine.
        UserError: the entry names no benchmark, or its data have no problems.
    """
    benchmark_name, path, with_views = _EvaluationEntry.parse(entry)
    if not path:
        raise UserError(
            f"adora_eval: {entry!r} is not BENCHMARK=DATA; write what it is to be asked, "
            "problems=DIR"
        )
    benchmark = find_benchmark(benchmark_name, "adora_eval")
    options = default_data_options(benchmark, path, prompt_template)
    try:
        problems = load_checked_problems(benchmark, options).problems
    except UserError as error:
        if Path(path).exists():
            raise
        raise DataMissingError(str(error)) from error
    if not problems:
        raise UserError(f"adora_eval: {path!r} has no problems in its split {benchmark.split!r}")
    if not with_views:
        return [
            EvaluationTask(
                benchmark=benchmark,
                problems=problems[:max_problems],
                problems_in_data=len(problems),
                entry=entry,
            )
        ]
    # Only problems with facts can be shown in other views.
    problems_with_facts = [problem for problem in problems if problem.facts]
    shown_problems = problems_with_facts[:max_problems] or problems
    return [
        EvaluationTask(
            benchmark=replace(benchmark, name=f"{benchmark.name}_{view}"),
            problems=apply_view(shown_problems, view),
            problems_in_data=len(problems),
            entry=entry,
        )
        for view in DESCRIPTION_BY_VIEW
    ]


class SamplerEngine(ConversationEngine):
    """Answers problems greedily with the trainer's sampler, in the interface of the evaluators.

    Collective: all ranks call it together, even with no problem left.
    """

    def __init__(
        self,
        engine_and_policy: EngineAndPolicy,
        group_sampler: GroupSampler,
        chat: ChatProcessor,
        end_tokens: Iterable[int],
    ) -> None:
        """Build an engine from the trainer's own engine and tools.

        Args:
            engine_and_policy: the engine of the trainer, and its policy.
            group_sampler: the trainer's sampler of rollouts, which has the tools.
            chat: makes the prompts of problems.
            end_tokens: the tokens that end an answer. The tokens and strings to stop at in
                `generation_kwargs` end it too.
        """
        config = engine_and_policy.config
        self._sampler = engine_and_policy.sampler
        batch_size = 256
        if self._sampler.reads_prompts:
            # The policy samples a batch in one tensor. As many rollouts as it samples for a
            # generation of the training are known to fit into memory.
            batch_size = engine_and_policy.context.layout.rows_per_process
        super().__init__(
            chat,
            self._sample_greedily,
            max_length=config.max_completion_length,
            batch_size=batch_size,
            stop=StopCriteria.from_config(end_tokens, config.generation_kwargs or {}, chat.decode),
            any_rank=group_sampler.any_rank_continues,
        )
        self.tool_loop = group_sampler.tool_loop
        if group_sampler.server_context is not None:
            self.context_length = min(self.context_length, group_sampler.server_context)

    def _sample_greedily(self, requests: Sequence[SamplingRequest]) -> list[SamplingResult]:
        """Return the likeliest tokens of a turn for each request. Collective.

        An engine processes the prompts of the requests itself; the policy needs them processed.
        """
        prompts = None
        if self._sampler.reads_prompts:
            prompts = self._read_prompts(requests)
        return self._sampler.sample_greedily(requests, prompts)

    def _read_prompts(self, requests: Sequence[SamplingRequest]) -> PromptBatch:
        """Return the prompts of requests as the policy reads them, with their pixels.

        A rank without requests returns a prompt of one token as a stand-in, since sampling is
        collective where the weights are sharded.
        """
        if not requests:
            return PromptBatch(
                messages=[""],
                ids=[[self.chat.eos_id]],
                images=None,
                fields={},
            )
        ids = [request.prompt_ids for request in requests]
        # All images in the order of their prompts, as the image processor takes them.
        images: list[Any] = []
        for request in requests:
            images += request.images
        return PromptBatch(
            messages=[""] * len(requests),  # only `ids` are sampled from
            ids=ids,
            images=[request.images for request in requests],
            fields=self.chat.prompt_fields(ids, images),
        )


class EvaluationCallback(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Evaluates benchmarks during training: each rank samples its share, rank 0 scores and logs.

    Greedy decoding draws no random numbers, so a run with evaluations takes the same steps as one
    without.
    """

    def __init__(
        self,
        *,
        engine_and_policy: EngineAndPolicy,
        generation_sampler: GenerationSampler,
        plan: EvaluationPlan,
        end_tokens: Iterable[int],
        log_evaluation: Callable[[dict[str, float]], None],
        timed_evaluation: Callable[[], AbstractContextManager[None]],
        system_prompt: str | None = None,
        revision: str | None = None,
    ) -> None:
        """Build the callback.

        Args:
            engine_and_policy: the policy, and the engine that answers.
            generation_sampler: the trainer's own, which has its tools and its guard of servers.
            plan: what is evaluated, and when.
            end_tokens: the tokens that end an answer.
            log_evaluation: logs metrics by their names, as an entry of its own.
            timed_evaluation: makes the context in which the seconds of an evaluation are measured.
            system_prompt: the system prompt of the training; None: the data's own.
            revision: the revision of the base model on the hub.
        """
        self.engine_and_policy = engine_and_policy
        self.generation_sampler = generation_sampler
        self.plan = plan
        self.end_tokens = frozenset(end_tokens)
        self.log_evaluation = log_evaluation
        self.timed_evaluation = timed_evaluation
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
        """Sample the answers to all tasks, score them, and log the metrics. Collective.

        Every rank samples its share, and the first rank scores and logs.

        `step`: optimizer steps that have been made, for the printed line.
        """
        accelerator = self.engine_and_policy.accelerator
        with self.timed_evaluation():  # counts its seconds
            with (
                self.generation_sampler.guard.ending_run_if_no_server_is_left(),
                self.engine_and_policy.sampler.awake(),
            ):
                answers_by_task = [self._answer(task) for task in self.plan.tasks]
            has_answer_tags = asks_for_answer_tags(self.system_prompt, self.plan.prompt_template)
            for task, answers in zip(self.plan.tasks, answers_by_task, strict=True):
                all_answers = gather_object(answers)
                if accelerator.is_main_process:
                    metrics = metrics_in_training(
                        task.benchmark, all_answers, answer_tags=has_answer_tags
                    )
                    self._log_metrics(task, step, metrics, answered_count=len(all_answers))
            accelerator.wait_for_everyone()

    def _answer(self, task: EvaluationTask) -> list[dict[str, Any]]:
        """Return the answers to this rank's share of a task's problems, a dict for each.

        For example, 2 ranks answer 5 problems: rank 0 the problems 0, 2 and 4, rank 1 the problems
        1 and 3. Collective: every rank samples equally many batches, of which the last may be
        empty.
        """
        engine_and_policy = self.engine_and_policy
        config = engine_and_policy.config
        accelerator = engine_and_policy.accelerator
        chat = ChatProcessor(
            engine_and_policy.policy.name_or_path,
            min_pixels=config.min_pixels,
            max_pixels=config.max_pixels,
            revision=self.revision,
            chat_template_kwargs=config.chat_template_kwargs,
            processor=engine_and_policy.processor,
        )
        group_sampler = self.generation_sampler.group_sampler
        engine = SamplerEngine(engine_and_policy, group_sampler, chat, self.end_tokens)
        rows: list[dict[str, Any]] = []
        # Rank r answers the problems r, r + ranks, r + 2 ranks and so on.
        problems_of_rank = task.problems[accelerator.process_index :: accelerator.num_processes]
        # All ranks go through as many batches as the rank with the most problems needs.
        most_problems = math.ceil(len(task.problems) / accelerator.num_processes)
        for first in range(0, most_problems, engine.batch_size):
            batch = [
                AnswerSample(problem, number=0)  # one answer to each problem
                for problem in problems_of_rank[first : first + engine.batch_size]
            ]
            rows += answer_batch(engine, batch, seed=0, system_prompt=self.system_prompt)
        return rows

    def _log_metrics(
        self, task: EvaluationTask, step: int, metrics: dict[str, float], answered_count: int
    ) -> None:
        """Log the metrics of a task, and print its accuracy with a confidence interval.

        Args:
            task: the benchmark and its problems.
            step: optimizer steps that have been made.
            metrics: the metrics by name; accuracies lie between 0 and 1.
            answered_count: the number of problems that all ranks together have answered.
        """
        name = task.benchmark.name
        self.log_evaluation({f"eval_{key}": value for key, value in metrics.items()})
        interval = (metrics[f"{name}_accuracy_low"], metrics[f"{name}_accuracy_high"])
        accuracy = percent_with_interval(metrics[f"{name}_accuracy"], interval)
        problem_count = task.problems_in_data or answered_count
        problems_text = f"of {pluralize(problem_count, 'problem')}"
        if answered_count < problem_count:
            problems_text = f"{answered_count} {problems_text} asked"
        print(f"step {step}: {name} {accuracy} right, {problems_text}", flush=True)
