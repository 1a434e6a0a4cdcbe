"""Answers of Transformers on this machine, for folders of models as people have them."""

import json
import shutil
from pathlib import Path

from adora_vl.data.prompts import conversation_with_images
from adora_vl.evals.inference.local import TransformersEngine
from adora_vl.evals.inference.requests import AnswerEngineSettings, AnswerRequest
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.synthetic.generate import generate
from adora_vl.utils.openai_client import Reply


def test_an_answer_ends_at_the_end_token_of_the_tokenizer_as_in_a_training(tmp_path: Path) -> None:
    """An answer is the same where the model's generation config has another end token.

    Models that were fine-tuned for chats often keep the config of their base model. Here it ends
    an answer at the padding token.
    """
    folder = tmp_path / "model"
    shutil.copytree(PRETRAINED_FOLDER, folder)
    config_file = folder / "generation_config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**config, "eos_token_id": config["pad_token_id"]}))
    (row,) = generate(1, split="test", seed=1)
    images = list(row["images"])
    request = AnswerRequest(
        messages=conversation_with_images(row["problem"], len(images)), images=images
    )

    replies = []
    for model in (PRETRAINED_FOLDER, folder):
        settings = AnswerEngineSettings(model=str(model), engine="transformers", max_tokens=64)
        replies += TransformersEngine(settings).generate([request])

    assert isinstance(replies[0], Reply)
    assert replies[0].finish_reason == "stop"
    assert replies[1] == replies[0]
