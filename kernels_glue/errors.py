"""The one exception that the pack raises for a user to read."""

from __future__ import annotations


class KitchenSolError(ValueError):
    """A refusal that names the node, what is wrong with which value, and the way out.

    Args:
        node: display name of the node that refuses.
        problem: what is wrong, with the offending value in it; a full sentence.
        remedy: what the user can do about it; a full sentence.
    """

    def __init__(self, node: str, problem: str, remedy: str):
        super().__init__(f"{node}: {problem} {remedy}")
        self.node = node
        self.problem = problem
        self.remedy = remedy
