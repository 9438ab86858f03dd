"""Nothing from a file becomes code, a path or a command of a terminal, whatever its texts hold."""

import ast
import csv
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from textwrap import wrap
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from rich.console import Group
from rich.text import Text

from meshwright import main
from meshwright.hwprofiles import (
    Cluster,
    Device,
    StackProfile,
    list_clusters,
    list_stacks,
    load_cluster,
    load_device,
    load_link,
    load_stack,
    profile_toml,
)
from meshwright.planner.cli.commands import print_report, write_text
from meshwright.planner.export import FRAMEWORKS, export_plan
from meshwright.planner.plots.canvas import new_figure, write_titles
from meshwright.planner.reports import SavedPlan, json_text, plan_document, read_plan
from meshwright.planner.tables import (
    Launch,
    Starter,
    flags,
    hand_script,
    single_quoted,
    slurm_script,
    tyro_options,
)
from meshwright.records import Record
from meshwright.simulator import PlanError, list_models, load_model
from meshwright.simulator.model import AnyModel, parse_any_model
from meshwright.validate.calibration.fit.profile_files import device_toml, link_toml
from meshwright.validate.cli import plan_of_options
from meshwright.validate.launch import (
    Launcher,
    RunSpec,
    emit_slurm,
    emit_torchrun,
    write_launch_folder,
)

yaml: Any = import_module("yaml")
HOSTILE = {
    "double quotes": 'a" + open("canary", "w").name + "b',
    "single quotes": "a'; touch canary; '",
    "triple quotes": 'gpt"""+__import__("os").system("touch canary")+"""',
    "single triple quotes": "gpt'''+__import__('os').system('touch canary')+'''",
    "backslash at the end": "a\\",
    "escapes": r"\n\x22\u0022\N{QUOTATION MARK}\"\'",
    "substitution": "$(touch canary)",
    "backticks": "`touch canary`",
    "variable": "${x:=y} $PATH $0 $$ !!",
    "separators": "a; touch canary & touch canary | touch canary > canary",
    "parents": "../../canary",
    "root": "/etc/x",
    "option": "-rf",
    "long option": "--wrap=touch canary",
    "percent": "%s %n %x %j %(name)s",
    "braces": "{0} {x} {} {{",
    "comment": "a # b",
    "formula": "=1+1,2",
    "TeX": r"$\foo{$ $x_1$",
    "markup": "[/x] [red]x[link=file:///etc] <b>&amp;</b>",
    "TOML": ']\n[[x]]\ny = "',
    "YAML": "a: &a !!python/object:os.system [*a, - x]",
    "line feed": "a\ntouch canary\n#SBATCH --wrap=x\n",
    "carriage return": "a\rtouch canary\r\n",
    "line separator": "a\u2028touch canary\u2029\x85\x0b\x0c",
    "null": "a\0b",
    "terminal": "\x1b[31mred\x1b]0;title\x07\x08\x9b2J\x7f",
    "direction": "a\u202eb\u2066c",
    "half a character": "a\ud800b",
    "other letters": "\u00e9\u4e2d\U0001f600",
    "long": "x" * 5000,
    "rather long": "y" * 190,
}
# What no field may hold, since a terminal, a viewer or an encoder takes it for something else.
NEVER = {"carriage return", "line separator", "null", "terminal", "direction", "half a character"}

ROUTE = list[str]  # from a document to one of its texts, as keys


def texts_of(kind: object, value: object, route: ROUTE) -> Iterator[tuple[str, ROUTE]]:
    """Yield the free texts of a document of a type: the field, and the way there."""
    if kind is str:
        yield "", route
    elif isinstance(kind, type) and issubclass(kind, Record):
        # A condition is no free text: tests/hwprofiles/test_conditions.py.
        free = {name: each for name, each in kind.model_fields.items() if name != "when"}
        for name, field in free.items():
            given = value.get(name) if isinstance(value, Mapping) else None
            for where, way in texts_of(field.annotation, given, [*route, name]):
                yield where or f"{kind.__name__}.{name}", way
    else:
        for inner, each, key in parts_of(kind, value):
            yield from texts_of(inner, each, [*route, *key])


