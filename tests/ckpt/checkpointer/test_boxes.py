from itertools import product
from math import prod

import pytest
import torch
from helpers.meshes import fake_rank, fresh_mesh, on_fake_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from d9d_ckpt.checkpointer.boxes import held_box, hold
from d9d_ckpt.errors import LayoutError, RequestError
from d9d_ckpt.tensors import Region


def eager(whole, cuts):
    """Chunk after chunk; cuts are (dim, parts, index) in the order in which they are made."""
    for dim, parts, index in cuts:
        size = -(-whole.shape[dim] // parts)
        start = min(index * size, whole.shape[dim])
        whole = whole.narrow(dim, start, min(size, whole.shape[dim] - start))
    return whole


def wrapped(local, mesh, placements, whole):
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def cut_out(whole, box):
    return whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]


def check(shape, mesh_shape, placements, order):
    """On every rank, the box cuts out of the whole what eager slicing in ``order`` of axes gives."""
    whole = torch.arange(prod(shape)).reshape(shape)
    for rank in range(prod(mesh_shape)):
        with fake_rank(rank, prod(mesh_shape)):
            mesh = fresh_mesh(*mesh_shape)
            at = mesh.get_coordinate()
            local = eager(whole, [(placements[a].dim, mesh_shape[a], at[a]) for a in order])
            box = held_box(wrapped(local, mesh, placements, whole), "w")
        if local.numel():
            assert torch.equal(cut_out(whole, box), local)
        else:
            assert box is None


S, R = Shard, Replicate


def strided(dim, factor):
    return _StridedShard(dim, split_factor=factor)


@pytest.mark.parametrize(
    ("mesh", "placements", "order"),
    [
        ((4,), (S(0),), [0]),
        ((4,), (S(1),), [0]),
        ((4,), (R(),), []),
        ((2, 3), (S(0), S(0)), [0, 1]),
        ((2, 3), (S(0), S(1)), [0, 1]),
        ((2, 3), (R(), S(1)), [1]),
        ((2, 3), (strided(0, 3), S(0)), [1, 0]),
        ((4, 2), (strided(0, 2), S(0)), [1, 0]),
        # Nothing to the right cuts dim 0: the factor says that it comes first.
        ((2, 3), (strided(0, 1), S(1)), [0, 1]),
        ((2, 2, 2), (R(), strided(0, 2), S(0)), [2, 1]),
        ((2, 2, 2), (strided(0, 4), strided(0, 2), S(0)), [2, 1, 0]),
        ((2, 2, 2), (strided(0, 2), S(0), S(1)), [1, 0, 2]),
        ((4, 3, 2), (strided(0, 2), strided(0, 2), S(0)), [2, 0, 1]),
        ((2, 3, 2), (strided(1, 2), S(0), S(1)), [1, 2, 0]),
    ],
)
@pytest.mark.parametrize("shape", [(12, 12), (5, 7), (1, 3), (13, 2)])
def test_a_box_is_what_slicing_in_the_order_of_the_placements_gives(mesh, placements, order, shape):
    check(shape, mesh, placements, order)


@pytest.mark.parametrize("rows", range(1, 14))
@pytest.mark.parametrize("mesh", [(2, 2), (4, 2), (2, 4), (3, 2)])
def test_rows_that_tp_does_not_divide(rows, mesh):
    check((rows, 2), mesh, (strided(0, mesh[1]), S(0)), [1, 0])


def test_uneven_chunks_written_by_hand():
    # 5 rows over tp=2: 3 and 2; each over fsdp=2: 2 and 1, 1 and 1.
    boxes = {}
    for rank in range(4):
        with fake_rank(rank, 4):
            mesh = fresh_mesh(2, 2)
            rows = (2, 1, 1, 1)[rank]
            local = torch.zeros(rows, 3)
            whole = torch.zeros(5, 3)
            boxes[rank] = held_box(wrapped(local, mesh, (strided(0, 2), S(0)), whole))
    assert boxes == {
        0: Region((0, 0), (2, 3)),
        1: Region((3, 0), (1, 3)),
        2: Region((2, 0), (1, 3)),
        3: Region((4, 0), (1, 3)),
    }


@pytest.mark.parametrize(("mesh", "placements"), [((4,), (S(0),)), ((2, 2), (S(1), S(0)))])
def test_what_torch_distributes_has_the_box_that_the_rule_gives(mesh, placements):
    whole = torch.arange(5 * 3).reshape(5, 3)
    for rank in range(4):
        with fake_rank(rank, 4):
            there = fresh_mesh(*mesh)
            tensor = distribute_tensor(whole, there, placements, src_data_rank=None)
            box, local = held_box(tensor), tensor.to_local()
        assert torch.equal(cut_out(whole, box), local) if box else not local.numel()


