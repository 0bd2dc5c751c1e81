"""Operations that keep all dimensions: linear, matmul, einsum and attention become these.

    linear(x, w)        einsum("bsk,nk->bsn", x, w)

PyTorch flattens [batch, sequence, width] to two dimensions before it multiplies, and merges
[batch, heads] in attention. Both would lose a layout of a merged dimension. The gradients use the
same operations, so that the backward keeps all dimensions too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compat.operators import aten

LSE_ROWS = 32  # the GPU kernel needs a multiple of this many rows in its logsumexp

# ------------------------------------------------------------------------- einsum of two tensors


@torch.library.custom_op("torchgspmd::einsum", mutates_args=())
def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """Return torch.einsum of two tensors, as a contiguous tensor.

    No letter is repeated in a tensor or broadcast. Every letter occurs in two of a, b, result.
    """
    return torch.einsum(equation, a, b).contiguous()


def split_equation(equation: str) -> tuple[str, str, str]:
    """Split 'ab,bc->ac' into ('ab', 'bc', 'ac')."""
    left, out = equation.split("->")
    a, b = left.split(",")
    return a, b, out


def summed_alone(x: Tensor, letters: str, others: str) -> tuple[Tensor, str]:
    """Sum x over its letters that are not among `others`. Returns the letters left, too."""
    dims = [i for i, c in enumerate(letters) if c not in others]
    return (x.sum(dims), "".join(c for c in letters if c in others)) if dims else (x, letters)


@einsum.register_fake
def _(equation: str, a: Tensor, b: Tensor) -> Tensor:
    a_letters, b_letters, out = split_equation(equation)
    sizes = {**dict(zip(a_letters, a.shape)), **dict(zip(b_letters, b.shape))}
    for letter, size in zip(a_letters, a.shape):
        if type(size) is type(sizes[letter]) is int and size != sizes[letter]:
            raise RuntimeError(
                f"shapes {list(a.shape)} and {list(b.shape)} cannot be multiplied: "
                f"'{letter}' of {equation} is {size} and {sizes[letter]}"
            )
    return a.new_empty([sizes[letter] for letter in out])


def _einsum_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.equation, a, b = inputs
    ctx.save_for_backward(a, b)


def _einsum_backward(ctx: Any, grad: Tensor) -> tuple:
    x, y = ctx.saved_tensors
    a, b, out = split_equation(ctx.equation)
    return (
        None,
        einsum(f"{out},{b}->{a}", grad, y.conj_physical()) if ctx.needs_input_grad[1] else None,
        einsum(f"{out},{a}->{b}", grad, x.conj_physical()) if ctx.needs_input_grad[2] else None,
    )


einsum.register_autograd(_einsum_backward, setup_context=_einsum_context)


# --------------------------------------------------------------- attention without an explicit mask


@torch.library.custom_op("torchgspmd::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T * scale) v, and the logsumexp of the scores [b, h, s].

    Shapes: q[b, h, s, d], k[b, h, t, d], v[b, h, t, e].
    """
    if q.device.type == "cpu" and v.shape[-1] == q.shape[-1]:
        out, lse = attention_on_cpu(q, k, v, causal, scale)
    elif _has_gpu_kernel(q, v):
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            *_contiguous_rows(q, k, v), None, True, 0.0, causal, scale=scale
        )
        lse = lse[..., : q.shape[2]]
    else:
        out, lse = attention_by_products(q, k, v, causal, scale)
    return out.contiguous(), lse.contiguous()


def attention_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `attention` by PyTorch's CPU kernel. v must be as wide as q."""
    return aten._scaled_dot_product_flash_attention_for_cpu(
        *_contiguous_rows(q, k, v), 0.0, causal, scale=scale
    )


