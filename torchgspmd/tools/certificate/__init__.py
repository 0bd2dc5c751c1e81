"""A plan's certificate: each value in its programs is one device's value, in a layout."""

from .certificate import Certificate, Uncertified, blamed, certify

__all__ = ["Certificate", "Uncertified", "blamed", "certify"]
