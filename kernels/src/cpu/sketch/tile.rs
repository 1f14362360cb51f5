//! Integer and f16 dot products of some tens of sketch rows with all queries.
//!
//! The values of the rows stand transposed in the nearest cache, one row per lane, four bytes of the rank per lane and step, so that an integer
//! dot product needs no sum over lanes.

use std::mem::MaybeUninit;

use half::f16;

use super::{NIBBLE_BIAS, RANK_MAX, SketchQueries, SketchType, nibble_of, words};
use crate::cpu::arch::Simd;

/// Rows per tile: a multiple of twice the lanes of every instruction set.
pub(super) const TILE_ROWS: usize = 64;
/// Queries per pass over a tile.
pub(super) const QUERY_TILE: usize = 4;

/// Sketch rows and the queries that they are scored by.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub ty: SketchType,
    pub rank: usize,
    pub bytes: &'a [u8],
    pub queries: &'a SketchQueries,
}

/// Words of a tile of the widest rows.
const WORDS_MAX: usize = RANK_MAX / 2 * TILE_ROWS;

/// Values of one tile of rows, transposed.
pub(super) struct Tile {
    /// `[words][TILE_ROWS]` of four bytes for i8, of eight nibbles (low halves first) for i4; `[rank][TILE_ROWS]` of f16. Initialised as far as the
    /// rank goes.
    words: [MaybeUninit<u32>; WORDS_MAX],
    scales: [f16; TILE_ROWS],
    /// `[queries][TILE_ROWS]`, what [`Tile::score`] fills.
    pub scores: [f32; QUERY_TILE * TILE_ROWS],
}

impl Tile {
    #[inline(always)]
    pub fn new() -> Tile {
        Tile {
            words: [const { MaybeUninit::uninit() }; WORDS_MAX],
            scales: [f16::ZERO; TILE_ROWS],
            scores: [0.0; QUERY_TILE * TILE_ROWS],
        }
    }

    /// Sets all words that rows of this shape use. To be called before [`Tile::fill`] and [`Tile::score`].
    #[inline(always)]
    pub fn clear(&mut self, rows: &Rows) {
        let words = match rows.ty {
            SketchType::F16 => rows.rank.div_ceil(2),
            SketchType::I8 => rows.rank.div_ceil(4),
            SketchType::I4 => rows.rank.div_ceil(8),
        };
        self.words[..words * TILE_ROWS].fill(MaybeUninit::new(0));
    }

    /// Takes `count` rows from `first` on. What the other rows of the tile hold has no meaning.
    #[inline(always)]
    pub fn fill<S: Simd>(&mut self, s: S, rows: &Rows, first: usize, count: usize) {
        let rank = rows.rank;
        let row_bytes = rows.ty.row_bytes(rank);
        let bytes = &rows.bytes[first * row_bytes..][..count * row_bytes];
        let words = match rows.ty {
            SketchType::F16 => rank / 2,
            SketchType::I8 => rank / 4,
            SketchType::I4 => rank / 8,
        };
        assert!(words * TILE_ROWS <= WORDS_MAX && count <= TILE_ROWS);
        // Four words at a time, the last four possibly a second time.
        let together = if words < 4 { 0 } else { count / S::LANES * S::LANES };
        for row in (0..together).step_by(S::LANES) {
            for word in (0..words).step_by(4) {
                let word = word.min(words - 4);
                // SAFETY: rows up to `row + LANES` are inside `bytes`, each with at least `4 * words` bytes; the tile has room for `words`.
                unsafe {
                    let from = bytes.as_ptr().add(row * row_bytes + 4 * word);
                    let to = self.words.as_mut_ptr().cast::<u32>().add(word * TILE_ROWS + row);
                    s.transpose4(from, row_bytes, to, TILE_ROWS);
                }
            }
        }
        for row in together..count {
            for word in 0..words {
                let at = row * row_bytes + 4 * word;
                let value = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
                self.words[word * TILE_ROWS + row].write(value);
            }
        }
        if rows.ty == SketchType::F16 {
            self.split_halves(words);
            if rank % 2 == 1 {
                for (row, bytes) in bytes.chunks_exact(row_bytes.max(1)).enumerate() {
                    // Rows of the last value are the low halves of one row of words and a bit.
                    let value = u16::from_le_bytes([bytes[row_bytes - 2], bytes[row_bytes - 1]]);
                    // SAFETY: `clear` initialised the words of an odd rank too: value `rank - 1` of all rows is inside.
                    unsafe { self.words.as_mut_ptr().cast::<u16>().add((rank - 1) * TILE_ROWS + row).write(value) };
                }
            }
            return;
        }
        let whole_bytes = 4 * words;
        for (row, bytes) in bytes.chunks_exact(row_bytes.max(1)).enumerate() {
            self.scales[row] = f16::from_le_bytes([bytes[row_bytes - 2], bytes[row_bytes - 1]]);
            let rest = &bytes[whole_bytes..row_bytes - 2];
            if !rest.is_empty() {
                let word = if rows.ty == SketchType::I4 { nibble_tail(rank, rest) } else { byte_tail(rest) };
                self.words[words * TILE_ROWS + row].write(word);
            }
        }
    }

