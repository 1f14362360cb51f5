//! NEON: one block at a time, with the dot-product instruction where the machine has it.
#![allow(
    unused_unsafe,
    reason = "NEON is part of the target, so intrinsics that touch no memory are safe where compilers know it"
)]

use super::{GROUP_MAX, Kernel, Simd};
use std::arch::aarch64::*;
use std::arch::asm;

/// Proves NEON, and the dot-product extension if `DOT`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Neon<const DOT: bool> {
    _private: (),
}

pub(crate) fn run(kernel: impl Kernel) {
    if std::arch::is_aarch64_feature_detected!("dotprod") {
        // SAFETY: just detected.
        unsafe { run_dotprod(kernel) }
    } else {
        // NEON is part of every aarch64 target that this is built for.
        kernel.run(Neon::<false> { _private: () });
    }
}

/// # Safety
///
/// The machine has the dot-product extension.
#[target_feature(enable = "neon,dotprod")]
unsafe fn run_dotprod(kernel: impl Kernel) {
    kernel.run(Neon::<true> { _private: () });
}

/// Bodies of methods: the value proves the features, and the caller of an `unsafe` method vouches for the memory it names.
macro_rules! proven {
    ($($body:tt)*) => {
        // SAFETY: `self` proves the features; memory is touched only in `unsafe` methods, whose caller vouches for the range that
        // the trait names, and only with instructions that need no alignment.
        unsafe { $($body)* }
    };
}

impl<const DOT: bool> Neon<DOT> {
    /// Products of signed bytes, four neighbours summed and added to `acc`. Two neighbouring products fit in 16 bits.
    #[inline(always)]
    fn dot_signed(self, acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        if DOT {
            let mut sum = acc;
            // SAFETY: `self` proves the dot-product extension; the instruction touches registers only.
            unsafe {
                asm!(
                    ".arch_extension dotprod",
                    "sdot {sum:v}.4s, {w:v}.16b, {x:v}.16b",
                    sum = inout(vreg) sum, w = in(vreg) w, x = in(vreg) x,
                    options(pure, nomem, nostack, preserves_flags),
                );
            }
            return sum;
        }
        proven! {
            let low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
            vpadalq_s16(acc, vpaddq_s16(low, vmull_high_s8(w, x)))
        }
    }
}

/// # Safety
///
/// Four bytes are readable at `p`.
#[inline(always)]
unsafe fn load_word(p: *const u8) -> u32 {
    // SAFETY: the caller vouches for the four bytes.
    unsafe { p.cast::<u32>().read_unaligned() }
}

/// Four f16 as f32.
#[inline(always)]
fn widen(halves: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: the conversion is part of NEON and touches registers only.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {halves:v}.4h",
            wide = lateout(vreg) wide, halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    wide
}

impl<const DOT: bool> Simd for Neon<DOT> {
    const GROUP: usize = 1;
    type Bytes = uint8x16_t;
    type Ints = int32x4_t;
    type Floats = float32x4_t;
    type Pairs = float32x2_t;
    type Oct = [float32x4_t; 2];

    #[inline(always)]
    fn zero(self) -> float32x4_t {
        proven!(vdupq_n_f32(0.0))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> float32x4_t {
        proven!(vld1q_f32(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: float32x4_t) {
        proven!(vst1q_f32(p, v))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> float32x4_t {
        proven!(widen(vreinterpret_u16_u8(vld1_u8(p))))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> float32x4_t {
        proven!(vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(p)))))
    }
    #[inline(always)]
    unsafe fn load_f32_bytes(self, p: *const u8) -> float32x4_t {
        proven!(vreinterpretq_f32_u8(vld1q_u8(p)))
    }
    #[inline(always)]
    fn fma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        proven!(vfmaq_f32(c, a, b))
    }
    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        proven!(vaddq_f32(a, b))
    }
    #[inline(always)]
    fn sum(self, v: float32x4_t) -> f32 {
        proven!(vaddvq_f32(v))
    }
    #[inline(always)]
    fn half(self, bits: u16) -> f32 {
        proven!(vgetq_lane_f32::<0>(widen(vdup_n_u16(bits))))
    }

    #[inline(always)]
    fn splat_bytes(self, v: u8) -> uint8x16_t {
        proven!(vdupq_n_u8(v))
    }
    #[inline(always)]
    unsafe fn load_bytes(self, p: *const i8) -> uint8x16_t {
        proven!(vld1q_u8(p.cast()))
    }
    #[inline(always)]
    unsafe fn gather(self, p: *const u8, at: [usize; GROUP_MAX]) -> uint8x16_t {
        proven!(vld1q_u8(p.add(at[0])))
    }
    #[inline(always)]
    fn nibbles(self, v: uint8x16_t) -> [uint8x16_t; 2] {
        proven!([vandq_u8(v, vdupq_n_u8(0xf)), vshrq_n_u8::<4>(v)])
    }
    #[inline(always)]
    unsafe fn gather_bits(self, p: *const u8, at: [usize; GROUP_MAX]) -> uint8x16_t {
        proven! {
            let p = p.add(at[0]);
            let own = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
            let bytes = vcombine_u8(vdup_n_u8(p.read()), vdup_n_u8(p.add(1).read()));
            vandq_u8(vtstq_u8(bytes, own), vdupq_n_u8(16))
        }
    }
    #[inline(always)]
    fn shift_mask(self, v: uint8x16_t, by: [u8; GROUP_MAX], mask: u8) -> uint8x16_t {
        proven!(vandq_u8(vshlq_u8(v, vdupq_n_s8(-(by[0] as i8))), vdupq_n_u8(mask)))
    }
    #[inline(always)]
    fn shift_left_4(self, v: uint8x16_t) -> uint8x16_t {
        proven!(vshlq_n_u8::<4>(v))
    }
    #[inline(always)]
    fn or(self, a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        proven!(vorrq_u8(a, b))
    }

