"""The simulated card: counts memory, launches, FLOPs, and the waits of the host for the device.

Every tensor on `cuda` is fake and every tensor on the CPU is real. Small tensors on the card (ids,
masks, grids, rewards) carry real values beside them, so that code which looks at them goes on as it
would on a card. Some values are not known, such as a loss, which depends on weights that are not
there. Where the host asks for one, a value is made up, and counted.
"""

import math
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fake_card.device import CARD  # before torch

import torch  # isort: skip
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import varlen  # noqa: F401  # registers its operations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

aten: Any = torch.ops.aten
torch_attn: Any = torch.ops.torch_attn
_VARLEN_OPERATIONS = (torch_attn._varlen_attn.default, torch_attn._varlen_attn_backward.default)
# Tensors with no more integers, or floating-point numbers, than these carry values.
MAX_KNOWN_INTEGERS = 8_000_000
MAX_KNOWN_FLOATS = 200_000
ALLOCATOR_BLOCK = 512  # bytes, of which every allocation is a multiple
_FLASH_BLOCK = 128  # tokens that the flash backward computes at once
_THIS_FOLDER = str(Path(__file__).parent)
_ROOT = str(Path(__file__).parents[2])
_INDEXING_OPERATIONS = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}
# The shape of what these operations return depends on values, for which the host waits.
_NAME_BY_DATA_SHAPED_OPERATION = {
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.unique_consecutive.default: "unique",
    aten.repeat_interleave.Tensor: "repeat_interleave",
    aten.bincount.default: "bincount",
}
_RANDOM_OPERATIONS = {aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float}


class Place(NamedTuple):
    """An event, such as `item`, and the lines of code that led to it."""

    event: str
    line: str  # the innermost line outside of torch
    ours: str  # the innermost line of this project; empty where no line of it led to the event

    @property
    def is_ours(self) -> bool:
        """Whether a line of this project caused the event itself, and not through a library."""
        return self.line == self.ours


