"""The four views of one tiny model: taught to reason, made blind, and taught to read facts out
alone.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Features, Value
from transformers import AutoModelForImageTextToText, AutoProcessor

from adora_vl.builtin.processor import END_OF_TURN
from adora_vl.builtin.small_model import fit
from adora_vl.data.dataset import Row, schema, write_split
from adora_vl.data.prompts import SYSTEM_PROMPT, conversation_with_images
from adora_vl.evals import asking
from adora_vl.evals.inference.local import TransformersEngine
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.synthetic.generate import generate
from eval import command
from eval.compare import main as compare
from eval.geometry3k import BENCHMARK
from tests.support.launch import words_for

pytestmark = pytest.mark.slow


def triangles_with_facts(split: str, count: int) -> list[Row]:
    """Draw isosceles triangles whose column `facts` says the angle that the picture shows."""
    rows = generate(
        count,
        split=split,
        seed=9,
        families=("isosceles",),
        size=56,
    )
    return [{**row, "facts": f"apex {180 - 2 * int(row['answer'])}."} for row in rows]


def teach(
    model: Any, processor: Any, rows: list[Row], steps: int, answer: Callable[[Row], str]
) -> None:
    """Teach a model to answer, in turn from pictures and from their facts in words.

    `answer`: what it is to say to a row.
    """
    rng = random.Random(0)

    def loss_of(step: int) -> torch.Tensor:
        batch = rng.sample(rows, 16)
        image_inputs: dict[str, Any] = {}
        texts = [row["problem"] for row in batch]
        if step % 2:
            texts = [
                f"What the picture shows: {row['facts']}\n{text}"
                for row, text in zip(batch, texts, strict=True)
            ]
        else:
            image_inputs = {"images": [row["images"] for row in batch]}
        prompts = [
            conversation_with_images(text, len(image_inputs), SYSTEM_PROMPT) for text in texts
        ]
        prompt_texts = [
            processor.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            for prompt in prompts
        ]
        texts_with_answers = [
            f"{text}{answer(row)}{END_OF_TURN}"
            for text, row in zip(prompt_texts, batch, strict=True)
        ]
        inputs = processor(
            text=texts_with_answers,
            padding=True,
            padding_side="right",
            return_tensors="pt",
            **image_inputs,
        )
        prompt_inputs = processor(
            text=prompt_texts,
            padding=True,
            padding_side="right",
            return_tensors="pt",
            **image_inputs,
        )
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        for label, length in zip(labels, prompt_inputs["attention_mask"].sum(1), strict=True):
            label[:length] = -100
        loss: torch.Tensor = model(**inputs, labels=labels).loss
        return loss

    fit(model, loss_of, steps, 1e-3)


def test_each_model_is_called_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write_split(
        triangles_with_facts("test", 64),
        tmp_path / "data",
        "test",
        Features({**schema(), "facts": Value("string")}),
    )
    processor: Any = AutoProcessor.from_pretrained(PRETRAINED_FOLDER)
    model: Any = AutoModelForImageTextToText.from_pretrained(PRETRAINED_FOLDER, dtype=torch.float32)
    rows = triangles_with_facts("train", 400)
    # one learns to solve the problem, the other to say what it reads
    answer_by_model = {
        "able": lambda row: row["meta"]["solution"],
        "reads": lambda row: rf"\boxed{{{row['facts'][5:-1]}}}",
    }
    for name, answer in answer_by_model.items():
        teach(model, processor, rows, 200 if name == "able" else 40, answer)
        model.save_pretrained(tmp_path / name)
        processor.save_pretrained(tmp_path / name)

    def build_blind_engine(settings: Any) -> TransformersEngine:
        engine = TransformersEngine(settings)
        engine._model.model.visual.merger.register_forward_hook(
            lambda module, args, output: torch.zeros_like(output)
        )
        return engine

    verdicts = {}
    for name, folder in (
        ("able", "able"),
        ("blind", "able"),
        ("reads", "reads"),
    ):
        monkeypatch.setattr(
            asking, "build_engine", build_blind_engine if name == "blind" else TransformersEngine
        )
        words = [
            "run",
            *words_for(engine="transformers", model=tmp_path / folder, data=tmp_path / "data"),
        ]
        for view in ("image", "text", "both", "blank"):
            output = str(tmp_path / name / view)
            code = command.main(
                BENCHMARK, [*words, "--max-tokens", "40", "--view", view, "--output", output]
            )
            assert code == 0
        capsys.readouterr()
        assert (
            compare([str(tmp_path / name / view) for view in ("image", "text", "both", "blank")])
            == 0
        )
        verdicts[name] = capsys.readouterr().out
    assert "it sees and it reasons" in verdicts["able"], verdicts["able"]
    assert "it reasons and does not see" in verdicts["blind"], verdicts["blind"]
    assert "it does not reason" in verdicts["reads"], verdicts["reads"]
