//! The portable twin: one block at a time.

use super::{GROUP_MAX, PIECE, Simd};
use half::{bf16, f16};
use std::array::from_fn;

/// No instructions beyond the target's baseline.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalar;

// In all methods that take a pointer the caller vouches for the range that the trait names; `read_unaligned` needs no alignment.
impl Simd for Scalar {
    const GROUP: usize = 1;
    type Bytes = [u8; PIECE];
    type Ints = [i32; 4];
    type Floats = [f32; 4];
    type Pairs = [f32; 2];
    type Oct = [f32; 8];

    #[inline(always)]
    fn zero(self) -> [f32; 4] {
        [0.0; 4]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> [f32; 4] {
        // SAFETY: the caller vouches for four f32.
        unsafe { p.cast::<[f32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: [f32; 4]) {
        // SAFETY: the caller vouches for four f32.
        unsafe { p.cast::<[f32; 4]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> [f32; 4] {
        // SAFETY: the caller vouches for four f16.
        let bytes = unsafe { p.cast::<[[u8; 2]; 4]>().read_unaligned() };
        bytes.map(|half| f16::from_le_bytes(half).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> [f32; 4] {
        // SAFETY: the caller vouches for four bf16.
        let bytes = unsafe { p.cast::<[[u8; 2]; 4]>().read_unaligned() };
        bytes.map(|half| bf16::from_le_bytes(half).to_f32())
    }
    #[inline(always)]
    unsafe fn load_f32_bytes(self, p: *const u8) -> [f32; 4] {
        // SAFETY: the caller vouches for four f32.
        let bytes = unsafe { p.cast::<[[u8; 4]; 4]>().read_unaligned() };
        bytes.map(f32::from_le_bytes)
    }
    #[inline(always)]
    fn fma(self, a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn add(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sum(self, v: [f32; 4]) -> f32 {
        (v[0] + v[2]) + (v[1] + v[3])
    }
    #[inline(always)]
    fn half(self, bits: u16) -> f32 {
        f16::from_bits(bits).to_f32()
    }

    #[inline(always)]
    fn splat_bytes(self, v: u8) -> [u8; PIECE] {
        [v; PIECE]
    }
    #[inline(always)]
    unsafe fn load_bytes(self, p: *const i8) -> [u8; PIECE] {
        // SAFETY: the caller vouches for 16 bytes.
        unsafe { p.cast::<[u8; PIECE]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn gather(self, p: *const u8, at: [usize; GROUP_MAX]) -> [u8; PIECE] {
        // SAFETY: the caller vouches for 16 bytes at the first offset.
        unsafe { p.add(at[0]).cast::<[u8; PIECE]>().read_unaligned() }
    }
    #[inline(always)]
    fn nibbles(self, v: [u8; PIECE]) -> [[u8; PIECE]; 2] {
        [v.map(|byte| byte & 0xf), v.map(|byte| byte >> 4)]
    }
    #[inline(always)]
    unsafe fn gather_bits(self, p: *const u8, at: [usize; GROUP_MAX]) -> [u8; PIECE] {
        // SAFETY: the caller vouches for two bytes at the first offset.
        let bits = u16::from_le_bytes(unsafe { p.add(at[0]).cast::<[u8; 2]>().read_unaligned() });
        from_fn(|i| (((bits >> i) & 1) << 4) as u8)
    }
    #[inline(always)]
    fn shift_mask(self, v: [u8; PIECE], by: [u8; GROUP_MAX], mask: u8) -> [u8; PIECE] {
        v.map(|byte| (byte >> by[0]) & mask)
    }
    #[inline(always)]
    fn shift_left_4(self, v: [u8; PIECE]) -> [u8; PIECE] {
        v.map(|byte| byte << 4)
    }
    #[inline(always)]
    fn or(self, a: [u8; PIECE], b: [u8; PIECE]) -> [u8; PIECE] {
        from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    fn dot(self, u: [u8; PIECE], x: [u8; PIECE]) -> [i32; 4] {
        from_fn(|lane| (4 * lane..4 * lane + 4).map(|i| i32::from(u[i]) * i32::from(x[i] as i8)).sum())
    }
    #[inline(always)]
    fn dot2(self, u: [[u8; PIECE]; 2], x: [[u8; PIECE]; 2]) -> [i32; 4] {
        self.add_ints(self.dot(u[0], x[0]), self.dot(u[1], x[1]))
    }
    #[inline(always)]
    fn dot2_signed(self, w: [[u8; PIECE]; 2], x: [[u8; PIECE]; 2], _bias: [i32; 4]) -> [i32; 4] {
        from_fn(|lane| {
            let of = |w: [u8; PIECE], x: [u8; PIECE]| -> i32 {
                (4 * lane..4 * lane + 4).map(|i| i32::from(w[i] as i8) * i32::from(x[i] as i8)).sum()
            };
            of(w[0], x[0]) + of(w[1], x[1])
        })
    }
    #[inline(always)]
    fn signed_bias(self, _x: [[u8; PIECE]; 2]) -> [i32; 4] {
        [0; 4]
    }
    #[inline(always)]
    fn zero_ints(self) -> [i32; 4] {
        [0; 4]
    }
    #[inline(always)]
    fn sub_ints(self, a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn add_ints(self, a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn mul_ints(self, a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn to_floats(self, v: [i32; 4]) -> [f32; 4] {
        v.map(|value| value as f32)
    }
    #[inline(always)]
    unsafe fn spread_scales(self, p: *const u8, at: [u8; GROUP_MAX]) -> [i32; 4] {
        // SAFETY: the caller vouches for 16 bytes, and `at` is below 16.
        [i32::from(unsafe { p.add(usize::from(at[0])).read() } as i8); 4]
    }

    #[inline(always)]
    fn zero_pairs(self) -> [f32; 2] {
        [0.0; 2]
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const f32) -> [f32; 2] {
        // SAFETY: the caller vouches for two f32.
        unsafe { p.cast::<[f32; 2]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn gather_half_pairs(self, p: *const u8, at: [usize; GROUP_MAX]) -> [f32; 2] {
        // SAFETY: the caller vouches for two f16 at the first offset.
        let pair = unsafe { p.add(at[0]).cast::<[[u8; 2]; 2]>().read_unaligned() };
        pair.map(|half| f16::from_le_bytes(half).to_f32())
    }
    #[inline(always)]
    fn mul_pairs(self, a: [f32; 2], b: [f32; 2]) -> [f32; 2] {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn add_pairs(self, a: [f32; 2], b: [f32; 2]) -> [f32; 2] {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn spread_first(self, v: [f32; 2]) -> [f32; 4] {
        [v[0]; 4]
    }
    #[inline(always)]
    fn sum_second(self, v: [f32; 2]) -> f32 {
        v[1]
    }

    #[inline(always)]
    fn zero_oct(self) -> [f32; 8] {
        [0.0; 8]
    }
    #[inline(always)]
    unsafe fn load_oct(self, p: *const f32) -> [f32; 8] {
        // SAFETY: the caller vouches for eight f32.
        unsafe { p.cast::<[f32; 8]>().read_unaligned() }
    }
    #[inline(always)]
    fn oct_from_bytes(self, v: [u8; 8]) -> [f32; 8] {
        v.map(f32::from)
    }
    #[inline(always)]
    fn scale_oct(self, v: [f32; 8], by: f32) -> [f32; 8] {
        v.map(|value| value * by)
    }
    #[inline(always)]
    fn mul_oct(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn fma_oct(self, a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn sum_oct(self, v: [f32; 8]) -> f32 {
        self.sum(from_fn(|i| v[i] + v[i + 4]))
    }
    #[inline(always)]
    fn spread_oct(self, v: [f32; 8], step: usize) -> [f32; 4] {
        [v[step]; 4]
    }

    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}
}
