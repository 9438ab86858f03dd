"""The notebooks of examples/ run from the first cell to the last, and are kept without outputs."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_notebook_runs_and_shows_tables_and_pictures(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in code if cell.outputs or cell.execution_count] == []
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=resources).execute()
    shown = [kind for cell in code for each in cell.outputs for kind in each.get("data", {})]
    assert shown.count("image/png") == 4
    assert shown.count("text/html") == 3  # tables
    assert [each for cell in code for each in cell.outputs if each.output_type == "stream"] == []


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS
