//! What the kernel tests share: data, guarded buffers, and one test per instruction set.
#![allow(dead_code, unused_macros, unused_imports, reason = "each test binary uses a part")]

use half::f16;

/// A small generator of numbers that look random; the same on every machine.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// In (-1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.next() as f64 / (1u64 << 52) as f64 - 1.0) as f32
    }

    pub fn f32s(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }

    pub fn f16s(&mut self, len: usize) -> Vec<f16> {
        (0..len).map(|_| f16::from_f32(self.unit())).collect()
    }
}

/// A buffer at a chosen misalignment with guard zones on both sides.
pub struct Guarded<T> {
    all: Vec<T>,
    start: usize,
    len: usize,
    guard: T,
}

const GUARD_LEN: usize = 64;

impl<T: Copy + PartialEq + std::fmt::Debug> Guarded<T> {
    /// `len` elements that begin `offset` elements behind an arbitrary alignment.
    pub fn new(len: usize, offset: usize, guard: T) -> Guarded<T> {
        let start = GUARD_LEN + offset;
        Guarded { all: vec![guard; start + len + GUARD_LEN], start, len, guard }
    }

    pub fn with(values: &[T], offset: usize, guard: T) -> Guarded<T> {
        let mut buffer = Self::new(values.len(), offset, guard);
        buffer.get_mut().copy_from_slice(values);
        buffer
    }

    pub fn get(&self) -> &[T] {
        &self.all[self.start..][..self.len]
    }

    pub fn get_mut(&mut self) -> &mut [T] {
        &mut self.all[self.start..][..self.len]
    }

    /// The elements, after a look at the guard zones.
    pub fn checked(&self) -> &[T] {
        let (before, after) = (&self.all[..self.start], &self.all[self.start + self.len..]);
        assert!(before.iter().chain(after).all(|x| *x == self.guard), "a guard zone was written");
        self.get()
    }
}

/// Fails unless each element is within the tolerance of its index, NaN where NaN is expected.
pub fn assert_close(found: &[f32], expected: &[f64], tolerance: impl Fn(usize) -> f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let found = f64::from(found);
        let same = found == expected || found.is_nan() && expected.is_nan();
        let close = (found - expected).abs() <= tolerance(i);
        assert!(same || close, "{what}: element {i}: expected {expected}, found {found}, tolerance {}", tolerance(i));
    }
}

/// Sum of products in f64, and the sum of their magnitudes, which bounds the rounding errors.
pub fn dot(a: impl IntoIterator<Item = f64>, b: impl IntoIterator<Item = f64>) -> (f64, f64) {
    a.into_iter().zip(b).fold((0.0, 0.0), |(sum, magnitude), (a, b)| (sum + a * b, magnitude + (a * b).abs()))
}

pub const EPSILON: f64 = f32::EPSILON as f64;

/// Stamps each function as one test per instruction set. One that the machine lacks says so.
macro_rules! for_each_isa {
    ($($name:ident),* $(,)?) => {
        for_each_isa!(@isa scalar Scalar $($name)*);
        for_each_isa!(@isa avx2 Avx2 $($name)*);
        for_each_isa!(@isa avx512 Avx512 $($name)*);
        for_each_isa!(@isa neon Neon $($name)*);
    };
    (@isa $module:ident $isa:ident $($name:ident)*) => {
        mod $module {
            use forebay_kernels::Isa;
            $(
                #[test]
                fn $name() {
                    if Isa::$isa.is_available() {
                        super::$name(Isa::$isa);
                    } else {
                        eprintln!("skipped: this machine has no {}", Isa::$isa.name());
                    }
                }
            )*
        }
    };
}
pub(crate) use for_each_isa;
