"""ShardSpec, a tensor's layout on a mesh. layout/spec.py defines it, and has the notation."""

from .layout.spec import Axes as Axes
from .layout.spec import ShardSpec as ShardSpec
from .layout.spec import SpecLike as SpecLike
