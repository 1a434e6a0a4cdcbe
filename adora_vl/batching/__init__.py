"""How the rollouts of a generation become micro-batches: resampled, rebalanced between processes, then divided."""
