"""The format in which a sharded weight is gathered, and the operand made from it on arrival.

PyTorch's FSDP2 asks a shard for two things: the data to send, and the parameter of the gathered whole. Ours is only an
autograd edge: it has the master's shape and dtype, so that FP32 gradients flow into it, and owns no memory. GEMMs read
the layer's operand (`precision.linear`).

    GatherFormat         BF16 or FP32 travels; an FP8 layer quantises what arrives, and frees it
    SplitGatherFormat    the same for a weight split over a tensor group: under the scale of the whole weight
    Fp8GatherFormat      each rank quantises BF16(its part of the master); FP8 travels, half the bytes, and is the
                         operand. If a weight is gathered for each pass, its quantised part stays until the masters
                         change

Both give the same numbers, bit for bit, if a part can be quantised separately:

    one scale a tensor (or expert)    follows from the amax of the whole, which `WeightAmaxSync` finds for all weights
                                      with one message a step; with a history it is known beforehand
    128 x 128 blocks                  the blocks' own; the scales travel too. A part must consist of whole blocks, as
                                      parts of a stack of experts do; a weight that is cut otherwise travels in BF16
    row scales                        never: the second copy has scales of its own, one a column of the whole
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from precision import GroupedLinear, Linear
from precision.scaling import step_scale
from trainer.parallel.large import GatherBuffer
from trainer.parallel.mesh import is_large
from trainer.parallel.shard_views import local

NONE = torch.empty(0)
ALIGNED = 4  # elements: compiled code copies operands that do not start at 16 bytes

_foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
_foreach_maximum_ = torch._foreach_maximum_  # pyright: ignore[reportPrivateImportUsage]

Sent = tuple[tuple[Tensor, ...], None]
Arrived = tuple[Tensor, list[Tensor]] | None


class Receiver(Protocol):
    """A layer whose compute weight is gathered."""

    weight: nn.Parameter
    is_sharded: bool

    @property
    def gather_dtype(self) -> torch.dtype:
        """Dtype in which its weight travels."""
        ...

    def receive(self, weight: Tensor) -> list[Tensor]:
        """Take the whole weight. Return tensors made from it that may be freed; none if it is used as it is."""
        ...


class GatherFormat:
    """FSDP's view of a weight: what its shard sends, and what the gathered whole becomes.

    whole: of a large weight. FSDP's message then carries only what accompanies the numbers, or unused bytes.
    """

    def __init__(self, layer: Receiver, ranks: int):
        self._layer, self._shape = layer, layer.weight.shape
        self.whole = GatherBuffer(self._shape) if is_large(self._shape, ranks) else None

    def attach(self) -> None:
        """Attach FSDP's two functions to the layer's shard."""
        self._layer.is_sharded = True
        shard = local(self._layer.weight)
        shard.fsdp_pre_all_gather = self._send  # type: ignore[attr-defined]
        shard.fsdp_post_all_gather = self._arrive  # type: ignore[attr-defined]

    @torch.no_grad()
    def _send(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, policy: object
    ) -> Sent:
        numbers, *beside = sent = self._part(torch.Size([-(-outer_size[0] // mesh.size()), *outer_size[1:]]))
        if not self._has_own_message:
            return sent, None
        assert self.whole is not None
        self.whole.part = numbers
        return tuple(beside) or (numbers.new_empty(ALIGNED),), None

    @property
    def _has_own_message(self) -> bool:
        """Whether the numbers currently travel in a message of their own."""
        return self.whole is not None

    def _part(self, shape: torch.Size) -> tuple[Tensor, ...]:
        """Return what this rank sends: numbers of `shape`, and accompanying tensors."""
        shard = local(self._layer.weight)
        sent = shard.new_empty(shape, dtype=self._layer.gather_dtype)
        sent[: shard.shape[0]].copy_(shard)  # the padding of an uneven cut is never read
        return (sent,)

    @torch.no_grad()
    def _arrive(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Arrived:
        numbers, freed = self._numbers(gathered)
        made = self._receive(numbers)
        if made:
            numbers.untyped_storage().resize_(0)
        # FSDP keeps the first list; numbers freed here are the operand in `unquantised`
        return (_Edge.of(self._shape, dtype, numbers.device), made + freed) if out is None else None

    def _receive(self, numbers: Tensor) -> list[Tensor]:
        return self._layer.receive(numbers)

    def _numbers(self, gathered: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        """Return the whole weight, and the tensors that FSDP must learn to free."""
        if not self._has_own_message:
            return gathered[0][: self._shape[0]], []
        assert self.whole is not None
        return self.whole.numbers, [self.whole.numbers]


class SplitGatherFormat(GatherFormat):
    """The same for one rank's part of a weight (its heads, its vocabulary) with one scale."""

    def __init__(self, layer: Linear | GroupedLinear, mesh: DeviceMesh, sync: WeightAmaxSync):
        super().__init__(layer, mesh.size(mesh.ndim - 1))
        self._fp8_layer, self._agreed, self._row = layer, sync, sync.add(layer, mesh)

    def _part(self, shape: torch.Size) -> tuple[Tensor, ...]:
        if self._fp8_layer.recipe.is_fp8:
            self._agreed.ensure_amaxes()
        return super()._part(shape)

    def _receive(self, numbers: Tensor) -> list[Tensor]:
        given = self._row.scale if self._fp8_layer.recipe.is_fp8 else None
        return self._fp8_layer.receive(numbers, given)


