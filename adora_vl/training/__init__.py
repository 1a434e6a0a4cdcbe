"""The way from rollouts over advantages to micro-batches, and the guards of a training step."""
