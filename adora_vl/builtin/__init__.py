"""What `tiny`, `tiny_perimeter`, `tiny_text`, `tiny_zoom`, `synthetic` and `knights` stand for, and
how the tiny models are made.
"""

from dataclasses import dataclass

from adora_vl.utils.errors import UserError

DEFAULT_FAMILY = "qwen2_5_vl"
TINY_FAMILIES = (DEFAULT_FAMILY, "qwen3_vl", "qwen3_5")


@dataclass(frozen=True)
class WarmStart:
    """The numbers of the training that the tiny model starts from."""

    steps: int = 1800
    # the first steps, with a short prompt, by which the vision tower learns several times faster
    short_prompt_steps: int = 800
    batch_size: int = 64
    learning_rate: float = 1.5e-3
    rows: int = 8000
    seed: int = 1


HEAD_SIZE = 32
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The width, depth and dtype of a small model; the defaults are those of the shipped ones.

    Raises `UserError` for what is no such size.
    """

    width: int = 96  # of the language model and of the vision tower, a multiple of `HEAD_SIZE`
    layers: int = 3  # of each of the two
    # Of the saved weights. Training keeps float32 weights and, for `bfloat16`, computes in it.
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse what no model can have."""
        if self.width < HEAD_SIZE or self.width % HEAD_SIZE:
            raise UserError(
                f"width: {self.width} is no multiple of {HEAD_SIZE}, the size of an attention "
                f"head; give one, such as 96 or 512"
            )
        if self.layers < 1:
            raise UserError(f"layers: {self.layers} is no depth; give 1 or more")
        if self.dtype not in DTYPES:
            raise UserError(f"dtype: {self.dtype!r} is not {' or '.join(DTYPES)}; give one of them")

    @property
    def heads(self) -> int:
        """The number of attention heads."""
        return self.width // HEAD_SIZE


SHIPPED_SIZE = ModelSize()
