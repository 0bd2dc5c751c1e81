"""Operations that compute several products at once. The import registers them."""

from . import attention  # noqa: F401
