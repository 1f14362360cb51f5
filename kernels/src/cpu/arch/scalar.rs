//! Vectors of one lane, in plain Rust: what every machine can run, and what the others are tested against.

use half::f16;

use super::Simd;

/// One lane.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

impl Simd for Scalar {
    const LANES: usize = 1;
    const DOT_VECTORS: usize = 2;
    const SUM_VECTORS: usize = 2;
    const TILE_ROWS: usize = 6;
    const ROW_BIAS: i32 = 0;

    type F = f32;
    type I = u32;

    #[inline(always)]
    fn splat(self, x: f32) -> f32 {
        x
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { p.read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: f32) {
        // SAFETY: the caller's promise.
        unsafe { p.write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { p.read_unaligned() }.to_f32()
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16, v: f32) {
        // SAFETY: the caller's promise.
        unsafe { p.write_unaligned(f16::from_f32(v)) }
    }

    #[inline(always)]
    fn prefetch(self, _p: *const f16) {}
    #[inline(always)]
    fn add(self, a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    fn sub(self, a: f32, b: f32) -> f32 {
        a - b
    }
    #[inline(always)]
    fn mul(self, a: f32, b: f32) -> f32 {
        a * b
    }
    #[inline(always)]
    fn div(self, a: f32, b: f32) -> f32 {
        a / b
    }
    /// Rounded twice: one rounding would be a call into the C library on machines without the instruction.
    #[inline(always)]
    fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
    #[inline(always)]
    fn max(self, a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }
    #[inline(always)]
    fn min(self, a: f32, b: f32) -> f32 {
        if a < b { a } else { b }
    }
    #[inline(always)]
    fn round(self, v: f32) -> f32 {
        v.round_ties_even()
    }
    #[inline(always)]
    fn scale_pow2(self, v: f32, n: f32) -> f32 {
        v * f32::from_bits((((n as i32) + 127) as u32) << 23)
    }
    #[inline(always)]
    fn zero_below(self, v: f32, x: f32, limit: f32) -> f32 {
        if x < limit { 0.0 } else { v }
    }
    #[inline(always)]
    fn reduce_add(self, v: f32) -> f32 {
        v
    }
    #[inline(always)]
    fn reduce_max(self, v: f32) -> f32 {
        v
    }
    #[inline(always)]
    unsafe fn reduce_add4(self, v: [f32; 4], p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[f32; 4]>().write_unaligned(v) }
    }

    #[inline(always)]
    fn splat_i(self, x: u32) -> u32 {
        x
    }
    #[inline(always)]
    unsafe fn load_i(self, p: *const u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { p.read_unaligned() }
    }
    #[inline(always)]
    fn and_i(self, a: u32, b: u32) -> u32 {
        a & b
    }
    #[inline(always)]
    fn sub_i(self, a: u32, b: u32) -> u32 {
        a.wrapping_sub(b)
    }
    #[inline(always)]
    fn shift_right_4(self, v: u32) -> u32 {
        v >> 4
    }
    #[inline(always)]
    fn dot4(self, acc: u32, rows: u32, q: u32) -> u32 {
        let (rows, q) = (rows.to_le_bytes(), q.to_le_bytes());
        let mut sum = 0;
        for i in 0..4 {
            sum += i32::from(rows[i] as i8) * i32::from(q[i] as i8);
        }
        acc.wrapping_add(sum as u32)
    }
    #[inline(always)]
    fn dot4_nibbles(self, acc: u32, rows: u32, q: u32) -> u32 {
        self.dot4(acc, rows, q)
    }
    #[inline(always)]
    fn to_f32(self, v: u32) -> f32 {
        v as i32 as f32
    }
}
