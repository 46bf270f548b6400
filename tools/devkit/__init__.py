"""What ``tools/dev.py`` is made of: environment, downloads, test runs. Standard library only."""
