// AMX in software. A processor without AMX raises SIGILL at its instructions; the handler here does what they say, to
// tiles of the thread's own, and goes on behind them. Semantics, and the conditions of faults, are those of Intel's
// Software Developer's Manual, volume 2 (AMX-TILE, AMX-INT8 and AMX-BF16, palette 1).
//
// What it does not know, and what would fault, is left to whoever handled SIGILL before, as if nobody were here.
// Not modelled: #GP (it is a SIGILL as well), restarts in the middle of a tile (start_row), segment prefixes.

#include <csignal>
#include <cstdint>
#include <cstring>

#include <immintrin.h>
#include <ucontext.h>

namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Tile {
    int rows, row_bytes;  // both 0: not in use
    alignas(64) uint8_t bytes[kRows][kRowBytes];  // beyond its rows and columns anything: nobody can see it

    bool valid() const { return rows != 0; }
};

struct Tiles {
    uint8_t config[64];  // as it was loaded; all 0: none
    Tile tile[kTiles];
};

// The handler runs on the thread that trapped, and never inside malloc: the traps come from kernels only. So it may
// touch thread-local storage, which is allocated at the first access.
thread_local Tiles own;

// ---- decoding: VEX.128.0F38.W0, which all of AMX is

enum Prefix { kNone, k66, kF3, kF2 };

constexpr int key(int opcode, Prefix prefix) { return opcode << 2 | prefix; }

struct Instruction {
    int key;           // opcode and prefix
    int reg, rm, vex;  // fields of ModRM and VEX with their extensions; vex is 0 where it is not used
    bool is_memory, has_sib;
    uint64_t base;    // base + displacement
    uint64_t index;   // index << scale, 0 without one
    uint64_t length;  // bytes
};

uint64_t register_value(const greg_t* regs, int number) {
    static const int kPlaces[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                    REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return static_cast<uint64_t>(regs[kPlaces[number]]);
}

template <class T>
int64_t read_signed(const uint8_t*& at) {
    T value;
    memcpy(&value, at, sizeof value);
    at += sizeof value;
    return value;
}

// Whether the instruction at RIP has the encoding that AMX has.
bool decode(const greg_t* regs, Instruction& out) {
    const auto* const start = reinterpret_cast<const uint8_t*>(regs[REG_RIP]);
    if (start[0] != 0xC4) return false;
    const int extend = ~start[1], last = start[2];  // R, X, B are stored inverted, as is vvvv
    if ((start[1] & 31) != 2 || (last & 0x84) != 0) return false;
    const int modrm = start[4], mod = modrm >> 6;
    const uint8_t* at = start + 5;
    out.key = key(start[3], static_cast<Prefix>(last & 3));
    out.vex = ~last >> 3 & 15;
    out.reg = (modrm >> 3 & 7) | (extend >> 7 & 1) << 3;
    out.rm = (modrm & 7) | (extend >> 5 & 1) << 3;
    out.is_memory = mod != 3;
    out.has_sib = out.is_memory && (modrm & 7) == 4;
    out.base = out.index = 0;
    if (out.is_memory) {
        int base = out.rm;
        if (out.has_sib) {
            const int sib = *at++, index = (sib >> 3 & 7) | (extend >> 6 & 1) << 3;
            base = (sib & 7) | (extend >> 5 & 1) << 3;
            if (index != 4) out.index = register_value(regs, index) << (sib >> 6);
        }
        const bool no_base = mod == 0 && (base & 7) == 5;
        if (!no_base) out.base = register_value(regs, base);
        if (mod == 1) out.base += read_signed<int8_t>(at);
        if (mod == 2 || no_base) out.base += read_signed<int32_t>(at);
        if (no_base && !out.has_sib) out.base += reinterpret_cast<uint64_t>(at);  // relative to the next instruction
    }
    out.length = at - start;
    return true;
}

// ---- configuration. Every operation returns false where the processor would fault.

bool all_zero(const uint8_t* first, const uint8_t* last) {
    while (first != last)
        if (*first++) return false;
    return true;
}

bool load_config(const uint8_t* memory) {
    Tiles next{};
    memcpy(next.config, memory, sizeof next.config);
    const uint8_t* config = next.config;
    if (config[0] > 1) return false;
    if (config[0] == 1) {
        // Byte 1 is start_row; from 16 on bytes per row (u16), from 48 on rows (u8); the rest is reserved.
        if (!all_zero(config + 1, config + 16) || !all_zero(config + 32, config + 48)) return false;
        if (!all_zero(config + 56, config + 64)) return false;
        for (int i = 0; i < kTiles; i++) {
            Tile& tile = next.tile[i];
            tile.row_bytes = config[16 + 2 * i] | config[17 + 2 * i] << 8;
            tile.rows = config[48 + i];
            if (tile.row_bytes > kRowBytes || tile.rows > kRows) return false;
            if ((tile.row_bytes == 0) != (tile.rows == 0)) return false;
        }
    } else {
        memset(next.config, 0, sizeof next.config);
    }
    own = next;
    return true;
}

// ---- tiles and memory

uint8_t* row_at(const Instruction& in, int row) { return reinterpret_cast<uint8_t*>(in.base + row * in.index); }

void load_tile(Tile& tile, const Instruction& in) {
    for (int row = 0; row < tile.rows; row++) memcpy(tile.bytes[row], row_at(in, row), tile.row_bytes);
}

void store_tile(const Tile& tile, const Instruction& in) {
    for (int row = 0; row < tile.rows; row++) memcpy(row_at(in, row), tile.bytes[row], tile.row_bytes);
}

// ---- products

// Whether to (m x n) += left (m x k) x right (k x n) is one; rows of k and n are counted in 4 bytes.
bool can_multiply(const Tile& to, const Tile& left, const Tile& right) {
    if (&to == &left || &to == &right || &left == &right) return false;
    if (!to.valid() || !left.valid() || !right.valid()) return false;
    if (to.row_bytes % 4 || left.row_bytes % 4 || right.row_bytes % 4) return false;
    return to.rows == left.rows && to.row_bytes == right.row_bytes && left.row_bytes == 4 * right.rows;
}

template <class Left, class Right>
void multiply_bytes(Tile& to, const Tile& left, const Tile& right) {
    for (int m = 0; m < to.rows; m++) {
        uint32_t sums[kRowBytes / 4];
        memcpy(sums, to.bytes[m], kRowBytes);
        for (int k = 0; k < right.rows; k++)
            for (int n = 0; n < to.row_bytes / 4; n++)
                for (int i = 0; i < 4; i++)
                    sums[n] += static_cast<Left>(left.bytes[m][4 * k + i]) *
                               static_cast<Right>(right.bytes[k][4 * n + i]);
        memcpy(to.bytes[m], sums, kRowBytes);
    }
}

// Pairs of bf16, each half of them summed by itself from 0. A function of its own, so that no operation is moved to
// where the rounding is another.
[[gnu::noinline]] void multiply_pairs(Tile& to, const Tile& left, const Tile& right) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
    for (int m = 0; m < to.rows; m++) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int k = 0; k < right.rows; k++) {
            int pair;
            memcpy(&pair, left.bytes[m] + 4 * k, sizeof pair);
            const __m512i x = _mm512_set1_epi32(pair), y = _mm512_load_si512(right.bytes[k]);
            const auto first = [](__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); };
            const auto second = [&](__m512i v) { return _mm512_castsi512_ps(_mm512_and_si512(v, upper)); };
            even = _mm512_fmadd_ps(first(x), first(y), even);
            odd = _mm512_fmadd_ps(second(x), second(y), odd);
        }
        _mm512_store_ps(to.bytes[m], _mm512_add_ps(_mm512_load_ps(to.bytes[m]), _mm512_add_ps(even, odd)));
    }
}

