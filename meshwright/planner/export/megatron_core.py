"""Codecs of Megatron-Core, which Megatron-LM and Megatron Bridge share.

Fields are those of TransformerConfig (megatron/core/transformer/transformer_config.py, 0.16.1).
"""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from math import prod
from typing import TypeVar, cast

from meshwright.hwprofiles import (
    Allocator,
    CudaGraphImpl,
    CudaGraphs,
    OffloadModule,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
    StageSplit,
    changed_facts,
)
from meshwright.planner.tables import Codec, Facts, FileValues, Keys, Roles, layout_text
from meshwright.simulator import ModelSpec, PlanError
from meshwright.simulator.layout import check_mtp_layers, layout_mtp_stage, read_layout
from meshwright.simulator.schedules import core_group

Part = TypeVar("Part", bound=StrEnum)
FULL: Keys = {"granularity": "full", "method": "uniform", "num_layers": 1}
METHODS = (RecomputeMethod.BLOCK, RecomputeMethod.UNIFORM)
MODULES = "modules"
SHARDED = "optim_grads_params"
TWO_LEVELS = 2  # of hybrid ring + all-to-all cp: Transformer Engine takes no more
RECOMPUTE: Mapping[object, Keys] = {
    Recompute.NONE: {},
    Recompute.SELECTIVE: {"granularity": "selective"},
    Recompute.FULL: FULL,
}
MTP_LAYERS, MTP_STAGE = "prediction_layers", "prediction_stage"
ALLOCATOR = "allocator"
SEGMENT_SETTINGS = {
    Allocator.FIXED: "expandable_segments:False",
    Allocator.EXPANDABLE: "expandable_segments:True",
}


def _read_zero(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the ZeRO stage of the distributed optimizer's keys, or Megatron-FSDP's."""
    strategy = roles["strategy"]
    if keys.get(roles["switch"]) is True:
        # Of Megatron-FSDP's strategies a plan has full sharding alone.
        if keys.get(strategy) != SHARDED:
            raise words.unknown(strategy, keys.get(strategy), (SHARDED,))
        return {"zero_stage": 3}
    names = [roles[role] for role in ("optimizer", "other") if role in roles]
    values = [keys[key] for key in names if key in keys]
    # Both options switch the same thing on, so they have to agree.
    if values[1:] not in ([], values[:1]):
        raise words.unknown(names[0], keys[names[0]], (f"that of {names[1]}",))
    if not values and "other" in roles:
        return {}  # a recipe says it
    return {"zero_stage": int(values[:1] == [True])}


def expert_fields(model: ModelSpec) -> Keys:
    """Return the keys of routed experts; router scores are of a token's own experts in any case."""
    experts = model.experts
    if experts is None:
        return {}
    has_experts = [int(experts.has_layer(number)) for number in range(model.num_layers)]
    optional: Keys = {
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_router_enable_expert_bias": experts.routing_bias,
        "moe_shared_expert_intermediate_size": experts.shared_hidden_size,
        "moe_router_num_groups": experts.num_groups > 1 and experts.num_groups,
        "moe_router_group_topk": experts.num_groups > 1 and experts.groups_per_token,
        "moe_layer_freq": not all(has_experts) and str(has_experts).replace(" ", ""),
    }
    return {
        "num_experts": experts.num_experts,
        "moe_router_topk": experts.experts_per_token,
        "moe_ffn_hidden_size": experts.hidden_size,
        "moe_router_score_function": "sigmoid" if experts.scores == "sigmoid" else "softmax",
        **{name: value for name, value in optional.items() if value},
    }


def _write_instances(roles: Roles, facts: Facts) -> Keys:
    """Return the number of distributed-optimizer instances, in each of which states are whole."""
    shards = cast("int | None", facts.get("dp_shard")) or facts.number("dp")
    instances = facts.number("dp") // shards
    return {roles["instances"]: instances} if instances > 1 else {}


def _read_instances(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the data-parallel ranks of a distributed-optimizer instance, with whole sequences.

    Raises:
        PlanError: If sequences would lie across instances, which no plan has.
    """
    key = roles["instances"]
    instances = words.whole(keys, key, 1)
    if instances == 1:
        return {"dp_shard": facts.get("dp")}
    model_ranks = prod(words.whole(keys, roles[axis], 1) for axis in ("tp", "pp", "cp"))
    # An instance takes data-parallel ranks alone, never a part of the sequence.
    dp = facts.world_size // model_ranks
    if dp % instances:
        raise words.unknown(key, instances, (f"a divisor of the {dp} ranks of --dp",))
    return {"dp_shard": dp // instances}


def _write_sizes(roles: Roles, facts: Facts) -> Keys:
    """Return the group sizes of hybrid ring + all-to-all cp, first that of all-to-all."""
    inner = cast("int | None", facts.get("cp_inner"))
    return {roles["sizes"]: [inner, facts.number("cp") // inner]} if inner else {}


def _read_sizes(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    sizes, ranks = roles["sizes"], roles["ranks"]
    group_sizes = [int(each) for each in re.findall(r"\d+", str(keys.get(sizes)))]
    if len(group_sizes) != TWO_LEVELS or prod(group_sizes) != keys[ranks]:
        allowed = f"{TWO_LEVELS} sizes whose product is {ranks}={keys[ranks]}"
        raise words.unknown(sizes, keys.get(sizes), (allowed,))
    return {"cp_inner": group_sizes[0]}


def _write_recompute(roles: Roles, facts: Facts) -> Keys:
    """Return the keys of activation recomputation; None for those that say nothing."""
    recompute_keys = {**dict.fromkeys(FULL), **RECOMPUTE[facts.get("recompute")]}
    if facts.get("recompute_layers"):
        method = facts.get("recompute_method") or RecomputeMethod.BLOCK
        recompute_keys |= {"method": str(method), "num_layers": facts.get("recompute_layers")}
    modules = cast("tuple[RecomputeModule, ...]", facts.get("recompute_modules"))
    if modules:
        recompute_keys |= {MODULES: [str(each) for each in modules]}
    return {roles[name]: value for name, value in recompute_keys.items()}


def _read_recompute(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    recompute_keys = {role: keys[key] for role, key in roles.items() if keys.get(key) is not None}
    parts = _modules(words, roles[MODULES], keys, RecomputeModule)
    # Core attention alone is what selective recomputes without a list.
    named = () if parts == (RecomputeModule.CORE_ATTN,) else parts
    recompute_keys.pop(MODULES, None)
    if named and recompute_keys == RECOMPUTE[Recompute.SELECTIVE]:
        return {"recompute": Recompute.SELECTIVE, "recompute_modules": named}
    for mode, each in RECOMPUTE.items():
        if each == recompute_keys:
            return {"recompute": mode}
    if (layers := _layers(recompute_keys)) is not None:
        return layers
    given = ", ".join(f"{roles[name]}={value}" for name, value in recompute_keys.items())
    raise PlanError(
        f"{given} of {words.framework} is in no plan; allowed: none, "
        f"{roles['granularity']}=selective alone, or full with a method "
        f"({', '.join(METHODS)}) and a number of layers"
    )


def _layers(recompute_keys: Keys) -> Keys | None:
    """Return the layers that are recomputed in full; None where the keys do not say it."""
    method, number = recompute_keys.get("method"), recompute_keys.get("num_layers")
    is_full = (
        recompute_keys.keys() == FULL.keys()
        and recompute_keys["granularity"] == FULL["granularity"]
    )
    if not is_full or method not in METHODS or not isinstance(number, int):
        return None
    recompute_method = None if method == RecomputeMethod.BLOCK else RecomputeMethod.UNIFORM
    return {
        "recompute": Recompute.FULL,
        "recompute_layers": number,
        "recompute_method": recompute_method,
    }


def _modules(words: FileValues, key: str, keys: Keys, kinds: Iterable[Part]) -> tuple[Part, ...]:
    """Return the modules of a layer that a key names, in one text or as a list."""
    value = keys.get(key)
    if isinstance(value, str):
        keys = {key: re.findall(r"\w+", value)}
    named = () if value is None else words.names(keys, key, ())
    parts = tuple(kinds)
    for each in named:
        if each not in parts:
            raise words.unknown(key, each, parts)
    return tuple(each for each in parts if each in named)


def _write_offload(roles: Roles, facts: Facts) -> Keys:
    """Return the keys of activation offloading, which some frameworks have to switch on."""
    layers = facts.get("offload_layers")
    modules = cast("tuple[OffloadModule, ...]", facts.get("offload_modules"))
    if layers is not None:
        return {roles[role]: True for role in ("switch",) if role in roles} | {
            roles["layers"]: layers
        }
    names = [str(each) for each in modules]
    return {roles["fine"]: True, roles[MODULES]: names} if modules else {}


def _read_offload(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    offload: Keys = {}
    if "switch" not in roles or keys.get(roles["switch"]) is True:
        number = words.whole(keys, roles["layers"], 0, least=0)
        offload["offload_layers"] = number or None
    if keys.get(roles["fine"]) is True:
        offload["offload_modules"] = _modules(words, roles[MODULES], keys, OffloadModule)
    return offload


def _write_stages(roles: Roles, facts: Facts) -> Keys:
    """Return even stages by their number, others as a layout; None for keys that say nothing."""
    count, mtp_stage = facts.number("num_virtual_stages"), facts.get(MTP_STAGE)
    stages = cast("tuple[int, ...]", facts.get("stages"))
    text = layout_text(stages, facts.number(MTP_LAYERS), cast("int | None", mtp_stage))
    # A stage that is chosen for MTP layers needs a layout, however even the others are.
    is_even = len(set(stages)) == 1 and mtp_stage is None
    number = None if count == 1 or not (is_even or "virtual" in roles) else count
    return {roles["layout"]: None if is_even else text, _virtual(roles): number}


def _virtual(roles: Roles) -> str:
    """Return the key of virtual stages, which some frameworks have for even stages alone."""
    return roles.get("virtual") or roles["virtual_of_even"]


def _read_stages(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    layout, virtual, pp = roles["layout"], _virtual(roles), facts.number("pp")
    if keys.get(layout) is None:
        count = words.whole({virtual: keys.get(virtual) or 1}, virtual, 1)
        ends = any(keys.get(roles[each]) is True for each in ("embedding", "loss") if each in roles)
        if facts.model is not None and not ends and facts.model.num_layers % (pp * count):
            virtual_text = f"{keys.get(virtual) or 1} on {pp} pipeline ranks"
            raise PlanError(
                f"{virtual}={virtual_text} of {words.framework} does not divide its "
                f"{facts.model.num_layers} layers"
            )
        return {"num_virtual_stages": count} | ({"stages": StageSplit.EVEN} if pp > 1 else {})
    text = words.word(keys, layout, "")
    try:
        stages = read_layout(text)
        check_mtp_layers(text, facts.number(MTP_LAYERS))
    except PlanError as error:
        raise PlanError(f"{layout} of {words.framework}: {error}") from None
    # Stages go round the ranks: as many on each.
    if len(stages) % pp:
        raise words.unknown(layout, text, (f"a multiple of {pp} stages",))
    place = {MTP_STAGE: layout_mtp_stage(text)}
    return place | {"stages": stages, "num_virtual_stages": len(stages) // pp}


def _core_group_size(facts: Facts) -> int | None:
    """Return the microbatch group size that core 0.16 takes, or refuses to run with."""
    if facts.number("num_virtual_stages") == 1:
        return None
    return core_group(facts.number("pp"), facts.num_microbatches)


def _write_group(roles: Roles, facts: Facts) -> Keys:
    """Return the microbatch group size where it is not the number of pipeline ranks."""
    size = facts.get("microbatch_group_size") or _core_group_size(facts)
    return {} if size in {None, facts.number("pp")} else {roles["size"]: size}


def _read_group(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    key = roles["size"]
    size = None if keys.get(key) is None else words.whole(keys, key, 1)
    return {} if size in {None, _core_group_size(facts)} else {"microbatch_group_size": size}


# Parts of a layer that are captured where rows of experts vary (CudaGraphScope).
UP_TO_EXPERTS = ("attn", "moe_router", "moe_preprocess")
WHOLE_LAYER = ({"full"}, set[str](), {"attn", "mlp"}, {"attn", "moe"}, {"attn", "mlp", "moe"})
FULL_ITERATION = "full_iteration"
GRAPHS, IMPL, CAPACITY = "stack.cuda_graphs", "stack.cuda_graph_impl", "stack.expert_capacity"


def _leaves_experts_out(facts: Facts) -> bool:
    """Return True if CUDA graphs end before the experts, whose rows vary."""
    return facts.get("model.experts") is not None and facts.get(CAPACITY) is None


def _write_graphs(roles: Roles, facts: Facts) -> Keys:
    """Return the keys of CUDA graphs; a whole step is a scope until core 0.17, by that role."""
    graphs = facts.get(GRAPHS)
    if graphs == CudaGraphs.WHOLE_STEP:
        scope = roles.get("whole")
        if scope is None:
            return {roles["impl"]: FULL_ITERATION}
        return {roles["impl"]: str(CudaGraphImpl.LOCAL), scope: [FULL_ITERATION]}
    if graphs != CudaGraphs.LAYERS:
        return {}
    graph_keys: Keys = {roles["impl"]: str(facts.get(IMPL))}
    return graph_keys | ({roles["scope"]: [*UP_TO_EXPERTS]} if _leaves_experts_out(facts) else {})


def _read_graphs(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the CUDA graphs: of layers as far as a plan has them captured, or of a whole step."""
    no_graphs, scope = str(CudaGraphs.NONE), roles["scope"]
    impl = words.word(
        {roles["impl"]: keys.get(roles["impl"]) or no_graphs}, roles["impl"], no_graphs
    )
    scopes = keys.get(scope) or ()
    parts = set(
        words.names({scope: scopes.split(",") if isinstance(scopes, str) else scopes}, scope, ())
    )
    if impl == no_graphs:
        return {}
    # Core 0.17 has a whole step as an implementation, earlier ones as a scope of `local`.
    if impl == FULL_ITERATION or (impl == CudaGraphImpl.LOCAL and parts == {FULL_ITERATION}):
        return {GRAPHS: str(CudaGraphs.WHOLE_STEP)}
    if impl not in [*CudaGraphImpl]:
        raise words.unknown(roles["impl"], impl, (no_graphs, *CudaGraphImpl, FULL_ITERATION))
    # A graph has fixed shapes: experts whose rows vary are left out.
    allowed = [set(UP_TO_EXPERTS)] if _leaves_experts_out(facts) else [*WHOLE_LAYER]
    if parts not in allowed:
        scope_text = ",".join(sorted(parts)) or "full"
        raise words.unknown(
            scope, scope_text, (",".join(sorted(each)) or "full" for each in allowed)
        )
    layers: Keys = {GRAPHS: str(CudaGraphs.LAYERS)}
    return layers if impl == CudaGraphImpl.TRANSFORMER_ENGINE else layers | {IMPL: impl}


def _write_capacity(roles: Roles, facts: Facts) -> Keys:
    factor = facts.get(CAPACITY)
    return {} if factor is None else {roles["factor"]: factor, roles["pad"]: True}


def _read_capacity(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the capacity factor of experts; dropping tokens without padding is in no plan."""
    factor, has_padding = keys.get(roles["factor"]), keys.get(roles["pad"]) is True
    if isinstance(factor, int | float) and factor < 0:  # as no word (TransformerConfig)
        factor = None
    if (factor is None) == has_padding:
        raise words.unknown(roles["pad"], has_padding, (f"true exactly with {roles['factor']}",))
    return {} if factor is None else {CAPACITY: factor}


def _write_segments(roles: Roles, facts: Facts) -> Keys:
    """Return the allocator's variables; CUDA graphs then go without registered buffers of NCCL.

    TECudaGraphHelper of megatron/core/transformer/cuda_graphs.py, core 0.16.
    """
    allocator = Allocator(str(facts.get(f"stack.{ALLOCATOR}")))
    variables: Keys = {roles["grow"]: SEGMENT_SETTINGS[allocator]}
    if allocator is Allocator.FIXED:
        # Fixed segments are PyTorch's default: only a user who set them gets the variable.
        changed = {each.field for each in changed_facts(facts.stack)} if facts.stack else set()
        return variables if ALLOCATOR in changed else {}
    return variables | ({roles["registers"]: "0"} if facts.get(GRAPHS) != CudaGraphs.NONE else {})


def _read_segments(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    words.held(keys, roles["registers"], ("0", "1"))
    words.held(keys, roles["grow"], tuple(SEGMENT_SETTINGS.values()))
    setting = keys.get(roles["grow"])  # without a word they are as the stack has them
    return {
        f"stack.{ALLOCATOR}": str(each)
        for each, word in SEGMENT_SETTINGS.items()
        if word == setting
    }


CODECS: Mapping[str, Codec] = {
    "zero of Megatron": Codec(read=_read_zero),
    "recompute of Megatron": Codec(_write_recompute, _read_recompute),
    "instances of Megatron": Codec(_write_instances, _read_instances),
    "sizes of a ring of swaps": Codec(_write_sizes, _read_sizes),
    "layout of Megatron": Codec(_write_stages, _read_stages),
    "activations of Megatron": Codec(_write_offload, _read_offload),
    "group of Megatron": Codec(_write_group, _read_group),
    "graphs of Megatron": Codec(_write_graphs, _read_graphs),
    "capacity of Megatron": Codec(_write_capacity, _read_capacity),
    "segments of Megatron": Codec(_write_segments, _read_segments),
}
