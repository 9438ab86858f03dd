"""Plans from the configurations of frameworks: every key is understood, or refused by name."""

from meshwright.planner.importing.plans import JOB_OPTIONS, OPTIONS, Imported, Row, import_source
from meshwright.planner.importing.reading import Reading, read_keys, table_of
from meshwright.planner.importing.scripts import read_source
from meshwright.planner.importing.sources import FORMATS, Source, get_format, meanings

__all__ = [
    "FORMATS",
    "JOB_OPTIONS",
    "OPTIONS",
    "Imported",
    "Reading",
    "Row",
    "Source",
    "get_format",
    "import_source",
    "meanings",
    "read_keys",
    "read_source",
    "table_of",
]
