"""The interface to torch beyond its public one: operators, private APIs, checked versions."""
