"""The command line of ``tools/dev.py``: reads the options and calls the command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

from demo_options import read_options

from . import comfyui, kitchen, processes, serve, testing
from .console import DevError, say
from .environment import COMFYUI_ARGS, Options, prepare
from .layout import ROOT, TOOLS

_BENCH = "bench_"


def main(argv: Sequence[str], usage: str) -> int:
    """Run a command line. Returns the exit code of the process."""
    own, passed_on = _split(argv)
    options, rest = _read_options(own)
    if not rest or rest[0] in ("-h", "--help", "help"):
        say(usage)
        return 0 if rest else 2
    command = _COMMANDS.get(rest[0])
    try:
        if command is None:
            raise DevError(f"unknown command {rest[0]!r}; there are: {', '.join(_COMMANDS)}")
        return command(options, [*rest[1:], *passed_on])
    except DevError as error:
        say(f"\nerror: {error}")
        return 2
    except OSError as error:
        # A full disk or a missing right, outside of pip. A traceback would hide the file's name.
        say(f"\nerror: {error}")
        return 2
    except KeyboardInterrupt:
        say("\ninterrupted")
        return 130


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide at a lone ``--``; what follows it is never read as an option of this tool."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, []
    position = arguments.index("--")
    return arguments[:position], arguments[position + 1 :]


def _read_options(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    parser = argparse.ArgumentParser(prog="dev.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--no-install", action="store_true")
    parser.add_argument("--comfyui", choices=sorted(comfyui.RELEASES))
    parser.add_argument("--kitchen", metavar="VERSION", type=kitchen.check_version)
    found, rest = parser.parse_known_args(arguments)
    return Options(install=not found.no_install, comfyui=found.comfyui, kitchen=found.kitchen), rest


def _demo(options: Options, arguments: Sequence[str]) -> int:
    read_options(arguments)  # a typo should not cost an installation
    environment = prepare(options)
    command = [*environment.script("demo"), *arguments]
    return processes.call(command, cwd=ROOT, env=environment.variables())


def _test(options: Options, arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="dev.py test", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="only the whole suite on the default versions")
    parser.add_argument("--gpu", action="store_true", help="only tests marked gpu, on this machine's GPU")
    found, pytest_args = parser.parse_known_args(arguments)
    if found.gpu and found.quick:
        raise DevError("--gpu and --quick exclude each other")
    runs = testing.plan(options, found.quick, found.gpu, os.environ.get(COMFYUI_ARGS, "").strip())
    return testing.run_all(options, runs, lint=not found.gpu, pytest_args=pytest_args)


def _serve(options: Options, arguments: Sequence[str]) -> int:
    return serve.serve(prepare(options), arguments)


def _bench(options: Options, arguments: Sequence[str]) -> int:
    names = sorted(path.stem.removeprefix(_BENCH) for path in TOOLS.glob(f"{_BENCH}*.py"))
    if not arguments:
        say("benchmarks: " + (", ".join(names) or "none yet"))
        return 0
    name = arguments[0]
    if name not in names:
        raise DevError(f"no benchmark {name!r}; there are: {', '.join(names) or 'none yet'}")
    environment = prepare(options)
    command = [*environment.script(f"{_BENCH}{name}"), *arguments[1:]]
    return processes.call(command, cwd=ROOT, env=environment.variables())


def _train(options: Options, arguments: Sequence[str]) -> int:
    environment = prepare(options)
    command = [*environment.script("train_demo_model"), *arguments]
    return processes.call(command, cwd=ROOT, env=environment.variables())


_COMMANDS: dict[str, Callable[[Options, Sequence[str]], int]] = {
    "demo": _demo,
    "test": _test,
    "serve": _serve,
    "bench": _bench,
    "train": _train,
}
