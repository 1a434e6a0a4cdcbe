"""A micro-batch recomputes as few layers as the memory asks for, and no gradient changes by it.

Gradient checkpointing recomputes every layer in the backward pass, which saves memory and costs
time. The key `adora_recompute` is the number of layers that are recomputed: "all", a number, or
"auto", which is as few as fit into the free memory of the GPU.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from adora_vl.config.sharding import Sharding
from adora_vl.models.activations import DtypeBytes, PassSize
from adora_vl.models.peak_memory import RESERVED_GPU_SHARE, ActivationMemory
from adora_vl.models.shape import ModelShape, config_for_planning, model_shape
from adora_vl.record.micro_batch_means import MicroBatchMeans
from adora_vl.training.recompute import (
    RECOMPUTED_LAYERS_KEY,
    GpuBytes,
    GradientSnapshots,
    RecomputedLayers,
    recomputable_layers,
)
from tests.support.small_models import TEXT_CONFIG, small_model
from tests.support.stand_ins import FakeAccelerator, training_config
from tests.support.step_context import step_context

LAYERS = 4
# About a group of 8 rollouts of 468 tokens, with a prompt of 1079, in one packed row. Attention
# reads a copy of the prompt's keys for each rollout: 8 * (1079 + 468) keys are 12,376.
PASS_SIZE = PassSize(
    rows=1,
    row_length=4800,
    scored_tokens=3744,
    repeated_keys=12_400,
)
THREE_B_MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
GIB = 2**30


def language_model(**keys: Any) -> Any:
    """Return a policy that reads text, with gradient checkpointing."""
    torch.manual_seed(1)
    config = Qwen2Config(**{**TEXT_CONFIG, "num_hidden_layers": LAYERS}, use_cache=False, **keys)
    model = Qwen2ForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def three_billion() -> ModelShape:
    """Return the shape of the 3B model with adapters."""
    adapters = LoraConfig(r=64, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    return model_shape(config_for_planning(THREE_B_MODEL)[0], peft_config=adapters)


def recomputed_layers_of(
    model: PreTrainedModel,
    *,
    read_gpu_bytes: Callable[[], GpuBytes] | None = None,
    shape: Callable[[], ModelShape] = three_billion,
    sharding: Sharding | None = None,
    accelerator: FakeAccelerator | None = None,
    log: dict[str, float] | None = None,
    **keys: Any,
) -> RecomputedLayers:
    """Return the object that decides how many layers of a model are recomputed in a pass.

    In the context `switched(pass_size)` gradient checkpointing is on in so many layers.

    Args:
        model: the policy.
        read_gpu_bytes: returns the memory of its GPU; without it the model is on a CPU.
        shape: returns the shape by which memory is predicted.
        sharding: how the weights are divided among GPUs; by default they are not.
        accelerator: that of the process, by default the only one.
        log: gets the logged metrics.
        keys: the keys of the config, `adora_recompute` above all.
    """
    context = step_context(
        log, accelerator=accelerator or FakeAccelerator(), gradient_checkpointing=True, **keys
    )
    return RecomputedLayers(
        context,
        model=model,
        shape=shape,
        sharding=sharding or Sharding(),
        read_gpu_bytes=read_gpu_bytes,
    )


def shape_of(model: PreTrainedModel) -> Callable[[], ModelShape]:
    """Return a function that returns the model's shape, by which its memory is predicted."""
    return lambda: model_shape(model.config, dtype="float32")


def gradients_of(model: Any, adora_recompute: int | str) -> list[Tensor]:
    """Return the gradients of a pass with this value of the key."""
    model.zero_grad()
    torch.manual_seed(5)
    ids = torch.arange(34).view(2, 17) % TEXT_CONFIG["vocab_size"]
    recomputed_layers = recomputed_layers_of(model, adora_recompute=adora_recompute)
    with recomputed_layers.switched(PASS_SIZE):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]


