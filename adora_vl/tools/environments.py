"""Environments in TRL's form: an object for each rollout, whose public methods the policy may call.

Stock TRL resets each rollout's environment separately, and accepts any text that `reset` returns.
Ours resets all environments of one problem with the same random numbers, and refuses texts that
differ. The rollouts of a group are compared with each other, so they have to begin alike.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from adora_vl.data.prompts import find_control_token
from adora_vl.rewards.safe_call import copy_argument
from adora_vl.rollout.rollouts import RolloutGroup
from adora_vl.tools.calls import replace_surrogates, run_limited
from adora_vl.types import Row
from adora_vl.utils.errors import UserError, describe_error
from adora_vl.utils.own_files import function_name, load_from_file, source_hash

ENVIRONMENT_KEY = "environment_factory"
_HIDDEN_METHODS = ("reset", "get_reward")  # public methods that are no tools: the run calls them


@dataclass
class Environments:
    """The environments of a run on one rank: an object of the user's class for each rollout.

    The policy may call the public methods of its rollout's environment as tools. As in TRL an
    environment is built once, and reset for a new rollout in each generation. `_instances` are all
    that were built, of which the first `_in_use_count` belong to rollouts of the present
    generation. A message prefix names the row of the problem, such as `environment_factory: row 7`.
    """

    factory: Callable[[], Any]
    """What returns a new environment at each call, such as its class."""
    hashes: Mapping[str, str]
    """The hash of the factory's file by its path, or of a function by its name."""
    seconds: float
    """The time limit for building or resetting one environment."""
    _instances: list[Any] = field(default_factory=list, init=False)
    """All instances that were built so far."""
    _in_use_count: int = field(default=0, init=False)
    """The number of instances that rollouts of the current generation have."""

    def __post_init__(self) -> None:
        """Build the first environment, and read from its class what the model may call.

        Sets `name` (that of the class), `tools` (its public methods by name, of which there may be
        none) and `give_rewards` (whether it has `get_reward`). Raises `UserError` for a factory
        whose objects lack `reset`, or have one that is async.
        """
        self.name = function_name(self.factory)  # for messages, until the class is known
        environment = self._build_instance(f"{ENVIRONMENT_KEY}: {self.name}")
        self.name = type(environment).__name__  # TRL names its reward function so
        methods = dict(inspect.getmembers(type(environment), inspect.isfunction))
        self.tools: dict[str, Callable[..., Any]] = {}
        for method_name in methods:
            if method_name not in _HIDDEN_METHODS and not method_name.startswith("_"):
                self.tools[method_name] = getattr(environment, method_name)
        self.give_rewards = "get_reward" in methods
        if "reset" not in methods:
            raise UserError(
                f"{ENVIRONMENT_KEY}: {self.name} has no method reset(self, **row), which begins a "
                "rollout"
            )
        if inspect.iscoroutinefunction(methods["reset"]):
            raise UserError(f"{ENVIRONMENT_KEY}: {self.name}.reset is async; write a plain method")
        self._awaits_reward = inspect.iscoroutinefunction(methods.get("get_reward"))

    def reward_function(self) -> Callable[..., object]:
        """Return a reward function that asks each rollout's environment for its reward.

        As in TRL it is named after the environments' class, and async if `get_reward` is.
        """

        def get_reward(environments: Sequence[Any], **_: object) -> list[float | None]:
            return [environment.get_reward() for environment in environments]

        async def await_reward(environments: Sequence[Any], **_: object) -> list[float | None]:
            return [await environment.get_reward() for environment in environments]

        reward_function: Callable[..., object] = await_reward if self._awaits_reward else get_reward
        reward_function.__name__ = self.name
        return reward_function

    def reset_for_groups(
        self,
        groups: Sequence[RolloutGroup],
        run_seed: int,
        *,
        control_tokens: Sequence[str],
        begins_generation: bool,
    ) -> list[RolloutGroup]:
        """Give each rollout of the groups an environment, reset it, and return the new groups.

        The text that `reset` returns is appended to the group's prompt. Raises `UserError` if an
        environment fails, or its text differs within a group.

        Args:
            groups: groups that begin.
            run_seed: the seed of the run.
            control_tokens: those of the model, which `reset` may not return.
            begins_generation: whether these are the first groups of a generation. Then no rollout
                of the last generation needs its environment any longer, and all are free again.
        """
        if begins_generation:
            self._in_use_count = 0
        return [self._reset_for_group(group, run_seed, control_tokens) for group in groups]

    def _reset_for_group(
        self, group: RolloutGroup, run_seed: int, control_tokens: Sequence[str]
    ) -> RolloutGroup:
        """Give each rollout of a group an environment, reset it, and return the new group.

        The text of `reset` is appended to the prompt. All environments are reset with the same
        random numbers, so that the rollouts begin alike. Raises `UserError` if their texts still
        differ, or contain a control token, which the model would take for the end of a message.
        """
        problem = group.problem
        message_prefix = f"{ENVIRONMENT_KEY}: row {group.row.get('id', problem.row_number)}"
        seed = f"{run_seed}/{problem.key.name}/{problem.group_number}"
        rollouts = [
            replace(rollout, environment=self._next_free_environment(message_prefix))
            for rollout in group.rollouts
        ]
        texts = [
            self._reset(rollout.environment, group.row, message_prefix=message_prefix, seed=seed)
            for rollout in rollouts
        ]
        for text in texts:
            token = find_control_token(text, control_tokens)
            if token is not None:
                raise UserError(
                    f"{message_prefix}: reset says {token}, which is a token of the model's own; "
                    "leave it out of the text"
                )
            if text != texts[0]:
                raise UserError(
                    f"{message_prefix}: reset says {texts[0]!r:.60} to one rollout of a problem and "
                    f"{text!r:.60} to another; let it say what the row alone decides"
                )
        return replace(group, row=_append_to_prompt(group.row, texts[0]), rollouts=tuple(rollouts))

    def _next_free_environment(self, message_prefix: str) -> Any:
        """Return an environment that no rollout of this generation has; build one if needed.

        `message_prefix`: begins the message of an error, such as `environment_factory: row 7`.
        """
        if self._in_use_count == len(self._instances):
            self._build_instance(message_prefix)
        environment = self._instances[self._in_use_count]
        self._in_use_count += 1
        return environment

    def _build_instance(self, message_prefix: str) -> Any:
        """Build a further environment, which no rollout has yet, and return it.

        `message_prefix`: begins the message of an error, such as `environment_factory: row 7`.
        """
        # The seed is one text for all environments, so that each is built with the same random
        # numbers.
        environment = self._run(
            self.factory, label=f"{message_prefix}: it cannot be made", seed=ENVIRONMENT_KEY
        )
        is_shared = any(environment is instance for instance in self._instances)
        if is_shared:
            raise UserError(
                f"{message_prefix}: {self.name} is one object for two rollouts; give what makes one "
                "at each call"
            )
        self._instances.append(environment)
        return environment

    def _reset(self, environment: Any, row: Row, *, message_prefix: str, seed: str) -> str:
        """Reset an environment for a row, and return the text that its `reset` returns.

        Args:
            environment: the environment of a rollout.
            row: the row of its problem, whose columns `reset` gets.
            message_prefix: begins the message of an error, such as `environment_factory: row 7`.
            seed: a text that seeds the random numbers in `reset`.

        Raises `UserError` if `reset` fails, or returns something else than a text or None.
        """

        def reset() -> object:
            """Call the user's `reset` with copies, which it may change."""
            return environment.reset(**copy_argument(dict(row)))

        result = self._run(reset, label=f"{message_prefix}: reset", seed=seed)
        if result is not None and not isinstance(result, str):
            raise UserError(
                f"{message_prefix}: reset returned a {type(result).__name__}; return a text or None"
            )
        return replace_surrogates(result or "")

    def _run(self, function: Callable[[], Any], label: str, seed: str) -> Any:
        """Call a function of the user within limits of time and randomness (`run_limited`).

        Args:
            function: the call, without arguments.
            label: begins the message of an error.
            seed: names the random numbers that the function draws.

        Raises `UserError` where it raises anything, also `SystemExit`.
        """
        try:
            with run_limited(f"environment {self.name}", self.seconds, seed):
                return function()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise UserError(f"{label}: {describe_error(error)}") from None


