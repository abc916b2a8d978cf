"""How the ranks of a cell share the model: one rank's place.

Owns which layouts fit which model. Invariant: a layout that does not divide the ranks or the model is refused before
any process group exists, at submission already. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.errors import UserError
from gyre.recipe.schema import Train
from gyre.training.architecture import Architecture


@dataclass(frozen=True)
class Layout:
    """One rank's place among `world` = tensor * pipeline * data ranks of its cell."""

    rank: int = 0
    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    """Ranks of a stage among which whole experts are spread."""
    sequence: bool = False
    """Tensor-parallel ranks split the sequence, too, where they do not split the weights."""
    rendezvous: str = ""
    """`file:///path` or `tcp://host:port`; unused with one rank."""
    listener: int = -1
    """Of rank 0: the descriptor of the socket that listens at a `tcp://` rendezvous already."""
    local_rank: int = 0

    @classmethod
    def of(cls, train: Train, rank: int = 0, rendezvous: str = "", nodes: int = 1, listener: int = -1) -> Layout:
        """The place of one rank of a cell, by the recipe; the ranks are on `nodes` nodes, in order, as many on each."""
        return cls(
            rank=rank,
            world=train.ranks,
            tensor=train.tensor_parallel,
            pipeline=train.pipeline_parallel,
            data=train.data_parallel,
            expert=train.expert_parallel,
            sequence=train.sequence_parallel,
            rendezvous=rendezvous,
            listener=listener,
            local_rank=rank % (train.ranks // nodes),
        )

    @property
    def expert_tensor(self) -> int:
        """Ranks that split each expert: experts are spread whole, or split like everything else."""
        return self.tensor if self.expert == 1 else 1

    @property
    def rows(self) -> int:
        """A micro-step has a multiple of so many rows."""
        return self.tensor if self.sequence else 1

    def check(self, architecture: Architecture) -> None:
        """UserError, naming the recipe's key, for a layout that does not divide."""
        if self.world != self.tensor * self.pipeline * self.data:
            raise UserError(
                f"train.tensor_parallel * pipeline_parallel * data_parallel = "
                f"{self.tensor * self.pipeline * self.data}, but the cell has {self.world} ranks"
            )
        if architecture.layers % self.pipeline:
            raise UserError(
                f"train.pipeline_parallel = {self.pipeline} does not divide the model's {architecture.layers} layers"
            )
        if self.expert > 1 and not architecture.experts:
            raise UserError(f"train.expert_parallel = {self.expert}, but the model has no experts: set it to 1")
        if architecture.experts % self.expert:
            raise UserError(
                f"train.expert_parallel = {self.expert} does not divide the model's {architecture.experts} experts"
            )
        if architecture.experts and self.tensor > 1 and not self.sequence:
            # Each rank would route every token, and the experts' gradients count twice.
            raise UserError(
                "train.sequence_parallel = false: a mixture of experts is trained with tensor_parallel > 1 only when"
                " it is true (each rank routes its own part of the sequence)"
            )
        divisible = {"attention heads": architecture.heads, "key-value heads": architecture.kv_heads}
        if not architecture.experts:
            divisible["intermediate size"] = architecture.ffn
        elif self.expert == 1:
            divisible["experts' intermediate size"] = architecture.expert_ffn
        for what, number in divisible.items():
            if number % self.tensor:
                raise UserError(f"train.tensor_parallel = {self.tensor} does not divide the model's {number} {what}")
