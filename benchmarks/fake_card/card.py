"""Follows every operation on the card: memory, launches, FLOPs, and where the host waits for the
device.

Everything on `cuda` is fake and everything on the CPU is real. Small tensors on the card (ids,
masks, grids, rewards, losses) carry real values beside them, so that code which looks at them goes
on as it would on a card. Where a value is asked for that nobody knows (a loss, which depends on
weights that are not there), one is made up and counted.
"""

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
# tensors of at most so many whole numbers, or fractions, carry values
WHOLE = 8_000_000
FRACTIONS = 200_000
BLOCK = 512  # bytes: the allocator's unit
_FLASH_BLOCK = 128  # tokens that the flash backward computes at once
HERE = str(Path(__file__).parent)
_ROOT = str(Path(__file__).parents[2])
_INDEXING_OPERATIONS = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}
# The shape of what these return depends on values, for which the host waits
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
    """An event, and the lines on which it happened."""

    event: str
    line: str  # the nearest one outside of torch
    ours: str  # the nearest one of this project; empty where nothing of ours called it

    @property
    def is_ours(self) -> bool:
        """Whether a line of this project itself did it."""
        return self.line == self.ours


class Card(TorchDispatchMode):
    """Pretends to be a card inside a `with` block, and counts by phase what it is given to do."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.phase = "start"
        self.flops: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()  # bytes
        self.kernels: Counter[str] = Counter()  # of attention, and of Triton
        self.waits: dict[str, Counter[Place]] = defaultdict(Counter)
        self.made_up: Counter[Place] = Counter()  # values that were asked for and that nobody knows
        self.composed: dict[Any, Callable[..., Any]] = {}  # operations that are several on a card
        self.live = self.highest = 0  # bytes: now, and since `run` last looked
        self._idle = True  # nothing was launched since the host last waited
        self._storages: dict[int, int] = {}
        self._outdated: set[int] = set()
        FakeTensor.tolist = self._tolist  # type: ignore[method-assign]

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what happens inside the block under a phase."""
        before = self.phase
        self.phase = phase
        self._reach(self.live)
        try:
            yield
        finally:
            self.phase = before

    def used(self) -> tuple[int, int]:
        """Return the bytes that are held now, and that were held at most."""
        return self.live, max(self.peaks.values(), default=0)

    def wait(self, event: str) -> None:
        """Count that the host waits for the card."""
        self.waits[self.phase][_place(event)] += 1
        self._idle = True

    def synchronize(self, event: str) -> None:
        """Count a wait for the whole card, unless nothing was launched since the last wait."""
        if not self._idle:
            self.wait(event)

    # --------------------------------------------------------------------------------------- values

    def value(self, tensor: Any) -> Tensor | None:
        """Return what a tensor holds; None if nobody knows.

        A tensor on the CPU is its own value.
        """
        if not isinstance(tensor, FakeTensor):
            return tensor if isinstance(tensor, Tensor) else None
        value: Tensor | None = getattr(tensor, "_value", None)
        return None if value is None or value.untyped_storage()._cdata in self._outdated else value

    def forget(self, tensor: FakeTensor) -> None:
        """Note that something without values wrote to a tensor.

        Views of it are outdated with it.
        """
        value = getattr(tensor, "_value", None)
        if value is not None:
            storage = value.untyped_storage()
            self._outdated.add(storage._cdata)
            weakref.finalize(storage, self._outdated.discard, storage._cdata)
            tensor._value = None  # type: ignore[attr-defined]

    def give(self, real: Tensor) -> FakeTensor:
        """Return a tensor on the card with these values."""
        with self.fake:
            out: Any = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=CARD)
        out._value = real
        self._hold(out)
        return out

    def _known_or_made_up(self, event: str, tensor: Tensor) -> Tensor:
        """Return the values that go to the host; made-up ones where nobody knows them.

        Raises `MemoryError` for a large tensor of unknown values.
        """
        self.wait(event)
        value = self.value(tensor)
        if value is None:
            if tensor.numel() > WHOLE:
                raise MemoryError(
                    f"{tuple(tensor.shape)} {tensor.dtype} of unknown values go to the host"
                )
            self.made_up[_place(event)] += 1
            # not 0, which code takes for a sign of its own (a skipped step, a group without signal)
            value = torch.full(
                tuple(tensor.shape), 1e-3 if tensor.is_floating_point() else 0, dtype=tensor.dtype
            )
        return value.detach()

    @property
    def _tolist(card) -> Any:  # noqa: N805  # `self` is the tensor's below
        return lambda self: card._known_or_made_up("tolist", self).tolist()

    # --------------------------------------------------------------------------------------- memory

    def _hold(self, out: Any) -> None:
        """Count the memory of tensors on the card, until their storages are freed."""
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
                storage = tensor.untyped_storage()
                key = storage._cdata
                size = -(-storage.nbytes() // BLOCK) * BLOCK
                if key not in self._storages:
                    weakref.finalize(storage, self._free, key)
                self.live += size - self._storages.get(key, 0)
                self._storages[key] = size
        self._reach(self.live)

    def _reach(self, size: int) -> None:
        """Note the bytes in use, for the peaks."""
        self.highest = max(self.highest, size)
        self.peaks[self.phase] = max(self.peaks[self.phase], size)

    def _free(self, key: int) -> None:
        """Count the memory of a storage as free."""
        self.live -= self._storages.pop(key, 0)

    # ----------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of torch on fakes, and count what a card would do for it."""
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
            return self._of_unknown_shape(func, args=args, kwargs=kwargs, tensors=tensors)
        return self._on_card(func, args=args, kwargs=kwargs, tensors=tensors, to_card=to_card)

    def _count_waits(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], to_card: bool
    ) -> None:
        """Count for which operations the host has to wait for the card."""
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
        """Run an operation on fakes, and count its launches, FLOPs and memory."""
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
        self._reach(self.live + kernel_bytes(func, args))
        return out

    def _as_fake(self, tensor: Tensor) -> Tensor:
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

    def _of_unknown_shape(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run an operation whose result's shape depends on values.

        A mask that nobody knows is true everywhere.
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
        if "dtype" in func._overloadname:  # `out_dtype`, which torch's formulas do not know
            args = args[: 3 if "addmm" in str(func) else 2]
            kwargs = {}
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        if func in _VARLEN_OPERATIONS:
            self.kernels["attention: flash, rows of different lengths"] += 1
            back = func is torch_attn._varlen_attn_backward.default
            flops = self._varlen_flops(args, back=back)
        elif "flash_attention" in str(func):
            back = "backward" in str(func)
            query, key = args[1:3] if back else args[:2]
            position = 10 if back else 4
            if kwargs.get("is_causal", args[position] if len(args) > position else False):
                # half of a square is not computed
                flops = int(flops * (1 - (query.size(-2) - 1) / (2 * key.size(-2))))
        self.flops[self.phase] += flops

    def _varlen_flops(self, args: Sequence[Tensor], *, back: bool) -> int:
        """Two products of each query with each key that it sees, and five on the way back.

        Torch's formula takes every row to be as long as the longest, and counts what causal masks
        hide.
        """
        query = args[1] if back else args[0]
        bounds = args[6:8] if back else args[3:5]
        lengths = [self._known(ends).diff().tolist() for ends in bounds]
        pairs = sum(
            queries * keys - queries * (queries - 1) // 2
            for queries, keys in zip(*lengths, strict=True)
        )
        return (5 if back else 2) * 2 * query.size(1) * query.size(2) * pairs

    def _known(self, tensor: Tensor) -> Tensor:
        """Return what the tensor holds, which the host has to know."""
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
    limit = FRACTIONS if tensor.dtype.is_floating_point else WHOLE
    return tensor.numel() <= limit


def _is_mask(index: Any) -> bool:
    """Return whether an index is a mask, which is as long as what it indexes."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _place(event: str) -> Place:
    """Return the place of an event from the lines that led to it."""
    frame: Any = sys._getframe(1)
    line = ours = ""
    while frame is not None and not ours:
        name = frame.f_code.co_filename
        if not name.startswith(HERE) and "/torch/" not in name and "<" not in name:
            short = f"{name.removeprefix(f'{_ROOT}/').split('site-packages/')[-1]}:{frame.f_lineno}"
            line = line or short
            if name.startswith((f"{_ROOT}/adora_vl/", f"{_ROOT}/benchmarks/")):
                ours = short
        frame = frame.f_back
    return Place(event, line or "?", ours)
