"""The certificate of a plan: each value of its programs is the value of one device, in a layout."""

from .blame import blamed
from .certificate import Certificate, Uncertified, certify

__all__ = ["Certificate", "Uncertified", "blamed", "certify"]
