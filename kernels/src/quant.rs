//! Decoding of weight blocks to f32: the definition of every block layout.

use crate::cpu::dot::{self, Kernel, Simd};
use crate::{Isa, Weight, WeightType};
use half::f16;

/// Decodes rows `first_row..first_row + out.len() / cols` into `out`, `[rows][cols]`.
///
/// The result has the same bits on every instruction set: the layout's own arithmetic in f32, each operation rounded once.
/// A scale that is infinite or NaN gives what that arithmetic gives.
///
/// # Panics
///
/// If `out` is not whole rows, or the matrix does not have that many from `first_row` on.
pub fn dequantize_rows(isa: Isa, weight: &Weight, first_row: usize, out: &mut [f32]) {
    let cols = weight.cols();
    if out.is_empty() && cols == 0 {
        return;
    }
    assert!(cols > 0 && out.len().is_multiple_of(cols), "{} values are not whole rows of {cols}", out.len());
    let data = weight.row_data(first_row, out.len() / cols);
    dequantize(isa, weight.dtype(), data, out);
}

/// Decodes consecutive blocks: `data` holds exactly `out.len()` weights of type `dtype`.
pub(crate) fn dequantize(isa: Isa, dtype: WeightType, data: &[u8], out: &mut [f32]) {
    assert_eq!(Some(data.len()), dtype.row_bytes(out.len()), "bytes for {} {} weights", out.len(), dtype.name());
    dot::dispatch(isa, Dequantize { dtype, data, out });
}

struct Dequantize<'a> {
    dtype: WeightType,
    data: &'a [u8],
    out: &'a mut [f32],
}

impl Kernel for Dequantize<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        decode(simd, self.dtype, self.data, self.out);
    }
}

/// Decodes the blocks in `data` to `out`, both of the same number of weights: plain loops over fixed-size blocks, which the compiler
/// vectorises for the instruction set that this is inlined into.
#[inline(always)]
pub(crate) fn decode<S: Simd>(simd: S, dtype: WeightType, data: &[u8], out: &mut [f32]) {
    // Loops and not closures: a closure is compiled without the instructions of `S` unless it happens to be inlined.
    macro_rules! blocks {
        ($decode:ident) => {
            for (block, out) in data.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
                $decode(simd, block, out);
            }
        };
    }
    match dtype {
        WeightType::F32 => blocks!(float_f32),
        WeightType::F16 => floats_f16(simd, data, out),
        WeightType::BF16 => blocks!(float_bf16),
        WeightType::Q4_0 => blocks!(q4_0),
        WeightType::Q4_1 => blocks!(q4_1),
        WeightType::Q5_0 => blocks!(q5_0),
        WeightType::Q5_1 => blocks!(q5_1),
        WeightType::Q8_0 => blocks!(q8_0),
        WeightType::Q4K => blocks!(q4_k),
        WeightType::Q5K => blocks!(q5_k),
        WeightType::Q6K => blocks!(q6_k),
    }
}

#[inline(always)]
fn float_f32<S: Simd>(_simd: S, bytes: &[u8; 4], out: &mut [f32; 1]) {
    out[0] = f32::from_le_bytes(*bytes);
}

#[inline(always)]
fn float_bf16<S: Simd>(_simd: S, bytes: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
}

#[inline(always)]
fn floats_f16<S: Simd>(simd: S, data: &[u8], out: &mut [f32]) {
    let width = S::WIDTH;
    let vectors = out.len() / width;
    for i in 0..vectors {
        // SAFETY: `data` holds two bytes for each of the `out.len()` values, and `i * width + width <= out.len()`.
        unsafe {
            let values = simd.load_f16(data.as_ptr().add(2 * i * width));
            simd.store(out.as_mut_ptr().add(i * width), values);
        }
    }
    let done = vectors * width;
    for (half, out) in data[2 * done..].as_chunks().0.iter().zip(&mut out[done..]) {
        *out = f16::from_le_bytes(*half).to_f32();
    }
}

#[inline(always)]
fn half_at<S: Simd>(simd: S, block: &[u8], at: usize) -> f32 {
    simd.half(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// `d, q[16]`: low nibbles are weights 0..16, high nibbles 16..32; `w = d (q - 8)`.
#[inline(always)]
fn q4_0<S: Simd>(simd: S, block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(simd, block, 0);
    for i in 0..16 {
        let q = block[2 + i];
        out[i] = (i32::from(q & 0xf) - 8) as f32 * d;
        out[i + 16] = (i32::from(q >> 4) - 8) as f32 * d;
    }
}

/// `d, m, q[16]`: as Q4_0, with `w = d q + m`.
#[inline(always)]
fn q4_1<S: Simd>(simd: S, block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(simd, block, 0), half_at(simd, block, 2));
    for i in 0..16 {
        let q = block[4 + i];
        out[i] = i32::from(q & 0xf) as f32 * d + m;
        out[i + 16] = i32::from(q >> 4) as f32 * d + m;
    }
}

/// Fifth bits of weights `i` and `i + 16`, at bit 4.
#[inline(always)]
fn fifth_bits(high: &[u8], i: usize) -> (u8, u8) {
    let bits = u32::from_le_bytes([high[0], high[1], high[2], high[3]]);
    ((((bits >> i) & 1) << 4) as u8, (((bits >> (i + 16)) & 1) << 4) as u8)
}

/// `d, h[4], q[16]`: bit `i` of `h` is the fifth bit of weight `i`; `w = d (q - 16)`.
#[inline(always)]
fn q5_0<S: Simd>(simd: S, block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(simd, block, 0);
    for i in 0..16 {
        let (low, high) = fifth_bits(&block[2..6], i);
        let q = block[6 + i];
        out[i] = (i32::from(q & 0xf | low) - 16) as f32 * d;
        out[i + 16] = (i32::from(q >> 4 | high) - 16) as f32 * d;
    }
}

/// `d, m, h[4], q[16]`: as Q5_0, with `w = d q + m`.
#[inline(always)]
fn q5_1<S: Simd>(simd: S, block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half_at(simd, block, 0), half_at(simd, block, 2));
    for i in 0..16 {
        let (low, high) = fifth_bits(&block[4..8], i);
        let q = block[8 + i];
        out[i] = i32::from(q & 0xf | low) as f32 * d + m;
        out[i + 16] = i32::from(q >> 4 | high) as f32 * d + m;
    }
}

