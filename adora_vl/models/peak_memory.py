"""The moment of a training pass at which its activations take the most memory, and how many bytes.

From it follows how many layers have to be recomputed so that a pass fits.
"""

from bisect import bisect_left
from dataclasses import dataclass

from adora_vl.models.activations import (
    DtypeBytes,
    PassSize,
    SavedBytes,
    head_saved_bytes,
    head_transient_bytes,
    mask_bytes,
    saved_bytes,
)
from adora_vl.models.shape import ModelShape

# The share of a GPU's memory that stays free when the recomputed layers are chosen: the allocator
# loses some memory between its blocks, and a prediction is a few per cent off.
RESERVED_GPU_SHARE = 0.1


def usable_bytes(gpu_bytes: int, free_bytes: int) -> int:
    """Return the bytes that a pass may take on a GPU of which `free_bytes` are free.

    A tenth of the whole GPU is left free (`RESERVED_GPU_SHARE`). For example, of 50 free bytes on a
    GPU of 100, a pass may take 40.
    """
    return free_bytes - int(RESERVED_GPU_SHARE * gpu_bytes)


@dataclass(frozen=True)
class PeakCandidate:
    """A moment of a forward and backward pass at which its memory may be largest, in bytes."""

    name: str
    transient_bytes: int  # what is held for this moment only
    kept_bytes: int  # what the language model and its head still keep for the backward pass

    @property
    def total_bytes(self) -> int:
        """Bytes of activations at this moment, of the language model and its head."""
        return self.transient_bytes + self.kept_bytes


# The name in reports of three moments, each of them in the backward pass of a layer or block.
_LAYER_BACKWARD_NAME = "one layer going back"


@dataclass(frozen=True)
class ActivationMemory:
    """Predicts the activation memory of a model's training pass from the pass's size."""

    shape: ModelShape
    dtypes: DtypeBytes
    checkpointing: bool = True
    shares_vision: bool = False  # the vision tower sees an image once for all rollouts of a group
    on_gpu: bool = True  # whether the pass runs on a GPU, with its kernels

    @property
    def reads_features(self) -> bool:
        """Whether a pass reads features alone, since a frozen tower sees each image before it."""
        return self.shares_vision and self.shape.tower_is_frozen

    @property
    def _tied_head_gradient_bytes(self) -> int:
        """The bytes of the gradient of a weight that LM head and embedding share.

        It is 0 if they are not tied, or not trained. The head's part of this gradient waits for the
        embedding's part until the end of the backward pass. There both parts and their sum are
        held.
        """
        shape = self.shape
        if not (shape.head_is_trained and shape.ties_embeddings):
            return 0
        return shape.vocabulary_size * shape.text.width * shape.bytes_per_weight

    def peak_candidates(self, size: PassSize, recomputed_count: int) -> list[PeakCandidate]:
        """Return the moments of a pass at which its memory may be largest.

        Gradients of weights are not counted, except of a weight that head and embedding share.

        The moments follow the backward pass: the LM head, the last layer, the first recomputed
        layer if not all are recomputed, and the vision tower and the embedding.

        Args:
            size: the size of the pass.
            recomputed_count: how many layers of the language model gradient checkpointing
                recomputes, counted from the first one. Their backward pass comes last, when all
                other layers have released their saved values.
        """
        layer_count = self.shape.text.layers
        saved = self._saved_bytes(size, recomputed_count)
        head_saved = head_saved_bytes(self.shape, size, self.dtypes, on_gpu=self.on_gpu)
        head_transient = head_transient_bytes(self.shape, size, self.dtypes, on_gpu=self.on_gpu)
        all_kept_bytes = saved.text_bytes + head_saved  # nothing is released yet
        # The head's backward pass is over when that of the last layer begins. So is the final
        # norm's, but there the gradient of its input, in float32, takes the place of that input.
        kept_by_layers = saved.text_bytes
        tied_head_bytes = self._tied_head_gradient_bytes
        # What the backward pass of one layer holds beside saved values.
        gradient_bytes = saved.layer_gradient_bytes + tied_head_bytes
        head_moment = PeakCandidate("logits", head_transient, all_kept_bytes)
        # A tied gradient has a part of the head and a part of the embedding. At the end there are
        # both parts and their sum.
        embedding_bytes = 3 * tied_head_bytes
        if recomputed_count == layer_count:
            layer_bytes = max(saved.largest_recomputed_bytes + gradient_bytes, embedding_bytes)
            return [head_moment, PeakCandidate(_LAYER_BACKWARD_NAME, layer_bytes, kept_by_layers)]
        last_layer_moment = PeakCandidate(_LAYER_BACKWARD_NAME, gradient_bytes, kept_by_layers)
        candidates = [head_moment, last_layer_moment]
        if recomputed_count:
            # The backward pass of the layers that are not recomputed is over, and their values are
            # released.
            recomputed_bytes = saved.recomputed_layer_bytes + gradient_bytes
            candidates.append(
                PeakCandidate(_LAYER_BACKWARD_NAME, recomputed_bytes, saved.layer_input_bytes)
            )
        # Behind all layers come the vision tower's blocks and the embedding.
        vision_block_bytes = saved.recomputed_block_bytes + gradient_bytes
        end_bytes = max(vision_block_bytes, embedding_bytes)
        candidates.append(PeakCandidate(_LAYER_BACKWARD_NAME, end_bytes, kept_bytes=0))
        return candidates

    def mask_and_vision_bytes(self, size: PassSize, recomputed_count: int) -> tuple[int, int]:
        """Return the bytes that are held during the whole pass: of attention mask and vision tower.

        `recomputed_count`: how many layers gradient checkpointing recomputes.
        """
        mask = mask_bytes(size, self.dtypes, on_gpu=self.on_gpu)
        vision = (
            0 if self.reads_features else self._saved_bytes(size, recomputed_count).vision_bytes
        )
        return mask, vision

    def peak_bytes(self, size: PassSize, recomputed_count: int) -> int:
        """Return the most bytes that a pass takes beside the weights and their gradients.

        `recomputed_count`: how many layers gradient checkpointing recomputes.
        """
        mask, vision = self.mask_and_vision_bytes(size, recomputed_count)
        candidates = self.peak_candidates(size, recomputed_count)
        return max(candidate.total_bytes for candidate in candidates) + mask + vision

    def fewest_recomputed_layers(self, size: PassSize, limit_bytes: int) -> int:
        """Return the fewest layers to recompute so that a pass takes at most `limit_bytes`.

        If no smaller number is enough, the result is the number of all layers.
        """

        def fits(recomputed_count: int) -> bool:
            """Return whether the pass fits if this many layers are recomputed."""
            return self.peak_bytes(size, recomputed_count) <= limit_bytes

        # A binary search over 0 to layers - 1, since each further recomputed layer lowers the peak.
        # If none of these fits, `bisect_left` returns the number of all layers. That need not be
        # tried: the model's last layer has its backward pass first, when its values are in memory
        # either way.
        return bisect_left(range(self.shape.text.layers), True, key=fits)

    def _saved_bytes(self, size: PassSize, recomputed_count: int) -> SavedBytes:
        """Return what a pass saves for its backward pass if this many layers are recomputed."""
        return saved_bytes(
            self.shape,
            size,
            self.dtypes,
            checkpointing=self.checkpointing,
            recomputed_count=recomputed_count,
        )
