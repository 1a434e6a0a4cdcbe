"""TRL's fused LM head (Triton on a GPU, torch's operations on a CPU) over the whole vocabulary.

Its bfloat16 log-probabilities and gradients against float32, beside those of a plain bfloat16 head;
its peak memory against the formula that the dry run uses.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as TILE

from adora_vl.models.activations import DtypeBytes, PassSize, head_transient_bytes
from adora_vl.models.shape import model_shape
from adora_vl.utils.files import GIB
from benchmarks.gpu.setting import (
    JUDGED_ON_GPU_ONLY,
    Setting,
    free_bytes,
    random_token_ids,
    relative_distance,
)
from benchmarks.gpu.table import CheckLine, at_most_line, skipped_line
from benchmarks.measure import median_seconds_by_turns, peak_bytes

VOCABULARY = 151_936  # of all Qwen2.5-VL
ERROR_SLACK = 1.5  # of errors of two heads that sum in another order
_TOKENS_TIMED = 8192
_CHUNK_TOKENS = 512  # tokens of the float32 reference at a time
# Bytes of a plain head: of each logit in both dtypes with its softmax and their gradients, and of
# each weight with the gradients of the three heads
_BYTES_PER_LOGIT = 18
_BYTES_PER_WEIGHT = 16
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def run(setting: Setting) -> Iterator[CheckLine]:
    """Compare the fused head's results with float32, and its peak of memory with the formula.

    A plain head in bfloat16 has rounding errors as well, and the fused one may have 1.5 times as
    much. Lines of seconds follow.
    """
    config = setting.config("3B", layers=1)
    # More than one tile of the fused head.
    config.text_config.vocab_size = vocabulary = VOCABULARY if setting.full else 40_000
    width = config.text_config.hidden_size
    tokens = count_fitting_tokens(free_bytes(setting), vocabulary, width) if setting.full else 32
    if not tokens:
        yield skipped_line(
            "all of it",
            f"a plain head over {_CHUNK_TOKENS} tokens does not fit into what is free here",
        )
        return
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, device=setting.device)
    weight = 0.02 * torch.randn(vocabulary, width, dtype=torch.bfloat16, device=setting.device)
    targets = random_token_ids(setting, rows=1, length=tokens, vocabulary=vocabulary)[0]
    exact = _logps_and_gradients(_chunked_head, hidden.float(), weight.float(), targets)
    fused_results = _logps_and_gradients(fused_head, hidden, weight, targets)
    plain_results = _logps_and_gradients(_plain_head, hidden, weight, targets)
    for number, tensor_name in enumerate(
        ("log-probabilities", "gradient of the hidden states", "gradient of the weight")
    ):
        error = relative_distance(fused_results[number], exact[number])
        plain_error = relative_distance(plain_results[number], exact[number])
        yield at_most_line(
            f"{tensor_name}, from float32",
            value=error,
            bound=ERROR_SLACK * plain_error,
            unit="",
            source=f"{ERROR_SLACK} times a plain bfloat16 head's error",
        )
    del exact, fused_results, plain_results

    shape = model_shape(config)
    # a CPU's bfloat16 products take copies of their own
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    inputs = hidden.to(dtype), weight.to(dtype), targets
    # elsewhere all but the last position are scored
    size = PassSize(rows=1, row_length=tokens + 1, scored_tokens=tokens)
    predicted = head_transient_bytes(
        shape, size=size, dtypes=DtypeBytes(dtype.itemsize, dtype.itemsize), on_gpu=setting.on_gpu
    )
    peak = peak_bytes(setting.device, lambda: _logps_and_gradients(fused_head, *inputs))
    yield at_most_line(
        "peak memory",
        value=peak / GIB,
        bound=1.1 * predicted / GIB,
        unit="GiB",
        source="a tenth over adora_vl.models.activations' formula",
    )
    yield from _speed(setting, hidden=hidden, weight=weight, targets=targets)


def count_fitting_tokens(free: int, vocabulary: int, width: int) -> int:
    """Return over how many tokens a plain head fits into `free` bytes, with a tenth to spare.

    A plain head needs bytes for each weight, and for each token those of all its logits. These are
    whole chunks, since the reference is computed by chunks; 0 if not even one fits.
    """
    room = 0.9 * free - _BYTES_PER_WEIGHT * vocabulary * width
    return max(
        0,
        min(
            _TOKENS_TIMED,
            int(room / (_BYTES_PER_LOGIT * vocabulary)) // _CHUNK_TOKENS * _CHUNK_TOKENS,
        ),
    )


def _speed(
    setting: Setting, hidden: Tensor, weight: Tensor, targets: Tensor
) -> Iterator[CheckLine]:
    """Time the fused head and a plain one, by turns."""
    ways = {
        name: lambda head=head: _logps_and_gradients(head, hidden, weight, targets)
        for name, head in HEAD_BY_NAME.items()
    }
    times = median_seconds_by_turns(setting.device, ways, 3 if setting.full else 1)
    figure = ", ".join(f"{name} {spent:.3g} s" for name, spent in times.items())
    if setting.on_gpu:
        yield at_most_line(
            "fused head, of a plain one's time",
            value=times["fused"] / times["plain"],
            bound=2,
            unit="",
            source=f"ours; {figure}",
        )
    else:
        yield skipped_line("fused head and a plain one", JUDGED_ON_GPU_ONLY, figure)


def fused_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities of TRL's fused head, called as its `add_fused_lm_head` does."""
    logps: Tensor = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, TILE, None, 1.0, ("log_probs",)
    )[0]
    return logps


def _plain_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities from all logits at once.

    The logits are in the weights' dtype, and their softmax in float32.
    """
    return -torch.nn.functional.cross_entropy(
        (hidden @ weight.T).float(), targets, reduction="none"
    )


def _chunked_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the same as `_plain_head`, in chunks whose float32 logits fit into memory."""
    from torch.utils.checkpoint import checkpoint

    parts = zip(hidden.split(_CHUNK_TOKENS), targets.split(_CHUNK_TOKENS), strict=True)
    return torch.cat(
        [checkpoint(_plain_head, part, weight, words, use_reentrant=False) for part, words in parts]
    )


HEAD_BY_NAME: dict[str, Head] = {"fused": fused_head, "plain": _plain_head}


def _logps_and_gradients(
    head: Head, hidden: Tensor, weight: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of a head, and both gradients of their sum.

    Each token has another weight, as advantages give them.
    """
    inputs = [tensor.detach().requires_grad_() for tensor in (hidden, weight)]
    hidden_leaf, weight_leaf = inputs
    logps = head(hidden_leaf, weight_leaf, targets)
    token_weights = torch.linspace(-1, 1, len(targets), device=logps.device)
    hidden_gradient, weight_gradient = torch.autograd.grad((logps * token_weights).sum(), inputs)
    return logps.detach(), hidden_gradient, weight_gradient