def test_gradients_are_equal_to_the_bit_however_many_layers_are_recomputed(subtests):
    """Gradients are the same whether all, some or no layers are recomputed.

    So a layer with dropout draws the same again when it is recomputed, also in adapters. There are
    4 layers; a number above that, here 99, means all.
    """
    adapters = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.3)
    for dtype in (torch.float32, torch.float64):
        for name, model in {
            "whole": language_model(attention_dropout=0.2).to(dtype),
            "adapters": get_peft_model(language_model(), adapters).to(dtype),
        }.items():
            model.train()
            expected = gradients_of(model, adora_recompute="all")
            assert any(gradient.abs().max() > 0 for gradient in expected)
            for number in (0, 1, 3, LAYERS, 99):
                with subtests.test(f"{name} {dtype} {number}"):
                    gradients = gradients_of(model, adora_recompute=number)
                    assert len(gradients) == len(expected)
                    assert all(map(torch.equal, gradients, expected))


def test_the_first_layers_are_recomputed_and_the_vision_tower_stays_as_it_is():
    """With `adora_recompute: 1` the first language layer is recomputed, and all of vision."""
    model = small_model("qwen2_5_vl")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    blocks = list(model.model.visual.blocks)
    layers = recomputable_layers(model)
    assert layers == list(model.model.language_model.layers)
    with recomputed_layers_of(model, adora_recompute=1).switched(PASS_SIZE):
        assert [layer.gradient_checkpointing for layer in layers] == [True, False]
        assert all(block.gradient_checkpointing for block in blocks)
    assert all(layer.gradient_checkpointing for layer in layers), "as before, behind the pass"


def test_nothing_changes_where_nothing_is_known_or_asked_for(subtests):
    """All layers stay recomputed on a CPU, with "all", and with torch.compile.

    No metric is logged then.
    """
    unchanged: dict[str, dict[str, Any]] = {
        "a CPU": {"adora_recompute": "auto"},
        "all": {"adora_recompute": "all", "read_gpu_bytes": lambda: GpuBytes(80 * GIB, 80 * GIB)},
        "torch.compile": {"adora_recompute": 1, "torch_compile": True},
    }
    for name, keys in unchanged.items():
        with subtests.test(name):
            log: dict[str, float] = {}
            model = language_model()
            recomputed_layers = recomputed_layers_of(model, log=log, **keys)
            with recomputed_layers.switched(PASS_SIZE):
                assert all(layer.gradient_checkpointing for layer in recomputable_layers(model))
            assert log == {}


def test_a_run_without_gradient_checkpointing_gets_none():
    """Without gradient checkpointing no layer is recomputed, whatever `adora_recompute` says.

    The key only lowers the number of recomputed layers.
    """
    model = language_model()
    model.gradient_checkpointing_disable()
    context = step_context(gradient_checkpointing=False, adora_recompute=2)
    recomputed_layers = RecomputedLayers(
        context, model=model, shape=three_billion, sharding=Sharding(), read_gpu_bytes=None
    )
    with recomputed_layers.switched(PASS_SIZE):
        assert not any(layer.gradient_checkpointing for layer in recomputable_layers(model))


def test_as_few_layers_as_fit_into_the_free_memory():
    """The chosen number of layers fits into the free memory, and one less would not.

    With 1 GiB all layers are recomputed, and with 59 GiB none.
    """
    activation_memory = ActivationMemory(
        three_billion(), DtypeBytes(compute_bytes=2, residual_bytes=2)
    )
    layers = activation_memory.shape.text.layers
    counts = []
    for gigabytes in range(1, 60):
        free_bytes = gigabytes * GIB
        count = activation_memory.fewest_recomputed_layers(PASS_SIZE, free_bytes)
        counts.append(count)
        if count < layers:
            assert activation_memory.peak_bytes(PASS_SIZE, count) <= free_bytes
        if count > 0:
            assert activation_memory.peak_bytes(PASS_SIZE, count - 1) > free_bytes, (
                "fewer do not fit"
            )

    assert counts == sorted(counts, reverse=True), "more memory, fewer layers"
    assert counts[0] == layers
    assert counts[-1] == 0
    assert len(set(counts)) > layers / 2


