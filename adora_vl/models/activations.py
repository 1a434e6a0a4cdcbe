"""The activations that one micro-batch holds from its forward to its backward pass, in bytes.

They are counted layer by layer, and in the LM head.
"""

from bisect import bisect_left
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
class PassSize:
    """The numbers of one forward pass that its memory depends on."""

    rows: int
    length: int  # tokens of a row, with its padding
    scored: int  # completion tokens
    # keys that the rollouts of shared prompts attend to: each has the prompt's, repeated, and its own
    repeated: int = 0
    patches: int = 0  # of the distinct images
    masked: bool = False  # attention with a padding mask (SDPA)

    @property
    def tokens(self) -> int:
        """The number of tokens of the pass."""
        return self.rows * self.length


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

    def patches(self, merge: int) -> int:
        """Return the number of patches of the distinct images.

        `merge`: the patches of one side of an image token.
        """
        return self.sequences // self.unit * self.image_tokens * merge**2

    def size(self, merge: int, *, masked: bool) -> PassSize:
        """Return the numbers that the memory of this pass depends on.

        `merge`: as in `patches`. `masked`: whether attention takes a padding mask where rows have
        padding, as SDPA does; shared prompts have none.
        """
        keys = self.sequences * (self.prompt_tokens + self.completion_tokens)
        return PassSize(
            rows=self.rows,
            length=self.length,
            scored=self.sequences * self.completion_tokens,
            repeated=keys if self.packed else 0,
            patches=self.patches(merge),
            masked=masked and not self.packed,
        )


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


def text_layer(tower: Tower, size: PassSize, dtypes: Dtypes) -> int:
    """Return what one decoder layer saves, in bytes.

    With a padding mask keys and values are repeated for every head (one head is a view), and each
    layer turns the boolean mask into numbers of its own, (B, 1, T, T).
    """
    queries = tower.heads * tower.head_size
    keys = queries if size.masked and tower.kv_heads > 1 else tower.kv_heads * tower.head_size
    # q, out, k, v, logsumexp
    attention = 2 * (queries + keys) * dtypes.compute + tower.heads * FLOAT
    # their input in float32 and the normalised one; the queries may be fewer than repeated keys
    if tower.head_norms:
        attention += (tower.heads + tower.kv_heads) * (
            tower.head_size * (FLOAT + dtypes.stream) + FLOAT
        )
    mask = size.rows * size.length**2 * dtypes.compute if size.masked else 0
    # keys and values of shared prompts, laid out once more for each rollout
    repeated_keys = size.repeated * 2 * tower.kv_heads * tower.head_size * dtypes.compute
    per_token = _norms(tower.width, dtypes) + attention + _mlp(tower, dtypes)
    return size.tokens * per_token + mask + repeated_keys


