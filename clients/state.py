"""What clients keep between rounds, in files: a client is a partition, not a process or a node's memory.

    FOLDER/PARTITION/round-ROUND.safetensors

The server says which round's reply of a partition it folded last, and the client goes on from that round's file. So a
reply that is lost or refused, a process that ends and a round that is repeated leave both sides at one state. So does a
server that goes back to a checkpoint: it says which rounds its checkpoints need.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

Named = Mapping[str, Mapping[str, Tensor]]  # tensors by what they are and by parameter name


class LostState(RuntimeError):
    """The state that the server counts on is not here or not readable; the message says where it should be."""


class ClientState:
    """The state of one partition in one run.

    Parameters
    ----------
    folder : Path
        Of the run on this machine; made when needed.
    partition : int
    """

    def __init__(self, folder: Path, partition: int) -> None:
        self.partition = partition
        self._folder = folder / str(partition)

    def load(self, server_round: int, like: Named) -> dict[str, list[Tensor]]:
        """The state after ``server_round``, after 0 zeros, with the names, shapes and devices of ``like``.

        Raises `LostState`.
        """
        if server_round == 0 or not like:
            return {what: [torch.zeros_like(t) for t in named.values()] for what, named in like.items()}
        path = self._path(server_round)
        try:
            flat = load_file(path)
            state = {what: [flat[f"{what}/{name}"] for name in named] for what, named in like.items()}
        except (OSError, SafetensorError, KeyError) as error:
            raise LostState(f"{self._needs(path, server_round)}: {error}") from error
        for what, named in like.items():
            for (name, wanted), tensor in zip(named.items(), state[what], strict=True):
                if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
                    raise LostState(
                        f"{self._needs(path, server_round)}: {what}/{name} is {_shape(tensor)}, not {_shape(wanted)}"
                    )
        return {
            what: [t.to(wanted.device) for t, wanted in zip(state[what], named.values(), strict=True)]
            for what, named in like.items()
        }

    def save(self, server_round: int, state: Named, pinned: Collection[int]) -> None:
        """Write the state after ``server_round`` atomically, and remove the earlier ones but those of ``pinned``.

        They are never asked for again. Later ones stay: this may be a client that the server no longer waits for.
        Raises OSError where the folder can't be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        flat = {
            f"{what}/{name}": t.detach().cpu().contiguous()
            for what, named in state.items()
            for name, t in named.items()
        }
        path = self._path(server_round)
        with NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as file:
            try:
                file.write(save(flat))
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        sync_folder(self._folder)
        for other in self._folder.glob("round-*.safetensors"):
            r = int(other.stem.removeprefix("round-"))
            if r < server_round and r not in pinned:
                other.unlink(missing_ok=True)

    def _needs(self, path: Path, server_round: int) -> str:
        return f"partition {self.partition} can't go on without what it kept in round {server_round}, {path}"

    def _path(self, server_round: int) -> Path:
        return self._folder / f"round-{server_round}.safetensors"


def sync_folder(folder: Path) -> None:
    """Put a rename on disk. Only POSIX opens folders, and elsewhere the rename alone must do."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
