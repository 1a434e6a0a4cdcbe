"""What a run will need in memory and on disk, from shapes alone: pure formulas, each with its source.

`model` what is to be held, `sharding` over how many cards, `states` weights, gradients and optimizer, `activations`
what a backward pass keeps, `engine` what vLLM takes, `disk` a checkpoint, `predict` the sum and what would still fit.

Bytes are ints, GiB is 2**30. How far the formulas are from what was measured: docs/hardware.md.
"""

GIB = 2**30
