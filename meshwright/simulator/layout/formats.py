"""Number formats of training, of gradients in their buffer and in collectives, and their casts."""

from typing import Any, NamedTuple, TypeAlias

from meshwright.hwprofiles import EIGHT_BITS, Device, Precision, StackProfile, in_parentheses
from meshwright.simulator.layout.job import TrainingJob

# The number of a field in one plan, or a NumPy column of it in many: both compare, and what they
# compare to combines with "&".  This package does without NumPy, so the type is open.
Number: TypeAlias = Any
FULL_BYTES = Precision.FP32.num_bytes
HALF_BYTES = Precision.BF16.num_bytes
# Published 16-bit training runs used fp16 before this year, bf16 from it on.
FIRST_BF16_DATE = "2022"


def default_precision(device: Device, stack: StackProfile | None = None) -> Precision:
    """Return bf16 where device and stack support it and it was common, else fp16, else fp32.

    Without a common format it is the stack's first, which the device then refuses.

    >>> from meshwright.hwprofiles import load_cluster, load_stack
    >>> core = load_stack("megatron-core")
    >>> [default_precision(load_cluster(name).device, core) for name in ("dgx-a100", "dgx-1v")]
    [<Precision.BF16: 'bf16'>, <Precision.FP16: 'fp16'>]
    """
    bf16, *others = ranked = [Precision.BF16, Precision.FP16, Precision.FP32, *EIGHT_BITS]
    if stack is not None and stack.date < FIRST_BF16_DATE:
        ranked = [*others, bf16]
    offered = [each for each in ranked if stack is None or each in stack.precisions]
    return next((each for each in offered if each in device.peak_flops_per_s), offered[0])


def is_unwrapped(stack: StackProfile, num_ranks: Number) -> Number:
    """Return True if *stack* leaves out fully_shard on *num_ranks* data-parallel ranks.

    `parallelize_llama` of torchtitan 0.2.2 runs it where data or contexts are divided.
    """
    # "&" and not "and": the number may be a column.
    return (num_ranks == 1) & stack.casts_shards_alone


def syncs_by_default(stack: StackProfile, zero_stage: Number, pp: Number) -> Number:
    """Return True if *stack* reduces gradients in each microbatch unless told otherwise.

    In a pipeline they stay whole until the last microbatch, whatever the stage; fully_shard reduces
    over one rank, too, which has any stage.
    """
    return ((zero_stage >= 2) | stack.is_fully_sharded) & (pp == 1) & stack.reduces_each_microbatch


class Formats(NamedTuple):
    """Formats of a gradient in its buffer and in collectives; None for the stack's own."""

    kept: Precision | None
    reduced: Precision | None


STACK_FORMATS = Formats(None, None)


