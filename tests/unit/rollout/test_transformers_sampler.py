"""The sampler of a run without an engine, whose policy samples itself."""

from adora_vl.packing.prompts import PromptBatch
from adora_vl.rollout.rollouts import FinishReason, SamplingRequest
from adora_vl.rollout.samplers import TransformersSampler


class CountingGenerator:
    """Stands in for `generate`: for each prompt it returns the numbers from 0 to the limit - 1."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []  # (prompts, limit) of each call

    def __call__(self, prompts: PromptBatch, max_tokens: int) -> list[list[int]]:
        self.calls.append((len(prompts.ids), max_tokens))
        return [list(range(max_tokens)) for _ in prompts.ids]


def prompts_of(*ids: list[int]) -> PromptBatch:
    """Return prompts of these token ids, without images."""
    return PromptBatch(messages=["" for _ in ids], ids=list(ids), images=None, fields={})


def request(prompt_ids: list[int], max_tokens: int) -> SamplingRequest:
    """Return a request for at most `max_tokens` tokens."""
    return SamplingRequest(prompt_ids=prompt_ids, images=[], merge_key=0, max_tokens=max_tokens)


def test_all_requests_are_sampled_at_once_and_each_is_cut_to_its_own_limit():
    """The largest limit is that of the call. No result says why it has ended."""
    generate = CountingGenerator()
    sampler = TransformersSampler(generate, generate_greedily=CountingGenerator())
    results = sampler.sample([request([1], 2), request([1, 2], 5)], prompts_of([1], [1, 2]))
    assert generate.calls == [(2, 5)]
    assert [result.tokens for result in results] == [[0, 1], [0, 1, 2, 3, 4]]
    assert [result.logps for result in results] == [[None] * 2, [None] * 5]
    assert {result.finish_reason for result in results} == {FinishReason.RUNNING}


def test_a_rank_without_requests_takes_part_with_a_token_of_its_stand_in():
    """With weights divided by ZeRO-3 the others would wait for it for ever."""
    generate = CountingGenerator()
    sampler = TransformersSampler(generate, generate_greedily=generate)
    assert sampler.sample([], prompts_of([1])) == []
    assert sampler.sample_greedily([], prompts_of([1])) == []
    assert generate.calls == [(1, 1), (1, 1)]