def attention_backward_on_cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attention_backward` by PyTorch's CPU kernel. v must be as wide as q."""
    *tensors, lse, causal, scale = args
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_contiguous_rows(*tensors), lse, 0.0, causal, scale=scale
    )


def attention_by_products(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `attention` by two einsums. Its statistics are float32 or wider."""
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    return einsum("bhst,bhte->bhse", weights.to(v.dtype), v), lse


def attention_backward_by_products(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attention_backward` by einsums. The logsumexp gives the weights again."""
    weights = (_scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()  # [b, h, s, t]
    grad_v = einsum("bhst,bhse->bhte", weights.to(grad.dtype), grad)
    grad_weights = einsum("bhse,bhte->bhst", grad, v).to(weights.dtype)
    mean = (grad * out).to(weights.dtype).sum(-1, True)  # [b, h, s, 1]
    grad_scores = (weights * (grad_weights - mean) * scale).to(q.dtype)
    return (
        einsum("bhst,bhtd->bhsd", grad_scores, k),
        einsum("bhst,bhsd->bhtd", grad_scores, q),
        grad_v,
    )


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = einsum("bhsd,bhtd->bhst", q, k)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if not causal:
        return scores
    s, t = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
    return torch.where(t <= s.unsqueeze(1), scores, float("-inf"))


def _has_gpu_kernel(q: Tensor, v: Tensor) -> bool:
    """Return whether PyTorch's memory-efficient kernel applies: rows are multiples of 16 bytes."""
    return (
        q.device.type == "cuda"
        and q.dtype != torch.float64
        and all(t.shape[-1] * t.itemsize % 16 == 0 for t in (q, v))
    )


def _contiguous_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with contiguous rows, which kernels need and do not check."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return (q.new_empty([*q.shape[:3], v.shape[-1]]), q.new_empty(q.shape[:3], dtype=_lse_dtype(q)))


@torch.library.custom_op("torchgspmd::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    if q.device.type == "cpu" and v.shape[-1] == q.shape[-1]:
        grads = attention_backward_on_cpu(grad, q, k, v, out, lse, causal, scale)
    elif _has_gpu_kernel(q, v):
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % LSE_ROWS), value=float("inf"))
        # Seed and offset of the dropout, which is off.
        seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
        grads = aten._scaled_dot_product_efficient_attention_backward(
            *_contiguous_rows(grad, q, k, v),
            None,
            *_contiguous_rows(out),
            padded,
            seed,
            offset,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )[:3]
    else:
        grads = attention_backward_by_products(grad, q, k, v, out, lse, causal, scale)
    q_grad, k_grad, v_grad = (g.contiguous() for g in grads)
    return q_grad, k_grad, v_grad


@attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))


def _attention_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.causal, ctx.scale = inputs[3:]
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.mark_non_differentiable(output[1])


def _attention_backward(ctx: Any, grad: Tensor, _: Any) -> tuple:
    return (*attention_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None)


attention.register_autograd(_attention_backward, setup_context=_attention_context)


# --------------------------------------------------------- connectionist temporal classification


@torch.library.custom_op("torchgspmd::ctc_losses", mutates_args=())
def ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """Return the loss [n] of each row of a batch, and its gradient by log_probs[t, n, c].

    targets: [n, s], or all of them concatenated. PyTorch's operation cannot be captured: it saves
    a tensor whose size depends on the lengths.
    """
    lengths = [n.tolist() for n in (input_lengths, target_lengths)]
    losses, alpha = aten._ctc_loss.default(log_probs, targets, *lengths, blank, zero_infinity)
    grad = aten._ctc_loss_backward.default(
        torch.ones_like(losses), log_probs, targets, *lengths, losses, alpha, blank, zero_infinity
    )
    losses = losses.masked_fill(losses.isinf(), 0) if zero_infinity else losses.clone()
    return losses, grad.contiguous()


@ctc_losses.register_fake
def _(log_probs: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty([log_probs.shape[1]]), torch.empty_like(
        log_probs, memory_format=torch.contiguous_format
    )


def _ctc_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _ctc_backward(ctx: Any, grad: Tensor, _: Any) -> tuple:
    return ctx.saved_tensors[0] * grad.unsqueeze(-1), None, None, None, None, None


ctc_losses.register_autograd(_ctc_backward, setup_context=_ctc_context)