def test_the_number_follows_the_tokens_and_the_free_memory(capsys):
    """With "auto" a pass recomputes 0, 2, 3 or all layers, as its size and the free memory demand.

    The number is logged for each pass, and printed once.
    """
    log: dict[str, float] = {}
    model = language_model()
    free_bytes = 0
    shape = shape_of(model)
    activation_memory = ActivationMemory(shape(), DtypeBytes(compute_bytes=4, residual_bytes=4))
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    all_gpu_bytes = activation_memory.peak_bytes(PASS_SIZE, 0) * 4

    def bytes_for(count: int) -> int:
        """Return the least free memory with which a pass of `PASS_SIZE` recomputes `count` layers.

        A share of the GPU stays free, and the gradients of the pass need room beside it.
        """
        peak_bytes = activation_memory.peak_bytes(PASS_SIZE, count)
        return peak_bytes + int(RESERVED_GPU_SHARE * all_gpu_bytes) + gradient_bytes

    recomputed_layers = recomputed_layers_of(
        model,
        shape=shape,
        read_gpu_bytes=lambda: GpuBytes(free_bytes, all_gpu_bytes),
        log=log,
        adora_recompute="auto",
    )
    for count in (0, 2, 3, LAYERS):
        free_bytes = 0 if count == LAYERS else bytes_for(count)
        with recomputed_layers.switched(PASS_SIZE):
            flags = [layer.gradient_checkpointing for layer in recomputable_layers(model)]
        assert flags.count(True) == count
        assert recomputed_layers.count == count
        assert log[RECOMPUTED_LAYERS_KEY] == count
    free_bytes = bytes_for(2)
    with recomputed_layers.switched(PassSize(rows=1, row_length=240, scored_tokens=187)):
        assert recomputed_layers.count == 0, "fewer tokens keep less"
    gradients_of(model, adora_recompute="all")
    free_bytes = bytes_for(2) - gradient_bytes
    with recomputed_layers.switched(PASS_SIZE):
        assert recomputed_layers.count == 2, "gradients that are there take no further memory"
    assert capsys.readouterr().out.count("layers are recomputed") == 1


def test_all_ranks_recompute_what_the_fullest_needs():
    """Every rank recomputes as many layers as the rank that needs the most, here 3.

    All ranks gather weights at the same time, so they need equal numbers. This rank alone would
    recompute none.
    """
    model = language_model()
    own_counts: list[int] = []

    def gather(count: Tensor) -> Tensor:
        """Record this rank's count, and add that of the other rank, which needs 3 layers."""
        own_counts.append(int(count))
        return torch.cat([count, torch.tensor([3])])

    ranks = FakeAccelerator(num_processes=2, gather=gather)
    ample_bytes = 10**15  # with which this rank alone would recompute no layer
    for sharding in (Sharding(processes=2), Sharding(processes=2, zero_stage=3)):
        recomputed_layers = recomputed_layers_of(
            model,
            shape=shape_of(model),
            sharding=sharding,
            accelerator=ranks,
            read_gpu_bytes=lambda: GpuBytes(ample_bytes, ample_bytes),
            adora_recompute="auto",
        )
        with recomputed_layers.switched(PASS_SIZE):
            assert recomputed_layers.count == 3
    assert own_counts == [0, 0]


class OutOfMemory(nn.Module):
    """A policy whose backward pass runs out of memory, unless all layers are recomputed."""

    def __init__(
        self, model: Any, recomputed_layers: RecomputedLayers, metrics: dict[str, list[float]]
    ):
        super().__init__()
        self.model = model
        self.recomputed_layers = recomputed_layers
        self.metrics = metrics
        self.metric_means = MicroBatchMeans(training_config(), metrics)
        self.passes = 0
        layer = recomputable_layers(model)[1]
        # The backward pass has added to the gradients of later layers before it gets here.
        layer.register_full_backward_pre_hook(self._fail)

    def _fail(self, *_: object) -> None:
        if self.recomputed_layers.count < LAYERS:
            raise torch.OutOfMemoryError("no memory")

    def train_micro_batch(self) -> Tensor:
        """Run a micro-batch forward and backward, and return its loss."""
        self.passes += 1
        ids = torch.arange(34).view(2, 17) % TEXT_CONFIG["vocab_size"]
        with self.recomputed_layers.switched(PASS_SIZE):
            loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        self.metrics["loss"].append(loss.item())
        loss.backward()
        return loss.detach()