/// `d, q[32]` signed; `w = d q`.
#[inline(always)]
fn q8_0<S: Simd>(simd: S, block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(simd, block, 0);
    for i in 0..32 {
        out[i] = f32::from(block[2 + i] as i8) * d;
    }
}

/// Unpacks the eight 6-bit scales and eight 6-bit minimums of a Q4_K or Q5_K block, one per byte of each result.
///
/// Bytes 0..4 hold scales 0..4 and bytes 4..8 minimums 0..4 in their low six bits; bytes 8..12 hold the low nibbles of scales and
/// minimums 4..8, whose top two bits are those of bytes 0..4 and 4..8.
#[inline(always)]
pub(crate) fn k_scales(packed: [u8; 12]) -> ([u8; 8], [u8; 8]) {
    let word = |at: usize| u32::from_le_bytes([packed[at], packed[at + 1], packed[at + 2], packed[at + 3]]);
    let (a, b, c) = (word(0), word(4), word(8));
    let both = |low: u32, high: u32| (u64::from(low) | u64::from(high) << 32).to_le_bytes();
    let scales = both(a & 0x3f3f_3f3f, (c & 0x0f0f_0f0f) | ((a >> 2) & 0x3030_3030));
    let mins = both(b & 0x3f3f_3f3f, ((c >> 4) & 0x0f0f_0f0f) | ((b >> 2) & 0x3030_3030));
    (scales, mins)
}

/// The packed scales of a Q4_K or Q5_K block.
#[inline(always)]
fn k_scales_of(block: &[u8]) -> ([u8; 8], [u8; 8]) {
    let mut packed = [0; 12];
    packed.copy_from_slice(&block[4..16]);
    k_scales(packed)
}

/// `d, dmin, scales[12], q[128]`: sub-blocks of 32, two in the nibbles of each 32 bytes; `w = d scale q - dmin min`.
#[inline(always)]
fn q4_k<S: Simd>(simd: S, block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(simd, block, 0), half_at(simd, block, 2));
    let (scales, mins) = k_scales_of(block);
    for (sub, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = (d * f32::from(scales[sub]), dmin * f32::from(mins[sub]));
        for i in 0..32 {
            let q = (block[16 + 32 * (sub / 2) + i] >> (4 * (sub % 2))) & 0xf;
            out[i] = i32::from(q) as f32 * scale - min;
        }
    }
}

/// `d, dmin, scales[12], h[32], q[128]`: as Q4_K; bit `sub` of `h[i]` is the fifth bit of weight `i` of sub-block `sub`.
#[inline(always)]
fn q5_k<S: Simd>(simd: S, block: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(simd, block, 0), half_at(simd, block, 2));
    let (scales, mins) = k_scales_of(block);
    for (sub, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = (d * f32::from(scales[sub]), dmin * f32::from(mins[sub]));
        for i in 0..32 {
            let low = (block[48 + 32 * (sub / 2) + i] >> (4 * (sub % 2))) & 0xf;
            let high = (block[16 + i] >> sub) & 1;
            out[i] = i32::from(low | high << 4) as f32 * scale - min;
        }
    }
}

/// `l[128], h[64], scales[16], d`: in each half of 128 weights the sub-block `b` of 32 has its low nibbles in
/// `l[64 half + 32 (b % 2)..]`, nibble `b / 2`, and its top two bits in `h[32 half..]`, bits `2 b`; signed scales, one for each 16
/// weights; `w = d scale (q - 32)`.
#[inline(always)]
fn q6_k<S: Simd>(simd: S, block: &[u8; 210], out: &mut [f32; 256]) {
    let d = half_at(simd, block, 208);
    for (sub, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, b) = (sub / 4, sub % 4);
        for i in 0..32 {
            let scale = d * f32::from(block[192 + 2 * sub + i / 16] as i8);
            let low = (block[64 * half + 32 * (b % 2) + i] >> (4 * (b / 2))) & 0xf;
            let high = (block[128 + 32 * half + i] >> (2 * b)) & 3;
            out[i] = (i32::from(low | high << 4) - 32) as f32 * scale;
        }
    }
}
