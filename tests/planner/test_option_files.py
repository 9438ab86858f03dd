"""Files of options beside the tables that read them: what a file calls read, a table reads."""

import pytest

from meshwright.hwprofiles import FrameworkProfile, load_framework
from meshwright.hwprofiles.framework_schema import list_frameworks
from meshwright.planner.configuration import Effect, Takes, list_options, load_options

WITH_OPTIONS = [
    name
    for name in list_frameworks()
    if all(table.options for table in load_framework(name).tables.values())
]


def keys_of_tables(profile: FrameworkProfile) -> set[str]:
    """Return the keys on which a plan depends: not those that are only written beside."""
    found: set[str] = set()
    for table in profile.tables.values():
        found |= {*table.held, *table.told_by}
        for entry in table.fields.values():
            found |= {*entry.all_keys} - {*entry.beside}
    return found


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_tables_read_the_keys_that_files_of_options_call_read(name: str) -> None:
    profile = load_framework(name)
    files = {each for table in profile.tables.values() for each in table.options}
    rows = [option for each in files for option in load_options(each).values()]
    read = {option.key for option in rows if option.effect is Effect.READ}
    keys = keys_of_tables(profile)
    assert (keys - read, read - keys) == (set(), set())


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_a_framework_is_known_by_keys_that_it_has(name: str) -> None:
    profile = load_framework(name)
    files = {each for table in profile.tables.values() for each in table.options}
    starts = {
        key[:end]
        for each in files
        for key in load_options(each)
        for end in (len(key), *(place for place, letter in enumerate(key) if letter == "."))
    }
    assert {*profile.known_by} <= starts


@pytest.mark.parametrize("name", list_options())
def test_what_files_of_options_allow_is_of_held_ones_and_old_names_have_new_ones(name: str) -> None:
    known = {key: each for file in list_options() for key, each in load_options(file).items()}
    options = load_options(name).values()
    assert options
    for option in options:
        if option.effect is Effect.RENAMED:
            (new,) = option.allowed
            assert known[new].effect is not Effect.RENAMED, option
        elif option.effect is not Effect.HELD or option.takes is Takes.NOTHING:
            assert not option.allowed, option
