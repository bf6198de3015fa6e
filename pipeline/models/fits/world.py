"""The processes that fit one network together, data-parallel: each reads some lines of every batch.

All processes draw the same batches and hold the same weights. Process r of n computes the gradient of rows r,
r + n, r + 2n ... of a batch, over the number of all its targets. The sum over the processes is then the
gradient of the batch, as one process computes it, apart from the order of additions.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # documented, not in __all__

WHOLE: Final = slice(None)  # all rows of a batch


class World:
    """One process alone: every method leaves its argument as it is."""

    rank = 0
    size = 1

    @property
    def rows(self) -> slice:
        """The rows of a batch that this process reads."""
        return slice(self.rank, None, self.size)

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        """All take the values of rank 0."""

    def add_up(
        self,
        parameters: Sequence[torch.Tensor],  # noqa: ARG002 - one process has nothing to add
        value: torch.Tensor,
    ) -> torch.Tensor:
        """The gradients become their sums over all processes; so does `value`, which is returned."""
        return value

    def agree(self, number: int) -> int:
        """The number of rank 0."""
        return number


ALONE: Final = World()


class GangWorld(World):
    """The processes of a gang. NCCL joins those on GPUs, gloo the others."""

    def __init__(self, rank: int, size: int, *, address: str, port: int, run: str, device: str) -> None:
        """Meets the others at rank 0. `run` tells this try from an earlier one. Raises RuntimeError."""
        self.rank, self.size, self.device = rank, size, device
        # Of a store that survived a try, Gloo would read addresses of processes that are dead.
        met = TCPStore(address, port, size, is_master=rank == 0)
        store = PrefixStore(f"{run}/", met)
        backend = "nccl" if device.startswith("cuda") else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size)

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                distributed.broadcast(tensor, src=0)

    def add_up(self, parameters: Sequence[torch.Tensor], value: torch.Tensor) -> torch.Tensor:
        """One exchange of one buffer: the networks are small, and a step has no other."""
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([*(part.reshape(-1) for part in parts), value.detach().reshape(1)])
        distributed.all_reduce(flat)
        put_gradients(parameters, flat[:-1])
        return flat[-1]

    def agree(self, number: int) -> int:
        told = torch.tensor([number], dtype=torch.int64, device=self.device)
        distributed.broadcast(told, src=0)
        return int(told.item())

    def leave(self) -> None:
        distributed.destroy_process_group()


def own_device(local: int) -> str:
    """The device of a rank, as torch names it: the GPU with this index, where torch sees one."""
    if not torch.cuda.is_available():
        return "cpu"
    torch.cuda.set_device(local)
    return f"cuda:{local}"


def put_gradients(parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Cuts one buffer into the gradients of these parameters."""
    at = 0
    for parameter in parameters:
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
