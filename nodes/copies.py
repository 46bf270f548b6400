"""Notices a second copy of the pack in custom_nodes, whose nodes would replace these or be replaced."""

from __future__ import annotations

import logging
from pathlib import Path

import folder_paths

_PACK = Path(__file__).resolve().parent.parent
_PROJECT_LINE = 'name = "kitchen-sol"'
_LOGGER = logging.getLogger("ComfyUI-Kitchen-Sol")


def warn_of_other_copies() -> None:
    """Logs one line that names all copies, once a process, whichever copy is loaded first."""
    if getattr(_LOGGER, "copies_reported", False):
        return
    copies = {_PACK, *_installed_copies()}
    if len(copies) > 1:
        # The logger is the only thing that two copies of this module have in common.
        _LOGGER.copies_reported = True
        folders = ", ".join(sorted(map(str, copies)))
        _LOGGER.warning(
            "ComfyUI-Kitchen-Sol is installed %d times, and ComfyUI uses the nodes of whichever loads last;"
            " remove all but one of: %s",
            len(copies),
            folders,
        )


def _installed_copies() -> set[Path]:
    found = set()
    for root in folder_paths.get_folder_paths("custom_nodes"):
        for project in Path(root).glob("*/pyproject.toml"):
            if not project.parent.name.endswith(".disabled") and _is_this_project(project):
                found.add(project.parent.resolve())
    return found


def _is_this_project(project: Path) -> bool:
    try:
        return _PROJECT_LINE in project.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