def mask_bytes(size: PassSize, dtypes: Dtypes, *, accelerator: bool) -> int:
    """Return a padding mask in bytes, beside what the layers save of it.

    The boolean mask lasts as long as the pass; without one the result is 0. On a GPU there are also
    the numbers of the present layer once more, in rows of a multiple of 16 as the memory-efficient
    kernel wants them.
    """
    if not size.masked:
        return 0
    pairs = size.rows * size.length**2
    if not accelerator:
        return pairs
    aligned_length = -(-size.length // 16) * 16  # rounded up
    aligned_pairs = size.rows * size.length * aligned_length
    return pairs + aligned_pairs * dtypes.compute


def vision_layer(tower: Tower, patches: int, dtypes: Dtypes) -> int:
    """Return what one block of the vision tower saves, in bytes.

    Attention keeps the fused q/k/v (v is a view into it), rotated q and k, the output of each
    window and all of them joined.
    """
    norms = _norms(tower.width, dtypes) if tower.swiglu else _layer_norms(tower.width, dtypes)
    # q/k/v, rotated q and k, the windows' outputs and these joined; logsumexp
    attention = (3 + 2 + 1 + 1) * tower.width * dtypes.compute + tower.heads * FLOAT
    return patches * (norms + attention + _mlp(tower, dtypes))


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
    streams: int  # of `text`: the inputs of the layers that are recomputed
    layer: int  # one layer's own, where the backward pass recomputes it; else 0
    block: int  # one block's own of the vision tower, likewise
    layer_gradients: int  # of one layer's inner values, while they are alive

    @property
    def recomputed(self) -> int:
        """The most that one layer or block has of its own, where it is recomputed."""
        return max(self.layer, self.block)


def saved(
    shape: ModelShape,
    size: PassSize,
    dtypes: Dtypes,
    *,
    checkpointing: bool,
    recomputed: int | None = None,
) -> Saved:
    """Return what is kept of one micro-batch.

    A frozen vision tower keeps nothing, unless gradient checkpointing is on. `recomputed`: the
    number of layers of the language model that gradient checkpointing recomputes; None: all.
    """
    text = shape.text
    layers = text.layers if recomputed is None else recomputed
    if not checkpointing:
        layers = 0
    # Adapters are in float32, and peft casts what they read; beside a layer in 4 bits it leaves
    # that to autocast
    casts = shape.adapters and dtypes.compute < FLOAT and not shape.four_bit
    # Each then keeps an input of its own. Two norms' outputs and SwiGLU's product are counted by
    # `text_layer` already.
    adapter_inputs = 0
    if casts:
        adapter_inputs = max(0, shape.adapted - 2 * text.width - text.mlp_width)
    layer = text_layer(text, size, dtypes) + size.tokens * adapter_inputs * dtypes.compute
    streams = layers * size.tokens * text.width * dtypes.stream
    final_norm = size.tokens * text.width * (FLOAT + dtypes.stream)
    # SwiGLU goes back with the gradients of its product, of one factor and of the residual stream,
    # after its product is released. An adapter that reads the product holds it beside a copy in
    # float32.
    products = 3 if casts else 2
    gradients = size.tokens * (products * text.mlp_width + text.width) * dtypes.compute
    # base and adapter each have a gradient of the product, then there is the sum; or a whole weight
    if shape.four_bit:
        product = size.tokens * text.mlp_width * dtypes.compute
        whole_weight = (size.tokens + text.mlp_width) * text.width * dtypes.compute
        gradients = product + max(product, whole_weight)
    vision, block = _vision_saved(shape, size.patches, dtypes, checkpointing=checkpointing)
    return Saved(
        text=streams + (text.layers - layers) * layer + final_norm,
        vision=vision,
        streams=streams,
        layer=layer if layers else 0,
        block=block if checkpointing else 0,
        layer_gradients=gradients,
    )


def _vision_saved(
    shape: ModelShape, patches: int, dtypes: Dtypes, *, checkpointing: bool
) -> tuple[int, int]:
    """Return what the vision tower and the projector keep, and what one block does, in bytes."""
    tower = shape.vision
    if tower is None or not patches:
        return 0, 0
    kept = 0
    block = 0
    is_trained = shape.trainable["vision_tower"] > 0
    # Transformers makes the patch embeddings require a gradient where it checkpoints, frozen or
    # not
    has_backward = is_trained or checkpointing
    if has_backward:
        block = vision_layer(tower, patches, dtypes)
        residual_stream = patches * tower.width * dtypes.stream
        kept = tower.layers * (residual_stream if checkpointing else block)
    # the pixels themselves are an input; a copy in another dtype is not
    if is_trained and dtypes.compute != FLOAT:
        kept += patches * shape.patch_values * dtypes.compute
    if shape.trainable["projector"]:
        kept += merger(tower, patches=patches, dtypes=dtypes, deepstack=shape.deepstack)
        if not has_backward:  # then no block keeps what the norms of the deepstack features read
            kept += shape.deepstack * patches * tower.width * dtypes.stream
    elif has_backward:  # the norm's input and the GELU's
        kept += patches * tower.width * (FLOAT + dtypes.compute)
    return kept, block


def head_saved(shape: ModelShape, size: PassSize, dtypes: Dtypes, *, compact: bool) -> int:
    """Return what TRL's fused LM head saves, in bytes.

    It is the hidden states of the tokens that it scores, never the logits.
    """
    return _scored_tokens(size, compact) * (shape.text.width * dtypes.stream + 8 + 2 * FLOAT)


def head_transient(shape: ModelShape, size: PassSize, dtypes: Dtypes, *, compact: bool) -> int:
    """Return the most that the LM head's backward pass holds on top, in bytes.

    It holds one tile of logits, the float32 gradients of hidden states and, where the head is
    trained, of its weight, with their copies in the model's dtype. `compact`: on a GPU only
    completion tokens are scored, and a kernel works in the tile itself; elsewhere all tokens are
    scored, and torch's own operations hold eight float32 values of the tile at once.
    """
    tokens = _scored_tokens(size, compact)
    width = shape.text.width
    rows = min(tokens, TILE_TOKENS)
    tile = rows * TILE_VOCABULARY * dtypes.compute
    if not compact:
        tile += 8 * rows * min(shape.vocabulary, TILE_VOCABULARY) * FLOAT
    copy_bytes = dtypes.stream if dtypes.stream != FLOAT else 0  # float32 needs no copy
    hidden = tokens * width * (FLOAT + copy_bytes)
    weight = shape.vocabulary * width * (FLOAT + copy_bytes) if shape.head_is_trained else 0
    return tile + hidden + weight


def _scored_tokens(size: PassSize, compact: bool) -> int:
    """Return how many tokens the LM head scores: completion tokens, or all where not `compact`."""
    return size.scored if compact else size.rows * (size.length - 1)


# of the card: what choosing the recomputed layers leaves free, since the allocator loses some of it
# between its blocks, and a prediction is a few per cent off
KEPT_FREE = 0.1


def room_on(card: int, free: int) -> int:
    """Return the bytes of a pass on a card that has so many free, less what is left free."""
    return free - int(KEPT_FREE * card)


@dataclass(frozen=True)
class Moment:
    """A candidate for the peak of a forward and backward pass, in bytes."""

    name: str
    transient: int  # of what is at work
    text: int  # what the language model and its head keep until then
    # share of the language model's layers that have gone back, so that their gradients are there
    back: float = 0.0


LAYER_BACK = "one layer going back"


@dataclass(frozen=True)
class Learner:
    """A model as it learns: what the memory of its pass depends on, besides the pass's size."""

    shape: ModelShape
    dtypes: Dtypes
    checkpointing: bool = True
    # whether a frozen vision tower sees each image before, so that a pass reads features alone
    features: bool = False
    accelerator: bool = True  # a GPU: its kernels

    @property
    def head_gradient(self) -> int:
        """Bytes of the gradient of the head's weight, where that is trained."""
        shape = self.shape
        if not shape.head_is_trained:
            return 0
        return shape.vocabulary * shape.text.width * shape.weight_bytes

    @property
    def tied_head_gradient(self) -> int:
        """Bytes of the gradient of a weight that head and embedding share.

        What the head adds to it waits for the embedding's part, at the end; there both and their
        sum are held.
        """
        return self.head_gradient if self.shape.tied else 0

    def moments(self, size: PassSize, recomputed: int) -> list[Moment]:
        """Return the moments of which one is the peak; gradients of weights are not in them.

        `recomputed`: the first so many layers of the language model are recomputed. They go back
        last, when the others have released what they kept. So where some are not recomputed, a
        layer that is stands beside the inputs of the recomputed ones alone.
        """
        layers = self.shape.text.layers
        kept = self._saved(size, recomputed)
        head_kept = head_saved(self.shape, size, self.dtypes, compact=self.accelerator)
        head = head_transient(self.shape, size, self.dtypes, compact=self.accelerator)
        text = kept.text + head_kept
        tied_head = self.tied_head_gradient
        gradients = kept.layer_gradients + tied_head
        moments = [Moment("logits", head, text)]
        if recomputed == layers:
            one_layer = kept.recomputed + gradients
            moments.append(Moment(LAYER_BACK, max(one_layer, 3 * tied_head), text))
            return moments
        moments.append(Moment(LAYER_BACK, gradients, text))
        if recomputed:
            back_share = (layers - recomputed) / layers
            recomputed_layer = kept.layer + gradients
            moments.append(Moment(LAYER_BACK, recomputed_layer, kept.streams, back_share))
        moments.append(Moment(LAYER_BACK, kept.block + gradients, 0, 1.0))
        moments.append(Moment(LAYER_BACK, 3 * tied_head, 0, 1.0))
        return moments

    def mask_and_vision(self, size: PassSize, recomputed: int) -> tuple[int, int]:
        """Return the bytes of the attention mask and of the vision tower, held all the time."""
        mask = mask_bytes(size, self.dtypes, accelerator=self.accelerator)
        vision = 0 if self.features else self._saved(size, recomputed).vision
        return mask, vision

    def needed(self, size: PassSize, recomputed: int) -> int:
        """Return the most bytes that a pass takes beside weights and gradients."""
        mask, vision = self.mask_and_vision(size, recomputed)
        peak = max(moment.transient + moment.text for moment in self.moments(size, recomputed))
        return peak + mask + vision

    def fewest(self, size: PassSize, room: int) -> int:
        """Return the fewest layers to recompute with which a pass takes at most `room` bytes.

        They are all layers where no number is few enough.
        """
        layers = self.shape.text.layers
        # Each layer more takes less, but for the very last, which goes back first: its own values
        # are there either way.
        return bisect_left(
            range(layers), True, key=lambda number: self.needed(size, number) <= room
        )

    def _saved(self, size: PassSize, recomputed: int) -> Saved:
        """Return what a pass of this size keeps with so many recomputed layers."""
        return saved(
            self.shape,
            size,
            self.dtypes,
            checkpointing=self.checkpointing,
            recomputed=recomputed,
        )
