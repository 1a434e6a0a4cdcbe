"""What a training step computes once, and not once per rollout: images, vision passes, prompts."""
