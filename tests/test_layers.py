"""The rules of the house that no type checker sees: who imports whom, and what lives where."""

import ast
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("hwprofiles", "simulator", "planner", "validate")  # each may import those before it
FRONT_DOOR = "meshwright"
BELOW_ALL = (".errors", f"{FRONT_DOOR}.faces", f"{FRONT_DOOR}.records")  # every folder may import
MOST_MODULES_OF_A_FOLDER = 12
# The floors of the house, lowest first: which folders of its own package a folder may import.
# It may import any folder of a lower package; each through its face, the folder's `__init__`.
ALLOWED: dict[str, str] = {
    "hwprofiles": "",
    "simulator.model.huggingface": "",
    "simulator.model": "model.huggingface",
    "simulator.schedules": "",
    "simulator.layout.splits": "",
    "simulator.layout": "layout.splits model schedules",
    "simulator.launching": "layout model",
    "simulator.graph": "layout",
    "simulator.blocks.listed": "graph layout model",
    "simulator.blocks.parts": "graph layout model",
    "simulator.blocks": "blocks.listed blocks.parts graph layout model",
    "simulator.costs": "blocks layout model",
    "simulator.engine": "layout schedules",
    "simulator.memory": "blocks graph layout model schedules",
    "simulator.replication": "blocks costs engine layout memory model schedules",
    "simulator.ledger": "blocks costs layout memory model replication schedules",
    "simulator.units": "blocks graph layout memory model replication",
    "simulator.step": (
        "blocks costs engine graph layout ledger memory model replication schedules units"
    ),
    "simulator.account": "blocks costs engine layout ledger memory model replication "
    "schedules step",
    "simulator.strategies": "account blocks costs engine layout memory model replication step",
    "simulator": ("account blocks costs engine layout memory model schedules step strategies"),
    "simulator.matmul": "blocks costs layout",
    "planner.space": "",
    "planner.footprint": "space",
    "planner.bounds": "footprint space",
    "planner.changes": "bounds footprint space",
    "planner.search": "bounds changes footprint space",
    "planner.largest": "footprint search space",
    "planner": "changes largest search space",
    "planner.configuration": "",
    "planner.shell": "configuration",
    "planner.options": "",
    "planner.plots": "search",
    "planner.reports": "changes largest options plots search space",
    "planner.matmul": "options plots reports",
    "planner.compare": "plots reports",
    "planner.presentation": "compare plots reports search",
    "planner.explain": "changes compare reports search",
    "planner.tables": "configuration",
    "planner.export": "configuration reports tables",
    "planner.formats": "configuration export tables",
    "planner.importing": "configuration export formats options shell tables",
    "planner.cli": "changes compare configuration explain export importing largest matmul options "
    "reports search space tables",
    "planner.sweep": "cli options plots presentation reports search space",
    "validate.calibration.rows": "",
    "validate.processes": "",
    "validate.device": "",
    "validate.calibration.measure": "calibration.rows device",
    "validate.calibration.collectives": "calibration.measure calibration.rows processes",
    "validate.calibration.fit": "calibration.rows",
    "validate.traces": "",
    "validate.calibration": (
        "calibration.collectives calibration.fit calibration.measure calibration.rows traces"
    ),
    "validate.ranks": "",
    "validate.launch": "processes ranks",
    "validate.comparison": "launch ranks",
    "validate.counting": "ranks",
    "validate.programs.contract": "ranks",
    "validate.programs.fused": "device",
    "validate.programs.context": "programs.fused",
    "validate.programs.layers": "programs.fused",
    "validate.programs.experts": "programs.context programs.contract programs.fused",
    "validate.programs.megatron": (
        "programs.context programs.contract programs.experts programs.fused programs.layers ranks"
    ),
    "validate.programs.pytorch": (
        "programs.context programs.contract programs.experts programs.fused programs.layers ranks"
    ),
    "validate.programs.strategies": (
        "programs.contract programs.fused programs.layers programs.megatron programs.pytorch ranks"
    ),
    "validate.programs": (
        "programs.contract programs.experts programs.megatron programs.pytorch programs.strategies"
    ),
    "validate.runs": (
        "counting device launch programs programs.contract "
        "programs.pytorch programs.strategies ranks traces"
    ),
    "validate.probe": (
        "comparison counting device programs programs.contract "
        "programs.layers programs.pytorch ranks runs"
    ),
    "validate.scripts.gpu": "counting",
    "validate.scripts": "counting ranks scripts.gpu",
    "validate.cli": "comparison launch probe programs ranks runs scripts",
    "validate.published": "",
    "validate": "calibration cli comparison launch published ranks runs",
    "validate.calibration.steps": "launch programs programs.contract ranks",
}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
BINARY_OR_DECIMAL_GIANTS = {10**9, 10**12, 2**30, 2**40}
Value = int | float


HOUSE = ROOT / FRONT_DOOR
SOURCES = sorted(HOUSE.rglob("*.py"))


def layer_of(path: Path) -> str:
    """Return the package a file is in, or the front door's name for what lies beside them."""
    first = path.relative_to(HOUSE).parts[0]
    return first if first in LAYERS else FRONT_DOOR


