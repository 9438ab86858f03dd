"""Number formats of Hugging Face's trainers: mixed precision, and stored weights."""

from collections.abc import Mapping
from typing import NamedTuple

from meshwright.hwprofiles import Precision, shown
from meshwright.planner.tables import Codec, Facts, FileValues, Keys, MissingError, Roles
from meshwright.simulator import PlanError

SWITCH = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
AUTO = "auto"
# Weights, gradients and moments of 16 bits.
IN_16_BITS: Mapping[str, object] = {"stack.parameter_precision": Precision.BF16}


class Dialect(NamedTuple):
    """Defaults of a trainer.

    Args:
        microbatch_size: Sequences of a rank's pass.
        bf16: Its ``bf16``.
        fsdp_version: Of FSDP.
        recomputes: Whether it recomputes layers.
        is_reentrant: Whether recomputation is PyTorch's older one, which runs a layer to its end.
    """

    microbatch_size: int
    bf16: bool | str
    fsdp_version: int
    recomputes: bool = False
    is_reentrant: bool = False


TRANSFORMERS = Dialect(microbatch_size=8, bf16=False, fsdp_version=2)
# transformers 5.8, the newest that it takes.
LLAMA_FACTORY = Dialect(
    microbatch_size=8, bf16=False, fsdp_version=1, recomputes=True, is_reentrant=True
)
AXOLOTL = Dialect(microbatch_size=1, bf16=AUTO, fsdp_version=1)


def switch(words: FileValues, keys: Keys, key: str, *, default: bool) -> bool:
    """Return the value of a switch; on a command line it is a word.

    Raises:
        PlanError: If it is neither on nor off.
    """
    value = keys.get(key, default) if key else default
    if value is None:
        return False
    is_on = SWITCH.get(str(value).lower())
    if is_on is None:
        raise words.unknown(key, shown(value), (True, False))
    return is_on


def listed(roles: Roles, role: str) -> list[str]:
    """Return the keys of a role that has several, as ``switch`` and ``switch_new``."""
    return [key for name, key in roles.items() if name.split("_")[0] == role]


def fsdp_version(dialect: Dialect, roles: Roles, keys: Keys, words: FileValues) -> int:
    """Return the version of FSDP.

    Raises:
        PlanError: If there is none such.
    """
    version_keys = [key for key in listed(roles, "version") if keys.get(key) is not None]
    value = keys[version_keys[0]] if version_keys else dialect.fsdp_version
    if str(value) not in ("1", "2"):
        raise words.unknown(version_keys[0], value, (1, 2))
    return int(str(value))


def mixed_format(dialect: Dialect, roles: Roles, keys: Keys, words: FileValues) -> Precision | None:
    """Return the format of mixed precision; None where there is none."""
    bf16, fp16 = roles["bf16"], roles["fp16"]
    is_auto = keys.get(bf16, dialect.bf16) == AUTO
    is_half = switch(words, keys, fp16, default=False)
    # auto is bf16 unless fp16 is asked for.
    is_bf16 = not is_half if is_auto else switch(words, keys, bf16, default=False)
    if is_half and is_bf16:
        raise PlanError(f"{bf16} and {fp16} of {words.framework} are both on; allowed: one of them")
    return Precision.BF16 if is_bf16 else Precision.FP16 if is_half else None


