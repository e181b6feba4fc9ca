"""Products in whole numbers on a CPU: weights stay codes, and inputs are rounded to bytes.

A row's inputs share a float32 scale for each 32 columns. Products of bytes are summed exactly, then scaled and added up
in float32 from the first column to the last, so a row's result depends on that row alone. `reference.py` shows the
arithmetic, `integers.h` how codes lie.
"""

import functools
from ctypes import c_char_p, c_int32, c_int64, c_uint32, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..toolchain import cpp, huge_pages
from .codes import CodeKind, Codes
from .cpu import PANEL_OUTPUTS, NativeCodesLinear, PackedCodes, scales_are_known
from .reference import INPUT_BLOCK, run_columns

SIGN_BITS = 0x80808080
"""With which codes with signs come to lie as codes without."""


@functools.cache
def _library() -> Any:
    library: Any = cpp.library("products/integer_products")
    if not isinstance(library, str):
        library.intarsia_integer_product.argtypes = [c_void_p]
        library.intarsia_integer_rows.argtypes = [c_void_p, c_void_p, c_int64, c_void_p]
        library.intarsia_lay.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int32, c_uint32, c_int32]
        library.intarsia_integers.restype = c_char_p
    return library


def instructions() -> str:
    """How this processor sums products of bytes."""
    return _library().intarsia_integers().decode()


class IntegerCodes(PackedCodes):
    """Weights in fewer bits, in panels, whose codes meet rounded inputs."""

    beside = "scale", "zero", "least", "block_scale", "block_least"

    def __init__(self, codes: Codes, dtype: torch.dtype, biases: Tensor | None = None):
        """codes: [N,K] or [E,N,K]. dtype: of the rows to come, and of results. biases: [E,N]"""
        super().__init__(codes, dtype, biases)
        if codes.scale.shape[-1] == 1:  # one group may have any number of columns, and begin anywhere before the first
            self._call.codes.columns, self._call.codes.offset = self._columns, 0
        self._call.depth = self.inputs

    @staticmethod
    def takes(codes: Codes) -> bool:
        run = run_columns(codes)
        if codes.kind is CodeKind.E4M3 or run is None or not scales_are_known(codes):
            return False
        return codes.least is None or (codes.columns == run and codes.factor is None)

    @functools.cached_property
    def is_padded(self) -> bool:
        """Never: rows of x are put in order and filled up while they are rounded."""
        return False

    @property
    def _columns(self) -> int:
        """Whole blocks."""
        return -(-self.inputs // INPUT_BLOCK) * INPUT_BLOCK

    @functools.cached_property
    def _function(self) -> Any:
        return _library().intarsia_integer_product

    @property
    def _expand(self) -> Any:
        return _library().intarsia_integer_rows

    def _in_order(self, x_RI: Tensor) -> Tensor:
        return x_RI

    def _lay(self, codes: Codes) -> dict[str, Tensor]:
        laid = {"codes": self._runs_of(codes.codes, codes.kind.low_bits, _flipped(codes))}
        if codes.high is not None:
            laid["high"] = self._runs_of(codes.high, codes.kind.high_bits)
        return laid

    def _as_stored(self) -> dict[str, Tensor]:
        kind = self._codes.kind
        stored = {"codes": self._rows_of("codes", kind.low_bits, _flipped(self._codes))}
        return stored | ({"high": self._rows_of("high", kind.high_bits)} if "high" in self._laid else {})

    def _runs_of(self, stored: Tensor, bits: int, flipped: int = 0) -> Tensor:
        """[..,N,bytes] -> [E,panels,words,64] int32"""
        stored = stored.reshape(self.groups, self.outputs, -1).contiguous()
        panels, words = -(-self.outputs // PANEL_OUTPUTS), self._columns * bits // 32
        laid = huge_pages.LASTING.empty((self.groups, panels, words, PANEL_OUTPUTS), torch.int32)
        for rows, to in zip(stored, laid, strict=True):
            sizes = self.outputs, words, bits, flipped
            _library().intarsia_lay(rows.data_ptr(), rows.shape[1], to.data_ptr(), *sizes, False)
        return laid

    def _rows_of(self, name: str, bits: int, flipped: int = 0) -> Tensor:
        """The other way round."""
        laid = self._laid[name]
        stored = torch.empty(self.groups, self.outputs, -(-self.inputs * bits // 8), dtype=torch.uint8)
        for rows, come_from in zip(stored, laid, strict=True):
            sizes = self.outputs, laid.shape[2], bits, flipped
            _library().intarsia_lay(rows.data_ptr(), rows.shape[1], come_from.data_ptr(), *sizes, True)
        return self._with_experts(stored)


def _flipped(codes: Codes) -> int:
    return SIGN_BITS if codes.kind is CodeKind.INT8 else 0


class IntegerCodesLinear(NativeCodesLinear):
    """On a CPU with a C++ compiler."""

    weights: ClassVar[type[Any]] = IntegerCodes

    packed: IntegerCodes

    @classmethod
    def lacks(cls) -> str | None:
        library = _library()
        return f"could not be compiled: {library}" if isinstance(library, str) else super().lacks()
