"""Operations that compute several products at once. The import registers them."""

from . import attention, flex_attention, grouped  # noqa: F401
