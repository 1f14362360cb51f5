//! What a caller can get wrong, with what was expected and what was found.

/// Errors of operations whose inputs come from a file or a configuration.
///
/// Buffers that the engine sizes itself are asserted instead: a wrong length there is a bug of the caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A row of a quantised matrix must be whole blocks.
    #[error("{dtype} weights need a row length that is a multiple of {block_len}, found {cols}")]
    RowNotWholeBlocks {
        /// Name of the weight type.
        dtype: &'static str,
        /// Values in one block.
        block_len: usize,
        /// Row length found.
        cols: usize,
    },
    /// The bytes given do not hold exactly `rows x cols` weights.
    #[error("{dtype} weights of {rows} x {cols} take {expected} bytes, found {found}")]
    WeightBytes {
        /// Name of the weight type.
        dtype: &'static str,
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// Bytes the shape needs.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// `rows x cols` does not fit in the address space.
    #[error("{dtype} weights of {rows} x {cols} exceed the address space")]
    WeightTooLarge {
        /// Name of the weight type.
        dtype: &'static str,
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
    },
}
