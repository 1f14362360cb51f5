//! What can be wrong with the bytes.

use super::parse::{ALIGNMENT_MAX, DIMENSIONS_MAX, NAME_BYTES_MAX};

/// What is wrong with the bytes of a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum GgufError {
    #[error("not a GGUF file: starts with bytes {found:02x?}, expected \"GGUF\"")]
    Magic { found: Vec<u8> },
    #[error("GGUF version {found} is not supported, expected 2 or 3")]
    Version { found: u32 },
    #[error("big-endian GGUF file (version {version} in the other byte order), expected little-endian")]
    BigEndian { version: u32 },
    #[error("truncated: {what} at byte {offset} needs {needed} bytes, the file has {available} left")]
    Truncated { what: &'static str, offset: u64, needed: u64, available: u64 },
    #[error("{what} is {found}, expected at most {limit}")]
    Count { what: &'static str, found: u64, limit: u64 },
    #[error("{what} at byte {offset} is not UTF-8, expected text")]
    Utf8 { what: &'static str, offset: u64 },
    #[error("metadata key {key:?} stands there twice, expected once")]
    DuplicateKey { key: String },
    #[error("metadata key {key:?} has value type {found}, expected 0 to 12")]
    ValueType { key: String, found: u32 },
    #[error("metadata key {key:?} nests arrays deeper than {limit}, expected at most {limit} levels")]
    ArrayDepth { key: String, limit: usize },
    #[error("general.alignment is {found}, expected a power of two from 8 to {ALIGNMENT_MAX}")]
    Alignment { found: String },
    #[error("tensor {name:?} stands in the directory twice, expected once")]
    DuplicateTensor { name: String },
    #[error("tensor name at byte {offset} is {found} bytes long, expected 1 to {NAME_BYTES_MAX}")]
    NameLength { offset: u64, found: u64 },
    #[error("tensor {name:?} has {found} dimensions, expected 1 to {DIMENSIONS_MAX}")]
    DimensionCount { name: String, found: u32 },
    #[error("tensor {name:?} has dimensions {found:?}, expected each above 0 and a size that fits in the file")]
    Dimensions { name: String, found: Vec<u64> },
    #[error(
        "tensor {name:?} has type {found}, expected one of F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K"
    )]
    TensorType { name: String, found: String },
    #[error("tensor {name:?} has rows of {found} values, expected a multiple of {block} for {dtype}")]
    RowLength { name: String, found: u64, block: u64, dtype: &'static str },
    #[error("tensor {name:?} starts at offset {found}, expected a multiple of the alignment {alignment}")]
    Misaligned { name: String, found: u64, alignment: u64 },
    #[error(
        "tensor {name:?} needs {needed} bytes at byte {offset}, the file ends at byte {file_bytes}: truncated or damaged"
    )]
    BeyondEnd { name: String, offset: u64, needed: u64, file_bytes: u64 },
    #[error("tensors {first:?} and {second:?} overlap, expected each to have its own bytes")]
    Overlap { first: String, second: String },
}
