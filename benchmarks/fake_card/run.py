"""Builds the real trainer of a config on the simulated card, and trains steps.

Images are drawn, and answers are recorded ones of chosen lengths.
"""

import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.fake_card.card import Card
from benchmarks.fake_card.device import CARD, answer_as_a_card
from benchmarks.fake_card.kernels import KernelLaunch, bits, gemm_4bit, quantise, use_card_attention

import torch  # isort: skip
import yaml
from transformers import (
    AutoConfig,
    AutoProcessor,
    BitsAndBytesConfig,
    PreTrainedModel,
)
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config, get_quantization_config
from trl.kernels import chunked_logprob
from trl.trainer import grpo_trainer

from adora_vl import AdoraGRPOConfig, model_setup
from adora_vl.config.command import parse_command
from adora_vl.config.schema import build_configs
from adora_vl.config.sharding import Sharding
from adora_vl.data.prompt_lengths import PromptLengths
from adora_vl.models.families import freeze
from adora_vl.models.four_bit import UNQUANTISED_MODULES, four_bit_parameter_bytes
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.models.shape import SHAPES_FOLDER, model_shape
from adora_vl.planning.memory import (
    CUDA_CONTEXT_BYTES,
    MemoryPrediction,
    MemorySetup,
    predict_memory,
)
from adora_vl.planning.plan import build_memory_setup
from adora_vl.preflight import check_model, resolved_run
from adora_vl.trainer import AdoraGRPOTrainer
from benchmarks.recorded_answers import RecordedAnswers
from benchmarks.sized_inputs import image_size, set_special_tokens, sized_problems

Way = Literal["ours", "stock"]
# What a trainer does, as the card counts it. `check` is the one-time check of the packed pass.
PHASES = (
    "load",
    "start",
    "generation",
    "check",
    "forward",
    "backward",
    "clip",
    "optimizer",
    "checkpoint",
)


@dataclass(frozen=True)
class CardRun:
    """What the card is to run."""

    config: str  # the path of a training config
    way: Way = "ours"  # `stock`: TRL's own trainer
    layers: int | None = None  # of the language model; None: all
    blocks: int | None = None  # of the vision tower; None: all
    # Tokens of each rollout of a group; (): all as many as the config allows
    lengths: Sequence[int] = ()
    groups: int = 2  # of an optimizer step
    updates: int = 0  # optimizer steps; 0: 2, or as many as learn from one generation
    updates_per_generation: int = 0  # optimizer steps that learn from one; 0: the recipe's
    without_signal: float = 0.0  # share of the groups whose answers are all right
    image_tokens: int = 256  # of a prompt
    text_tokens: int = 450  # of a prompt, about
    words: Sequence[str] = ()  # further words of the training command


