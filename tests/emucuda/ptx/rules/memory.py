"""Loads, stores, atomics, address conversions and cp.async."""

from __future__ import annotations

from ..emitter import Emitter, NoRule, part_in, types_in
from ..parser import Instruction, Memory, Operand, Vector
from ..types import U32, U64, Type
from .registry import rule

_SPACES = ("global", "shared", "local", "param", "const")
_WAITING = ("volatile", "acquire", "relaxed")


def space_of(i: Instruction) -> str:
    for part in i.parts[1:]:
        name = part.split("::")[0]
        if name in _SPACES:
            return name
    return "generic"


def check(e: Emitter, address: str, nbytes: int, access: str, space: str) -> None:
    if space in ("global", "generic", "const"):
        e.emit(f"CHECK_GLOBAL({address}, {nbytes}, {access}, {e.site});")
    elif space == "shared":
        e.emit(f"CHECK_SHARED({address}, {nbytes}, {access}, {e.site});")


def _items(operand: Operand) -> tuple[str, ...]:
    if isinstance(operand, Vector):
        return operand.items
    if not isinstance(operand, str):
        raise NoRule(f"operand {operand}")
    return (operand,)


def _begin_access(e: Emitter, i: Instruction, where: Operand, nbytes: int, access: str) -> None:
    """Opens a block in which a_ is the checked address."""
    space = space_of(i)
    e.emit(f"{{ char* a_ = {e.memory(where, space)};")
    volatile = "volatile" in i.parts
    check(e, "a_", nbytes, "kAtomic" if volatile and access == "kRead" and space == "shared" else access, space)
    if nbytes >= 8 and space in ("global", "generic", "shared"):
        e.emit(f"CHECK_ALIGNED(a_, {nbytes}, {e.site});")


@rule("ld", "ldu")
def load(e: Emitter, i: Instruction) -> None:
    *_, ty = types_in(i)
    targets = _items(i.operands[0])
    if space_of(i) != "param" and any(part in _WAITING for part in i.parts):
        e.emit(f"t->rt->yield(t, {e.site});")  # it may wait for another thread
    _begin_access(e, i, i.operands[1], ty.bytes * len(targets), "kRead")
    temporaries = [f"v{k}_" for k in range(len(targets))]  # a target may be the address
    for k, temporary in enumerate(temporaries):
        e.emit(f"{ty.storage} {temporary} = emu::load<{ty.storage}>(a_ + {k * ty.bytes});")
    for target, temporary in zip(targets, temporaries, strict=True):
        e.set(target, f"(int64_t)({ty.value}){temporary}" if ty.is_signed else temporary)
    e.emit("}")


@rule("st")
def store(e: Emitter, i: Instruction) -> None:
    *_, ty = types_in(i)
    sources = _items(i.operands[1])
    _begin_access(e, i, i.operands[0], ty.bytes * len(sources), "kWrite")
    for k, source in enumerate(sources):
        e.emit(f"emu::store<{ty.storage}>(a_ + {k * ty.bytes}, {e.bits(source, ty)});")
    e.emit("}")


@rule("cvta")
def convert_address(e: Emitter, i: Instruction) -> None:
    d, a = i.operands
    if space_of(i) != "shared":
        return e.set(d, e.bits(a, U64))
    if "to" in i.parts:
        return e.set(d, f"shared_offset(t, {e.bits(a, U64)})")
    e.set(d, f"(uint64_t)shared_pointer(t, {e.bits(a, U32)})")


@rule("isspacep")
def is_in_space(e: Emitter, i: Instruction) -> None:
    inside = f"is_shared(t, {e.bits(i.operands[1], U64)})"
    if space_of(i) not in ("shared", "global"):
        raise NoRule("isspacep of this space")
    e.set(i.operands[0], inside if space_of(i) == "shared" else f"!{inside}")


