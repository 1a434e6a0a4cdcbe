"""The policy's weights as safetensors in a folder that trainer and servers both see."""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from weakref import finalize

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from adora_vl.checkpoint.trl_state import save_tensors
from adora_vl.models.load import ADAPTER_CONFIG_FILE
from adora_vl.utils.files import (
    abandoned_folders,
    create_locked_folder,
    replace_file,
    unwritable_error,
)

WEIGHT_TRANSFER_KEY = "adora_weight_transfer"
_ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"


class WeightFiles:
    """Writes weights into new folders `adora-weights-RUN-RANDOM`, one for each weight sync.

    A folder exists only while it is written and read. A folder with a LoRA adapter stays until the
    next adapter was read: vLLM may read it again, and a server that does not find it dies.

    One process of a run writes. Other runs may write into the same parent folder.
    """

    def __init__(self, folder: Path, output_dir: Path) -> None:
        """Remove what a killed start of this run has left behind.

        Args:
            folder: the parent folder, which trainer and servers see. It is created with the first
                weights.
            output_dir: the folder of the run, by which its files are told from those of others.
        """
        self.folder = folder.absolute()
        # Two machines may have the same path for different disks, so the host is part of the name.
        run_name = f"{socket.gethostname()}:{output_dir.resolve()}"
        run_hash = hashlib.sha256(run_name.encode()).hexdigest()[:16]
        self._folder_prefix = f"adora-weights-{run_hash}"
        # A parent folder that exists already is the user's. It keeps its permissions, and is not
        # removed with the last weights.
        self._keeps_parent = self.folder.exists()
        # The rank of the LoRA adapter whose tensors are written; None: whole weights are written.
        self.adapter_rank: int | None = None
        # Closing it removes the folder of the adapter that servers have now.
        self._previous_adapter_folder = ExitStack()
        finalize(self, self._previous_adapter_folder.close)
        # `abandoned_folders` leaves out folders whose lock is held by a process.
        for path in abandoned_folders(self.folder.glob(f"{self._folder_prefix}-*")):
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Path]:
        """Write named tensors into a new folder, and yield it. It is removed after the block.

        A folder with an adapter stays until the next adapter was read. All of `tensors` are
        consumed, even after an error, since each of them is gathered from all ranks.

        Raises `UserError` where the disk refuses.
        """
        remaining = iter(tensors)
        with ExitStack() as stack:
            try:
                self.folder.mkdir(0o700, parents=True, exist_ok=True)
                path, lock = create_locked_folder(
                    lambda: self.folder / f"{self._folder_prefix}-{token_hex(8)}"
                )
                stack.callback(
                    _remove_locked_folder, path, lock, removes_parent=not self._keeps_parent
                )
                permissions = _permissions_of_new_folder(self.folder)
                path.chmod(permissions)
                if self.adapter_rank is None:
                    save_tensors(remaining, path)
                else:
                    _save_adapter(remaining, path, rank=self.adapter_rank)
                for file in path.iterdir():
                    file.chmod(permissions & 0o640)  # files are not executable
            except (OSError, SafetensorError) as error:
                raise unwritable_error(WEIGHT_TRANSFER_KEY, self.folder, error) from error
            finally:
                for _ in remaining:  # after an error some are left
                    pass
            yield path
            if self.adapter_rank is not None:
                # The servers have read this adapter. Its folder stays instead of the previous
                # one's.
                self._previous_adapter_folder.close()
                self._previous_adapter_folder.push(stack.pop_all())


def _save_adapter(tensors: Iterable[tuple[str, Tensor]], folder: Path, *, rank: int) -> None:
    """Write the tensors of a LoRA adapter in PEFT's format, which vLLM reads.

    The tensors have their scaling already. So alpha is the rank, and vLLM scales by alpha / r = 1.
    """
    save_file(
        {name: tensor.to("cpu").contiguous() for name, tensor in tensors},
        folder / _ADAPTER_WEIGHTS_FILE,
    )
    config = {"r": rank, "lora_alpha": rank, "target_modules": []}
    replace_file(folder / ADAPTER_CONFIG_FILE, json.dumps(config))


def _remove_locked_folder(path: Path, lock: int | None, *, removes_parent: bool) -> None:
    """Remove the folder `path`, and release its lock.

    `lock`: the file descriptor of the lock. `removes_parent`: whether to remove the parent folder
    too, unless another run has weights there.
    """
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)
    if removes_parent:
        with suppress(OSError):  # it is not empty
            path.parent.rmdir()


def _permissions_of_new_folder(folder: Path) -> int:
    """Return the permissions of a new folder in `folder`: only the trainer's user may use it.

    The user's group may read it too, if `folder` is open to the group and to nobody else.
    """
    # Read and enter (5) for the group, nothing (0) for others. Whether the group may write (2) does
    # not matter.
    is_open_to_group_only = folder.stat().st_mode & 0o057 == 0o050
    return 0o750 if is_open_to_group_only else 0o700
