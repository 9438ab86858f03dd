"""What the host does for a layer: what the device waits for, and how long it takes to start it."""

from collections.abc import Iterable

from meshwright.hwprofiles import Cluster, StackProfile
from meshwright.simulator.blocks import HostPasses, Operator
from meshwright.simulator.costs.compute import constant_cost


def waiting_s(passes: HostPasses, stack: StackProfile) -> float:
    """Return the seconds in which the device has nothing to do, whatever else it has to.

    A CUDA graph starts its kernels without the host: no time is left between them.
    """
    if stack.captures_layers:
        return 0.0
    time_s = stack.host_per_layer_pass_s
    if passes.experts:
        time_s += stack.host_per_expert_pass_s
        # With a capacity nothing waits for the number of each expert's rows.
        if stack.expert_capacity is None:
            time_s += passes.experts * stack.host_per_own_expert_s
    return passes.num_passes * time_s


def issue_ps(operators: Iterable[Operator], stack: StackProfile, cluster: Cluster) -> int:
    """Return the picoseconds in which the host starts *operators*, 0 where that is not known.

    Known it is of layers with experts: a time a pass, one for each expert of the rank, as each has
    products and hooks of its own, and one for each kernel that casts its rows.  What CUDA graphs
    captured the host does not start.
    """
    if stack.captures_experts:
        return 0
    pass_s = 0.0 if stack.captures_layers else stack.host_issue_pass_s
    time_s = 0.0
    for each in operators:
        if isinstance(each, HostPasses) and each.experts:
            of_pass_s = pass_s + each.experts * stack.host_issue_expert_s
            time_s += each.num_passes * of_pass_s + each.casts * stack.host_issue_cast_s
    return constant_cost(1, time_s * cluster.host_time_factor).time_ps
