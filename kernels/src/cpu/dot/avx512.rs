//! AVX-512 F, BW, VL, DQ and VNNI: four blocks at a time.

use super::{GROUP_MAX, Kernel, Simd};
use std::arch::x86_64::*;

/// Proves AVX-512 F, BW, VL, DQ, VNNI and all of AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512 {
    _private: (),
}

/// # Safety
///
/// The machine has AVX-512 F, BW, VL, DQ and VNNI, AVX2, FMA and F16C.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(crate) unsafe fn run(kernel: impl Kernel) {
    kernel.run(Avx512 { _private: () });
}

/// Bodies of methods: the value proves the features, and the caller of an `unsafe` method vouches for the memory it names.
macro_rules! proven {
    ($($body:tt)*) => {
        // SAFETY: `self` proves the features; memory is touched only in `unsafe` methods, whose caller vouches for the range that
        // the trait names, and only with instructions that need no alignment.
        unsafe { $($body)* }
    };
}

/// Each of four values in four neighbouring lanes.
#[inline(always)]
fn four_each(_proof: Avx512, [a, b, c, d]: [i32; 4]) -> __m512i {
    // SAFETY: the argument proves AVX-512 F.
    unsafe { _mm512_set_epi32(d, d, d, d, c, c, c, c, b, b, b, b, a, a, a, a) }
}

impl Simd for Avx512 {
    const GROUP: usize = 4;
    type Bytes = __m512i;
    type Ints = __m512i;
    type Floats = __m512;
    type Pairs = __m256;
    type Oct = __m256;

