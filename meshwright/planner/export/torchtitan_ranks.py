"""How ranks, batches and stages stand in torchtitan's configuration."""

from typing import cast

from meshwright.hwprofiles import StageSplit
from meshwright.planner.export.table import Facts, Keys, Row, Words
from meshwright.simulator import PlanError

WORDS = Words("torchtitan")
TOML, COMMAND = "0.2", "0.3"
# Names of a Llama's modules before its layers and after them.
ENDS = {
    TOML: (["tok_embeddings"], ["norm", "output"]),
    COMMAND: (["tok_embeddings"], ["norm", "lm_head"]),
}
PARTS = "parallelism.module_fqns_per_model_part"
REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
LOCAL_BATCH, GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"
PP = "parallelism.pipeline_parallel"
RESHARD = "parallelism.fsdp_reshard_after_forward"


def replicas_row() -> Row:
    """Return the row of the data-parallel ranks, in groups that share a set of shards."""

    def write(facts: Facts) -> Keys:
        shards = facts.number("dp_shard")
        return {REPLICATE: facts.number("dp") // shards, SHARD: shards}

    def read(keys: Keys, facts: Facts) -> Keys:
        replicas, shards = WORDS.whole(keys, REPLICATE, 1), WORDS.whole(keys, SHARD, -1, least=-1)
        others = facts.number("tp") * facts.number("pp")
        if shards == -1:
            if facts.get("world_size") is None:
                raise PlanError(f"--gpus is missing; {SHARD} is what it leaves")
            shards = facts.world_size // (others * replicas)
        dp = replicas * shards
        return {"dp": dp, "dp_shard": shards, "world_size": dp * others}

    return Row(
        fields=("dp", "dp_shard", "world_size"), keys=(REPLICATE, SHARD), write=write, read=read
    )


def batch_row() -> Row:
    """Return the row of the batches: a pipeline takes all microbatches of a rank in one call."""
    own = f"{PP}_microbatch_size"

    def write(facts: Facts) -> Keys:
        size = facts.number("microbatch_size")
        found: Keys = {GLOBAL_BATCH: facts.number("global_batch_size")}
        if facts.number("pp") == 1:
            return {**found, LOCAL_BATCH: size}
        return {**found, LOCAL_BATCH: size * facts.num_microbatches, own: size}

    def read(keys: Keys, facts: Facts) -> Keys:
        local = WORDS.whole(keys, LOCAL_BATCH, 8)
        once = local * facts.number("dp")
        batch = WORDS.whole(keys, GLOBAL_BATCH, -1, least=-1)
        batch = once if batch < 0 else batch
        if facts.number("pp") == 1:
            return {"global_batch_size": batch, "microbatch_size": local}
        if batch != once:
            raise WORDS.unknown(LOCAL_BATCH, local, (batch // facts.number("dp"),))
        return {"global_batch_size": batch, "microbatch_size": keys.get(own, 1)}

    return Row(
        fields=("global_batch_size", "microbatch_size"),
        keys=(LOCAL_BATCH, GLOBAL_BATCH, own),
        write=write,
        read=read,
    )


def stages_row(version: str) -> Row:
    """Return the row of the layers of each stage: its modules by name."""
    first, last = ENDS[version]

    def write(facts: Facts) -> Keys:
        if facts.number("pp") == 1:
            return {}
        layers = iter(range(sum(stages := cast("tuple[int, ...]", facts.get("stages")))))
        parts = [[f"layers.{next(layers)}" for _ in range(count)] for count in stages]
        parts[0][:0] = first
        parts[-1] += last
        return {PARTS: parts}

    def read(keys: Keys, facts: Facts) -> Keys:
        if facts.number("pp") == 1:
            return {}
        if PARTS not in keys:  # generate_llm_fqn_per_model_part: two stages a rank, or one
            virtual = 2 if facts.get("schedule") == "interleaved" else 1
            return {"stages": StageSplit.ENDS, "num_virtual_stages": virtual}
        pp, parts = facts.number("pp"), WORDS.lists(keys, PARTS)
        stages = tuple(sum(name.startswith("layers.") for name in part) for part in parts)
        again = write(Facts({"pp": pp, "stages": stages}))
        if again != {PARTS: parts} or len(parts) % pp:
            raise PlanError(
                f"{PARTS} of torchtitan is in no plan; allowed: the modules in their order, "
                f"stages a multiple of {pp}"
            )
        return {"stages": stages, "num_virtual_stages": len(parts) // pp}

    return Row(fields=("stages", "num_virtual_stages"), keys=(PARTS,), write=write, read=read)


def reshard_row() -> Row:
    """Return the row of what is freed after its forward pass: by default, but for pipelines."""

    def write(facts: Facts) -> Keys:
        frees = facts.get("reshard_after_forward")
        if frees == (facts.number("pp") == 1):
            return {}
        return {RESHARD: "always" if frees else "never"}

    def read(keys: Keys, facts: Facts) -> Keys:
        choices = {"default": facts.number("pp") == 1, "always": True, "never": False}
        theirs = str(keys.get(RESHARD, "default"))
        if theirs not in choices:
            raise WORDS.unknown(RESHARD, theirs, choices)
        return {"reshard_after_forward": choices[theirs]}

    return Row(fields=("reshard_after_forward",), keys=(RESHARD,), write=write, read=read)
