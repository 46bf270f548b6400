"""Folders that are either complete or absent, and the stamps that say what is in them."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .layout import DEV

_TEMPORARY = "tmp-"
_ABANDONED_AFTER_S = 24 * 3600.0
_STAMP = ".stamp"


def fingerprint(*parts: str) -> str:
    """A short hash that changes when any of the parts does."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def python_tag() -> str:
    """The Python that compiled packages are made for, for example ``cpython-3.11``."""
    return f"{sys.implementation.name}-{sys.version_info.major}.{sys.version_info.minor}"


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def remove(path: Path) -> None:
    """Delete a file or a folder, read-only entries included (they stop ``rmtree`` on Windows)."""

    def retry(function: Callable[[str], object], name: str, _error: object) -> None:
        os.chmod(name, stat.S_IWRITE | stat.S_IREAD)
        function(name)

    if path.is_dir() and not path.is_symlink():
        # ``onerror`` is deprecated from 3.12 on, but 3.10 has nothing else.
        shutil.rmtree(path, onerror=retry)
    else:
        path.unlink(missing_ok=True)


def read_stamp(folder: Path) -> str | None:
    try:
        return (folder / _STAMP).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def write_stamp(folder: Path, stamp: str) -> None:
    temporary = folder / f"{_STAMP}.new"
    temporary.write_text(stamp + "\n", encoding="utf-8")
    temporary.replace(folder / _STAMP)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder under ``.dev`` (so that a rename out of it stays on one disk), deleted at the end."""
    DEV.mkdir(parents=True, exist_ok=True)
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=DEV))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Delete what a killed run left behind; a young one may belong to a run that is going on."""
    for folder in DEV.glob(f"{_TEMPORARY}*"):
        if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER_S:
            shutil.rmtree(folder, ignore_errors=True)


def publish(built: Path, target: Path, stamp: str) -> None:
    """Move a finished folder to its place, replacing an older one.

    The stamp is written before the rename, so whatever stands at ``target`` with a stamp is complete.
    """
    write_stamp(built, stamp)
    if target.exists():
        remove(target)
    built.rename(target)


def require_writable(path: Path) -> None:
    """Makes the folder of a file that will be written. Raises OSError if it cannot be written."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    probe = path.with_name(path.name + ".part")
    probe.touch()
    probe.unlink()