class Fp8GatherFormat(GatherFormat):
    """The same for a weight that is quantised before it is sent.

    freed: between forward and backward pass.
    """

    def __init__(self, layer: Linear | GroupedLinear, mesh: DeviceMesh, sync: WeightAmaxSync, freed: bool):
        super().__init__(layer, mesh.size(mesh.ndim - 1))
        self._fp8_layer, self._agreed, self._freed = layer, sync, freed
        self._row = sync.add(layer, mesh)

    @property
    def _has_own_message(self) -> bool:
        return self.whole is not None and self._fp8_layer.recipe.is_fp8  # which is false in `unquantised`

    def _part(self, shape: torch.Size) -> tuple[Tensor, ...]:
        if not self._fp8_layer.recipe.is_fp8:
            return super()._part(shape)
        self._agreed.ensure_amaxes()
        if self._row.sent is not None:
            return self._row.sent
        sent = self._quantised(shape)
        if self._freed:
            self._row.sent = sent
        return sent

    def _quantised(self, shape: torch.Size) -> tuple[Tensor, ...]:
        """Return this rank's quantised part as bytes of `shape`, and the scales that travel with them."""
        shard = local(self._layer.weight)
        if not shard.shape[0]:
            return (shard.new_empty(shape, dtype=torch.uint8),)
        data, inv = self._fp8_layer.quantize_part(shard, self._row.scale, self._row.amax)
        if shard.shape[0] == shape[0]:
            return data.view(torch.uint8), *((inv.contiguous(),) if self._row.blocks else ())
        sent = shard.new_empty(shape, dtype=torch.uint8)
        sent[: shard.shape[0]].copy_(data.view(torch.uint8))  # the padding of an uneven cut is never read
        return (sent,)

    @torch.no_grad()
    def _arrive(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Arrived:
        if not self._fp8_layer.recipe.is_fp8:
            return super()._arrive(gathered, metadata, dtype, out=out)
        numbers, freed = self._numbers(gathered)
        inv = gathered[-1] if self._row.blocks else self._row.inverse
        made = self._fp8_layer.receive_quantized(numbers, inv)
        return (_Edge.of(self._shape, dtype, numbers.device), made + freed) if out is None else None


def gather_format(layer: Receiver, mesh: DeviceMesh, sync: WeightAmaxSync | None, freed: bool) -> GatherFormat:
    """Return the format of a layer's weight, cut over the last axis of `mesh`. sync: None if no weight is synchronised.
    freed: whether it is gathered again for the backward pass."""
    ranks = mesh.size(mesh.ndim - 1)
    if sync is not None and isinstance(layer, Linear | GroupedLinear):
        count = layer.weight.shape[0]
        # uneven cuts: FSDP needs everything in the padded part's shape, and scales are not
        rows = None if isinstance(layer, GroupedLinear) else count // ranks
        if sync.fp8 and ranks > 1 and layer.recipe.can_quantize_parts(rows, even=count % ranks == 0):
            return Fp8GatherFormat(layer, mesh, sync, freed)
        if layer in sync.split and layer.recipe.is_fp8 and layer.recipe.scales_tensors:
            return SplitGatherFormat(layer, mesh, sync)
    return GatherFormat(layer, ranks)


@dataclass(eq=False)
class _Row:
    """A synchronised weight. start: of its numbers in the common buffers, one, or one an expert of the plan; first: the
    expert that this rank's part begins with; blocks: it has block scales.

    scale, amax: to quantise this rank's part under, and of the whole; inverse: scales of the weight, 0-d, or one for
    each expert of this rank. sent: the quantised part, if it is gathered again before the masters change.
    """

    layer: Linear | GroupedLinear
    shared: nn.Parameter
    start: int
    first: int
    blocks: bool
    scale: Tensor = NONE
    amax: Tensor = NONE
    inverse: Tensor = NONE
    sent: tuple[Tensor, ...] | None = None


class WeightAmaxSync:
    """Amaxes of whole weights that ranks share, and the scales that follow, the same on all ranks.

    They are computed when a weight is first sent after the masters have changed (`forget` marks that): at one place in
    the order of messages on all ranks. The arena receives them as the step's amaxes of weights.

    fp8: whether weights may travel in FP8. ranks: all that have parts of these weights; None: all there are. split:
    layers with only a part of their weight.
    """

    def __init__(self, fp8: bool, ranks: dist.ProcessGroup | None = None) -> None:
        self.fp8, self._ranks = fp8, ranks
        self.split: set[nn.Module] = set()
        self._rows: list[_Row] = []
        self._size, self._known, self._bound = 0, False, False
        self._amax = self._scale = self._inverse = NONE

    def add(self, layer: Linear | GroupedLinear, mesh: DeviceMesh) -> _Row:
        """Add a weight, cut over `mesh`. All weights must be added before the first is sent."""
        slot = layer.weight_slot
        assert slot is not None and not self._bound
        ranks, axis = mesh.size(mesh.ndim - 1), mesh.ndim - 1
        first = min(-(-layer.weight.shape[0] // ranks) * mesh.get_local_rank(axis), layer.weight.shape[0])
        row = _Row(layer, layer.weight, self._size, first, not layer.recipe.scales_tensors)
        self._size += -(-len(slot.names) // ALIGNED) * ALIGNED
        self._rows.append(row)
        return row

    def forget(self) -> None:
        """Mark the amaxes as outdated: the masters change, or a step begins."""
        self._known = False
        for row in self._rows:
            row.sent = None

    @torch.no_grad()
    def ensure_amaxes(self) -> None:
        """Compute the amaxes unless they are current. A collective in that case. The host does not wait."""
        if self._known:
            return
        if not self._bound:
            self._bind()
        self._amax.zero_()
        for row in self._rows:
            shard = local(row.shared)
            if shard.numel():
                torch.linalg.vector_norm(shard, torch.inf, dim=(-2, -1), out=row.amax)
        self._amax.copy_(self._amax.bfloat16())  # rounding preserves order: this is the amax of the rounded weight
        self._amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # the maximum of a number and NaN may be the number
        dist.all_reduce(self._amax, dist.ReduceOp.MAX, group=self._ranks)
        slots = [row.layer.weight_slot for row in self._rows]
        scales = [slot.scale for slot in slots if slot is not None and slot.scale is not None]
        amaxes = [slot.amax for slot in slots if slot is not None and slot.amax is not None]
        assert len(scales) == len(amaxes) == len(slots), "precision.bind(model, ...) has not been called"
        _foreach_copy_(self._views_of(self._scale), scales)
        recipe = self._rows[0].layer.recipe
        self._scale.copy_(step_scale(self._amax, self._scale, recipe.input.max, recipe.scaling, recipe.delayed))
        torch.reciprocal(self._scale, out=self._inverse)
        _foreach_maximum_(amaxes, self._views_of(self._amax))
        self._known = True

    def _views_of(self, numbers: Tensor) -> list[Tensor]:
        """Return views of a common buffer, one a weight, for this rank's experts; each has its own version counter."""
        views = []
        for row in self._rows:
            slot = row.layer.weight_slot
            assert slot is not None
            stop = row.start + slot.part.stop
            views.append(numbers.data[row.start + slot.part.start : stop] if slot.stacked else numbers.data[row.start])
        return views

    def _bind(self) -> None:
        """Allocate the buffers, and each part's views of them."""
        device = local(self._rows[0].shared).device
        self._amax, self._scale, self._inverse = (torch.zeros(self._size, device=device) for _ in range(3))
        views = map(self._views_of, (self._amax, self._scale, self._inverse))
        for row, amax, scale, inverse in zip(self._rows, *views, strict=True):
            if amax.dim():
                part = slice(row.first, row.first + local(row.shared).shape[0])
                amax, scale = amax[part], scale[part]
            row.scale, row.amax, row.inverse = scale, amax, inverse
        self._bound = True


class _Edge(Tensor):
    """Answers FSDP's `torch.as_strided` with a tensor of that shape without memory: the weight that autograd sees."""

    whole: Tensor

    @classmethod
    def of(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _Edge:
        edge = torch.empty(0, device=device).as_subclass(cls)
        edge.whole = torch.zeros((), dtype=dtype, device=device).expand(shape)
        return edge

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Tensor:
        if func is torch.as_strided:
            return args[0].whole
        return super().__torch_function__(func, types, args, kwargs)
