"""Memory that outlives a forward, and memory written where torch does not see it: exact, or refused by name.

State in buffers, weights changed and put back, NumPy views, raw pointers, ``.data``, ``set_``, ``resize_``, storages.
"""

from __future__ import annotations

import copy
import ctypes

import numpy as np
import torch
from torch import Tensor, nn

from tests.shared_hooks.truth import EVERYWHERE, Claim, Claims, Net, truth, vectors

claim = Claims()
TABLE = np.sin(np.arange(8, dtype=np.float32))


@claim.each()
def test_exact_or_refused(claim: Claim) -> None:
    claim.check()


# --- state in buffers and plain tensors


@claim(because="keeps values of this request for the next one in kept")
def cache_in_a_buffer(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    out = net.b(hidden) + net.kept
    net.kept.copy_(hidden)
    return net.c(out)


@claim(because="for the next one in plain")
def cache_in_a_plain_tensor(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    out = net.b(hidden) + net.plain
    net.plain.copy_(hidden)
    return net.c(out)


@claim(because="for the next one in kept")
def cache_in_half_a_buffer(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    net.kept[1] = net.kept[0]
    net.kept[0] = hidden[0]
    return net.c(net.b(hidden) + net.kept[1])


@claim(because="for the next one in kept")
def running_mean(net: Net, x: Tensor) -> Tensor:
    net.kept.mul_(0.9).add_(net.a(x), alpha=0.1)
    return net.c(net.b(x) - net.kept)


@claim(1, 2, because="writes after it to kept")
def scratch_rewritten_before_it_is_read(net: Net, x: Tensor) -> Tensor:
    net.kept.copy_(net.a(x))
    hidden = net.kept * 2
    return net.c(net.b(hidden))


@claim(because="writes to kept")
def scratch_cleared_first(net: Net, x: Tensor) -> Tensor:
    net.kept.zero_()
    net.kept.add_(net.a(x))
    return net.c(net.b(net.kept * 2))


@claim(2, because="writes after it to kept|keeps a value of this request in its own state")
def scratch_read_across_a_cut(net: Net, x: Tensor) -> Tensor:
    net.kept.copy_(net.a(x))
    return net.c(net.b(x) + net.kept)


@claim(because="writes to kept")
def counter(net: Net, x: Tensor) -> Tensor:
    net.kept.add_(1)
    return net.c(net.b(net.a(x)))


def test_batch_statistics_are_refused_by_name() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.c = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.norm.train()
            return self.c(self.norm(self.a(x)))

    found = truth(Norm(), vectors())
    assert not found.wrong and not found.exact
    assert all("norm." in reason for reason in found.refused.values())


def test_an_embedding_that_renormalises_its_weight_is_refused() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.a = nn.Embedding(10, 8, max_norm=0.5), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.table((x.abs() * 3).long().clamp(max=9)[:, :3]))

    found = truth(Table(), vectors())
    assert not found.wrong and not found.exact
    assert all("table.weight" in reason for reason in found.refused.values())


# --- weights changed, and put back


@claim(because=r"b\.weight")
def weights_trained_at_test_time(net: Net, x: Tensor) -> Tensor:
    hidden, before = net.a(x), net.b.weight.detach().clone()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(net.b(hidden.detach()).square().mean(), [net.b.weight])
    with torch.no_grad():
        net.b.weight.sub_(slope)
        hidden = net.b(hidden)
        net.b.weight.copy_(before)
    return net.c(hidden)


@claim(because="other memory")
def weights_replaced_by_data(net: Net, x: Tensor) -> Tensor:
    hidden, before = net.a(x), net.b.weight.data
    net.b.weight.data = before * (1 + hidden.mean())
    hidden = net.b(hidden)
    net.b.weight.data = before
    return net.c(hidden)


@claim(because="other memory")
def weights_replaced_by_set(net: Net, x: Tensor) -> Tensor:
    hidden, before = net.a(x), net.b.weight.detach()
    with torch.no_grad():
        net.b.weight.set_(before * (1 + hidden.mean()))
        hidden = net.b(hidden)
        net.b.weight.set_(before)
    return net.c(hidden)


@claim(because=r"torch does not see writes to b\.weight")
def weights_written_by_numpy(net: Net, x: Tensor) -> Tensor:
    hidden, weight = net.a(x), net.b.weight.detach().numpy()
    before = weight.copy()
    weight += float(hidden.mean())
    hidden = net.b(hidden)
    weight[:] = before
    return net.c(hidden)


@claim(because=r"torch does not see writes to b\.bias")
def weights_written_by_pointer(net: Net, x: Tensor) -> Tensor:
    hidden, before = net.a(x), net.b.bias.detach().clone()
    ctypes.memmove(net.b.bias.data_ptr(), hidden.data_ptr(), 32)
    out = net.b(hidden)
    ctypes.memmove(net.b.bias.data_ptr(), before.data_ptr(), 32)
    return net.c(out)


@claim(because="torch does not see writes to kept")
def buffer_written_by_numpy(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    net.kept.numpy()[:] = hidden.numpy()
    return net.c(net.b(hidden) + net.kept)


@claim(because="torch does not see writes to kept|other memory")
def buffer_written_through_its_storage(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    net.kept.untyped_storage().copy_(hidden.untyped_storage())
    return net.c(net.b(hidden) + net.kept)


@claim(*EVERYWHERE)
def weights_read_by_numpy(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    scale = float(net.b.weight.detach().numpy().mean())
    return net.c(net.b(hidden) * scale)


# --- tensors of the forward, in the hands of code outside torch


@claim("input", 0, because="outside torch")
def numpy_writes_to_a_value(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    hidden.numpy()[:] *= 2
    return net.c(net.b(hidden))


@claim("input", 0, because="outside torch")
def numpy_fills_what_began_as_a_constant(net: Net, x: Tensor) -> Tensor:
    out = torch.empty(2, 8)
    view = out.numpy()
    hidden = net.a(x)
    view[:] = hidden.numpy()
    return net.c(net.b(hidden) + out)


@claim("input", 0, because="outside torch")
def pointer_fills_what_began_as_a_constant(net: Net, x: Tensor) -> Tensor:
    hidden, out = net.a(x), torch.zeros(2, 8)
    ctypes.memmove(out.data_ptr(), hidden.data_ptr(), 64)
    return net.c(net.b(hidden) + out)


@claim(*EVERYWHERE)
def table_from_numpy(net: Net, x: Tensor) -> Tensor:
    hidden, table = net.a(x), torch.from_numpy(np.sin(np.arange(8, dtype=np.float32)))
    return net.c(net.b(hidden + table) * table)


@claim(*EVERYWHERE)
def table_from_a_global_array(net: Net, x: Tensor) -> Tensor:
    table = torch.from_numpy(TABLE)
    return net.c(net.b(net.a(x) + table) * table)


@claim("input", 0, because="no operation made|outside torch")
def data_through_numpy(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    table = torch.from_numpy(np.sin(hidden.numpy()))
    return net.c(net.b(hidden) * table)


@claim("input", 0, because="no operation made|outside torch")
def data_through_a_buffer_of_bytes(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    table = torch.frombuffer(bytearray(hidden.numpy().tobytes()), dtype=torch.float32).view(2, 8)
    return net.c(net.b(hidden) * table)


@claim("input", 0, because="__dlpack")
def dlpack(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    other = torch.from_dlpack(hidden)
    out = net.b(hidden)
    other.mul_(2)
    return net.c(out + hidden)


@claim("input", 0, because="other memory")
def copied_deeply(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    other = copy.deepcopy(hidden)
    return net.c(net.b(hidden) + other)


# --- a tensor object that gets other memory, or more


@claim("input", 0, because="other memory")
def data_of_a_value_replaced(net: Net, x: Tensor) -> Tensor:
    hidden, out = net.a(x), torch.zeros(2, 8)
    out.data = hidden * 2
    return net.c(net.b(hidden) + out)


@claim("input", 0, because="other memory")
def memory_of_a_value_set(net: Net, x: Tensor) -> Tensor:
    hidden, out = net.a(x), torch.empty(0)
    out.set_(hidden * 2)
    return net.c(net.b(hidden) + out)


@claim(*EVERYWHERE)
def resized_before_it_is_filled(net: Net, x: Tensor) -> Tensor:
    hidden, out = net.a(x), torch.empty(0)
    out.resize_(2, 8)
    out.copy_(hidden)
    return net.c(net.b(hidden) + out)


@claim("input", 0, because="made larger")
def resized_by_the_operation_that_fills_it(net: Net, x: Tensor) -> Tensor:
    hidden, out = net.a(x), torch.empty(0)
    torch.mul(hidden, 2, out=out)
    return net.c(net.b(hidden) + out)


# --- operations of somebody else

library = torch.library.Library("isthmus_memory", "DEF")
library.define("write(Tensor x, Tensor y) -> Tensor")


def _write(x: Tensor, y: Tensor) -> Tensor:
    y.numpy()[:] = x.numpy()
    return x * 1


library.impl("write", _write, "CPU")


@claim(*EVERYWHERE)
def writes_that_are_not_declared(net: Net, x: Tensor) -> Tensor:
    hidden, out = net.a(x), torch.zeros(2, 8)
    more = torch.ops.isthmus_memory.write(hidden, out)
    return net.c(net.b(more)) + out


@claim(because="torch does not see writes to kept")
def writes_that_are_not_declared_to_a_buffer(net: Net, x: Tensor) -> Tensor:
    more = torch.ops.isthmus_memory.write(net.a(x), net.kept)
    return net.c(net.b(more)) + net.kept