def parts_of(kind: object, value: object) -> Iterator[tuple[object, object, ROUTE]]:
    """Yield the types that a type is made of, with the values there and their keys."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Annotated, Union, UnionType):
        yield from ((each, value, []) for each in inner)
    elif origin is tuple:
        listed = value if isinstance(value, list) else [None]
        yield from ((inner[0], each, [str(number)]) for number, each in enumerate(listed))
    elif origin is dict:
        yield inner[0], None, ["key"]
        table = value if isinstance(value, Mapping) else {"": None}
        yield from ((inner[1], each, [key]) for key, each in table.items())


def put(document: dict[str, Any], route: ROUTE, text: str) -> dict[str, Any] | None:
    """Return a document with another text in one place; None where there is no such place."""
    first = route[0]
    changed: Any = {**document, first: deepcopy(document.get(first))}
    place = changed
    for key in route[:-1]:
        place = place[int(key)] if isinstance(place, list) else place.get(key)
        if not isinstance(place, dict | list):
            return None
    last = route[-1]
    if last == "key" and place:
        place[text] = place.pop(next(iter(place)))
    elif isinstance(place, list) and last.isdigit():
        place[int(last)] = text
    elif isinstance(place, dict) and last != "key":
        place[last] = text
    else:
        return None
    return dict(changed)


def written_out(words: str) -> dict[str, Any]:
    """Return a plan file that says all of its model, cluster and stack, each of another name."""
    saved = plan_of_options(words, "dgx-b200")
    document: dict[str, Any] = json.loads(json_text(plan_document(saved)))
    parts = {"model": saved.job.model, "cluster": saved.cluster, "stack": saved.stack}
    return document | {key: each.model_dump(mode="json") for key, each in parts.items()}


LLAMA = "llama3-8b --global-batch 64 --seq-len 4096 --gpus 16"
GPT = "gpt2 --global-batch 64 --gpus 16"
PLANS = {
    "megatron-lm": (f"{LLAMA} --tp 2 --pp 2", f"{LLAMA} --pp 2 --stages 15,17"),
    "megatron-bridge": (f"{LLAMA} --tp 4", f"{LLAMA} --pp 2 --stages 15,17"),
    "torchtitan": (
        f"{LLAMA} --stack torchtitan@0.2 --pp 2",
        f"{LLAMA} --stack torchtitan@0.3 --pp 2",
    ),
    "deepspeed": (f"{GPT} --stack deepspeed --zero 2 --offload optimizer",),
    "accelerate": (
        f"{GPT} --stack ddp",
        f"{GPT} --stack fsdp",
        f"{GPT} --stack deepspeed --set overlap_gradient_reduce=false",
    ),
    "torchrun": (f"{GPT} --stack ddp", f"{LLAMA} --stack fsdp"),
}
DOCUMENTS = {words: written_out(words) for words in dict.fromkeys(sum(PLANS.values(), ()))}
FIRST = next(iter(DOCUMENTS.values()))
KINDS: dict[str, tuple[type[Record], ...]] = {
    "model": get_args(AnyModel),
    "cluster": (Cluster,),
    "stack": (StackProfile,),
}


def routes(document: dict[str, Any]) -> dict[str, list[ROUTE]]:
    """Return where a plan file has free texts, by their fields."""
    found: dict[str, list[ROUTE]] = {}
    for key, (kind, *_) in KINDS.items():
        for field, route in texts_of(kind, document[key], [key]):
            found.setdefault(field, []).append(route)
    return found


CHAIN = {"name": "x", "kind": "chain", "linear": [{"inputs": 5, "outputs": 8}]}


def samples() -> list[Record]:
    """Return all built-in profiles and models, and a model of each kind that has none."""
    return [
        *map(load_cluster, list_clusters()),
        *map(load_stack, list_stacks()),
        *map(load_model, list_models()),
        parse_any_model(CHAIN, origin="chain"),
    ]


def test_every_free_text_of_every_schema_is_tried() -> None:
    kinds = [kind for kinds in KINDS.values() for kind in kinds]
    wanted = {field for kind in kinds for field, _ in texts_of(kind, None, [])}
    there = {
        field
        for document, kind in ((each.model_dump(mode="json"), type(each)) for each in samples())
        for field, route in texts_of(kind, document, [])
        if put(document, route, "x") is not None
    }
    assert wanted == there
    assert {"ModelSpec.name", "Cluster.title", "Link.source", "StackProfile.flash_kernel"} < wanted
    assert {"ImageModel.source", "Device.flash", "GroupedKernels.source"} < wanted
    assert wanted - {*routes(FIRST)} == {
        field for field in wanted if field.startswith(("ImageModel.", "ChainModel."))
    }


def refusal(document: dict[str, Any], folder: Path) -> str | None:
    """Return why a plan file is refused, None where it is read."""
    path = folder / "plan.json"
    path.write_text(json_text(document))
    try:
        read_plan(path)
    except PlanError as error:
        return str(error)
    return None


@cache
def refusals(text: str, folder: Path) -> dict[str, str | None]:
    """Return of each field why a text in it is refused, None where it is read."""
    found = {}
    for field, (route, *_) in routes(FIRST).items():
        document = put(FIRST, route, text)
        assert document is not None
        found[field] = refusal(document, folder)
        if found[field] is None:  # and written as it was read
            again = json.loads(json_text(plan_document(read_plan(folder / "plan.json"))))
            assert again[route[0]] == document[route[0]]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the tests here share."""
    return tmp_path_factory.mktemp("plans")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_text_is_read_as_it_stands_or_refused_in_a_line(name: str, folder: Path) -> None:
    said = refusals(HOSTILE[name], folder)
    assert name not in NEVER or None not in said.values()
    for field, message in said.items():
        if message is not None:
            route = routes(FIRST)[field][0]
            key = next(each for each in reversed(route) if each != "key" and not each.isdigit())
            assert message.isprintable()
            assert message.startswith(f"{folder}/plan.json: {route[0]}: ")
            assert key in message or key.replace("_", ".", 1) in message
            assert len(message) < 400 + len(str(folder))