    /// Splits words of two f16 each, `[words][TILE_ROWS]`, into `[2 * words][TILE_ROWS]` of f16, in place.
    #[inline(always)]
    fn split_halves(&mut self, words: usize) {
        for word in 0..words {
            let pairs = &mut self.words[word * TILE_ROWS..][..TILE_ROWS];
            let mut copy = [0u32; TILE_ROWS];
            for (copy, pair) in copy.iter_mut().zip(pairs.iter()) {
                // SAFETY: `clear` initialised all words of the rank.
                *copy = unsafe { pair.assume_init() };
            }
            let halves = pairs.as_mut_ptr().cast::<u16>();
            for (row, pair) in copy.into_iter().enumerate() {
                // SAFETY: TILE_ROWS words are room for twice as many halves.
                unsafe {
                    halves.add(row).write(pair as u16);
                    halves.add(TILE_ROWS + row).write((pair >> 16) as u16);
                }
            }
        }
    }

    /// Fills `scores`, `[queries][TILE_ROWS]`, with `factor` times the scores of `count` queries from `first` on.
    #[inline(always)]
    pub fn score<S: Simd>(&mut self, s: S, rows: &Rows, first: usize, count: usize, factor: f32) {
        match count {
            1 => self.score_queries::<S, 1>(s, rows, first, factor),
            2 => self.score_queries::<S, 2>(s, rows, first, factor),
            3 => self.score_queries::<S, 3>(s, rows, first, factor),
            _ => self.score_queries::<S, QUERY_TILE>(s, rows, first, factor),
        }
    }

    #[inline(always)]
    fn score_queries<S: Simd, const Q: usize>(&mut self, s: S, rows: &Rows, first: usize, factor: f32) {
        for row in (0..TILE_ROWS).step_by(2 * S::LANES) {
            // SAFETY (of all three): TILE_ROWS is a multiple of `2 * LANES`, so the lanes from `row` on are inside the tile, whose arrays hold
            // RANK_MAX values of TILE_ROWS rows, and the queries from `first` to `first + Q` are there.
            match rows.ty {
                // SAFETY: see above.
                SketchType::F16 => unsafe { self.score_f16::<S, Q>(s, rows, first, row, factor) },
                // SAFETY: see above.
                SketchType::I8 => unsafe { self.score_i8::<S, Q>(s, rows, first, row, factor) },
                // SAFETY: see above.
                SketchType::I4 => unsafe { self.score_i4::<S, Q>(s, rows, first, row, factor) },
            }
        }
    }

    /// # Safety
    /// `row + 2 * LANES <= TILE_ROWS`, and `first + Q` queries are there.
    #[inline(always)]
    unsafe fn score_f16<S: Simd, const Q: usize>(&mut self, s: S, rows: &Rows, first: usize, row: usize, factor: f32) {
        let rank = rows.rank;
        let mut acc = [[s.splat(0.0); 2]; Q];
        let tile = self.words.as_ptr().cast::<f16>();
        let q = rows.queries.values[first * rank..][..Q * rank].as_ptr();
        for i in 0..rank {
            // SAFETY: `i < rank <= RANK_MAX`, and the caller's promise.
            unsafe {
                let p = tile.add(i * TILE_ROWS + row);
                let values = [s.load_f16(p), s.load_f16(p.add(S::LANES))];
                for k in 0..Q {
                    let q = s.splat(*q.add(k * rank + i));
                    acc[k][0] = s.fma(values[0], q, acc[k][0]);
                    acc[k][1] = s.fma(values[1], q, acc[k][1]);
                }
            }
        }
        let factor = s.splat(factor);
        for k in 0..Q {
            for j in 0..2 {
                // SAFETY: `k < QUERY_TILE`, and the caller's promise.
                unsafe {
                    let p = self.scores.as_mut_ptr().add(k * TILE_ROWS + row + j * S::LANES);
                    s.store(p, s.mul(acc[k][j], factor));
                }
            }
        }
    }

