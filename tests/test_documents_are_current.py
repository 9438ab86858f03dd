"""README.md and docs/ show what this version does: what ``scripts/refresh`` would write.

After a change that moves a number: ``scripts/refresh``, then ``git diff``.
"""

import re
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from documents import command, pages
from documents.command import in_order, main, remade
from documents.makers import agreement
from documents.makers.agreement import HOSTS, RANKS
from documents.pages import (
    ROOT,
    Kind,
    Region,
    commands_of,
    fences,
    page_names,
    read_page,
    regions_of,
)
from documents.pictures import draw, drawn_with, look_alike
from documents.registry import MAKERS, SLOW
from documents.tables import cells_of, row
from documents.terminal import NOT_RUN, PROGRAM, Terminal, out_folder, reason_not_to_run, terminal

REFRESH = "run scripts/refresh, then look at git diff"
# Minutes of fake tensors, or a network and time.
TAKES_TORCH = {"agreement plans", "slurm script", "torchrun script"}
# Of the large plans the last rank, which has the loss; docs/validate.md shows a middle. The others
# take most of a minute each: `scripts/refresh docs/agreement.md` makes them.
EXAMPLES_NOT_RUN = {
    "# submit.py": "needs Slurm",
    "# train.py": "the script of a session, which runs it",
    **dict.fromkeys(
        ("# trainer.py", "# accelerated.py", "# pretrain.py", "# assets.py"),
        "of a training framework; tests_outside/test_count.py",
    ),
    "from meshwright.validate import format_comparisons": "the tables of its page, made once",
    "from pathlib import Path": "reads what a search left or a cluster sent; test_launch does that",
}
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")


def current_regions() -> Iterator[object]:
    """Yield every page and region that the gate makes."""
    for page in page_names():
        for region in in_order(regions_of(read_page(page))):
            if region.kind is Kind.MADE and region.name in SLOW:
                continue
            marks = []
            if region.name in TAKES_TORCH or region.name.startswith(("validate ", "count ")):
                marks.append(needs_torch)
            if "--rank" in region.name:
                marks.append(pytest.mark.slow)
            yield pytest.param(page, region, id=f"{page}: {region.label[:50]}", marks=marks)


@pytest.mark.parametrize(("page", "region"), [*current_regions()])
def test_a_region_shows_what_the_program_makes(page: str, region: Region) -> None:
    if region.kind is Kind.PICTURE:
        shown = (ROOT / page).parent / region.name
        told = f"{shown.name} looks different with {drawn_with()}; {REFRESH}"
        assert look_alike(shown, draw(page, region.name)), told
    else:
        assert remade(page, read_page(page), region) == region.text, REFRESH


def test_every_maker_and_every_slow_region_has_its_place() -> None:
    made = [
        region.name
        for page in page_names()
        for region in regions_of(read_page(page))
        if region.kind is Kind.MADE
    ]
    assert sorted(made) == sorted(MAKERS)
    assert set(SLOW) <= set(MAKERS)


# --- commands and examples that show no output ---------------------------------------------------


def plain_commands(page: str) -> list[str]:
    """Return the commands of a page below which no output stands."""
    text = read_page(page)
    sessions = {PROGRAM + each.name for each in regions_of(text) if each.kind is Kind.SESSION}
    return [each for each in commands_of(text) if each not in sessions]


def agreement_commands() -> set[str]:
    return {PROGRAM + plan.command for plan in agreement.plans().values()}


@pytest.mark.parametrize("page", [each for each in page_names() if plain_commands(each)])
def test_commands_run_that_show_no_output(page: str) -> None:
    for words in plain_commands(page):
        out = out_folder(words)
        if out and words.removesuffix(f" --out {out}") in agreement_commands():
            continue  # a plan of docs/agreement.md, compared below
        if not reason_not_to_run(words):
            terminal(page).output(words)


