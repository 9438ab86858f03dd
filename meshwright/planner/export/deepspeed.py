"""DeepSpeed: the JSON that `deepspeed.initialize` takes."""

from collections.abc import Mapping
from typing import cast

from meshwright.planner.configuration import json_keys
from meshwright.planner.export.facts import Facts, FileWords, Keys, MissingError
from meshwright.planner.export.table import Codec, Program, Roles

FILE = "ds_config.json"
NAMES = "batch", "micro", "steps"


def _write_batches(roles: Roles, facts: Facts) -> Keys:
    """Return the three batch sizes, of which two tell the third and the ranks."""
    return {
        roles["batch"]: facts.number("global_batch_size"),
        roles["micro"]: facts.number("microbatch_size"),
        roles["steps"]: facts.num_microbatches,
    }


def _read_batches(roles: Roles, keys: Keys, facts: Facts, words: FileWords) -> Keys:
    given = {name: words.whole(keys, roles[name], 1) for name in NAMES if roles[name] in keys}
    if len(given) < len(NAMES):
        return _completed(roles, given, facts, words)
    batch, size = given["batch"], given["micro"]
    rank = size * given["steps"]
    if batch % rank:
        raise words.unknown(roles["batch"], batch, (f"multiples of {rank}",))
    dp = batch // rank
    sizes = {"global_batch_size": batch, "microbatch_size": size}
    return {**sizes, "dp": dp, "world_size": dp * facts.number("tp")}


def _completed(roles: Roles, given: Mapping[str, int], facts: Facts, words: FileWords) -> Keys:
    """Return what a file leaves open, as _set_batch_related_parameters of DeepSpeed fills it in.

    What options say counts as said by the file, where transformers would fill it in.
    """
    if facts.get("world_size") is None:
        names = ", ".join(roles[name] for name in NAMES)
        raise MissingError("world_size", f"the file leaves out one of {names}")
    dp, steps = facts.world_size // facts.number("tp"), given.get("steps", 1)
    batch = given.get("batch", cast("int | None", facts.get("global_batch_size")))
    size = given.get("micro", cast("int | None", facts.get("microbatch_size")))
    if batch is None and size is None:
        raise MissingError(
            "microbatch_size", f"the file has neither {roles['batch']} nor {roles['micro']}"
        )
    if batch is None:
        batch = cast("int", size) * steps * dp
    each = dp * (steps if size is None else size)
    if batch % each:
        raise words.unknown(roles["batch"], batch, (f"multiples of {each} on {dp} ranks",))
    return {"global_batch_size": batch, "microbatch_size": size or batch // each, "dp": dp}


PROGRAM = Program(
    files=lambda export: {FILE: json_keys(export.keys)},
    command=lambda _: ('"${SCRIPT:?is not set: your script}"', f"--deepspeed_config {FILE}"),
    codecs={"batches of DeepSpeed": Codec(_write_batches, _read_batches)},
)
