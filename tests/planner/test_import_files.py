"""Files in the styles of frameworks, and the plans that they are by hand."""

import tomllib
from pathlib import Path

import pytest

from meshwright import PlanError, import_plan, main
from meshwright.planner.reports import read_plan

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = GOLDEN / "imports"
PLANS = [
    pytest.param(file, row, id=f"{file} {row.get('options', '')}"[:60])
    for file, rows in tomllib.loads((GOLDEN / "import_plans.toml").read_text()).items()
    for row in rows
]
REFUSED = {
    "refused-hello.sh": "no command that starts training",
    "refused-mamba.sh": "pretrain_mamba.py",
    "refused-t5.sh": "pretrain_t5.py",
    "refused-two.sh": "starts 2 programs",
    "megatron-sourced-sizes.sh": "no command that starts training",
    "megatron-deepspeed.sh": "zero-stage",
    "deepspeed-sgd.json": "SGD",
}


def imported(file: str, words: str, out: Path) -> int:
    """Import a file as a plan, and return the status."""
    beside = ["--cluster", "dgx-h100", "--out", str(out), *words.split()]
    return main(["import", str(FILES / file), *beside])


@pytest.mark.parametrize(("file", "row"), PLANS)
def test_a_file_is_the_plan_that_it_is_by_hand(
    file: str, row: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    assert imported(file, str(row.get("options", "")), out) == 0
    saved = read_plan(out)
    model, experts = saved.job.transformer, saved.job.transformer.experts
    beside = {
        "world_size": saved.plan.world_size,
        "num_experts": experts.num_experts if experts else 0,
    }
    for part, said in (("job", saved.job), ("plan", saved.plan), ("model", model)):
        expected = row.get(part, {})
        found = {name: beside.get(name, getattr(said, name, None)) for name in expected}
        assert {name: plainly(each) for name, each in found.items()} == expected


def plainly(value: object) -> object:
    """Return a value as the table writes it."""
    if isinstance(value, tuple):
        return list(value)
    return "none" if value is None else value


def test_the_library_imports_what_the_command_does(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    told = "--model llama3-8b --seq-len 4096 --gpus 16 --recompute none --attention unfused"
    assert imported("deepspeed-comments.json", told, out) == 0
    said = {"model": "llama3-8b", "seq_len": 4096, "gpus": 16, "cluster": "dgx-h100"}
    kept = {"recompute": "none", "attention": "unfused"}
    assert import_plan(FILES / "deepspeed-comments.json", **said, **kept) == read_plan(out)
    with pytest.raises(PlanError, match="'recomputes' is unknown; nearest: recompute"):
        import_plan(FILES / "deepspeed-comments.json", **said, recomputes="none")


def test_a_list_of_keys_takes_nothing_that_it_would_ignore(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["import", "--options", "--from", "deepspeed"]) == 0
    said = capsys.readouterr().out
    assert "optimizer.type" in said
    assert max(map(len, said.splitlines())) <= 80
    for words in (["x.json"], ["--tp", "2"], ["--explain"]):
        assert main(["import", "--options", "--from", "deepspeed", *words]) == 2
        assert "allowed beside it: --from" in capsys.readouterr().err


def test_a_variable_that_decides_and_is_not_set_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ("", "--model gpt3-13b", "--model gpt3-13b --tp 8 --pp 1"):
        assert imported("megatron-case.sh", words, tmp_path / "plan.json") == 2
        assert "give it with --define SIZE=" in capsys.readouterr().err
    assert (
        imported("megatron-positional.sh", "--define 1=corpus --define 2=2", tmp_path / "plan.json")
        == 2
    )
    assert "--define 3=" in capsys.readouterr().err


@pytest.mark.parametrize("file", REFUSED)
def test_a_file_of_no_plan_is_refused_whole(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    told = "--model llama3-8b --gpus 16 --global-batch 128 --micro-batch 1"
    assert imported(file, told, out) == 2
    assert REFUSED[file] in capsys.readouterr().err
    assert not out.exists()


def test_every_file_is_tried() -> None:
    """Those of trainers on top of other libraries: test_hugging_face_import.py."""
    styles = ("megatron", "bridge", "torchtitan", "deepspeed-", "accelerate", "refused")
    styles += ("nanotron", "llm-foundry", "maxtext", "nemo")
    names = {each.name for each in FILES.iterdir() if each.name.startswith(styles)}
    assert names == {param.values[0] for param in PLANS} | {*REFUSED}
