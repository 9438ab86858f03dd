"""Command lines of Megatron-LM are read as its own parser reads them, or refused."""

import shlex
import tomllib
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from meshwright import main
from meshwright.hwprofiles import Precision, load_framework
from meshwright.planner.configuration import read_options
from meshwright.planner.export import get_framework
from meshwright.planner.export.megatron_model import read_model, write_model
from meshwright.planner.importing import Imported, Source, import_source
from meshwright.planner.importing.plans import built_in_name, differences
from meshwright.planner.importing.sources import all_options
from meshwright.planner.tables.facts import Facts, FileValues
from meshwright.planner.tables.texts import flags
from meshwright.simulator import MistakesError, ModelSpec, load_model
from meshwright.simulator.launching import gaps
from meshwright.simulator.model import list_models

MEGATRON = get_framework("megatron-lm")
GOLDEN = Path(__file__).parents[1] / "golden" / "megatron-arguments.toml"
WITNESSED: list[dict[str, Any]] = tomllib.loads(GOLDEN.read_text())["lines"]
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

MOMENTS = "--use-precision-aware-optimizer --exp-avg-dtype"
INSTANCES = "--use-distributed-optimizer --num-distributed-optimizer-instances"
RINGS = "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes"


class Word(NamedTuple):
    text: str
    line: int = 1
    unknown: str = ""


def imported(words: str, world_size: int = 8, model: str | None = None) -> Imported:
    options = all_options(MEGATRON.profile)
    said = read_options([Word(each) for each in shlex.split(words)], options)
    assert not [*said.words, *said.refusals]
    launched = {"world_size": world_size}
    source = Source(framework=MEGATRON, keys=said.keys, lines=said.lines, launched=launched)
    given = {"cluster": "dgx-h100", **({} if model is None else {"model": model})}
    known = None if model is None else load_model(model)
    assert known is None or isinstance(known, ModelSpec)
    return import_source(source, given, known, None)


def model_of(found: Imported) -> ModelSpec:
    model = load_model(found.model) if isinstance(found.model, str) else found.model
    assert isinstance(model, ModelSpec)
    return model


def minimal_options(found: Imported) -> dict[str, object]:
    """Return what was read by the names of the golden file."""
    model, values = model_of(found), found.values
    layers, stages = model.num_layers, values.get("stages")
    number = prod(cast("int", values[name]) for name in ("pp", "num_virtual_stages"))
    said = {**model.model_dump(), **values, "head_dim": model.head_dim}
    said["stages"] = [*stages] if isinstance(stages, tuple) else [layers // number] * number
    said["storage"] = Precision(str(values["precision"])).storage
    if model.experts is not None:
        experts = model.experts.model_dump()
        said |= experts | {"hidden_size": model.hidden_size}
        said["expert_hidden_size"] = experts["hidden_size"]
        said["layers_with_experts"] = [int(model.experts.has_layer(at)) for at in range(layers)]
    return said


@pytest.mark.parametrize("line", WITNESSED, ids=lambda line: str(line["name"]))
def test_words_mean_what_megatron_lm_makes_of_them(line: dict[str, Any]) -> None:
    said = minimal_options(imported(line["words"], line["ranks"]))
    expected = line["expected"]
    assert {name: said[name] for name in expected} == expected


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
        found = read_model({}, keys, Facts({}, like), FileValues("megatron-lm"))["model"]
        assert isinstance(found, ModelSpec)
        others = {each.field for each in differences(found, model)}
        # Whether transformers makes queries, keys and values in one product no option says.
        assert others <= (set() if like is not None else {"fused_qkv"})
        # One has two names.
        assert others or built_in_name(found) in {name, "megatron-529.6b"}


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
    (f"{GPT} --fp8-format hybrid --fp8-recipe blockwise", "fp8-recipe=blockwise of megatron-lm"),
    (f"{GPT} --expert-model-parallel-size 2", "allowed: 1"),
    (f"{GPT} {INSTANCES} 3", "allowed: a divisor of the 8 ranks of --dp"),
    (f"{GPT} --context-parallel-size 8 {INSTANCES} 2", "a divisor of the 1 ranks of --dp"),
    (f"{GPT} --deepspeed", "DeepSpeed's engine trains"),
    (f"{GPT} --tensor-model-parallel-size 3", "no multiple of the 3"),
    (f"{GPT} --num-layers-per-virtual-pipeline-stage 5", "does not divide 24 layers"),
    (GPT.replace("--micro-batch-size 2", ""), "--micro-batch"),
    (GPT.replace("data/gpt2-vocab", "data/other"), "in the files of GPT2"),
    (GPT.replace("--num-layers 24", ""), "num-layers: not in the file"),
    (f"{LLAMA} --multi-latent-attention", "without multi-latent-attention"),
    (f"{EXPERTS} --expert-model-parallel-size 2", "moe-token-dispatcher-type=allgather"),
    (f"{LLAMA} --num-experts 8 --moe-grouped-gemm", "moe-permute-fusion=true"),
    (f"{GPT} --delay-wgrad-compute", "allowed: none; or overlap-moe"),
    (f"{GPT} --exp-avg-dtype bf16", "exp-avg-dtype=bf16 of megatron-lm"),
    (f"{GPT} {MOMENTS} bf16 --exp-avg-sq-dtype fp32", "allowed: bf16"),
    (f"{GPT} {MOMENTS} nvfp4", "allowed: fp32, fp16, bf16, fp8"),
    (f"{GPT} {RINGS} 2 2", "2 sizes whose product is context-parallel-size=8"),
    (f"{GPT} --recompute-granularity full", "(block, uniform)"),
    (f"{GPT} --step-batch-size-schedule 0:16", "a batch that grows"),
    (f"{EXPERTS} --moe-layer-freq 2", "moe-layer-freq=2 of megatron-lm"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_no_plan_says_is_refused_by_name(words: str, said: str) -> None:
    with pytest.raises(MistakesError) as error:
        imported(words)
    assert said in str(error.value)


def test_a_script_is_refused_for_what_its_stack_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    for words, status in (("", 0), ("--overlap-moe-expert-parallel-comm", 2)):
        script.write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {LLAMA} {words}\n")
        told = ["--cluster", "dgx-h100", "--model", "llama3-8b"]
        assert main(["import", str(script), *told]) == status
    assert "which has no experts" in capsys.readouterr().err


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


def test_weights_of_8_bits_are_those_that_are_gathered() -> None:
    for words, holds in (("", False), (" --fp8-param-gather", True)):
        values = imported(f"{LLAMA} --fp8-format hybrid --use-distributed-optimizer{words}").values
        assert (values["precision"], values["stack.fp8.holds_parameters"]) == ("fp8", holds)
