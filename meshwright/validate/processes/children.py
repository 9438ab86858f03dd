"""Child processes: their module path, and their end with their parent."""

import os
import sys
import threading
import time
from pathlib import Path

WATCH_S = 1.0
ORPHANED_STATUS = 143  # as after SIGTERM
# Run a module of ours; -P: what lies in the current folder is none of ours.
MODULES = (sys.executable, "-P", "-m")
# In the environment of such a process: who started it. By the time it looks, that may have ended.
STARTER_VARIABLE = "MESHWRIGHT_STARTER"


def module_path() -> str:
    """Return PYTHONPATH for a process that is to find modules where this one finds them."""
    return os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)


def starter() -> int:
    """Return the id of the parent process, from its own variable where that is set."""
    return int(os.environ.get(STARTER_VARIABLE) or os.getppid())


def end_without(parent: int) -> None:
    """End this process within two seconds of *parent*, the process that started it.

    A thread sees to it, since the main thread may wait in a call of a C++ library.
    """

    def watch() -> None:
        # An orphan gets another parent.
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os._exit(ORPHANED_STATUS)

    threading.Thread(target=watch, daemon=True, name="watch for end").start()