PACKAGES = [path.parent for path in SOURCES if path.name == "__init__.py"]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def of_each(paths: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Return a decorator that makes one test of a rule for a file: it names all that break it."""

    def decorate(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for path in paths:
                try:
                    rule(path)
                except AssertionError as error:
                    broken.append(f"{shown(path)}: {error}")
            assert broken == []

        test.__name__ = rule.__name__
        return test

    return decorate


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Return the full name of each module that a file imports, wherever the import stands."""
    modules = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(path)}:{node.lineno} is a relative import"
            assert node.module is not None
            modules.add(node.module)
    return frozenset(modules)


def imported_packages(path: Path) -> set[str]:
    """Return the packages that a file imports: other distributions, or those of the house."""
    modules = imported_modules(path)
    return {module.removeprefix(f"{FRONT_DOOR}.").partition(".")[0] for module in modules}


def test_all_four_packages_are_looked_at() -> None:
    assert {layer_of(path) for path in SOURCES} == {*LAYERS, FRONT_DOOR}
    assert set(LAYERS) == {path.name for path in PACKAGES if path.parent == HOUSE}
    assert [path.relative_to(HOUSE) for path in HOUSE.rglob("py.typed")] == [Path("py.typed")]


@pytest.mark.parametrize("layer", LAYERS)
def test_the_links_at_the_top_lead_into_the_one_package(layer: str) -> None:
    assert (ROOT / layer).is_symlink()
    assert (ROOT / layer).resolve() == HOUSE / layer


@of_each([*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))])
def test_nothing_is_imported_by_the_short_name_of_a_package(path: Path) -> None:
    firsts = {module.partition(".")[0] for module in imported_modules(path)}
    assert firsts & set(LAYERS) == set()


def folder_of(module: str) -> str:
    """Return the folder a module is in, as `ALLOWED` names it; a package is a folder."""
    path = ROOT.joinpath(*module.split("."))
    folder = module if path.is_dir() else module.rpartition(".")[0]
    return folder.removeprefix(f"{FRONT_DOOR}.")


