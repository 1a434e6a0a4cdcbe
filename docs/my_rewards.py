"""Reward functions of your own: copy this file, change it, and name its functions in a config.

    adora_reward: [accuracy, my_rewards.py:brevity]
    reward_weights: [1.0, 0.1]

Try one without a model:

    python -m adora_vl.rewards.explain --reward my_rewards.py:brevity --response 'so x = 5'
"""

from __future__ import annotations

from typing import Any

# A function has these arguments, of which most have one entry for each completion. Take what you
# need by name, and leave the rest to **kwargs.
#
#   completions       the answers, each a list with one message:
#                     [{"role": "assistant", "content": "..."}]
#   prompts           the conversations before them
#   completion_ids    the tokens of the answers
#   thinking_opened   whether the prompt ends in `<think>`, so that the answer begins in the block
#   answer, ...       every column of the data set, under its name
#
# These are there once, and not for each completion:
#
#   trainer_state     trainer_state.global_step counts the optimizer steps
#   log_extra         log_extra(name, values) logs a column beside the completions
#   log_metric        log_metric(name, value) logs a number
#
# It returns a number for each completion. It returns None for all completions of a problem that it
# does not apply to, and an exception in the place of a number where a call to something else
# failed.


def brevity(completions: list[Any], *, target: int = 200, **kwargs: Any) -> list[float]:
    """1 for an answer of at most `target` characters, then less in proportion."""
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [min(1.0, target / length) if length else 0.0 for length in lengths]


def whole_number(completions: list[Any], *, answer: list[str], **kwargs: Any) -> list[float | None]:
    """1 for an answer that ends in a whole number, on problems that have one.

    None: the problem is not scored.
    """
    return [
        float(completion[-1]["content"].rstrip(" .}$")[-1:].isdigit()) if gold.isdecimal() else None
        for completion, gold in zip(completions, answer, strict=True)
    ]


async def shown_work(completions: list[Any], *, prompts: list[Any], **kwargs: Any) -> list[float]:
    """1 for an answer that shows an equation.

    An async function may wait for something else, such as a service. It runs beside the other async
    ones.
    """
    return [float("=" in completion[-1]["content"]) for completion in completions]
