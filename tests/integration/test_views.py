"""A benchmark shows each problem in four views: as image, as text, as both, and with a blank image.

From the scores of a model in each, the comparison says whether it sees and whether it reasons. The
tests teach tiny models to do both, make one blind, and teach one to read facts alone.
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
from tests.support.launch import cli_arguments

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
        # the loss is over the answer alone: -100 leaves out padding and prompt
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        for label, length in zip(labels, prompt_inputs["attention_mask"].sum(1), strict=True):
            label[:length] = -100
        loss: torch.Tensor = model(**inputs, labels=labels).loss
        return loss

    fit(model, loss_of, steps, 1e-3)


@pytest.fixture(scope="module")
def folder_with_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write test problems into `data`, and two models that were taught.

    The model in `able` has learned to solve the problem, and that in `reads` to say what it reads.
    """
    folder = tmp_path_factory.mktemp("views")
    write_split(
        triangles_with_facts("test", 64),
        folder / "data",
        "test",
        Features({**schema(), "facts": Value("string")}),
    )
    processor: Any = AutoProcessor.from_pretrained(PRETRAINED_FOLDER)
    model: Any = AutoModelForImageTextToText.from_pretrained(PRETRAINED_FOLDER, dtype=torch.float32)
    rows = triangles_with_facts("train", 400)
    teach(model, processor, rows, steps=200, answer=lambda row: row["meta"]["solution"])
    model.save_pretrained(folder / "able")
    processor.save_pretrained(folder / "able")

    def say_angle(row: Row) -> str:
        angle = row["facts"].removeprefix("apex ").removesuffix(".")
        return rf"\boxed{{{angle}}}"

    teach(model, processor, rows, steps=40, answer=say_angle)
    model.save_pretrained(folder / "reads")
    processor.save_pretrained(folder / "reads")
    return folder


def build_blind_engine(settings: Any) -> TransformersEngine:
    """Build an engine whose model gets zeros in place of what its vision tower sees."""
    engine = TransformersEngine(settings)
    engine._model.model.visual.merger.register_forward_hook(
        lambda module, args, output: torch.zeros_like(output)
    )
    return engine


@pytest.mark.parametrize(
    ("model_name", "build_engine", "verdict"),
    [
        pytest.param("able", TransformersEngine, "it sees and it reasons", id="able"),
        pytest.param("able", build_blind_engine, "it reasons and does not see", id="blind"),
        pytest.param("reads", TransformersEngine, "it does not reason", id="reads"),
    ],
)
def test_each_model_is_called_what_it_is(
    folder_with_models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    model_name: str,
    build_engine: Callable[[Any], TransformersEngine],
    verdict: str,
) -> None:
    """It is asked in each view, and the comparison of the views says what it can do."""
    monkeypatch.setattr(asking, "build_engine", build_engine)
    model = folder_with_models / model_name
    argv = [
        "run",
        *cli_arguments(engine="transformers", model=model, data=folder_with_models / "data"),
    ]
    outputs = []

    for view in ("image", "text", "both", "blank"):
        output = str(tmp_path / view)
        arguments = [*argv, "--max-tokens", "40", *cli_arguments(view=view, output=output)]
        assert command.main(BENCHMARK, arguments) == 0
        outputs.append(output)
    capsys.readouterr()
    assert compare(outputs) == 0
    comparison = capsys.readouterr().out
    assert verdict in comparison, comparison
