"""What `scripts/examples` calls right, refused and wrong."""

import shutil
import tempfile
from pathlib import Path

import pytest

from examining import judgement
from examining.command import main
from examining.imports import Answers, Claims, Imported

FILES = Path(__file__).parent / "golden" / "imports"
SAYS = {"tp": 4, "pp": 2, "dp": 2, "precision": "bf16", "num_layers": 32, "num_kv_heads": 8}


def tried(folder: Path, file: str, plan: Claims | None, monkeypatch: pytest.MonkeyPatch) -> int:
    """Judge a file as an example of Megatron-LM's that an import makes *plan* of."""
    (folder / "examples").mkdir(parents=True)
    shutil.copy(FILES / file, folder / "examples")

    def imported(*_: object, leaves_out: bool = False) -> Imported:
        return Imported(2 if plan is None else 0, plan, "x is missing" * (plan is None), {}, {})

    monkeypatch.setattr(judgement, "imported", imported)
    return main(["--repository", f"megatron-lm={folder}"])


def told_by_bash() -> Claims:
    """Return what a script says to bash and to a reader of its command."""
    nothing, answers = Imported(0, {}, "", {}, {}), Answers({"gpus": "16"}, {"GPUS_PER_NODE": "8"})
    with tempfile.TemporaryDirectory() as folder:  # pytest's are closed to the user of scripts
        Path(folder).chmod(0o755)
        script = Path(shutil.copy(FILES / "megatron-strings.sh", folder))
        claims = judgement._script_claims(script, [], nothing, answers)
    assert claims is not None
    return claims


def test_a_plan_is_right_where_every_field_is_what_bash_hands_to_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    claims = told_by_bash()
    assert {name: claims[name] for name in SAYS} == SAYS
    assert tried(tmp_path / "right", "megatron-strings.sh", claims, monkeypatch) == 0
    assert "| 1 | 1 | 0 | 0 |" in capsys.readouterr().out
    assert tried(tmp_path / "wrong", "megatron-strings.sh", {**claims, "tp": 1}, monkeypatch) == 1
    assert "tp 1 for 4" in capsys.readouterr().out


def test_what_starts_no_training_is_wrong_where_it_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in ("refused-hello.sh", "refused-t5.sh", "refused-two.sh"):
        assert tried(tmp_path / file, file, {"tp": 1}, monkeypatch) == 1
        assert "starts no training" in capsys.readouterr().out
    assert tried(tmp_path / "refused", "refused-hello.sh", None, monkeypatch) == 0
    assert "| 1 | 0 | 1 | 0 |" in capsys.readouterr().out
