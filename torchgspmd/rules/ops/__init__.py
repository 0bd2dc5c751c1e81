"""The rules, one file for each family of operations. The import registers them."""

from . import (  # noqa: F401
    as_strided,
    bags,
    contraction,
    cumulative,
    fourier,
    index_put,
    linalg,
    lookup,
    pointwise,
    random_ops,
    reduction,
    slicing,
    sort,
    uneven_reshape,
    view,
)
