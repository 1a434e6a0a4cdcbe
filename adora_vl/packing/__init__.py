"""What a training step computes once instead of once per rollout: images, vision passes, prompts."""
