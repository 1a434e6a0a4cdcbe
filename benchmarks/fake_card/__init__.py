"""A simulated card: the step of a GPU's recipe at true size on a CPU.

    python -m benchmarks.fake_card CONFIG

`device.py` makes torch's CPU build take `cuda` for a device, `card.py` follows every tensor on it,
`kernels.py` chooses the kernels that a card would take, and `run.py` builds the trainer and says
which phase it is in. Shapes, dtypes, devices, autograd and lifetimes are torch's own; seconds,
rounding, the allocator and vLLM are not there.
"""
