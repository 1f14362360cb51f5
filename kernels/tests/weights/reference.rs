//! What the kernels are compared with: weights decoded one at a time in f64 from the description of the formats, and memory that
//! faults when a kernel reads past its end.

use forebay_kernels::{Weight, WeightType};
use half::{bf16, f16};
use proptest::prelude::Rng;
use proptest::test_runner::TestRng;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// A weight and the magnitude of the terms that it is the sum of, from which a bound of rounding errors follows.
#[derive(Clone, Copy)]
pub struct Value {
    pub value: f64,
    pub magnitude: f64,
}

fn half_at(block: &[u8], at: usize) -> f64 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f64()
}

fn scaled(scale: f64, code: i32, min: f64) -> Value {
    let product = scale * f64::from(code);
    Value { value: product + min, magnitude: product.abs() + min.abs() }
}

/// Scale and minimum number `sub` of the twelve packed bytes of Q4_K and Q5_K.
fn k_scale(packed: &[u8], sub: usize) -> (i32, i32) {
    let byte = |at: usize| i32::from(packed[at]);
    if sub < 4 {
        (byte(sub) & 63, byte(sub + 4) & 63)
    } else {
        let (scale_top, min_top) = (byte(sub - 4) >> 6, byte(sub) >> 6);
        ((byte(sub + 4) & 15) + 16 * scale_top, (byte(sub + 4) >> 4) + 16 * min_top)
    }
}

/// Weight `i` of a block.
fn decode(dtype: WeightType, block: &[u8], i: usize) -> Value {
    let byte = |at: usize| i32::from(block[at]);
    let nibble = |at: usize, high: bool| if high { byte(at) >> 4 } else { byte(at) & 15 };
    let bit = |at: usize, index: usize| (byte(at + index / 8) >> (index % 8)) & 1;
    match dtype {
        WeightType::F32 => scaled(f32::from_le_bytes([block[0], block[1], block[2], block[3]]).into(), 1, 0.0),
        WeightType::F16 => scaled(half_at(block, 0), 1, 0.0),
        WeightType::BF16 => scaled(bf16::from_le_bytes([block[0], block[1]]).to_f64(), 1, 0.0),
        WeightType::Q4_0 => scaled(half_at(block, 0), nibble(2 + i % 16, i >= 16) - 8, 0.0),
        WeightType::Q4_1 => scaled(half_at(block, 0), nibble(4 + i % 16, i >= 16), half_at(block, 2)),
        WeightType::Q5_0 => scaled(half_at(block, 0), nibble(6 + i % 16, i >= 16) + 16 * bit(2, i) - 16, 0.0),
        WeightType::Q5_1 => scaled(half_at(block, 0), nibble(8 + i % 16, i >= 16) + 16 * bit(4, i), half_at(block, 2)),
        WeightType::Q8_0 => scaled(half_at(block, 0), i32::from(block[2 + i] as i8), 0.0),
        WeightType::Q4K | WeightType::Q5K => {
            let fifth = dtype == WeightType::Q5K;
            let (sub, at) = (i / 32, i % 32);
            let (scale, min) = k_scale(&block[4..16], sub);
            let low = nibble(if fifth { 48 } else { 16 } + 32 * (sub / 2) + at, sub % 2 == 1);
            let high = if fifth { (byte(16 + at) >> sub) & 1 } else { 0 };
            scaled(half_at(block, 0) * f64::from(scale), low + 16 * high, -half_at(block, 2) * f64::from(min))
        }
        WeightType::Q6K => {
            let (half, within) = (i / 128, i % 128);
            let (quarter, at) = (within / 32, within % 32);
            let low = nibble(64 * half + 32 * (quarter % 2) + at, quarter >= 2);
            let high = (byte(128 + 32 * half + at) >> (2 * quarter)) & 3;
            let scale = f64::from(block[192 + i / 16] as i8);
            scaled(half_at(block, 208) * scale, low + 16 * high - 32, 0.0)
        }
    }
}