def test_what_is_not_run_stands_on_a_page() -> None:
    shown = [words for page in page_names() for words in plain_commands(page)]
    reasons = {reason_not_to_run(words) for words in shown} - {""}
    assert reasons == set(NOT_RUN.values())
    for words in shown:
        script = re.match(r"bash (scripts/\S+)", words)
        assert script is None or (ROOT / script[1]).is_file()


def examples() -> Iterator[object]:
    for page in page_names():
        for number, code in enumerate(fences(read_page(page), "python"), 1):
            if not code.startswith(tuple(EXAMPLES_NOT_RUN)):
                yield pytest.param(page, code, id=f"{page}: {number}")


@pytest.mark.parametrize(("page", "code"), [*examples()])
def test_examples_in_python_run(page: str, code: str) -> None:
    exec(compile(code, page, "exec"), {})


# --- docs/agreement.md: all plans take an hour, so a sample is run; what is said is made of all ---


def agreement_rows(name: str, plan: str) -> list[str]:
    """Return the rows of a plan in a region of the page."""
    (region,) = (each for each in regions_of(read_page("docs/agreement.md")) if each.name == name)
    return [row(cells) for cells in cells_of(region.text) if cells[0] == plan]


@needs_torch
@pytest.mark.parametrize(
    "name", [name for name, plan in agreement.plans().items() if plan.is_sampled]
)
def test_ranks_of_a_plan_agree_with_pytorch_as_the_page_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright.validate.runs import fake

    if agreement.plans()[name].saved().stack.name != "ddp":  # whose second step is not the third
        monkeypatch.setattr(fake, "NUM_STEPS", 2)
    shown, on_hosts = agreement_rows(RANKS, name), agreement_rows(HOSTS, name)
    for found in agreement.compared(name):
        assert row(found.cells()) in shown, REFRESH
        if cells := found.host_cells():
            assert row(cells) in on_hosts, REFRESH
        assert bool(found.failures()) <= bool(found.plan.note)


@needs_torch
def test_the_page_has_every_plan_and_rank_as_it_is_predicted_now() -> None:
    from meshwright.validate.agreement import RankAgreement
    from meshwright.validate.comparison import compare_rank
    from meshwright.validate.ranks import capped, predict_members, representative_members

    for name, plan in agreement.plans().items():
        saved = plan.saved()
        ranks = plan.ranks or representative_members(saved)
        rows = [cells for line in agreement_rows(RANKS, name) for cells in cells_of(line)]
        on_hosts = [cells for line in agreement_rows(HOSTS, name) for cells in cells_of(line)]
        assert [int(cells[1]) for cells in rows] == [*ranks]
        assert len(on_hosts) == (len(ranks) if saved.plan.offload != "none" else 0)
        said = predict_members(capped(saved, ranks), ranks)
        for number, rank in enumerate(ranks):
            checks = compare_rank(said[rank], as_predicted(said[rank]))
            found = RankAgreement(plan=plan, rank=rank, checks=tuple(checks))
            _, _, flops, calls, peak_bytes, *_ = rows[number]
            assert flops.endswith(found.cells()[2]), REFRESH
            assert plan.note or calls == found.cells()[3], REFRESH
            assert peak_bytes == found.cells()[4], REFRESH
            if on_hosts:
                shown, cells = on_hosts[number], [*found.host_cells()]
                assert (shown[:3], shown[5:]) == (cells[:3], cells[5:]), REFRESH


def as_predicted(said: object) -> object:
    """Return what a rank shows that does as it is told."""
    from meshwright.validate.ranks import RankMeasurement

    shared = {each.name: getattr(said, each.name, None) for each in fields(RankMeasurement)}
    told = {name: value for name, value in shared.items() if value is not None}
    return RankMeasurement(**told, world_size=1, backend="fake")


