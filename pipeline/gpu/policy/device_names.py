"""Models of GPUs by words of their names: `A100` is in `NVIDIA A100-SXM4-80GB`, and `A10` is not. Nodes by
their whole names."""

import re

from pipeline.records.remembered import remembered


@remembered(4_096, 200)
def names_model(name: str, models: str) -> bool:
    """Whether the name of a device has one of the models (`A100` or `A100|H100`) as a whole word or words."""
    return any(
        re.search(rf"(?<![A-Za-z0-9]){re.escape(model.strip())}(?![A-Za-z0-9])", name, re.IGNORECASE)
        for model in models.split("|")
        if model.strip()
    )


def names_node(name: str, nodes: str) -> bool:
    """Whether the nodes (`a` or `a|b`; "": all) have this one."""
    return nodes in ("", name) or ("|" in nodes and name in nodes.split("|"))
