"""What a parity run looks at beside its updates, since its engine and its ranks are there anyway: the doctor's table,
answers of both engines of the evaluators, a LoRA adapter, and gradients of rows that lie on other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adora_vl.doctor.engine import Examination, examine
from adora_vl.doctor.probe import Prompts, difference, read_prompts, score
from adora_vl.doctor.result import as_json
from adora_vl.models.components import component_of
from adora_vl.prompts import conversation_with_images
from eval.chat import ChatProcessor
from eval.engines import AnswerEngineSettings, AnswerRequest, TransformersEngine, VLLMEngine

Rows = Sequence[dict[str, Any]]
TOKENS = 8  # of an answer, and of a completion whose gradients are compared


def doctor(trainer: Any, rows: Rows) -> list[dict[str, Any]]:
    """The lines of the doctor's table that need an engine, on mixed rows (with one, no, two and no images). It looks
    closer at the first row, which here has none.
    """
    merge = trainer.processing_class.image_processor.merge_size
    prompts = read_prompts(trainer, [rows[1], rows[0], rows[2], rows[0], rows[2]])
    return as_json(examine(Examination(trainer, prompts), merge))


def answers(trainer: Any, rows: Rows) -> dict[str, list[Any]]:
    """Greedy answers of the trainer's own vLLM, and of Transformers to the model that was saved."""
    folder = f"{trainer.args.output_dir}/saved"
    trainer.save_model(folder)
    requests = [
        AnswerRequest(conversation_with_images(row["problem"], len(row["images"])), list(row["images"])) for row in rows
    ]
    other = TransformersEngine(AnswerEngineSettings(folder, "transformers", max_tokens=TOKENS))
    with trainer.vllm_generation.lent() as llm:
        engine = VLLMEngine(ChatProcessor(folder), llm, max_tokens=TOKENS, temperature=0.0, batch_size=len(requests))
        return {
            "vllm": list(map(vars, engine.generate(requests))),
            "transformers": list(map(vars, other.generate(requests))),
        }


def lora(trainer: Any, rows: Rows) -> dict[str, float]:
    """In nats: how far an adapter in all parts of the model moves the policy, and how far the engine is from it then.

    The trainer keeps the adapter.
    """
    from peft import LoraConfig, get_peft_model

    examination = Examination(trainer, read_prompts(trainer, rows))
    _, rollouts, before_BC = examination.drift("before the adapter")
    torch.manual_seed(0)
    adapted = get_peft_model(trainer.model, LoraConfig(r=4, target_modules=["q_proj", "down_proj", "linear_fc2"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    trainer.model = trainer.vllm_generation.model = adapted
    moved = difference(trainer, score(trainer, examination.prompts, rollouts), before_BC, rollouts.mask_BC)
    trainer.vllm_generation.sync_weights()
    gap, _, _ = examination.drift("with the adapter")
    return {"moved": moved.mean, "gap": gap.largest}


def ranks(trainer: Any, rows: Rows) -> dict[str, float]:
    """By part of the model: how far the gradients of two ZeRO-3 processes are from those of the same rows dealt out in
    another way, relative to a parameter's norm. In one way the first process has all rows with images, in the other
    both have one. `norm_vision_tower`: the norm of all gradients there.
    """
    rank = trainer.accelerator.process_index
    with_images = [row for row in rows if row["images"]][:2]
    without = [{**row, "images": []} for row in rows[:2]]
    apart = _gradients(trainer, [with_images, without][rank], [0, 1] if rank == 0 else [2, 3])
    dealt = _gradients(trainer, [with_images[rank], without[rank]], [rank, rank + 2])
    assert apart.keys() == dealt.keys()
    scale = max(gradient.norm().item() for gradient in dealt.values())
    gaps: dict[str, float] = {}
    for name, gradient in dealt.items():
        part = component_of(name)
        gap = (apart[name] - gradient).norm().item() / max(gradient.norm().item(), 1e-3 * scale)
        gaps[part] = max(gaps.get(part, 0.0), gap)
    seen = [gradient.norm() for name, gradient in dealt.items() if component_of(name) == "vision_tower"]
    return {**gaps, "norm_vision_tower": torch.stack(seen).norm().item()}


def _gradients(trainer: Any, rows: Rows, places: Sequence[int]) -> dict[str, Tensor]:
    """Of a weighted sum of probabilities over all ranks. Each row is two rollouts; `places`: its number among all rows,
    from which its completions and weights come.
    """
    from deepspeed.utils import safe_get_full_grad

    prompts = read_prompts(trainer, [row for row in rows for _ in range(2)])
    made = [torch.Generator().manual_seed(2 * place + twin) for place in places for twin in range(2)]
    vocabulary = len(trainer._tokenizer)
    completion_BC = torch.stack([torch.randint(100, vocabulary - 50, (TOKENS,), generator=one) for one in made])
    weights_BC = torch.stack([torch.rand(TOKENS, generator=one) + 0.5 for one in made])
    longest = max(map(len, prompts.ids))
    ids_BP = torch.tensor([[trainer._tokenizer.pad_token_id] * (longest - len(ids)) + ids for ids in prompts.ids])
    mask_BP = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts.ids])
    fields = _as_references(trainer, prompts)
    if "mm_token_type_ids" in fields:
        fields["mm_token_type_ids"] = torch.cat([fields["mm_token_type_ids"], torch.zeros_like(completion_BC)], dim=1)
    engine = trainer.model_wrapped
    engine.optimizer.zero_grad()
    logps_BC, _, _ = trainer._get_per_token_logps_and_entropies(
        engine,
        torch.cat([ids_BP, completion_BC], dim=1),
        torch.cat([mask_BP, torch.ones_like(completion_BC)], dim=1),
        TOKENS,
        num_images=prompts.num_images,
        **fields,
    )
    engine.backward((logps_BC * weights_BC).sum())
    trained = [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    return {name: safe_get_full_grad(parameter).detach().clone() for name, parameter in trained}


def _as_references(trainer: Any, prompts: Prompts) -> dict[str, Tensor]:
    """The fields as a training step has them: each distinct image once in a new bank, references in its place."""
    bank, fields = trainer.images.banks.new("train"), dict(prompts.fields)
    if "pixel_values" in fields:
        grids = fields["image_grid_thw"]
        images = torch.split(fields["pixel_values"], grids.prod(dim=-1).tolist())
        keys = [str(hash(image.numpy().tobytes())) for image in images]
        held = [bank.hold(key, image, grid) for key, image, grid in zip(keys, images, grids, strict=True)]
        fields["pixel_values"] = torch.cat(held)
    return fields


Look = Callable[[Any, Rows], Any]
BEFORE: dict[str, Look] = {"doctor": doctor, "answers": answers}  # the updates; they change nothing
AFTER: dict[str, Look] = {"lora": lora, "ranks": ranks}
