"""What ends an answer: tokens, and strings that one or several tokens complete."""

import pytest

from adora_vl.rollout.stopping import StopCriteria, StopParameters, cut_behind_stop_string

TEXT_BY_TOKEN = {1: "so 5", 2: "</an", 3: "swer>", 4: " and", 5: "\n\n"}


def decode(ids) -> str:
    """Return the text of some tokens."""
    return "".join(TEXT_BY_TOKEN[token] for token in ids)


def test_the_key_of_a_config_is_read_in_all_its_forms() -> None:
    """`generation_kwargs` may have a string to stop at, a list of them, or none."""
    assert StopParameters.from_config(None).sampling == {}
    assert StopParameters.from_config({"top_k": 3}).sampling == {}
    stop = StopParameters.from_config({"stop": "</answer>", "stop_token_ids": [7]})
    assert stop.strings == ("</answer>",)
    assert stop.token_ids == (7,)
    assert stop.sampling == {"stop": ["</answer>"], "stop_token_ids": [7]}
    assert StopParameters.from_config({"stop": ["a", "b"]}).strings == ("a", "b")


# The token ids of an answer, and how many of them are kept; None: no string is complete. The
# tokens 2 and 3 together are the string "</answer>", and 5 is the string of two line breaks.
@pytest.mark.parametrize(
    "ids, length",
    [
        ([1, 2, 3], 3),
        ([1, 2, 3, 4, 4, 2, 3], 3),
        ([1, 5, 2, 3], 2),
        ([5], 1),
        ([1, 2, 4, 3], None),
        ([1], None),
        ([], None),
    ],
)
def test_an_answer_of_a_batch_is_cut_where_a_string_is_first_complete(ids, length) -> None:
    """An answer is cut behind the token that first completes a stop string.

    Transformers goes on sampling the answers of a batch until all have ended. That token is then
    the last one, by which others see why the answer has ended.
    """
    strings = ("</answer>", "\n\n")
    assert cut_behind_stop_string(ids, strings, decode) == length
    if length is not None:
        assert StopCriteria(frozenset(), strings, decode).has_stopped(ids[:length])
