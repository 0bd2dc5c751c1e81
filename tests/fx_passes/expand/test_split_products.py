"""split_products: text before, text after; test_split_fused.py has numbers."""

from expecttest import assert_expected_inline
from fx_passes.graph_parser import annotated

from torchgspmd.fx_passes.expand.split_products import split_products, splits_products
from torchgspmd.fx_passes.ir import Rules
from torchgspmd.fx_passes.printer import graph_text


def split(text: str) -> str:
    """Run the pass, which says before whether it will change the graph."""
    graph, layouts = annotated(text)
    rules = Rules()
    will_change = splits_products(graph, layouts, rules)
    assert (split_products(graph, layouts, rules) is graph) == will_change
    return graph_text(graph, layouts.mesh)


FUSED = """\
mesh m=4
  %x : f32[{rows}, 8]     = input
  %w : f32[8, 16@m]       = input
  %y : f32[{rows}, 16@m]  = einsum(ik,kj->ij, %x, %w)
  %a : f32[{rows}, 8@m]   = slice(%y, 1, 0, 8)
  %b : f32[{rows}, 8@m]   = slice(%y, 1, 8, 16)
  %z : f32[{rows}, 8@m]   = mul(%a, %b)
  return %z"""


def test_the_weight_is_sliced_if_it_is_smaller() -> None:
    assert_expected_inline(
        split(FUSED.format(rows=64)),
        """\
mesh m=4
  %x       : f32[64, 8]   = input
  %w       : f32[8, 16@m] = input
  %slice_1 : f32[8, 8]    = slice(%w, 1, 0, 8)
  %y_1     : f32[64, 8]   = einsum(ik,kj->ij, %x, %slice_1)
  %slice_2 : f32[8, 8]    = slice(%w, 1, 8, 16)
  %y_2     : f32[64, 8]   = einsum(ik,kj->ij, %x, %slice_2)
  %z       : f32[64, 8@m] = mul(%y_1, %y_2)
  return %z""",
    )


def test_the_product_is_sliced_if_it_is_smaller() -> None:
    assert split(FUSED.format(rows=2)).split() == FUSED.format(rows=2).split()


def test_a_dimension_that_is_not_sharded_is_sliced_where_it_is() -> None:
    text = FUSED.format(rows=64).replace("@m", "")
    assert split(text).split() == text.split()


def test_a_gradient_is_concatenated_after_its_products() -> None:
    """Backward of a fused weight: %d is joined from products of the parts, %e is their sum."""
    text = split("""\
mesh m=4
  %dq : f32[64, 8@m]  = input
  %dk : f32[64, 8@m]  = input
  %x  : f32[64, 8]    = input
  %w  : f32[8, 16@m]  = input
  %g  : f32[64, 16@m] = cat([%dq, %dk], 1)
  %d  : f32[8, 16@m]  = einsum(ij,ik->kj, %g, %x)
  %e  : f32[64, 8]    = einsum(ij,kj->ik, %g, %w)
  return %d, %e""")
    assert_expected_inline(
        text,
        """\
mesh m=4
  %dq      : f32[64, 8@m] = input
  %dk      : f32[64, 8@m] = input
  %x       : f32[64, 8]   = input
  %w       : f32[8, 16@m] = input
  %d_1     : f32[8, 8]    = einsum(ij,ik->kj, %dq, %x)
  %d_2     : f32[8, 8]    = einsum(ij,ik->kj, %dk, %x)
  %cat     : f32[8, 16]   = cat([%d_1, %d_2], 1)
  %slice_1 : f32[8, 8]    = slice(%w, 1, 0, 8)
  %e_1     : f32[64, 8]   = einsum(ij,kj->ik, %dq, %slice_1)
  %slice_2 : f32[8, 8]    = slice(%w, 1, 8, 16)
  %e_2     : f32[64, 8]   = einsum(ij,kj->ik, %dk, %slice_2)
  %add     : f32[64, 8]   = add(%e_1, %e_2)
  return %cat, %add""",
    )
