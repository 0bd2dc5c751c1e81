"""Operations that compute several products at once. The import registers them."""

from . import grouped  # noqa: F401
