//! Dot products of weight rows with activations: the vector trait, its four implementations and the choice between them.

pub(crate) mod float;
pub(crate) mod k_quant;
pub(crate) mod quant32;
pub(crate) mod row;
pub(crate) mod scalar;

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;

use crate::Isa;

/// Most pieces in a vector of any instruction set.
pub(crate) const GROUP_MAX: usize = 4;
/// Weights that share a scale of the quantised activations.
pub(crate) const BLOCK: usize = 32;
/// Bytes of a piece: the unit in which blocks are spread over vector lanes.
pub(crate) const PIECE: usize = 16;

/// What the weight kernels need of an instruction set.
///
/// A byte vector is `GROUP` pieces of 16 bytes, and each piece belongs to another block of 32 weights. An integer or float vector has
/// four lanes for each piece, so a block's scale multiplies four neighbouring lanes and no horizontal sum is needed until the end
/// of a row. A value of the type proves that the machine has the instructions.
///
/// Methods are safe where they only compute; those that read or write memory name what they touch.
pub(crate) trait Simd: Copy {
    /// Pieces in a byte vector: blocks that one step works on.
    const GROUP: usize;
    /// Lanes of a float vector.
    const WIDTH: usize = 4 * Self::GROUP;
    /// `GROUP` pieces of 16 bytes.
    type Bytes: Copy;
    /// `WIDTH` i32.
    type Ints: Copy;
    /// `WIDTH` f32.
    type Floats: Copy;
    /// `GROUP` pairs of f32.
    type Pairs: Copy;
    /// Eight f32, one for each sub-block of a K-quant block.
    type Oct: Copy;

    fn zero(self) -> Self::Floats;
    /// Reads `WIDTH` f32 at `p`.
    unsafe fn load(self, p: *const f32) -> Self::Floats;
    /// Writes `WIDTH` f32 at `p`.
    unsafe fn store(self, p: *mut f32, v: Self::Floats);
    /// Reads `WIDTH` f16 at `p`.
    unsafe fn load_f16(self, p: *const u8) -> Self::Floats;
    /// Reads `WIDTH` bf16 at `p`.
    unsafe fn load_bf16(self, p: *const u8) -> Self::Floats;
    /// Reads `WIDTH` f32 of any alignment at `p`.
    unsafe fn load_f32_bytes(self, p: *const u8) -> Self::Floats;
    /// `a b + c`
    fn fma(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn sum(self, v: Self::Floats) -> f32;
    /// One f16 from its bits.
    fn half(self, bits: u16) -> f32;

    fn splat_bytes(self, v: u8) -> Self::Bytes;
    /// Reads `16 GROUP` bytes at `p`.
    unsafe fn load_bytes(self, p: *const i8) -> Self::Bytes;
    /// Piece `i` is the 16 bytes at `p + at[i]`; reads the first `GROUP` of them.
    unsafe fn gather(self, p: *const u8, at: [usize; GROUP_MAX]) -> Self::Bytes;
    /// Low and high nibble of each byte.
    fn nibbles(self, v: Self::Bytes) -> [Self::Bytes; 2];
    /// Piece `i` is the 16 bits at `p + at[i]`, each as a byte of 0 or 16.
    unsafe fn gather_bits(self, p: *const u8, at: [usize; GROUP_MAX]) -> Self::Bytes;
    /// Each byte of piece `i` shifted right by `by[i]` and masked with `mask`, which has no bit above `7 - by[i]`.
    fn shift_mask(self, v: Self::Bytes, by: [u8; GROUP_MAX], mask: u8) -> Self::Bytes;
    /// Each byte, at most 15, shifted left by 4.
    fn shift_left_4(self, v: Self::Bytes) -> Self::Bytes;
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;

    /// Products of unsigned bytes up to 63 with signed bytes from -127 to 127, four neighbours summed.
    fn dot(self, u: Self::Bytes, x: Self::Bytes) -> Self::Ints;
    /// As [`Simd::dot`], over two vectors.
    fn dot2(self, u: [Self::Bytes; 2], x: [Self::Bytes; 2]) -> Self::Ints;
    /// Products of signed bytes with signed bytes from -127 to 127, four neighbours of each vector summed; `bias` is
    /// [`Simd::signed_bias`] of the same `x`, computed once for all the rows that meet it.
    fn dot2_signed(self, w: [Self::Bytes; 2], x: [Self::Bytes; 2], bias: Self::Ints) -> Self::Ints;
    fn signed_bias(self, x: [Self::Bytes; 2]) -> Self::Ints;
    fn zero_ints(self) -> Self::Ints;
    fn sub_ints(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn add_ints(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn mul_ints(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn to_floats(self, v: Self::Ints) -> Self::Floats;
    /// The four lanes of piece `i` are the signed byte `at[i]` of the 16 bytes at `p`.
    unsafe fn spread_scales(self, p: *const u8, at: [u8; GROUP_MAX]) -> Self::Ints;

    fn zero_pairs(self) -> Self::Pairs;
    /// Reads `GROUP` pairs of f32 at `p`.
    unsafe fn load_pairs(self, p: *const f32) -> Self::Pairs;
    /// Pair `i` is the two f16 at `p + at[i]`.
    unsafe fn gather_half_pairs(self, p: *const u8, at: [usize; GROUP_MAX]) -> Self::Pairs;
    fn mul_pairs(self, a: Self::Pairs, b: Self::Pairs) -> Self::Pairs;
    fn add_pairs(self, a: Self::Pairs, b: Self::Pairs) -> Self::Pairs;
    /// The four lanes of piece `i` are the first of pair `i`.
    fn spread_first(self, v: Self::Pairs) -> Self::Floats;
    /// Sum of the second values of the pairs.
    fn sum_second(self, v: Self::Pairs) -> f32;

    fn zero_oct(self) -> Self::Oct;
    /// Reads eight f32 at `p`.
    unsafe fn load_oct(self, p: *const f32) -> Self::Oct;
    fn oct_from_bytes(self, v: [u8; 8]) -> Self::Oct;
    fn scale_oct(self, v: Self::Oct, by: f32) -> Self::Oct;
    fn mul_oct(self, a: Self::Oct, b: Self::Oct) -> Self::Oct;
    /// `a b + c`
    fn fma_oct(self, a: Self::Oct, b: Self::Oct, c: Self::Oct) -> Self::Oct;
    fn sum_oct(self, v: Self::Oct) -> f32;
    /// The four lanes of piece `i` are value `GROUP step + i`.
    fn spread_oct(self, v: Self::Oct, step: usize) -> Self::Floats;

    /// Asks for the cache line at `p`, which need not be readable.
    fn prefetch(self, p: *const u8);
}

/// An algorithm that runs on any instruction set.
pub(crate) trait Kernel {
    /// Must be `#[inline(always)]`, so that it is compiled with the instructions of `S`.
    fn run<S: Simd>(self, simd: S);
}

/// Runs `kernel` on `isa`, or on the scalar twin if the machine does not have it.
#[inline]
pub(crate) fn dispatch(isa: Isa, kernel: impl Kernel) {
    match isa.usable() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `usable` returned it, so the machine has the features of `Isa::Avx2`.
        Isa::Avx2 => unsafe { avx2::run(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `usable` returned it, so the machine has the features of `Isa::Avx512`.
        Isa::Avx512 => unsafe { avx512::run(kernel) },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => neon::run(kernel),
        _ => kernel.run(scalar::Scalar),
    }
}
