"""A user's files: copies, the examples of the cluster page, and names."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.hwprofiles import (
    Cluster,
    CollectiveFact,
    CollectiveOp,
    Link,
    Profile,
    ProfileError,
    Source,
    framework_schema,
    list_clusters,
    list_devices,
    list_frameworks,
    list_links,
    list_stacks,
    load_cluster,
    load_device,
    load_link,
    load_stack,
    loader,
    nearest_names,
    stacks,
)
from meshwright.hwprofiles.units import FROM_FILE
from meshwright.planner.export import flavors, recipes
from meshwright.records import Record
from meshwright.simulator import list_models
from meshwright.simulator.model import catalogue

Load = Callable[[str | Path], Profile]
LOADERS: dict[str, Load] = {
    "devices/a100-sxm4-80gb": load_device,
    "links/nvlink3-nvswitch": load_link,
    "clusters/dgx-a100": load_cluster,
    "stacks/megatron-core@0.12": load_stack,
}
DOCS = Path(__file__).parents[2] / "docs" / "clusters.md"


def built_in_text(name: str) -> str:
    """Return a built-in file; of a framework's stacks what a user's file would have."""
    file = files("meshwright.hwprofiles") / "data" / f"{name.partition('@')[0]}.toml"
    text, _, _ = file.read_text(encoding="utf-8").partition("\n# Other releases")
    return re.sub(
        r"^(release|alike) = .*\n", "", text.partition("\n# Names that")[0], flags=re.MULTILINE
    )


@pytest.mark.parametrize("name", sorted(LOADERS))
def test_a_copied_built_in_file_equals_the_built_in(name: str, tmp_path: Path) -> None:
    path = tmp_path / "copy.toml"
    built_in_name = name.rpartition("/")[2]
    text = built_in_text(name).replace('"megatron-core"', f'"{built_in_name}"', 1)
    path.write_text(text, encoding="utf-8")
    given, built_in = LOADERS[name](path), LOADERS[name](built_in_name)
    assert given == built_in.model_copy(update={"alike": ()} if "@" in name else {})


def test_a_path_in_a_cluster_is_relative_to_its_file(tmp_path: Path) -> None:
    link = built_in_text("links/nvlink3-nvswitch")
    (tmp_path / "wires.toml").write_text(link, encoding="utf-8")
    text = built_in_text("clusters/dgx-a100").replace('"nvlink3-nvswitch"', '"wires.toml"')
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    assert load_cluster(tmp_path / "mine.toml") == load_cluster("dgx-a100")


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(ProfileError, match="unknown cluster 'dgx-a10'; nearest: dgx-a100, "):
        load_cluster("dgx-a10")
    with pytest.raises(ProfileError, match="unknown stack 'megatron'; nearest: megatron-lm, "):
        load_stack("megatron")
    with pytest.raises(ProfileError, match="unknown device ''; known: a100-pcie-80gb, "):
        load_device("")
    with pytest.raises(ProfileError, match=r"unknown link 'IB'; .*; or a path ending in \.toml"):
        load_link("IB")


@given(name=st.text(max_size=30), known=st.lists(st.text(max_size=30), max_size=5))
def test_nearest_names_are_known_names(name: str, known: list[str]) -> None:
    nearest = nearest_names(name, known)
    assert set(nearest) <= set(known)
    assert len(nearest) <= 3


def written_examples(folder: Path) -> Path:
    for block in re.findall(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL):
        (folder / block.splitlines()[0].removeprefix("# ")).write_text(block, encoding="utf-8")
    return folder / "my-cluster.toml"


def test_the_example_of_the_cluster_page_loads(tmp_path: Path) -> None:
    cluster = load_cluster(written_examples(tmp_path))
    assert cluster.device is load_device("a100-sxm4-80gb")
    assert cluster.inter_node.bandwidth_bytes_per_s == 25e9
    assert (cluster.nics_per_node, cluster.num_nodes, cluster.oversubscription) == (2, 16, 2.0)
    assert cluster.price_usd_per_gpu_hour == 1.8


def test_the_cluster_page_names_every_key() -> None:
    page = DOCS.read_text(encoding="utf-8")
    for model in (Cluster, Link, CollectiveFact, type(load_device("a100-sxm4-80gb"))):
        for key in model.file_keys():
            assert f"`{key}`" in page or f"[{key}]" in page or f"[{key}.NAME]" in page, key


def test_records_can_be_made_in_python_with_base_units() -> None:
    fact = CollectiveFact(
        op=CollectiveOp.ALL_REDUCE,
        num_ranks=8,
        busbw_bytes_per_s=231e9,
        latency_s=24e-6,
        kind=Source.MEASURED,
        source="test",
    )
    assert fact.busbw_bytes_per_s == 231e9
    with pytest.raises(ValidationError):
        CollectiveFact.model_validate({**fact.model_dump(), "num_ranks": 1})
    with pytest.raises(AttributeError, match="cannot assign"):
        fact.latency_s = 1.0  # type: ignore[misc]


def test_each_built_in_file_is_read_as_it_would_be_if_it_were_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values have equal types, too: a number of a file may be 1 where a field is 1.0."""
    unchecked = Record.trusted.__func__
    read: Counter[str] = Counter()

    def both(kind: type[Record], data: Mapping[str, object]) -> Record:
        record = unchecked(kind, data)
        checked = kind.model_validate(data, context=FROM_FILE)
        assert record == checked
        assert str(vars(record)) == str(vars(checked))
        read[kind.__name__] += 1
        return record

    monkeypatch.setattr(Record, "trusted", classmethod(both))
    for name in list_devices():
        loader._built_in_device.__wrapped__(name)
    for name in list_links():
        loader._built_in_link.__wrapped__(name)
    for name in list_clusters():
        loader._built_in_cluster.__wrapped__(name)
    for name in list_stacks():
        stacks._built_in_stack.__wrapped__(name)
    for name in list_frameworks():
        framework_schema._built_in.__wrapped__(name)
    for path in catalogue._data_files():
        catalogue._models_of.__wrapped__(path)
    stacks.common_refusals.__wrapped__()
    flavors.load_flavors.__wrapped__()
    for path in recipes.FOLDER.glob("*.toml"):
        recipes.load_recipes.__wrapped__(path.stem)
    assert len(read) > 20
    assert read["StackProfile"] == len(list_stacks())
    assert read["ModelSpec"] + read["ImageModel"] + read["ChainModel"] == len(list_models())
