"""Published decoders by name, for `torchgspmd suggest --model`."""

from .config import config as config
from .decoder import NamedDecoder as NamedDecoder
from .run_layouts import RunDecoder as RunDecoder
from .runs import DecoderRun as DecoderRun
