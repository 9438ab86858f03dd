"""Command lines of Megatron-LM are read as its own parser reads them, or refused.

Values in WITNESSED are those of parse_args, validate_args, core_transformer_config_from_args and
get_num_layers_to_build of core_v0.16.1 (commit 55ac7082) for the same words, without Transformer
Engine: --no-rope-fusion was added and --moe-permute-fusion left out.
"""

import shlex
from typing import NamedTuple

import pytest

from meshwright.hwprofiles import load_framework
from meshwright.planner.configuration import Effect, load_options, read_options
from meshwright.planner.export import get_framework
from meshwright.planner.export.facts import Facts, FileWords
from meshwright.planner.export.megatron_model import read_model, write_model
from meshwright.planner.export.texts import flags
from meshwright.planner.importing import Imported, Source, import_source
from meshwright.planner.importing.models import built_in_name, differences
from meshwright.planner.importing.sources import all_options
from meshwright.simulator import MistakesError, ModelSpec, load_model
from meshwright.simulator.launching import gaps
from meshwright.simulator.model import list_models

MEGATRON = get_framework("megatron-lm")
GPT = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --bf16 "
    "--max-position-embeddings 2048 --micro-batch-size 2 --vocab-file data/gpt2-vocab.json"
)
LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --bf16 "
    "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 "
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
    "--tokenizer-type NullTokenizer --vocab-size 128255 --micro-batch-size 1"
)
EXPERTS = f"{LLAMA} --num-experts 8 --moe-grouped-gemm --moe-permute-fusion"


class Word(NamedTuple):
    text: str
    line: int = 1
    unknown: str = ""


def imported(words: str, world_size: int = 8, model: str | None = None) -> Imported:
    options = all_options(MEGATRON.profile)
    said = read_options([Word(each) for each in shlex.split(words)], options)
    assert not [*said.words, *said.refusals]
    source = Source(framework=MEGATRON, keys=said.keys, lines=said.lines, world_size=world_size)
    given = {"cluster": "dgx-h100", **({} if model is None else {"model": model})}
    known = None if model is None else load_model(model)
    assert known is None or isinstance(known, ModelSpec)
    return import_source(source, given, known, None)


def model_of(found: Imported) -> ModelSpec:
    model = load_model(found.model) if isinstance(found.model, str) else found.model
    assert isinstance(model, ModelSpec)
    return model


def said_of(found: Imported) -> dict[str, object]:
    """Return what was read by the names of WITNESSED."""
    model, values = model_of(found), found.values
    names = ("tp", "pp", "cp", "dp", "ep", "etp", "num_virtual_stages", "stages", "recompute")
    sizes = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size")
    switches = (
        "gated_mlp",
        "output_bias",
        "attention_bias",
        "tied_embeddings",
        "norm",
        "positions",
    )
    experts = {} if model.experts is None else model.experts.model_dump()
    return {
        **{name: values.get(name) for name in (*names, "sequence_parallel", "zero_stage")},
        **{name: values.get(name) for name in ("global_batch_size", "gradient_precision")},
        **{name: getattr(model, name) for name in (*sizes, *switches, "dropout")},
        **{f"experts.{name}": value for name, value in experts.items()},
    }


