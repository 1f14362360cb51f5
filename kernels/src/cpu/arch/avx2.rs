//! Eight lanes with AVX2, FMA and F16C.

use std::arch::x86_64::*;

use half::f16;

use super::{Kernel, Simd};

/// Proof that the machine has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

/// Runs `kernel`, compiled for AVX2.
///
/// # Safety
/// The machine has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2(()))
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
            // SAFETY: a value of `Self` proves the instruction set; the caller promises the memory, and the access is unaligned.
            unsafe { $body }
        }
    )* };
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    const DOT_VECTORS: usize = 2;
    const SUM_VECTORS: usize = 2;
    const TILE_ROWS: usize = 6;
    const ROW_BIAS: i32 = 0;

    type F = __m256;
    type I = __m256i;

    memory_methods! {
        load(p: *const f32) -> __m256 { _mm256_loadu_ps(p) }
        store(p: *mut f32, v: __m256) -> () { _mm256_storeu_ps(p, v) }
        load_f16(p: *const f16) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
        store_f16(p: *mut f16, v: __m256) -> () {
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v))
        }
        load_i(p: *const u32) -> __m256i { _mm256_loadu_si256(p.cast()) }
        reduce_add4(v: [__m256; 4], p: *mut f32) -> () {{
            let sums = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
            _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums)))
        }}
    }

    methods! {
        prefetch(p: *const f16) -> () { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        splat(x: f32) -> __m256 { _mm256_set1_ps(x) }
        add(a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
        sub(a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
        mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        div(a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
        fma(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
        max(a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
        min(a: __m256, b: __m256) -> __m256 { _mm256_min_ps(a, b) }
        round(v: __m256) -> __m256 { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v) }
        scale_pow2(v: __m256, n: __m256) -> __m256 {{
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
        }}
        zero_below(v: __m256, x: __m256, limit: __m256) -> __m256 { _mm256_and_ps(v, _mm256_cmp_ps::<_CMP_NLT_UQ>(x, limit)) }
        reduce_add(v: __m256) -> f32 {{
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }}
        reduce_max(v: __m256) -> f32 {{
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        }}
        splat_i(x: u32) -> __m256i { _mm256_set1_epi32(x as i32) }
        and_i(a: __m256i, b: __m256i) -> __m256i { _mm256_and_si256(a, b) }
        sub_i(a: __m256i, b: __m256i) -> __m256i { _mm256_sub_epi32(a, b) }
        shift_right_4(v: __m256i) -> __m256i { _mm256_srli_epi32::<4>(v) }
        // The sum of two products of signed bytes fits in 16 bits: 2 * 128 * 127.
        dot4(acc: __m256i, rows: __m256i, q: __m256i) -> __m256i {{
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(rows), _mm256_sign_epi8(q, rows));
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }}
        dot4_nibbles(acc: __m256i, rows: __m256i, q: __m256i) -> __m256i {{
            let pairs = _mm256_maddubs_epi16(rows, q);
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }}
        to_f32(v: __m256i) -> __m256 { _mm256_cvtepi32_ps(v) }
    }
}
