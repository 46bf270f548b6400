"""Optional packages: imported when first needed, and never an exception when one is absent or broken."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from ...commands import pip
from ...failures import first_line

TRITON_FLOOR = (3, 6)  # asked for by the paper's package and by Wan2GP's
# Looking for a package that is not there walks the whole search path: too slow for every call.
_absent: set[str] = set()


def load(module: str) -> tuple[ModuleType | None, str]:
    """Imports a module by its full name.

    Returns:
        (module, ""); or (None, ""): not installed; or (None, why): installed, but it cannot be imported.
    """
    if (loaded := sys.modules.get(module)) is not None:
        return loaded, ""
    if module in _absent:
        return None, ""
    try:
        if not _stands_in_parent(module):
            _absent.add(module)
            return None, ""
        return importlib.import_module(module), ""
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            if error.name not in sys.modules:  # None there blocks an import for as long as it stands
                _absent.add(module)
            return None, ""
        return None, f"{module} is installed, but needs the package {error.name}, which is not"
    except (Exception, SystemExit) as error:
        return None, f"{module} is installed, but broken ({first_line(error)})"


def _stands_in_parent(module: str) -> bool:
    """Whether a package has the submodule, without running somebody else's package of that name."""
    top, *parts = module.split(".")
    if top in sys.modules:
        return True  # that package has run already, or its import is blocked
    spec = importlib.util.find_spec(top)
    if spec is None:
        return False
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for part in parts:
        if any((folder / f"{part}.py").is_file() for folder in folders):
            return True
        folders = [folder / part for folder in folders if (folder / part).is_dir()]
    return bool(folders) or not parts


def triton_problem(least: tuple[int, int] = TRITON_FLOOR) -> str:
    """Why the Triton that is here cannot compile Sol kernels, with the way out; empty if it can.

    Args:
        least: the oldest version that can.
    """
    floor = ".".join(map(str, least))
    package = "triton-windows" if sys.platform == "win32" else "triton"
    command = pip(f'install -U "{package}>={floor}"')
    remedy = f"run: {command} and restart ComfyUI"
    triton, problem = load("triton")
    if triton is None:
        return f"{problem or 'Triton is not installed'}; {remedy}"
    version = str(getattr(triton, "__version__", "of unknown version"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < least:
        return f"Triton {version} is too old for the Sol kernels, which need {floor}; {remedy}"
    return ""


def version_of(distribution: str) -> str:
    """The installed version of a distribution, for a message."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
