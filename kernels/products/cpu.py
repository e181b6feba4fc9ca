"""Products in C++ on a CPU, out of one packed layout: at memory's speed for few rows, at torch's for many.

Each output is summed in one order, from the first input to the last, so a row's result depends on that row alone: not
on how many there are, nor on the number of threads (`cpu_products.cpp`).
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..toolchain import cpp, huge_pages
from ..toolchain.calls import Call
from .codes import Codes, as_bytes
from .protocol import CodesLinear, PackedLinear

PANEL_OUTPUTS = 64
"""As many as lie side by side."""

WORD_BYTES = 4

MOST_KEPT_ROWS = 64
"""Of results that have a place of their own: as decode steps have. Of prompts that are asked about there are more."""

EXPANDED_BYTES = 2**22
"""Of a weight as numbers, for torch."""


class _Codes(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("codes", "scale", "zero", "factor")),
        *((name, c_void_p) for name in ("high", "least", "block_scale", "block_least")),
        *((name, c_int64) for name in ("groups", "blocks")),
        *((name, c_int32) for name in ("code_kind", "scale_kind", "least_kind", "columns", "offset")),
        *((name, c_int32) for name in ("block_groups", "block_offset")),
        ("middle", c_float),
        ("divides", c_int32),
    ]


class _Product(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "packed", "bias", "out", "first_row", "row_of", "order")),
        *((name, c_int64) for name in ("rows", "x_stride")),
        *((name, c_int32) for name in ("groups", "outputs", "depth", "kind", "out_kind")),
        ("codes", _Codes),
    ]


@functools.cache
def _library() -> Any:
    library: Any = cpp.library("products/cpu_products")
    if not isinstance(library, str):
        library.intarsia_pack.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int32]
        library.intarsia_combine.argtypes = [c_void_p] * 4 + [c_int64] * 3 + [c_int32]
        library.intarsia_lay_bytes.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64]
        library.intarsia_expand.argtypes = [c_void_p, c_void_p, c_int64, c_void_p]
        library.intarsia_product.argtypes = [c_void_p]
        library.intarsia_unpack.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int32]
    return library


class PackedWeights:
    """Weights [G,outputs,inputs] of one or more groups, packed."""

    _kept: Tensor | None = None  # the latest results, if the next ones are to lie there

    def __init__(self, weights: Tensor | Sequence[Tensor], biases: Tensor | None = None):
        """weights: or parts [outputs,inputs] of a single one, which lie one below the other. biases: [G,outputs]"""
        groups = [[weight] for weight in weights] if isinstance(weights, Tensor) else [weights]
        some = groups[0][0]
        self.groups, self.outputs, self.inputs = len(groups), sum(map(len, groups[0])), some.shape[1]
        self.dtype = self.out_dtype = some.dtype
        self._steps = -(-self.inputs * some.itemsize // WORD_BYTES)
        group_words = -(-self.outputs // PANEL_OUTPUTS) * self._steps * PANEL_OUTPUTS
        self._words = huge_pages.LASTING.empty((self.groups, group_words), torch.int32)
        self._biases = None if biases is None else biases.to(self.dtype).contiguous()
        for parts, words in zip(groups, self._words, strict=True):
            self._pack(parts, words.data_ptr())
        self._call = _Product(
            packed=self._words.data_ptr(),
            bias=None if self._biases is None else self._biases.data_ptr(),
            groups=self.groups,
            outputs=self.outputs,
            depth=self._steps * WORD_BYTES // some.itemsize,
            kind=self._kind,
            out_kind=self._kind,
        )

    def _pack(self, parts: Sequence[Tensor], address: int) -> None:
        if any(len(part) % PANEL_OUTPUTS for part in parts[:-1]):
            parts = [torch.cat(list(parts))]
        for part in parts:
            part = part if part.stride(1) == 1 else part.contiguous()
            _library().intarsia_pack(part.data_ptr(), part.stride(0), address, *part.shape, self._kind)
            address += len(part) * self._steps * WORD_BYTES

    @functools.cached_property
    def is_padded(self) -> bool:
        """Whether rows of x get a zero more for a product: words of two numbers, and the last one lacks its second."""
        return self.inputs != self._call.depth

    @property
    def _kind(self) -> int:
        return cpp.KINDS[self.dtype]

    @functools.cached_property
    def _function(self) -> Any:
        return _library().intarsia_product

    def widen(self) -> None:
        """Results are float32 from now on, as they are summed. Those of one product lie where the next one's will: 32
        rows of 262,144 are 34 MB, which the system takes 8 ms to give anew."""
        self.out_dtype = torch.float32
        self._call.out_kind = cpp.KINDS[self.out_dtype]
        self._kept = torch.empty(0, self.outputs)

    def product(self, x_RI: Tensor) -> Tensor:
        """Of every row with the first group's weight. Returns [R,outputs]."""
        return self._run(x_RI, x_RI.shape[0])  # `len` of a tensor is Python's, and takes ten times as long

    def torch_product(self, x_RI: Tensor) -> Tensor:
        """The same by torch, of some outputs after the others: their weights, as numbers, stay in the caches."""
        out = x_RI.new_empty(len(x_RI), self.outputs)
        step = max(1, EXPANDED_BYTES // (self.inputs * self.dtype.itemsize * PANEL_OUTPUTS)) * PANEL_OUTPUTS
        for start in range(0, self.outputs, step):
            here = slice(start, min(start + step, self.outputs))
            weight, some = self.rows(torch.arange(here.start, here.stop)), out[:, here]
            if self._biases is None:
                torch.mm(x_RI, weight.T, out=some)
            else:
                torch.addmm(self._biases[0, here], x_RI, weight.T, out=some)
        return out.to(self.out_dtype)

    def call(self) -> Call:
        """The same as `product`, as one of a `CallList`. To be set: x, out, rows, x_stride."""
        assert not self.is_padded, "a row of x is as long as the packed weight"
        return Call(self._function, _Product.from_buffer_copy(self._call))

    def grouped_product(self, x_RI: Tensor, first_row: Tensor, row_of: Tensor | None = None) -> Tensor:
        """Rows first_row[g] to first_row[g + 1] of the result [N,outputs] are those of group g.

        first_row: [G+1] int64, from 0 to N. row_of: [N] int64: which row of x each of them is; None: the same
        """
        count = len(x_RI) if row_of is None else len(row_of)
        return self._run(x_RI, count, first_row.data_ptr(), None if row_of is None else row_of.data_ptr())

    def product_of_each(self, x_TGI: Tensor) -> Tensor:
        """Each token has a row for each group, as for each head. Returns [T,G,outputs]."""
        tokens, groups, _ = x_TGI.shape
        row_of = torch.arange(tokens * groups).view(tokens, groups).T.flatten()
        first_row = torch.arange(groups + 1) * tokens
        out = self.grouped_product(x_TGI.flatten(0, 1), first_row, row_of)
        return out.view(groups, tokens, self.outputs).transpose(0, 1)

    def _run(self, x_RI: Tensor, count: int, first_row: int | None = None, row_of: int | None = None) -> Tensor:
        assert x_RI.is_cpu, "C++ reads the host's memory"
        call = self._call
        if self.is_padded:
            x_RI = F.pad(x_RI, (0, call.depth - self.inputs))
        if x_RI.stride(1) != 1:
            x_RI = x_RI.contiguous()
        out = self._out_of(count)
        call.x, call.out, call.rows, call.x_stride = x_RI.data_ptr(), out.data_ptr(), count, x_RI.stride(0)
        call.first_row, call.row_of = first_row, row_of
        self._function(ctypes.byref(call))
        return out

    def _out_of(self, rows: int) -> Tensor:
        """[R,outputs], which may hold anything."""
        if self._kept is None or rows > MOST_KEPT_ROWS:
            return torch.empty(rows, self.outputs, dtype=self.out_dtype)
        if len(self._kept) < rows:
            self._kept = torch.empty(rows, self.outputs, dtype=self.out_dtype)
        return self._kept[:rows]

    def rows(self, numbers: Tensor, group: int = 0) -> Tensor:
        """Rows [N,inputs] of a group's weight as it was, by their numbers [N]."""
        numbers = numbers.to(torch.int64).contiguous()
        out = torch.empty(len(numbers), self.inputs, dtype=self.dtype)
        words = self._words[group].data_ptr()
        _library().intarsia_unpack(words, numbers.data_ptr(), len(numbers), out.data_ptr(), self.inputs, self._kind)
        return out


SCALE_KINDS = {
    torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.uint8: 4,
    torch.float8_e8m0fnu: 4, torch.int8: 5,
}  # fmt: skip
"""As `decode.h` counts them."""


class PackedCodes(PackedWeights):
    """Weights in fewer bits, in panels: a thread decodes a part of one just before its rows meet it."""

    beside: ClassVar[tuple[str, ...]] = "scale", "zero", "high", "least", "block_scale", "block_least"
    """Of `Codes`, what lies beside its codes: of each column, group or block, 64 outputs side by side."""

    def __init__(self, codes: Codes, dtype: torch.dtype, biases: Tensor | None = None):
        """codes: [N,K] or [E,N,K]. dtype: of the rows to come, and of results. biases: [E,N]"""
        self.groups, self.outputs, self.inputs = (1, *codes.shape)[-3:]
        self.dtype = self.out_dtype = dtype
        self.order = codes.order
        self._laid = self._lay(codes)
        for name in self.beside:
            tensor = getattr(codes, name)
            if tensor is not None:
                self._laid[name] = huge_pages.LASTING.moved(self._in_panels(as_bytes(tensor)).transpose(2, 3))
        if codes.factor is not None:
            self._laid["factor"] = huge_pages.LASTING.moved(self._in_panels(codes.factor.unsqueeze(-1)))
        self._biases = None if biases is None else biases.to(dtype).contiguous()
        self._codes = codes.without_numbers()
        odd = self.inputs % 2 if dtype == torch.bfloat16 else 0
        self._call = _Product(
            bias=_address(self._biases),
            order=_address(self.order),
            groups=self.groups,
            outputs=self.outputs,
            depth=self.inputs + odd,
            kind=self._kind,
            out_kind=self._kind,
            codes=_Codes(
                **{name: tensor.data_ptr() for name, tensor in self._laid.items()},
                groups=codes.scale.shape[-1],
                blocks=0 if codes.block_scale is None else codes.block_scale.shape[-1],
                code_kind=codes.kind,
                scale_kind=SCALE_KINDS[codes.scale.dtype],
                least_kind=0 if codes.least is None else SCALE_KINDS[codes.least.dtype],
                block_groups=codes.block_groups,
                block_offset=codes.block_offset,
                columns=codes.columns,
                offset=codes.offset,
                middle=float(codes.middle),
                divides=codes.divides,
            ),
        )

    @staticmethod
    def takes(codes: Codes) -> bool:
        return codes.columns % 2 == 0 and codes.offset % 2 == 0 and scales_are_known(codes)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._laid.values())

    def codes(self) -> Codes:
        """What it was made of."""
        laid = self._laid
        beside = {
            name: self._from_panels(laid[name].transpose(2, 3)).view(getattr(self._codes, name).dtype)
            for name in self.beside
            if name in laid
        }
        factor = self._from_panels(laid["factor"]).squeeze(-1) if "factor" in laid else None
        return replace(self._codes, factor=factor, **self._as_stored(), **beside)

    def _lay(self, codes: Codes) -> dict[str, Tensor]:
        """Codes as products read them: columns in pairs, see `decode.h`."""
        stored = codes.codes.reshape(self.groups, self.outputs, -1).contiguous()
        odd = -codes.shape[-1] % 2  # of eight bits only
        panels, size_bytes = -(-self.outputs // PANEL_OUTPUTS), stored.shape[-1] + odd
        laid = huge_pages.LASTING.empty((self.groups, panels, size_bytes, PANEL_OUTPUTS), torch.uint8)
        for rows, to in zip(stored, laid, strict=True):
            sizes = rows.shape[1], to.data_ptr(), self.outputs, size_bytes
            _library().intarsia_lay_bytes(rows.data_ptr(), *sizes)
        return {"codes": laid}

    def _as_stored(self) -> dict[str, Tensor]:
        """The other way round."""
        raw = self._laid["codes"].transpose(2, 3)
        return {"codes": self._from_panels(raw)[..., : self.inputs * self._codes.kind.low_bits // 8]}

    def rows(self, numbers: Tensor, group: int = 0) -> Tensor:
        assert group == 0, "rows are of the first group"
        numbers = numbers.to(torch.int64).contiguous()
        out = torch.empty(len(numbers), self._call.depth, dtype=self.dtype)
        self._expand(ctypes.byref(self._call), numbers.data_ptr(), len(numbers), out.data_ptr())
        out = out[:, : self.inputs]
        return out if self.order is None else torch.empty_like(out).index_copy_(1, self.order, out)

    @property
    def _expand(self) -> Any:
        return _library().intarsia_expand

    def _run(self, x_RI: Tensor, count: int, first_row: int | None = None, row_of: int | None = None) -> Tensor:
        return super()._run(self._in_order(x_RI), count, first_row, row_of)

    def _in_order(self, x_RI: Tensor) -> Tensor:
        return x_RI if self.order is None else x_RI[:, self.order]

    @functools.cached_property
    def is_padded(self) -> bool:
        """Whether rows of x get a zero more, or are put into another order, for a product."""
        return self.order is not None or super().is_padded

    def _in_panels(self, tensor: Tensor) -> Tensor:
        """[..,N,X] -> [E,panels,64,X]"""
        grouped = tensor if tensor.dim() == 3 else tensor.unsqueeze(0)
        return F.pad(grouped, (0, 0, 0, -self.outputs % PANEL_OUTPUTS)).unflatten(1, (-1, PANEL_OUTPUTS))

    def _from_panels(self, tensor: Tensor) -> Tensor:
        """[E,panels,64,X] -> [..,N,X]"""
        return self._with_experts(tensor.flatten(1, 2)[:, : self.outputs].contiguous())

    def _with_experts(self, tensor: Tensor) -> Tensor:
        """[E,..] -> [..] where there is one weight without experts."""
        return tensor if self._codes.codes.dim() == 3 else tensor[0]


def scales_are_known(codes: Codes) -> bool:
    """Whether C++ reads such numbers."""
    return {scale.dtype for scale in (codes.scale, codes.least) if scale is not None} <= SCALE_KINDS.keys()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def vectors() -> str:
    """What the processor's vectors are, as far as products use them."""
    named = _library().intarsia_vectors
    named.restype = c_char_p
    return named().decode()


def has_matrix_units() -> bool:
    """Whether products of bfloat16 are those of matrix units (AMX)."""
    return bool(_library().intarsia_has_matrix_units())


def combine(x_ND: Tensor, row_of: Tensor, shares: Tensor) -> Tensor:
    """Rows of x, added up by their shares in float32. row_of [R,K] int64, shares [R,K]. Returns [R,D]."""
    shares, row_of = shares.float().contiguous(), row_of.contiguous()
    out = x_ND.new_empty(len(row_of), x_ND.shape[1])
    pointers = [tensor.data_ptr() for tensor in (x_ND, row_of, shares, out)]
    _library().intarsia_combine(*pointers, *row_of.shape, x_ND.shape[1], cpp.KINDS[x_ND.dtype])
    return out


class NativeLinear(PackedLinear):
    """The default on a CPU with a C++ compiler."""

    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset({torch.float32, torch.bfloat16})
    has_neighbours: ClassVar[bool] = True

    packed: PackedWeights

    @classmethod
    def lacks(cls) -> str | None:
        library = _library()
        return f"could not be compiled: {library}" if isinstance(library, str) else None

    def pack(self, weight: Any) -> None:
        """weight: [outputs,inputs], or parts of it, which lie one below the other"""
        parts = [weight] if isinstance(weight, Tensor) else weight
        self.packed = PackedWeights(parts, None if self.bias is None else self.bias.unsqueeze(0))

    def lend(self, linear: nn.Linear) -> None:
        self.settle()
        module: Any = linear
        del module._parameters["weight"]
        module.__class__ = type(self)
        module.packed, module.dtype = self.packed, self.dtype
        module.torch_from_rows = self.torch_from_rows

    def rows(self, numbers: Tensor) -> Tensor:
        return self.packed.rows(numbers) if self.held is None else self.held[numbers]

    @property
    def outputs(self) -> int:
        return self.packed.outputs if self.held is None else self.held.shape[0]

    def forward(self, input: Tensor) -> Tensor:
        if self.held is not None:
            assert self.is_left_out, "settle it first"
            return input.new_zeros(*input.shape[:-1], self.outputs)
        rows = input.flatten(0, -2) if input.dim() != 2 else input
        packed, is_few = self.packed, rows.shape[0] < self.torch_from_rows
        out = packed.product(rows) if is_few else packed.torch_product(rows)
        return out if rows is input else out.view(*input.shape[:-1], packed.outputs)


class NativeCodesLinear(CodesLinear, NativeLinear):
    """On a CPU with a C++ compiler. The results have the bits of those with expanded weights."""

    weights = PackedCodes

    def rows(self, numbers: Tensor) -> Tensor:
        return self.packed.rows(numbers) if self.held is None else self.held.rows_at(numbers).numbers(self.dtype)


class PackedEmbedding(nn.Embedding):
    """An `nn.Embedding` that looks its rows up in the packed weight of a linear: the output's, so that there is one of
    it, or that of a linear which nothing else uses."""

    output: PackedLinear

    def forward(self, input: Tensor) -> Tensor:
        return self.output.rows(input.flatten()).view(*input.shape, -1)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Its dtype and shape, for code that asks; there are no numbers to compute with."""
        return torch.empty(self.output.outputs, self.embedding_dim, dtype=self.output.dtype, device="meta")
