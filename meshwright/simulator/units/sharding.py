"""Sharding of FSDP units: shard groups, formats, and lifetimes of weights and gradients."""

from typing import NamedTuple

from meshwright.hwprofiles import Offload
from meshwright.simulator.graph import Size, chosen
from meshwright.simulator.memory import StateBytes
from meshwright.simulator.replication import Replication


class ParameterBytes(NamedTuple):
    """Bytes of a parameter: its states, and its gradient in a reduction."""

    state: StateBytes
    reduce_bytes: int


class Sharding(NamedTuple):
    """Shard groups and formats of units, and lifetimes of them and their gradients.

    Args:
        num_ranks: Ranks of a shard group.
        num_replicas: Ranks of an HSDP replicate group.
        divides_experts: Whether experts are units of their own, sharded over another group.
        num_expert_ranks: Ranks of a shard group of these experts; else 1.
        reshards: Whether units are freed after a forward pass (`reshard_after_forward`).
        keeps_units: Whether they stay gathered from a backward pass on, as in a pipeline.
        sums: Whether gradients are accumulated whole until the last microbatch, without a pipeline.
        on_host: Whether shards, and reduced gradients, are offloaded.
        is_plain: Whether there are no units: weights and gradients are those that a pass uses.
        parameter: Bytes of a parameter.
    """

    num_ranks: Size
    num_replicas: Size
    reshards: bool
    keeps_units: bool
    sums: bool
    on_host: bool
    is_plain: bool
    parameter: ParameterBytes
    divides_experts: bool = False
    num_expert_ranks: Size = 1

    @classmethod
    def of(cls, replication: Replication, parameter: ParameterBytes) -> "Sharding":
        """Return the sharding of *replication*."""
        keeps_units, replicas = replication.keeps_units, replication.replica_span
        on_host = replication.offload is Offload.PARAMETERS
        casts = parameter.state.gathered_parameter != parameter.state.sharded_parameter
        # Even one rank alone has units where weights are cast for its passes.
        is_plain = replication.is_unwrapped and not casts
        if is_plain:
            # Nothing is reduced, so that no gradient is cast.
            parameter = parameter._replace(reduce_bytes=parameter.state.gradient)
        experts = replication.experts
        return cls(
            num_ranks=replication.span.num_ranks,
            num_replicas=replicas.num_ranks if replicas else 1,
            reshards=replication.reshards,
            keeps_units=keeps_units,
            sums=replication.keeps_whole_gradients and not (keeps_units or is_plain),
            on_host=on_host,
            is_plain=is_plain,
            parameter=parameter,
            divides_experts=experts is not None,
            num_expert_ranks=experts.span.num_ranks if experts else 1,
        )

    def with_ranks(self, shards: Size, replicas: Size, of_experts: Size) -> "Sharding":
        """Return the same sharding over so many ranks."""
        return self._replace(num_ranks=shards, num_replicas=replicas, num_expert_ranks=of_experts)

    @property
    def of_experts(self) -> "Sharding":
        """Sharding of experts that have a shard group of their own."""
        return self._replace(num_ranks=self.num_expert_ranks)

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether gradients stay whole until the last microbatch."""
        return self.keeps_units | self.sums | self.is_plain

    def shares(self, num_parameters: Size, num_experts: Size) -> Size:
        """Return a rank's shard of parameters, with that of experts; padded to equal size."""
        return -(-num_parameters // self.num_ranks) - (-num_experts // self.num_expert_ranks)

    def kept_bytes(self, num_parameters: Size, padding: Size = 0) -> Size:
        """Return the kept bytes of gradients; *padding* fills up shards.

        Whole gradients are in the format of the reduction; offloaded ones are not kept once they
        are reduced.
        """
        whole, (state, reduce_bytes) = self.keeps_whole_gradients, self.parameter
        shards = chosen(whole, 1, self.num_ranks)
        share = -(-(num_parameters + chosen(whole, 0, padding)) // shards)
        stays = 1 - self.on_host * (1 - whole)
        return share * chosen(whole, reduce_bytes, state.gradient) * stays

    def cast_bytes(self, gathered: Size) -> Size:
        """Return the cast of a rank's shard of *gathered* weights, 0 if formats are equal."""
        state = self.parameter.state
        return (state.gathered_parameter != state.sharded_parameter) * gathered // self.num_ranks

    def shard_bytes(self, num_parameters: Size, num_experts: Size) -> Size:
        """Return the reduced gradients that a rank keeps on its device; see `shares`."""
        kept = 0 if self.on_host else self.parameter.state.sharded_parameter
        return self.shares(num_parameters, num_experts) * kept
