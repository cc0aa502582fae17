"""distillation_loss against the definition on full logits in plain torch, and against trl 1.16's own functions."""

import ast
from importlib.resources import files

import pytest
import torch
import torch.nn.functional as F

from spmdrl_kernels.distill import distillation_loss, plan, top_logprobs
from spmdrl_kernels.divergence import StatesTeacher, TopTeacher, generalized_jsd, log_probabilities

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def trl_functions(path: str) -> dict:
    """The functions of a file of the trl wheel, without importing its trainer."""
    tree = ast.parse((files("trl") / path).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    wanted = ("generalized_jsd_loss", "compute_divergence", "add_tail_bucket")
    body: list[ast.stmt] = [node for node in found if node.name in wanted]
    for node in body:
        node.decorator_list = []
    space = {"torch": torch, "F": F}
    exec(compile(ast.Module(body, []), path, "exec"), space)
    return space


def make(T=37, D=12, V=257, E=9, U=None, dtype=torch.float64, seed=0):
    """States and output weights of a student and a teacher, and weights of the tokens."""
    rng = torch.Generator().manual_seed(seed)
    shapes = ((T, D), (V, D), (T, E), (U or V, E))
    found = [torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]
    weight_T = torch.rand(T, generator=rng, dtype=torch.float64) / max(1, T)
    return found[0].requires_grad_(), found[1].requires_grad_(), found[2], found[3], weight_T


def logp_of(states, weight, divisor=1.0, softcap=None, vocab=None):
    logits = states.double() @ weight.double()[:vocab].t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.log_softmax(logits / divisor, -1)


def definition(s, t, beta):
    """GKD's equation in probabilities."""
    p, q = s.exp(), t.exp()
    if beta == 0:
        return (q * (q / p).log()).sum(-1)
    if beta == 1:
        return (p * (p / q).log()).sum(-1)
    m = beta * q + (1 - beta) * p
    return (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(-1)


def alike(got, want, rtol=1e-10, atol=1e-10):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("rows", [None, 1, 16])
def test_kernel_divergence_from_all_logits(beta, rows):
    h, w, states, head, weight_T = make()
    options = {"divisor": 1.3, "softcap": 4.0}
    s, t = logp_of(h, w, **options), logp_of(states, head, 0.8, 3.0)
    divergence = definition(s, t, beta)
    want = torch.autograd.grad(3 * (divergence * weight_T).sum(), (h, w))
    teacher = StatesTeacher(states, head, 0.8, 3.0)
    total, got, entropy = distillation_loss(h, w, [(teacher, weight_T)], beta, chunk_tokens=rows, **options)
    alike(torch.autograd.grad(3 * total, (h, w)), want)
    alike((total, got[:, 0], entropy), ((divergence * weight_T).sum(), divergence, -(s.exp() * s).sum(-1)))
    assert not got.requires_grad and not entropy.requires_grad
    with torch.no_grad():
        alone, *_ = distillation_loss(h, w, [(teacher, weight_T)], beta, chunk_tokens=rows, **options)
    assert alone == total and not alone.requires_grad


@pytest.mark.parametrize("beta", BETAS)
def test_parity_trl_generalized_jsd(beta):
    trl = trl_functions("experimental/gkd/gkd_trainer.py")["generalized_jsd_loss"]
    h, w, states, head, _ = make(dtype=torch.float32)
    labels = torch.where(torch.arange(37) % 3 > 0, 0, -100)
    want = trl((h @ w.t())[None], (states @ head.t())[None], labels[None], beta=beta, temperature=0.7)
    weight_T = (labels == 0) / (labels == 0).sum().double()
    teacher = StatesTeacher(states, head, 0.7)
    total, *_ = distillation_loss(h, w, [(teacher, weight_T)], beta, 0.7, chunk_tokens=16)
    assert total.item() == pytest.approx(want.item(), rel=1e-6)
    ours, theirs = (torch.autograd.grad(x, (h, w)) for x in (total, want))
    alike(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("renormalized", [False, True])
def test_parity_trl_divergence_from_the_teachers_top(beta, renormalized):
    trl = trl_functions("experimental/sdft/loss_utils.py")
    h, w, states, head, weight_T = make()
    s, t = logp_of(h, w, 1.2), logp_of(states, head, 0.8)
    logp, ids = t.topk(20, -1)
    chosen = s.gather(1, ids)
    if renormalized:
        pair = torch.log_softmax(chosen, -1), torch.log_softmax(logp, -1)
    else:
        pair = trl["add_tail_bucket"](chosen), trl["add_tail_bucket"](logp)
    divergence = trl["compute_divergence"](*pair, beta)
    want = torch.autograd.grad((divergence * weight_T).sum(), (h, w))
    got_ids, got_logp, rest = top_logprobs(states, head, 20, 0.8, chunk_tokens=16)
    assert torch.equal(got_ids, ids)
    alike((got_logp, rest), (logp, (1 - logp.exp().sum(1)).log()))
    for teacher in (TopTeacher(ids, logp, rest, renormalized), TopTeacher(ids, logp, None, renormalized)):
        total, got, _ = distillation_loss(h, w, [(teacher, weight_T)], beta, 1.2, chunk_tokens=16)
        alike((got[:, 0], *torch.autograd.grad(total, (h, w))), (divergence, *want), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [0, 1, 40])
def test_kernel_a_student_that_is_its_teacher_has_no_gradient_at_all(dtype, beta, k):
    h, w, *_, weight_T = make(T=70, D=64, V=1001, dtype=dtype)
    states, head = h.detach().clone() * 4, w.detach().clone()
    h = states.clone().requires_grad_()
    options = {"softcap": 20.0, "divisor": 0.7}
    teachers = [StatesTeacher(states, head, options["divisor"], options["softcap"])]
    if k:
        found = top_logprobs(states, head, k, **options)
        teachers = [TopTeacher(*found), TopTeacher(*found, renormalized=True)]
    for teacher in teachers:
        total, divergence, _ = distillation_loss(h, w, [(teacher, weight_T)], beta, **options)
        for gradient in torch.autograd.grad(total, (h, w)):
            assert not gradient.any()
        # Of terms that cancel: exactly 0 but in a Jensen-Shannon divergence, whose two parts are rounded.
        assert divergence.abs().max() < 1e-6


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_kernel_divergence_from_several_teachers_is_the_weighted_sum(beta):
    h, w, states, head, weight_T = make()
    _, _, others, other_head, other_T = make(E=5, seed=1)
    ids, logp, rest = top_logprobs(others, other_head, 7)
    pair = [(StatesTeacher(states, head), weight_T), (TopTeacher(ids, logp, rest), other_T)]
    total, divergence, _ = distillation_loss(h, w, pair, beta, chunk_tokens=16)
    alone = [distillation_loss(h, w, [each], beta) for each in pair]
    alike([total, divergence], [alone[0][0] + alone[1][0], torch.cat([alone[0][1], alone[1][1]], 1)])
    want = torch.autograd.grad(alone[0][0] + alone[1][0], (h, w))
    alike(torch.autograd.grad(total, (h, w)), want)


@pytest.mark.parametrize("U", [300, 200])
def test_kernel_vocabularies_of_other_padded_lengths_are_cut_to_the_shorter(U):
    """As 151,936 and 152,064 of one tokenizer: tokens that only one of them has do not count, and get no gradient."""
    h, w, states, head, weight_T = make(U=U)
    both = min(257, U)
    divergence = definition(logp_of(h, w, vocab=both), logp_of(states, head, vocab=both), 0.5)
    want = torch.autograd.grad((divergence * weight_T).sum(), (h, w))
    total, got, _ = distillation_loss(h, w, [(StatesTeacher(states, head), weight_T)], 0.5, chunk_tokens=16)
    gradients = torch.autograd.grad(total, (h, w))
    alike((got[:, 0], *gradients), (divergence, *want))
    assert not gradients[1][both:].any() and gradients[1][:both].any()
    shorter, got, _ = distillation_loss(h, w, [(StatesTeacher(states, head), weight_T)], 0.5, valid_vocab=150)
    alike([got[:, 0]], [definition(logp_of(h, w, vocab=150), logp_of(states, head, vocab=150), 0.5)])


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_kernel_divergence_in_other_dtypes(dtype, limit, beta):
    h, w, states, head, weight_T = make(dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in (h, w)]
    divergence = definition(logp_of(*wide), logp_of(states, head), beta)
    want = torch.autograd.grad((divergence * weight_T).sum(), wide)
    total, got, _ = distillation_loss(h, w, [(StatesTeacher(states, head), weight_T)], beta, chunk_tokens=16)
    assert total.dtype == torch.float64 and got.dtype == torch.float32
    torch.testing.assert_close(got[:, 0].double(), divergence, rtol=1e-4, atol=1e-4)
    for a, b, like in zip(torch.autograd.grad(total, (h, w)), want, (h, w), strict=True):
        assert a.dtype == like.dtype and (a.double() - b).norm() <= limit * b.norm()


@pytest.mark.parametrize("beta", BETAS)
def test_kernel_divergence_of_distributions_far_apart_stays_finite(beta):
    """Log-probabilities of -200, whose ratio overflows in fp32."""
    s, t = (torch.log_softmax(x.float(), -1) for x in (torch.tensor([[200.0, 0, 1]]), torch.tensor([[0.0, 200, 1]])))
    divergence, gradient = generalized_jsd(s, t, beta)
    wide, asked = s.double().requires_grad_(), t.double()
    want = definition(torch.log_softmax(wide, -1), asked, beta).sum()
    assert divergence.item() == pytest.approx(want.item(), rel=1e-5)
    torch.testing.assert_close(gradient.double(), torch.autograd.grad(want, wide)[0], rtol=1e-4, atol=1e-6)


def test_kernel_divergence_of_no_tokens_once_and_without_more_than_a_chunk():
    h, w, states, head, weight_T = make()
    none = [(StatesTeacher(states[:0], head), weight_T[:0])]
    total, divergence, entropy = distillation_loss(h[:0], w, none, 0.5)
    assert total == 0 and divergence.shape == (0, 1) and entropy.shape == (0,)
    assert [x.shape for x in torch.autograd.grad(total, (h, w), allow_unused=True)[1:]] == [w.shape]
    total, *_ = distillation_loss(h, w, [(StatesTeacher(states, head), weight_T)], 0.5)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="works once"):
        total.backward()
    blocks = plan(100_000, 151_936, h.detach().float(), None)
    assert blocks.columns == 151_936 and 6 * 4 * blocks.rows * 151_936 <= 64 * 2**20


@pytest.mark.parametrize(
    "change, said",
    [
        ({"beta": 1.5}, "beta must lie in"),
        ({"divisor": 0.0}, "divisor must be positive"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1"),
    ],
)
def test_kernel_divergence_refuses(change, said):
    h, w, states, head, weight_T = make()
    settings = {"beta": 0.5} | change
    with pytest.raises(ValueError, match=said):
        distillation_loss(h, w, [(StatesTeacher(states, head), weight_T)], **settings)
    with pytest.raises(ValueError, match="k must lie in"):
        top_logprobs(states, head, 257)
    with pytest.raises(ValueError, match="each teacher needs a weight"):
        distillation_loss(h, w, [(StatesTeacher(states, head), weight_T[:3])], 0.5)


@pytest.mark.parametrize("size", [16.0, 60.0])
def test_kernel_log_probabilities_of_likely_tokens_keep_their_digits(size):
    """log p of a token that is nearly certain is about p - 1: to 4e-7 of float64's, whatever the size of the logits."""
    logits = torch.randn(64, 48, generator=torch.Generator().manual_seed(3)) + size - 9
    logits[:, 5] = size
    exact = logits.double().log_softmax(1)[:, 5]
    assert exact.min() > -2e-2 and exact.max() < -5e-4
    found, _ = log_probabilities(logits, 1.0, None, torch.float32)
    assert (found[:, 5].double() - exact).abs().max() < 4e-7
