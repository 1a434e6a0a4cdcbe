"""The logger of a generation: its metrics, TRL's table of completions, the record of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adora_vl.record.recorder import Recorder
from adora_vl.record.rollout_metrics import (
    TieNotice,
    assessment_metrics,
    learned_metrics,
    tool_metrics,
)
from adora_vl.record.trackers import add_rows, logs_images, logs_tables
from adora_vl.training.advantages import Advantages, GroupAssessment
from adora_vl.training.generation import Generation, ScoredGroups, UnscoredGroups
from adora_vl.training.rollout_facts import RolloutFacts
from adora_vl.types import Batch, StepContext


class MetricsLogger:
    """Logs each generation: its metrics, TRL's table of completions, and the record of rollouts.

    Collective: all ranks call every method, in the same order.
    """

    def __init__(
        self,
        context: StepContext,
        recorder: Recorder,
        metrics_by_mode: Mapping[str, Mapping[str, list[float]]],
        table: Mapping[str, Any],
        function_names: Sequence[str],
        tie_notice: TieNotice,
        assess: Callable[[RolloutFacts, int, int], GroupAssessment],
        synced_bytes: Callable[[], int] | None,
    ) -> None:
        """Store what a generation is logged to: TRL's metrics and table, and the recorder.

        Args:
            context: the run's config, log and state.
            recorder: the recorder of rollouts.
            metrics_by_mode: TRL's `_metrics`: for `train` and `eval`, the values of each metric
                since the last line of the log.
            table: TRL's `_logs`, the table of completions.
            function_names: the names of the reward functions.
            tie_notice: warns where right answers are often exactly as long as wrong ones.
            assess: returns the assessment of groups, such as their weights. It takes the facts of
                their rollouts, the size of a group, and the number of optimizer steps so far.
            synced_bytes: returns how many bytes the last weight sync has sent to the engine; None
                without an engine.
        """
        self.recorder = recorder
        self.metrics_by_mode = metrics_by_mode
        self.table = table
        self.function_names = function_names
        self.tie_notice = tie_notice
        self.assess = assess
        self.synced_bytes = synced_bytes
        self.log = context.log
        self.state = context.state
        # With `refill` a generation is graded in several batches. Their facts are collected in
        # `_graded_facts` until all are known, and logged by `log_learned`.
        self._has_further_batches = context.config.adora_rollouts.refill > 0
        self._graded_facts: RolloutFacts | None = None
        self.logs_tables = logs_tables(context.config)
        self.logs_images = logs_images(context.config)

    def log_scored(
        self, generation: Generation, unscored_groups: UnscoredGroups, scored_groups: ScoredGroups
    ) -> None:
        """Log all rollouts that were scored, also those that `refill` replaces later.

        In a training the batch gets the column `rollout_number`, by which values that are known
        later find the rollout again.

        Args:
            generation: the step and mode (train or eval) that the rollouts were sampled for.
            unscored_groups: the prompts and completions of this rank.
            scored_groups: rewards, lengths and advantages of the rollouts of all ranks.
        """
        facts = scored_groups.facts
        is_training = generation.key.mode == "train"
        metrics = self.metrics_by_mode[generation.key.mode]
        state = self.state()
        if is_training:
            state.num_input_tokens_seen += facts.tokens
            if self.synced_bytes is not None:
                self.log("adora/sync_mb", self.synced_bytes() / 2**20)
        # One value in place of the earlier ones, as in TRL: the log line takes the mean of a
        # metric's values, and this one is a total already.
        metrics["num_tokens"].clear()
        metrics["num_tokens"].append(state.num_input_tokens_seen)
        if is_training and self._has_further_batches:
            self._collect_facts(facts)
        else:
            self._log_metrics(metrics, scored_groups.assessment, facts)
        images: list[Any] = []
        if self.logs_images:
            # The table needs an entry for each row, so a rank without images has None in each.
            images = unscored_groups.prompts.images or [None] * len(unscored_groups.completions)
        add_rows(
            self.table,
            unscored_groups=unscored_groups,
            scored_groups=scored_groups,
            images=images,
            function_names=self.function_names,
            is_training=is_training,
            as_plain_text=self.logs_tables,
        )
        if is_training:
            scored_groups.batch["rollout_number"] = self.recorder.number_next_rollouts(
                len(unscored_groups.completions)
            )
            self.recorder.add(
                step=generation.key.step,
                unscored_groups=unscored_groups,
                scored_groups=scored_groups,
                table=self.table,
                function_names=self.function_names,
            )

    def _collect_facts(self, facts: RolloutFacts) -> None:
        """Add the facts of a graded batch to those of the generation's earlier batches."""
        if self._graded_facts is None:
            self._graded_facts = facts
        else:
            self._graded_facts = self._graded_facts.append_graded(facts)

    def _log_metrics(
        self, metrics: Mapping[str, list[float]], assessment: GroupAssessment, facts: RolloutFacts
    ) -> None:
        """Add the metrics of graded rollouts to `metrics`, from which TRL makes the next log line.

        Args:
            metrics: the values of each metric since the last log line, by name.
            assessment: what is known of the groups of all ranks, such as their weights.
            facts: what is known of their rollouts, such as rewards and lengths.
        """
        value_by_name = assessment_metrics(assessment, facts, self.function_names)
        has_tools = self.recorder.decode is not None
        if has_tools:
            value_by_name |= tool_metrics(assessment.groups.rewards_PG, facts)
        for name, value in value_by_name.items():
            metrics[name].append(value)

    def log_learned(self, generation: Generation, batch: Batch, advantages: Advantages) -> None:
        """Log the rollouts that the loss uses, once their advantages are final.

        Args:
            generation: the step that the rollouts were sampled for.
            batch: the rollouts of this rank.
            advantages: the advantages of the rollouts of all ranks.
        """
        # None unless `refill` has graded the generation in several batches, whose facts were
        # collected.
        facts = self._graded_facts
        if facts is not None:
            # Logged only now, so that each metric is a mean over all rollouts of the generation and
            # not a mean of batches.
            self._graded_facts = None
            assessment = self.assess(facts, generation.group_size, generation.key.step)
            self._log_metrics(self.metrics_by_mode["train"], assessment, facts)
        for name, value in learned_metrics(advantages).items():
            self.log(name, value)
        self.tie_notice.count(advantages.assessment.weighting)
        self.recorder.add_final_advantages(batch, advantages, self.table)
