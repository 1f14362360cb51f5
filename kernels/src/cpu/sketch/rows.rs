//! Sketch rows as they lie in memory: in blocks, transposed, as the kernels read them.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use half::f16;

use super::{RANK_MAX, nearest};
use crate::cpu::pool::Pool;

/// Rows in a block: a multiple of twice the lanes of every instruction set.
pub const BLOCK_ROWS: usize = 64;
/// What is added to a value of an i4 row so that it fits a nibble.
pub(super) const NIBBLE_BIAS: i32 = 8;

/// Precision of sketch rows.
///
/// Rows lie in blocks of [`BLOCK_ROWS`], transposed: one row per lane, so that a dot product needs no sum over lanes.
///
/// - `F16`: `[rank][BLOCK_ROWS]` values.
/// - `I8`: `[ceil(rank / 4)][BLOCK_ROWS]` words of four signed bytes, -127 to 127.
/// - `I4`: `[ceil(rank / 8)][BLOCK_ROWS]` words of eight values from -7 to 7, plus 8: the low halves of the four bytes hold values 0 to 3, the
///   high ones values 4 to 7.
///
/// Blocks of the integer types end with `[BLOCK_ROWS]` f16 scales; value times scale is the number. Values behind the rank are 0. All is little
/// endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SketchType {
    /// 2 bytes per value.
    F16,
    /// 1 byte per value, rounded up to words, and 2 per row.
    I8,
    /// Half a byte per value, rounded up to words, and 2 per row.
    I4,
}

impl SketchType {
    /// Bytes that a row takes in its block.
    pub const fn row_bytes(self, rank: usize) -> usize {
        match self {
            SketchType::F16 => 2 * rank,
            SketchType::I8 => 4 * rank.div_ceil(4) + 2,
            SketchType::I4 => 4 * rank.div_ceil(8) + 2,
        }
    }

    /// Bytes of the blocks of `rows` rows.
    pub const fn bytes(self, rank: usize, rows: usize) -> usize {
        rows.next_multiple_of(BLOCK_ROWS) * self.row_bytes(rank)
    }

    /// Values per word and row.
    pub(super) const fn word_values(self) -> usize {
        match self {
            SketchType::F16 => 2,
            SketchType::I8 => 4,
            SketchType::I4 => 8,
        }
    }
}

/// A cache line, which is what a vector of the widest instruction set reads.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Sketch rows of one layer.
#[derive(Debug, Clone)]
pub struct SketchRows {
    ty: SketchType,
    rank: usize,
    rows: usize,
    lines: Vec<Line>,
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Line")
    }
}

impl SketchRows {
    /// `rows` rows of zeros. Memory is [`SketchType::bytes`].
    ///
    /// # Panics
    /// If the rank exceeds [`RANK_MAX`].
    pub fn new(ty: SketchType, rank: usize, rows: usize) -> SketchRows {
        assert!(rank <= RANK_MAX, "rank {rank} exceeds {RANK_MAX}");
        // A block is whole lines: `BLOCK_ROWS` times the bytes of a row.
        SketchRows { ty, rank, rows, lines: vec![Line::zeroed(); ty.bytes(rank, rows) / size_of::<Line>()] }
    }

    /// The precision.
    pub fn ty(&self) -> SketchType {
        self.ty
    }

