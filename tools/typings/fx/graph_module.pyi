from typing import Any

from torch.nn import Module

from .graph import Graph

class GraphModule(Module):
    graph: Graph
    def __init__(
        self, root: Module | dict[str, Any], graph: Graph, class_name: str = ...
    ) -> None: ...
    @property
    def code(self) -> str: ...
    def recompile(self) -> Any: ...
