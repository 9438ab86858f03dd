"""Accelerate's configuration as keys of the trainer that it launches."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from meshwright.hwprofiles import shown, suggestion
from meshwright.planner.configuration import Effect, Option, known_option, load_options
from meshwright.planner.tables import Keys, spelled, theirs
from meshwright.simulator import PlanError

CONFIGURATION = "accelerate-1.15"
DEEPSPEED_FILE = "deepspeed_config.deepspeed_config_file"
TYPE, MIXED, FSDP = "distributed_type", "mixed_precision", "fsdp_config.fsdp_"
ENGINES = ("FSDP", "DEEPSPEED", "MULTI_GPU", "NO")
# Its steps of accumulation are the trainer's.
READ_KEYS = (
    TYPE,
    MIXED,
    "num_machines",
    "num_processes",
    "deepspeed_config.gradient_accumulation_steps",
)
ALLOWED: Mapping[str, tuple[str, ...]] = {
    MIXED: ("no", "bf16", "fp16"),
    TYPE: ENGINES,
    f"{FSDP}auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
}


class Spelling(NamedTuple):
    """Keys of a trainer for what Accelerate may say in their place.

    Args:
        fsdp: Switches FSDP on; none where no plan says what the launcher's FSDP does.
        section: Of FSDP.
        offload: In this section, what offloads parameters; none where ``fsdp`` says it.
        words: The value of ``fsdp``.
        is_mixed: Whether it takes the launcher's mixed precision where it says none.
        beside: What FSDP2 changes of the trainer.
    """

    fsdp: str
    section: str
    offload: str
    words: object = True
    is_mixed: bool = True
    beside: Mapping[str, object] = {}


def with_accelerate(spelling: Spelling) -> Callable[[Keys, Keys], Keys]:
    """Return a function that adds Accelerate's configuration to the keys of a trainer.

    It raises PlanError for what no plan says of a trainer.
    """

    def added(keys: Keys, configuration: Keys) -> Keys:
        accelerate_keys = _plan_keys(configuration)
        # Keys of the trainer override the launcher's precision.
        trainer_keys = (
            {**_mixed_precision(accelerate_keys, keys), **keys} if spelling.is_mixed else dict(keys)
        )
        if accelerate_keys.get(TYPE) == "DEEPSPEED":
            trainer_keys |= _deepspeed(accelerate_keys, keys)
        if accelerate_keys.get(TYPE) == "FSDP":
            trainer_keys |= _fsdp(accelerate_keys, keys, spelling)
        return trainer_keys

    return added


def _plan_keys(configuration: Keys) -> Keys:
    """Return the keys of a configuration that concern a plan, by their present names."""
    options, plan_keys = load_options(CONFIGURATION), dict[str, object]()
    for key, value in configuration.items():
        option = known_option(key, options)
        if option is None:
            nearest = suggestion(key, options)
            raise PlanError(f"{shown(key)} of accelerate is unknown, and may change it; {nearest}")
        if value not in (None, {}, []) and _concerns_plan(option, value):
            plan_keys[option.key] = value
    for key, value in plan_keys.items():
        is_known = key in READ_KEYS or key == DEEPSPEED_FILE or key.startswith(FSDP)
        if not is_known or spelled(value) not in ALLOWED.get(key, (spelled(value),)):
            allowed = ", ".join(ALLOWED.get(key, ("leave it out",)))
            raise PlanError(
                f"{key}={theirs(value)} of accelerate is in no plan of a trainer; "
                f"allowed: {allowed}"
            )
    return plan_keys


def _concerns_plan(option: Option, value: object) -> bool:
    """Return True if a key concerns a plan; raises PlanError if no plan says it."""
    if option.effect is not Effect.HELD or option.key == DEEPSPEED_FILE:
        return option.effect is not Effect.NONE
    if spelled(value) not in option.allowed and not (value is False and not option.allowed):
        allowed = ", ".join(option.allowed) or "leave it out"
        raise PlanError(
            f"{option.key}={theirs(value)} of accelerate is in no plan; allowed: {allowed}"
        )
    return False


def _mixed_precision(accelerate_keys: Keys, keys: Keys) -> Keys:
    """Return the format of mixed precision where the trainer sets none."""
    word = spelled(accelerate_keys.get(MIXED, "no"))
    # The trainer sets Accelerate's mixed precision where it has one itself.
    is_said = any(keys.get(each) not in (None, False) for each in ("bf16", "fp16"))
    return {} if is_said or word == "no" else {word: True}


def _deepspeed(accelerate_keys: Keys, keys: Keys) -> Keys:
    # The trainer's own DeepSpeed file goes before the launcher's.
    if "deepspeed" in keys:
        return {}
    if DEEPSPEED_FILE not in accelerate_keys:
        raise PlanError(f"DeepSpeed of accelerate is read of its own file alone: {DEEPSPEED_FILE}")
    return {"deepspeed": accelerate_keys[DEEPSPEED_FILE]}


def _fsdp(accelerate_keys: Keys, keys: Keys, spelling: Spelling) -> Keys:
    """Return the trainer's keys of Accelerate's FSDP, whose version is 1 by default."""
    if not spelling.fsdp:
        raise PlanError(f"{TYPE}=FSDP of accelerate is in no plan of this trainer")
    section = spelling.section
    if keys.get(spelling.fsdp) or any(key.startswith(f"{section}.") for key in keys):
        raise PlanError(f"accelerate and {spelling.fsdp} both say FSDP; allowed: one of them")
    version = spelled(accelerate_keys.get(f"{FSDP}version", 1))
    reshards = accelerate_keys.get(f"{FSDP}reshard_after_forward")
    if version == "1":
        # FSDP 1 has a sharding strategy instead, by name or by number.
        reshards = accelerate_keys.get(f"{FSDP}sharding_strategy", reshards)
        reshards = {"1": "full_shard", "2": "shard_grad_op"}.get(spelled(reshards), reshards)
    fsdp_keys: Keys = {spelling.fsdp: spelling.words, f"{section}.version": version}
    if reshards is not None:
        fsdp_keys[f"{section}.reshard_after_forward"] = spelled(reshards)
    ahead = accelerate_keys.get(f"{FSDP}backward_prefetch")
    if ahead is not None:
        fsdp_keys[f"{section}.backward_prefetch"] = ahead
    checkpoints = accelerate_keys.get(f"{FSDP}activation_checkpointing")
    if checkpoints is not None:
        fsdp_keys[f"{section}.activation_checkpointing"] = checkpoints
    if spelled(accelerate_keys.get(f"{FSDP}offload_params", "false")).lower() == "true":
        if spelling.offload:
            fsdp_keys[f"{section}.{spelling.offload}"] = True
        else:
            fsdp_keys[spelling.fsdp] = f"{spelling.words} offload"
    return {**fsdp_keys, **(spelling.beside if version == "2" else {})}
