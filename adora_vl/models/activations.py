"""The activations that one micro-batch holds from its forward to its backward pass, in bytes.

They are counted layer by layer, and in the LM head.
"""

from dataclasses import dataclass
from typing import NamedTuple

from adora_vl.models.shape import ModelShape, Tower

FLOAT32_BYTES = 4  # bytes of a float32
# TOKEN_CHUNK_SIZE and _CHUNKED_LOGPROB_CHUNK_SIZE of TRL's LM head
HEAD_TILE_TOKENS = 4096
HEAD_TILE_VOCABULARY = 32768


@dataclass(frozen=True)
class DtypeBytes:
    """Bytes of a number in each of the two dtypes of a forward pass."""

    compute_bytes: int  # of matrix products, which is autocast's dtype
    residual_bytes: int  # of the residual stream and the weights
    is_mixed: bool = True  # whether autocast or DeepSpeed chooses the dtype of products


@dataclass(frozen=True)
class PassSize:
    """The size of one forward pass, from which its activation memory is computed."""

    rows: int
    row_length: int  # tokens of a row, with its padding
    scored_tokens: int  # completion tokens whose log-probabilities the LM head computes
    # keys that attention reads in a packed pass: every rollout has a copy of its prompt's keys
    repeated_keys: int = 0
    image_patches: int = 0  # patches of the images that pass the vision tower
    has_padding_mask: bool = False  # attention with a padding mask (SDPA)

    @property
    def tokens(self) -> int:
        """The number of tokens of the pass."""
        return self.rows * self.row_length

    @property
    def is_packed(self) -> bool:
        """Whether the pass is packed, with the prompt of several rollouts once."""
        return self.repeated_keys > 0


def _rms_norm_bytes(width: int, dtypes: DtypeBytes, *, frozen: bool = False) -> int:
    """Return what the two RMS norms of a layer save for the backward pass, in bytes per token.

    Each saves its input in float32, the input of the next product, and the normalised values. These
    are saved for the gradient of the norm's weights, so a frozen norm does not save them.
    """
    normalised_bytes = 0 if frozen else dtypes.residual_bytes
    return 2 * width * (FLOAT32_BYTES + normalised_bytes + dtypes.compute_bytes)


def _layer_norm_bytes(width: int, dtypes: DtypeBytes) -> int:
    """Return what the two layer norms of a block save for the backward pass, in bytes per token.

    Each saves its input, its mean and deviation, and the input of the next product.
    """
    return 2 * (width * (dtypes.residual_bytes + dtypes.compute_bytes) + 2 * FLOAT32_BYTES)


def _mlp_bytes(tower: Tower, dtypes: DtypeBytes) -> int:
    """Return what the MLP of a layer saves for the backward pass, in bytes per token.

    SwiGLU saves the gate, its activation, the up projection and their product. A plain MLP saves
    the input and the output of its GELU. All are in the dtype of matrix products, `compute_bytes`.
    """
    saved_tensors = 4 if tower.has_swiglu else 2
    return saved_tensors * tower.mlp_width * dtypes.compute_bytes


def decoder_layer_bytes(
    tower: Tower, size: PassSize, dtypes: DtypeBytes, *, frozen_norms: bool = False
) -> int:
    """Return what one decoder layer saves for the backward pass, in bytes.

    Args:
        tower: the sizes of the language model's layers.
        size: of the pass.
        dtypes: bytes of its numbers.
        frozen_norms: whether the weights of the layer's norms are not trained.
    """
    query_width = tower.heads * tower.head_size
    key_width = tower.kv_heads * tower.head_size
    # SDPA with a mask repeats keys and values for every head; a single one is expanded as a view.
    if size.has_padding_mask and tower.kv_heads > 1:
        key_width = query_width
    # queries and outputs, keys and values; logsumexp in float32
    attention_bytes = (
        2 * (query_width + key_width) * dtypes.compute_bytes + tower.heads * FLOAT32_BYTES
    )
    if tower.has_head_norms:
        # For each head of queries and keys: the input in float32, the normalised values and their
        # deviation. These are computed before keys are repeated, so they count `kv_heads`.
        normalised_bytes = 0 if frozen_norms else dtypes.residual_bytes
        bytes_per_head = tower.head_size * (FLOAT32_BYTES + normalised_bytes) + FLOAT32_BYTES
        attention_bytes += (tower.heads + tower.kv_heads) * bytes_per_head
    # Each layer converts the boolean mask into numbers of its own, (B, 1, T, T).
    layer_mask_bytes = 0
    if size.has_padding_mask:
        layer_mask_bytes = size.rows * size.row_length**2 * dtypes.compute_bytes
    # Keys and values of a shared prompt are copied for each of its rollouts.
    bytes_per_key_and_value = 2 * tower.kv_heads * tower.head_size * dtypes.compute_bytes
    repeated_key_bytes = size.repeated_keys * bytes_per_key_and_value
    norm_bytes = _rms_norm_bytes(tower.width, dtypes, frozen=frozen_norms)
    bytes_per_token = norm_bytes + attention_bytes + _mlp_bytes(tower, dtypes)
    return size.tokens * bytes_per_token + layer_mask_bytes + repeated_key_bytes


