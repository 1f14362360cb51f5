//! AVX2, FMA and F16C: two blocks at a time.

use super::{GROUP_MAX, Kernel, Simd};
use std::arch::x86_64::*;

/// Proves AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2 {
    _private: (),
}

/// # Safety
///
/// The machine has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn run(kernel: impl Kernel) {
    kernel.run(Avx2 { _private: () });
}

/// Bodies of methods: the value proves the features, and the caller of an `unsafe` method vouches for the memory it names.
macro_rules! proven {
    ($($body:tt)*) => {
        // SAFETY: `self` proves AVX2, FMA and F16C; memory is touched only in `unsafe` methods, whose caller vouches for the range
        // that the trait names, and only with instructions that need no alignment.
        unsafe { $($body)* }
    };
}

#[inline(always)]
fn lanes2(values: [u8; GROUP_MAX]) -> [i32; 2] {
    [i32::from(values[0]), i32::from(values[1])]
}

impl Simd for Avx2 {
    const GROUP: usize = 2;
    type Bytes = __m256i;
    type Ints = __m256i;
    type Floats = __m256;
    type Pairs = __m128;
    type Oct = __m256;

    #[inline(always)]
    fn zero(self) -> __m256 {
        proven!(_mm256_setzero_ps())
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        proven!(_mm256_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        proven!(_mm256_storeu_ps(p, v))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> __m256 {
        proven!(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> __m256 {
        proven!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))))
    }
    #[inline(always)]
    unsafe fn load_f32_bytes(self, p: *const u8) -> __m256 {
        proven!(_mm256_loadu_ps(p.cast()))
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        proven!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        proven!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sum(self, v: __m256) -> f32 {
        proven! {
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }
    #[inline(always)]
    fn half(self, bits: u16) -> f32 {
        proven!(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))))
    }

    #[inline(always)]
    fn splat_bytes(self, v: u8) -> __m256i {
        proven!(_mm256_set1_epi8(v as i8))
    }
    #[inline(always)]
    unsafe fn load_bytes(self, p: *const i8) -> __m256i {
        proven!(_mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    unsafe fn gather(self, p: *const u8, at: [usize; GROUP_MAX]) -> __m256i {
        proven!(_mm256_loadu2_m128i(p.add(at[1]).cast(), p.add(at[0]).cast()))
    }
    #[inline(always)]
    fn nibbles(self, v: __m256i) -> [__m256i; 2] {
        proven! {
            let low = _mm256_set1_epi8(0xf);
            [_mm256_and_si256(v, low), _mm256_and_si256(_mm256_srli_epi16::<4>(v), low)]
        }
    }
    #[inline(always)]
    unsafe fn gather_bits(self, p: *const u8, at: [usize; GROUP_MAX]) -> __m256i {
        proven! {
            let bits = [0, 1].map(|i| i32::from(u16::from_le_bytes(p.add(at[i]).cast::<[u8; 2]>().read_unaligned())));
            // The first byte of the two goes to the first eight lanes, the second to the others; each lane keeps its own bit.
            let pairs = _mm256_set_m128i(_mm_cvtsi32_si128(bits[1]), _mm_cvtsi32_si128(bits[0]));
            let spread = _mm256_set_epi64x(0x0101_0101_0101_0101, 0, 0x0101_0101_0101_0101, 0);
            let own = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
            let kept = _mm256_and_si256(_mm256_shuffle_epi8(pairs, spread), own);
            _mm256_and_si256(_mm256_cmpeq_epi8(kept, own), _mm256_set1_epi8(16))
        }
    }
    #[inline(always)]
    fn shift_mask(self, v: __m256i, by: [u8; GROUP_MAX], mask: u8) -> __m256i {
        proven! {
            let [a, b] = lanes2(by);
            let by = _mm256_set_epi32(b, b, b, b, a, a, a, a);
            _mm256_and_si256(_mm256_srlv_epi32(v, by), _mm256_set1_epi8(mask as i8))
        }
    }
    #[inline(always)]
    fn shift_left_4(self, v: __m256i) -> __m256i {
        proven!(_mm256_slli_epi16::<4>(v))
    }
    #[inline(always)]
    fn or(self, a: __m256i, b: __m256i) -> __m256i {
        proven!(_mm256_or_si256(a, b))
    }

    #[inline(always)]
    fn dot(self, u: __m256i, x: __m256i) -> __m256i {
        proven!(_mm256_madd_epi16(_mm256_maddubs_epi16(u, x), _mm256_set1_epi16(1)))
    }
    #[inline(always)]
    fn dot2(self, u: [__m256i; 2], x: [__m256i; 2]) -> __m256i {
        proven! {
            // At most 4 * 63 * 127 = 32,004 in 16 bits.
            let sum = _mm256_add_epi16(_mm256_maddubs_epi16(u[0], x[0]), _mm256_maddubs_epi16(u[1], x[1]));
            _mm256_madd_epi16(sum, _mm256_set1_epi16(1))
        }
    }
    #[inline(always)]
    fn dot2_signed(self, w: [__m256i; 2], x: [__m256i; 2], _bias: __m256i) -> __m256i {
        proven! {
            // |w| up to 128 as unsigned, the sign moved to x: at most 2 * 128 * 127 = 32,512 in 16 bits.
            let a = _mm256_maddubs_epi16(_mm256_abs_epi8(w[0]), _mm256_sign_epi8(x[0], w[0]));
            let b = _mm256_maddubs_epi16(_mm256_abs_epi8(w[1]), _mm256_sign_epi8(x[1], w[1]));
            let one = _mm256_set1_epi16(1);
            _mm256_add_epi32(_mm256_madd_epi16(a, one), _mm256_madd_epi16(b, one))
        }
    }
    #[inline(always)]
    fn signed_bias(self, _x: [__m256i; 2]) -> __m256i {
        proven!(_mm256_setzero_si256())
    }
    #[inline(always)]
    fn zero_ints(self) -> __m256i {
        proven!(_mm256_setzero_si256())
    }
    #[inline(always)]
    fn sub_ints(self, a: __m256i, b: __m256i) -> __m256i {
        proven!(_mm256_sub_epi32(a, b))
    }
    #[inline(always)]
    fn add_ints(self, a: __m256i, b: __m256i) -> __m256i {
        proven!(_mm256_add_epi32(a, b))
    }
    #[inline(always)]
    fn mul_ints(self, a: __m256i, b: __m256i) -> __m256i {
        proven!(_mm256_mullo_epi32(a, b))
    }
    #[inline(always)]
    fn to_floats(self, v: __m256i) -> __m256 {
        proven!(_mm256_cvtepi32_ps(v))
    }
    #[inline(always)]
    unsafe fn spread_scales(self, p: *const u8, at: [u8; GROUP_MAX]) -> __m256i {
        proven! {
            let [a, b] = lanes2(at).map(|at| at * 0x0101_0101);
            _mm256_cvtepi8_epi32(_mm_shuffle_epi8(_mm_loadu_si128(p.cast()), _mm_set_epi32(0, 0, b, a)))
        }
    }

    #[inline(always)]
    fn zero_pairs(self) -> __m128 {
        proven!(_mm_setzero_ps())
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const f32) -> __m128 {
        proven!(_mm_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn gather_half_pairs(self, p: *const u8, at: [usize; GROUP_MAX]) -> __m128 {
        proven! {
            let pair = |i: usize| p.add(at[i]).cast::<i32>().read_unaligned();
            _mm_cvtph_ps(_mm_insert_epi32::<1>(_mm_cvtsi32_si128(pair(0)), pair(1)))
        }
    }
    #[inline(always)]
    fn mul_pairs(self, a: __m128, b: __m128) -> __m128 {
        proven!(_mm_mul_ps(a, b))
    }
    #[inline(always)]
    fn add_pairs(self, a: __m128, b: __m128) -> __m128 {
        proven!(_mm_add_ps(a, b))
    }
    #[inline(always)]
    fn spread_first(self, v: __m128) -> __m256 {
        proven!(_mm256_permutevar8x32_ps(_mm256_castps128_ps256(v), _mm256_set_epi32(2, 2, 2, 2, 0, 0, 0, 0)))
    }
    #[inline(always)]
    fn sum_second(self, v: __m128) -> f32 {
        proven!(_mm_cvtss_f32(_mm_add_ss(_mm_shuffle_ps::<1>(v, v), _mm_shuffle_ps::<3>(v, v))))
    }

    #[inline(always)]
    fn zero_oct(self) -> __m256 {
        self.zero()
    }
    #[inline(always)]
    unsafe fn load_oct(self, p: *const f32) -> __m256 {
        proven!(_mm256_loadu_ps(p))
    }
    #[inline(always)]
    fn oct_from_bytes(self, v: [u8; 8]) -> __m256 {
        proven!(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(v)))))
    }
    #[inline(always)]
    fn scale_oct(self, v: __m256, by: f32) -> __m256 {
        proven!(_mm256_mul_ps(v, _mm256_set1_ps(by)))
    }
    #[inline(always)]
    fn mul_oct(self, a: __m256, b: __m256) -> __m256 {
        proven!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn fma_oct(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        proven!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn sum_oct(self, v: __m256) -> f32 {
        self.sum(v)
    }
    #[inline(always)]
    fn spread_oct(self, v: __m256, step: usize) -> __m256 {
        proven! {
            let first = 2 * step as i32;
            let (a, b) = (first, first + 1);
            _mm256_permutevar8x32_ps(v, _mm256_set_epi32(b, b, b, b, a, a, a, a))
        }
    }

    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        proven!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
    }
}