    /// # Safety
    /// As [`Tile::score_f16`].
    #[inline(always)]
    unsafe fn score_i8<S: Simd, const Q: usize>(&mut self, s: S, rows: &Rows, first: usize, row: usize, factor: f32) {
        let stride = words(rows.rank);
        let mut acc = [[s.splat_i(0); 2]; Q];
        let q = rows.queries.words[first * stride..][..Q * stride].as_ptr();
        for i in 0..rows.rank.div_ceil(4) {
            // SAFETY: `i` is inside the rank, and the caller's promise.
            unsafe {
                let p = self.words.as_ptr().cast::<u32>().add(i * TILE_ROWS + row);
                let values = [s.load_i(p), s.load_i(p.add(S::LANES))];
                for k in 0..Q {
                    let q = s.splat_i(*q.add(k * stride + i));
                    acc[k][0] = s.dot4(acc[k][0], values[0], q);
                    acc[k][1] = s.dot4(acc[k][1], values[1], q);
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.finish::<S, Q>(s, rows, first, row, factor, S::ROW_BIAS, acc) };
    }

    /// # Safety
    /// As [`Tile::score_f16`].
    #[inline(always)]
    unsafe fn score_i4<S: Simd, const Q: usize>(&mut self, s: S, rows: &Rows, first: usize, row: usize, factor: f32) {
        let stride = words(rows.rank);
        let mut acc = [[s.splat_i(0); 2]; Q];
        let low = s.splat_i(0x0f0f_0f0f);
        let q = rows.queries.words[first * stride..][..Q * stride].as_ptr();
        for i in 0..rows.rank.div_ceil(8) {
            // SAFETY: `i` is inside the rank, a query has two words per chunk of eight, and the caller's promise.
            unsafe {
                let p = self.words.as_ptr().cast::<u32>().add(i * TILE_ROWS + row);
                let packed = [s.load_i(p), s.load_i(p.add(S::LANES))];
                let first_half = [s.and_i(packed[0], low), s.and_i(packed[1], low)];
                let second_half = [s.and_i(s.shift_right_4(packed[0]), low), s.and_i(s.shift_right_4(packed[1]), low)];
                for k in 0..Q {
                    let a = s.splat_i(*q.add(k * stride + 2 * i));
                    let b = s.splat_i(*q.add(k * stride + 2 * i + 1));
                    for j in 0..2 {
                        acc[k][j] = s.dot4_nibbles(acc[k][j], first_half[j], a);
                        acc[k][j] = s.dot4_nibbles(acc[k][j], second_half[j], b);
                    }
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.finish::<S, Q>(s, rows, first, row, factor, NIBBLE_BIAS, acc) };
    }

    /// Takes the bias out of integer sums and multiplies with the scales.
    ///
    /// # Safety
    /// As [`Tile::score_f16`].
    #[inline(always)]
    unsafe fn finish<S: Simd, const Q: usize>(
        &mut self,
        s: S,
        rows: &Rows,
        first: usize,
        row: usize,
        factor: f32,
        bias: i32,
        acc: [[S::I; 2]; Q],
    ) {
        for j in 0..2 {
            let row = row + j * S::LANES;
            // SAFETY: the caller's promise.
            let row_scale = unsafe { s.load_f16(self.scales.as_ptr().add(row)) };
            for k in 0..Q {
                let bias = s.splat_i((bias * rows.queries.sums[first + k]) as u32);
                let scale = s.mul(row_scale, s.splat(rows.queries.scales[first + k] * factor));
                let score = s.mul(s.to_f32(s.sub_i(acc[k][j], bias)), scale);
                // SAFETY: `k < QUERY_TILE`, and the caller's promise.
                unsafe { s.store(self.scores.as_mut_ptr().add(k * TILE_ROWS + row), score) };
            }
        }
    }
}

/// The last bytes of an i8 row as a word.
fn byte_tail(rest: &[u8]) -> u32 {
    let mut word = [0; 4];
    word[..rest.len()].copy_from_slice(rest);
    u32::from_le_bytes(word)
}

/// The last, shorter chunk of an i4 row in the order of the others.
fn nibble_tail(rank: usize, rest: &[u8]) -> u32 {
    let mut word = 0;
    for i in 0..rank % 8 {
        word |= u32::from(nibble_of(rest, i)) << (8 * (i % 4) + 4 * (i / 4));
    }
    word
}
