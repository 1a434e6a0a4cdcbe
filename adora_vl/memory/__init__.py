"""How much memory and disk space a run will need, computed from shapes alone: pure formulas, each with its source.

- `model`: the sizes of the model; `sharding`: over how many GPUs it is spread
- `states`: weights, gradients and optimizer; `activations`: what a forward pass keeps for the backward pass
- `engine`: what vLLM takes; `disk`: the size of a checkpoint; `predict`: the sum, and what would still fit

Bytes are ints, GiB is 2**30. docs/hardware.md says how close the formulas are to measurements.
"""

GIB = 2**30