WITNESSED: list[tuple[str, int, dict[str, object]]] = [
    (
        f"{GPT} --global-batch-size 64",
        8,
        {
            **{"dp": 8, "global_batch_size": 64, "zero_stage": 0, "recompute": "none"},
            **{"ffn_hidden_size": 8192, "num_kv_heads": 16, "head_dim": 128, "gated_mlp": False},
            **{"output_bias": True, "attention_bias": True, "tied_embeddings": True},
            **{"norm": "layernorm", "positions": "learned", "dropout": True},
            **{"gradient_precision": "fp32", "sequence_parallel": False},
        },
    ),
    (
        f"{GPT} --tensor-model-parallel-size 2 --sequence-parallel",
        8,
        {"tp": 2, "dp": 4, "global_batch_size": 8, "sequence_parallel": True},
    ),
    (
        f"{GPT} --sequence-parallel --use-distributed-optimizer",
        8,
        {"dp": 8, "global_batch_size": 16, "sequence_parallel": False, "zero_stage": 1},
    ),
    (
        f"{GPT} --swiglu --group-query-attention --grad-reduce-in-bf16",
        8,
        {
            **{"ffn_hidden_size": 5440, "num_kv_heads": 1, "gated_mlp": True, "output_bias": True},
            "gradient_precision": "bf16",
        },
    ),
    (
        f"{GPT} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 "
        "--global-batch-size 64",
        16,
        {"pp": 4, "dp": 4, "num_virtual_stages": 3, "stages": "even"},
    ),
    (
        f"{GPT} --recompute-activations --use-rotary-position-embeddings --no-position-embedding",
        8,
        {"recompute": "selective", "positions": "rotary", "global_batch_size": 16},
    ),
    (
        f"{LLAMA} --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
        "--context-parallel-size 2 --global-batch-size 128 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        64,
        {
            **{"tp": 4, "pp": 4, "cp": 2, "dp": 2, "stages": "even", "recompute": "full"},
            **{"gated_mlp": True, "output_bias": False, "attention_bias": False},
            **{"norm": "rmsnorm", "tied_embeddings": False, "dropout": False, "num_kv_heads": 8},
        },
    ),
    (
        f"{LLAMA} --num-layers 30 --pipeline-model-parallel-size 4 --global-batch-size 128 "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "--num-virtual-stages-per-pipeline-rank 2",
        32,
        {"pp": 4, "dp": 8, "num_virtual_stages": 2, "stages": (3, 4, 4, 4, 4, 4, 4, 3)},
    ),
    (
        f"{LLAMA} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 7 "
        "--decoder-last-pipeline-num-layers 7 --global-batch-size 128",
        32,
        {"num_virtual_stages": 1, "stages": (7, 9, 9, 7)},
    ),
    (
        f"{LLAMA} --num-layers 28 --pipeline-model-parallel-size 4 --global-batch-size 128 "
        "--decoder-last-pipeline-num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
        32,
        {"num_virtual_stages": 2, "stages": (4, 4, 4, 2, 4, 4, 4, 2)},
    ),
    (
        f"{LLAMA} --pipeline-model-parallel-size 4 --global-batch-size 64 "
        "--pipeline-model-parallel-layout 'Et*3|t*4|t*4|t*4|t*4|t*4|t*4|t*5L'",
        16,
        {"num_virtual_stages": 2, "stages": (3, 4, 4, 4, 4, 4, 4, 5)},
    ),
    (
        f"{EXPERTS} --expert-model-parallel-size 8 --tensor-model-parallel-size 2 "
        "--sequence-parallel --expert-tensor-parallel-size 1 --use-distributed-optimizer "
        "--moe-token-dispatcher-type alltoall --global-batch-size 256",
        64,
        {
            **{"tp": 2, "ep": 8, "etp": 1, "dp": 32, "experts.num_experts": 8},
            **{"experts.experts_per_token": 2, "experts.hidden_size": 14336},
        },
    ),
    (
        f"{EXPERTS} --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 "
        "--moe-shared-expert-intermediate-size 2816 --moe-layer-freq '([0]*1+[1]*31)' "
        "--expert-model-parallel-size 8 --moe-token-dispatcher-type flex --global-batch-size 256",
        64,
        {
            **{"ep": 8, "etp": 1, "experts.experts_per_token": 6, "experts.hidden_size": 1408},
            **{"experts.shared_hidden_size": 2816, "experts.first_dense_layers": 1},
        },
    ),
    (
        f"{LLAMA} --add-qkv-bias --kv-channels 64 --use-precision-aware-optimizer "
        "--main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
        "--use-distributed-optimizer --global-batch-size 8",
        8,
        {
            **{"attention_bias": True, "output_bias": False, "head_dim": 64},
            **{"gradient_precision": "bf16", "zero_stage": 1},
        },
    ),
]


@pytest.mark.parametrize(("words", "world_size", "expected"), WITNESSED)
def test_words_mean_what_megatron_lm_makes_of_them(
    words: str, world_size: int, expected: dict[str, object]
) -> None:
    said = said_of(imported(words, world_size))
    assert {name: said[name] for name in expected} == expected


def test_a_table_reads_the_options_that_are_said_to_be_read() -> None:
    (table,) = load_framework("megatron-lm").tables.values()
    options = [each for name in table.options for each in load_options(name).values()]
    assert {each.key for each in options if each.effect is Effect.READ} == {*table.keys}


def test_old_names_lead_to_present_ones() -> None:
    options = all_options(MEGATRON.profile)
    old = [each for each in options.values() if each.effect is Effect.RENAMED]
    assert len(old) > 30
    for each in old:
        assert options[each.allowed[0]].effect is not Effect.RENAMED


def exportable() -> list[str]:
    """Return the models that the table can tell."""
    (table,) = load_framework("megatron-lm").tables.values()
    models = {name: load_model(name) for name in list_models()}
    return [
        name
        for name, model in models.items()
        if isinstance(model, ModelSpec) and not [*gaps._model_limits(model, table.model_facts)]
    ]