    #[inline(always)]
    fn zero(self) -> __m512 {
        proven!(_mm512_setzero_ps())
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        proven!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        proven!(_mm512_storeu_ps(p, v))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> __m512 {
        proven!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> __m512 {
        proven!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))))
    }
    #[inline(always)]
    unsafe fn load_f32_bytes(self, p: *const u8) -> __m512 {
        proven!(_mm512_loadu_ps(p.cast()))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        proven!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        proven!(self.sum_oct(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v))))
    }
    #[inline(always)]
    fn half(self, bits: u16) -> f32 {
        proven!(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))))
    }

    #[inline(always)]
    fn splat_bytes(self, v: u8) -> __m512i {
        proven!(_mm512_set1_epi8(v as i8))
    }
    #[inline(always)]
    unsafe fn load_bytes(self, p: *const i8) -> __m512i {
        proven!(_mm512_loadu_si512(p.cast()))
    }
    #[inline(always)]
    unsafe fn gather(self, p: *const u8, at: [usize; GROUP_MAX]) -> __m512i {
        proven! {
            let low = _mm256_loadu2_m128i(p.add(at[1]).cast(), p.add(at[0]).cast());
            let high = _mm256_loadu2_m128i(p.add(at[3]).cast(), p.add(at[2]).cast());
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }
    }
    #[inline(always)]
    fn nibbles(self, v: __m512i) -> [__m512i; 2] {
        proven! {
            let low = _mm512_set1_epi8(0xf);
            [_mm512_and_si512(v, low), _mm512_and_si512(_mm512_srli_epi16::<4>(v), low)]
        }
    }
    #[inline(always)]
    unsafe fn gather_bits(self, p: *const u8, at: [usize; GROUP_MAX]) -> __m512i {
        proven! {
            let bits = |i: usize| u64::from(u16::from_le_bytes(p.add(at[i]).cast::<[u8; 2]>().read_unaligned())) << (16 * i);
            _mm512_maskz_set1_epi8(bits(0) | bits(1) | bits(2) | bits(3), 16)
        }
    }
    #[inline(always)]
    fn shift_mask(self, v: __m512i, by: [u8; GROUP_MAX], mask: u8) -> __m512i {
        let by = four_each(self, by.map(i32::from));
        proven!(_mm512_and_si512(_mm512_srlv_epi32(v, by), _mm512_set1_epi8(mask as i8)))
    }
    #[inline(always)]
    fn shift_left_4(self, v: __m512i) -> __m512i {
        proven!(_mm512_slli_epi16::<4>(v))
    }
    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        proven!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn dot(self, u: __m512i, x: __m512i) -> __m512i {
        proven!(_mm512_dpbusd_epi32(_mm512_setzero_si512(), u, x))
    }
    #[inline(always)]
    fn dot2(self, u: [__m512i; 2], x: [__m512i; 2]) -> __m512i {
        proven!(_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), u[0], x[0]), u[1], x[1]))
    }
    #[inline(always)]
    fn dot2_signed(self, w: [__m512i; 2], x: [__m512i; 2], bias: __m512i) -> __m512i {
        proven! {
            // Flipping the top bit adds 128 to a signed byte and makes it unsigned; `bias` starts at what that adds, negated.
            let flip = _mm512_set1_epi8(-128);
            let low = _mm512_dpbusd_epi32(bias, _mm512_xor_si512(w[0], flip), x[0]);
            _mm512_dpbusd_epi32(low, _mm512_xor_si512(w[1], flip), x[1])
        }
    }
    #[inline(always)]
    fn signed_bias(self, x: [__m512i; 2]) -> __m512i {
        proven! {
            let added = self.dot2([_mm512_set1_epi8(-128); 2], x);
            _mm512_sub_epi32(_mm512_setzero_si512(), added)
        }
    }
    #[inline(always)]
    fn zero_ints(self) -> __m512i {
        proven!(_mm512_setzero_si512())
    }
    #[inline(always)]
    fn sub_ints(self, a: __m512i, b: __m512i) -> __m512i {
        proven!(_mm512_sub_epi32(a, b))
    }
    #[inline(always)]
    fn add_ints(self, a: __m512i, b: __m512i) -> __m512i {
        proven!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn mul_ints(self, a: __m512i, b: __m512i) -> __m512i {
        proven!(_mm512_mullo_epi32(a, b))
    }
    #[inline(always)]
    fn to_floats(self, v: __m512i) -> __m512 {
        proven!(_mm512_cvtepi32_ps(v))
    }
    #[inline(always)]
    unsafe fn spread_scales(self, p: *const u8, at: [u8; GROUP_MAX]) -> __m512i {
        proven! {
            let [a, b, c, d] = at.map(|at| i32::from(at) * 0x0101_0101);
            _mm512_cvtepi8_epi32(_mm_shuffle_epi8(_mm_loadu_si128(p.cast()), _mm_set_epi32(d, c, b, a)))
        }
    }

    #[inline(always)]
    fn zero_pairs(self) -> __m256 {
        self.zero_oct()
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const f32) -> __m256 {
        proven!(_mm256_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn gather_half_pairs(self, p: *const u8, at: [usize; GROUP_MAX]) -> __m256 {
        proven! {
            let pair = |i: usize| p.add(at[i]).cast::<i32>().read_unaligned();
            _mm256_cvtph_ps(_mm_set_epi32(pair(3), pair(2), pair(1), pair(0)))
        }
    }
    #[inline(always)]
    fn mul_pairs(self, a: __m256, b: __m256) -> __m256 {
        proven!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn add_pairs(self, a: __m256, b: __m256) -> __m256 {
        proven!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn spread_first(self, v: __m256) -> __m512 {
        proven!(_mm512_permutexvar_ps(four_each(self, [0, 2, 4, 6]), _mm512_castps256_ps512(v)))
    }
    #[inline(always)]
    fn sum_second(self, v: __m256) -> f32 {
        proven!(self.sum_oct(_mm256_blend_ps::<0b1010_1010>(_mm256_setzero_ps(), v)))
    }

    #[inline(always)]
    fn zero_oct(self) -> __m256 {
        proven!(_mm256_setzero_ps())
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
        proven! {
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }
    #[inline(always)]
    fn spread_oct(self, v: __m256, step: usize) -> __m512 {
        let first = 4 * step as i32;
        let lanes = four_each(self, [first, first + 1, first + 2, first + 3]);
        proven!(_mm512_permutexvar_ps(lanes, _mm512_castps256_ps512(v)))
    }

    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        proven!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
    }
}
