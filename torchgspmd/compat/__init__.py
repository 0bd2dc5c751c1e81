"""What torchgspmd takes from torch beyond its public interface: operators by name, private APIs,
and the versions they were checked on.
"""
