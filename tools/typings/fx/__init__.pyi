"""torch.fx as far as torchgspmd uses it, for pyright alone: an operand of a node is Any.

Torch annotates an operand as a union of 19 types, of which an operator's schema allows one: its
schema says which, and verify_graph compares the values.
"""

from . import node as node
from .graph import CodeGen as CodeGen
from .graph import Graph as Graph
from .graph_module import GraphModule as GraphModule
from .interpreter import Interpreter as Interpreter
from .node import Node as Node
from .node import map_arg as map_arg
from .proxy import Proxy as Proxy