class Casts(NamedTuple):
    """Formats of a gradient as produced by backward, in its buffer, and on the wire."""

    produced: Precision
    kept: Precision
    reduced: Precision

    def traffic_bytes(self, num_parameters: int, num_shards: int) -> int:
        """Return the memory traffic of casting gradients to the wire's format and back.

        A cast reads the one format and writes the other.  Whole gradients leave their buffer and
        come back to it; with shards they leave as backward makes them, and a shard comes back.

        >>> fp32, bf16 = Precision.FP32, Precision.BF16
        >>> Casts(bf16, fp32, bf16).traffic_bytes(100, 1)
        1200
        >>> Casts(bf16, fp32, bf16).traffic_bytes(100, 4)
        150
        """
        # Shards are padded to equal sizes, so that theirs are rounded up.
        to_wire = self._cast_bytes(self._sent(num_shards)) * num_parameters
        return to_wire + self._cast_bytes(self.kept) * -(-num_parameters // num_shards)

    def buffer_bytes(self, num_parameters: int, num_shards: int) -> int:
        """Return the bytes of the buffer for gradients cast to the wire's format; 0 without a cast.

        >>> Casts(Precision.BF16, Precision.FP32, Precision.BF16).buffer_bytes(100, 1)
        200
        """
        is_cast = self._sent(num_shards) is not self.reduced
        return num_parameters * self.reduced.num_bytes * is_cast

    def _sent(self, num_shards: int) -> Precision:
        return self.kept if num_shards == 1 else self.produced

    def _cast_bytes(self, other: Precision) -> int:
        return (self.reduced.num_bytes + other.num_bytes) * (other is not self.reduced)


def default_formats(stack: StackProfile, precision: Precision) -> Formats:
    """Return the gradient formats that *stack* uses by default."""

    def name(num_bytes: int) -> Precision | None:
        # A profile's bytes are those of 16-bit training.
        if precision is Precision.FP32:
            return precision
        return {FULL_BYTES: Precision.FP32, HALF_BYTES: precision.storage}.get(num_bytes)

    return Formats(name(stack.gradient_bytes), name(stack.gradient_reduce_bytes))


def offered_formats(stack: StackProfile, precision: Precision) -> list[Formats]:
    """Return the gradient formats that a plan may have: the default, and those the stack lists.

    A 16-bit buffer has the format in which weights are stored.
    """
    listed = [
        Formats(kept, reduced)
        for kept, reduced in stack.gradient_precisions
        if kept in (Precision.FP32, precision.storage)
    ]
    return list(dict.fromkeys([default_formats(stack, precision), *listed]))


def chosen_formats(stack: StackProfile, precision: Precision, wanted: Formats) -> Formats:
    """Return *wanted* with unset formats filled in from the stack.

    The wire follows the buffer: the first format that the stack lists with it.
    """
    default = default_formats(stack, precision)
    kept = wanted.kept or default.kept
    with_it = [each.reduced for each in offered_formats(stack, precision) if each.kept == kept]
    return Formats(kept, wanted.reduced or (with_it or [default.reduced])[0])


def formats_refusal(stack: StackProfile, precision: Precision, wanted: Formats) -> str | None:
    """Return the reason *stack* cannot keep and reduce gradients as *wanted*, or None if it can."""
    offered = offered_formats(stack, precision)
    kept, reduced = chosen_formats(stack, precision, wanted)
    why = in_parentheses(stack.rule("gradient_precisions"))
    with_it = [each.reduced for each in offered if each.kept == kept]
    if wanted.kept is not None and not with_it:
        known = ", ".join(dict.fromkeys(str(each.kept) for each in offered if each.kept))
        return (
            f"gradient_precision={wanted.kept} is not offered by stack {stack.name} in "
            f"{precision} training; allowed: {known or 'none beside its own'}{why}"
        )
    if wanted.reduced is not None and reduced not in with_it:
        known = ", ".join(str(each) for each in with_it if each)
        return (
            f"reduce_precision={wanted.reduced} is not offered by stack {stack.name} with "
            f"gradients kept in {kept or 'its own formats'}; allowed: "
            f"{known or 'none beside its own'}{why}"
        )
    return None


def eight_bit_refusal(job: TrainingJob, stack: StackProfile) -> str | None:
    """Return the reason a model's GEMMs cannot run in 8 bits, or None when they can.

    GEMMs of weight gradients sum over tokens, so that ``seq_len`` is scaled in blocks, too.
    """
    recipe = stack.recipes.get(job.precision)
    if recipe is None or not recipe.scaled_elements:
        return None
    # TELMHeadColumnParallelLinear of megatron/core/extensions/transformer_engine.py takes no weight
    # of another module.
    if recipe.multiplies_head and job.transformer.tied_embeddings:
        return (
            f"precision={job.precision} with an output matrix in 8 bits (stack {stack.name}) does "
            f"not go with tied_embeddings=true of {job.transformer.name}; allowed: false"
        )
    linear = (each for each in job.model.product_sizes(1) if each.is_linear)
    sizes = [(each.name.removesuffix(" / tp"), each.size) for each in linear]
    for name, size in (*sizes, ("seq_len", job.seq_len)):
        if size % recipe.scaled_elements:
            return (
                f"precision={job.precision} does not go with {name}={size}; "
                f"allowed: multiples of {recipe.scaled_elements}, which share a scale"
            )
    return None


def gradient_bytes(stack: StackProfile, precision: Precision, wanted: Formats) -> tuple[int, int]:
    """Return the bytes of a gradient element in its buffer, and on the wire.

    >>> from meshwright.hwprofiles import load_stack
    >>> gradient_bytes(load_stack("ddp"), Precision.BF16, Formats(None, Precision.BF16))
    (4, 2)
    """
    usual = default_formats(stack, precision)
    chosen = chosen_formats(stack, precision, wanted)
    own = (stack.gradient_bytes, stack.gradient_reduce_bytes)
    if precision is Precision.FP32:
        own = (FULL_BYTES, FULL_BYTES)
    # Bytes of a profile's own format stand, even if no named precision has them.
    kept, reduced = (
        each.num_bytes if each is not None and each is not default else size
        for each, default, size in zip(chosen, usual, own, strict=True)
    )
    return kept, reduced


def optimizer_bytes(
    stack: StackProfile, precision: Precision, moments: Precision | None
) -> tuple[int, int]:
    """Return the optimizer's bytes of a parameter: states, and temporary copies in the update.

    A precision-aware optimizer keeps both of Adam's moments in *moments*, and of a bf16 weight's
    fp32 copy the 16 bits that the weight has not, if it is to (store_param_remainders of FusedAdam,
    transformer_engine/pytorch/optimizers/fused_adam.py of 2.1 and later; Megatron-Core keeps the
    whole copy of weights in 8 bits).  Moments in fp16 and fp8, and copies in fp16
    (main_params_dtype), have a scale for each tensor, and are copied to fp32 for the update.

    >>> from meshwright.hwprofiles import load_stack
    >>> core, bf16 = load_stack("megatron-core"), Precision.BF16
    >>> [optimizer_bytes(core, bf16, each) for each in (None, Precision.FP32, bf16, Precision.FP8)]
    [(12, 0), (10, 0), (6, 0), (4, 8)]
    """
    if moments is None:
        return stack.optimizer_bytes, stack.optimizer_temporary_bytes
    width = 1 if moments.is_eight_bit else moments.num_bytes
    is_narrow = stack.main_precision is Precision.FP16
    is_split = stack.parameter_remainders and precision is Precision.BF16
    master = HALF_BYTES if is_narrow or is_split else FULL_BYTES
    # Two moments and the master copy, where they have a scale, are dequantised for the update.
    num_scaled = 2 * (moments not in (Precision.FP32, Precision.BF16)) + is_narrow
    return master + 2 * width, stack.optimizer_temporary_bytes + FULL_BYTES * num_scaled


def main_gradient_bytes(
    stack: StackProfile,
    precision: Precision,
    wanted: Formats,
    moments: Precision | None = None,
) -> int:
    """Return the bytes of the fp32 copy that the update makes of a gradient kept in 16 bits.

    Megatron-Core copies all gradients of a rank, or of its shard, before it clips them, and has
    nothing to copy where they are kept in fp32 (`_copy_model_grads_to_main_grads` of
    megatron/core/optimizer/optimizer.py, core r0.8). A stack that keeps no other gradients than
    these says in its profile what its update needs.  A precision-aware optimizer reads gradients as
    they are kept, but for weights in 8 bits with fp32 copies (`_copy_model_grads_to_main_grads` of
    distrib_optimizer.py, core 0.16).

    >>> from meshwright.hwprofiles import load_stack
    >>> core, half = load_stack("megatron-core"), Formats(Precision.BF16, None)
    >>> [main_gradient_bytes(core, Precision.BF16, wanted) for wanted in (STACK_FORMATS, half)]
    [0, 4]
    """
    is_narrow = stack.main_precision is Precision.FP16
    if moments is not None and (is_narrow or not precision.is_eight_bit):
        return 0
    kept, _ = gradient_bytes(stack, precision, wanted)
    usual, _ = gradient_bytes(stack, precision, STACK_FORMATS)
    return FULL_BYTES if kept < usual else 0


def casts_of(stack: StackProfile, precision: Precision, wanted: Formats) -> Casts | None:
    """Return the casts of a plan, None for default formats: fitted constants include those."""
    chosen = chosen_formats(stack, precision, wanted)
    if chosen == default_formats(stack, precision) or None in chosen:
        return None
    assert chosen.kept is not None
    assert chosen.reduced is not None
    return Casts(precision.storage, chosen.kept, chosen.reduced)
