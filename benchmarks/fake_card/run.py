"""Builds the real trainer of a config on the card, with drawn images and answers of given lengths,
and trains steps.
"""

import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.fake_card.card import Card
from benchmarks.fake_card.device import CARD, answer_as_a_card
from benchmarks.fake_card.kernels import KernelLaunch, bits, gemm_4bit, quantise, use_card_attention

import torch  # isort: skip
import yaml
from datasets import Dataset
from PIL import Image
from transformers import AutoConfig, AutoProcessor, BitsAndBytesConfig, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer, get_peft_config, get_quantization_config
from trl.kernels import chunked_logprob
from trl.trainer import grpo_trainer

from adora_vl import model_setup
from adora_vl.config.schema import parse
from adora_vl.config.sharding import Sharding
from adora_vl.data.dataset import schema
from adora_vl.data.prompt_lengths import PromptLengths
from adora_vl.data.prompts import conversation
from adora_vl.models.families import freeze
from adora_vl.models.four_bit import UNQUANTISED_MODULES, four_bit_parameter_bytes
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.models.shape import SHAPES_FOLDER, model_shape
from adora_vl.planning.memory import CUDA_CONTEXT_BYTES, Prediction, Setup, predict_memory
from adora_vl.planning.plan import make_setup
from adora_vl.preflight import check_model, facts
from adora_vl.synthetic.generate import generate
from adora_vl.trainer import AdoraGRPOTrainer
from benchmarks.recorded_answers import RecordedAnswers

Way = Literal["ours", "stock"]
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
    way: Way = "ours"
    layers: int | None = None  # of the language model; None: all
    blocks: int | None = None  # of the vision tower
    lengths: Sequence[
        int
    ] = ()  # of the rollouts of a group, in tokens; (): all as long as the config allows
    groups: int = 2  # of an optimizer step
    updates: int = 0  # optimizer steps; 0: 2, or as many as learn from one generation
    updates_per_generation: int = 0  # optimizer steps that learn from one; 0: the recipe's
    without_signal: float = 0.0  # share of the groups whose answers are all right
    image_tokens: int = 256
    text_tokens: int = 450
    words: Sequence[str] = ()  # further keys


