"""Codecs of llm-foundry: what no table says of its YAML.

Rules are those of llm-foundry 0.22 (commit 8c8dd48f) and of Composer 0.30.
"""

from meshwright.hwprofiles import Precision
from meshwright.planner.formats.hugging_face import ATTENTION as KERNELS
from meshwright.planner.tables import Codec, Facts, FileValues, Keys, MissingError, Program, Roles
from meshwright.simulator import PlanError
from meshwright.simulator.model import parse_model

MODEL, ATTENTION = "model.", "model.attn_config."
DROPOUTS = (f"{MODEL}resid_pdrop", f"{MODEL}emb_pdrop", f"{ATTENTION}attn_pdrop")
NORMS = {
    "low_precision_layernorm": "layernorm",
    "layernorm": "layernorm",
    "low_precision_rmsnorm": "rmsnorm",
    "rmsnorm": "rmsnorm",
}
MULTI_HEAD, MULTI_QUERY, GROUPED = (
    "multihead_attention",
    "multiquery_attention",
    "grouped_query_attention",
)
AUTOMATIC = "auto"


def _read_model(_: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the model of an MPTConfig, with its defaults."""
    width, heads = (
        words.whole(keys, MODEL + name, default)
        for name, default in (("d_model", 2048), ("n_heads", 16))
    )
    norm = words.word(keys, f"{MODEL}norm_type", "low_precision_layernorm")
    if norm not in NORMS:
        raise words.unknown(f"{MODEL}norm_type", norm, NORMS)
    # Gated and expert MLPs of MPT are in no plan.
    words.held(keys, f"{MODEL}ffn_config.ffn_type", ("mptmlp",))
    words.held(keys, f"{MODEL}no_bias", (False,))  # norms would have none, too
    attention_bias, window = (
        keys.get(f"{MODEL}attention_bias"),
        keys.get(f"{ATTENTION}sliding_window_size"),
    )
    longest = words.whole(keys, f"{MODEL}max_seq_len", 2048)
    model_facts: dict[str, object] = {
        "name": "mpt",
        "num_layers": words.whole(keys, f"{MODEL}n_layers", 24),
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": _groups(keys, heads, words),
        "ffn_hidden_size": _ffn_width(keys, width, words),
        "vocab_size": words.whole(keys, f"{MODEL}vocab_size", 50368),
        "seq_len": facts.get("seq_len") or longest,
        "max_positions": longest,
        "positions": _positions(keys),
        "norm": NORMS[norm],
        "attention_bias": attention_bias is not False,
        "output_bias": True,
        "mlp_bias": True,
        "tied_embeddings": keys.get(f"{MODEL}tie_word_embeddings", True),
        "dropout": any(keys.get(each, 0) for each in DROPOUTS),
        "fused_qkv": keys.get(f"{ATTENTION}fused_qkv", True),
        "source": "a configuration of llm-foundry",
    }
    head_dim = keys.get(f"{MODEL}head_dim")
    model_facts |= {} if head_dim is None else {"head_dim": head_dim}
    # -1 stands for no window.
    model_facts |= {} if window in {None, -1} else {"window": window, "layer_pattern": "W"}
    return {"model": parse_model(model_facts, origin="model of llm-foundry")}


def _positions(keys: Keys) -> str:
    """Return the kind of positions; ALiBi takes the place of learned ones (MPTConfig)."""
    is_rotary, has_alibi = (keys.get(ATTENTION + name) is True for name in ("rope", "alibi"))
    learned = keys.get(f"{MODEL}learned_pos_emb", True) and not has_alibi
    if is_rotary + has_alibi + bool(learned) != 1:
        raise PlanError(
            f"{ATTENTION}rope, {ATTENTION}alibi and {MODEL}learned_pos_emb of llm-foundry: "
            "one of them must be true"
        )
    return "rotary" if is_rotary else "alibi" if has_alibi else "learned"


def _groups(keys: Keys, heads: int, words: FileValues) -> object:
    """Return the number of heads of keys and values."""
    key, groups = f"{ATTENTION}attn_type", f"{ATTENTION}kv_n_heads"
    kinds = {MULTI_HEAD: heads, MULTI_QUERY: 1, GROUPED: keys.get(groups, heads)}
    kind = words.word(keys, key, MULTI_HEAD)
    if kind not in kinds:
        raise words.unknown(key, kind, kinds)
    return kinds[kind]


def _ffn_width(keys: Keys, width: int, words: FileValues) -> int:
    key = f"{MODEL}expansion_ratio"
    ratio = keys.get(key, 4)
    if type(ratio) not in {int, float} or (inner := width * float(str(ratio))) != int(inner):
        raise words.unknown(key, ratio, ("a number that makes a whole width",))
    return int(inner)


def _read_length(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the length of sequences, which the file and its data loader must say alike."""
    if roles["length"] not in keys:
        return {}
    length = words.whole(keys, roles["length"], 1)
    words.held(keys, roles["loader"], (length,))
    return {"seq_len": length}


def _read_microbatch(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return a microbatch that is no larger than a rank's share of the batch."""
    if roles["batch"] not in keys:
        return {}
    batch, ranks = words.whole(keys, roles["batch"], 1), facts.world_size
    if batch % ranks:
        raise words.unknown(roles["batch"], batch, (f"multiples of {ranks} ranks",))
    # auto is found while training: nothing in the file says it.
    size = keys.get(roles["micro"], AUTOMATIC)
    if size == AUTOMATIC:
        size = facts.get("microbatch_size")
        if size is None:
            raise MissingError("microbatch_size", f"{roles['micro']} is {AUTOMATIC}")
        return {"dp": ranks, "microbatch_size": size}
    micro = words.whole(keys, roles["micro"], 1)
    return {"dp": ranks, "microbatch_size": min(micro, batch // ranks)}


def _read_shards(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return full sharding, and whether parameters are resharded after forward."""
    key = roles["strategy"]
    if not any(each.startswith("fsdp_config.") for each in keys):
        raise PlanError(
            "fsdp_config of llm-foundry is missing: without it Composer has "
            "DistributedDataParallel, which is no plan of its stack"
        )
    strategies = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
    strategy = words.word(keys, key, "FULL_SHARD").upper()
    if strategy not in strategies:
        raise words.unknown(key, strategy, strategies)
    return {"zero_stage": 3, "reshard_after_forward": strategies[strategy]}


def _read_reduction(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    precision, key = facts.get("precision"), roles["mixed"]
    # PURE reduces in the storage format, DEFAULT in fp32 (Composer).
    kinds: dict[str, object] = {"DEFAULT": Precision.FP32}
    if isinstance(precision, Precision):
        kinds["PURE"] = precision.storage
    kind = words.word(keys, key, "DEFAULT").upper()
    if kind not in kinds:
        raise words.unknown(key, kind, kinds)
    return {"reduce_precision": kinds[kind]}


def _read_segments(roles: Roles, keys: Keys, _: Facts, __: FileValues) -> Keys:
    return {"stack.allocator": "expandable"} if keys.get(roles["grow"], True) else {}


def _read_attention(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the kernel of a model of transformers; the older key goes before the other."""
    kernel = "flash_attention_2" if keys.get(roles["flash"]) else keys.get(roles["kernel"])
    kernel = "sdpa" if kernel is None else kernel
    if kernel not in KERNELS:
        raise words.unknown(roles["kernel"], kernel, KERNELS)
    return {"attention": KERNELS[str(kernel)]}


PROGRAM = Program(
    codecs={
        "model of llm-foundry": Codec(read=_read_model),
        "length of llm-foundry": Codec(read=_read_length),
        "microbatch of llm-foundry": Codec(read=_read_microbatch),
        "shards of llm-foundry": Codec(read=_read_shards),
        "reduction of llm-foundry": Codec(read=_read_reduction),
        "segments of llm-foundry": Codec(read=_read_segments),
        "attention of llm-foundry": Codec(read=_read_attention),
    },
)
