//! Products of weight matrices with a few rows of activations: what a decode step is made of.
//!
//! Weights are read once, where they lie; the work is bound by that reading. Activations are a few kilobytes and stay in the
//! first-level cache.

use crate::cpu::dot::float::{BF16, F16, F32, FloatRow};
use crate::cpu::dot::k_quant::{Q6K, ScaleMin};
use crate::cpu::dot::quant32::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::cpu::dot::{self, BLOCK, GROUP_MAX, Kernel, PIECE, RowDot, RowShape, Simd};
use crate::{Isa, Pool, Weight, WeightType, quant};

/// Bytes of weights in one task: long enough to hide the claim of a task, short enough to end together.
const TASK_BYTES: usize = 16 << 10;
/// Rows that are multiplied together; a task is a multiple of it.
const ROWS: usize = 4;
/// Activation rows that share one decoded block of weights.
const SHARED: usize = 4;
/// The least distance of prefetching, by measurement (`weight_speed`): 2 KiB, memory latency times the bandwidth of a core, leaves a
/// third of the speed of narrow matrices behind; with 16 KiB the lines that the end of a task asks for in vain cost more.
const PREFETCH_BYTES: usize = 8 << 10;
/// Rows of activations are padded to this with zeros, so that all vector widths read whole vectors.
const PADDED: usize = GROUP_MAX * BLOCK;
/// Weights that are decoded together where weights are multiplied in f32.
const DECODED: usize = 256;

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

/// One matrix of a product.
#[derive(Debug)]
pub struct GemvJob<'a> {
    /// `[rows][cols]`, with the `cols` of the activations.
    pub weight: Weight<'a>,
    /// `[n][rows]`, overwritten.
    pub out: &'a mut [f32],
}

/// Matrices in one fork-join; more take several.
const JOBS_MAX: usize = 8;

/// An output that tasks write disjoint parts of.
#[derive(Clone, Copy)]
struct Out(*mut f32);

// SAFETY: each task writes the elements of its own rows only, and nothing reads them before the join.
unsafe impl Sync for Out {}

/// `out = x W^T` for each job, up to eight of them in one fork-join. The matrices share the input `x`, as those of Q, K and V do.
///
/// The bits of the result depend on the instruction set and the precision, and not on the number of threads, on the other jobs or
/// on `n`. A weight scale that is infinite or NaN makes its row's result infinite or NaN.
///
/// # Panics
///
/// If a job's shape does not fit `x`, or `x` was set for another instruction set.
pub fn gemv(pool: &Pool, isa: Isa, x: &Activations, jobs: &mut [GemvJob]) {
    assert_eq!(isa.usable(), x.isa, "activations were set for another instruction set");
    for jobs in jobs.chunks_mut(JOBS_MAX) {
        let mut tasks = 0;
        let mut outs = [Out(std::ptr::null_mut()); JOBS_MAX];
        for (job, out) in jobs.iter_mut().zip(&mut outs) {
            assert_eq!(job.weight.cols(), x.cols, "columns of the weights and length of the activations");
            assert_eq!(job.out.len(), x.rows * job.weight.rows(), "output of [{}][{}]", x.rows, job.weight.rows());
            tasks += tasks_of(&job.weight);
            *out = Out(job.out.as_mut_ptr());
        }
        let (jobs, outs): (&[GemvJob], &[Out; JOBS_MAX]) = (jobs, &outs);
        pool.for_each(tasks, |_, task| {
            let mut task = task;
            for (job, out) in jobs.iter().zip(outs) {
                if task < tasks_of(&job.weight) {
                    let first = task * rows_per_task(&job.weight);
                    let count = rows_per_task(&job.weight).min(job.weight.rows() - first);
                    // SAFETY: `out` has `x.rows` rows of `weight.rows()` values, as asserted above; no other task has these rows of the
                    // matrix, and the exclusive borrow of the output lasts until the join.
                    unsafe { multiply(isa, x, &job.weight, first, count, out.0) };
                    return;
                }
                task -= tasks_of(&job.weight);
            }
        });
    }
}

/// Rows of the matrix in one task. A property of the matrix alone, so that results do not depend on the number of threads.
fn rows_per_task(weight: &Weight) -> usize {
    (TASK_BYTES / weight.row_bytes().max(1)).clamp(1, TASK_BYTES).next_multiple_of(ROWS)
}

fn tasks_of(weight: &Weight) -> usize {
    weight.rows().div_ceil(rows_per_task(weight))
}