def with_updates(card_run: CardRun) -> CardRun:
    """Return the run with its numbers of updates filled in, from the recipe where they are 0."""
    keys = yaml.safe_load(Path(card_run.config).read_text(encoding="utf-8"))
    accumulated = keys.get("gradient_accumulation_steps", 1)
    updates_of_recipe = max(1, keys.get("steps_per_generation", accumulated) // accumulated)
    per_generation = card_run.updates_per_generation or updates_of_recipe
    updates = card_run.updates or max(2, per_generation)
    return replace(card_run, updates=updates, updates_per_generation=per_generation)


@dataclass
class CardRunResult:
    """The figures of a run on the simulated card."""

    card_run: CardRun
    card: Card
    parameters: int = 0  # of the model
    trained: int = 0  # how many parameters are trained
    prompt: int = 0  # tokens of the longest prompt
    peaks: list[int] = field(default_factory=list)  # bytes of each micro-batch
    # The memory that the dry run predicts for a micro-batch; None where the run has failed.
    predicted: MemoryPrediction | None = None
    fault: str = ""  # the error that ended the run, with its last lines
    seconds: float = 0.0  # that the simulation took

    @property
    def peak(self) -> int:
        """The most bytes that are held while the policy learns."""
        return max(
            self.card.peaks[phase] for phase in ("check", "forward", "backward", "optimizer")
        )

    @property
    def predicted_peak(self) -> int:
        """The bytes that the dry run predicts, without what the card does not simulate."""
        return _simulated_bytes(self.predicted)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the run has learned from."""
        return len(self.peaks)

    @property
    def generations(self) -> float:
        """How many generations the run has sampled."""
        return self.card_run.updates / self.card_run.updates_per_generation

    @property
    def first_and_later(self) -> list[int]:
        """The peak bytes of an optimizer step's first micro-batch, and of later ones if there are.

        Only steps from the second on count: in the first one the optimizer has no moments yet.
        """
        micro_batches_per_step = self.micro_batches // self.card_run.updates
        first_peaks: list[int] = []
        later_peaks: list[int] = []
        for number, peak in enumerate(self.peaks[micro_batches_per_step:]):
            if number % micro_batches_per_step == 0:
                first_peaks.append(peak)
            else:
                later_peaks.append(peak)
        return [max(peaks) for peaks in (first_peaks, later_peaks) if peaks]


_DRAWN_TEXT_TOKENS = 60  # about how many tokens the text of a drawn problem has
# Parts of the dry run's prediction that the card does not simulate.
_NOT_SIMULATED = (
    "CUDA context",
    "fragmentation",
    "engine asleep",
    "engine weights",
    "engine workspace",
    "KV cache",
)


def _simulated_bytes(predicted: MemoryPrediction | None) -> int:
    """Return the predicted bytes of forward and backward, as far as the card simulates them."""
    assert predicted is not None
    parts = predicted.phases["forward and backward"]
    return sum(size for name, size in parts.items() if name not in _NOT_SIMULATED)


def reward_of(group_size: int, without_signal: float) -> Callable[..., list[float]]:
    """Return a reward that leaves a share of the groups without signal.

    In the others every second answer is right.

    Args:
        group_size: rollouts of a group.
        without_signal: the share of groups whose answers are all right, spread evenly.
    """

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        """Reward the rollouts of a generation, group by group."""
        rewards = []
        for number in range(len(completions)):
            group = number // group_size
            # How many groups without signal there are before this one, and with it. With a share of
            # 0.5 the counts after groups 0, 1, 2 and 3 are 0, 1, 1 and 2, so groups 1 and 3 have
            # no signal.
            silent_before = int(group * without_signal)
            silent_so_far = int((group + 1) * without_signal)
            all_right = silent_so_far > silent_before
            rewards.append(1.0 if all_right else float(number % 2))
        return rewards

    return reward


def run(card_run: CardRun, folder: Path) -> CardRunResult:
    """Train on the card, and return what it has counted.

    An error of the training becomes the `fault` of the result. Nothing is written outside of
    `folder`.
    """
    card_run = with_updates(card_run)
    card = Card()
    card.composed[bits.gemm_4bit.default] = gemm_4bit
    answer_as_a_card(card.synchronize, card.used)
    result = CardRunResult(card_run, card)
    started_at = time.perf_counter()
    with _without_weights_and_files(card), card, use_card_attention(card):
        try:
            _train(result, folder)
        except Exception as error:  # whatever it is, it is the result
            message = " ".join(str(error).split())[:300]
            lines = traceback.format_exc().strip().splitlines()
            result.fault = "\n".join([f"{type(error).__name__}: {message}", *lines[-8:-1]])
    result.seconds = time.perf_counter() - started_at
    return result


def _train(result: CardRunResult, folder: Path) -> None:
    """Build a run's trainer, train, and write what was measured and predicted to its result."""
    card = result.card
    with card.during("load"):
        trainer, config, model = _build_trainer(result.card_run, folder)
    _name_phases(card, trainer, result)
    with card.during("start"):
        trainer.train()
    result.prompt = trainer.vllm_generation.longest_prompt
    setup = _setup(result.card_run, config=config, model=model, folder=folder, prompt=result.prompt)
    memory = torch.cuda.get_device_properties(CARD).total_memory - CUDA_CONTEXT_BYTES
    # Not counted on the model: a tensor in 4 bits has two parameters in one number.
    result.parameters = setup.shape.total_parameters
    result.predicted = predict_memory(setup, memory)


def make_model_folder(folder: Path, published: str, layers: int | None, blocks: int | None) -> None:
    """Write a model folder of a published shape with the tiny model's tokenizer and processor.

    Args:
        folder: where to write it.
        published: the name of a folder of published shapes, such as `Qwen2.5-VL-3B-Instruct`.
        layers: of the language model; None: all.
        blocks: of the vision tower; None: all.
    """
    config = json.loads((SHAPES_FOLDER / published / "config.json").read_text(encoding="utf-8"))
    processor = AutoProcessor.from_pretrained(PRETRAINED_FOLDER)
    has_vision = "vision_config" in config
    set_special_tokens(config, processor.tokenizer)
    if layers:
        text_config = config.get("text_config", config)
        text_config["num_hidden_layers"] = layers
        text_config["max_window_layers"] = layers
        text_config.pop("layer_types", None)
    if blocks and has_vision:
        _cut_vision_tower(config["vision_config"], blocks)
    if has_vision:
        processor.image_processor.patch_size = config["vision_config"]["patch_size"]
        processor.save_pretrained(folder)
    else:
        processor.tokenizer.save_pretrained(folder)
        tokenizer_file = folder / "tokenizer_config.json"
        tokenizer_config = json.loads(tokenizer_file.read_text(encoding="utf-8"))
        # The tiny model's, which has images
        tokenizer_config.pop("processor_class", None)
        tokenizer_file.write_text(json.dumps(tokenizer_config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _cut_vision_tower(vision_config: dict[str, Any], blocks: int) -> None:
    """Leave only `blocks` blocks in the config of a vision tower."""
    vision_config["depth"] = blocks
    if "fullatt_block_indexes" in vision_config:
        vision_config["fullatt_block_indexes"] = [blocks - 1]
    deepstack_blocks = vision_config.get("deepstack_visual_indexes")
    if deepstack_blocks is not None:
        kept_blocks = min(blocks, len(deepstack_blocks))
        vision_config["deepstack_visual_indexes"] = list(range(kept_blocks))


def _build_trainer(card_run: CardRun, folder: Path) -> tuple[Any, AdoraGRPOConfig, ModelConfig]:
    """Build the trainer of a run, and return it with the two configs of the command."""
    config, model = _parse_config(card_run, folder)
    shape = AutoConfig.from_pretrained(folder / "model")
    vision = getattr(shape, "vision_config", None)
    size = None
    if vision is not None:
        size = image_size(card_run.image_tokens, vision.patch_size * vision.spatial_merge_size)
    problems = sized_problems(
        max(8, card_run.groups) * (card_run.updates + 1),
        size,
        further_words=max(0, card_run.text_tokens - _DRAWN_TEXT_TOKENS),
    )
    arguments = {
        "model": str(folder / "model"),
        "reward_funcs": [reward_of(config.num_generations, card_run.without_signal)],
        "train_dataset": problems,
        "peft_config": get_peft_config(model),
    }
    RecordedAnswers.lengths = card_run.lengths or [config.max_completion_length]
    if card_run.way == "ours":
        return AdoraGRPOTrainer(args=config, **arguments), config, model
    processor = AutoProcessor.from_pretrained(folder / "model")
    if vision is not None:
        processor.image_processor.size = {
            "shortest_edge": config.min_pixels,
            "longest_edge": config.max_pixels,
        }
    trainer = GRPOTrainer(args=_stock_config(config), processing_class=processor, **arguments)
    # Stock TRL cannot freeze parts. Both ways are to train the same parameters.
    freeze(trainer.model, config.adora_freeze)
    return trainer, config, model


def _parse_config(card_run: CardRun, folder: Path) -> tuple[AdoraGRPOConfig, ModelConfig]:
    """Write the model folder of a run, and read the recipe with the sizes of the run.

    A recipe with 2 groups in a micro-batch keeps 2 groups, also where the run has smaller groups.
    """
    keys = yaml.safe_load(Path(card_run.config).read_text(encoding="utf-8"))
    make_model_folder(
        folder / "model",
        published=keys["model_name_or_path"].split("/")[-1],
        layers=card_run.layers,
        blocks=card_run.blocks,
    )
    group_size = len(card_run.lengths) or keys["num_generations"]
    # As many groups in a micro-batch as the recipe has.
    rows = keys["per_device_train_batch_size"] * group_size // keys["num_generations"]
    micro_batches = max(1, card_run.groups * group_size // rows)
    overrides = {
        "model_name_or_path": folder / "model",
        "output_dir": folder / "run",
        "save_strategy": "steps",
        "save_steps": card_run.updates,
        "report_to": "none",
        "logging_steps": 1,
        "max_steps": card_run.updates,
        "num_generations": group_size,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_generation": micro_batches * card_run.updates_per_generation,
        "adora_self_check": "false",
        "max_completion_length": max(card_run.lengths, default=keys["max_completion_length"]),
        "vllm_max_model_length": "null",
        "reward_weights": "null",
    }
    words = ["--config", card_run.config]
    for key, value in overrides.items():
        words += [f"--{key}", str(value)]
    _, config, model = build_configs(parse_command([*words, *card_run.words]))
    config.model_init_kwargs = {
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
    }
    if model.load_in_4bit:
        config.model_init_kwargs["quantization_config"] = get_quantization_config(model)
    config.adora_max_drift = None  # the answers are no engine's
    return config, model


def _stock_config(config: AdoraGRPOConfig) -> GRPOConfig:
    """Return the keys of a config that stock TRL has."""
    names = {field.name for field in dataclasses.fields(GRPOConfig) if field.init}
    # TRL derives these from the others.
    names -= {"generation_batch_size", "deepspeed_plugin", "world_size"}
    return GRPOConfig(**{name: value for name, value in vars(config).items() if name in names})


def _setup(
    card_run: CardRun, config: AdoraGRPOConfig, model: ModelConfig, folder: Path, prompt: int
) -> MemorySetup:
    """Return what the dry run predicts memory from.

    `prompt`: tokens of the longest prompt.
    """
    bytes_per_four_bit_parameter = 0.0
    if model.load_in_4bit:
        bytes_per_four_bit_parameter = four_bit_parameter_bytes(model.use_bnb_nested_quant)
    shape = model_shape(
        AutoConfig.from_pretrained(folder / "model"),
        dtype=model.dtype,
        frozen=config.adora_freeze,
        peft_config=get_peft_config(model),
        bytes_per_four_bit_parameter=bytes_per_four_bit_parameter,
    )
    image_tokens = card_run.image_tokens if shape.vision else 0
    return build_memory_setup(
        config,
        model=model,
        shape=shape,
        sharding=Sharding(),
        lengths=PromptLengths([""], [prompt], [image_tokens]),
    )


def _name_phases(card: Card, trainer: Any, result: CardRunResult) -> None:
    """Wrap the methods of a trainer, so that the card knows which phase it is in.

    The bytes of each micro-batch are written to `result.peaks`: the most that were held from the
    beginning of its forward pass to the end of its backward pass.
    """

    def start_measuring() -> None:
        card.highest = card.live

    def note_peak() -> None:
        result.peaks.append(card.highest)

    create_optimizer = trainer.create_optimizer

    def create_named_optimizer(*args: Any, **kwargs: Any) -> Any:
        returned = create_optimizer(*args, **kwargs)
        _wrap_method(trainer.optimizer, "step", card, "optimizer")
        return returned

    trainer.create_optimizer = create_named_optimizer
    _wrap_method(trainer, "_prepare_inputs", card, "generation")
    _wrap_method(trainer, "compute_loss", card, "forward", before=start_measuring)
    _wrap_method(trainer.accelerator, "backward", card, "backward", after=note_peak)
    _wrap_method(trainer.accelerator, "clip_grad_norm_", card, "clip")
    _wrap_method(trainer, "_save_checkpoint", card, "checkpoint")
    if result.card_run.way == "ours":
        _wrap_method(trainer.parts.policy_pass.packed_forward, "_check", card, "check")
    result.trained = sum(
        parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad
    )


def _wrap_method(
    holder: Any,
    name: str,
    card: Card,
    phase: str,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Let the card count what a method of an object does under a phase.

    `before` and `after` are called around each call of the method.
    """
    method = getattr(holder, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        with card.during(phase):
            returned = method(*args, **kwargs)
        after()
        return returned

    setattr(holder, name, wrapped)


@contextmanager
def _without_weights_and_files(card: Card) -> Iterator[None]:
    """Replace what cannot work on a card that is not there, inside the block.

    Models get weights without values and are not saved, rollouts are recorded ones, and the
    Triton kernels of TRL's head are counted in place of being launched.
    """
    replacements: list[tuple[Any, str, Any]] = [
        (PreTrainedModel, "from_pretrained", classmethod(_model_without_values)),
        (PreTrainedModel, "save_pretrained", _make_folder),
        (torch, "save", _touch_file),
        (resolved_run, "four_bit_folder", _four_bit_folder),
        (check_model, "check_weights", lambda *args: None),
        # It asks the vLLM that is installed here, which is one for CPUs.
        (check_model, "refuse_on_cpu", lambda *args: None),
        (model_setup, "AdoraVLLMGeneration", RecordedAnswers),
        (grpo_trainer, "VLLMGeneration", RecordedAnswers),
        (chunked_logprob, "_forward_kernel", KernelLaunch(card, "TRL's head, forward")),
        (chunked_logprob, "_backward_kernel", KernelLaunch(card, "TRL's head, backward")),
        (chunked_logprob, "_TRITON_AVAILABLE", True),  # as with a CUDA build
    ]
    originals = [(holder, name, holder.__dict__[name]) for holder, name, _ in replacements]
    for holder, name, value in replacements:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, name, value in originals:
            setattr(holder, name, value)


def _model_without_values(
    cls: Any, /, name: Any, config: Any = None, dtype: Any = None, **kwargs: Any
) -> Any:
    """Build a model on the card, as `from_pretrained` would load it; its weights have no values."""
    config = config or AutoConfig.from_pretrained(name)
    torch_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.bfloat16
    settings = {"dtype": torch_dtype}
    if kwargs.get("attn_implementation"):
        settings["attn_implementation"] = kwargs["attn_implementation"]
    quantization = getattr(config, "quantization_config", None)
    with torch.device(CARD):
        model = cls._from_config(config, **settings)
        if quantization is not None:
            quantise(model, BitsAndBytesConfig(**quantization))
    return model


def _four_bit_folder(name: str, revision: str | None, keys: ModelConfig) -> str:
    """Write a folder with the config of the model in 4 bits, and return it."""
    config = AutoConfig.from_pretrained(name)
    config.quantization_config = {
        **get_quantization_config(keys).to_dict(),
        "llm_int8_skip_modules": list(UNQUANTISED_MODULES),
    }
    folder = f"{name}-4bit"
    config.save_pretrained(folder)
    return folder


def _make_folder(model: PreTrainedModel, folder: Any, *args: Any, **kwargs: Any) -> None:
    """Save nothing of a model but an empty folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)


def _touch_file(values: object, file: Any, *args: Any, **kwargs: Any) -> None:
    """Save nothing but an empty file."""
    Path(file).touch()
