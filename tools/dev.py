#!/usr/bin/env python3
"""One entry to everything a developer runs: demo, test, serve, bench and train.

    python tools/dev.py demo
    python tools/dev.py test [--quick] [--gpu] [pytest arguments...]
    python tools/dev.py serve [ComfyUI arguments...]
    python tools/dev.py bench [name] [arguments...]
    python tools/dev.py train --out FILE [arguments...]

Options that every command takes, before or after its name (what follows a lone ``--`` is passed on as is):

    --no-install        use the running interpreter and the checkout in COMFYUI_PATH; download nothing
    --comfyui VERSION   0.30 (default) or 0.27
    --kitchen VERSION   this release of comfy-kitchen instead of the one that ComfyUI pins

The first run makes .dev/venv and downloads ComfyUI into .dev; later runs find everything in place.
COMFYUI_PATH names a ComfyUI checkout to use instead of the download.

This file must parse on any Python 3 so that an old one gets a sentence instead of a traceback; the work is
done in the package ``devkit`` beside it, with the standard library alone.
"""

import sys

MINIMUM_PYTHON = (3, 10)


def main(argv):
    if sys.version_info < MINIMUM_PYTHON:
        found = ".".join(str(part) for part in sys.version_info[:3])
        sys.stderr.write("error: Python 3.10 or newer is needed, this is %s (%s)\n" % (found, sys.executable))
        return 2
    from devkit import cli

    return cli.main(argv, usage=__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