@cache
def house_imports(path: Path) -> frozenset[tuple[str, str]]:
    """Return each module of the house that a file imports from, with the name it takes."""
    imports = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{FRONT_DOOR}."):
            for alias in node.names:
                module, inner = str(node.module), f"{node.module}.{alias.name}"
                face = ROOT.joinpath(*module.split("."), "__init__.py")
                is_module = ROOT.joinpath(*inner.split(".")).with_suffix(".py").exists()
                is_shown = face.exists() and alias.name in (exported_names(face) or [])
                imports.add((inner if is_module and not is_shown else module, alias.name))
    return frozenset(imports)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def taken_from_front_door(path: Path) -> set[str]:
    """Return the names that a file takes from the front door, which imports nothing itself."""
    return {
        alias.name
        for node in nodes_of(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if FRONT_DOOR in (alias.name, getattr(node, "module", None))
    }


def may_import(folder: str, other: str) -> bool:
    layer, other_layer = folder.partition(".")[0], other.partition(".")[0]
    if layer == other_layer:
        return other.removeprefix(f"{layer}.") in ALLOWED[folder].split()
    return LAYERS.index(other_layer) < LAYERS.index(layer)


@of_each(SOURCES)
def test_imports_point_down_only(path: Path) -> None:
    if layer_of(path) == FRONT_DOOR:
        return
    folder = folder_of(module_of(path))
    others = {module for module, _ in house_imports(path) if not module.endswith(BELOW_ALL)}
    elsewhere = {folder_of(other) for other in others} - {folder}
    assert {other for other in elsewhere if not may_import(folder, other)} == set()
    assert taken_from_front_door(path) <= {"__version__"}


@of_each(SOURCES)
def test_other_folders_are_entered_by_their_faces(path: Path) -> None:
    if layer_of(path) == FRONT_DOOR:
        return
    folder = folder_of(module_of(path))
    past_faces = {
        module
        for module, _ in house_imports(path)
        if folder_of(module) not in {folder, module.removeprefix(f"{FRONT_DOOR}.")}
        and not module.endswith(BELOW_ALL)
    }
    assert past_faces == set()


def test_the_floors_have_no_stairs_up() -> None:
    assert set(ALLOWED) == {folder_of(module_of(path)) for path in SOURCES} - {FRONT_DOOR}
    below: set[str] = set()
    for folder, others in ALLOWED.items():
        layer = folder.partition(".")[0]
        assert {f"{layer}.{other}" for other in others.split()} <= below, folder
        below.add(folder)


@of_each(PACKAGES)
def test_a_folder_holds_few_modules(folder: Path) -> None:
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES_OF_A_FOLDER


@of_each(SOURCES)
def test_only_the_engine_knows_simpy(path: Path) -> None:
    in_engine = path.is_relative_to(HOUSE / "simulator" / "engine")
    assert in_engine or "simpy" not in imported_packages(path)


@of_each(SOURCES)
def test_in_the_simulator_only_graph_and_memory_know_numpy(path: Path) -> None:
    folders = [HOUSE / "simulator" / name for name in ("graph", "memory")]
    knows = layer_of(path) != "simulator" or any(map(path.is_relative_to, folders))
    assert knows or "numpy" not in imported_packages(path)


@of_each(SOURCES)
def test_only_validate_knows_torch(path: Path) -> None:
    assert layer_of(path) == "validate" or "torch" not in imported_packages(path)


@of_each(SOURCES)
def test_modules_are_named_for_what_they_hold(path: Path) -> None:
    name = path.stem if path.name != "__init__.py" else path.parent.name
    assert name not in VAGUE_NAMES
    if name != "__main__":
        assert name not in sys.stdlib_module_names


@cache
def exported_names(path: Path) -> list[str] | None:
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            assert isinstance(names, list)
            return names
    return None


def top_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those for type checkers alone included."""
    for node in tree.body:
        yield from node.body if isinstance(node, ast.If) else [node]


def names_taken(node: ast.stmt) -> set[str]:
    """Return the names that a statement imports from the house."""
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(FRONT_DOOR):
        return set()
    return {each.asname or each.name for each in node.names}


def export_order(name: str) -> tuple[int, str]:
    """Return the order of a list of exports: constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@of_each(PACKAGES)
def test_exports_are_sorted_complete_and_importable(folder: Path) -> None:
    path = folder / "__init__.py"
    names = exported_names(path)
    bound = {name for node in top_statements(tree_of(path)) for name in names_taken(node)}
    if names is None:
        assert bound == set(), "what a package imports for others stands in its __all__"
        return
    assert names == sorted(set(names), key=export_order)
    if layer_of(path) == "validate":
        pytest.importorskip("torch")
    module = importlib.import_module(".".join(folder.relative_to(ROOT).parts))
    assert [name for name in names if not hasattr(module, name)] == []
    local = {name for name in names if name not in bound}
    own = {
        node.name for node in tree_of(path).body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    constants = {name for name in local if name.isupper()}
    assert local <= own | constants
    private = {name for name in bound if name.startswith("_")}
    assert private == set()
    at_once = {name for node in tree_of(path).body for name in names_taken(node)}
    late = bound - at_once
    assert late.isdisjoint(each.stem for each in folder.iterdir()), "the module would be found"


@of_each(SOURCES)
def test_nothing_is_imported_with_a_wildcard(path: Path) -> None:
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            assert [alias.name for alias in node.names] != ["*"]


def docstrings(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes of constants that document something; they may show an example."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, holders) and node.body and isinstance(node.body[0], ast.Expr)
    }


def words_of_code(path: Path) -> Iterator[str]:
    """Yield every identifier and every text of a file, but not its documentation."""
    tree = tree_of(path)
    documentation = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in documentation:
                yield node.value
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


@cache
def device_names() -> list[str]:
    folder = HOUSE / "hwprofiles" / "data" / "devices"
    return sorted(path.stem.lower() for path in folder.glob("*.toml"))


def test_there_are_devices_to_look_for() -> None:
    assert "a100-sxm4-80gb" in device_names()


@of_each(SOURCES)
def test_no_code_names_a_device(path: Path) -> None:
    names = device_names()
    families = {name.partition("-")[0] for name in names} - {"localhost", "cpu", "gpu"}
    for word in words_of_code(path):
        text = word.lower()
        found = [name for name in names if name in text and name not in {"cpu", "gpu"}]
        found += [name for name in families if text == name]
        assert found == [], word


def constant_value(node: ast.AST) -> Value | None:
    """Return the number that a constant expression of the form a, a ** b or a << b stands for."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift):
        left, right = constant_value(node.left), constant_value(node.right)
        if left is None or right is None or right > 100:
            return None
        return left**right if isinstance(node.op, ast.Pow) else int(left) << int(right)
    return None


def unit_conversions(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield giants that convert units: as floats, as powers of two, in products and quotients.

    A whole power of ten that stands alone is a limit or a count.
    """
    for node in ast.walk(tree):
        value = constant_value(node)
        if value in BINARY_OR_DECIMAL_GIANTS and (isinstance(value, float) or value % 10):
            yield node
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv):
            sides = {constant_value(node.left), constant_value(node.right)}
            if sides & BINARY_OR_DECIMAL_GIANTS:
                yield node


@of_each(SOURCES)
def test_only_units_knows_what_a_giga_is(path: Path) -> None:
    found = [f"{node.lineno}: {ast.unparse(node)}" for node in unit_conversions(tree_of(path))]
    if shown(path) == "meshwright/hwprofiles/units.py":
        assert found != []
    else:
        assert found == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("x = y * 1e9", True),
        ("x = 2**30", True),
        ("x = y / 10**12", True),
        ("x = y >> 3; z = 1 << 30", True),
        ("x = 1024**3", True),
        ("LIMIT = 10**9", False),
        ("x = y / 1e6", False),
    ],
)
def test_the_search_for_conversions_finds_them(code: str, *, found: bool) -> None:
    assert any(unit_conversions(ast.parse(code))) == found


@of_each(SOURCES)
def test_code_is_plain_ascii(path: Path) -> None:
    assert path.read_text(encoding="utf-8").isascii()
