"""The parts of `bench offload`: plan, child process, measurement, table."""
