"""Accelerate: the YAML that ``accelerate config`` writes and ``accelerate launch`` takes."""

from typing import cast

from meshwright.hwprofiles import Precision
from meshwright.planner.configuration import yaml_text
from meshwright.planner.tables import (
    Codec,
    Facts,
    FileValues,
    Keys,
    MissingError,
    Program,
    Roles,
    Starter,
    remarks,
)
from meshwright.simulator import PlanError

FILE = "accelerate.yaml"
AUTO = "auto"
# By their numbers, from 1 (FSDP_SHARDING_STRATEGY of utils/constants.py).
STRATEGIES = "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"
WHOLE, HYBRID = "NO_SHARD", "HYBRID_SHARD"


def _write_mixed(roles: Roles, facts: Facts) -> Keys:
    """Return the format of mixed precision, in which fp32 weights are multiplied."""
    precision = facts.get("precision")
    # Weights that are stored in 16 bits need no autocast.
    is_mixed = precision is not Precision.FP32 and facts.get("stack.parameter_precision") is None
    return {roles["mixed"]: str(precision) if is_mixed else "no"}


def _write_mesh(roles: Roles, facts: Facts) -> Keys:
    """Return a device mesh of several axes, which FSDP2 alone takes."""
    dp, shards, tp = (facts.number(name) for name in ("dp", "dp_shard", "tp"))
    # Over one axis FSDP shards without a mesh.
    if shards == dp and tp == 1:
        return {}
    return {roles["replicas"]: dp // shards, roles["shards"]: shards, roles["tp"]: tp}


def _read_mesh(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the mesh: an axis that is absent is 1, and all ranks are in it.

    So ParallelismConfig checks it (parallelism_config.py).
    """
    tp, replicas = (words.whole(keys, roles[name], 1) for name in ("tp", "replicas"))
    ranks = facts.world_size
    if ranks % tp:
        raise words.unknown(roles["tp"], tp, (f"a divisor of {ranks} processes",))
    dp = ranks // tp
    has_mesh = any(key in keys for key in roles.values())
    if dp % replicas:
        raise words.unknown(roles["replicas"], replicas, (f"a divisor of {dp} ranks",))
    shards = words.whole(keys, roles["shards"], 1 if has_mesh else dp)
    if shards * replicas != dp:
        raise words.unknown(roles["shards"], shards, (dp // replicas,))
    if shards == 1 and ranks > 1:
        raise words.unknown(roles["shards"], shards, ("more than 1, for FSDP to shard across",))
    return {"tp": tp, "dp": dp, "dp_shard": shards}


def _read_strategy(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the sharding strategy of FSDP, which has a name and a number."""
    key, ranks, nodes = roles["strategy"], facts.world_size, facts.number("num_nodes")
    strategy = str(keys.get(key, STRATEGIES[0])).upper()
    if strategy.isdecimal() and 0 < int(strategy) <= len(STRATEGIES):
        strategy = STRATEGIES[int(strategy) - 1]
    if strategy not in STRATEGIES or strategy == WHOLE:
        raise words.unknown(key, keys[key], [each for each in STRATEGIES if each != WHOLE])
    shards = ranks
    if strategy.startswith(HYBRID):
        # Hybrid strategies shard within a node and replicate across nodes.
        # Nodes of different sizes would have groups of different sizes.
        if ranks % nodes:
            raise words.unknown(key, strategy, (f"others of {ranks} ranks on {nodes} machines",))
        shards = ranks // nodes
    # SHARD_GRAD_OP keeps gathered parameters from forward to backward, as ZeRO-2 does.
    reshards = strategy in {STRATEGIES[0], HYBRID}
    return {"reshard_after_forward": reshards, "dp_shard": shards}


def _write_steps(roles: Roles, facts: Facts) -> Keys:
    return {roles["steps"]: facts.num_microbatches}


def _read_steps(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the batch of the accumulation steps; ``auto`` leaves them to the script.

    Where nothing says them DeepSpeedPlugin of Accelerate 1.15 takes ``auto``.
    """
    key, ranks = roles["steps"], facts.world_size
    batch = cast("int | None", facts.get("global_batch_size"))
    size = cast("int | None", facts.get("microbatch_size"))
    if keys.get(key, AUTO) == AUTO:
        return {"dp": ranks}
    num_microbatches = ranks * words.whole(keys, key, 1)
    if batch is None:
        if size is None:
            raise MissingError("global_batch_size", f"{key} is {num_microbatches // ranks}")
        return {"global_batch_size": size * num_microbatches, "dp": ranks}
    if batch % num_microbatches:
        raise PlanError(
            f"--global-batch {batch} is not a multiple of {num_microbatches} = ranks x {key}"
        )
    return {"microbatch_size": batch // num_microbatches, "dp": ranks}


PROGRAM = Program(
    files=lambda export: {FILE: remarks(export.remarks) + yaml_text(export.keys)},
    command=lambda _: (f"--config_file {FILE}", '"${SCRIPT:?is not set: your script}"'),
    starter=Starter.ACCELERATE,
    codecs={
        "mixed precision of Accelerate": Codec(_write_mixed),
        "mesh of Accelerate": Codec(_write_mesh, _read_mesh),
        "strategy of FSDP": Codec(read=_read_strategy),
        "steps of Accelerate": Codec(_write_steps, _read_steps),
    },
)