def with_text(document: dict[str, Any], text: str, folder: Path) -> dict[str, Any]:
    """Return a plan file with a text in every field that takes it."""
    said = refusals(text, folder)
    for field, ways in routes(document).items():
        if said.get(field) is None:
            for route in ways:
                document = put(document, route, text) or document
    return document


@pytest.mark.parametrize("name", sorted(NEVER))
def test_models_of_every_kind_refuse_what_terminals_obey(name: str) -> None:
    for each in samples():
        if isinstance(each, get_args(AnyModel)):
            document = each.model_dump(mode="json")
            for field, route in texts_of(type(each), document, []):
                changed = put(document, route, HOSTILE[name])
                assert changed is not None
                with pytest.raises(PlanError, match=field.partition(".")[2]) as caught:
                    parse_any_model(changed, origin="a.toml")
                assert str(caught.value).isprintable()


STUBS = {
    "scontrol": "printf 'node-a\\nnode-b\\n'",
    "srun": 'shift; exec "$@"',
    **dict.fromkeys(("torchrun", "accelerate", "python"), 'printf "%s\\0" "$0" "$@" >>"$CALLED"'),
}
VARIABLES = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node-[a-b]",
    "SLURM_CPUS_PER_TASK": "8",
    "SLURM_NODEID": "0",
    "NODE_RANK": "0",
    "HEAD_NODE": "node-a",
    "RUN_NAME": "try-1",
    "SCRIPT": "my train.py",
}


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of commands that note their words."""
    folder = tmp_path_factory.mktemp("stubs")
    for name, text in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def words_of(script: str, stubs: Path, folder: Path) -> list[str]:
    """Run a script in a folder of its own; return what it called, with all words."""
    box, called = folder / "box", folder / "called"
    box.mkdir()
    (box / "run.sh").write_text(script)
    environment = {**VARIABLES, "PATH": f"{stubs}:{os.environ['PATH']}", "CALLED": str(called)}
    subprocess.run(["bash", "run.sh"], cwd=box, env=environment, check=True)
    (box / "run.sh").unlink()
    assert [path for path in box.rglob("*") if not path.is_dir()] == []
    words = called.read_text().split("\0")[:-1]
    called.unlink()
    rmtree(box)
    return words


def directives(script: str) -> list[str]:
    """Return what Slurm reads at the head of a script, the job's name by its letters alone."""
    found = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    name = re.compile(r"--job-name=[A-Za-z0-9][A-Za-z0-9._-]*$")
    return [name.sub("--job-name=x", line) for line in found]


def same_but_for_texts(name: str, text: str, usual: str) -> bool:
    """Return whether two files of a name hold the same but for what is in texts."""
    if name.endswith(".py"):
        return python_shape(text) == python_shape(usual)
    read: Mapping[str, Callable[[str], object]] = {
        ".toml": tomllib.loads,
        ".json": json.loads,
        ".yaml": yaml.safe_load,
    }
    load = read[Path(name).suffix]
    return load(text) == load(usual)  # no text of a plan stands in these but in comments


