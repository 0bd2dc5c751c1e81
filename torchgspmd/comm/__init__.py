"""Communication: collectives as graph nodes, their cost, simulation and process groups."""
