"""DeepSpeed: the JSON that `deepspeed.initialize` takes."""

from collections.abc import Mapping
from typing import cast

from meshwright.planner.configuration import json_keys
from meshwright.planner.tables import (
    Codec,
    Facts,
    FileValues,
    Keys,
    MissingError,
    Program,
    Roles,
    value_of,
)
from meshwright.simulator import PlanError

FILE = "ds_config.json"
NAMES = "batch", "micro", "steps"
# What transformers and Accelerate fill in; DeepSpeed itself then takes its default.
AUTO = "auto"
STAGES = 0, 1, 2, 3
BUCKET = 500_000_000
STACK_BUCKET = "stack.gradient_bucket_parameters"
# Norms and biases: what DeepSpeed leaves whole on each rank (1e5, or 10 x hidden_size).
MOST_WHOLE = 1_000_000


def _write_batches(roles: Roles, facts: Facts) -> Keys:
    """Return the three batch sizes, of which two and the ranks give the third."""
    return {
        roles["batch"]: facts.number("global_batch_size"),
        roles["micro"]: facts.number("microbatch_size"),
        roles["steps"]: facts.num_microbatches,
    }


def _read_batches(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    values = {name: keys[roles[name]] for name in NAMES if keys.get(roles[name]) is not None}
    given = {name: words.whole(keys, roles[name], 1) for name in values if values[name] != AUTO}
    if len(given) < len(NAMES):
        steps = None if values.get("steps") == AUTO else given.get("steps", 1)
        return _completed(roles, given, steps, facts, words)
    # With all three given, the data-parallel ranks are what is left of the batch.
    batch, size = given["batch"], given["micro"]
    rank = size * given["steps"]
    if batch % rank:
        raise words.unknown(roles["batch"], batch, (f"multiples of {rank}",))
    dp = batch // rank
    sizes = {"global_batch_size": batch, "microbatch_size": size}
    return {**sizes, "dp": dp, "world_size": dp * facts.number("tp")}


def _completed(
    roles: Roles, given: Mapping[str, int], steps: int | None, facts: Facts, words: FileValues
) -> Keys:
    """Return batch sizes completed as _set_batch_related_parameters of DeepSpeed does.

    What options say counts as said by the file, where transformers would fill it in; there *steps*
    are None.
    """
    # With two of three sizes the ranks decide the third.
    if facts.get("world_size") is None:
        names = ", ".join(roles[name] for name in NAMES)
        raise MissingError("world_size", f"the file leaves out one of {names}")
    dp = facts.world_size // facts.number("tp")
    batch = given.get("batch", cast("int | None", facts.get("global_batch_size")))
    size = given.get("micro", cast("int | None", facts.get("microbatch_size")))
    if size is None and (batch is None or steps is None):
        raise MissingError("microbatch_size", f"the file does not say {roles['micro']}")
    if batch is None and steps is None:
        raise MissingError("global_batch_size", f"{roles['steps']} is {AUTO}")
    if batch is None:
        batch = cast("int", size) * cast("int", steps) * dp
    each = dp * (cast("int", steps) if size is None else size)
    if batch % each:
        raise words.unknown(roles["batch"], batch, (f"multiples of {each} on {dp} ranks",))
    size = size or batch // each
    if "steps" in given and batch != size * given["steps"] * dp:
        raise words.unknown(roles["steps"], given["steps"], (batch // (size * dp),))
    return {"global_batch_size": batch, "microbatch_size": size, "dp": dp}


def _read_precision(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the format that is switched on: fp32 if none is, as in DeepSpeed."""
    switches = {name: keys.get(key) or False for name, key in roles.items()}
    for name, value in switches.items():
        if value not in (True, False, AUTO):
            raise words.unknown(roles[name], value, (True, False, AUTO))
    switched_on = [name for name, value in switches.items() if value is True]
    if len(switched_on) > 1:
        keys_on = " and ".join(roles[name] for name in switched_on)
        raise PlanError(f"{keys_on} of {words.framework} are both true; allowed: one of them")
    # Only who fills `auto` in knows the format: it is asked for.
    autos = [roles[name] for name, value in switches.items() if value == AUTO]
    if switched_on or not autos:
        return {"precision": value_of("precision", *(switched_on or ["fp32"]))}
    if facts.get("precision") is None:
        raise MissingError("precision", f"{' and '.join(autos)} is {AUTO}")
    return {}


def _read_stage(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the ZeRO stage; with stage 3 parameters have to be prefetched a layer ahead.

    DeepSpeed takes ``auto`` for nothing, of which Accelerate has made a 2 where it reads the file.
    """
    stage, prefetch, persistent, legacy = (
        roles[name] for name in ("stage", "ahead", "whole", "old")
    )
    value = keys.get(stage)
    if legacy in keys:
        if type(keys[legacy]) is not bool:
            raise words.unknown(legacy, keys[legacy], (True, False))
        # Old files switch ZeRO on with a boolean, which is stage 1.
        value = 1 if keys[legacy] else 0
    if value == AUTO:
        if facts.get("zero_stage") is None:
            raise MissingError("zero_stage", f"{stage} is auto: 0 to DeepSpeed, 2 to Accelerate")
        value = facts.get("zero_stage")
    value = 0 if value is None else value
    if type(value) is not int or value not in STAGES:
        raise words.unknown(stage, value, STAGES)
    # The other stages gather no parameters.
    if value == max(STAGES):
        if not _is_between(keys.get(prefetch, AUTO), 1, None):
            raise words.unknown(prefetch, keys[prefetch], ("more than 0",))
        if not _is_between(keys.get(persistent, AUTO), 0, MOST_WHOLE):
            raise words.unknown(persistent, keys[persistent], (f"up to {MOST_WHOLE}",))
    return {"zero_stage": value_of("zero_stage", value)}


def _is_between(value: object, least: int, most: int | None) -> bool:
    """Return True for a number within bounds, or a value that is filled in later."""
    if value in (None, AUTO):
        return True
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return value >= least and (most is None or value <= most)


def _read_offload(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the offload to the host: old files have switches, others sections."""
    offloaded = []
    for part in ("optimizer", "parameters"):
        device, pinned, legacy = (roles[f"{part}{end}"] for end in ("", "_pinned", "_old"))
        target = keys.get(device)
        if target not in (None, "none", "cpu", AUTO):
            raise words.unknown(device, target, ("none", "cpu"))
        if target == "cpu" or keys.get(legacy) is True:
            # Only pinned memory is copied while the device computes.
            if keys.get(pinned, True) not in (True, AUTO):
                raise words.unknown(pinned, keys[pinned], (True,))
            offloaded.append(part)
        elif keys.get(legacy) not in (None, False):
            raise words.unknown(legacy, keys[legacy], (True, False))
    # No plan offloads parameters without the optimizer states.
    if offloaded == ["parameters"]:
        raise words.unknown(roles["optimizer"], "none", (f"cpu beside {roles['parameters']}=cpu",))
    return {"offload": value_of("offload", offloaded[-1] if offloaded else "none")}


def _read_bucket(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the bucket size in parameters; transformers' ``auto`` is hidden_size squared."""
    size = keys.get(roles["size"])
    if size == AUTO:
        return {} if facts.model is None else {STACK_BUCKET: facts.model.hidden_size**2}
    if size is None:
        return {STACK_BUCKET: BUCKET}
    # JSON writes 5e8 as a float.
    whole = int(size) if isinstance(size, float) and size.is_integer() else size
    return {STACK_BUCKET: words.whole({roles["size"]: whole}, roles["size"], 1)}


def _read_overlap(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the overlap of gradient reduction with backward: stage 3 has it unless told."""
    overlaps = keys.get(roles["overlap"])
    if overlaps in (None, AUTO):
        overlaps = facts.get("zero_stage") == max(STAGES)
    if type(overlaps) is not bool:
        raise words.unknown(roles["overlap"], overlaps, (True, False))
    return {"stack.overlap_gradient_reduce": value_of("stack.overlap_gradient_reduce", overlaps)}


PROGRAM = Program(
    has_remarks=False,  # of JSON
    files=lambda export: {FILE: json_keys(export.keys)},
    command=lambda _: ('"${SCRIPT:?is not set: your script}"', f"--deepspeed_config {FILE}"),
    codecs={
        "batches of DeepSpeed": Codec(_write_batches, _read_batches),
        "precision of DeepSpeed": Codec(read=_read_precision),
        "stage of DeepSpeed": Codec(read=_read_stage),
        "offload of DeepSpeed": Codec(read=_read_offload),
        "bucket of DeepSpeed": Codec(read=_read_bucket),
        "overlap of DeepSpeed": Codec(read=_read_overlap),
    },
)