    /// Values of a row.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Rows that there is room for.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// All blocks.
    pub fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.lines)
    }

    /// All blocks, to restore what [`SketchRows::as_bytes`] gave.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.lines)
    }

    pub(super) fn block_bytes(&self) -> usize {
        BLOCK_ROWS * self.ty.row_bytes(self.rank)
    }

    /// Encodes row `index`.
    ///
    /// Scales round to nearest, and values to the nearest multiple of the rounded scale. NaN becomes 0 in integer rows; what exceeds the range
    /// of f16 becomes infinity in `F16` and the largest value in the others.
    ///
    /// # Panics
    /// If `values` is not `[rank]` or there is no such row.
    pub fn set(&mut self, index: usize, values: &[f32]) {
        assert!(values.len() == self.rank && index < self.rows, "row {index} of {} values", values.len());
        if self.rank == 0 {
            return;
        }
        let (ty, size) = (self.ty, self.block_bytes());
        encode(ty, values, &mut self.as_bytes_mut()[index / BLOCK_ROWS * size..][..size], index % BLOCK_ROWS);
    }

    /// Encodes rows `range`, whose values `make` writes, `[rows of the range it gets][rank]`. It is called on several threads, once for
    /// each block.
    ///
    /// # Panics
    /// If there are no such rows.
    pub fn set_all(&mut self, pool: &Pool, range: Range<usize>, make: impl Fn(Range<usize>, &mut [f32]) + Sync) {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        if self.rank == 0 || range.is_empty() {
            return;
        }
        let (ty, rank, size) = (self.ty, self.rank, self.block_bytes());
        let first_block = range.start / BLOCK_ROWS;
        let blocks = &mut self.as_bytes_mut()[first_block * size..range.end.div_ceil(BLOCK_ROWS) * size];
        pool.for_each_chunk(blocks, size, |_, block, bytes| {
            let first = (first_block + block) * BLOCK_ROWS;
            let rows = range.start.max(first)..range.end.min(first + BLOCK_ROWS);
            let mut values = vec![0.0; rows.len() * rank];
            make(rows.clone(), &mut values);
            for (row, values) in rows.zip(values.chunks_exact(rank)) {
                encode(ty, values, bytes, row - first);
            }
        });
    }

    /// Decodes row `index`; the inverse of [`SketchRows::set`] but for rounding.
    ///
    /// # Panics
    /// If `out` is not `[rank]` or there is no such row.
    pub fn get(&self, index: usize, out: &mut [f32]) {
        assert!(out.len() == self.rank && index < self.rows, "row {index} of {} values", out.len());
        if self.rank == 0 {
            return;
        }
        let size = self.block_bytes();
        let (block, row) = (&self.as_bytes()[index / BLOCK_ROWS * size..][..size], index % BLOCK_ROWS);
        if self.ty == SketchType::F16 {
            for (i, out) in out.iter_mut().enumerate() {
                *out = half_at(block, i * BLOCK_ROWS + row).to_f32();
            }
            return;
        }
        let scale = half_at(block, size / 2 - BLOCK_ROWS + row).to_f32();
        for (i, out) in out.iter_mut().enumerate() {
            let word = i / self.ty.word_values();
            let at = 4 * (word * BLOCK_ROWS + row) + i % 4;
            let value = match self.ty {
                SketchType::I4 => i32::from(block[at] >> (i % 8 / 4 * 4) & 15) - NIBBLE_BIAS,
                _ => i32::from(block[at] as i8),
            };
            *out = value as f32 * scale;
        }
    }
}

fn half_at(block: &[u8], index: usize) -> f16 {
    f16::from_le_bytes([block[2 * index], block[2 * index + 1]])
}

/// Writes `values` as row `row` of a block.
fn encode(ty: SketchType, values: &[f32], block: &mut [u8], row: usize) {
    let levels = match ty {
        SketchType::F16 => {
            for (out, &x) in block.chunks_exact_mut(2 * BLOCK_ROWS).zip(values) {
                out[2 * row..2 * row + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
            }
            return;
        }
        SketchType::I8 => 127.0,
        SketchType::I4 => 7.0,
    };
    let largest = values.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let scale = f16::from_f32((largest / levels).min(f16::MAX.to_f32()));
    let inverse = if scale > f16::ZERO { 1.0 / scale.to_f32() } else { 0.0 };
    let quantise = |x: Option<&f32>| nearest((x.copied().unwrap_or(0.0) * inverse).clamp(-levels, levels));
    let nibble = |x: Option<&f32>| (quantise(x) + NIBBLE_BIAS as i8) as u8;
    let (words, scales) = block.split_at_mut(block.len() - 2 * BLOCK_ROWS);
    scales[2 * row..2 * row + 2].copy_from_slice(&scale.to_le_bytes());
    for (word, values) in words.chunks_exact_mut(4 * BLOCK_ROWS).zip(values.chunks(ty.word_values())) {
        for (j, byte) in word[4 * row..4 * row + 4].iter_mut().enumerate() {
            *byte = match ty {
                SketchType::I4 => nibble(values.get(j)) | nibble(values.get(j + 4)) << 4,
                _ => quantise(values.get(j)) as u8,
            };
        }
    }
}
