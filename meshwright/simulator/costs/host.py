"""Host (CPU) time of a layer: waits of the device, and kernel launch time."""

from collections.abc import Iterable

from meshwright.hwprofiles import Cluster, StackProfile
from meshwright.simulator.blocks import HostPasses, Operator
from meshwright.simulator.costs.compute import constant_cost


def host_wait_s(passes: HostPasses, stack: StackProfile) -> float:
    """Return the seconds in which the device waits for the host, however busy it is.

    A CUDA graph launches its kernels without the host: there are no waits.
    """
    if stack.captures_layers:
        return 0.0
    time_s = stack.host_per_layer_pass_s
    if passes.experts:
        time_s += stack.host_per_expert_pass_s
        # With an expert capacity no device-to-host copy of token counts is needed.
        if stack.expert_capacity is None:
            time_s += passes.experts * stack.host_per_own_expert_s
    return passes.num_passes * time_s


def issue_ps(operators: Iterable[Operator], stack: StackProfile, cluster: Cluster) -> int:
    """Return the picoseconds of host time to launch *operators*, 0 where not known.

    It is known for MoE layers: a constant a pass, one for each local expert, which has GEMMs and
    hooks of its own, and one for each cast kernel.  Captured CUDA graphs need none.
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
