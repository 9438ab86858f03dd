"""Files that hosts of repositories read, and ARCHITECTURE.md, name what there is."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
# Links, and folders and files in backticks: below the package, or of the tests.
PATHS = re.compile(r"`([a-z_]+/[\w./]+)`|\]\(([\w./]+)\)")


def entries() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each step of the tables, and of each name with a place."""
    for line in ARCHITECTURE.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6:
            modules, names = (re.findall(r"`([\w./]+)`", cell) for cell in cells[2:4])
            yield from zip(modules, names, strict=len(modules) == len(names))
    yield from ((path, name) for name, path in re.findall(r"`(\w+)` in `([\w./]+)`", ARCHITECTURE))


def test_the_architecture_names_files_that_exist() -> None:
    named = {inner or link for inner, link in PATHS.findall(ARCHITECTURE)}
    assert len(named) > 20
    for path in named:
        assert (ROOT / "meshwright" / path).exists() or (ROOT / path).exists(), path


def test_the_architecture_names_what_its_modules_define() -> None:
    found = list(entries())
    assert len(found) > 15
    for path, name in found:
        text = (ROOT / "meshwright" / path).read_text("utf-8")
        assert re.search(rf"^(?:def |class )?{name}\b", text, re.MULTILINE), (path, name)


def test_the_workflow_runs_scripts_that_exist() -> None:
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text("utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    gate = (ROOT / ".ci" / "run").read_text("utf-8")
    assert commands == re.findall(r"bash scripts/\S+", gate)  # what the gate runs, in its order
    for command in commands:
        assert (ROOT / command.removeprefix("bash ")).is_file()
    for file in re.findall(r"cache-dependency-path: (\S+)", text):
        assert (ROOT / file).is_file()


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one_that_github_takes(form: Path) -> None:
    """By docs.github.com, "Syntax for issue forms" and "Syntax for GitHub's form schema"."""
    document = yaml.safe_load(form.read_text("utf-8"))
    assert document.keys() <= {"name", "description", "title", "labels", "body"}
    body = document["body"]
    assert all(each["type"] in {"input", "textarea", "dropdown"} for each in body)
    assert all(each.keys() <= {"type", "id", "attributes", "validations"} for each in body)
    ids = [each["id"] for each in body]
    labels = [each["attributes"]["label"] for each in body]
    assert len({*ids}) == len({*labels}) == len(body)
    assert any(each.get("validations", {}).get("required") for each in body)


def test_the_image_copies_what_there_is_and_starts_the_command() -> None:
    lines = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ").splitlines()
    copied = [words for line in lines if (words := line.split())[:1] == ["COPY"]]
    sources = {source for words in copied for source in words[1:-1]}
    assert {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]} <= sources
    for source in sources:
        assert (ROOT / source).exists(), source
    (entry,) = (line for line in lines if line.startswith("ENTRYPOINT"))
    assert entry == f'ENTRYPOINT ["{next(iter(PROJECT["scripts"]))}"]'
    # A number: hosts that let no root in cannot look a name up.
    (user,) = (line.split()[1] for line in lines if line.startswith("USER"))
    assert f"useradd --create-home --uid {user} " in "\n".join(lines)
    extras = re.findall(r"EXTRAS=(\w+)", "\n".join(lines))
    assert extras
    assert {*extras} <= PROJECT["optional-dependencies"].keys()