/// Multiplies `count` rows of the matrix from `first` on with all rows of `x`.
///
/// # Safety
///
/// `out` is `[x.rows][weight.rows()]`, columns `first..first + count` of it belong to the caller.
unsafe fn multiply(isa: Isa, x: &Activations, weight: &Weight, first: usize, count: usize, out: *mut f32) {
    let rows =
        Rows { data: weight.row_data(first, count), count, out: out.wrapping_add(first), out_stride: weight.rows() };
    let row_bytes = weight.row_bytes();
    // A whole number of the strips that are read together, so that all their next lines are asked for.
    let strip = (ROWS * row_bytes).max(1);
    let prefetch = strip * PREFETCH_BYTES.div_ceil(strip);
    let shape = RowShape { cols: x.cols, row_bytes, prefetch };
    let dtype = weight.dtype();
    if x.precision == Precision::Exact && !dtype.is_float() {
        return dot::dispatch(isa, Decoded { rows, shape, x, dtype });
    }
    match dtype {
        WeightType::F32 => dot::dispatch(isa, Direct { rows, shape, x, format: FloatRow(F32) }),
        WeightType::F16 => dot::dispatch(isa, Direct { rows, shape, x, format: FloatRow(F16) }),
        WeightType::BF16 => dot::dispatch(isa, Direct { rows, shape, x, format: FloatRow(BF16) }),
        WeightType::Q4_0 => dot::dispatch(isa, Direct { rows, shape, x, format: Q4_0 }),
        WeightType::Q4_1 => dot::dispatch(isa, Direct { rows, shape, x, format: Q4_1 }),
        WeightType::Q5_0 => dot::dispatch(isa, Direct { rows, shape, x, format: Q5_0 }),
        WeightType::Q5_1 => dot::dispatch(isa, Direct { rows, shape, x, format: Q5_1 }),
        WeightType::Q8_0 => dot::dispatch(isa, Direct { rows, shape, x, format: Q8_0 }),
        WeightType::Q4K => dot::dispatch(isa, Direct { rows, shape, x, format: ScaleMin::<false> }),
        WeightType::Q5K => dot::dispatch(isa, Direct { rows, shape, x, format: ScaleMin::<true> }),
        WeightType::Q6K => dot::dispatch(isa, Direct { rows, shape, x, format: Q6K }),
    }
}

/// Some rows of a matrix and the columns of the output that they make.
struct Rows<'a> {
    /// `[count]` rows.
    data: &'a [u8],
    count: usize,
    /// The output of the first row for the first row of activations.
    out: *mut f32,
    /// Distance of the outputs of one row for neighbouring rows of activations.
    out_stride: usize,
}

/// A product straight on the stored weights.
struct Direct<'a, D> {
    rows: Rows<'a>,
    shape: RowShape,
    x: &'a Activations,
    format: D,
}

impl<D: RowDot> Kernel for Direct<'_, D> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut row = 0;
        while row < self.rows.count {
            let mut n = 0;
            let rows = if self.rows.count - row >= ROWS { ROWS } else { 1 };
            while n < self.x.rows {
                let shared = if self.x.rows - n >= SHARED { SHARED } else { 1 };
                // SAFETY: `rows` rows from `row` on and `shared` rows of activations from `n` on exist.
                unsafe {
                    match (rows, shared) {
                        (ROWS, 1) => self.some::<S, ROWS, 1>(simd, row, n),
                        (_, 1) => self.some::<S, 1, 1>(simd, row, n),
                        _ => (row..row + rows).for_each(|row| self.some::<S, 1, SHARED>(simd, row, n)),
                    }
                }
                n += shared;
            }
            row += rows;
        }
    }
}

impl<D: RowDot> Direct<'_, D> {
    /// # Safety
    ///
    /// Rows `row..row + R` and rows of activations `n..n + N` exist.
    #[inline(always)]
    unsafe fn some<S: Simd, const R: usize, const N: usize>(&self, simd: S, row: usize, n: usize) {
        debug_assert!(row + R <= self.rows.count && n + N <= self.x.rows);
        // SAFETY: the caller vouches for the rows; `data` holds `count` of them; `gemv` made sure that the activations were set for
        // this instruction set; the outputs belong to this task.
        unsafe {
            let w = self.rows.data.as_ptr().add(row * self.shape.row_bytes);
            let dots: [[f32; N]; R] = self.format.dots(simd, w, self.shape, self.x, n);
            for r in 0..R {
                for i in 0..N {
                    *self.rows.out.add((n + i) * self.rows.out_stride + row + r) = dots[r][i];
                }
            }
        }
    }
}

/// A product in f32 with weights that are decoded on the way.
struct Decoded<'a> {
    rows: Rows<'a>,
    shape: RowShape,
    x: &'a Activations,
    dtype: WeightType,
}

impl Kernel for Decoded<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Decoded { rows, shape, x, dtype } = self;
        let mut decoded = [0.0; DECODED];
        for row in 0..rows.count {
            let data = &rows.data[row * shape.row_bytes..(row + 1) * shape.row_bytes];
            for first_n in (0..x.rows).step_by(SHARED) {
                let count = SHARED.min(x.rows - first_n);
                let mut acc = [[simd.zero(); 2]; SHARED];
                for at in (0..shape.cols).step_by(DECODED) {
                    let len = DECODED.min(shape.cols - at);
                    let bytes = |cols: usize| cols / dtype.block_len() * dtype.block_bytes();
                    quant::decode(simd, dtype, &data[bytes(at)..bytes(at + len)], &mut decoded[..len]);
                    for n in 0..count {
                        let values = &x.floats(first_n + n)[at..at + len];
                        for (i, (w, x)) in
                            decoded[..len].chunks_exact(S::WIDTH).zip(values.chunks_exact(S::WIDTH)).enumerate()
                        {
                            // SAFETY: both chunks hold `WIDTH` f32.
                            let (w, x) = unsafe { (simd.load(w.as_ptr()), simd.load(x.as_ptr())) };
                            acc[n][i % 2] = simd.fma(w, x, acc[n][i % 2]);
                        }
                    }
                }
                for n in 0..count {
                    let out = rows.out.wrapping_add((first_n + n) * rows.out_stride + row);
                    // SAFETY: row `row` of the matrix and its outputs belong to this task.
                    unsafe { *out = simd.sum(simd.add(acc[n][0], acc[n][1])) };
                }
            }
        }
    }
}