class Tiny(nn.Module):
    """Column parallel 7 rows, row parallel 5 by 7, a norm of 5: nothing divides."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 7)
        self.down = nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)
        with torch.no_grad():
            for n, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + 1000 * n)


def sharded(tp, replicate):
    """Boxes and locals of a tiny model after tensor parallel and fully_shard on 8 fake ranks."""

    def work(rank):
        del rank
        model = Tiny()
        shape = (
            (8 // tp // replicate, tp) if replicate == 1 else (replicate, 8 // tp // replicate, tp)
        )
        mesh = fresh_mesh(*shape)
        *fsdp, tensor = mesh.mesh_dim_names
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh[tensor], plan, src_data_rank=None)
        fully_shard(model.up, mesh=mesh[tuple(fsdp)])
        fully_shard(model, mesh=mesh[tuple(fsdp)])
        out = {}
        for name, tensor in model.state_dict().items():
            held = hold(name, tensor)
            out[name] = held.box, held.local.numpy()
        return out

    return on_fake_ranks(8, work)


@pytest.mark.ranks
@pytest.mark.parametrize(("tp", "replicate"), [(2, 1), (4, 1), (2, 2)])
def test_tensor_parallel_and_fully_shard(tp, replicate):
    whole = {name: p.detach() for name, p in Tiny().named_parameters()}
    covered = {name: torch.zeros(p.shape, dtype=torch.int) for name, p in whole.items()}
    for rank, held in enumerate(sharded(tp, replicate)):
        assert held.keys() == whole.keys()
        for name, (box, local) in held.items():
            if box is None:
                assert local.size == 0, (rank, name)
                continue
            assert torch.equal(cut_out(whole[name], box), torch.from_numpy(local)), (rank, name)
            cut_out(covered[name], box).add_(1)
    # Every element is somewhere, and equally often unless tp replicates only a part of the ranks.
    copies = {name: {*count.flatten().tolist()} for name, count in covered.items()}
    assert copies["up.weight"] == copies["down.weight"] == {replicate}
    assert copies["norm.weight"] == copies["down.bias"] == {replicate * tp}


def test_a_rank_outside_the_mesh_holds_nothing():
    with fake_rank(3, 4):
        mesh = DeviceMesh("cpu", torch.tensor([0, 1]))
        tensor = distribute_tensor(torch.zeros(4), mesh, [S(0)], src_data_rank=None)
        assert held_box(tensor) is None
        assert hold("w", tensor).box is None


def test_a_sum_not_yet_made_is_refused_with_its_name():
    with fake_rank(0, 2):
        mesh = fresh_mesh(2)
        tensor = DTensor.from_local(torch.zeros(3), mesh, [Partial()], run_check=False)
        with pytest.raises(LayoutError, match=r"'model\.w' is Partial\(sum\)"):
            hold("model.w", tensor)


def test_d04_a_local_tensor_of_another_shape_is_refused_with_both():
    with fake_rank(0, 2):
        mesh = fresh_mesh(2)
        tensor = wrapped(torch.zeros(4, 2), mesh, [S(0)], torch.zeros(6, 2))
        with pytest.raises(
            LayoutError, match=r"'w': \[3, 2\] of \[6, 2\].* local tensor is \[4, 2\]"
        ):
            held_box(tensor, "w")


def test_a_split_factor_that_no_axes_make_is_refused():
    with fake_rank(0, 4):
        mesh = fresh_mesh(2, 2)
        tensor = wrapped(torch.zeros(1, 2), mesh, [strided(0, 3), S(0)], torch.zeros(4, 2))
        with pytest.raises(LayoutError, match=r"'w'.*split factor"):
            held_box(tensor, "w")


@pytest.mark.parametrize(
    ("tensor", "dtype", "box"),
    [
        (torch.tensor(1.0), "F32", Region((), ())),
        (torch.zeros(0, 4), "F32", None),
        (torch.zeros(2, 3).t(), "F32", Region((0, 0), (3, 2))),
        (torch.zeros(3, dtype=torch.complex64), "C64", Region((0,), (3,))),
        (torch.zeros(3, dtype=torch.bool), "BOOL", Region((0,), (3,))),
        (torch.zeros(3, dtype=torch.int8), "I8", Region((0,), (3,))),
        (torch.zeros(3, dtype=torch.uint16), "U16", Region((0,), (3,))),
        (torch.zeros(3, dtype=torch.float8_e4m3fn), "F8_E4M3", Region((0,), (3,))),
        (nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)), "BF16", Region((0,), (3,))),
        (nn.Buffer(torch.zeros(3)), "F32", Region((0,), (3,))),
    ],
)
def test_plain_tensors_are_held_whole(tensor, dtype, box):
    held = hold("w", tensor)
    assert (held.spec.dtype.name, held.spec.shape, held.box) == (dtype, tuple(tensor.shape), box)
    assert not held.local.requires_grad


def test_filling_the_local_tensor_fills_the_live_one():
    weight = nn.Parameter(torch.zeros(2, 3).t())
    hold("w", weight).local.copy_(torch.arange(6.0).view(3, 2))
    assert weight.tolist() == [[0, 1], [2, 3], [4, 5]]


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, device="meta"), "meta device"),
        (torch.zeros(3, 3).to_sparse(), "torch.sparse_coo"),
        (torch.zeros(3, dtype=torch.complex128), "unknown dtype 'torch.complex128'"),
        (torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "F4 packs 4-bit"),
        (torch.zeros(3).as_subclass(Odd), r"test_boxes\.Odd"),
        (nn.UninitializedParameter(), "UninitializedParameter"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tensor, message):
    with pytest.raises(RequestError, match=f"tensor 'a.w'.*{message}"):
        hold("a.w", tensor)


def test_quantised_tensors_are_refused():
    with pytest.warns(UserWarning, match="deprecated"):
        tensor = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    with pytest.raises(RequestError, match=r"tensor 'w' is torch\.qint8"):
        hold("w", tensor)


def test_every_rank_of_a_grid_is_covered_once():
    count = torch.zeros(6, 5, dtype=torch.int)
    for rank, (i, j) in enumerate(product(range(2), range(3))):
        with fake_rank(rank, 6):
            mesh = fresh_mesh(2, 3)
            whole = torch.zeros(6, 5)
            local = eager(whole, [(0, 2, i), (1, 3, j)])
            box = held_box(wrapped(local, mesh, (S(0), S(1)), whole))
        cut_out(count, box).add_(1)
    assert torch.equal(count, torch.ones_like(count))
