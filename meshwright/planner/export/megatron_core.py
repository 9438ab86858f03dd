"""What Megatron-Core is told of a layout, by Megatron-LM and by Megatron Bridge.

Fields are those of TransformerConfig (megatron/core/transformer/transformer_config.py, 0.16.1).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import cast

from meshwright.hwprofiles import (
    Attention,
    ContextParallel,
    Dispatcher,
    ExpertOverlap,
    Offload,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
    StageSplit,
)
from meshwright.planner.export.table import Facts, Keys, Row, Words
from meshwright.planner.export.texts import layout_text
from meshwright.simulator import ModelSpec, PlanError
from meshwright.simulator.layout import check_predictions, prediction_place, read_layout
from meshwright.simulator.schedules import core_group

FULL: Keys = {"granularity": "full", "method": "uniform", "num_layers": 1}
METHODS = (RecomputeMethod.BLOCK, RecomputeMethod.UNIFORM)
MODULES = "modules"
BATCHES = {"microbatch_size": "micro_batch_size", "global_batch_size": "global_batch_size"}
CONTEXT: Mapping[object, object] = {
    ContextParallel.RING: "p2p",
    ContextParallel.ALL_GATHER: "all_gather",
    ContextParallel.ALL_TO_ALL: "a2a",
    ContextParallel.RING_OF_SWAPS: "a2a+p2p",
}
DISPATCHERS: Mapping[Dispatcher, tuple[str, str | None]] = {
    Dispatcher.ALL_TO_ALL: ("alltoall", None),
    Dispatcher.DEEPEP: ("flex", "deepep"),
    Dispatcher.HYBRIDEP: ("flex", "hybridep"),
}
DELAYED = ExpertOverlap.DELAYED_WEIGHTS
FULLY_SHARDED = 3
TWO_LEVELS = 2  # of a ring of swaps: Transformer Engine takes no more
RECOMPUTE: Mapping[object, Keys] = {
    Recompute.NONE: {},
    Recompute.SELECTIVE: {"granularity": "selective"},
    Recompute.FULL: FULL,
}


def shards_row(words: Words, optimizer: Sequence[str], sharded: Keys, *, off: object) -> Row:
    """Return the row of what replicas share.

    Args:
        words: Of the framework.
        optimizer: Keys of the distributed optimizer.
        sharded: What tells of Megatron-FSDP besides: its switch, then its strategy and others.
        off: As for `shared_rows`.
    """
    switch, strategy, *_ = sharded

    def write(facts: Facts) -> Keys:
        stage = words.known("zero_stage", facts, (0, 1, 3))
        if stage == 0:
            return {} if off is None else dict.fromkeys(optimizer, off)
        return dict.fromkeys(optimizer, True) | (sharded if stage == FULLY_SHARDED else {})

    def read(keys: Keys, _: Facts) -> Keys:
        if keys.get(switch) is True:
            if keys.get(strategy) != sharded[strategy]:
                raise words.unknown(strategy, keys.get(strategy), (sharded[strategy],))
            return {"zero_stage": FULLY_SHARDED}
        theirs = [keys[key] for key in optimizer if key in keys]
        if theirs[1:] not in ([], theirs[:1]):
            raise words.unknown(optimizer[0], keys[optimizer[0]], (f"that of {optimizer[1]}",))
        if not theirs and off is False:
            return {}  # a recipe says it
        return {"zero_stage": int(theirs[:1] == [True])}

    return Row(fields=("zero_stage",), keys=(*optimizer, *sharded), write=write, read=read)


def _is_fully_sharded(facts: Facts) -> bool:
    return facts.number("zero_stage") == FULLY_SHARDED


PREDICTIONS, PLACE = "prediction_layers", "prediction_stage"


def shared_rows(
    words: Words, key: Callable[[str], str], *, overlap: Callable[[str], str], off: object
) -> tuple[Row, ...]:
    """Return the correspondences of all that is trained by Megatron-Core.

    Args:
        words: Of the framework.
        key: From a field of Megatron-Core's TransformerConfig to the framework's key.
        overlap: The same of a field that says what goes on beside other work.
        off: What stands for a switch that is not on; None where its key is left out.
    """
    return (
        words.same("tp", key("tensor_model_parallel_size"), 1),
        words.same("pp", key("pipeline_model_parallel_size"), 1),
        words.choice(
            "sequence_parallel",
            key("sequence_parallel"),
            {True: True, False: off},
            default=off,
        ),
        _recompute(words, key, is_written=off is not None),
        # fused is cuDNN's flash attention by way of Transformer Engine, flash is flash-attn's.
        words.choice(
            "attention",
            key("attention_backend"),
            {Attention.FLASH: "fused", Attention.UNFUSED: "unfused"},
            default="auto",
            also={
                "flash": Attention.FLASH,
                "auto": Attention.FLASH,
                "local": Attention.UNFUSED,
            },
        ),
        # get_forward_backward_func of megatron/core/pipeline_parallel/schedules.py
        words.rule("schedule", _schedule),
        words.rule("reduce_precision", lambda facts: facts.get("gradient_precision")),
        words.rule("sync_each_microbatch", _is_fully_sharded),
        words.rule("dp_shard", lambda facts: facts.get("dp")),
        words.rule("reshard_after_forward", lambda facts: _is_fully_sharded(facts) or None),
        words.only("offload", Offload.NONE),
        words.same("cp", key("context_parallel_size"), 1),
        _context(words, key),
        _expert_ranks(words, key),
        _dispatch(words, key),
        _expert_overlap(words, overlap),
        _predictions(words, key("mtp_num_layers")),
    )


def _predictions(words: Words, key: str) -> Row:
    """Return the row of layers that predict further tokens."""
    return Row(
        fields=(PREDICTIONS,),
        keys=(key,),
        write=lambda facts: {key: facts.get(PREDICTIONS)} if facts.get(PREDICTIONS) else {},
        read=lambda keys, _: {PREDICTIONS: words.whole(keys, key, 1) if keys.get(key) else 0},
    )


def _has_experts(facts: Facts) -> bool:
    return facts.model is not None and facts.model.experts is not None


def _expert_ranks(words: Words, key: Callable[[str], str]) -> Row:
    """Return the row of the ranks among which experts are divided; of a dense model one."""
    ranks, widths = key("expert_model_parallel_size"), key("expert_tensor_parallel_size")

    def write(facts: Facts) -> Keys:
        if not _has_experts(facts):
            return {}
        etp = facts.get("etp")
        return {ranks: facts.get("ep")} | ({} if etp in (None, facts.get("tp")) else {widths: etp})

    def read(keys: Keys, facts: Facts) -> Keys:
        if not _has_experts(facts):
            return {**words.held(ranks, (1,)).read(keys, facts)}
        etp = None if keys.get(widths) is None else words.whole(keys, widths, 1)
        return {"ep": words.whole(keys, ranks, 1), "etp": etp}

    return Row(fields=("ep", "etp"), keys=(ranks, widths), write=write, read=read)


def _dispatch(words: Words, key: Callable[[str], str]) -> Row:
    """Return the row of how tokens go to experts, and of what runs as one for all of a rank."""
    kind, backend = key("moe_token_dispatcher_type"), key("moe_flex_dispatcher_backend")
    grouped, fused = key("moe_grouped_gemm"), key("moe_permute_fusion")
    usual, fact = Dispatcher.ALL_TO_ALL, "stack.grouped_experts"

    def write(facts: Facts) -> Keys:
        if not _has_experts(facts):
            return {}
        name, way = DISPATCHERS[cast("Dispatcher | None", facts.get("dispatcher")) or usual]
        found: Keys = {kind: name}
        found |= {} if way is None else {backend: way}
        return found | (dict.fromkeys((grouped, fused), True) if facts.get(fact) else {})

    def read(keys: Keys, facts: Facts) -> Keys:
        if not _has_experts(facts):
            return {}
        name = words.word(keys, kind, "allgather")
        way = words.word(keys, backend, "deepep") if name == "flex" else None
        for ours, each in DISPATCHERS.items():
            if each == (name, way):
                said = None if ours is usual else ours
                return {"dispatcher": said, fact: keys.get(grouped) is True}
        wrong, value = (backend, way) if name == "flex" else (kind, name)
        place = int(name == "flex")
        known = dict.fromkeys(each[place] for each in DISPATCHERS.values() if each[place])
        raise words.unknown(wrong, value, known)

    fields = ("dispatcher", fact)
    return Row(fields=fields, keys=(kind, backend, grouped, fused), write=write, read=read)


def expert_fields(model: ModelSpec) -> Keys:
    """Return what describes routed experts; shares are of a token's own experts in any case."""
    experts = model.experts
    if experts is None:
        return {}
    has_experts = [int(experts.has_layer(number)) for number in range(model.num_layers)]
    others: Keys = {
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
        **{name: value for name, value in others.items() if value},
    }


