//! Four lanes with NEON, and the dot-product extension where the machine has it.

use std::arch::aarch64::*;
use std::arch::asm;

use half::f16;

use super::{Kernel, Simd};

/// Proof that the machine has NEON, and the dot-product extension if `DOTPROD`.
#[derive(Clone, Copy)]
pub(crate) struct Neon<const DOTPROD: bool>(());

/// Runs `kernel`, compiled for NEON.
///
/// # Safety
/// The machine has NEON.
#[target_feature(enable = "neon")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon::<false>(()))
}

/// Runs `kernel`, compiled for NEON with dot products.
///
/// # Safety
/// The machine has NEON and the dot-product extension.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn run_dotprod<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon::<true>(()))
}

/// Safe methods, each one expression of intrinsics on values.
macro_rules! methods {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty { $body:expr })*) => { $(
        #[inline(always)]
        fn $name(self, $($arg: $type),*) -> $result {
            // SAFETY: a value of `Self` proves the instruction set; nothing else is asked.
            unsafe { $body }
        }
    )* };
}

/// Unsafe methods, each one expression of intrinsics on memory.
macro_rules! memory_methods {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty { $body:expr })*) => { $(
        #[inline(always)]
        unsafe fn $name(self, $($arg: $type),*) -> $result {
            // SAFETY: a value of `Self` proves the instruction set; the caller promises the memory, and the access is by bytes or unaligned.
            unsafe { $body }
        }
    )* };
}

/// Four f16 to f32. In assembly, as the intrinsic is younger than the compiler that we promise.
#[inline(always)]
fn widen(half: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: the instruction is in every aarch64 with NEON, and touches nothing but its registers.
    unsafe {
        asm!("fcvtl {wide:v}.4s, {half:v}.4h", wide = out(vreg) wide, half = in(vreg) half, options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// Four f32 to f16, to nearest even.
#[inline(always)]
fn narrow(wide: float32x4_t) -> uint16x4_t {
    let half: uint16x4_t;
    // SAFETY: the instruction is in every aarch64 with NEON, and touches nothing but its registers.
    unsafe {
        asm!("fcvtn {half:v}.4h, {wide:v}.4s", half = out(vreg) half, wide = in(vreg) wide, options(pure, nomem, nostack, preserves_flags));
    }
    half
}

impl<const DOTPROD: bool> Simd for Neon<DOTPROD> {
    const LANES: usize = 4;
    const DOT_VECTORS: usize = 4;
    const SUM_VECTORS: usize = 4;
    const TILE_ROWS: usize = 8;
    const ROW_BIAS: i32 = 0;

    type F = float32x4_t;
    type I = uint32x4_t;

    memory_methods! {
        load(p: *const f32) -> float32x4_t { vreinterpretq_f32_u8(vld1q_u8(p.cast())) }
        store(p: *mut f32, v: float32x4_t) -> () { vst1q_u8(p.cast(), vreinterpretq_u8_f32(v)) }
        load_f16(p: *const f16) -> float32x4_t { widen(vreinterpret_u16_u8(vld1_u8(p.cast()))) }
        store_f16(p: *mut f16, v: float32x4_t) -> () { vst1_u8(p.cast(), vreinterpret_u8_u16(narrow(v))) }
        load_i(p: *const u32) -> uint32x4_t { vreinterpretq_u32_u8(vld1q_u8(p.cast())) }
        reduce_add4(v: [float32x4_t; 4], p: *mut f32) -> () {{
            let sums = vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
            vst1q_u8(p.cast(), vreinterpretq_u8_f32(sums))
        }}
    }

    methods! {
        splat(x: f32) -> float32x4_t { vdupq_n_f32(x) }
        add(a: float32x4_t, b: float32x4_t) -> float32x4_t { vaddq_f32(a, b) }
        sub(a: float32x4_t, b: float32x4_t) -> float32x4_t { vsubq_f32(a, b) }
        mul(a: float32x4_t, b: float32x4_t) -> float32x4_t { vmulq_f32(a, b) }
        div(a: float32x4_t, b: float32x4_t) -> float32x4_t { vdivq_f32(a, b) }
        fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t { vfmaq_f32(c, a, b) }
        max(a: float32x4_t, b: float32x4_t) -> float32x4_t { vmaxq_f32(a, b) }
        min(a: float32x4_t, b: float32x4_t) -> float32x4_t { vminq_f32(a, b) }
        round(v: float32x4_t) -> float32x4_t { vrndnq_f32(v) }
        scale_pow2(v: float32x4_t, n: float32x4_t) -> float32x4_t {{
            let exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
            vmulq_f32(v, vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent)))
        }}
        // Cleared where x is below; a comparison with NaN is false.
        zero_below(v: float32x4_t, x: float32x4_t, limit: float32x4_t) -> float32x4_t {
            vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), vcltq_f32(x, limit)))
        }
        reduce_add(v: float32x4_t) -> f32 { vaddvq_f32(v) }
        reduce_max(v: float32x4_t) -> f32 { vmaxvq_f32(v) }
        splat_i(x: u32) -> uint32x4_t { vdupq_n_u32(x) }
        and_i(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t { vandq_u32(a, b) }
        sub_i(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t { vsubq_u32(a, b) }
        shift_right_4(v: uint32x4_t) -> uint32x4_t { vshrq_n_u32::<4>(v) }
        to_f32(v: uint32x4_t) -> float32x4_t { vcvtq_f32_s32(vreinterpretq_s32_u32(v)) }
    }

    #[inline(always)]
    fn prefetch(self, p: *const f16) {
        // SAFETY: the instruction is a hint that no address makes fault.
        unsafe { asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(readonly, nostack, preserves_flags)) };
    }
    #[inline(always)]
    fn dot4(self, acc: uint32x4_t, rows: uint32x4_t, q: uint32x4_t) -> uint32x4_t {
        if DOTPROD {
            let mut sum = acc;
            // SAFETY: a value of this type with DOTPROD proves the extension; the instruction touches nothing but its registers.
            unsafe {
                asm!(
                    ".arch_extension dotprod",
                    "sdot {sum:v}.4s, {rows:v}.16b, {q:v}.16b",
                    sum = inout(vreg) sum,
                    rows = in(vreg) rows,
                    q = in(vreg) q,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            return sum;
        }
        // SAFETY: a value of `Self` proves NEON; nothing else is asked.
        unsafe {
            let (rows, q) = (vreinterpretq_s8_u32(rows), vreinterpretq_s8_u32(q));
            let low = vmull_s8(vget_low_s8(rows), vget_low_s8(q));
            let high = vmull_high_s8(rows, q);
            // Sums of pairs fit in 32 bits only after the second widening: 4 * 128 * 127 exceeds 16 bits.
            let pairs = vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
            vreinterpretq_u32_s32(vaddq_s32(vreinterpretq_s32_u32(acc), pairs))
        }
    }
    #[inline(always)]
    fn dot4_nibbles(self, acc: uint32x4_t, rows: uint32x4_t, q: uint32x4_t) -> uint32x4_t {
        self.dot4(acc, rows, q)
    }
}
