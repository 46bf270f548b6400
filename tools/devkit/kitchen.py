"""Other releases of comfy-kitchen beside the one in the environment: ``.dev/kitchen-<version>``.

A folder that stands first on PYTHONPATH takes the place of the installed release, so one environment serves
every version.
"""

from __future__ import annotations

import re
from pathlib import Path

from . import files, pip
from .console import DevError, say
from .layout import DEV

_PACKAGE = "comfy-kitchen"


def check_version(text: str) -> str:
    """Return ``text`` if it can be a version; it becomes part of a folder's name. Raises ValueError."""
    if not re.fullmatch(r"[0-9][0-9A-Za-z.+]*", text):
        raise ValueError(text)
    return text


def ensure(python: Path, version: str, install: bool = True) -> Path:
    """Return the folder that holds ``version``, installing it with the pip of ``python`` if it is missing."""
    folder = DEV / f"kitchen-{version}"
    # Compiled for one Python, so the stamp names it.
    stamp = files.python_tag()
    if files.read_stamp(folder) == stamp:
        return folder
    if not install:
        raise DevError(f"{folder} does not exist, and --no-install downloads nothing")
    say(f"installing {_PACKAGE} {version} beside the environment")
    with files.temporary_folder() as temporary:
        built = temporary / "kitchen"
        arguments = ["install", "--no-deps", "--target", str(built), f"{_PACKAGE}=={version}"]
        pip.run(python, arguments, f"pip-kitchen-{version}")
        files.publish(built, folder, stamp)
    return folder
