//! Products of weight matrices with a few rows of activations: what a decode step is made of.
//!
//! Weights are read once, where they lie; the work is bound by that reading. Activations are a few kilobytes and stay in the
//! first-level cache.

use crate::cpu::activations::{Activations, Precision};
use crate::cpu::dot::float::{BF16, F16, F32, FloatRow};
use crate::cpu::dot::k_quant::{Q6K, ScaleMin};
use crate::cpu::dot::quant32::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::cpu::dot::row::{RowDot, RowShape};
use crate::cpu::dot::{self, Kernel, Simd};
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
/// Weights that are decoded together where weights are multiplied in f32.
const DECODED: usize = 256;

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
    assert_eq!(isa.usable(), x.isa(), "activations were set for another instruction set");
    for jobs in jobs.chunks_mut(JOBS_MAX) {
        let mut tasks = 0;
        let mut outs = [Out(std::ptr::null_mut()); JOBS_MAX];
        for (job, out) in jobs.iter_mut().zip(&mut outs) {
            assert_eq!(job.weight.cols(), x.cols(), "columns of the weights and length of the activations");
            assert_eq!(job.out.len(), x.rows() * job.weight.rows(), "output of [{}][{}]", x.rows(), job.weight.rows());
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
                    // SAFETY: `out` has `x.rows()` rows of `weight.rows()` values, as asserted above; no other task has these rows of the
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
/// `out` is `[x.rows()][weight.rows()]`, columns `first..first + count` of it belong to the caller.
unsafe fn multiply(isa: Isa, x: &Activations, weight: &Weight, first: usize, count: usize, out: *mut f32) {
    let rows =
        Rows { data: weight.row_data(first, count), count, out: out.wrapping_add(first), out_stride: weight.rows() };
    let row_bytes = weight.row_bytes();
    // A whole number of the strips that are read together, so that all their next lines are asked for.
    let strip = (ROWS * row_bytes).max(1);
    let prefetch = strip * PREFETCH_BYTES.div_ceil(strip);
    let shape = RowShape { cols: x.cols(), row_bytes, prefetch };
    let dtype = weight.dtype();
    if x.precision() == Precision::Exact && !dtype.is_float() {
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
            while n < self.x.rows() {
                let shared = if self.x.rows() - n >= SHARED { SHARED } else { 1 };
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
        debug_assert!(row + R <= self.rows.count && n + N <= self.x.rows());
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
            for first_n in (0..x.rows()).step_by(SHARED) {
                let count = SHARED.min(x.rows() - first_n);
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
