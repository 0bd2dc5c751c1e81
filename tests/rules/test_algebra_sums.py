"""Losses over a sharded vocabulary: two numbers a token and model, and those the loss reads."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same

import torchgspmd as gspmd

BYTES = {"f64": 8, "f32": 4, "bf16": 2}
MESH = gspmd.Mesh(data=2, model=3)
SPECS = ("_ data model", "_ data model", "_ data", "_ data")


def label_logps(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)


def label_logps_of_trl(logits, labels):
    """Read the label's logit, not its log-probability, as TRL's `selective_log_softmax` does."""
    return logits.gather(-1, labels[..., None]).squeeze(-1) - logits.logsumexp(-1)


def grpo(logits, reference, labels, mask, logps=label_logps):
    policy = logps(logits, labels)
    with torch.no_grad():
        difference = logps(reference, labels) - policy
    ratio, advantages = (policy - policy.detach()).exp(), mask[:, :1] - 0.3
    kept = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    losses = 0.04 * (difference.exp() - difference - 1) * policy - kept
    return (losses * mask).sum() / mask.sum()


def grpo_of_trl(logits, reference, labels, mask):
    return grpo(logits, reference, labels, mask, label_logps_of_trl)


def dpo(logits, reference, labels, mask):
    policy = (label_logps(logits, labels) * mask).sum(-1)
    with torch.no_grad():
        difference = policy - (label_logps(reference, labels) * mask).sum(-1)
    chosen, rejected = difference.unflatten(0, (2, 2)).unbind(1)
    return F.logsigmoid(0.1 * (chosen - rejected)).mean() + policy.mean()


def distillation(logits, reference, labels, mask):
    student, teacher = (logits / 2).log_softmax(-1), (reference / 2).softmax(-1)
    return F.kl_div(student, teacher, reduction="batchmean") * 4


def masked_distillation(logits, reference, labels, mask):
    student, teacher = logits.log_softmax(-1), reference.log_softmax(-1)
    losses = F.kl_div(student, teacher, reduction="none", log_target=True) * mask[..., None]
    return losses.sum() / mask.sum()


def written_distillation(logits, reference, labels, mask):
    student = logits - logits.logsumexp(-1, keepdim=True)
    teacher = (reference - reference.logsumexp(-1, keepdim=True)).exp()
    return -(teacher * student).sum(-1).mul(mask).mean()


def smoothed(logits, reference, labels, mask):
    return F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)


def two_labels(logits, reference, labels, mask):
    both = torch.stack([labels, labels.roll(1, 1)], -1)  # the same label at some tokens
    return (logits.log_softmax(-1).gather(-1, both) * mask[..., None]).mean()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("loss", "numbers"),
    [
        (grpo, 6),
        (grpo_of_trl, 6),
        (dpo, 4),
        (distillation, 4),
        (masked_distillation, 4),
        (written_distillation, 4),
        (smoothed, 2),
        (two_labels, 2),
    ],
)
def test_losses_reduce_numbers_of_tokens_that_their_formulas_have(loss, numbers, dtype):
    """Maximum and sum for each model; GRPO also reads each log-probability, not only a mean."""

    def step(logits, reference, labels, mask):
        result = loss(logits, reference, labels, mask)
        return result.detach(), *torch.autograd.grad(result, logits)

    torch.manual_seed(0)
    logits = (torch.randn(4, 5, 23) * 3).to(dtype).requires_grad_()
    reference, labels = torch.randn(4, 5, 23).to(dtype), torch.randint(23, (4, 5))
    args = (logits, reference, labels, (torch.rand(4, 5) > 0.3).to(dtype))
    plan = gspmd.plan(step, *args, mesh=MESH, in_specs=SPECS, out_specs=("", "_ data model"))
    over_model = [c for c in plan.collectives if c.axes == ("model",)]
    # A device has 12 tokens, some of them padding.
    tokens = sum(c.payload_bytes / BYTES[c.dtype] / 12 for c in over_model)
    assert {c.kind for c in over_model} == {"all_reduce"}
    assert numbers <= tokens <= numbers + 0.5, plan.text(full=True)
    assert_same(plan.simulate(*args, _poison=True), step(*args))


def sums(x, index):
    """Sums that look like those of a loss, and are others."""
    e, zeros = x.exp(), torch.zeros_like(x)
    scale = torch.arange(7.0, dtype=x.dtype)
    short = zeros.scatter_add(1, index[:3], x[:3, :2])
    tied = zeros.scatter(1, index, x[:, :2])
    total = e.sum(1, keepdim=True)
    return [
        y.sum(1, keepdim=True)
        for y in (
            zeros.scatter_add(1, index, x[:, :2]) * scale,  # each column has another factor
            zeros.scatter_add(0, index, x[:, :2]),
            (zeros + 1).scatter_add(1, index, x[:, :2]),
            e / total * scale,
            (x - 2 * total.log()).exp(),
            (x * 2 - total.log()).exp(),
            (total.log() - x).exp(),
            x[:, :1] + e,  # a column, added to each
            short,
            tied,
            e * e,
            total / e,
        )
    ]


def test_sums_of_other_values_stay():
    torch.manual_seed(0)
    x, index = torch.randn(4, 7, dtype=torch.float64), torch.randint(4, (4, 2))
    index[0] = 2
    plan = gspmd.plan(sums, x, index, mesh=MESH, in_specs=("data model", "data _"))
    assert_same(plan.simulate(x, index, _poison=True), sums(x, index))


def test_a_row_without_probabilities_stays_nan():
    """Logits of -inf alone, or with inf, have no softmax: the sum is NaN, not 1."""

    def total(x):
        return x.softmax(1).sum(1, keepdim=True), x.log_softmax(1).exp().sum(1, keepdim=True)

    x = torch.tensor([[-torch.inf] * 3, [torch.inf, 0.0, 1.0], [0.0, 1.0, -torch.inf]])
    plan = gspmd.plan(total, x, mesh=MESH, in_specs="_ model")
    got, want = plan.simulate(x, _poison=True), total(x)
    torch.testing.assert_close(got, want, equal_nan=True)
