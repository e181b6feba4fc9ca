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

KNOWN_VERSION = "3.9."
"""Of Triton. Another one is left as it is."""

_numbers_type = interpreter._get_np_dtype
_make_broadcast = TritonSemantic.broadcast_impl_value
_check_overflow = TritonSemantic.binary_op_sanitize_overflow_impl
_patch_language = interpreter._patch_lang
_make_block_type = core.block_type.__init__
_block_types: dict[Any, tuple[Any, int, str]] = {}  # element, shape -> what a type of it has
_members: dict[int, list[tuple[str, Any]]] = {}  # what the interpreter puts in place of a module's builtins
_languages: dict[int, frozenset[int]] = {}  # by the names that a function sees: which modules of the language
_taken: set[int] = set()  # of these, those that the interpreter has taken over in this launch
_BUILTIN = core.builtin(lambda _semantic=None: None).__code__


# -- types and shapes --------------------------------------------------------------------------------------------------


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    if type(element_ty) is not core.dtype:  # these cannot be looked up
        _make_block_type(self, element_ty, shape)
        return
    sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
    key = element_ty, sizes
    if key not in _block_types:
        _make_block_type(self, element_ty, shape)
        _block_types[key] = self.shape, self.numel, self.name
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _block_types[key]


@cache
def _shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Of a tensor, and how many numbers it has."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(int(np.prod(sizes, dtype=np.int64)))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of(tuple(type.shape) if type.is_block() else ())


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


def _unwrap(value: Any) -> Any:
    if type(value) is int:
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


def _broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Tensors of one shape are left as they are, which they mostly are."""
    is_block = left.type.is_block()
    if is_block == right.type.is_block() and (not is_block or left.type.shape.values == right.type.shape.values):
        return left, right
    return _make_broadcast(self, left, right)


# -- numbers -----------------------------------------------------------------------------------------------------------


_cast = interpreter.InterpreterBuilder.cast_impl
_multiply_tiles = interpreter.InterpreterBuilder.create_dot


def _rounding_cast(self: Any, src: Any, dst_type: Any) -> Any:
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
    if not triton.__version__.startswith(KNOWN_VERSION):
        return
    tl.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor
    core._unwrap_if_constexpr = _unwrap
    TritonSemantic.broadcast_impl_value = _broadcast  # pyright: ignore[reportAttributeAccessIssue]
    TritonSemantic.binary_op_sanitize_overflow_impl = _sanitize  # pyright: ignore[reportAttributeAccessIssue]
    interpreter._get_np_dtype = _numbers_type_of
    interpreter._patch_builtin = _take_over
    interpreter._patch_lang = _take_language
    core.tuple.__eq__ = _are_equal
