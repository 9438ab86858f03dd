"""What decides, in a stack, which tensors live and which collectives run; see `StackProfile`."""

from meshwright.hwprofiles.base import Count, Flag, Profile


class StackTraits(Profile):
    """Habits of a stack's programs.

    Args:
        fused_qkv: Queries, keys and values are one product, as are a gated MLP's two inputs.
        keeps_gathered_inputs: Sequence parallelism keeps the gathered input of a column layer for
            backward, where others gather it again.
        sums_norms_each_microbatch: It then sums the gradients of norms over the tensor-parallel
            ranks one by one in every microbatch, where others sum all at once in the last.
        scatters_positions: It scatters the sum of looked-up tokens also where a learned position
            is added.
        recompute_stops_early: Recomputation ends when the last kept tensor is there.
        autocast: 16-bit training casts fp32 weights in every pass and keeps the residual stream
            in fp32.
        keeps_stage_outputs: A pipeline stage holds its output until the backward pass of the
            microbatch, and a buffer for each message of a step.
        root_unit: Sharded embedding and head form a unit of their own that stays gathered from
            forward to backward (FSDP's root).
        reshards_in_pipelines: Sharded units are freed after a forward pass also in a pipeline.
        copies_units: Shards are those of each parameter, so that a unit is copied out of the
            buffer it is gathered into, and its gradients into that of their reduction (FSDP2).
        whole_table_gradient: Every tensor-parallel rank makes the gradient of the whole table.
        vocabulary_multiple: The vocabulary is padded so that a tensor-parallel rank's rows are a
            multiple of this; 1 pads nothing.
        buckets_first_stage_only: All but the model's first stage reduce their gradients as one.
    """

    fused_qkv: Flag = True
    keeps_gathered_inputs: Flag = False
    sums_norms_each_microbatch: Flag = False
    scatters_positions: Flag = False
    recompute_stops_early: Flag = False
    autocast: Flag = False
    keeps_stage_outputs: Flag = False
    root_unit: Flag = False
    reshards_in_pipelines: Flag = True
    copies_units: Flag = False
    whole_table_gradient: Flag = False
    vocabulary_multiple: Count = 1
    buckets_first_stage_only: Flag = False
