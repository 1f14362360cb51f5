//! The input of weight products: rows of activations, as floats and as 8-bit codes.

use super::dot::{self, BLOCK, GROUP_MAX, Kernel, PIECE, Simd};
use crate::Isa;

/// Rows of activations are padded to this with zeros, so that all vector widths read whole vectors.
const PADDED: usize = GROUP_MAX * BLOCK;

/// How activations meet quantised weights. Float weights always meet f32 activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Weights are decoded to f32 and multiplied with f32 activations.
    Exact,
    /// Activations are rounded to 8 bit with one scale for each 32, and products are sums of integers. The rounding error of an
    /// activation is at most 1/254 of the largest magnitude among its 32.
    Fast,
}

/// The input of one or more products, in the form that the kernels read. Buffers are made once and used again.
#[derive(Debug)]
pub struct Activations {
    isa: Isa,
    precision: Precision,
    rows: usize,
    cols: usize,
    rows_max: usize,
    cols_max: usize,
    /// Values of a row in all buffers of one entry per value.
    stride: usize,
    /// `[rows][stride]`, zero from `cols` on.
    floats: Vec<f32>,
    /// `[rows][stride / (32 GROUP)][2][GROUP][16]`: halves of blocks interleaved as the vectors of the instruction set want them.
    codes: Vec<i8>,
    /// `[rows][stride / 32][2]`: scale of a block, and scale times the sum of its codes.
    pairs: Vec<f32>,
    /// `[rows][stride / 32]`: the scales.
    scales: Vec<f32>,
    /// `[rows][stride / 32]`: the sums.
    sums: Vec<f32>,
}

impl Activations {
    /// Room for `max_rows` rows of up to `max_cols` values.
    pub fn new(max_rows: usize, max_cols: usize) -> Activations {
        let padded = max_cols.next_multiple_of(PADDED);
        let blocks = max_rows * padded / BLOCK;
        Activations {
            isa: Isa::Scalar,
            precision: Precision::Exact,
            rows: 0,
            cols: 0,
            rows_max: max_rows,
            cols_max: max_cols,
            stride: padded,
            floats: vec![0.0; max_rows * padded],
            codes: vec![0; max_rows * padded],
            pairs: vec![0.0; 2 * blocks],
            scales: vec![0.0; blocks],
            sums: vec![0.0; blocks],
        }
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> usize {
        let floats = self.floats.len() + self.pairs.len() + self.scales.len() + self.sums.len();
        floats * size_of::<f32>() + self.codes.len()
    }

    /// Rows that are set.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Length of the rows that are set.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Takes `x`, `[n][cols]`, for products on `isa`; allocates nothing.
    ///
    /// With [`Precision::Fast`] a block of 32 that holds an infinity or NaN makes every product with it NaN, and one whose largest
    /// magnitude is below 2^-100 counts as zero.
    ///
    /// # Panics
    ///
    /// If `x` is not `[n][cols]` or exceeds what there is room for.
    pub fn set(&mut self, isa: Isa, x: &[f32], n: usize, cols: usize, precision: Precision) {
        assert_eq!(x.len(), n * cols, "activations of [{n}][{cols}]");
        assert!(n <= self.rows_max && cols <= self.cols_max, "[{n}][{cols}] in [{}][{}]", self.rows_max, self.cols_max);
        self.isa = isa.usable();
        self.precision = precision;
        self.rows = n;
        self.cols = cols;
        self.stride = cols.next_multiple_of(PADDED);
        for row in 0..n {
            let floats = &mut self.floats[row * self.stride..(row + 1) * self.stride];
            floats[..cols].copy_from_slice(&x[row * cols..(row + 1) * cols]);
            floats[cols..].fill(0.0);
        }
        if precision == Precision::Fast {
            dot::dispatch(isa, Quantise { x: self });
        }
    }

    /// The instruction set that the rows are set for.
    pub(crate) fn isa(&self) -> Isa {
        self.isa
    }

    /// How the rows meet quantised weights.
    pub(crate) fn precision(&self) -> Precision {
        self.precision
    }

    /// Row `row`, padded with zeros.
    #[inline(always)]
    pub(crate) fn floats(&self, row: usize) -> &[f32] {
        &self.floats[row * self.stride..(row + 1) * self.stride]
    }

    /// Codes of step `step` of row `row`: first and second halves of its blocks.
    ///
    /// # Safety
    ///
    /// The row is set, was quantised for `S`, and has the step.
    #[inline(always)]
    pub(crate) unsafe fn codes<S: Simd>(&self, simd: S, row: usize, step: usize) -> [S::Bytes; 2] {
        let at = row * self.stride + step * S::GROUP * BLOCK;
        debug_assert!(at + S::GROUP * BLOCK <= self.codes.len());
        // SAFETY: the caller vouches that the step lies within the row.
        unsafe {
            let p = self.codes.as_ptr().add(at);
            [simd.load_bytes(p), simd.load_bytes(p.add(S::GROUP * PIECE))]
        }
    }

    /// Scale and scaled sum of each block of step `step` of row `row`.
    ///
    /// # Safety
    ///
    /// As for [`Activations::codes`].
    #[inline(always)]
    pub(crate) unsafe fn scale_sum_pairs<S: Simd>(&self, simd: S, row: usize, step: usize) -> S::Pairs {
        let at = 2 * (row * self.stride / BLOCK + step * S::GROUP);
        debug_assert!(at + 2 * S::GROUP <= self.pairs.len());
        // SAFETY: the caller vouches that the step lies within the row.
        unsafe { simd.load_pairs(self.pairs.as_ptr().add(at)) }
    }

    /// Scales of the eight blocks of values `256 block..` of row `row`.
    ///
    /// # Safety
    ///
    /// As for [`Activations::codes`], with the values within the row.
    #[inline(always)]
    pub(crate) unsafe fn scales_oct<S: Simd>(&self, simd: S, row: usize, block: usize) -> S::Oct {
        let at = row * self.stride / BLOCK + 8 * block;
        debug_assert!(at + 8 <= self.scales.len());
        // SAFETY: the caller vouches that the values lie within the row.
        unsafe { simd.load_oct(self.scales.as_ptr().add(at)) }
    }

    /// Scaled sums of the eight blocks of values `256 block..` of row `row`.
    ///
    /// # Safety
    ///
    /// As for [`Activations::scales_oct`].
    #[inline(always)]
    pub(crate) unsafe fn sums_oct<S: Simd>(&self, simd: S, row: usize, block: usize) -> S::Oct {
        let at = row * self.stride / BLOCK + 8 * block;
        debug_assert!(at + 8 <= self.sums.len());
        // SAFETY: the caller vouches that the values lie within the row.
        unsafe { simd.load_oct(self.sums.as_ptr().add(at)) }
    }
}

/// Rounds the floats of the rows that are set to codes.
struct Quantise<'a> {
    x: &'a mut Activations,
}

