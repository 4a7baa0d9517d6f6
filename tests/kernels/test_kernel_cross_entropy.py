import pytest
import torch
from kernel_cases import DTYPES, TOLERANCE, agree, distance, leaf, run
from torch.nn import functional

from d9d_kernels import cross_entropy, launch, linear_cross_entropy, reference


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    """In the interpreter, a step of the size that suits a GPU would be all of the time."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(launch, "cross_entropy", lambda: (64, 2, 4))


class Alone:
    """A group of one rank."""

    def max_(self, values):
        pass

    def sum_(self, values):
        pass


class Recorded:
    """One rank's part of a reduction over shards that are computed one after another.

    The first round over the shards records what each gives; the second answers with the whole.
    """

    def __init__(self):
        self.rounds = {"max": [], "sum": []}
        self.calls = {"max": 0, "sum": 0}
        self.replay = False

    def _reduce(self, name, values, combine):
        if self.replay:
            values.copy_(combine(torch.stack([r[self.calls[name]] for r in self.rounds[name]])))
            self.calls[name] += 1
        else:
            self.rounds[name][-1].append(values.clone())

    def max_(self, values):
        self._reduce("max", values, lambda all_: all_.amax(0))

    def sum_(self, values):
        self._reduce("sum", values, lambda all_: all_.sum(0))


def case(tokens, hidden, rows, dtype, device):
    x = leaf(tokens, hidden, dtype=dtype, device=device)
    weight = leaf(rows, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    labels = torch.randint(0, rows, (tokens,), device=device)
    return x, weight, labels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 8, 5), (7, 16, 101), (5, 8, 9000)])
def test_agrees_with_float64(shape, dtype, device):
    x, weight, labels = case(*shape, dtype, device)
    labels[0] = -100 if shape[0] > 1 else labels[0]
    # Logits are rounded to the input's dtype, so the loss carries that rounding.
    definition = reference.linear_cross_entropy
    agree(linear_cross_entropy, definition, x, weight, labels, rounded=dtype)


def test_is_torch_s_cross_entropy_of_the_projection():
    x, weight, labels = case(6, 8, 11, torch.float64, "cpu")
    labels[2] = -100
    expected = functional.cross_entropy(x @ weight.t(), labels, reduction="sum")
    torch.testing.assert_close(linear_cross_entropy(x, weight, labels), expected)
    assert torch.autograd.gradcheck(lambda a, b: linear_cross_entropy(a, b, labels), (x, weight))


@pytest.mark.parametrize("tokens", [129, 256])
def test_chunks_do_not_change_the_numbers(tokens, device, monkeypatch):
    x, weight, labels = case(tokens, 8, 40, torch.float32, device)
    whole = run(linear_cross_entropy, [x, weight, labels], 0)
    monkeypatch.setattr(cross_entropy, "BUFFER_BYTES", 1)
    assert cross_entropy.chunk_tokens(tokens, 40, 4) == 128
    parts = run(linear_cross_entropy, [x, weight, labels], 0)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("tokens", [1, 127, 128, 4096, 8192, 8193, 20000])
def test_chunks_are_few_and_fit(tokens):
    chunk = cross_entropy.chunk_tokens(tokens, 151936, 2)
    assert chunk * 151936 * 2 <= cross_entropy.BUFFER_BYTES
    assert chunk == tokens or chunk % 128 == 0
    assert -(-tokens // chunk) == -(-tokens // (cross_entropy.BUFFER_BYTES // (151936 * 2)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_rows_have_no_part(dtype, anywhere):
    x, weight, labels = case(5, 8, 23, dtype, anywhere)
    labels %= 20
    found = run(linear_cross_entropy, [x, weight, labels], 0, vocab_size=20)
    cut = weight.detach()[:20].requires_grad_()
    expected = run(linear_cross_entropy, [x, cut, labels], 0)
    torch.testing.assert_close(found[:2], expected[:2])
    torch.testing.assert_close(found[2][:20], expected[2])
    assert torch.equal(found[2][20:], torch.zeros_like(found[2][20:]))


@pytest.mark.parametrize("label", [20, 22, 23, 500, -1])
def test_a_label_outside_the_vocabulary_is_infinite(label, anywhere):
    x, weight, labels = case(5, 8, 23, torch.float32, anywhere)
    labels[2] = label
    assert linear_cross_entropy(x, weight, labels, vocab_size=20).item() == float("inf")


def test_a_group_of_one_is_no_group(anywhere):
    x, weight, labels = case(9, 8, 50, torch.float32, anywhere)
    labels[4] = -100
    alone = run(linear_cross_entropy, [x, weight, labels], 0)
    grouped = run(linear_cross_entropy, [x, weight, labels], 0, reducer=Alone())
    for a, b in zip(alone, grouped, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("shards", [2, 3])
def test_shards_add_up(shards, dtype, anywhere):
    rows, vocab = 12, 12 * shards - 5
    x, weight, labels = case(7, 8, rows * shards, dtype, anywhere)
    labels %= vocab
    labels[1] = -100
    expected = run(linear_cross_entropy, [x, weight, labels], 0, vocab_size=vocab)

    reducer = Recorded()

    def one(shard):
        reducer.calls = {"max": 0, "sum": 0}
        part = weight.detach()[shard * rows : (shard + 1) * rows].requires_grad_()
        options = {"first_row": shard * rows, "vocab_size": vocab, "reducer": reducer}
        return run(linear_cross_entropy, [x, part, labels], 0, **options)

    # Totals depend on the whole maximum: one round records the maxima, one the sums.
    for name in ("max", "sum"):
        for shard in range(shards):
            reducer.rounds[name].append([])
            _record(reducer, name, one, shard)
    reducer.replay = True
    found = [one(shard) for shard in range(shards)]

    tolerance = 1e-12 if dtype == torch.float64 else 2 * TOLERANCE[dtype]
    for loss, _, _ in found:
        assert distance(loss, expected[0]) <= tolerance
    assert distance(sum(dx.double() for _, dx, _ in found), expected[1]) <= tolerance
    assert distance(torch.cat([dw for _, _, dw in found]), expected[2]) <= tolerance


def _record(reducer, name, one, shard):
    """Run a shard, answering the other kind of reduction and recording this one."""
    recording = reducer._reduce

    def only(kind, values, combine):
        if kind == name:
            recording(kind, values, combine)
        elif name == "sum":
            values.copy_(torch.stack([r[0] for r in reducer.rounds["max"]]).amax(0))

    reducer._reduce = only
    one(shard)
    reducer._reduce = recording


def test_needs_no_gradient(anywhere):
    x, weight, labels = case(5, 8, 23, torch.float32, anywhere)
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, linear_cross_entropy(x, weight, labels).detach())


def test_frozen_weight(anywhere):
    x, weight, labels = case(5, 8, 23, torch.float32, anywhere)
    both = run(linear_cross_entropy, [x, weight, labels], 0)
    one = run(linear_cross_entropy, [x, weight.detach(), labels], 0)
    assert torch.equal(both[1], one[1])


def test_backward_twice_scales_once_each(anywhere):
    x, weight, labels = case(5, 8, 23, torch.float32, anywhere)
    loss = linear_cross_entropy(x, weight, labels)
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    second = torch.autograd.grad(loss * 2, (x, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(2 * a, b)


def test_weight_gradient_in_a_dtype_of_its_own(device):
    x, weight, labels = case(5, 8, 23, torch.float32, device)
    weight.grad_dtype = torch.float64
    linear_cross_entropy(x, weight, labels).backward()
    assert weight.grad.dtype == torch.float64


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_inputs_reach_the_loss(bad, anywhere):
    x, weight, labels = case(5, 8, 23, torch.float32, anywhere)
    with torch.no_grad():
        x[3, 2] = bad
    assert not torch.isfinite(linear_cross_entropy(x, weight, labels))


@pytest.mark.gpu
def test_gradient_error_is_no_worse_than_eager_s(device):
    x, weight, labels = case(2048, 1024, 32768, torch.bfloat16, device)
    exact = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    expected = run(reference.linear_cross_entropy, [*exact, labels], 0)

    def eager(a, b, c):
        return functional.cross_entropy(functional.linear(a, b), c, reduction="sum")

    ours = run(linear_cross_entropy, [x, weight, labels], 0)
    theirs = run(eager, [x, weight, labels], 0)
    for f, t, e in zip(ours, theirs, expected, strict=True):
        assert distance(f, e) <= 1.02 * distance(t, e)


@pytest.mark.gpu
def test_logits_past_2_to_31(device, monkeypatch):
    x, weight, labels = case(1 << 15, 64, 70000, torch.bfloat16, device)
    parts = run(linear_cross_entropy, [x, weight, labels], 0)
    monkeypatch.setattr(cross_entropy, "BUFFER_BYTES", 1 << 33)
    whole = run(linear_cross_entropy, [x, weight, labels], 0)
    for a, b in zip(whole, parts, strict=True):
        assert distance(a, b) <= 2e-3
