"""The vision tower, run once per distinct image."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from adora_vl.models.families import DEEPSTACK_FIELD, EMBEDDINGS_FIELD, family_of
from adora_vl.models.shape import PATCHES_PER_PASS
from adora_vl.packing.image_store import ImageBank, ImageBanks, first_patches
from adora_vl.packing.split_attention import LAYOUT_ARGUMENT
from adora_vl.packing.vision_windows import batch_windows, is_qwen2_5_vl_tower, window_arguments
from adora_vl.utils import compat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Runs the vision tower on pixels (R, D) and grids (images, 3), and returns its output.
RunTower = Callable[[Tensor, Tensor], Any]


def run_tower(
    tower: "PreTrainedModel",
    model_method: Callable[..., Any],
    kwargs: dict[str, Any],
    device: torch.device,
    pixels: Tensor,
    grids: Tensor,
) -> Any:
    """Compute the features of images by the model's own `get_image_features`.

    For Qwen2.5-VL the attention windows are computed here on the CPU, since its tower would wait
    for the GPU to read them.

    Args:
        tower: the vision tower.
        model_method: the model's own `get_image_features`.
        kwargs: further arguments of `model_method`.
        device: where the tower is.
        pixels: (R, D), the R patches of all images, with D values each.
        grids: (images, 3), on the CPU: each image's (temporal, height, width) in patches.
    """
    # The layout of a packed pass is for the text's attention, but Qwen3-VL hands it to the tower.
    kwargs.pop(LAYOUT_ARGUMENT, None)
    if not is_qwen2_5_vl_tower(tower):
        return model_method(pixels, grids.to(device, non_blocking=True), **kwargs)
    # With these arguments Qwen2.5-VL's tower computes nothing from the grids any more.
    computed_arguments = window_arguments(tower, grids, device)
    return model_method(pixels, grids, **{**kwargs, **computed_arguments})


# One image's features: for each field of the tower's output (`pooler_output`, `deepstack_features`)
# a tensor (image tokens, width) for each layer of the language model that it enters at.
ImageFeatures = dict[str, list[Tensor]]


def vision_language_model(model: nn.Module) -> Any | None:
    """Return the submodule that has the vision tower as `visual`; None without a vision tower.

    The search goes through all submodules, so `model` may be in wrappers.
    """
    for module in model.modules():
        # A wrapper may pass the attribute `visual` on, so `hasattr` would find the wrapper. Only
        # the model itself has `visual` as a submodule.
        has_tower = "visual" in module._modules
        has_methods = hasattr(module, "get_image_features") and hasattr(module, "get_rope_index")
        if has_tower and has_methods:
            return module
    return None


class SharedVision:
    """Makes models accept patch numbers of image banks in place of pixels.

    An image bank (`adora_vl.packing.image_store`) stores the patches of images under numbers. The
    number of its first patch is the id of an image. So equal images can be told, and the vision
    tower runs once for each distinct one.
    """

    def __init__(self, banks: ImageBanks) -> None:
        self.banks = banks
        self.shares_images = True  # whether a pass runs the tower once for equal images
        self.image_passes = 0  # how often an image has gone through a tower
        self._towers: list[Any] = []

    def install(self, model: nn.Module) -> bool:
        """Make `model` accept patch numbers from now on, in place of pixels.

        Its `get_image_features` is replaced. Pixels still go to the model's own method, so
        generation and everything else work as before. Returns whether that was done: a model
        without a vision tower, or of an unknown family, stays as it is.
        """
        vl_model = vision_language_model(model)
        if vl_model is None or family_of(vl_model.config) is None:
            return False
        model_method = vl_model.get_image_features

        def get_image_features(
            pixel_values: Tensor, image_grid_thw: Tensor | None = None, **kwargs: Any
        ) -> Any:
            """Return the features of images, which come as patch numbers (integers) or as pixels.

            With patch numbers the features of equal images are computed once.
            """
            # Without grids nothing says which patches make up an image.
            if image_grid_thw is None:
                return model_method(pixel_values, image_grid_thw, **kwargs)
            # Lacks device, pixels and grids.
            run_on_device = partial(run_tower, vl_model.visual, model_method, kwargs)
            if not len(image_grid_thw):
                return self._features_of_no_image(vl_model, run_on_device, image_grid_thw.device)
            has_patch_numbers = not pixel_values.is_floating_point()
            if has_patch_numbers:
                image_ids = first_patches(pixel_values, image_grid_thw)
                run = partial(run_on_device, vl_model.visual.device)
                return self._features_of_images(vl_model, run, image_ids)
            self.image_passes += len(image_grid_thw)
            # A packed pass has the grids on the CPU.
            grids = image_grid_thw.to(pixel_values.device)
            return model_method(pixel_values, grids, **kwargs)

        compat.VISION_FEATURES.install(get_image_features, on=vl_model)
        self._towers.append(vl_model.visual)
        return True

    @contextmanager
    def without_sharing(self) -> Iterator[None]:
        """Run the tower in every pass inside the block, over the images of that pass alone.

        All ranks then make the same passes, also where one of them has no image.
        """
        shares_images_before = self.shares_images
        self.shares_images = False
        try:
            yield
        finally:
            self.shares_images = shares_images_before

    def switch_batched_windows(self, *, on: bool) -> None:
        """Switch batched windows on or off for all towers (see `attend_windows`)."""
        for tower in self._towers:
            batch_windows(tower, on)

    def _features_of_images(
        self, vl_model: "PreTrainedModel", run: RunTower, image_ids: list[int]
    ) -> Any:
        """Compute the features of images that an image bank stores.

        The cases, in order:

        - Sharing is switched off: each image goes through the vision tower, also an equal one.
        - The tower is frozen: each image of the bank goes through it once, for all later passes.
        - Else each distinct image goes through the tower once in this pass. For example, the ids
          0 0 8 are two distinct images, and the features of the first are returned twice.

        Args:
            vl_model: the model that has the vision tower.
            run: runs the tower on pixels and grids.
            image_ids: the number of each image's first patch in the bank, which identifies it.
        """
        bank = self.banks.of(image_ids[0])
        if not self.shares_images:
            return self._run_on_images(bank, image_ids, run)
        if _has_frozen_tower(vl_model):
            return self._frozen_features(bank, image_ids=image_ids, vl_model=vl_model, run=run)
        distinct_ids = list(dict.fromkeys(image_ids))
        output = self._run_on_images(bank, distinct_ids, run)
        distinct_features = _split_by_image(output, vl_model)
        features_by_id = dict(zip(distinct_ids, distinct_features, strict=True))
        return _fill_output(output, [features_by_id[image_id] for image_id in image_ids])

    def _run_on_images(self, bank: ImageBank, image_ids: list[int], run: RunTower) -> Any:
        """Run the vision tower over images of the bank, and return its output.

        Args:
            bank: stores the images.
            image_ids: the number of each image's first patch, which identifies it.
            run: runs the tower on pixels and grids.
        """
        self.image_passes += len(image_ids)
        pixels, grids = bank.pixels(image_ids)
        return run(pixels, grids)

    def _frozen_features(
        self, bank: ImageBank, image_ids: list[int], vl_model: "PreTrainedModel", run: RunTower
    ) -> Any:
        """Return features of a frozen tower, which are computed once for each image of the bank.

        Collective where images may have been added to the bank since the last call, on any rank.

        Args:
            bank: stores the images of this rank's batch.
            image_ids: the number of the first patch of each image whose features are wanted.
            vl_model: the model that has the vision tower.
            run: runs the tower on pixels and grids.
        """
        if bank.may_have_new_images:
            self._compute_features_of_new_images(bank, vl_model, run)
        features = [bank.frozen_features[image_id] for image_id in image_ids]
        return _fill_output(BaseModelOutputWithPooling(), features)

    def _compute_features_of_new_images(
        self, bank: ImageBank, vl_model: "PreTrainedModel", run: RunTower
    ) -> None:
        """Compute the features of the bank's new images, and store them in the bank. Collective.

        All ranks make equally many passes, because a pass gathers sharded weights. A rank that
        needs fewer passes than another one computes its first image again in each further pass.

        Args:
            bank: stores the images of this rank's batch, at least one.
            vl_model: the model that has the frozen vision tower.
            run: runs the tower on pixels and grids.
        """
        new_image_ids = [
            image_id for image_id in bank.image_ids if image_id not in bank.frozen_features
        ]
        patch_counts = []
        for image_id in new_image_ids:
            _, patches, _ = bank.image(image_id)
            patch_counts.append(len(patches))
        passes = split_into_passes(new_image_ids, patch_counts, PATCHES_PER_PASS)
        for number in range(_max_over_ranks(len(passes), vl_model.visual.device)):
            image_ids_of_pass = passes[number] if number < len(passes) else bank.image_ids[:1]
            with torch.no_grad():
                output = self._run_on_images(bank, image_ids_of_pass, run)
            pass_features = _split_by_image(output, vl_model)
            for image_id, image_features in zip(image_ids_of_pass, pass_features, strict=True):
                bank.frozen_features.setdefault(image_id, image_features)
        bank.may_have_new_images = False

    def _features_of_no_image(
        self, vl_model: "PreTrainedModel", run_on_device: Callable[..., Any], device: torch.device
    ) -> Any:
        """Return empty features for a batch without images, and run the tower if other ranks do.

        The tower gathers sharded weights and reduces gradients, which is collective. So a rank
        whose batch has no image has to run it too, with gradients of zero.

        Args:
            vl_model: the model that has the vision tower.
            run_on_device: a pass of the tower; its arguments are a device, pixels and grids.
            device: that of the batch.
        """
        empty = _fill_output(BaseModelOutputWithPooling(), [_empty_features(vl_model, device)])
        if _is_single_process():
            return empty
        bank = (
            self.banks.of_training() if self.shares_images and _has_frozen_tower(vl_model) else None
        )
        run = partial(run_on_device, device)
        # A tower that is trained, or not shared, runs once in every pass of the model.
        if bank is None:
            return _run_without_images(vl_model, run, device)
        # A frozen tower runs only for new images, which are marked on all ranks together.
        if not bank.may_have_new_images:
            return empty
        if bank.image_ids:  # other rows of this rank's batch have images
            self._compute_features_of_new_images(bank, vl_model, run)
            return empty
        # This rank has no images at all. It makes as many passes as the rank with the most images,
        # each over a picture of zeros.
        for _ in range(_max_over_ranks(passes=1, device=device)):
            output = _run_without_images(vl_model, run, device)
        bank.may_have_new_images = False
        return output


def split_into_passes(
    image_ids: Sequence[int], patch_counts: Sequence[int], max_patches: int
) -> list[list[int]]:
    """Divide images, in their order, into passes of the vision tower of at most `max_patches`.

    An image with more patches has a pass of its own. For example, the images 0, 4 and 10 with 4, 6
    and 8 patches, and at most 12 patches a pass, give [[0, 4], [10]].

    Args:
        image_ids: the number of each image's first patch, which identifies the image.
        patch_counts: how many patches each image has.
        max_patches: the most patches that a pass of several images may have.

    Returns:
        For each pass the ids of its images.
    """
    passes: list[list[int]] = []
    free_patches = 0  # that the last pass still has room for
    for image_id, count in zip(image_ids, patch_counts, strict=True):
        if count > free_patches:
            passes.append([])
            free_patches = max_patches
        passes[-1].append(image_id)
        free_patches -= count
    return passes


def _is_single_process() -> bool:
    """Return whether the run has a single rank."""
    return not distributed.is_initialized() or distributed.get_world_size() == 1


def _max_over_ranks(passes: int, device: torch.device) -> int:
    """Return how many passes of the vision tower each rank makes: the most of any rank. Collective.

    A rank that made fewer would leave the others waiting. For example, ranks that need 2, 0 and 3
    passes all make 3. The result is at least 1.

    Args:
        passes: how many passes this rank needs.
        device: that of the collective call.
    """
    if _is_single_process():
        return max(passes, 1)
    largest = torch.tensor([passes], device=device)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return max(int(largest), 1)


def _has_frozen_tower(vl_model: "PreTrainedModel") -> bool:
    """Return whether no parameter of the vision tower is trained."""
    return not any(parameter.requires_grad for parameter in vl_model.visual.parameters())


def _empty_features(vl_model: "PreTrainedModel", device: torch.device) -> ImageFeatures:
    """Return features of no image token: empty tensors for each field of the tower's output.

    All families have embeddings, (0, width). Qwen3-VL also has `deepstack_features`, a tensor
    (0, width) for each layer of the language model that gets them.

    Args:
        vl_model: the model that has the vision tower.
        device: where the tensors are put.
    """
    config = vl_model.config
    width = config.get_text_config().hidden_size
    empty = torch.zeros(0, width, dtype=vl_model.visual.dtype, device=device)
    deepstack_layers = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
    features: ImageFeatures = {EMBEDDINGS_FIELD: [empty]}
    if deepstack_layers:
        features[DEEPSTACK_FIELD] = [empty] * len(deepstack_layers)
    return features


def _run_without_images(vl_model: "PreTrainedModel", run: RunTower, device: torch.device) -> Any:
    """Run the vision tower over a picture of zeros, and return features of no image token.

    The picture is one image token large. The features are empty slices of the tower's output. So
    the loss depends on the tower's weights, and the backward pass reduces their gradients as on the
    other ranks.

    Args:
        vl_model: the model that has the vision tower.
        run: runs the tower on pixels and grids.
        device: where the pixels are put.
    """
    vision = vl_model.config.vision_config
    side = vision.spatial_merge_size  # an image token is `side` x `side` patches
    channels = getattr(vision, "in_channels", 3)
    patch_values = channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.zeros(side * side, patch_values, dtype=vl_model.visual.dtype, device=device)
    output = run(pixels, torch.tensor([[1, side, side]]))
    picture_features = _split_by_image(output, vl_model)[0]
    empty_slices = {}
    for name, layers in picture_features.items():
        empty_slices[name] = [layer[:0] for layer in layers]
    return _fill_output(output, [empty_slices])


def _split_by_image(
    output: BaseModelOutputWithPooling, vl_model: "PreTrainedModel"
) -> list[ImageFeatures]:
    """Split the output of a vision pass by image.

    Returns for each image its features by the name of the output's field. A field has a tensor
    (image tokens, width) for each layer of the language model that it enters at. For example, two
    images of 4 and 6 tokens, with features for two further layers:

        output                                      result
        pooler_output: (4, W) and (6, W)            image 1: pooler_output [(4, W)],
        deepstack_features: (10, W) and (10, W)              deepstack_features [(4, W), (4, W)]
                                                    image 2: the same with 6 tokens
    """
    family = family_of(vl_model.config)
    assert family is not None
    assert family.vision is not None
    embeddings = output[EMBEDDINGS_FIELD]  # a tensor per image; they enter at the first layer alone
    features_by_image: list[ImageFeatures] = [
        {EMBEDDINGS_FIELD: [embedding]} for embedding in embeddings
    ]
    # Only Qwen3-VL has features for further layers of the language model.
    if DEEPSTACK_FIELD not in family.vision.feature_fields:
        return features_by_image
    token_counts = [len(embedding) for embedding in embeddings]
    for layer in output[DEEPSTACK_FIELD]:  # a tensor per layer, for all images together
        layer_by_image = torch.split(layer, token_counts)
        for features, layer_features in zip(features_by_image, layer_by_image, strict=True):
            features.setdefault(DEEPSTACK_FIELD, []).append(layer_features)
    return features_by_image


def _fill_output(output: BaseModelOutputWithPooling, features_by_image: list[ImageFeatures]) -> Any:
    """Return `output` with the features of these images, in the form that the model reads.

    It undoes `_split_by_image`: the features of all images are joined again, in their order.

    Args:
        output: an output of the tower, whose fields of features are replaced in place.
        features_by_image: for each image its features by the name of the output's field.
    """
    # Embeddings enter at the first layer alone, so the list of an image has one tensor.
    output[EMBEDDINGS_FIELD] = tuple(
        features[EMBEDDINGS_FIELD][0] for features in features_by_image
    )
    if DEEPSTACK_FIELD in features_by_image[0]:
        # A tensor per layer, with the tokens of all images.
        layers_by_image = [features[DEEPSTACK_FIELD] for features in features_by_image]
        output[DEEPSTACK_FIELD] = [torch.cat(layer) for layer in zip(*layers_by_image, strict=True)]
    return output