class Card(TorchDispatchMode):
    """Simulates a card inside a `with` block, and counts by phase what it has to do.

    Attributes:
        phase: the phase of the training, under which everything is counted.
        flops: floating-point operations by phase.
        launches: operations by phase, each of which launches at least one kernel.
        peaks: the most bytes that were held at once, by phase.
        kernels: how often each kernel of attention, and each Triton kernel, was launched.
        waits: how often the host has waited for the card, by phase and place.
        made_up: how often a value was asked for that is not known, by place.
        composed: functions for operations that consist of several ones on a card.
        live: bytes that are held now.
        highest: the most bytes that were held since the attribute was last set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.phase = "start"
        self.flops: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.waits: dict[str, Counter[Place]] = defaultdict(Counter)
        self.made_up: Counter[Place] = Counter()
        self.composed: dict[Any, Callable[..., Any]] = {}
        self.live = 0
        self.highest = 0
        self._idle = True  # whether nothing was launched since the host last waited
        self._bytes_by_storage: dict[int, int] = {}
        # Storages of values that are no longer those of their tensors.
        self._outdated_storages: set[int] = set()
        FakeTensor.tolist = self._tolist()  # type: ignore[method-assign,assignment]

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what happens inside the block under a phase."""
        outer_phase = self.phase
        self.phase = phase
        self._note_peak(self.live)
        try:
            yield
        finally:
            self.phase = outer_phase

    def used(self) -> tuple[int, int]:
        """Return the bytes that are held now, and that were held at most."""
        return self.live, max(self.peaks.values(), default=0)

    def wait(self, event: str) -> None:
        """Count a wait of the host for the card. `event`: what the host waits for."""
        self.waits[self.phase][_place(event)] += 1
        self._idle = True

    def synchronize(self, event: str) -> None:
        """Count a wait for the whole card, unless nothing was launched since the last wait."""
        if not self._idle:
            self.wait(event)

    # --------------------------------------------------------------------------------------- values

    def value(self, tensor: Any) -> Tensor | None:
        """Return the values of a tensor; None where they are not known.

        A tensor on the CPU is its own value.
        """
        if not isinstance(tensor, FakeTensor):
            return tensor if isinstance(tensor, Tensor) else None
        value: Tensor | None = getattr(tensor, "_value", None)
        if value is None or value.untyped_storage()._cdata in self._outdated_storages:
            return None
        return value

    def forget(self, tensor: FakeTensor) -> None:
        """Note that the values of a tensor, and of views of it, are not known any longer."""
        value = getattr(tensor, "_value", None)
        if value is not None:
            storage = value.untyped_storage()
            self._outdated_storages.add(storage._cdata)
            weakref.finalize(storage, self._outdated_storages.discard, storage._cdata)
            tensor._value = None  # type: ignore[attr-defined]

    def give(self, real: Tensor) -> FakeTensor:
        """Return a tensor on the card with these values."""
        with self.fake:
            fake: Any = torch.empty_strided(
                real.shape, real.stride(), dtype=real.dtype, device=CARD
            )
        fake._value = real
        self._hold(fake)
        return fake

    def _known_or_made_up(self, event: str, tensor: Tensor) -> Tensor:
        """Return the values that go to the host; made-up ones where nobody knows them.

        Raises `MemoryError` for a large tensor of unknown values.
        """
        self.wait(event)
        value = self.value(tensor)
        if value is None:
            if tensor.numel() > MAX_KNOWN_INTEGERS:
                raise MemoryError(
                    f"{tuple(tensor.shape)} {tensor.dtype} of unknown values go to the host"
                )
            self.made_up[_place(event)] += 1
            # No floating-point value is 0, which code takes for a sign of its own: of a step that
            # was skipped, or of a group without signal.
            made_up_value = 1e-3 if tensor.is_floating_point() else 0
            value = torch.full(tuple(tensor.shape), made_up_value, dtype=tensor.dtype)
        return value.detach()

    def _tolist(self) -> Callable[[Tensor], Any]:
        """Return the method `tolist` for tensors on the card."""

        def tolist(tensor: Tensor) -> Any:
            return self._known_or_made_up("tolist", tensor).tolist()

        return tolist

    # --------------------------------------------------------------------------------------- memory

    def _hold(self, out: Any) -> None:
        """Count the memory of tensors on the card, until their storages are freed."""
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
                storage = tensor.untyped_storage()
                key = storage._cdata
                size = math.ceil(storage.nbytes() / ALLOCATOR_BLOCK) * ALLOCATOR_BLOCK
                if key not in self._bytes_by_storage:
                    weakref.finalize(storage, self._free, key)
                self.live += size - self._bytes_by_storage.get(key, 0)
                self._bytes_by_storage[key] = size
        self._note_peak(self.live)

    def _note_peak(self, used_bytes: int) -> None:
        """Raise the peaks to the bytes that are in use."""
        self.highest = max(self.highest, used_bytes)
        self.peaks[self.phase] = max(self.peaks[self.phase], used_bytes)

    def _free(self, key: int) -> None:
        """Count the memory of a storage as free."""
        self.live -= self._bytes_by_storage.pop(key, 0)

    # ----------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of torch on fakes, and count what a card would do for it.

        An operation on the CPU alone runs as it is. One that brings a value to the host counts as a
        wait, and gives the known value or a made-up one.
        """
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        if func is aten.is_pinned.default:
            return False
        if func is aten._pin_memory.default:
            return args[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        to_card = device is not None and torch.device(device).type == "cuda"
        if not to_card and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        self.launches[self.phase] += 1
        if func is aten._local_scalar_dense.default:
            return self._known_or_made_up("item", args[0]).item()
        to_host = device is not None and torch.device(device).type == "cpu"
        if func is aten._to_copy.default and to_host:
            host_values = self._known_or_made_up("to the host", args[0])
            return host_values.to(kwargs.get("dtype") or host_values.dtype, copy=True)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            return func(args[0], self._known_or_made_up("to the host", args[1]))
        self._count_waits(func, args=args, kwargs=kwargs, tensors=tensors, to_card=to_card)
        self._idle = False
        if func in self.composed:
            with self:
                return self.composed[func](*args, **kwargs)
        if func is aten.equal.default:
            values = [self.value(tensor) for tensor in args]
            are_known = all(value is not None for value in values)
            return func(*values) if are_known else True
        by_mask = func in _INDEXING_OPERATIONS and any(_is_mask(index) for index in args[1])
        if func in _NAME_BY_DATA_SHAPED_OPERATION or (
            by_mask and func in (aten.index.Tensor, aten._unsafe_index.Tensor)
        ):
            return self._with_data_shape(func, args=args, kwargs=kwargs, tensors=tensors)
        return self._on_card(func, args=args, kwargs=kwargs, tensors=tensors, to_card=to_card)

    def _count_waits(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], to_card: bool
    ) -> None:
        """Count a wait if the host has to wait for the card before an operation."""
        from_host = any(not isinstance(tensor, FakeTensor) for tensor in tensors)
        is_blocking_copy = (
            func is aten._to_copy.default and to_card and not kwargs.get("non_blocking")
        )
        # The third argument of `copy_` is `non_blocking`.
        is_blocking_write = func is aten.copy_.default and not (len(args) > 2 and args[2])
        knows_its_size = func is aten.repeat_interleave.Tensor and kwargs.get("output_size")
        if from_host and (is_blocking_copy or is_blocking_write):
            self.wait("from the host")
        elif func in _NAME_BY_DATA_SHAPED_OPERATION and not knows_its_size:
            self.wait(_NAME_BY_DATA_SHAPED_OPERATION[func])
        elif func is aten.equal.default:
            self.wait("equal")
        elif func in _INDEXING_OPERATIONS:
            for index in args[1]:
                if index is not None and _is_mask(index):
                    self.wait("index by a mask")
                elif index is not None and not isinstance(index, FakeTensor) and index.dim():
                    self.wait("index from the host")

    def _on_card(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], to_card: bool
    ) -> Any:
        """Run an operation on fakes, and count its FLOPs and memory.

        The result gets values where all inputs have them, nothing is random, and it is small
        enough. Otherwise the values of what the operation writes to are not known any longer.
        """
        values = [self.value(tensor) for tensor in tensors]
        fakes = tree_map_only(Tensor, self._as_fake, (args, kwargs))
        if to_card:
            fakes[1]["device"] = CARD
        with self.fake:
            out = func(*fakes[0], **fakes[1])
        if func._overloadpacket in flop_registry:
            # The bounds of rows are looked at by their values, which these fakes do not have.
            flop_args = args if func in _VARLEN_OPERATIONS else fakes[0]
            self._count_flops(func, args=flop_args, kwargs=fakes[1], out=out)
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, FakeTensor)]
        are_known = all(value is not None for value in values)
        if (
            results
            and are_known
            and func not in _RANDOM_OPERATIONS
            and all(map(_is_small, results))
        ):
            self._compute_values(func, args=args, kwargs=kwargs, results=results)
        elif func._schema.is_mutable:
            # The first argument is written to, if any is.
            targets = [tensor for tensor in args[:1] if isinstance(tensor, FakeTensor)]
            for tensor in [*results, *targets]:
                self.forget(tensor)
        self._hold(out)
        self._note_peak(self.live + kernel_bytes(func, args))
        return out

    def _as_fake(self, tensor: Tensor) -> Tensor:
        """Return a tensor as one without values, as the operations on fakes take it."""
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor.detach())

    def _compute_values(self, func: Any, args: Any, kwargs: Any, results: list[Any]) -> None:
        """Compute the values of results from values that are known, on the CPU."""
        real_args, real_kwargs = tree_map_only(FakeTensor, self.value, (args, kwargs))
        real_kwargs.pop("pin_memory", None)  # without a GPU nothing can be pinned
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        try:
            real_results = func(*real_args, **real_kwargs)
        except (RuntimeError, NotImplementedError):  # the CPU lacks the operation in this dtype
            for fake in results:
                self.forget(fake)
            return
        real_tensors = [leaf for leaf in tree_leaves(real_results) if isinstance(leaf, Tensor)]
        for fake, real in zip(results, real_tensors, strict=False):
            fake._value = real

    def _with_data_shape(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run an operation whose result's shape depends on values.

        A mask of unknown values is taken to be true everywhere. Raises `NotImplementedError` for
        another operation on unknown values.
        """
        if all(self.value(tensor) is not None for tensor in tensors):
            out = func(
                *tree_map_only(FakeTensor, self.value, args),
                **tree_map_only(FakeTensor, self.value, kwargs),
            )
            return tree_map_only(Tensor, self.give, out)
        if func is aten.masked_select.default:
            args = (args[0], [args[1]])
            func = aten.index.Tensor
        if func not in _INDEXING_OPERATIONS:
            raise NotImplementedError(f"{func} of unknown values at {_place('').line}")
        indices: list[Any] = []
        for index in args[1]:
            if index is None:
                indices.append(None)
                continue
            value = self.value(index)
            if value is None:
                self.made_up[_place("mask")] += 1
                value = torch.ones(tuple(index.shape), dtype=index.dtype)
            # A mask stands for an index in each of its dimensions.
            positions = value.nonzero(as_tuple=True) if _is_mask(value) else [value]
            indices += [self.give(position) for position in positions]
        with self.fake:
            out = aten.index.Tensor(self._as_fake(args[0]), indices)
        self._hold(out)
        return out

    def _count_flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count the FLOPs of an operation, and the kernel of attention."""
        if "dtype" in func._overloadname:
            # Torch's formulas do not know the argument `out_dtype` behind the tensors.
            tensor_count = 3 if "addmm" in str(func) else 2
            args = args[:tensor_count]
            kwargs = {}
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        if func in _VARLEN_OPERATIONS:
            self.kernels["attention: flash, rows of different lengths"] += 1
            is_backward = func is torch_attn._varlen_attn_backward.default
            flops = self._varlen_flops(args, is_backward=is_backward)
        elif "flash_attention" in str(func):
            is_backward = "backward" in str(func)
            query, key = args[1:3] if is_backward else args[:2]
            causal_position = 10 if is_backward else 4  # of `is_causal` among the arguments
            is_causal = kwargs.get("is_causal", False)
            if len(args) > causal_position:
                is_causal = args[causal_position]
            if is_causal:
                # Of the q k pairs of q queries and k keys, q (q - 1) / 2 are hidden and not
                # computed, which is about half of them where q is k.
                flops = int(flops * (1 - (query.size(-2) - 1) / (2 * key.size(-2))))
        self.flops[self.phase] += flops

    def _varlen_flops(self, args: Sequence[Tensor], *, is_backward: bool) -> int:
        """Return the FLOPs of attention over rows of different lengths.

        Each pair of a query and a key that it sees takes two products in the forward pass, and five
        in the backward pass. Torch's own formula takes every row to be as long as the longest, and
        counts pairs that a causal mask hides.

        `args`: the arguments of the operation, among them where each row begins and ends.
        """
        query = args[1] if is_backward else args[0]
        bounds = args[6:8] if is_backward else args[3:5]  # of the queries' rows, of the keys' rows
        query_bounds, key_bounds = bounds
        query_lengths = self._known(query_bounds).diff().tolist()
        key_lengths = self._known(key_bounds).diff().tolist()
        # The last query of a row sees all of its keys, and each query before it one less.
        pairs = 0
        for queries, keys in zip(query_lengths, key_lengths, strict=True):
            pairs += queries * keys - queries * (queries - 1) // 2
        products = 5 if is_backward else 2
        return products * 2 * query.size(1) * query.size(2) * pairs

    def _known(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor, which have to be known."""
        value = self.value(tensor)
        assert value is not None
        return value


