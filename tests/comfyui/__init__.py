"""Harness that runs the tests against real ComfyUI, in process and as a server."""
