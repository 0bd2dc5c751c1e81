"""The interface to torch beyond its public one: operators by name, private APIs, checked versions."""
