"""What one training step computes, and what it need not compute twice.

`processor`: a prompt and an image processed once. `bank`, `vision`: pixels held and seen once. `prefix`, `packed`: a
group's prompt computed once. `batches`: which rows share a micro-batch. `unfinished`: what is left of a generation, in
a checkpoint. `importance`: the engine's log-probabilities against the policy's. `trainer`: TRL's trainer with these.
"""