# ---- atomics ----------------------------------------------------------------------------------------------------
def _new_value(e: Emitter, i: Instruction, operation: str, ty: Type, sources: list[Operand]) -> str:
    """The C++ expression for what an atomic stores, given old_."""
    v = e.bits(sources[0], ty)
    if operation == "cas":
        return f"old_ == {v} ? {e.bits(sources[1], ty)} : old_"
    if operation == "exch":
        return v
    if operation in ("and", "or", "xor"):
        return f"old_ {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[operation]} {v}"
    if operation == "inc":
        return f"old_ >= {v} ? 0 : old_ + 1"
    if operation == "dec":
        return f"old_ == 0 || old_ > {v} ? {v} : old_ - 1"
    if ty.lanes == 2:
        return _new_pair(e, operation, ty, v)
    old, value = (
        (f"({ty.value})old_", e.value(sources[0], ty))
        if not ty.is_float
        else (e.float_of("old_", ty), e.value(sources[0], ty))
    )
    if operation == "add":
        return e.to_bits(ty, f"{old} + {value}")
    names = {"min": "lesser", "max": "greater"}
    function = f"{operation}_num" if ty.is_float else names[operation]
    return e.to_bits(ty, f"{function}<{ty.value}>({old}, {value})")


def _new_pair(e: Emitter, operation: str, ty: Type, v: str) -> str:
    halves = []
    for shift in (0, 16):
        old, value = (e.float_of(f"(uint16_t)({x} >> {shift})", ty.lane) for x in ("old_", v))
        result = f"{old} + {value}" if operation == "add" else f"{operation}_num<float>({old}, {value})"
        halves.append(f"(uint32_t){e.to_bits(ty.lane, result)} << {shift}")
    return " | ".join(halves)


@rule("atom", "red")
def atomic(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    operation = part_in(i, ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"))
    if operation is None:
        raise NoRule("an unknown atomic operation")
    target: Operand = "_"
    where, *sources = i.operands
    if i.parts[0] == "atom":
        target, where, *sources = i.operands
    if isinstance(where, Vector) or any(isinstance(s, Vector) for s in sources):
        raise NoRule("vector atomics")
    _begin_access(e, i, where, ty.bytes, "kAtomic")
    new = _new_value(e, i, operation, ty, sources)
    change = f"[&]({ty.storage} old_) -> {ty.storage} {{ return {new}; }}"
    e.emit(f"{ty.storage} before_ = atomic_update<{ty.storage}>(a_, {change});")
    e.set(target, "before_")
    e.emit("}")


# ---- cp.async ---------------------------------------------------------------------------------------------------
@rule("cp")
def copy_async(e: Emitter, i: Instruction) -> None:
    if "bulk" in i.parts or i.parts[1] != "async":
        raise NoRule("bulk copies need sm_90")
    if "commit_group" in i.parts:
        return e.emit("if (checked) t->rt->cp_async_commit(t);")
    if "wait_group" in i.parts:
        return e.emit(f"if (checked) t->rt->cp_async_wait(t, (int){e.bits(i.operands[0], U32)});")
    if "wait_all" in i.parts:
        return e.emit("if (checked) { t->rt->cp_async_commit(t); t->rt->cp_async_wait(t, 0); }")
    if "mbarrier" in i.parts:
        raise NoRule("cp.async with mbarrier")
    to, source, size, *rest = i.operands
    if not isinstance(to, Memory) or not isinstance(source, Memory):
        raise NoRule("operands of cp.async")
    nbytes = int(str(size), 0)
    given = e.bits(rest[0], U32) if rest and not any("cache_hint" in part for part in i.parts) else f"{nbytes}u"
    addresses = f"{e.memory(to, 'shared')}, {e.memory(source, 'global')}"
    e.emit(f"emu::cp_async(t, checked, {addresses}, {nbytes}, (int){given}, {e.site});")


@rule("prefetch", "prefetchu", "discard", "applypriority")
def hint(e: Emitter, i: Instruction) -> None:
    """Nothing that a program can see."""


@rule("createpolicy")
def cache_policy(e: Emitter, i: Instruction) -> None:
    e.set(i.operands[0], "0")
