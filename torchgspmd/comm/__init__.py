"""Communication: collectives as graph nodes, their cost, simulation and process groups."""

from .kinds import ring_einsum as ring_einsum