void multiply_bf16(Tile& to, const Tile& left, const Tile& right) {
    // Subnormal operands and results are 0, ties go to even, nothing is reported. The return from the signal puts back
    // what the kernel had.
    _mm_setcsr(0x9FC0);
    multiply_pairs(to, left, right);
}

// ---- instructions

bool execute_on_memory(const Instruction& in) {
    if (in.key == key(0x49, kNone) && (in.reg & 7) == 0)
        return load_config(reinterpret_cast<const uint8_t*>(in.base + in.index));
    if (in.key == key(0x49, k66) && (in.reg & 7) == 0) {
        memcpy(reinterpret_cast<void*>(in.base + in.index), own.config, sizeof own.config);
        return true;
    }
    if (!in.has_sib || in.reg >= kTiles || !own.tile[in.reg].valid()) return false;
    switch (in.key) {
        case key(0x4B, kF2):
        case key(0x4B, k66):  // tileloaddt1: the hint changes no result
            load_tile(own.tile[in.reg], in);
            return true;
        case key(0x4B, kF3):
            store_tile(own.tile[in.reg], in);
            return true;
        default:
            return false;
    }
}

bool execute_on_tiles(const Instruction& in) {
    if (in.key == key(0x49, kNone) && in.reg == 0 && in.rm == 0 && in.vex == 0) {
        own = Tiles{};
        return true;
    }
    if (in.reg >= kTiles || in.rm >= kTiles || in.vex >= kTiles) return false;
    Tile& to = own.tile[in.reg];
    if (in.key == key(0x49, kF2) && in.rm == 0 && in.vex == 0 && to.valid()) {
        memset(to.bytes, 0, sizeof to.bytes);
        return true;
    }
    const Tile &left = own.tile[in.rm], &right = own.tile[in.vex];
    if (!can_multiply(to, left, right)) return false;
    switch (in.key) {
        case key(0x5C, kF3): multiply_bf16(to, left, right); return true;
        case key(0x5E, kF2): multiply_bytes<int8_t, int8_t>(to, left, right); return true;
        case key(0x5E, kF3): multiply_bytes<int8_t, uint8_t>(to, left, right); return true;
        case key(0x5E, k66): multiply_bytes<uint8_t, int8_t>(to, left, right); return true;
        case key(0x5E, kNone): multiply_bytes<uint8_t, uint8_t>(to, left, right); return true;
        default: return false;
    }
}

// Executes the instruction at RIP and moves on; false: it is not ours, or it faults.
bool step(greg_t* regs) {
    Instruction in;
    if (!decode(regs, in)) return false;
    if (in.is_memory ? in.vex != 0 || !execute_on_memory(in) : !execute_on_tiles(in)) return false;
    regs[REG_RIP] += in.length;
    return true;
}

// ---- the signal

struct sigaction previous;

void pass_on(int number, siginfo_t* info, void* context) {
    if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {  // a fault cannot be ignored
        signal(number, SIG_DFL);
        raise(number);
    } else if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(number, info, context);
    } else {
        previous.sa_handler(number);
    }
}

void on_illegal_instruction(int number, siginfo_t* info, void* context) {
    greg_t* regs = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    if (!step(regs)) return pass_on(number, info, context);
    while (step(regs)) {  // its neighbours as well: the trap costs more than they do
    }
}

}  // namespace

// Puts the handler in front of the one there is; 0, or -1 as sigaction.
extern "C" int emuamx_install() {
    struct sigaction action {};
    action.sa_sigaction = on_illegal_instruction;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;  // so that raise() in pass_on takes effect at once
    return sigaction(SIGILL, &action, &previous);
}