def python_shape(text: str) -> str:
    """Return a program without the contents of its texts."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def exports(document: dict[str, Any], name: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield all files of a plan for a framework, all its versions, started in both ways."""
    path = folder / "plan.json"
    path.write_text(json_text(document))
    saved = read_plan(path)
    for version in FRAMEWORKS[name].versions or (None,):
        for slurm in (False, True):
            try:
                handover = export_plan(saved, FRAMEWORKS[name], version, slurm=slurm)
            except PlanError:  # of both plans, or the files would differ
                continue
            assert all(note.isprintable() for note in handover.notes)
            for file, text in handover.files.items():
                yield f"{version} {slurm} {file}", text


def export_pairs(name: str, text: str, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each file of the exports of a hostile plan beside that of a harmless one."""
    for words in PLANS[name]:
        hostile = with_text(DOCUMENTS[words], text, folder)
        hostile["model"].pop("left_out", None)  # a model with one is refused by each of them
        if name in ("torchtitan", "megatron-bridge"):  # which know a model by its name
            hostile["model"]["name"] = DOCUMENTS[words]["model"]["name"]
        pairs = dict(exports(hostile, name, folder))
        usual = dict(exports(DOCUMENTS[words], name, folder))
        assert pairs.keys() == usual.keys()
        assert pairs
        yield from ((file, pairs[file], usual[file]) for file in pairs)


def commands(script: str) -> list[str]:
    """Return the lines of a script that a shell runs."""
    return [line for line in script.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in NEVER])
def test_exports_hold_texts_as_data(name: str, folder: Path) -> None:
    for framework in FRAMEWORKS:
        for file, text, usual in export_pairs(framework, HOSTILE[name], folder):
            if file.endswith((".sh", ".sbatch")):
                assert commands(text) == commands(usual)
                assert directives(text) == directives(usual)
                assert len(text.splitlines()) == len(usual.splitlines())
            else:
                assert same_but_for_texts(file, text, usual), file


# Names that a model may have, of what a shell would obey.
SHELL = ("quotes", "backslash", "substitution", "backticks", "variable", "separators", "comment")
NAMES = wrap(" ".join(text for name, text in HOSTILE.items() if any(map(name.count, SHELL))), 190)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_scripts_run_what_they_would_of_a_harmless_plan(
    framework: str, stubs: Path, folder: Path, tmp_path: Path
) -> None:
    known: dict[str, list[str]] = {}
    for name in NAMES:
        for file, text, usual in export_pairs(framework, name, folder):
            if not file.endswith((".sh", ".sbatch")):
                continue
            for each in (usual, text):
                known[each] = known.get(each) or words_of(each, stubs, tmp_path)
            assert known[text] == known[usual]
    assert all(known.values())
    subprocess.run(["bash", "-n"], input="\n".join(known), text=True, check=True)


@pytest.mark.parametrize("starter", Starter)
def test_values_of_options_reach_a_program_as_they_stand(
    starter: Starter, stubs: Path, tmp_path: Path
) -> None:
    """Bash itself reads them, with Accelerate and Slurm two of them, one behind the other."""
    texts = [text for name, text in HOSTILE.items() if name not in NEVER]
    wanted = ["train.py", "--all", *texts, "--a.b", *texts, *texts]
    options = [*flags({"all": texts}), *tyro_options({"a.b": texts}), *map(single_quoted, texts)]
    launch = Launch(
        name="x",
        remarks=(),
        num_nodes=1,
        per_node=8,
        command=("train.py", *options),
        starter=starter,
    )
    for script in (hand_script(launch), slurm_script(launch)):
        assert words_of(script, stubs, tmp_path)[-len(wanted) :] == wanted


def plan_with(text: str | None, framework: str, folder: Path) -> SavedPlan:
    """Return the first plan of a framework, with a text in every field that takes it."""
    document = DOCUMENTS[PLANS[framework][0]]
    document = document if text is None else with_text(document, text, folder)
    path = folder / "plan.json"
    path.write_text(json_text(document))
    return read_plan(path)


def measured(device: Device) -> Device:
    """Return a device with what calibrate measures: that is all of its kernels but strided ones."""
    return device.model_copy(update={"memory": device.memory.model_copy(update={"strided": None})})


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in NEVER])
def test_launch_folders_and_profile_files_hold_texts_as_data(
    name: str, folder: Path, tmp_path: Path
) -> None:
    saved = plan_with(HOSTILE[name], "megatron-lm", folder)
    usual = plan_with(None, "megatron-lm", folder)
    spec = RunSpec(plans=(Path("plan.json"),), backend="nccl", results=Path("results"))
    for emit in (emit_slurm, emit_torchrun):
        text, wanted = emit(saved, spec), emit(usual, spec)
        assert (commands(text), directives(text)) == (commands(wanted), directives(wanted))
    script = write_launch_folder(saved, spec, tmp_path / "job", launcher=Launcher.SLURM)
    assert sorted(path.name for path in script.parent.iterdir()) == [
        *("plan.json", "run.sbatch", "spec.json"),
    ]
    assert read_plan(script.parent / "plan.json") == saved
    cluster, stack = saved.cluster, saved.stack
    files: list[tuple[Callable[[Path], object], str, object]] = [
        (load_cluster, profile_toml(cluster), cluster),
        (load_stack, profile_toml(stack), stack),
        (load_device, device_toml(measured(cluster.device)), measured(cluster.device)),
        (load_link, link_toml(cluster.intra_node), cluster.intra_node),
    ]
    for load, text, profile in files:
        (tmp_path / "profile.toml").write_text(text, encoding="utf-8")
        assert load(tmp_path / "profile.toml") == profile


def test_dotted_names_of_kernels_are_keys_of_their_own(tmp_path: Path) -> None:
    device = measured(load_cluster("dgx-b200").device)
    kernels = {f"{name}-4.0": kernel for name, kernel in device.flash.items()}
    device = device.model_copy(update={"flash": kernels})
    (tmp_path / "device.toml").write_text(device_toml(device))
    assert load_device(tmp_path / "device.toml") == device
    (tmp_path / "device.toml").write_text(profile_toml(device))
    assert load_device(tmp_path / "device.toml") == device


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", ["triple quotes", "formula", "markup", "TeX", "other letters"])
def test_reports_hold_texts_as_data(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, plan, out = HOSTILE[name], folder / "plan.json", tmp_path / "out"
    saved = plan_with(text, "torchrun", folder)
    trace = ["--trace", str(tmp_path / "trace.json")]
    assert main(["simulate", "--plan", str(plan), "--out", str(out), *trace]) == 0
    said = capsys.readouterr()
    assert all(each.isprintable() or each == "\n" for each in said.out + said.err)
    assert text[:60] in " ".join(said.out.split())
    assert read_plan(out / "plan.json") == saved
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["model"] == text
    assert json.loads((out / "result.json").read_text())["model"]["name"] == text
    with (out / "plans.csv").open(newline="", encoding="utf-8") as stream:
        assert [row["model"] for row in csv.DictReader(stream)] == [text]


def test_a_picture_shows_dollars_as_they_stand() -> None:
    figure = new_figure()
    write_titles(figure.subplots(), HOSTILE["TeX"], HOSTILE["TeX"])
    figure.draw_without_rendering()
    assert not any(each.get_parse_math() for each in figure.axes[0].texts)


@pytest.mark.parametrize("text", ["-rf", "/etc/x", "a b'; touch canary; '", "$(touch canary)"])
def test_folders_of_any_name_reach_a_worker(text: str, stubs: Path, tmp_path: Path) -> None:
    saved = plan_of_options(PLANS["megatron-lm"][0], "dgx-b200")
    spec = RunSpec(plans=(Path("plan.json"),), backend="nccl", results=Path("results"))
    results = f"{tmp_path}{text}" if text.startswith("/") else text
    spec = replace(spec, results=Path(results))
    script = emit_slurm(saved, spec, spec_file=Path(f"{text}.json"))
    words = words_of(script, stubs, tmp_path)
    assert words[-3].removeprefix("./") == f"{text}.json"
    assert words[-1].removeprefix("./") == f"{results}/job-7"
    assert not words[-3].startswith("-")


@pytest.mark.parametrize("name", sorted(NEVER))
def test_no_report_hands_a_terminal_what_it_obeys(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for on_terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda on=on_terminal: on)
        assert print_report(Group(Text(HOSTILE[name]), Text("red", "red")), 80) == 0
        write_text(sys.stdout, HOSTILE[name])
        said = re.sub(r"\x1b\[(31|0)m", "", capsys.readouterr().out)
        assert said.replace("\n", "").isprintable()