def kernel_bytes(func: Any, args: Any) -> int:
    """Return the bytes that a kernel holds while it runs, beside its arguments and results.

    Only the flash backwards hold any: they sum the queries' gradient in float32, and with fewer
    heads of keys than of queries the gradients of keys and values for each query head.
    """
    if func is torch_attn._varlen_attn_backward.default:
        query, key = args[1:3]
        tokens, heads, head_size = query.shape
        key_tokens, key_heads, _ = key.shape
        # Each row is padded to the kernel's block.
        padded_tokens = tokens + _FLASH_BLOCK * (args[6].size(0) - 1)
    elif func is aten._scaled_dot_product_flash_attention_backward.default:
        query, key = args[1:3]
        batch, heads, query_length, head_size = query.shape
        key_heads = key.size(1)
        key_tokens = key.size(0) * key.size(-2)
        blocks = -(-query_length // _FLASH_BLOCK)
        padded_tokens = batch * blocks * _FLASH_BLOCK
    else:
        return 0
    # The last one is the sum of a row's products, which the kernel keeps beside the gradient.
    sums = 4 * heads * padded_tokens * (head_size + 1)
    if key_heads == heads:
        return sums
    return sums + 2 * key_tokens * heads * head_size * key.element_size()


def _is_small(tensor: Tensor) -> bool:
    """Tell whether a tensor on the card carries values."""
    limit = MAX_KNOWN_FLOATS if tensor.dtype.is_floating_point else MAX_KNOWN_INTEGERS
    return tensor.numel() <= limit


def _is_mask(index: Any) -> bool:
    """Return whether an index is a mask, which is as long as what it indexes."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _place(event: str) -> Place:
    """Return the place of an event from the lines that led to it."""
    frame: Any = sys._getframe(1)
    line = ""
    ours = ""
    while frame is not None and not ours:
        name = frame.f_code.co_filename
        if not name.startswith(_THIS_FOLDER) and "/torch/" not in name and "<" not in name:
            short_name = name.removeprefix(f"{_ROOT}/").split("site-packages/")[-1]
            frame_line = f"{short_name}:{frame.f_lineno}"
            line = line or frame_line
            if name.startswith((f"{_ROOT}/adora_vl/", f"{_ROOT}/benchmarks/")):
                ours = frame_line
        frame = frame.f_back
    return Place(event, line or "?", ours)
