"""Files of options beside the tables that read them: what a file calls read, a table reads."""

import pytest

from meshwright.hwprofiles import FrameworkTable, load_framework
from meshwright.hwprofiles.framework_schema import list_frameworks
from meshwright.planner.configuration import Effect, Option, Takes, list_options, load_options

# Options of Megatron Bridge's programs become overrides before a table reads them.
WITH_OPTIONS = [
    name
    for name in list_frameworks()
    if name != "megatron-bridge"
    and all(table.options for table in load_framework(name).tables.values())
]

# What frameworks have of a table that they share with others, and their files of options lack.
VARIABLES = {"PYTORCH_CUDA_ALLOC_CONF"}  # of the environment of any program
SHARED = {
    "nemo": {
        "model.moe_flex_dispatcher_backend",
        "model.mtp_num_layers",
        "model.pipeline_model_parallel_layout",
    },
}


def rows_of(table: FrameworkTable) -> dict[str, Option]:
    """Return the rows of the files of a table's options, by key."""
    return {key: each for file in table.options for key, each in load_options(file).items()}


def keys_of(table: FrameworkTable) -> tuple[set[str], set[str]]:
    """Return the keys that a table's entries read, and those that it looks at beside.

    Entries read none that are only written, and other frameworks' sections are those' matter.
    """
    starts = tuple(f"{each}." for each in table.sections)
    read = {
        key
        for entry in table.fields.values()
        for key in {*entry.all_keys} - {*entry.beside}
        if not key.startswith(starts)
    }
    parents = {key[:place] for key in read for place in dots(key)}
    return read, parents | {*table.held, *table.told_by, *table.sections}


def dots(key: str) -> list[int]:
    """Return where the sections of a key end."""
    return [place for place, letter in enumerate(key) if letter == "."]


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_tables_read_the_keys_that_files_of_options_call_read(name: str) -> None:
    tables = load_framework(name).tables.values()
    unread = {
        file: {key for key, row in load_options(file).items() if row.effect is Effect.READ}
        for table in tables
        for file in table.options
    }
    for table in tables:
        rows, (read, beside) = rows_of(table), keys_of(table)
        strays = {key for key in read if key not in rows or rows[key].effect is not Effect.READ}
        assert strays <= SHARED.get(name, set()) | VARIABLES
        for file in table.options:
            unread[file] -= read | beside
    assert set().union(*unread.values()) == set()


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_a_framework_is_known_by_keys_that_it_has(name: str) -> None:
    profile = load_framework(name)
    rows = {key for table in profile.tables.values() for key in rows_of(table)}
    starts = {key[:place] for key in rows for place in dots(key)}
    assert {each.replace("_", "-") for each in profile.known_by} <= {
        each.replace("_", "-") for each in rows | starts
    }


@pytest.mark.parametrize("name", list_options())
def test_what_files_of_options_allow_is_of_held_ones_and_old_names_have_new_ones(name: str) -> None:
    everywhere = {key for file in list_options() for key in load_options(file)}
    options = load_options(name)
    assert options
    for option in options.values():
        if option.effect is Effect.RENAMED:
            (new,) = option.allowed
            assert new in everywhere, option
            assert new not in options or options[new].effect is not Effect.RENAMED, option
        elif option.effect is not Effect.HELD or option.takes is Takes.NOTHING:
            assert not option.allowed, option
