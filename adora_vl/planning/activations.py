"""The activations that one micro-batch holds from its forward to its backward pass, in bytes.

They are counted layer by layer, and in the LM head.
"""

from dataclasses import dataclass

from adora_vl.models.shape import ModelShape, Tower

FLOAT = 4  # bytes of a float32
# TOKEN_CHUNK_SIZE and _CHUNKED_LOGPROB_CHUNK_SIZE of TRL's LM head
TILE_TOKENS = 4096
TILE_VOCABULARY = 32768


@dataclass(frozen=True)
class Dtypes:
    """Bytes of a number.

    `compute` is that of matrix products (autocast), `stream` that of the residual stream and the
    weights.
    """

    compute: int
    stream: int


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: every sequence is as long as the longest, since they are padded."""

    sequences: int
    prompt_tokens: int  # with the image tokens
    completion_tokens: int
    image_tokens: int = 0  # per sequence
    unit: int = 1  # sequences of one problem, for which its image is looked at once
    # and which are one row, with their prompt once (`adora_vl.packing.shared_prompt`)
    packed: bool = False

    @property
    def rows(self) -> int:
        """The number of rows of the pass."""
        return self.sequences // self.unit if self.packed else self.sequences

    @property
    def length(self) -> int:
        """The number of tokens of a row."""
        if self.packed:
            return self.prompt_tokens + self.unit * (self.completion_tokens - 1)
        return self.prompt_tokens + self.completion_tokens

    @property
    def tokens(self) -> int:
        """The number of tokens of the pass."""
        return self.rows * self.length

    def patches(self, merge: int) -> int:
        """Return the number of patches of the distinct images.

        `merge`: the patches of one side of an image token.
        """
        return self.sequences // self.unit * self.image_tokens * merge**2


def _norms(width: int, dtypes: Dtypes) -> int:
    """Return two RMS norms, in bytes per token.

    Each keeps its input in float32, the normalised values, and what the next product reads.
    """
    return 2 * width * (FLOAT + dtypes.stream + dtypes.compute)


def _layer_norms(width: int, dtypes: Dtypes) -> int:
    """Return two layer norms, in bytes per token.

    Each keeps its input, mean and deviation, and what the next product reads.
    """
    return 2 * (width * (dtypes.stream + dtypes.compute) + 2 * FLOAT)


def _mlp(tower: Tower, dtypes: Dtypes) -> int:
    """Return an MLP, in bytes per token.

    SwiGLU keeps the gate, its activation, the up projection and their product; a plain MLP the
    input and the output of its GELU.
    """
    return (4 if tower.swiglu else 2) * tower.mlp_width * dtypes.compute


def text_layer(tower: Tower, batch: MicroBatch, dtypes: Dtypes, *, masked: bool) -> int:
    """Return what one decoder layer saves, in bytes.

    `masked`: SDPA with a padding mask. Then keys and values are repeated for every head (one head
    is a view), and each layer turns the boolean mask into numbers of its own, (B, 1, T, T).
    """
    queries = tower.heads * tower.head_size
    keys = queries if masked and tower.kv_heads > 1 else tower.kv_heads * tower.head_size
    # q, out, k, v, logsumexp
    attention = 2 * (queries + keys) * dtypes.compute + tower.heads * FLOAT
    # their input in float32 and the normalised one; the queries may be fewer than repeated keys
    if tower.head_norms:
        attention += (tower.heads + tower.kv_heads) * (
            tower.head_size * (FLOAT + dtypes.stream) + FLOAT
        )
    mask = batch.rows * batch.length**2 * dtypes.compute if masked else 0
    # each rollout of a shared prompt attends to keys and values of its own: the prompt's, repeated,
    # and its own
    repeated = (
        batch.sequences * (batch.prompt_tokens + batch.completion_tokens) if batch.packed else 0
    )
    joined = repeated * 2 * tower.kv_heads * tower.head_size * dtypes.compute
    return (
        batch.tokens * (_norms(tower.width, dtypes) + attention + _mlp(tower, dtypes))
        + mask
        + joined
    )


def mask_bytes(batch: MicroBatch, dtypes: Dtypes, *, accelerator: bool) -> int:
    """Return a padding mask in bytes, beside what the layers save of it.

    The boolean mask lasts as long as the pass. On a GPU there are also the numbers of the present
    layer once more, in rows of a multiple of 16 as the memory-efficient kernel wants them.
    """
    pairs = batch.rows * batch.length**2
    aligned = batch.rows * batch.length * (-(-batch.length // 16) * 16)
    return pairs + (aligned * dtypes.compute if accelerator else 0)


def vision_layer(tower: Tower, patches: int, dtypes: Dtypes) -> int:
    """Return what one block of the vision tower saves, in bytes.

    Attention keeps the fused q/k/v (v is a view into it), rotated q and k, the output of each
    window and all of them joined.
    """
    norms = _norms(tower.width, dtypes) if tower.swiglu else _layer_norms(tower.width, dtypes)
    return patches * (
        norms
        + (3 + 2 + 1 + 1) * tower.width * dtypes.compute
        + tower.heads * FLOAT
        + _mlp(tower, dtypes)
    )


def merger(tower: Tower, patches: int, dtypes: Dtypes, deepstack: int = 0) -> int:
    """Return what the projector saves, in bytes.

    It saves its norm over patches, and the inputs of two products and of the GELU between them. The
    mergers of deepstack features save the same, but for the input of their norm, which the next
    block keeps.
    """
    norm = (FLOAT if tower.swiglu else 0) + dtypes.stream
    return patches * tower.width * (norm + 3 * (1 + deepstack) * dtypes.compute)


@dataclass(frozen=True)
class Saved:
    """Bytes that stay from the forward to the backward pass.

    Beside them stands the most that one layer adds during its backward.
    """

    text: int
    vision: int
    recomputed: int  # one layer's own, where gradient checkpointing recomputes it; else 0
    layer_gradients: int  # of one layer's inner values, while they are alive


def saved(
    shape: ModelShape,
    batch: MicroBatch,
    dtypes: Dtypes,
    *,
    checkpointing: bool,
    masked: bool = True,
) -> Saved:
    """Return what is kept of one micro-batch.

    A frozen vision tower keeps nothing, unless gradient checkpointing is on.
    """
    text = shape.text
    eye = shape.vision
    # Adapters are in float32, and peft casts what they read; beside a layer in 4 bits it leaves
    # that to autocast
    casts = shape.adapters and dtypes.compute < FLOAT and not shape.four_bit
    # Each then keeps an input of its own. Two norms' outputs and SwiGLU's product are counted by
    # `text_layer` already.
    inputs = max(0, shape.adapted - 2 * text.width - text.mlp_width) if casts else 0
    one_text = (
        text_layer(text, batch=batch, dtypes=dtypes, masked=masked)
        + batch.tokens * inputs * dtypes.compute
    )
    stream = batch.tokens * text.width * dtypes.stream
    final_norm = batch.tokens * text.width * (FLOAT + dtypes.stream)
    text_bytes = text.layers * (stream if checkpointing else one_text) + final_norm
    # SwiGLU goes back with the gradients of its product, of one factor and of the residual stream,
    # after its product is released. An adapter that reads the product holds it beside a copy in
    # float32.
    gradients = batch.tokens * ((3 if casts else 2) * text.mlp_width + text.width) * dtypes.compute
    # base and adapter each have a gradient of the product, then there is the sum; or a whole weight
    if shape.four_bit:
        product = batch.tokens * text.mlp_width * dtypes.compute
        gradients = product + max(
            product, (batch.tokens + text.mlp_width) * text.width * dtypes.compute
        )
    vision_bytes, one_block = 0, 0
    patches = batch.patches(shape.merge)
    if eye is not None and patches:
        trained = shape.trainable["vision_tower"] > 0
        # Transformers makes the patch embeddings require a gradient where it checkpoints, frozen or
        # not
        reached = trained or checkpointing
        if reached:
            one_block = vision_layer(eye, patches, dtypes)
            vision_bytes = eye.layers * (
                patches * eye.width * dtypes.stream if checkpointing else one_block
            )
        if trained:  # the pixels themselves are an input; a copy in another dtype is not
            vision_bytes += (
                patches * shape.patch_values * (dtypes.compute if dtypes.compute != FLOAT else 0)
            )
        if shape.trainable["projector"]:
            vision_bytes += merger(eye, patches=patches, dtypes=dtypes, deepstack=shape.deepstack)
            if not reached:  # then no block keeps what the norms of the deepstack features read
                vision_bytes += shape.deepstack * patches * eye.width * dtypes.stream
        elif reached:  # the norm's input and the GELU's
            vision_bytes += patches * eye.width * (FLOAT + dtypes.compute)
    return Saved(
        text=text_bytes,
        vision=vision_bytes,
        recomputed=max(one_text, one_block) if checkpointing else 0,
        layer_gradients=gradients,
    )


def head_saved(shape: ModelShape, batch: MicroBatch, dtypes: Dtypes, *, compact: bool) -> int:
    """Return what TRL's fused LM head saves, in bytes.

    It is the hidden states of the tokens that it scores, never the logits.
    """
    return _scored(batch, compact) * (shape.text.width * dtypes.stream + 8 + 2 * FLOAT)


def head_transient(shape: ModelShape, batch: MicroBatch, dtypes: Dtypes, *, compact: bool) -> int:
    """Return the most that the LM head's backward pass holds on top, in bytes.

    It holds one tile of logits, the float32 gradients of hidden states and, where the head is
    trained, of its weight, with their copies in the model's dtype. `compact`: on a GPU only
    completion tokens are scored, and a kernel works in the tile itself; elsewhere all tokens are
    scored, and torch's own operations hold eight float32 values of the tile at once.
    """
    tokens = _scored(batch, compact)
    width = shape.text.width
    rows = min(tokens, TILE_TOKENS)
    tile = rows * TILE_VOCABULARY * dtypes.compute
    if not compact:
        tile += 8 * rows * min(shape.vocabulary, TILE_VOCABULARY) * FLOAT
    hidden = tokens * width * (FLOAT + (dtypes.stream if dtypes.stream != FLOAT else 0))
    weight = shape.vocabulary * width * (FLOAT + (dtypes.stream if dtypes.stream != FLOAT else 0))
    return tile + hidden + (weight if shape.head_is_trained else 0)


def _scored(batch: MicroBatch, compact: bool) -> int:
    return batch.sequences * batch.completion_tokens if compact else batch.rows * (batch.length - 1)