impl Kernel for Quantise<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        let x = self.x;
        for block in 0..x.rows * x.stride / BLOCK {
            let mut values = [0.0; BLOCK];
            values.copy_from_slice(&x.floats[block * BLOCK..(block + 1) * BLOCK]);
            let (codes, scale) = quantise_block(&values);
            // Rows are whole groups, so the group of a block does not depend on its row.
            let (group, member) = (block / S::GROUP, block % S::GROUP);
            for half in 0..2 {
                let at = group * S::GROUP * BLOCK + half * S::GROUP * PIECE + member * PIECE;
                x.codes[at..at + PIECE].copy_from_slice(&codes[half * PIECE..(half + 1) * PIECE]);
            }
            let sum = scale * codes.iter().map(|&code| i32::from(code)).sum::<i32>() as f32;
            x.pairs[2 * block] = scale;
            x.pairs[2 * block + 1] = sum;
            x.scales[block] = scale;
            x.sums[block] = sum;
        }
    }
}

/// Codes from -127 to 127 and their scale: `x = scale code`, rounded to nearest even.
#[inline(always)]
fn quantise_block(values: &[f32; BLOCK]) -> ([i8; BLOCK], f32) {
    /// Magnitudes as bits order as the numbers do, infinity and NaN above all.
    const INFINITY_BITS: u32 = f32::INFINITY.to_bits();
    /// 2^-100: below it the inverse of the scale could overflow.
    const TINY: f32 = f32::from_bits((127 - 100) << 23);
    /// 1.5 * 2^23: adding it leaves the rounded integer in the low bits.
    const ROUND: f32 = 12_582_912.0;

    let max_bits = values.iter().fold(0, |max: u32, value| max.max(value.to_bits() & 0x7fff_ffff));
    if max_bits >= INFINITY_BITS {
        return ([0; BLOCK], f32::NAN);
    }
    let max = f32::from_bits(max_bits);
    if max < TINY {
        return ([0; BLOCK], 0.0);
    }
    let inverse = 127.0 / max;
    let mut codes = [0; BLOCK];
    for (code, value) in codes.iter_mut().zip(values) {
        *code = (value * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i8;
    }
    (codes, max / 127.0)
}