def test_the_session_with_a_rank_of_3072_is_a_row_of_the_table() -> None:
    """It stands for that plan in the sample, and runs as many microbatches as that rank needs."""
    sessions = regions_of(read_page("docs/validate.md"))
    (session,) = (each for each in sessions if each.name.endswith("--rank 3024"))
    rows = map(cells_of, agreement_rows(RANKS, "gpt3 on 3072 full"))
    ((found,),) = (each for each in rows if each[0][1] == "3024")
    assert found[4] in session.text


# --- the command itself, on a page of its own -----------------------------------------------------

PAGE = """# Page

```
$ meshwright schedules
```

```toml
# tiny.toml
name = "tiny"
```

Bold: <!-- made by: fruit -->2 pears<!-- end -->, and

<!-- made by: table -->
<!-- end -->
"""


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a repository with one page and two makers."""
    for module in (command, pages):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setitem(MAKERS, "fruit", lambda place: place.text.replace("pears", "plums"))
    monkeypatch.setitem(MAKERS, "table", lambda place: f"\n{'plums' in place.page}\n")
    terminal.cache_clear()
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(PAGE, encoding="utf-8")
    yield tmp_path
    terminal.cache_clear()


def refreshed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(words)
    out, err = capsys.readouterr()
    return status, out, err


def test_a_page_is_rewritten_once(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refreshed(capsys)[0] == 0
    text = (house / "README.md").read_text(encoding="utf-8")
    assert "<!-- made by: fruit -->2 plums<!-- end -->" in text
    assert "<!-- made by: table -->\nTrue\n<!-- end -->" in text
    assert "$ meshwright schedules\n```" not in text
    assert "interleaved" in text
    assert refreshed(capsys, "--check")[:2] == (0, "")


def test_a_digit_edited_by_hand_is_told(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refreshed(capsys)[0] == 0
    page = house / "README.md"
    good = page.read_text(encoding="utf-8")
    bad = good.replace("1f1b", "1f2b", 1).replace("2 plums", "2 pears")
    page.write_text(bad, encoding="utf-8")
    status, out, _ = refreshed(capsys, "--check", str(page))
    assert status == 1
    assert page.read_text(encoding="utf-8") == bad
    removed = [line for line in out.splitlines() if line.startswith("-")]
    assert removed[0] == "--- a/README.md"
    assert len(removed) == 3
    assert "1f2b" in removed[1]
    assert "2 pears" in removed[2]


def test_regions_are_listed(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = "README.md\n  session schedules\n  made fruit\n  made table\n"
    assert refreshed(capsys, "--list")[:2] == (0, listed)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("fruit", "fruits", "unknown region 'fruits'; nearest: fruit"),
        ("<!-- end -->, and", ", and", "marks do not pair up"),
        ("Bold: <!--", "<!--", "'fruit': a line of text must not begin with a mark"),
        ("made by: table", "made by: fruit", "'made fruit' stands more than once on a page"),
        ("schedules", "schedule", "meshwright schedule returned 2: error: "),
    ],
)
def test_a_mistake_on_a_page_is_one_line(
    old: str, new: str, said: str, house: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (house / "README.md").write_text(PAGE.replace(old, new, 1), encoding="utf-8")
    status, out, err = refreshed(capsys)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"error: {said}")


def test_an_unknown_page_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    told = "error: unknown page 'docs/galery.md'; nearest: docs/gallery.md"
    status, out, err = refreshed(capsys, "docs/galery.md")
    assert (status, out) == (2, "")
    assert err.startswith(told)
    assert err.count("\n") == 1


def test_a_command_runs_after_those_that_write_what_it_reads() -> None:
    text = "```\nmeshwright {}\nmeshwright {}\n```\n".format(*WORDS)
    shell = Terminal(text)
    shell.output(f"meshwright {WORDS[1]}")
    assert (shell.folder / "made" / "plan.json").is_file()


WORDS = (
    "simulate gpt2 --cluster dgx-a100 --gpus 8 --global-batch 8 --out made",
    "simulate --plan made/plan.json",
)