def _expert_overlap(words: Words, key: Callable[[str], str]) -> Row:
    """Return the row of exchanges with experts beside what another microbatch computes."""
    beside, later = key("overlap_moe_expert_parallel_comm"), key("delay_wgrad_compute")

    def write(facts: Facts) -> Keys:
        overlap = facts.get("expert_overlap")
        if overlap is None:
            return {}
        names = (beside, later) if overlap is DELAYED else (beside,)
        return dict.fromkeys(names, True)

    def read(keys: Keys, facts: Facts) -> Keys:
        if keys.get(beside) is not True:
            return {**words.held(later, (False, None)).read(keys, facts)}
        is_later = keys.get(later) is True
        return {"expert_overlap": DELAYED if is_later else ExpertOverlap.MICROBATCHES}

    return Row(fields=("expert_overlap",), keys=(beside, later), write=write, read=read)


def _schedule(facts: Facts) -> str:
    return "interleaved" if facts.number("num_virtual_stages") > 1 else "1f1b"


def _context(words: Words, key: Callable[[str], str]) -> Row:
    """Return the row of how context-parallel ranks attend, where there are several.

    Of a ring of swaps sizes are told of both groups, first of the one that swaps.
    """
    way = words.choice("cp_type", key("cp_comm_type"), CONTEXT, default="p2p")
    ranks, sizes = key("context_parallel_size"), key("hierarchical_context_parallel_sizes")

    def write(facts: Facts) -> Keys:
        cp, inner = facts.number("cp"), cast("int | None", facts.get("cp_inner"))
        if cp == 1:
            return {}
        return way.write(facts) | ({sizes: [inner, cp // inner]} if inner else {})

    def read(keys: Keys, facts: Facts) -> Keys:
        if keys.get(ranks, 1) == 1:
            return {}
        found = dict(way.read(keys, facts))
        if found["cp_type"] is not ContextParallel.RING_OF_SWAPS:
            return found
        told = [int(each) for each in re.findall(r"\d+", str(keys.get(sizes)))]
        if len(told) != TWO_LEVELS or prod(told) != keys[ranks]:
            allowed = f"{TWO_LEVELS} sizes whose product is {ranks}={keys[ranks]}"
            raise words.unknown(sizes, keys.get(sizes), (allowed,))
        return found | {"cp_inner": told[0]}

    return Row(fields=("cp_type", "cp_inner"), keys=(*way.keys, sizes), write=write, read=read)


def _recompute(words: Words, key: Callable[[str], str], *, is_written: bool) -> Row:
    keys = {name: key(f"recompute_{name}") for name in (*FULL, MODULES)}

    def write(facts: Facts) -> Keys:
        theirs = RECOMPUTE[words.known("recompute", facts, RECOMPUTE)]
        if facts.get("recompute_layers"):
            method = facts.get("recompute_method") or RecomputeMethod.BLOCK
            layers = {"method": str(method), "num_layers": facts.get("recompute_layers")}
            theirs = {**theirs, **layers}
        modules = cast("tuple[RecomputeModule, ...]", facts.get("recompute_modules"))
        if modules:
            theirs = {**theirs, MODULES: [str(each) for each in modules]}
        absent: Keys = dict.fromkeys(FULL) if is_written else {}
        return {keys[name]: value for name, value in (absent | theirs).items()}

    def read(found: Keys, _: Facts) -> Keys:
        theirs = {name: found[each] for name, each in keys.items() if found.get(each) is not None}
        named = _modules(words, keys[MODULES], found)
        theirs.pop(MODULES, None)
        if named and theirs == RECOMPUTE[Recompute.SELECTIVE]:
            return {"recompute": Recompute.SELECTIVE, "recompute_modules": named}
        for ours, each in RECOMPUTE.items():
            if each == theirs:
                return {"recompute": ours}
        if (layers := _layers(theirs)) is not None:
            return layers
        given = ", ".join(f"{keys[name]}={value}" for name, value in theirs.items())
        raise PlanError(
            f"{given} of {words.framework} is in no plan; allowed: none, "
            f"{keys['granularity']}=selective alone, or full with a method "
            f"({', '.join(METHODS)}) and a number of layers"
        )

    fields = ("recompute", "recompute_modules", "recompute_layers", "recompute_method")
    return Row(fields=fields, keys=tuple(keys.values()), write=write, read=read)


def _layers(theirs: Keys) -> Keys | None:
    """Return which layers are recomputed in full, None where the keys do not say it."""
    method, number = theirs.get("method"), theirs.get("num_layers")
    is_full = theirs.keys() == FULL.keys() and theirs["granularity"] == FULL["granularity"]
    if not is_full or method not in METHODS or not isinstance(number, int):
        return None
    said = None if method == RecomputeMethod.BLOCK else RecomputeMethod.UNIFORM
    return {"recompute": Recompute.FULL, "recompute_layers": number, "recompute_method": said}


def _modules(words: Words, key: str, keys: Keys) -> tuple[RecomputeModule, ...]:
    """Return the parts of a layer that a key names, in one text or as a list."""
    found = keys.get(key)
    if isinstance(found, str):
        keys = {key: re.findall(r"\w+", found)}
    said = () if found is None else words.names(keys, key, ())
    for each in said:
        if each not in list(RecomputeModule):
            raise words.unknown(key, each, tuple(RecomputeModule))
    named = tuple(each for each in RecomputeModule if each in said)
    return () if named == (RecomputeModule.CORE_ATTN,) else named


def stages_row(words: Words, layout: str, virtual: str, *, says_both: bool) -> Row:
    """Return the row of stages: even ones by their number, others as a layout.

    Args:
        words: Of the framework.
        layout: Key of the text that lists the stages, as ``Et*3|t*4L``.
        virtual: Key of the number of virtual stages of a rank.
        says_both: Whether all keys are written, those with nothing in them, too.
    """

    def write(facts: Facts) -> Keys:
        count, place = facts.number("num_virtual_stages"), facts.get(PLACE)
        stages = cast("tuple[int, ...]", facts.get("stages"))
        text = layout_text(stages, facts.number(PREDICTIONS), cast("int | None", place))
        is_even = len(set(stages)) == 1 and place is None
        number = None if count == 1 or not (is_even or says_both) else count
        found = {layout: None if is_even else text, virtual: number}
        return {name: value for name, value in found.items() if says_both or value is not None}

    def read(keys: Keys, facts: Facts) -> Keys:
        pp = facts.number("pp")
        if keys.get(layout) is None:
            count = words.whole({virtual: keys.get(virtual) or 1}, virtual, 1)
            return {"num_virtual_stages": count} | ({"stages": StageSplit.EVEN} if pp > 1 else {})
        text = words.word(keys, layout, "")
        try:
            stages = read_layout(text)
            check_predictions(text, facts.number(PREDICTIONS))
        except PlanError as error:
            raise PlanError(f"{layout} of {words.framework}: {error}") from None
        if len(stages) % pp:
            raise words.unknown(layout, text, (f"a multiple of {pp} stages",))
        place = {PLACE: prediction_place(text)}
        return place | {"stages": stages, "num_virtual_stages": len(stages) // pp}

    fields = ("stages", "num_virtual_stages", PLACE)
    return Row(fields=fields, keys=(layout, virtual), write=write, read=read)


def groups_row(words: Words, key: str) -> Row:
    """Return the row of microbatches in a row, where they are not as many as ranks.

    The framework then takes that many, or refuses to run (core 0.16).
    """

    def smallest(facts: Facts) -> int | None:
        if facts.number("num_virtual_stages") == 1:
            return None
        return core_group(facts.number("pp"), facts.num_microbatches)

    def write(facts: Facts) -> Keys:
        size = facts.get("microbatch_group_size") or smallest(facts)
        return {} if size in {None, facts.number("pp")} else {key: size}

    def read(keys: Keys, facts: Facts) -> Keys:
        size = None if keys.get(key) is None else words.whole(keys, key, 1)
        return {} if size in {None, smallest(facts)} else {"microbatch_group_size": size}

    return Row(fields=("microbatch_group_size",), keys=(key,), write=write, read=read)
