"""Published decoders by name, for `torchgspmd suggest --model`."""

from .config import config as config
from .decoder import NamedDecoder as NamedDecoder
