"""Checks that servers and policy agree, in a run where older weights sample all rollouts."""

from adora_vl.rollout.agreement import CHECK_ROWS, CHECK_TOKENS
from adora_vl.rollout.engine_and_policy import EngineAndPolicy, NamedPrompts
from adora_vl.rollout.samplers import PendingSamples
from adora_vl.training.guards import DriftGuard
from adora_vl.types import Row


class LateDriftCheck:
    """Compares the servers' log-probabilities with the policy's, once in an optimizer step.

    With `ahead: k` no generation has samples of the present weights, so a few short rollouts are
    requested for the comparison. While the policy learns from generation n, they wait in the queue
    behind generation n + k - 1. For k > 1 the policy would have to wait for that generation before
    it could learn from n, so they are compared at the end of the step instead. There are B rollouts
    of C tokens.
    """

    def __init__(self, engine_and_policy: EngineAndPolicy, drift_guard: DriftGuard) -> None:
        """Build the check.

        Args:
            engine_and_policy: the servers that sample, and the policy that scores the same tokens.
            drift_guard: ends the run where the two are too far apart.
        """
        self._engine_and_policy = engine_and_policy
        self._drift_guard = drift_guard
        # Filled by `request`, emptied by `finish`.
        self._requested: tuple[NamedPrompts, PendingSamples] | None = None

    def request(self, rows: list[Row], step: int) -> None:
        """Request short rollouts of the first of these rows, for which `finish` waits. Collective.

        The servers must have the weights of this step already. A second call in a step does
        nothing.

        Args:
            rows: rows of this rank.
            step: optimizer steps that have been made; the seeds of the rollouts depend on it.
        """
        if self._requested is not None:
            return
        prompts = self._engine_and_policy.read_prompts(rows[:CHECK_ROWS])
        samples = self._engine_and_policy.begin_sampling(
            prompts, max_tokens=CHECK_TOKENS, check_name=f"drift/{step}"
        )
        self._requested = (prompts, samples)

    @property
    def is_requested(self) -> bool:
        """Whether samples were requested that are not compared yet."""
        return self._requested is not None

    def finish(self) -> None:
        """Wait for the requested rollouts, and compare the log-probabilities on them. Collective.

        Raises `RolloutError` where those of policy and servers are too far apart. This does nothing
        if no rollouts were requested.
        """
        if self._requested is None:
            return
        prompts, samples = self._requested
        # Forgotten before the rollouts arrive: a second call in this step has nothing to do.
        self._requested = None
        rollouts = self._engine_and_policy.join_sampling(prompts, samples)
        # Each pass computes the features of its own images: with sharded weights the ranks have to
        # make the same passes, and one rank may have an image where another has none.
        with self._engine_and_policy.images.vision.without_sharing():
            policy_logps_BC = self._engine_and_policy.policy_logps(rollouts)
            self._drift_guard.check(
                policy_logps_BC, rollouts.logps_BC, rollouts.mask_BC, samples.step
            )
