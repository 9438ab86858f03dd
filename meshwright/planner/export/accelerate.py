"""Accelerate: the YAML that ``accelerate config`` writes and ``accelerate launch`` takes."""

from typing import cast

from meshwright.planner.configuration import yaml_text
from meshwright.planner.export.facts import Facts, FileWords, Keys, MissingError
from meshwright.planner.export.launch import Starter
from meshwright.planner.export.table import Codec, Program, Roles
from meshwright.planner.export.texts import remarks
from meshwright.simulator import PlanError

FILE = "accelerate.yaml"


def _write_mesh(roles: Roles, facts: Facts) -> Keys:
    """Return a mesh of several axes, which FSDP2 alone goes with."""
    dp, shards, tp = (facts.number(name) for name in ("dp", "dp_shard", "tp"))
    if shards == dp and tp == 1:
        return {}
    return {roles["replicas"]: dp // shards, roles["shards"]: shards, roles["tp"]: tp}


def _read_mesh(roles: Roles, keys: Keys, facts: Facts, words: FileWords) -> Keys:
    tp, replicas = (words.whole(keys, roles[name], 1) for name in ("tp", "replicas"))
    ranks = facts.world_size
    if ranks % tp:
        raise words.unknown(roles["tp"], tp, (f"a divisor of {ranks} processes",))
    dp = ranks // tp
    shards = words.whole(keys, roles["shards"], dp // replicas, least=0)
    if shards * replicas != dp:
        raise words.unknown(roles["shards"], shards, (dp // replicas,))
    return {"tp": tp, "dp": dp, "dp_shard": shards}


def _write_steps(roles: Roles, facts: Facts) -> Keys:
    return {roles["steps"]: facts.num_microbatches}


def _read_steps(roles: Roles, keys: Keys, facts: Facts, words: FileWords) -> Keys:
    key = roles["steps"]
    steps = words.whole(keys, key, 1)
    batch = cast("int | None", facts.get("global_batch_size"))
    if batch is None:
        raise MissingError("global_batch_size", f"{key} is {steps}")
    each = facts.world_size * steps
    if batch % each:
        raise PlanError(f"--global-batch {batch} is not a multiple of {each} = ranks x {key}")
    return {"microbatch_size": batch // each, "dp": facts.world_size}


PROGRAM = Program(
    files=lambda export: {FILE: remarks(export.remarks) + yaml_text(export.keys)},
    command=lambda _: (f"--config_file {FILE}", '"${SCRIPT:?is not set: your script}"'),
    starter=Starter.ACCELERATE,
    codecs={
        "mesh of Accelerate": Codec(_write_mesh, _read_mesh),
        "steps of Accelerate": Codec(_write_steps, _read_steps),
    },
)
