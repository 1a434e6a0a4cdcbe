"""Sends the policy's weights to vLLM: which tensors, and how they reach the engine or servers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from torch import Tensor
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from adora_vl.models.families import component_of, trainable_components
from adora_vl.rollout.engine_settings import EngineSettings, engine_runs_on_cpu
from adora_vl.rollout.server_group import ServerGroup
from adora_vl.rollout.server_pool import ServerPool
from adora_vl.rollout.weight_sync import (
    adapter_tensors,
    merged_parameters,
    push_adapter,
    push_weights,
    reset_caches,
    zero_discarded_buffers,
)
from adora_vl.utils.errors import engine_call

# Returns a context that counts the seconds of the action with this name.
CountSeconds = Callable[[str], AbstractContextManager[Any]]


class SyncedVLLMGeneration(VLLMGeneration):  # type: ignore[misc]  # TRL is untyped to mypy
    """`trl.generation.VLLMGeneration` with a weight sync of its own.

    A sync sends the policy's weights to the engine, in one of three ways: into the engine of this
    process (`mode: colocate`), to one server by NCCL, or to several servers as files, which all of
    them read. The first rank alone talks to servers. `server_group.on_first_rank` runs an action
    there with the pool of servers, and returns its result on all ranks. The subclass
    `AdoraVLLMGeneration` builds the engine and samples from it.
    """

    settings: EngineSettings
    server_group: ServerGroup  # in server mode
    _count_seconds: CountSeconds
    # vLLM's LoRA settings where a weight sync sends only the policy's LoRA adapter; None: it sends
    # weights, with an adapter merged into them
    adapter_settings: Mapping[str, Any] | None = None
    _engine_has_all_parameters: bool  # whether a weight sync has sent every parameter
    bytes_sent: int  # by the last weight sync

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values of the parameters that a weight sync sends to the engine.

        Stock TRL yields every parameter. It merges LoRA into the policy and back out, which loses
        precision of bfloat16 weights with every sync. Ours merges a copy of one tensor at a time.
        After the first sync it leaves out the components that are not trained, such as a frozen
        vision tower.
        """
        trainable = trainable_components(self.model)
        uses_nccl = self.mode == "server" and self.settings.weight_folder is None
        # An engine has no weights at first and after a sleep, which discards them. With NCCL every
        # sync sends all, since TRL announces the tensors of the first sync every time.
        sends_all = not self._engine_has_all_parameters or self.enable_sleep_mode or uses_nccl

        def is_sent(name: str) -> bool:
            """Return whether the sync sends the parameter of this name."""
            return sends_all or component_of(name) in trainable

        if is_peft_model(self.model):
            # A server, and an engine on a CPU, load a layer only from all of its tensors.
            needs_whole_layers = self.mode == "server" or engine_runs_on_cpu()
            for name, tensor in merged_parameters(
                self.model,
                gather=self._dist.gather_params,
                includes=is_sent,
                changed_only=not sends_all and not needs_whole_layers,
            ):
                yield self._fix_param_name_to_vllm(name), tensor
        else:
            for name, parameter in self.model.named_parameters():
                if is_sent(name):
                    with self._dist.gather_params([parameter]):
                        yield self._fix_param_name_to_vllm(name), parameter.data

    def sync_weights(self) -> None:
        """Send the policy's weights to the engine, and empty its caches.

        Stock TRL loads tensor by tensor. The CPU engine refuses that, since it has repacked its
        layers. Stock TRL also resets only the prefix cache, so image features of the old vision
        tower stay in the encoder cache. Raises `EngineError` where the engine fails.
        """
        with self._count_seconds("sync"), engine_call("the weight sync"):
            if self.mode == "colocate":
                self._sync_colocated()
            elif self.settings.weight_folder is None:
                self._sync_by_nccl()
            else:
                self._sync_by_files()
            self._engine_has_all_parameters = True

    def _sync_colocated(self) -> None:
        """Send the weights, or the LoRA adapter, to the engine of this process."""
        if self.enable_sleep_mode:
            vllm_generation.empty_cache()  # as TRL does, since the engine needs the memory
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
            # The sync sends only parameters. The engine would read from its buffers what the sleep
            # has left in their memory.
            zero_discarded_buffers(self.llm)
        if self.adapter_settings is not None:
            push_adapter(self.llm, self._tensors_to_send())
        else:
            # Sleep mode discards all weights, so each sync has to send all of them.
            is_whole_model = self.enable_sleep_mode or not self._engine_has_all_parameters
            push_weights(self.llm, self._tensors_to_send(), is_whole_model=is_whole_model)
        reset_caches(self.llm)

    def _sync_by_nccl(self) -> None:
        """Send the weights to a server as stock TRL does, and empty all of its caches."""
        self.bytes_sent = 0  # nothing counts them here
        super().sync_weights()
        self.server_group.on_first_rank(ServerPool.reset_caches)

    def _sync_by_files(self) -> None:
        """Write the weights, or the LoRA adapter, to files, and let all servers read them.

        Collective: all ranks gather sharded weights, and the first one writes and talks to servers.
        """
        # A server that was started again has missed the last sync, and needs all parameters.
        any_missed_last_sync = self.server_group.on_first_rank(
            lambda pool: pool.update_servers_in_use()
        )
        tensors = self._tensors_for_servers(sends_all=bool(any_missed_last_sync))
        with self.server_group.write_weights(tensors) as folder:
            self.server_group.on_first_rank(lambda pool: pool.read_weights(folder))

    @contextmanager
    def write_weights(self, *, sends_all: bool) -> Iterator[Path]:
        """Write the policy's present weights to files, for servers that read them later.

        Yields the folder of the files, which exists inside the block. Collective.

        `sends_all`: whether to write all parameters, or only those that training can change.
        """
        with ExitStack() as stack:
            with self._count_seconds("sync"), engine_call("the weight sync"):
                tensors = self._tensors_for_servers(sends_all=sends_all)
                folder = stack.enter_context(self.server_group.write_weights(tensors))
            self._engine_has_all_parameters = True
            yield folder

    def _tensors_for_servers(self, *, sends_all: bool) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over the names and tensors that are written for servers.

        `sends_all`: whether it yields all parameters, or only those that training can change. The
        caller sets `_engine_has_all_parameters` when all of them are written.
        """
        if sends_all:
            # As after the start, when the engine has nothing: all parameters are sent.
            self._engine_has_all_parameters = False
        return self._tensors_to_send()

    def _tensors_to_send(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors that a weight sync sends, and count their bytes."""
        self.bytes_sent = 0
        if self.adapter_settings is None:
            tensors = self._iter_named_params()
        else:
            tensors = adapter_tensors(self.model, self._dist.gather_params)
        for name, tensor in tensors:
            self.bytes_sent += tensor.nbytes
            yield name, tensor
