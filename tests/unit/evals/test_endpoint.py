"""What a server is asked by `--engine openai`."""

import pytest

from adora_vl.evals.inference.endpoint import EndpointEngine
from adora_vl.evals.inference.requests import AnswerEngineSettings, AnswerRequest
from adora_vl.utils.errors import UserError
from adora_vl.utils.openai_client import Endpoint, Reply
from tests.support.endpoint_server import completion_reply

NEUTRAL_SAMPLING_FIELDS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize(
    "models, sampling",  # what serves each model by the server's list, and the fields it is sent
    [
        # Their defaults are those of the model's generation config, such as a penalty of 1.05.
        ({"qwen": "vllm"}, NEUTRAL_SAMPLING_FIELDS),
        ({"other": "someone", "qwen": "sglang"}, NEUTRAL_SAMPLING_FIELDS),
        # OpenAI itself refuses fields that it does not have.
        ({"qwen": "openai"}, {}),
        ({"other": "vllm"}, {}),
        ({}, {}),
    ],
)
def test_a_server_that_samples_by_the_models_own_config_is_told_not_to(
    start_server, models, sampling
) -> None:
    """A server that samples by the model's own config is sent plain sampling fields, others none.

    Such are vLLM and SGLang, where the server's list says that one of them serves the model.
    """
    server = start_server(lambda body, call: completion_reply("5"))
    server.models = models
    settings = AnswerEngineSettings(
        model="qwen", engine="openai", max_tokens=8, endpoint=Endpoint(server.url, "qwen")
    )
    engine = EndpointEngine(settings)

    (reply,) = engine.generate([AnswerRequest([{"role": "user", "content": "2 + 3?"}], [])])

    assert isinstance(reply, Reply)
    assert reply.text == "5"
    (request,) = server.requests
    sampling_fields = {
        name: value for name, value in request.items() if name in NEUTRAL_SAMPLING_FIELDS
    }
    assert sampling_fields == sampling


def engine_at(server, model: str = "qwen") -> EndpointEngine:
    """Return the engine `openai` for a model on a server."""
    endpoint = Endpoint(server.url, model)
    return EndpointEngine(
        AnswerEngineSettings(model=model, engine="openai", max_tokens=8, endpoint=endpoint)
    )


@pytest.mark.parametrize(
    "models, known_as, note",
    [
        ({}, "unknown", "does not say in its list of models what serves 'qwen'"),
        ({"other": "vllm"}, "unknown", "does not say in its list of models what serves 'qwen'"),
        ({"qwen": "gateway"}, "gateway", "names its program 'gateway'"),
        ({"qwen": "vllm"}, "vllm", None),
    ],
)
def test_a_server_whose_defaults_are_not_known_is_told_of_once(
    start_server, capsys, models, known_as, note
) -> None:
    """A note is printed once where it is not known what serves the model, with the remedy.

    `known_as` is the program in the engine's settings, by which a run is resumed.
    """
    server = start_server(lambda body, call: completion_reply("5"))
    server.models = models
    engine = engine_at(server)
    question = AnswerRequest([{"role": "user", "content": "2 + 3?"}], [])

    engine.generate([question])
    engine.generate([question])

    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert engine.resolved_settings["server"] == known_as
    if note is None:
        assert notes == []
        return
    (line,) = notes
    assert note in line
    assert "--generation-config vllm" in line


def test_a_server_that_was_too_busy_to_tell_its_program_is_no_other_server(capsys) -> None:
    """A server that does not tell its program is left out of the settings by which runs resume.

    So the run may go on when the server replies again.
    """
    closed_port_url = "http://127.0.0.1:9/v1"  # nobody listens there
    endpoint = Endpoint(closed_port_url, "qwen", attempts=1)
    engine = EndpointEngine(
        AnswerEngineSettings(model="qwen", engine="openai", max_tokens=8, endpoint=endpoint)
    )
    assert engine.resolved_settings == {"base_url": closed_port_url}
    with pytest.raises(UserError, match="base_url"):
        engine.generate([AnswerRequest([{"role": "user", "content": "2 + 3?"}], [])])
    assert "did not reply when it was asked for its models" in capsys.readouterr().err
