//! Sixteen lanes with AVX-512 F, BW, VL, DQ and VNNI.

use std::arch::x86_64::*;

use half::f16;

use super::{EXP2_5, Kernel, Simd, one_plus};

/// Proof that the machine has AVX-512 F, BW, VL, DQ and VNNI, and AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

/// Runs `kernel`, compiled for AVX-512.
///
/// # Safety
/// The machine has AVX-512 F, BW, VL, DQ and VNNI, and AVX2, FMA and F16C.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
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

impl Simd for Avx512 {
    const LANES: usize = 16;
    const DOT_VECTORS: usize = 4;
    const SUM_VECTORS: usize = 4;
    const TILE_ROWS: usize = 8;
    const ROW_BIAS: i32 = 128;

    type F = __m512;
    type I = __m512i;

    memory_methods! {
        load(p: *const f32) -> __m512 { _mm512_loadu_ps(p) }
        store(p: *mut f32, v: __m512) -> () { _mm512_storeu_ps(p, v) }
        load_f16(p: *const f16) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
        store_f16(p: *mut f16, v: __m512) -> () {
            _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v))
        }
        load_i(p: *const u32) -> __m512i { _mm512_loadu_si512(p.cast()) }
        reduce_add4(v: [__m512; 4], p: *mut f32) -> () {{
            let [a, b, c, d] = v;
            // Quarters of 128 bits: first two sums per vector, then four, then within each quarter.
            let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b));
            let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xEE>(c, d));
            let v = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xDD>(ab, cd));
            let v = _mm512_add_ps(v, _mm512_permute_ps::<0x4E>(v));
            let v = _mm512_add_ps(v, _mm512_permute_ps::<0xB1>(v));
            let first_of_each = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
            _mm_storeu_ps(p, _mm512_castps512_ps128(_mm512_permutexvar_ps(first_of_each, v)))
        }}
    }

    methods! {
        prefetch(p: *const f16) -> () { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
        add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        min(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
        round(v: __m512) -> __m512 { _mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(v) }
        scale_pow2(v: __m512, n: __m512) -> __m512 { _mm512_scalef_ps(v, n) }
        zero_below(v: __m512, x: __m512, limit: __m512) -> __m512 {
            _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, limit), v)
        }
        reduce_add(v: __m512) -> f32 { _mm512_reduce_add_ps(v) }
        reduce_max(v: __m512) -> f32 { _mm512_reduce_max_ps(v) }
        splat_i(x: u32) -> __m512i { _mm512_set1_epi32(x as i32) }
        and_i(a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        sub_i(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
        shift_right_4(v: __m512i) -> __m512i { _mm512_srli_epi32::<4>(v) }
        dot4(acc: __m512i, rows: __m512i, q: __m512i) -> __m512i {
            _mm512_dpbusd_epi32(acc, _mm512_xor_si512(rows, _mm512_set1_epi8(i8::MIN)), q)
        }
        dot4_nibbles(acc: __m512i, rows: __m512i, q: __m512i) -> __m512i { _mm512_dpbusd_epi32(acc, rows, q) }
        to_f32(v: __m512i) -> __m512 { _mm512_cvtepi32_ps(v) }
    }

    /// With the scaling instruction, which takes care of the range.
    #[inline(always)]
    fn exp2(self, x: __m512) -> __m512 {
        // Bounds keep x - n finite; below -126 the scaling would make denormals, which the documented cut removes.
        let x = self.min(self.splat(127.0), self.max(self.splat(-200.0), x));
        let n = self.round(x);
        let p = one_plus(self, self.sub(x, n), &EXP2_5);
        // SAFETY: a value of `Self` proves the instruction set.
        unsafe {
            let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
            _mm512_maskz_scalef_ps(normal, p, n)
        }
    }
}
