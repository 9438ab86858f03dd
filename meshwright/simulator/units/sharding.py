"""Over how many ranks units are divided, and what becomes of them between their uses."""

from typing import NamedTuple

from meshwright.hwprofiles import Offload
from meshwright.simulator.graph import Size, chosen
from meshwright.simulator.memory import StateBytes
from meshwright.simulator.replication import Replication


class ParameterBytes(NamedTuple):
    """Bytes a parameter costs: its states, and on the wire of a reduction."""

    state: StateBytes
    reduce_bytes: int


class Sharding(NamedTuple):
    """How units are sharded, in which formats, and until when they and their gradients stay.

    Args:
        num_ranks: Of a set of shards.
        num_replicas: Ranks with the same shard.
        divides_experts: Ranks hold different experts, which are units of their own.
        num_expert_ranks: Of a set of shards of these; else 1.
        reshards: Units are freed after a forward pass.
        keeps_units: They stay from a backward pass to the next, as in a pipeline.
        sums: Gradients stay whole, outside a pipeline, and are summed so until the last microbatch.
        on_host: Shards are, and their gradients once they are reduced.
        is_plain: There are no units: weights and gradients are as a pass reads and makes them.
        parameter: Bytes of one.
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
        """Return that of *replication*."""
        keeps_units, replicas = replication.keeps_units, replication.replica_span
        on_host = replication.offload is Offload.PARAMETERS
        casts = parameter.state.gathered_parameter != parameter.state.sharded_parameter
        is_plain = replication.is_unwrapped and not casts
        if is_plain:
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
        """Return the same over so many ranks."""
        return self._replace(num_ranks=shards, num_replicas=replicas, num_expert_ranks=of_experts)

    @property
    def of_experts(self) -> "Sharding":
        """That of experts, where other ranks hold the others."""
        return self._replace(num_ranks=self.num_expert_ranks)

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether gradients stay whole until the last microbatch."""
        return self.keeps_units | self.sums | self.is_plain

    def shares(self, num_parameters: Size, num_experts: Size) -> Size:
        """Return a rank's share of parameters, and of those of experts; filled up to one size."""
        return -(-num_parameters // self.num_ranks) - (-num_experts // self.num_expert_ranks)

    def kept_bytes(self, num_parameters: Size, padding: Size = 0) -> Size:
        """Return what is kept of gradients; *padding* fills up shards.

        Those that stay whole are in the wire's format, what leaves for the host when it is reduced
        is not kept.
        """
        whole, (state, reduce_bytes) = self.keeps_whole_gradients, self.parameter
        shards = chosen(whole, 1, self.num_ranks)
        share = -(-(num_parameters + chosen(whole, 0, padding)) // shards)
        stays = 1 - self.on_host * (1 - whole)
        return share * chosen(whole, reduce_bytes, state.gradient) * stays

    def cast_bytes(self, gathered: Size) -> Size:
        """Return the copy of a rank's part of what is *gathered* as passes read it, if another."""
        state = self.parameter.state
        return (state.gathered_parameter != state.sharded_parameter) * gathered // self.num_ranks

    def shard_bytes(self, num_parameters: Size, num_experts: Size) -> Size:
        """Return what a rank keeps of reduced gradients on its device; see `shares`."""
        kept = 0 if self.on_host else self.parameter.state.sharded_parameter
        return self.shares(num_parameters, num_experts) * kept