def build_environments(factory: object, seconds: float) -> Environments | None:
    """Return the environments of a run; None in a run without.

    Args:
        factory: `FILE.py:CLASS`, or a class or function from Python; None for no environments.
        seconds: the time limit for building or resetting one environment.

    Raises `UserError` for a factory that cannot be loaded, or whose objects are no environments.
    """
    if factory is None:
        return None
    if isinstance(factory, str):
        user_class = load_from_file(key=ENVIRONMENT_KEY, entry=factory, noun="class", fits=callable)
        return Environments(
            factory=user_class.function_or_class,
            hashes={user_class.file: user_class.hash},
            seconds=seconds,
        )
    if isinstance(factory, Mapping):
        raise UserError(
            f"{ENVIRONMENT_KEY}: several environments are not supported; give one class"
        )
    if not callable(factory):
        raise UserError(f"{ENVIRONMENT_KEY}: {factory!r:.80} is no class")
    hashes = {function_name(factory): source_hash(factory)}
    return Environments(factory=factory, hashes=hashes, seconds=seconds)


def _append_to_prompt(row: Row, text: str) -> Row:
    """Return the row with a text at the end of the last message of its prompt.

    For example, the message "Add 1 and 2. " and the text "You have 3 tries." become one message,
    "Add 1 and 2. You have 3 tries.". If the content is a list of parts, the text becomes a further
    part.
    """
    if not text:
        return row
    *earlier_messages, last_message = row["prompt"]
    content: Any = last_message["content"]
    if isinstance(content, str):
        content += text
    else:
        # A dataset gives all parts of its messages the same keys, so the new part gets them too.
        keys = content[0] if content else ()
        new_part = {**dict.fromkeys(keys), "type": "text", "text": text}
        content = [*content, new_part]
    prompt = [*earlier_messages, {**last_message, "content": content}]
    return Row(**{**row, "prompt": prompt})
