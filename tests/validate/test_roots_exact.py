"""The fullest moments of FSDP2's units of both ends, in models whose tables are most of them."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwright.validate.agreement import AgreementPlan, compare_plan

MODEL = """
name = "tables"
num_layers = 2
hidden_size = 256
num_heads = 8
num_kv_heads = 2
ffn_hidden_size = 384
vocab_size = {vocab_size}
seq_len = 64
gated_mlp = true
tied_embeddings = {tied}
positions = "rotary"
norm = "rmsnorm"
attention_bias = false
output_bias = false
mlp_bias = false
dropout = false
"""
# Ids and numbers of a token, statistics and gradients of norms, scalars are not modelled.
UNTOLD_BYTES = 8192


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        # DTensor copies a rank's rows out of a table's gradient that is whole.
        ("--gpus 4 --global-batch 2 --tp 2 --stack torchtitan@0.2 --precision fp32", "true"),
        ("--gpus 4 --global-batch 2 --tp 2 --stack torchtitan@0.2", "false"),
        # One data-parallel rank is not wrapped in fully_shard: the whole gradient stays.
        ("--gpus 2 --global-batch 2 --tp 2 --stack torchtitan@0.2 --precision fp32", "true"),
        ("--gpus 2 --global-batch 2 --tp 2 --stack torchtitan@0.2 --precision fp32", "false"),
        ("--gpus 2 --global-batch 1 --tp 2 --stack torchtitan@0.2 --precision fp32", "false"),
        ("--gpus 1 --global-batch 2 --stack torchtitan-2024-12 --precision fp32", "false"),
        # Of gradients that have been copied into the buffer only the last lives.
        ("--gpus 2 --global-batch 2 --stack fsdp --precision fp32", "false"),
        # A share comes out in the format of the wire, and is cast.
        ("--gpus 2 --global-batch 2 --stack fsdp", "false"),
        # Of replicas' sums both live until backward is over.
        ("--gpus 4 --dp-shard 2 --global-batch 4 --stack fsdp", "false"),
        # The input of the table's reduction is its last gradient, tied to the head's.
        ("--gpus 2 --global-batch 2 --stack fsdp", "true"),
        # One root unit, of all of which the output matrix has the last gradient.
        ("--gpus 2 --global-batch 2 --stack torchtitan-2024-12", "false"),
        (
            "--gpus 4 --global-batch 8 --stack torchtitan-2024-12 --no-sync-each-microbatch",
            "false",
        ),
        # A forward pass beside whole gradients gathers the table, and the first layer beside it.
        ("--gpus 4 --global-batch 8 --stack fsdp --no-sync-each-microbatch", "false"),
        (
            "--gpus 4 --global-batch 8 --stack fsdp --no-sync-each-microbatch --precision fp32",
            "false",
        ),
    ],
)
def test_the_peak_is_pytorchs(tmp_path: Path, options: str, tied: str) -> None:
    assert_exact(tmp_path, options, tied=tied, vocab_size=16384)


@pytest.mark.parametrize(
    ("stack", "vocab_size", "tied"),
    [
        ("torchtitan@0.2", 1024, "false"),  # of a head that is reduced this rank's shard is left
        ("fsdp", 16384, "true"),  # and of layers theirs
        ("torchtitan@0.2", 16384, "false"),  # the head's sum lives beside the buffer of the wire
    ],
)
def test_sums_give_way_to_shards_as_pytorchs_do(
    tmp_path: Path, stack: str, vocab_size: int, tied: str
) -> None:
    words = f"--gpus 2 --global-batch 4 --micro-batch 1 --stack {stack} --no-sync-each-microbatch"
    assert_exact(tmp_path, words, tied=tied, vocab_size=vocab_size)


@pytest.mark.parametrize("sync", ["", "--no-sync-each-microbatch"])
def test_the_last_gradient_of_a_root_of_positions_is_all_of_them(tmp_path: Path, sync: str) -> None:
    """Bytes as words, and more positions than those: the root is reduced before the table."""
    model = MODEL.replace('positions = "rotary"', 'positions = "learned"\nmax_positions = 16384')
    words = f"--gpus 2 --global-batch 4 --micro-batch 1 --stack fsdp {sync}"
    assert_exact(tmp_path, words, tied="true", vocab_size=256, model=model)


@pytest.mark.parametrize("stages", ["1,1", "2,0"])
def test_the_last_stage_of_a_pipeline_is_pytorchs(tmp_path: Path, stages: str) -> None:
    """Its layer is larger than its head: of the sums in a reduction only the last stays."""
    words = "--gpus 4 --pp 2 --global-batch 8 --stack torchtitan@0.2"
    assert_exact(tmp_path, f"{words} --stages {stages}", tied="false", vocab_size=512, ranks=(2,))


def assert_exact(
    folder: Path,
    options: str,
    *,
    tied: str,
    vocab_size: int,
    ranks: tuple[int, ...] = (),
    model: str = MODEL,
) -> None:
    path = folder / "tables.toml"
    path.write_text(model.format(tied=tied, vocab_size=vocab_size), encoding="utf-8")
    words = f"{path} {options}"
    plan = AgreementPlan(name="x", is_sampled=True, options=words, ranks=ranks, note="")
    (found,) = compare_plan(plan)
    assert not found.failures()
    assert 0 <= int(found.peak.measured) - int(found.peak.predicted) < UNTOLD_BYTES