def plain_precision(dialect: Dialect) -> Codec:
    """Return the codec of DDP's formats: weights are as the script loads them."""

    def read(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
        mixed, weights = mixed_format(dialect, roles, keys, words), _loaded(roles, keys, words)
        if mixed is None:
            return _unmixed(weights, facts, roles)
        given = weights or facts.get("gradient_precision")
        if given is None:
            why = "that of the weights: fp32 where the script loads them with dtype float32"
            raise MissingError("gradient_precision", why)
        return _ddp_formats(mixed, Precision(str(given)), words)

    return Codec(read=read)


def sharded_precision(dialect: Dialect) -> Codec:
    """Return the codec of FSDP's formats: with mixed precision Accelerate makes weights fp32."""

    def read(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
        mixed, weights = mixed_format(dialect, roles, keys, words), _loaded(roles, keys, words)
        if mixed is None:
            return _unmixed(weights, facts, roles)
        return {"precision": mixed, "gradient_precision": Precision.FP32}

    return Codec(read=read)


def _loaded(roles: Roles, keys: Keys, words: FileValues) -> Precision | None:
    """Return the format in which a script loads weights; None where it is the checkpoint's."""
    formats = {"float32": Precision.FP32, "bfloat16": Precision.BF16, AUTO: None}
    options = listed(roles, "dtype")
    dtype = next((keys[key] for key in options if key in keys), AUTO)
    if dtype not in formats:
        raise words.unknown(options[0], dtype, formats)
    return formats[str(dtype)]


def _unmixed(weights: Precision | None, facts: Facts, roles: Roles) -> Keys:
    given = weights or facts.get("precision")
    if given is None:
        why = f"neither {roles['bf16']} nor {roles['fp16']}: that in which the script loads weights"
        raise MissingError("precision", why)
    weights = Precision(str(given))
    low = {} if weights is Precision.FP32 else IN_16_BITS
    return {"precision": weights, "gradient_precision": weights, **low}


def _ddp_formats(mixed: Precision, weights: Precision, words: FileValues) -> Keys:
    if weights is Precision.FP32:
        return {"precision": mixed, "gradient_precision": weights}
    # PyTorch's GradScaler refuses to unscale fp16 gradients of fp16 weights.
    if weights is not Precision.BF16 or mixed is not Precision.BF16:
        raise PlanError(f"weights in {weights} of {words.framework} do not train in {mixed}")
    return {"precision": mixed, "gradient_precision": weights, **IN_16_BITS}


def master_precision(dialect: Dialect) -> Codec:
    """Return the codec of the format where weights are kept in fp32."""

    def read(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
        mixed = mixed_format(dialect, roles, keys, words) or Precision.FP32
        return {"precision": mixed, "gradient_precision": Precision.FP32}

    return Codec(read=read)


def axolotl_ddp(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the formats of axolotl's DDP: weights are loaded in the format of matrix products.

    Norms and embeddings become fp32 ones unless FlashAttention is asked for (loaders/model.py).
    """
    mixed = mixed_format(AXOLOTL, roles, keys, words)
    if mixed is None:
        return {"precision": Precision.FP32, "gradient_precision": Precision.FP32}
    asked = keys.get(roles["attention"]) == "flash_attention_2"
    if mixed is Precision.BF16 and (asked or keys.get(roles["flash"]) is True):
        return _ddp_formats(mixed, Precision.BF16, words)
    raise PlanError(
        f"{roles['bf16']} of {words.framework} without FSDP or DeepSpeed keeps part of the weights "
        f"in fp32 and part in {mixed}; allowed: bf16 with {roles['attention']}=flash_attention_2"
    )


def axolotl_fsdp(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the formats of axolotl's FSDP.

    Its own fsdp2_prepare_model (monkeypatch/accelerate/fsdp2.py) leaves weights in the format in
    which they are loaded, that of the products; with FSDP1 Accelerate makes fp32 ones of them.
    """
    mixed = mixed_format(AXOLOTL, roles, keys, words)
    if mixed is None or fsdp_version(AXOLOTL, roles, keys, words) == 1:
        return {"precision": mixed or Precision.FP32, "gradient_precision": Precision.FP32}
    if mixed is Precision.FP16:
        # fp16 weights cannot be trained with gradient scaling.
        raise words.unknown(roles["fp16"], value=True, allowed=("false with fsdp_version 2",))
    return {"precision": mixed, "gradient_precision": mixed, **IN_16_BITS}


def engine_precision(dialect: Dialect) -> Codec:
    """Return the codec of DeepSpeed's format; what its file leaves open is the trainer's."""

    def read(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
        mixed = mixed_format(dialect, roles, keys, words)
        for name, precision in (("bf16", Precision.BF16), ("fp16", Precision.FP16)):
            key = roles[f"deepspeed_{name}"]
            if key in keys and keys[key] not in (AUTO, mixed is precision):
                raise words.unknown(key, keys[key], (mixed is precision, AUTO))
        return {"precision": mixed or Precision.FP32}

    return Codec(read=read)