def mask_bytes(size: PassSize, dtypes: DtypeBytes, *, on_gpu: bool) -> int:
    """Return the bytes of a padding mask that no layer saves; 0 for a pass without a mask.

    The boolean mask, (B, 1, T, T) for B rows of T tokens, is held during the whole pass. On a GPU
    the present layer also has a copy of it as numbers. The memory-efficient kernel needs the rows
    of this copy padded to a multiple of 16: rows of 100 become rows of 112.
    """
    if not size.has_padding_mask:
        return 0
    pairs = size.rows * size.row_length**2
    if not on_gpu:
        return pairs
    aligned_length = -(-size.row_length // 16) * 16  # rounded up
    aligned_pairs = size.rows * size.row_length * aligned_length
    return pairs + aligned_pairs * dtypes.compute_bytes


def vision_block_bytes(tower: Tower, patches: int, dtypes: DtypeBytes) -> int:
    """Return what one block of the vision tower saves for the backward pass, in bytes."""
    # The families whose MLP is SwiGLU have RMS norms, the others layer norms.
    count_norm_bytes = _rms_norm_bytes if tower.has_swiglu else _layer_norm_bytes
    norm_bytes = count_norm_bytes(tower.width, dtypes)
    # In widths of the tower: the fused q, k and v; rotated q and k; the windows' outputs, and these
    # joined. The v of attention is a view into the fused tensor.
    saved_widths = 3 + 2 + 1 + 1
    logsumexp_bytes = tower.heads * FLOAT32_BYTES
    attention_bytes = saved_widths * tower.width * dtypes.compute_bytes + logsumexp_bytes
    return patches * (norm_bytes + attention_bytes + _mlp_bytes(tower, dtypes))


def projector_bytes(
    tower: Tower, patches: int, dtypes: DtypeBytes, deepstack_layers: int = 0
) -> int:
    """Return what a trained projector saves for the backward pass, in bytes.

    It saves the input of its norm over patches, and the inputs of two products and of the GELU
    between them. The projector of each of the `deepstack_layers` saves the same three inputs; the
    input of its norm is counted with the vision block that reads it too.
    """
    norm_bytes = dtypes.residual_bytes
    if tower.has_swiglu:
        norm_bytes += FLOAT32_BYTES  # an RMS norm also saves its input in float32
    projector_count = 1 + deepstack_layers
    # Three inputs of each projector: of its two products, and of the GELU between them.
    return patches * tower.width * (norm_bytes + 3 * projector_count * dtypes.compute_bytes)


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that a micro-batch saves from the forward to the backward pass.

    Gradient checkpointing saves only a layer's input and recomputes its other values ("inner
    values") in the backward pass, one layer at a time.
    """

    text_bytes: int  # the language model, without its head
    vision_bytes: int  # the vision tower and the projector
    layer_input_bytes: int  # part of `text_bytes`: the inputs of the recomputed layers
    recomputed_layer_bytes: int  # inner values of one recomputed layer; 0 if none is recomputed
    recomputed_block_bytes: int  # inner values of one recomputed block of the vision tower, or 0
    layer_gradient_bytes: int  # gradients of one layer's inner values during its backward pass

    @property
    def largest_recomputed_bytes(self) -> int:
        """The inner values of the largest recomputed layer or block; 0 if none is recomputed."""
        return max(self.recomputed_layer_bytes, self.recomputed_block_bytes)


def saved_bytes(
    shape: ModelShape,
    size: PassSize,
    dtypes: DtypeBytes,
    *,
    checkpointing: bool,
    recomputed_count: int | None = None,
) -> SavedBytes:
    """Return what one micro-batch saves for its backward pass.

    Args:
        shape: the sizes of the model, and which parameters are trained.
        size: of the pass.
        dtypes: bytes of its numbers.
        checkpointing: whether gradient checkpointing is on.
        recomputed_count: the number of layers of the language model that gradient checkpointing
            recomputes; None for all.
    """
    text = shape.text
    if not checkpointing:
        recomputed_count = 0
    elif recomputed_count is None:
        recomputed_count = text.layers
    # whether each adapter saves a copy of its input
    casts_inputs = _adapters_cast_inputs(shape, dtypes)
    frozen_norms = shape.has_adapters
    layer_bytes = decoder_layer_bytes(text, size, dtypes, frozen_norms=frozen_norms)
    normalised_bytes = 0 if frozen_norms else dtypes.residual_bytes
    final_norm_bytes = size.tokens * text.width * (FLOAT32_BYTES + normalised_bytes)
    if casts_inputs:
        # `decoder_layer_bytes` counts three of these inputs already: the outputs of two norms, and
        # SwiGLU's product.
        counted_inputs = 2 * text.width + text.mlp_width
        further_inputs = max(0, shape.adapter_inputs_per_token - counted_inputs)
        layer_bytes += size.tokens * further_inputs * dtypes.compute_bytes
    input_bytes = recomputed_count * size.tokens * text.width * dtypes.residual_bytes
    whole_layer_bytes = (text.layers - recomputed_count) * layer_bytes
    vision = _vision_saved_bytes(shape, size.image_patches, dtypes, checkpointing=checkpointing)
    return SavedBytes(
        text_bytes=input_bytes + whole_layer_bytes + final_norm_bytes,
        vision_bytes=vision.saved_bytes,
        layer_input_bytes=input_bytes,
        recomputed_layer_bytes=layer_bytes if recomputed_count else 0,
        recomputed_block_bytes=vision.block_bytes if checkpointing else 0,
        layer_gradient_bytes=_layer_gradient_bytes(shape, size, dtypes, casts_inputs=casts_inputs),
    )


def _adapters_cast_inputs(shape: ModelShape, dtypes: DtypeBytes) -> bool:
    """Return whether each adapter saves its own copy of its layer's input, cast to another dtype.

    Adapters are in float32. Autocast multiplies them in 16 bits, and inputs that have 16 bits
    already stay as they are (`adora_vl.models.lora_branch`), so adapters with the same input share
    one tensor. A residual stream in float32 is cast for each of them, and without autocast PEFT
    casts each input to float32, except over a base in 4 bits.
    """
    computes_in_16_bits = dtypes.compute_bytes < FLOAT32_BYTES
    shares_inputs = dtypes.is_mixed and dtypes.residual_bytes == dtypes.compute_bytes
    saves_copies = computes_in_16_bits and not shares_inputs
    return shape.has_adapters and saves_copies and not shape.four_bit_parameters


def _layer_gradient_bytes(
    shape: ModelShape, size: PassSize, dtypes: DtypeBytes, *, casts_inputs: bool
) -> int:
    """Return the peak bytes of a decoder layer's gradients with respect to its activations.

    The peak is in the backward pass of the layer's MLP. `casts_inputs`: the result of
    `_adapters_cast_inputs`.
    """
    text = shape.text
    # SwiGLU's product, or one of its factors
    product_bytes = size.tokens * text.mlp_width * dtypes.compute_bytes
    if shape.four_bit_parameters:
        # The base and the adapter each have a gradient of the product, and then comes their sum; or
        # a whole weight is converted from 4 bits.
        weight_bytes = (size.tokens + text.mlp_width) * text.width * dtypes.compute_bytes
        return product_bytes + max(product_bytes, weight_bytes)
    # SwiGLU holds the gradients of its product, of one factor and of the residual stream, after its
    # product is released. An adapter that reads the product holds it beside its copy.
    product_count = 3 if casts_inputs else 2
    residual_bytes = size.tokens * text.width * dtypes.compute_bytes
    return product_count * product_bytes + residual_bytes


class _VisionBytes(NamedTuple):
    """What vision tower and projector save for the backward pass, in bytes."""

    saved_bytes: int  # all that they save together
    # What one block of the tower saves if it is not recomputed; 0 without a backward pass.
    block_bytes: int


def _vision_saved_bytes(
    shape: ModelShape, patches: int, dtypes: DtypeBytes, *, checkpointing: bool
) -> _VisionBytes:
    """Return what the vision tower and the projector save for the backward pass.

    A frozen tower saves nothing, unless gradient checkpointing is on.
    """
    tower = shape.vision
    if tower is None or not patches:
        return _VisionBytes(saved_bytes=0, block_bytes=0)
    total_bytes = 0
    block_bytes = 0
    is_trained = shape.trained_count_by_component["vision_tower"] > 0
    # Where Transformers checkpoints, it makes the patch embeddings require a gradient, even those
    # of a frozen tower.
    has_backward = is_trained or checkpointing
    if has_backward:
        block_bytes = vision_block_bytes(tower, patches, dtypes)
        input_bytes = patches * tower.width * dtypes.residual_bytes
        # Gradient checkpointing saves only the input of each block.
        total_bytes = tower.layers * (input_bytes if checkpointing else block_bytes)
    # The first product saves a copy of the pixels if it computes in another dtype than theirs. The
    # float32 pixels themselves are the batch's.
    if is_trained and dtypes.compute_bytes != FLOAT32_BYTES:
        total_bytes += patches * shape.patch_values * dtypes.compute_bytes
    if shape.trained_count_by_component["projector"]:
        total_bytes += projector_bytes(
            tower, patches=patches, dtypes=dtypes, deepstack_layers=shape.deepstack_layers
        )
        if not has_backward:  # no block then saves the inputs of the deepstack projectors' norms
            total_bytes += shape.deepstack_layers * patches * tower.width * dtypes.residual_bytes
    elif has_backward:  # a frozen projector saves the inputs of its norm and of its GELU
        total_bytes += patches * tower.width * (FLOAT32_BYTES + dtypes.compute_bytes)
    return _VisionBytes(saved_bytes=total_bytes, block_bytes=block_bytes)


def head_saved_bytes(shape: ModelShape, size: PassSize, dtypes: DtypeBytes, *, on_gpu: bool) -> int:
    """Return what TRL's fused LM head saves for the backward pass, in bytes.

    It saves the hidden state, the label (int64) and two float32 results of each token that it
    scores, never the logits. `on_gpu`: on a GPU it scores completion tokens alone, on a CPU all
    tokens.
    """
    hidden_state_bytes = shape.text.width * dtypes.residual_bytes
    label_bytes = 8  # int64
    bytes_per_token = hidden_state_bytes + label_bytes + 2 * FLOAT32_BYTES
    return _scored_tokens(size, on_gpu) * bytes_per_token


def head_transient_bytes(
    shape: ModelShape, size: PassSize, dtypes: DtypeBytes, *, on_gpu: bool
) -> int:
    """Return the peak bytes of the LM head's backward pass, without what its forward pass saved.

    It holds one tile of logits, and the gradients of the hidden states in float32 and in the
    model's dtype. If the head is trained, it also holds the gradients of its weight in both dtypes.

    `on_gpu`: on a GPU the head scores completion tokens alone, and a kernel works in the tile
    itself. On a CPU it scores all tokens, and torch's own operations hold eight float32 values for
    each logit of the tile at once.
    """
    tokens = _scored_tokens(size, on_gpu)
    width = shape.text.width
    tile_rows = min(tokens, HEAD_TILE_TOKENS)
    tile_bytes = tile_rows * HEAD_TILE_VOCABULARY * dtypes.compute_bytes
    if not on_gpu:
        # Eight float32 values for each logit.
        tile_bytes += (
            8 * tile_rows * min(shape.vocabulary_size, HEAD_TILE_VOCABULARY) * FLOAT32_BYTES
        )
    # Gradients in float32, with a copy in the model's dtype if that is another one.
    copy_bytes = dtypes.residual_bytes if dtypes.residual_bytes != FLOAT32_BYTES else 0
    hidden_gradient_bytes = tokens * width * (FLOAT32_BYTES + copy_bytes)
    weight_gradient_bytes = 0
    if shape.head_is_trained:
        weight_gradient_bytes = shape.vocabulary_size * width * (FLOAT32_BYTES + copy_bytes)
    return tile_bytes + hidden_gradient_bytes + weight_gradient_bytes


def _scored_tokens(size: PassSize, on_gpu: bool) -> int:
    """Return how many tokens the LM head scores: completion tokens on a GPU, all elsewhere."""
    return size.scored_tokens if on_gpu else size.rows * (size.row_length - 1)