/// All weights of a matrix, `[rows][cols]`.
pub fn decode_all(weight: &Weight) -> Vec<Value> {
    let dtype = weight.dtype();
    let blocks = weight.data().chunks_exact(dtype.block_bytes());
    blocks.flat_map(|block| (0..dtype.block_len()).map(|i| decode(dtype, block, i)).collect::<Vec<_>>()).collect()
}

/// A float from -1 to 1.
pub fn uniform(rng: &mut TestRng) -> f32 {
    (rng.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0
}

/// Random blocks: any codes, scales from -1 to 1.
pub fn random_weights(dtype: WeightType, rows: usize, cols: usize, rng: &mut TestRng) -> Vec<u8> {
    let mut data = vec![0; rows * dtype.row_bytes(cols).unwrap()];
    rng.fill_bytes(&mut data);
    for block in data.chunks_exact_mut(dtype.block_bytes()) {
        let mut put_half = |at: usize| block[at..at + 2].copy_from_slice(&f16::from_f32(uniform(rng)).to_le_bytes());
        match dtype {
            WeightType::F32 => block.copy_from_slice(&uniform(rng).to_le_bytes()),
            WeightType::BF16 => block.copy_from_slice(&bf16::from_f32(uniform(rng)).to_le_bytes()),
            WeightType::F16 | WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => put_half(0),
            WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K => {
                put_half(0);
                put_half(2);
            }
            WeightType::Q6K => put_half(208),
        }
    }
    data
}

pub fn random_floats(count: usize, rng: &mut TestRng) -> Vec<f32> {
    (0..count).map(|_| uniform(rng)).collect()
}

/// Bytes that end where an unreadable page begins.
pub struct Guarded {
    mapping: *mut u8,
    mapped: usize,
    len: usize,
    readable: usize,
}

impl Guarded {
    /// A copy of `bytes` whose end is `slack` bytes before the unreadable page; the start takes every alignment as `slack` varies.
    pub fn new(bytes: &[u8], slack: usize) -> Guarded {
        const PAGE: usize = 64 << 10;
        let readable = (bytes.len() + slack).next_multiple_of(PAGE);
        let mapped = readable + PAGE;
        // SAFETY: a new anonymous mapping of `mapped` bytes; the last `PAGE` bytes of it, page-aligned, lose their access.
        let mapping = unsafe {
            let at =
                mmap_anonymous(std::ptr::null_mut(), mapped, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            let at = at.unwrap().cast::<u8>();
            mprotect(at.add(readable).cast(), PAGE, MprotectFlags::empty()).unwrap();
            at.add(readable - slack - bytes.len()).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            at
        };
        Guarded { mapping, mapped, len: bytes.len(), readable: readable - slack }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `new` wrote `len` bytes that end at `readable`.
        unsafe { std::slice::from_raw_parts(self.mapping.add(self.readable - self.len), self.len) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, unmapped once; no slice of it outlives `self`.
        unsafe { munmap(self.mapping.cast(), self.mapped).unwrap() };
    }
}

/// An output between two zones that must stay as they are.
pub struct Fenced {
    values: Vec<f32>,
    len: usize,
}

const FENCE: usize = 64;
const UNTOUCHED: f32 = 12_345.678;

impl Fenced {
    pub fn new(len: usize) -> Fenced {
        Fenced { values: vec![UNTOUCHED; len + 2 * FENCE], len }
    }

    pub fn values(&mut self) -> &mut [f32] {
        &mut self.values[FENCE..FENCE + self.len]
    }

    /// The values, after a look at the fences.
    pub fn finish(self) -> Vec<f32> {
        let (before, rest) = self.values.split_at(FENCE);
        let (values, after) = rest.split_at(self.len);
        assert!(
            before.iter().chain(after).all(|value| value.to_bits() == UNTOUCHED.to_bits()),
            "a write beside the output"
        );
        values.to_vec()
    }
}
