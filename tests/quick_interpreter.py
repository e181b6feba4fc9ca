"""Triton's interpreter, without what it works out anew for each operation though it is the same each time.

An operation of a program costs some 50 us there, of which the numbers take 5. The rest makes types, their names, and
the shapes of tensors, and looks through Triton's whole language before each launch. Here that is kept. What is computed
and what is refused stays as it is, with one exception. bfloat16 is as on a GPU: numbers are rounded to it, not cut off,
and tiles of it are multiplied as the numbers that they are, not as whole ones.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

KNOWN_VERSIONS = "3.7.", "3.8.", "3.9."
"""Of Triton. Others are left as they are."""

_numbers_type = interpreter._get_np_dtype
_make_agree = TritonSemantic.binary_op_type_checking_impl
_make_broadcast = TritonSemantic.broadcast_impl_value
_check_overflow = TritonSemantic.binary_op_sanitize_overflow_impl
_patch_language = interpreter._patch_lang
_make_block_type = core.block_type.__init__
_block_types: dict[Any, tuple[Any, int, str]] = {}  # element, shape -> what a type of it has
_members: dict[int, list[tuple[str, Any]]] = {}  # what the interpreter puts in place of a module's builtins
_languages: dict[int, frozenset[int]] = {}  # by the names that a function sees: which modules of the language
_taken: set[int] = set()  # of these, those that the interpreter has taken over in this launch
_AS_THEY_ARE = {int, bool, float, str, type(None), core.tensor, core.dtype, core.pointer_type, core.block_type}
_PLAIN = core.int8, core.int16, core.int32, core.int64, core.uint8, core.uint16, core.uint32, core.uint64, core.float32
_PLAIN_NAMES = frozenset(each.name for each in _PLAIN)
"""Kinds of numbers whose results are of the same kind, whatever is done with two of them, or with one and a number."""

_BUILTIN = core.builtin(lambda _semantic=None: None).__code__


# -- types and shapes --------------------------------------------------------------------------------------------------


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    if type(element_ty) is not core.dtype:  # these cannot be looked up
        _make_block_type(self, element_ty, shape)
        self.sizes = tuple(self.shape.values)
        return
    sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
    key = element_ty, sizes
    if key not in _block_types:
        _make_block_type(self, element_ty, shape)
        _block_types[key] = self.shape, self.numel, self.name
    self.element_ty, self.sizes = element_ty, sizes
    self.shape, self.numel, self.name = _block_types[key]


@cache
def _shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Of a tensor, and how many numbers it has."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(int(np.prod(sizes, dtype=np.int64)))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of(type.sizes)


_tuples_are_equal = core.tuple.__eq__


def _are_equal(self: Any, other: Any) -> Any:
    if type(other) is core.tuple:
        return core.constexpr(self.values == other.values)
    if type(other) is list and all(type(each) is int for each in other):
        return core.constexpr(self.values == other)
    return _tuples_are_equal(self, other)


@cache
def _scalar_numbers_type(scalar: Any) -> Any:
    return _numbers_type(scalar)


def _numbers_type_of(of: Any) -> Any:
    return _scalar_numbers_type(of) if type(of) is core.dtype else _numbers_type(of)


_dtypes_are_equal = core.dtype.__eq__


def _dtypes_equal(self: Any, other: Any) -> bool:
    return self is other or _dtypes_are_equal(self, other)


def _unwrap(value: Any) -> Any:
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, core.constexpr):
        return value.value
    if isinstance(value, list):
        return [_unwrap(each) for each in value]
    if isinstance(value, tuple):
        return core._tuple_create(value, [_unwrap(each) for each in value])
    if isinstance(value, core.tuple):
        return core.tuple([_unwrap(each) for each in value], value.type)  # pyright: ignore[reportArgumentType]
    return value


@cache
def _common_sizes(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """Of two tensors with as many dimensions, one of which is spread; None for others, and where Triton refuses."""
    if len(left) != len(right):
        return None
    pairs = list(zip(left, right, strict=True))
    sizes = tuple([max(pair) for pair in pairs])
    return sizes if sizes in (left, right) and all(1 in pair or len({*pair}) == 1 for pair in pairs) else None


def _spread(handle: Any, type: Any) -> Any:
    return interpreter.TensorHandle(np.broadcast_to(handle.data, type.sizes), handle.dtype)


def _as_it_is(handle: Any, type: Any) -> Any:
    """Where numpy spreads it itself, since the other operand has all places."""
    return handle


def _broadcast(self: Any, left: Any, right: Any, spread: Callable[[Any, Any], Any] = _spread) -> tuple[Any, Any]:
    """Tensors of one shape are left as they are, which they mostly are.

    spread: gives a handle the numbers that its type of so many places has
    """
    ours, theirs = left.type.sizes, right.type.sizes
    if ours == theirs:
        return left, right
    sizes = ours if not theirs else theirs if not ours else _common_sizes(ours, theirs)
    if sizes is None:
        return _make_broadcast(self, left, right)
    return tuple([each if each.type.sizes == sizes else _of_sizes(each, sizes, spread) for each in (left, right)])


def _of_sizes(tensor: Any, sizes: tuple[int, ...], spread: Callable[[Any, Any], Any]) -> Any:
    type = core.block_type(tensor.dtype, list(sizes))
    return core.tensor(spread(tensor.handle, type), type)


def _agree(
    self: Any,
    left: Any,
    right: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    """Both of one kind of numbers and of one shape. Two of the same plain kind have it already."""
    if type(left) is core.tensor is type(right):
        if left.dtype is right.dtype and left.dtype.name in _PLAIN_NAMES:
            return _broadcast(self, left, right, _as_it_is)
    elif arithmetic_check and type(left) is core.tensor and _takes(left.dtype, right):
        return _broadcast(self, left, self.scalar_constant(right, dtype=left.dtype), _as_it_is)
    elif arithmetic_check and type(right) is core.tensor and _takes(right.dtype, left):
        return _broadcast(self, self.scalar_constant(left, dtype=right.dtype), right, _as_it_is)
    return _make_agree(self, left, right, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _takes(dtype: Any, number: Any) -> bool:
    """Whether a number of Python becomes one of that kind beside a tensor of it, and can."""
    if dtype is core.float32:
        return type(number) in (int, float)
    if dtype.name not in _PLAIN_NAMES or type(number) is not int:
        return False
    least, most = _range_of(dtype)
    return least <= number <= most


@cache
def _range_of(dtype: Any) -> tuple[int, int]:
    return dtype.get_int_min_value(), dtype.get_int_max_value()


# -- numbers -----------------------------------------------------------------------------------------------------------


_cast = interpreter.InterpreterBuilder.cast_impl
_multiply_tiles = interpreter.InterpreterBuilder.create_dot


def _rounding_cast(self: Any, src: Any, dst_type: Any) -> Any:
    if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
        return interpreter.TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
    if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
        return _cast(self, src, dst_type)
    # To the nearest; of two that are as near, to the even one. What is no number stays none.
    bits = src.data.view(np.uint32)
    nearest = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    narrow = np.where(np.isnan(src.data), bits >> 16 | 0x40, nearest).astype(np.uint16)
    return interpreter.TensorHandle(narrow, tl.bfloat16)


def _multiply_numbers(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    a, b = (_cast(self, each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each for each in (a, b))
    return _multiply_tiles(self, a, b, d, input_precision, max_num_imprecise_acc)


# -- checks ------------------------------------------------------------------------------------------------------------


def _sanitize(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> None:
    """Whether whole numbers leave their bits. Triton works it out always, and asserts it only in its debug mode."""
    if self.builder.options.debug:
        _check_overflow(self, left, right, operation)


# -- the language ------------------------------------------------------------------------------------------------------


def _take_over(package: Any, _builder: Any, scope: Any) -> None:
    if id(package) not in _members:
        found = [(name, each) for name, each in inspect.getmembers(package) if core.is_builtin(each)]
        _members[id(package)] = [(name, _interpreted(each)) for name, each in found]
    for name, member in _members[id(package)]:
        scope.set_attr(package, name, member)


def _take_language(function: Any) -> Any:
    """For a launch, and for a function that is called within one: what is taken over already is left alone."""
    values = function.__globals__
    if id(values) not in _languages:
        _languages[id(values)] = frozenset(id(each) for each in values.values() if each is tl or each is core)
    asked = _languages[id(values)]
    if asked and asked <= _taken:
        return interpreter._LangPatchScope()
    is_first, scope = not _taken, _patch_language(function)
    _taken.update(asked)
    if is_first:
        restore = scope.restore

        def restore_all() -> None:
            _taken.clear()
            restore()

        scope.restore = restore_all
    return scope


def _interpreted(member: Any) -> Any:
    # What says that it must be given a meaning is given one.
    inner = member.__wrapped__ if getattr(member, "__code__", None) is _BUILTIN else member
    semantic = interpreter.interpreter_semantic

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    return interpreted


def install() -> None:
    """For this process. Before a program of Triton is run."""
    interpreter.InterpreterBuilder.cast_impl = _rounding_cast
    interpreter.InterpreterBuilder.create_dot = _multiply_numbers
    if not triton.__version__.startswith(KNOWN_VERSIONS):
        return
    tl.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor
    core._unwrap_if_constexpr = _unwrap
    core.dtype.sizes = ()  # pyright: ignore[reportAttributeAccessIssue]
    core.dtype.__eq__ = _dtypes_equal  # pyright: ignore[reportAttributeAccessIssue]
    TritonSemantic.binary_op_type_checking_impl = _agree  # pyright: ignore[reportAttributeAccessIssue]
    TritonSemantic.broadcast_impl_value = _broadcast  # pyright: ignore[reportAttributeAccessIssue]
    TritonSemantic.binary_op_sanitize_overflow_impl = _sanitize  # pyright: ignore[reportAttributeAccessIssue]
    interpreter._get_np_dtype = _numbers_type_of
    interpreter._patch_builtin = _take_over
    interpreter._patch_lang = _take_language
    core.tuple.__eq__ = _are_equal
