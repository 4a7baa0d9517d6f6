"""The parts that decoder families share: ends, attention, dense and sparse MLPs.

Training tensors interleave their units, so that any unit-aligned rows are whole units: qkv goes KV
group by KV group (its q heads, k, v), gate_up goes in pairs (g0 u0 g1 u1 ...).
"""

from collections.abc import Callable, Iterator, Sequence

from d9d_ckpt.graph.build import LazyTensor, cat, stack
from d9d_ckpt.layout.placement import Cut, Heads, Placement
from d9d_ckpt.models.config import ModelConfig
from d9d_ckpt.models.family import EMBEDDING, HEAD, Rule, Shape

Builder = Callable[[Sequence[LazyTensor]], LazyTensor]


def same(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """The one source as it is."""
    return tensors[0]


def renamed(name: str, source: str, shape: Shape, placement: Placement) -> Rule:
    """A tensor that only changes its name."""
    return Rule(name, ((source, shape),), same, placement)


def kept(name: str, shape: Shape, placement: Placement) -> Rule:
    """A tensor that is the same on both sides."""
    return renamed(name, name, shape, placement)


def ends(c: ModelConfig) -> Iterator[Rule]:
    """Embedding, final norm and head."""
    vocab = Cut(tp=0, vocab=True)
    table = (c.vocab, c.hidden)
    yield kept(EMBEDDING, table, Placement("first", vocab, tied=c.tied))
    yield kept("model.norm.weight", (c.hidden,), Placement("last"))
    if not c.tied:
        yield kept(HEAD, table, Placement("last", vocab))


def norms(c: ModelConfig, layer: int) -> Iterator[Rule]:
    """The two norms of a layer."""
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield kept(f"model.layers.{layer}.{norm}.weight", (c.hidden,), Placement(layer))


def attention(
    c: ModelConfig, layer: int, *, qkv_bias: bool, o_bias: bool, qk_norm: bool
) -> Iterator[Rule]:
    """Fused qkv, o, and what the family adds to them."""
    at = f"model.layers.{layer}.self_attn."
    rows = {"q": c.heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}
    qkv = Cut(tp=0, units=c.kv_heads, heads=Heads(c.kv_heads, c.queries, c.head_dim))
    parts: list[tuple[str, tuple[int, ...]]] = [("weight", (c.hidden,))]
    if qkv_bias:
        parts.append(("bias", ()))
    for part, inner in parts:
        sources = tuple((f"{at}{x}_proj.{part}", (n, *inner)) for x, n in rows.items())
        yield Rule(f"{at}qkv_proj.{part}", sources, _by_group(c.kv_heads), Placement(layer, qkv))
    o = Cut(tp=1, units=c.heads)
    yield kept(f"{at}o_proj.weight", (c.hidden, rows["q"]), Placement(layer, o))
    if o_bias:
        yield kept(f"{at}o_proj.bias", (c.hidden,), Placement(layer))
    if qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield kept(f"{at}{norm}.weight", (c.head_dim,), Placement(layer))


def dense_mlp(c: ModelConfig, layer: int, *, bias: bool = False) -> Iterator[Rule]:
    """gate_up in pairs of rows, and down."""
    at = f"model.layers.{layer}.mlp."
    width = c.intermediate
    pairs, columns = Cut(tp=0, units=width), Cut(tp=1, units=width)
    parts: list[tuple[str, tuple[int, ...]]] = [("weight", (c.hidden,))]
    if bias:
        parts.append(("bias", ()))
    for part, inner in parts:
        sources = tuple((f"{at}{x}_proj.{part}", (width, *inner)) for x in ("gate", "up"))
        yield Rule(f"{at}gate_up_proj.{part}", sources, _by_pair, Placement(layer, pairs))
    yield kept(f"{at}down_proj.weight", (c.hidden, width), Placement(layer, columns))
    if bias:
        yield kept(f"{at}down_proj.bias", (c.hidden,), Placement(layer))


def sparse_mlp(
    c: ModelConfig, layer: int, experts: str, *, split: str, router: str, names: Sequence[str]
) -> Iterator[Rule]:
    """Router and experts, from a module list or from the fused tensors of transformers v5.

    Args:
        c: Sizes.
        layer: Which layer.
        experts: ``split`` or ``fused``.
        split: Module that holds router and experts in the split layout.
        router: Name of the split layout's router.
        names: Names of gate, up and down of one expert in the split layout.
    """
    at = f"model.layers.{layer}."
    count, width, hidden = c.experts, c.moe_intermediate, c.hidden
    whole = Placement(layer, Cut(experts=True))
    if experts == "fused":
        gate = f"{at}mlp.gate.weight"
        up_sources: tuple[tuple[str, Shape], ...] = (
            (f"{at}mlp.experts.gate_up_proj", (count, 2 * width, hidden)),
        )
        down_sources: tuple[tuple[str, Shape], ...] = (
            (f"{at}mlp.experts.down_proj", (count, hidden, width)),
        )
    else:
        gate = f"{at}{split}.{router}.weight"
        gate_name, up_name, down_name = names
        expert = f"{at}{split}.experts."
        up_sources = tuple(
            (f"{expert}{e}.{n}.weight", (width, hidden))
            for n in (gate_name, up_name)
            for e in range(count)
        )
        down_sources = tuple(
            (f"{expert}{e}.{down_name}.weight", (hidden, width)) for e in range(count)
        )
    yield renamed(f"{at}mlp.router.weight", gate, (count, hidden), Placement(layer))
    yield Rule(
        f"{at}mlp.experts.gate_up_proj.weight",
        up_sources,
        _fused_pairs if experts == "fused" else _expert_pairs,
        whole,
    )
    yield Rule(
        f"{at}mlp.experts.down_proj.weight",
        down_sources,
        same if experts == "fused" else _expert_stack,
        whole,
    )


def _by_group(groups: int) -> Builder:
    def build(qkv: Sequence[LazyTensor]) -> LazyTensor:
        rows, inner = sum(t.shape[0] for t in qkv), qkv[0].shape[1:]
        units = [t.reshape(groups, t.shape[0] // groups, *inner) for t in qkv]
        return cat(units, 1).reshape(rows, *inner)

    return build


def _by_pair(gate_up: Sequence[LazyTensor]) -> LazyTensor:
    rows, inner = gate_up[0].shape[0], gate_up[0].shape[1:]
    return stack(gate_up, 1).reshape(2 * rows, *inner)


def _fused_pairs(fused: Sequence[LazyTensor]) -> LazyTensor:
    """[E, 2F, H] with gate rows, then up rows, to pairs of rows."""
    experts, rows, hidden = fused[0].shape
    halves = fused[0].reshape(experts, 2, rows // 2, hidden)
    return halves.permute(0, 2, 1, 3).reshape(experts, rows, hidden)


def _expert_pairs(gates_ups: Sequence[LazyTensor]) -> LazyTensor:
    """E gates [F, H], then E ups [F, H], to [E, 2F, H] in pairs of rows."""
    experts = len(gates_ups) // 2
    width, hidden = gates_ups[0].shape
    gates, ups = cat(gates_ups[:experts]), cat(gates_ups[experts:])
    return stack([gates, ups], 1).reshape(experts, 2 * width, hidden)


def _expert_stack(experts: Sequence[LazyTensor]) -> LazyTensor:
    return cat(experts).reshape(len(experts), *experts[0].shape)
