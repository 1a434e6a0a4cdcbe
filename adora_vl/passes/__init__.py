"""What one training step computes, and what it need not compute twice.

`processor`: a prompt and an image processed once. `bank`, `vision`: pixels held and seen once. `prefix`,
`shared_prompt`, `split_attention`, `packed`: a group's prompt computed once. `batches`: which rows share a micro-batch.
`importance`: the engine's log-probabilities against the policy's. `trainer`: TRL's trainer with these.
"""