    #[inline(always)]
    fn dot(self, u: uint8x16_t, x: uint8x16_t) -> int32x4_t {
        proven!(self.dot_signed(vdupq_n_s32(0), vreinterpretq_s8_u8(u), vreinterpretq_s8_u8(x)))
    }
    #[inline(always)]
    fn dot2(self, u: [uint8x16_t; 2], x: [uint8x16_t; 2]) -> int32x4_t {
        self.dot2_signed(u, x, self.zero_ints())
    }
    #[inline(always)]
    fn dot2_signed(self, w: [uint8x16_t; 2], x: [uint8x16_t; 2], bias: int32x4_t) -> int32x4_t {
        proven! {
            let low = self.dot_signed(bias, vreinterpretq_s8_u8(w[0]), vreinterpretq_s8_u8(x[0]));
            self.dot_signed(low, vreinterpretq_s8_u8(w[1]), vreinterpretq_s8_u8(x[1]))
        }
    }
    #[inline(always)]
    fn signed_bias(self, _x: [uint8x16_t; 2]) -> int32x4_t {
        self.zero_ints()
    }
    #[inline(always)]
    fn zero_ints(self) -> int32x4_t {
        proven!(vdupq_n_s32(0))
    }
    #[inline(always)]
    fn sub_ints(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        proven!(vsubq_s32(a, b))
    }
    #[inline(always)]
    fn add_ints(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        proven!(vaddq_s32(a, b))
    }
    #[inline(always)]
    fn mul_ints(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        proven!(vmulq_s32(a, b))
    }
    #[inline(always)]
    fn to_floats(self, v: int32x4_t) -> float32x4_t {
        proven!(vcvtq_f32_s32(v))
    }
    #[inline(always)]
    unsafe fn spread_scales(self, p: *const u8, at: [u8; GROUP_MAX]) -> int32x4_t {
        proven!(vdupq_n_s32(i32::from(p.add(usize::from(at[0])).read() as i8)))
    }

    #[inline(always)]
    fn zero_pairs(self) -> float32x2_t {
        proven!(vdup_n_f32(0.0))
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const f32) -> float32x2_t {
        proven!(vld1_f32(p))
    }
    #[inline(always)]
    unsafe fn gather_half_pairs(self, p: *const u8, at: [usize; GROUP_MAX]) -> float32x2_t {
        proven!(vget_low_f32(widen(vreinterpret_u16_u32(vdup_n_u32(load_word(p.add(at[0])))))))
    }
    #[inline(always)]
    fn mul_pairs(self, a: float32x2_t, b: float32x2_t) -> float32x2_t {
        proven!(vmul_f32(a, b))
    }
    #[inline(always)]
    fn add_pairs(self, a: float32x2_t, b: float32x2_t) -> float32x2_t {
        proven!(vadd_f32(a, b))
    }
    #[inline(always)]
    fn spread_first(self, v: float32x2_t) -> float32x4_t {
        proven!(vdupq_lane_f32::<0>(v))
    }
    #[inline(always)]
    fn sum_second(self, v: float32x2_t) -> f32 {
        proven!(vget_lane_f32::<1>(v))
    }

    #[inline(always)]
    fn zero_oct(self) -> [float32x4_t; 2] {
        [self.zero(); 2]
    }
    #[inline(always)]
    unsafe fn load_oct(self, p: *const f32) -> [float32x4_t; 2] {
        proven!([vld1q_f32(p), vld1q_f32(p.add(4))])
    }
    #[inline(always)]
    fn oct_from_bytes(self, v: [u8; 8]) -> [float32x4_t; 2] {
        proven! {
            let wide = vmovl_u8(vcreate_u8(u64::from_le_bytes(v)));
            [vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_high_u16(wide))]
        }
    }
    #[inline(always)]
    fn scale_oct(self, v: [float32x4_t; 2], by: f32) -> [float32x4_t; 2] {
        proven!([vmulq_n_f32(v[0], by), vmulq_n_f32(v[1], by)])
    }
    #[inline(always)]
    fn mul_oct(self, a: [float32x4_t; 2], b: [float32x4_t; 2]) -> [float32x4_t; 2] {
        proven!([vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])])
    }
    #[inline(always)]
    fn fma_oct(self, a: [float32x4_t; 2], b: [float32x4_t; 2], c: [float32x4_t; 2]) -> [float32x4_t; 2] {
        proven!([vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])])
    }
    #[inline(always)]
    fn sum_oct(self, v: [float32x4_t; 2]) -> f32 {
        self.sum(self.add(v[0], v[1]))
    }
    #[inline(always)]
    fn spread_oct(self, v: [float32x4_t; 2], step: usize) -> float32x4_t {
        let four = v[step / 4];
        proven! {
            match step % 4 {
                0 => vdupq_laneq_f32::<0>(four),
                1 => vdupq_laneq_f32::<1>(four),
                2 => vdupq_laneq_f32::<2>(four),
                _ => vdupq_laneq_f32::<3>(four),
            }
        }
    }

    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a hint that does not fault and changes no memory.
        unsafe { asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly)) };
    }
}
