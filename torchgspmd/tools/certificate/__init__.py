"""A plan's certificate: each value in its programs is one device's value, in a layout."""

from .blame import blamed
from .certificate import Certificate, Uncertified, certify

__all__ = ["Certificate", "Uncertified", "blamed", "certify"]