def policy_out_of_memory(total: int = 10**15, **keys: Any) -> OutOfMemory:
    """Return a policy whose first pass runs out of memory.

    `total`: the bytes of its GPU. Gradients that take at most a share of it are copied before a
    pass, so that they can be restored.
    """
    model = language_model()
    recomputed_layers = recomputed_layers_of(
        model,
        shape=shape_of(model),
        read_gpu_bytes=lambda: GpuBytes(10**15, total),
        adora_recompute="auto",
        **keys,
    )
    return OutOfMemory(model, recomputed_layers, defaultdict(list))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_micro_batch_without_memory_is_made_again_and_counts_once(micro_batches, capsys):
    """A micro-batch that ran out of memory is repeated with all layers recomputed.

    The gradients and logged values of the failed pass are taken back. `micro_batches`: 1: it is the
    first of the optimizer step. 3: the gradients of two others are there.
    """
    policy = policy_out_of_memory()
    gradients = gradients_of(policy.model, adora_recompute="all")
    policy.model.zero_grad()
    if micro_batches == 3:
        # Two micro-batches of the step were learned from before.
        for parameter, gradient in zip(policy.model.parameters(), gradients, strict=True):
            parameter.grad = 2 * gradient
    policy.metrics["loss"].append(7.0)  # of a micro-batch before this one
    policy.recomputed_layers.run_with_retry(
        policy.train_micro_batch, snapshot_log=policy.metric_means.snapshot
    )

    assert policy.passes == 2
    assert len(policy.metrics["loss"]) == 2, "the loss of the pass that failed is taken back"
    assert "out of the card's memory with 0 of 4 layers" in capsys.readouterr().out
    for parameter, gradient in zip(policy.model.parameters(), gradients, strict=True):
        expected = 2 * gradient + gradient if micro_batches == 3 else gradient
        assert torch.equal(parameter.grad, expected)
    policy.model.zero_grad()
    policy.recomputed_layers.run_with_retry(
        policy.train_micro_batch, snapshot_log=policy.metric_means.snapshot
    )
    assert policy.passes == 3, "from here on all layers are recomputed"


def test_a_process_among_several_does_not_go_back_alone(subtests):
    """Among several processes, or with ZeRO-3, a pass without memory is not repeated.

    The others would wait for ever for this process's part of the pass that it has left, so the
    error ends the run.
    """
    two_ranks = FakeAccelerator(num_processes=2)
    cases: dict[str, dict[str, Any]] = {
        "ranks": {"accelerator": two_ranks, "sharding": Sharding(processes=2)},
        "DeepSpeed": {"sharding": Sharding(zero_stage=3)},
    }
    for name, keys in cases.items():
        with subtests.test(name):
            policy = policy_out_of_memory(**keys)
            with pytest.raises(torch.OutOfMemoryError):
                policy.recomputed_layers.run_with_retry(
                    policy.train_micro_batch, snapshot_log=policy.metric_means.snapshot
                )
            assert policy.passes == 1


def test_gradients_too_large_to_copy_end_the_run_rather_than_count_twice():
    """A pass without memory is not repeated if the gradients before it were too large to copy.

    Without a copy, what the failed pass has added to them could not be taken back.
    """
    policy = policy_out_of_memory(total=2**20)
    gradients_of(policy.model, adora_recompute="all")
    with pytest.raises(torch.OutOfMemoryError):
        policy.recomputed_layers.run_with_retry(
            policy.train_micro_batch, snapshot_log=policy.metric_means.snapshot
        )
    assert policy.passes == 1


def test_gradients_that_no_pass_has_added_to_need_no_copy():
    """A snapshot restores changed gradients from its copies, and unchanged ones without any.

    Without room for a copy it only notices that a gradient has changed, and restores nothing.
    """
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    before = GradientSnapshots([weight], max_copied_bytes=0)
    assert before.restore()
    weight.grad += 1
    assert not before.restore()
    later = GradientSnapshots([weight], max_copied_bytes=weight.grad.nbytes)
    weight.grad += 1
    assert later.restore()
    assert weight.grad.tolist() == [2, 2, 2]
