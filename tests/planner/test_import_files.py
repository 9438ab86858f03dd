"""Files in the styles of frameworks, and the plans that they are by hand."""

import tomllib
from pathlib import Path

import pytest

from meshwright import main
from meshwright.planner.reports import read_plan

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = GOLDEN / "imports"
PLANS = [
    pytest.param(file, row, id=f"{file} {row.get('options', '')}"[:60])
    for file, rows in tomllib.loads((GOLDEN / "import_plans.toml").read_text()).items()
    for row in rows
]
REFUSED = {
    "refused-hello.sh": "no command of it starts training",
    "refused-mamba.sh": "pretrain_mamba.py",
    "refused-t5.sh": "pretrain_t5.py",
    "refused-two.sh": "starts training several times",
    "megatron-sourced-sizes.sh": "no command of it starts training",
    "megatron-deepspeed.sh": "zero-stage",
    "megatron-case.sh": "--define SIZE=",
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
    names = {each.name for each in FILES.iterdir()}
    assert names == {param.values[0] for param in PLANS} | {*REFUSED}
