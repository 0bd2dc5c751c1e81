"""torchao's kernels that give each 32 numbers of a row or column a scale (MX): shards have whole
blocks. They are there on machines that have them, so the rules stand under their names.
"""

from __future__ import annotations

from ..custom_ops.scaled_mm import BLOCK
from ..notation import Call, FactorRule
from ..registry import rule_for


@rule_for("torchao::triton_to_mxfp8_dim0")
def _by_row(call: Call) -> FactorRule:
    """Return a rule for x [..., c] -> numbers [..., c], scales [..., c / block]."""
    *lead, columns = call.tensors[0].shape
    block = call.argument(1, "inner_block_size", BLOCK)
    names = [f"d{i}" for i in range(len(lead))]
    row = [*names, ["q", "i"]]
    sizes = {"q": columns // block, "i": block}
    return call.rule([row], [row, [*names, "q"]], sizes, replicated="i")


@rule_for("torchao::triton_to_mxfp8_dim1")
def _by_column(call: Call) -> FactorRule:
    """Return a rule for x [r, c] -> numbers [r, c], scales [c, r / block]."""
    block = call.argument(1, "inner_block_size", BLOCK)
    sizes = {"q": call.tensors[0].shape[0] // block, "i": block}
    both = [["q", "i"], "c"]
    return call.rule([both], [both, ["c", "q"]], sizes, replicated="i")


@rule_for("torchao::mxfp8_quantize")
def _by_both(call: Call) -> FactorRule:
    """Return a rule for x [r, c] -> numbers by row and by column, scales by row and by column.

    Results that are not asked for are empty.
    """
    rows, columns = call.tensors[0].shape
    by_row, by_column = call.argument(1, "rowwise"), call.argument(2, "colwise")
    row, column = (["rq", "ri"] if by_column else ["r"]), (["cq", "ci"] if by_row else ["c"])
    sizes = {"ri": BLOCK, "ci": BLOCK, "rq": rows // BLOCK, "cq": columns // BLOCK}
    whole = {name: size for name, size in sizes.items() if name in (*row, *column)}
    numbers = [row, column]
    return call.rule(
        [numbers],
        [
            numbers if by_row else [""],
            numbers if by_column else [""],
            [row, "cq", ""] if by_row else [""],
            [column, "rq"] if by_column else [""],
        ],
        {**whole, **({} if by_column else {"r": rows}), **({} if by_row else {"c": columns})},
        replicated=[name for name in ("ri", "ci") if name in whole],
    )
