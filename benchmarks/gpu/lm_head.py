"""TRL's fused LM head (Triton on a GPU, torch's operations on a CPU) over the whole vocabulary.

Its bfloat16 log-probabilities and gradients against float32, beside those of a plain bfloat16 head;
its peak memory against the formula that the dry run uses.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as TILE

from adora_vl.models.activations import Dtypes, PassSize, head_transient
from adora_vl.models.shape import describe
from adora_vl.utils.files import GIB
from benchmarks.gpu.setting import ON_A_GPU_ONLY, Setting, apart, free_bytes, words
from benchmarks.gpu.table import Line, at_most, skipped
from benchmarks.measure import by_turns, peak_bytes

VOCABULARY = 151_936  # of all Qwen2.5-VL
SLACK = 1.5
_TOKENS = 8192
_CHUNK = 512  # tokens of the float32 reference at a time
# Bytes of a plain head: of each logit in both dtypes with its softmax and their gradients, and of
# each weight with the gradients of the three heads
_PER_LOGIT = 18
_PER_WEIGHT = 16
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def run(setting: Setting) -> Iterator[Line]:
    config = setting.config("3B", layers=1)
    # more than one tile
    config.text_config.vocab_size = vocabulary = VOCABULARY if setting.full else 40_000
    width = config.text_config.hidden_size
    tokens = tokens_that_fit(free_bytes(setting), vocabulary, width) if setting.full else 32
    if not tokens:
        yield skipped(
            "all of it", f"a plain head over {_CHUNK} tokens does not fit into what is free here"
        )
        return
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, device=setting.device)
    weight = 0.02 * torch.randn(vocabulary, width, dtype=torch.bfloat16, device=setting.device)
    targets = words(setting, rows=1, length=tokens, vocabulary=vocabulary)[0]
    right = _passed(_in_chunks, hidden.float(), weight.float(), targets)
    ours, control = (_passed(head, hidden, weight, targets) for head in (fused, _plain))
    for number, tensor_name in enumerate(
        ("log-probabilities", "gradient of the hidden states", "gradient of the weight")
    ):
        found, noise = (apart(way[number], right[number]) for way in (ours, control))
        yield at_most(
            f"{tensor_name}, from float32",
            value=found,
            bound=SLACK * noise,
            unit="",
            source=f"{SLACK} times a plain bfloat16 head's error",
        )
    del right, ours, control

    shape = describe(config)
    # a CPU's bfloat16 products take copies of their own
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    inputs = hidden.to(dtype), weight.to(dtype), targets
    # elsewhere all but the last position are scored
    size = PassSize(rows=1, length=tokens + 1, scored=tokens)
    predicted = head_transient(
        shape, size=size, dtypes=Dtypes(dtype.itemsize, dtype.itemsize), compact=setting.on_gpu
    )
    peak = peak_bytes(setting.device, lambda: _passed(fused, *inputs))
    yield at_most(
        "peak memory",
        value=peak / GIB,
        bound=1.1 * predicted / GIB,
        unit="GiB",
        source="a tenth over adora_vl.models.activations' formula",
    )
    yield from _speed(setting, hidden=hidden, weight=weight, targets=targets)


def tokens_that_fit(free: int, vocabulary: int, width: int) -> int:
    """Tokens over which a plain head fits into `free` bytes with a tenth to spare: whole chunks, 0
    if not even one.
    """
    room = 0.9 * free - _PER_WEIGHT * vocabulary * width
    return max(0, min(_TOKENS, int(room / (_PER_LOGIT * vocabulary)) // _CHUNK * _CHUNK))


def _speed(setting: Setting, hidden: Tensor, weight: Tensor, targets: Tensor) -> Iterator[Line]:
    ways = {
        name: lambda head=head: _passed(head, hidden, weight, targets)
        for name, head in HEADS.items()
    }
    times = by_turns(setting.device, ways, 3 if setting.full else 1)
    figure = ", ".join(f"{name} {spent:.3g} s" for name, spent in times.items())
    if setting.on_gpu:
        yield at_most(
            "fused head, of a plain one's time",
            value=times["fused"] / times["plain"],
            bound=2,
            unit="",
            source=f"ours; {figure}",
        )
    else:
        yield skipped("fused head and a plain one", ON_A_GPU_ONLY, figure)


def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """TRL's fused head, with the arguments of its `add_fused_lm_head`."""
    logps: Tensor = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, TILE, None, 1.0, ("log_probs",)
    )[0]
    return logps


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits at once in the weights' dtype, and their softmax in float32."""
    return -torch.nn.functional.cross_entropy(
        (hidden @ weight.T).float(), targets, reduction="none"
    )


def _in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`_plain`, in chunks whose float32 logits fit into memory."""
    from torch.utils.checkpoint import checkpoint

    parts = zip(hidden.split(_CHUNK), targets.split(_CHUNK), strict=True)
    return torch.cat(
        [checkpoint(_plain, part, weight, words, use_reentrant=False) for part, words in parts]
    )


HEADS: dict[str, Head] = {"fused": fused, "plain": _plain}


def _passed(
    head: Head, hidden: Tensor, weight: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and both gradients of their sum, each token weighted differently as
    advantages do.
    """
    inputs = [tensor.detach().requires_grad_() for tensor in (hidden, weight)]
    own, weights_of_head = inputs
    logps = head(own, weights_of_head, targets)
    weights = torch.linspace(-1, 1, len(targets), device=logps.device)
    hidden_gradient, weight_gradient = torch.autograd.grad((logps * weights).sum(), inputs)
    return logps.detach(), hidden_gradient, weight_gradient
