//! Products of a weight matrix with many rows of activations: what prefill is made of.

use crate::{Isa, Pool, Weight, quant};

/// Rows of weights that are decoded and multiplied together: with 1,536 columns 300 KB of f32, within a second-level cache; a divisor
/// of the usual row counts, so that few workers end together.
const TILE_ROWS: usize = 48;
/// Values between the rows of a tile: rows a multiple of 4 KiB apart would share the same few sets of the cache.
const ROW_PADDING: usize = 16;

/// Memory in which weights are decoded, one tile for each worker.
#[derive(Debug)]
pub struct GemmScratch {
    /// `[threads][TILE_ROWS][max_cols + ROW_PADDING]`
    tiles: Vec<f32>,
    threads: usize,
    tile_len: usize,
}

impl GemmScratch {
    /// Room for pools of up to `threads` workers and matrices of up to `max_cols` columns.
    pub fn new(threads: usize, max_cols: usize) -> GemmScratch {
        let tile_len = TILE_ROWS * (max_cols + ROW_PADDING);
        GemmScratch { tiles: vec![0.0; threads * tile_len], threads, tile_len }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.tiles.len() * size_of::<f32>()
    }
}

/// A buffer of which each task or worker uses its own part.
#[derive(Clone, Copy)]
struct Shared(*mut f32);

// SAFETY: tasks write disjoint rows of the output, and each worker only its own tile; see `gemm`.
unsafe impl Sync for Shared {}

impl Shared {
    fn at(self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

/// `out = x W^T`, or `out += x W^T` if `accumulate`; `x` is `[n][cols]`, `out` is `[n][rows]`.
///
/// The weights are decoded to f32 a tile at a time; the product is in f32. The bits of the result do not depend on the number of
/// threads.
///
/// # Panics
///
/// If the shapes do not fit each other, or `scratch` was made for fewer threads or columns.
pub fn gemm(
    pool: &Pool,
    isa: Isa,
    w: &Weight,
    x: &[f32],
    out: &mut [f32],
    accumulate: bool,
    scratch: &mut GemmScratch,
) {
    let (rows, cols) = (w.rows(), w.cols());
    if cols == 0 || rows == 0 {
        assert!(x.is_empty() || rows == 0, "activations of no columns");
        if !accumulate {
            out.fill(0.0);
        }
        return;
    }
    let n = x.len() / cols;
    assert_eq!(x.len(), n * cols, "activations are whole rows of {cols}");
    assert_eq!(out.len(), n * rows, "output of [{n}][{rows}]");
    assert!(pool.threads() <= scratch.threads, "scratch for {} of {} threads", scratch.threads, pool.threads());
    let stride = cols + ROW_PADDING;
    assert!(TILE_ROWS * stride <= scratch.tile_len, "scratch for fewer columns than {cols}");
    if n == 0 {
        return;
    }
    let tile_len = scratch.tile_len;
    let tiles = Shared(scratch.tiles.as_mut_ptr());
    let outs = Shared(out.as_mut_ptr());
    pool.for_each(rows.div_ceil(TILE_ROWS), |worker, task| {
        let first = task * TILE_ROWS;
        let count = TILE_ROWS.min(rows - first);
        // SAFETY: `worker < threads`, so the tile lies in the scratch, and no other worker has this one.
        let tile = unsafe { std::slice::from_raw_parts_mut(tiles.at(worker * tile_len), count * stride) };
        for (row, tile) in tile.chunks_exact_mut(stride).enumerate() {
            quant::dequantize_rows(isa, w, first + row, &mut tile[..cols]);
        }
        // SAFETY: the three matrices lie within `out` (columns `first..first + count`, which no other task has), the tile and `x`.
        unsafe {
            gemm::gemm(
                count,
                n,
                cols,
                outs.at(first),
                rows as isize,
                1,
                accumulate,
                tile.as_ptr(),
                1,
                stride as isize,
                x.as_ptr(),
                cols as isize,
                1,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    });
}
