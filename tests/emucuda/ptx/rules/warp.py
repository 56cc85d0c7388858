"""Operations of a whole warp, and barriers."""

from __future__ import annotations

from ..emitter import Emitter, NoRule, part_in, types_in
from ..parser import Instruction, Pair
from ..types import B32, PRED, U32
from .registry import rule


@rule("shfl")
def shuffle(e: Emitter, i: Instruction) -> None:
    if "sync" not in i.parts:
        raise NoRule("shfl without .sync")
    operation = {"up": "kShflUp", "down": "kShflDown", "bfly": "kShflXor", "idx": "kShflIdx"}[i.parts[2]]
    d, a, b, c, mask = i.operands
    target, predicate = (d.first, d.second) if isinstance(d, Pair) else (d, "_")
    inputs = ", ".join(e.bits(x, B32) for x in (a, b, c, mask))
    e.emit("{ bool p_;")
    e.set(target, f"shfl(t, {operation}, {inputs}, &p_, {e.site})")
    if predicate != "_":
        e.set(predicate, "p_")
    e.emit("}")


@rule("vote")
def vote(e: Emitter, i: Instruction) -> None:
    d, predicate, mask = i.operands
    e.emit(f"{{ uint32_t n_, b_ = vote(t, {e.bits(predicate, PRED)}, {e.bits(mask, B32)}, &n_, {e.site});")
    e.set(d, {"ballot": "b_", "any": "b_ != 0", "all": "b_ == n_", "uni": "b_ == 0 || b_ == n_"}[i.parts[2]])
    e.emit("}")


@rule("activemask")
def active_lanes(e: Emitter, i: Instruction) -> None:
    """Any set of lanes that holds the caller is a legal answer: the smallest one finds code that hopes for more."""
    e.set(i.operands[0], "1u << t->lane")


@rule("match")
def match(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    d, value, mask = i.operands
    target, predicate = (d.first, d.second) if isinstance(d, Pair) else (d, "_")
    operation = "kMatchAny" if "any" in i.parts else "kMatchAll"
    e.emit("{ bool p_;")
    e.set(target, f"match(t, {operation}, {e.bits(value, ty)}, {e.bits(mask, B32)}, &p_, {e.site})")
    if predicate != "_":
        e.set(predicate, "p_")
    e.emit("}")


@rule("redux")
def reduce(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    name = i.parts[2].capitalize() + ("S" if ty.is_signed and i.parts[2] in ("min", "max") else "")
    d, value, mask = i.operands
    e.set(d, f"redux(t, kRedux{name}, {e.bits(value, B32)}, {e.bits(mask, B32)}, {e.site})")


@rule("bar", "barrier")
def barrier(e: Emitter, i: Instruction) -> None:
    operands = list(i.operands)
    if "warp" in i.parts:
        return e.emit(f"t->rt->warp(t, kSyncWarp, {e.bits(operands[0], B32)}, {e.site});")
    if "cluster" in i.parts:
        raise NoRule("clusters need sm_90")
    if "red" in i.parts:
        return _barrier_reduce(e, i)
    name = e.bits(operands[0], U32)
    count = e.bits(operands[1], U32) if len(operands) > 1 else "0"
    function = "barrier_arrive" if "arrive" in i.parts else "barrier"
    e.emit(f"t->rt->{function}(t, (int){name}, (int){count}, {e.site});")


def _barrier_reduce(e: Emitter, i: Instruction) -> None:
    d, name, *rest = i.operands
    count = e.bits(rest[0], U32) if len(rest) > 1 else "0"
    operation = part_in(i, ("popc", "and", "or"))
    threads = f"(int){count}" if count != "0" else "(int)(t->ntid.x * t->ntid.y * t->ntid.z)"
    call = f"t->rt->barrier_reduce(t, (int){e.bits(name, U32)}, (int){count}, {e.bits(rest[-1], PRED)}, {e.site})"
    e.set(d, {"popc": call, "and": f"(int){call} == {threads}", "or": f"{call} != 0"}[operation or ""])


@rule("membar", "fence", "griddepcontrol", "setmaxnreg")
def nothing_to_do(e: Emitter, i: Instruction) -> None:
    """Memory is strongly ordered here, and grids run one after the other."""


@rule("nanosleep")
def sleep(e: Emitter, i: Instruction) -> None:
    e.emit(f"t->rt->yield(t, {e.site});")