@pytest.mark.parametrize("name", exportable())
def test_a_model_comes_back_from_its_options(name: str) -> None:
    model = load_model(name)
    assert isinstance(model, ModelSpec)
    options = write_model({}, Facts({}, model)) | {
        "seq-length": model.seq_len,
        "tokenizer-type": "NullTokenizer",
    }
    words = [Word(word) for line in flags(options) for word in shlex.split(line)]
    keys = read_options(words, all_options(MEGATRON.profile)).keys
    for like in (None, model):
        found = read_model({}, keys, Facts({}, like), FileWords("megatron-lm"))["model"]
        assert isinstance(found, ModelSpec)
        others = {each.field for each in differences(found, model)}
        # Whether transformers makes queries, keys and values in one product no option says.
        assert others <= (set() if like is not None else {"fused_qkv"})
    assert name == "mt-nlg-530b" or others or built_in_name(found) == name


def test_the_vocabulary_is_padded_before_it_is_compared() -> None:
    words = GPT.replace("--num-layers 24", "--tensor-model-parallel-size 8 --num-layers 24")
    assert model_of(imported(words)).vocab_size == 50257
    assert imported(words, model="gpt3-1.3b").model == "gpt3-1.3b"
    with pytest.raises(MistakesError, match="vocab_size 50257, not 51200"):
        imported(GPT, model="gpt3-1.3b")


def test_a_model_that_is_not_that_of_the_file_is_refused_whole() -> None:
    words = LLAMA.replace("--group-query-attention --num-query-groups 8", "")
    words = words.replace("--swiglu", "")
    with pytest.raises(MistakesError) as error:
        imported(words, model="llama3-8b")
    (text,) = error.value.messages
    assert text.endswith("llama3-8b: num_kv_heads 32, not 8; gated_mlp false, not true")


REFUSED = [
    (f"{GPT} --optimizer sgd", "optimizer=sgd of megatron-lm is in no plan"),
    (f"{GPT} --rampup-batch-size 16 16 1000", "rampup-batch-size"),
    (f"{GPT} --swigluu", "swiglu"),
    (f"{GPT} --lr_decay_stylee cosine", "lr-decay-style"),
    (f"{GPT} --spec megatron.core.models.mamba.mamba_layer_specs mamba", "layers of the user's"),
    (f"{GPT} --hybrid-override-pattern M-M*", "Mamba"),
    (f"{GPT} --attention-dropout 0", "attention-dropout=0.0 of megatron-lm"),
    (f"{GPT} --no-position-embedding", "with position-embedding-type=rope"),
    (f"{GPT} --position-embedding-type none", "allowed: learned_absolute, rope"),
    (f"{GPT} --quick-geglu", "with num-experts"),
    (f"{GPT} --fp8-format hybrid", "fp8-param-gather"),
    (f"{GPT} --expert-model-parallel-size 2", "allowed: 1"),
    (f"{GPT} --deepspeed", "DeepSpeed's engine trains"),
    (f"{GPT} --tensor-model-parallel-size 3", "no multiple of the 3"),
    (f"{GPT} --num-layers-per-virtual-pipeline-stage 5", "does not divide 24 layers"),
    (GPT.replace("--micro-batch-size 2", ""), "--micro-batch"),
    (GPT.replace("data/gpt2-vocab", "data/other"), "the vocabulary is that of the files of GPT2"),
    (GPT.replace("--num-layers 24", ""), "num-layers: not in the file"),
    (f"{LLAMA} --multi-latent-attention", "without multi-latent-attention"),
    (f"{EXPERTS} --expert-model-parallel-size 2", "moe-token-dispatcher-type=allgather"),
    (f"{LLAMA} --num-experts 8 --moe-grouped-gemm", "moe-permute-fusion=true"),
    (f"{EXPERTS} --moe-layer-freq 2", "moe-layer-freq=2 of megatron-lm"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_no_plan_says_is_refused_by_name(words: str, said: str) -> None:
    with pytest.raises(MistakesError) as error:
        imported(words)
    assert said in str(error.value)


def test_latent_attention_and_windows_are_those_of_the_options() -> None:
    latent = LLAMA.replace("--group-query-attention --num-query-groups 8", "--qk-layernorm")
    model = model_of(imported(f"{latent} --multi-latent-attention --q-lora-rank 1536"))
    assert model.latent is not None
    assert (model.latent.query_rank, model.latent.kv_rank, model.qk_norm) == (1536, 32, "none")
    model = model_of(imported(f"{LLAMA} --window-size 127,0 --window-attn-skip-freq 4"))
    assert (model.window, model.layer_pattern) == (128, "WWWF")


def test_full_recomputation_of_2021_is_read() -> None:
    for words in ("--checkpoint-activations", "--activations-checkpoint-method uniform"):
        assert imported(f"{GPT} {words}").values["recompute"] == "full"