def with_updates(card_run: CardRun) -> CardRun:
    """Return the run with the recipe's updates a generation unless it has a number of its own."""
    keys = yaml.safe_load(Path(card_run.config).read_text(encoding="utf-8"))
    accumulated = keys.get("gradient_accumulation_steps", 1)
    recipes_updates = max(1, keys.get("steps_per_generation", accumulated) // accumulated)
    per_generation = card_run.updates_per_generation or recipes_updates
    updates = card_run.updates or max(2, per_generation)
    return replace(card_run, updates=updates, updates_per_generation=per_generation)


@dataclass
class CardRunResult:
    """The figures of a run on the simulated card."""

    card_run: CardRun
    card: Card
    parameters: int = 0
    trained: int = 0
    prompt: int = 0  # tokens of the longest
    peaks: list[int] = field(default_factory=list)  # bytes of each micro-batch
    predicted: Prediction | None = None
    predicted_first: Prediction | None = None  # of an optimizer step's first micro-batch
    fault: str = ""  # what raised, with its last lines
    seconds: float = 0.0

    @property
    def peak(self) -> int:
        """Bytes while the policy learns."""
        return max(
            self.card.peaks[phase] for phase in ("check", "forward", "backward", "optimizer")
        )

    @property
    def predicted_peak(self) -> int:
        """The dry run's, without what the card does not pretend: context, fragmentation, the
        engine.
        """
        return _pretended(self.predicted)

    @property
    def micro_batches(self) -> int:
        return len(self.peaks)

    @property
    def generations(self) -> float:
        return self.card_run.updates / self.card_run.updates_per_generation

    @property
    def first_and_later(self) -> list[tuple[int, int]]:
        """Measured and predicted bytes of an optimizer step's first micro-batch, and of later ones,
        where the optimizer has its moments.
        """
        micro_batches_per_step = self.micro_batches // self.card_run.updates
        first_peaks: list[int] = []
        later_peaks: list[int] = []
        # In the first step the optimizer has no moments yet.
        for number, peak in enumerate(self.peaks[micro_batches_per_step:]):
            is_first = number % micro_batches_per_step == 0
            (first_peaks if is_first else later_peaks).append(peak)
        measured_and_predicted = []
        if first_peaks:
            measured_and_predicted.append((max(first_peaks), _pretended(self.predicted_first)))
        if later_peaks:
            measured_and_predicted.append((max(later_peaks), _pretended(self.predicted)))
        return measured_and_predicted


def _pretended(predicted: Prediction | None) -> int:
    assert predicted is not None
    parts = predicted.phases["forward and backward"]
    return sum(size for name, size in parts.items() if name not in _NOT_PRETENDED)


_NOT_PRETENDED = (
    "CUDA context",
    "fragmentation",
    "engine asleep",
    "engine weights",
    "engine workspace",
    "KV cache",
)


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
            # Whole groups without signal up to this one, and up to the one before.
            silent_before = int(group * without_signal)
            silent_so_far = int((group + 1) * without_signal)
            all_right = silent_so_far > silent_before
            rewards.append(1.0 if all_right else float(number % 2))
        return rewards

    return reward


def run(card_run: CardRun, folder: Path) -> CardRunResult:
    """Train on the card. What raises is in the result; nothing is written but into `folder`."""
    card_run = with_updates(card_run)
    card = Card()
    card.composed[bits.gemm_4bit.default] = gemm_4bit
    answer_as_a_card(card.synchronize, card.used)
    result = CardRunResult(card_run, card)
    began = time.perf_counter()
    with ExitStack() as inside:
        inside.enter_context(_patched(card))
        inside.enter_context(card)
        inside.enter_context(use_card_attention(card))
        try:
            with card.during("load"):
                trainer, config, model = _trainer(card_run, folder)
            _name_phases(card, trainer, result)
            with card.during("start"):
                trainer.train()
            result.prompt = trainer.vllm_generation.longest_prompt
            setup = _setup(
                card_run, config=config, model=model, folder=folder, prompt=result.prompt
            )
            room = torch.cuda.get_device_properties(CARD).total_memory - CUDA_CONTEXT_BYTES
            result.parameters = (
                setup.shape.total_parameters
            )  # of 4 bits a tensor has two in one number
            result.predicted = predict_memory(setup, room)
            result.predicted_first = predict_memory(replace(setup, micro_batches=1), room)
        except Exception as error:  # whatever it is, it is the result
            lines = traceback.format_exc().strip().splitlines()
            result.fault = "\n".join(
                [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", *lines[-8:-1]]
            )
    result.seconds = time.perf_counter() - began
    return result


def make_model_folder(folder: Path, published: str, layers: int | None, blocks: int | None) -> None:
    """Write a model folder of a published shape with the tiny model's tokenizer and processor.

    Its config gets the special tokens of the tiny model.
    """
    config = json.loads((SHAPES_FOLDER / published / "config.json").read_text(encoding="utf-8"))
    processor = AutoProcessor.from_pretrained(PRETRAINED_FOLDER)
    tokenizer = processor.tokenizer
    named = {
        "image": "image_pad",
        "video": "video_pad",
        "vision_start": "vision_start",
        "vision_end": "vision_end",
    }
    special = {
        f"{key}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for key, token in named.items()
    }
    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    text = config.get("text_config", config)
    config |= special if "vision_config" in config else {}
    for part in (config, text):
        part.update(ends)
    if layers:
        text.update({"num_hidden_layers": layers, "max_window_layers": layers})
        text.pop("layer_types", None)
    if blocks and "vision_config" in config:
        vision = config["vision_config"] | {"depth": blocks}
        for name, places in (
            ("fullatt_block_indexes", [blocks - 1]),
            ("deepstack_visual_indexes", None),
        ):
            if name in vision:
                vision[name] = places or list(range(min(blocks, len(vision[name]))))
        config["vision_config"] = vision
    if "vision_config" in config:
        processor.image_processor.patch_size = config["vision_config"]["patch_size"]
        processor.save_pretrained(folder)
    else:
        tokenizer.save_pretrained(folder)
        tokenizer_config = json.loads(
            (folder / "tokenizer_config.json").read_text(encoding="utf-8")
        )
        tokenizer_config.pop("processor_class", None)  # of the tiny model, which has images
        (folder / "tokenizer_config.json").write_text(
            json.dumps(tokenizer_config), encoding="utf-8"
        )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _problems(number: int, card_run: CardRun, *, images: bool, side: int) -> Dataset:
    """Return drawn problems with images and texts of the sizes of a run."""
    wide = max(1, round(card_run.image_tokens**0.5))
    size = (wide * side, max(1, round(card_run.image_tokens / wide)) * side)
    rows = list(generate(number, seed=5))
    for row in rows:
        row["images"] = (
            [image.resize(size, Image.Resampling.BICUBIC) for image in row["images"]]
            if images
            else []
        )
        row["problem"] += " ab" * max(0, card_run.text_tokens - 60)
    data = Dataset.from_list(rows, features=schema())
    data = data.add_column("prompt", [conversation(row["problem"]) for row in rows])
    return data if images else data.remove_columns("images")


def _trainer(card_run: CardRun, folder: Path) -> tuple[Any, Any, Any]:
    """Build the trainer of a run, and return it with its two configs."""
    keys = yaml.safe_load(Path(card_run.config).read_text(encoding="utf-8"))
    make_model_folder(
        folder / "model",
        published=keys["model_name_or_path"].split("/")[-1],
        layers=card_run.layers,
        blocks=card_run.blocks,
    )
    size = len(card_run.lengths) or keys["num_generations"]
    rows = keys["per_device_train_batch_size"] * size // keys["num_generations"]
    per_update = max(1, card_run.groups * size // rows)
    words = {
        "model_name_or_path": folder / "model",
        "output_dir": folder / "run",
        "save_strategy": "steps",
        "save_steps": card_run.updates,
        "report_to": "none",
        "logging_steps": 1,
        "max_steps": card_run.updates,
        "num_generations": size,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": per_update,
        "steps_per_generation": per_update * card_run.updates_per_generation,
        "adora_self_check": "false",
        "max_completion_length": max(card_run.lengths, default=keys["max_completion_length"]),
        "vllm_max_model_length": "null",
        "reward_weights": "null",
    }
    spelled = [word for key, value in words.items() for word in (f"--{key}", str(value))]
    _, config, model = parse(["--config", card_run.config, *spelled, *card_run.words])
    config.model_init_kwargs = {
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
    }
    if model.load_in_4bit:
        config.model_init_kwargs["quantization_config"] = get_quantization_config(model)
    config.adora_max_drift = None  # the answers are no engine's
    RecordedAnswers.lengths = card_run.lengths or [config.max_completion_length]
    shape = AutoConfig.from_pretrained(folder / "model")
    vision = getattr(shape, "vision_config", None)
    side = vision.patch_size * vision.spatial_merge_size if vision is not None else 28
    data = _problems(
        max(8, card_run.groups) * (card_run.updates + 1),
        card_run=card_run,
        images=vision is not None,
        side=side,
    )
    both = {
        "model": str(folder / "model"),
        "reward_funcs": [reward_of(size, card_run.without_signal)],
        "train_dataset": data,
        "peft_config": get_peft_config(model),
    }
    if card_run.way == "ours":
        return AdoraGRPOTrainer(args=config, **both), config, model
    fields = {field.name for field in dataclasses.fields(GRPOConfig) if field.init}
    values = {name: value for name, value in vars(config).items() if name in fields}
    for derived in ("generation_batch_size", "deepspeed_plugin", "world_size"):
        values.pop(derived, None)
    processor = AutoProcessor.from_pretrained(folder / "model")
    if vision is not None:
        processor.image_processor.size = {
            "shortest_edge": config.min_pixels,
            "longest_edge": config.max_pixels,
        }
    stock = GRPOTrainer(args=GRPOConfig(**values), processing_class=processor, **both)
    freeze(stock.model, config.adora_freeze)  # equal trained parameters
    return stock, config, model


def _setup(card_run: CardRun, config: Any, model: Any, folder: Path, prompt: int) -> Setup:
    """Return what the dry run predicts memory from."""
    peft = get_peft_config(model)
    shape = model_shape(
        AutoConfig.from_pretrained(folder / "model"),
        dtype=model.dtype,
        frozen=config.adora_freeze,
        peft_config=peft,
        four_bit_bytes=four_bit_parameter_bytes(model.use_bnb_nested_quant)
        if model.load_in_4bit
        else 0.0,
    )
    image = card_run.image_tokens if shape.vision else 0
    return make_setup(
        config,
        model=model,
        shape=shape,
        sharding=Sharding(),
        lengths=PromptLengths([""], [prompt], [image]),
    )


def _name_phases(card: Card, trainer: Any, result: CardRunResult) -> None:
    """Wrap the methods of a trainer, so that the card knows which phase it is in."""

    def around(
        holder: Any,
        method: str,
        phase: str,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        original = getattr(holder, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            with card.during(phase):
                done = original(*args, **kwargs)
            if after is not None:
                after()
            return done

        setattr(holder, method, wrapped)

    def begun() -> None:
        card.highest = card.live

    def counted() -> None:
        result.peaks.append(card.highest)

    create = trainer.create_optimizer

    def created(*args: Any, **kwargs: Any) -> Any:
        context = create(*args, **kwargs)
        around(trainer.optimizer, "step", "optimizer")
        return context

    trainer.create_optimizer = created
    around(trainer, "_prepare_inputs", "generation")
    around(trainer, method="compute_loss", phase="forward", before=begun)
    around(trainer.accelerator, method="backward", phase="backward", after=counted)
    around(trainer.accelerator, "clip_grad_norm_", "clip")
    around(trainer, "_save_checkpoint", "checkpoint")
    if result.card_run.way == "ours":
        around(trainer.parts.policy_pass.packed_forward, "_check", "check")  # once in a run
    result.trained = sum(
        parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad
    )


@contextmanager
def _patched(card: Card) -> Iterator[None]:
    """Inside, weights come from nowhere and go nowhere, rollouts are recorded, and Triton's kernels
    are counted.
    """

    def from_pretrained(
        cls: Any, /, name: Any, config: Any = None, dtype: Any = None, **kwargs: Any
    ) -> Any:
        config = config or AutoConfig.from_pretrained(name)
        torch_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.bfloat16
        attention = kwargs.get("attn_implementation")
        quantised = getattr(config, "quantization_config", None)
        with torch.device(CARD):
            model = cls._from_config(
                config,
                dtype=torch_dtype,
                **({"attn_implementation": attention} if attention else {}),
            )
            if quantised is not None:
                quantise(model, BitsAndBytesConfig(**quantised))
        return model

    def in_four_bit(name: str, revision: str | None, keys: Any) -> str:
        config = AutoConfig.from_pretrained(name)
        config.quantization_config = {
            **get_quantization_config(keys).to_dict(),
            "llm_int8_skip_modules": list(UNQUANTISED_MODULES),
        }
        config.save_pretrained(folder := f"{name}-4bit")
        return folder

    def saved(model: Any, folder: Any, *args: Any, **kwargs: Any) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)

    def written(values: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        Path(file).touch()

    replaced = [
        (PreTrainedModel, "from_pretrained", classmethod(from_pretrained)),
        (PreTrainedModel, "save_pretrained", saved),
        (torch, "save", written),
        (facts, "four_bit_folder", in_four_bit),
        (check_model, "check_weights", lambda *args: None),
        (
            check_model,
            "refuse_on_cpu",
            lambda *args: None,
        ),  # which asks the vLLM that is installed here
        (model_setup, "AdoraVLLMGeneration", RecordedAnswers),
        (grpo_trainer, "VLLMGeneration", RecordedAnswers),
        (chunked_logprob, "_forward_kernel", KernelLaunch(card, "TRL's head, forward")),
        (chunked_logprob, "_backward_kernel", KernelLaunch(card, "TRL's head, backward")),
        (chunked_logprob, "_TRITON_AVAILABLE", True),  # as beside a CUDA build
    ]
    before = [(holder, name, holder.__dict__[name]) for holder, name, _ in replaced]
    for holder, name, value in replaced:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)
